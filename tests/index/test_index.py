"""Indexes: results compared with numpy's sort, changes, rejected input, and the state after an interruption."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from dml_core.errors import ConfigError, EvaluationError, StoreError
from dml_core.evaluation.config import Metric
from dml_core.index import choosing, layout, writing
from dml_core.index.choosing import choose, outgrown
from dml_core.index.index import Index
from dml_core.index.items import Item, as_table
from dml_core.index.layout import APPROXIMATE, ITEMS, VECTORS, commit
from dml_core.index.writing import Batch, add_items, build_index, remove_items
from tests.forked import forked

MODEL = "0" * 32
KINDS = ["ivf", "pq", "hnsw"]


def rows(num_items: int = 1200, num_dimensions: int = 16, seed: int = 0) -> NDArray[np.float32]:
    """Return vectors in forty clusters, not of unit length."""
    generator = np.random.default_rng(seed)
    centres = generator.standard_normal((40, num_dimensions))
    return (centres[generator.integers(0, 40, num_items)] + 0.5 * generator.standard_normal((num_items, num_dimensions))).astype(np.float32)


def batches(embeddings: NDArray[Any], first: int = 0, size: int = 500) -> list[Batch]:
    items = [Item(f"{first + number}.png", f"class {number % 7}", bytes([number % 256])) for number in range(len(embeddings))]
    return [Batch(embeddings[start : start + size], items[start : start + size]) for start in range(0, len(items), size)]


def built(folder: Path, embeddings: NDArray[Any], approximate: str | None = None, metric: Metric = "cosine") -> Index:
    return build_index(folder, batches(embeddings), MODEL, metric, approximate, "own/good")


def by_hand(embeddings: NDArray[Any], queries: NDArray[Any], metric: Metric) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return every score in float64, sorted, and the order of the items."""
    items, asked = embeddings.astype(np.float64), queries.astype(np.float64)
    if metric == "cosine":
        items /= np.linalg.norm(items, axis=1, keepdims=True)
        asked /= np.linalg.norm(asked, axis=1, keepdims=True)
        scores = asked @ items.T
    else:
        scores = -np.linalg.norm(asked[:, None] - items, axis=2)
    order = np.argsort(-scores, axis=1)
    return np.take_along_axis(scores, order, axis=1), order


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_an_exact_index_finds_what_sorting_all_scores_finds(tmp_path: Path, metric: Metric) -> None:
    embeddings, queries = rows(), rows(50, seed=1)
    built(tmp_path / "index", embeddings, metric=metric)
    index = Index.open(tmp_path / "index")
    scores, positions = index.search(queries, 10)
    expected, order = by_hand(embeddings, queries, metric)
    np.testing.assert_array_equal(positions, order[:, :10])
    np.testing.assert_allclose(scores, expected[:, :10], atol=2e-6)
    assert (index.num_items, index.num_dimensions, index.metric, index.kind) == (1200, 16, metric, "exact")


def test_an_image_has_no_distance_to_its_own_copy_however_many_are_looked_for(tmp_path: Path) -> None:
    """FAISS uses matrix products if queries times dimensions exceed 128,000; coordinates far from zero lose digits in them."""
    embeddings = 5 + rows(80, 2048)
    index = built(tmp_path / "index", embeddings, metric="euclidean")
    scores, positions = index.search(embeddings, 2)
    assert (scores[:, 0] == 0).all()
    np.testing.assert_array_equal(positions[:, 0], np.arange(80))
    for number in range(3):
        np.testing.assert_allclose(index.search(embeddings[number : number + 1], 2)[0][0], scores[number], rtol=1e-5)


@pytest.mark.parametrize("kind", [None, "ivf", "hnsw"])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_copies_are_ordered_by_position_whatever_else_is_asked(tmp_path: Path, kind: str | None, metric: Metric) -> None:
    """A server searches for all waiting requests at once, with the largest k: the others change no answer."""
    embeddings = np.tile(rows(150), (4, 1))
    index = built(tmp_path / "index", embeddings, kind, metric)
    scores, positions = index.search(embeddings[:64], 9)
    np.testing.assert_array_equal(positions[:, :4], np.arange(64)[:, None] + np.arange(0, 600, 150))
    for k in (4, 3, 1) if kind is None else (4,):
        for number in range(3):
            fewer, nearest = index.search(embeddings[number : number + 1], k)
            np.testing.assert_array_equal(nearest[0], positions[number, :k])
            np.testing.assert_array_equal(fewer[0], scores[number, :k])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_an_approximate_index_gives_true_scores_in_order_and_says_what_it_misses(tmp_path: Path, kind: str, metric: Metric) -> None:
    embeddings, queries = rows(), rows(200, seed=1)
    index = built(tmp_path / "index", embeddings, kind, metric)
    scores, positions = index.search(queries, 10)
    expected, order = by_hand(embeddings, queries, metric)
    all_scores = np.take_along_axis(expected, np.argsort(order, axis=1), axis=1)
    np.testing.assert_allclose(scores, np.take_along_axis(all_scores, positions, axis=1), atol=1e-5)
    assert (np.diff(scores, axis=1) <= 0).all()
    assert all(len(set(found)) == 10 for found in positions.tolist())
    found = index.info.found
    assert found is not None
    assert found.num_queries == 500
    recall = np.mean([len(set(mine) & set(exact)) / 10 for mine, exact in zip(positions.tolist(), order[:, :10].tolist(), strict=True)])
    # Queries that are not in the index have about the recall that was measured with its own items.
    assert found.recalls[10] == pytest.approx(recall, abs=0.05)
    assert found.recalls[1] > 0.7


def test_what_is_missed_is_measured_and_not_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index searches one of many lists: its recall equals the one counted by hand for the same items."""
    settings = writing.choose("ivf", 1200, 16)
    assert settings.approximation is not None
    poor = settings._replace(approximation=settings.approximation.model_copy(update={"num_lists": 18, "num_probes": 1}))
    monkeypatch.setattr(writing, "choose", lambda *_: poor)
    index = built(tmp_path / "index", rows(), "ivf")
    found = index.info.found
    assert found is not None
    sample = np.sort(np.random.default_rng(found.seed).permutation(1200)[:500])
    _, order = by_hand(rows(), rows()[sample], "cosine")
    alone = faiss.read_index(str(index.info.path(index.folder, APPROXIMATE)))
    for k, recall in found.recalls.items():
        _, positions = alone.search(np.asarray(index.vectors_ND[sample]), k + 1)
        hits = [
            len({p for p in mine if p != own} & set([p for p in exact if p != own][:k])) / k
            for own, mine, exact in zip(sample.tolist(), positions.tolist(), order.tolist(), strict=True)
        ]
        assert recall == pytest.approx(np.mean(hits), abs=1e-9)
    assert found.recalls[100] < found.recalls[10] < 0.95
    assert str(found).startswith(f"finds {100 * found.recalls[1]:.1f} % @1, ")
    assert Index.open(tmp_path / "index").info.found == found


def nearly_collapsed() -> NDArray[np.float32]:
    """Return vectors whose mean cosine is 0.9999998, so that most cosines are equal in float32."""
    return (1 + 5e-4 * np.random.default_rng(0).standard_normal((3000, 16))).astype(np.float32)


def nearest_of_stored(index: Index, positions: NDArray[np.int64], k: int) -> list[list[int]]:
    """Return the k nearest others of items, by float64 distances between the stored vectors."""
    stored = np.asarray(index.vectors_ND, dtype=np.float64)
    orders = [np.argsort(np.square(stored - stored[position]).sum(axis=1), kind="stable").tolist() for position in positions]
    return [[other for other in order if other != own][:k] for order, own in zip(orders, positions, strict=True)]


def test_a_nearly_collapsed_network_s_neighbours_are_found(tmp_path: Path) -> None:
    """By inner products 2 % of the nearest ten were found."""
    index = built(tmp_path / "index", nearly_collapsed())
    for asked in (np.arange(1), np.arange(40)):
        found = index.search(index.vectors_ND[asked], 11)[1]
        np.testing.assert_array_equal(found[:, 0], asked)
        assert found[:, 1:].tolist() == nearest_of_stored(index, asked, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_an_approximate_index_claims_no_more_than_it_finds_of_a_nearly_collapsed_network(tmp_path: Path, kind: str) -> None:
    """It claimed a recall of 1.00 where it was 0.48, as all cosines were equal; and an image came behind others at no distance to it."""
    index = built(tmp_path / "index", nearly_collapsed(), kind)
    assert index.info.found is not None
    sample = np.sort(np.random.default_rng(index.info.found.seed).permutation(3000)[: index.info.found.num_queries])
    distances, found = index.approximately(np.asarray(index.vectors_ND[sample]), 11)
    mine = [[other for other in row if other != own][:10] for row, own in zip(found.tolist(), sample, strict=True)]
    recall = np.mean([len(set(some) & set(exact)) / 10 for some, exact in zip(mine, nearest_of_stored(index, sample, 10), strict=True)])
    assert index.info.found.recalls[10] == pytest.approx(recall, abs=0.01)
    is_found = (distances == 0).any(axis=1)
    assert is_found.any()
    np.testing.assert_array_equal(index.search(index.vectors_ND[sample[is_found]], 11)[1][:, 0], sample[is_found])


def test_k_results_even_where_the_lists_have_fewer(tmp_path: Path) -> None:
    embeddings = rows(3000)
    index = built(tmp_path / "index", embeddings, "ivf")
    scores, positions = index.search(embeddings[:3], 2990)
    assert (positions >= 0).all()
    assert np.isfinite(scores).all()
    assert index.search(embeddings[:3], 10**6)[1].shape == (3, 3000)


def test_items_keep_their_place(tmp_path: Path) -> None:
    index = built(tmp_path / "index", rows())
    assert index.item(0) == Item("0.png", "class 0", b"\x00")
    assert index.item(1199) == Item("1199.png", "class 2", bytes([1199 % 256]))
    assert [index.item(position).name for position in (499, 500, 999, 1000)] == ["499.png", "500.png", "999.png", "1000.png"]
    with pytest.raises(IndexError):
        index.item(1200)
    bare = build_index(tmp_path / "bare", [Batch(rows(2), [Item("a"), Item("b")])], MODEL)
    assert bare.item(1) == Item("b", None, None)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_added_and_removed_is_as_built_at_once(tmp_path: Path, kind: str | None) -> None:
    embeddings, queries = rows(), rows(100, seed=1)
    built(tmp_path / "index", embeddings[:900], kind)
    added = add_items(tmp_path / "index", batches(embeddings[900:], first=900), MODEL)
    assert added.num_items == 1200
    everything = built(tmp_path / "whole", embeddings, kind)
    np.testing.assert_array_equal(added.vectors_ND, everything.vectors_ND)
    assert agreement(added, everything, queries) > (0.999 if kind is None else 0.9)
    gone = [f"{number}.png" for number in range(0, 1200, 3)]
    kept = np.arange(1200) % 3 != 0
    fewer = remove_items(tmp_path / "index", gone)
    assert fewer.names() == [f"{number}.png" for number in range(1200) if number % 3]
    rebuilt = build_index(
        tmp_path / "fewer", [Batch(embeddings[kept], [everything.item(p) for p in np.flatnonzero(kept)])], MODEL, "cosine", kind
    )
    np.testing.assert_array_equal(fewer.vectors_ND, rebuilt.vectors_ND)
    assert agreement(fewer, rebuilt, queries) > (0.999 if kind is None else 0.9)
    assert (fewer.info.found is None) == (kind is None)
    assert len(list((tmp_path / "index").iterdir())) == (4 if kind is None else 5)  # no older files remain


def agreement(left: Index, right: Index, queries: NDArray[Any]) -> float:
    found = [index.search(queries, 10)[1].tolist() for index in (left, right)]
    names = [[[index.item(p).name for p in row] for row in rows] for index, rows in zip((left, right), found, strict=True)]
    return float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(*names, strict=True)]))


def test_an_open_index_goes_on_while_it_is_changed(tmp_path: Path) -> None:
    embeddings = rows()
    index = built(tmp_path / "index", embeddings, "ivf")
    before = index.search(embeddings[:5], 10)
    remove_items(tmp_path / "index", ["0.png", "7.png"])
    np.testing.assert_array_equal(index.search(embeddings[:5], 10)[1], before[1])
    assert index.item(0).name == "0.png"
    assert Index.open(tmp_path / "index").item(0).name == "1.png"


# ---------------------------------------------------------------- rejected input


def test_another_model_is_refused(tmp_path: Path) -> None:
    built(tmp_path / "index", rows())
    said = r"^.*index: of model 0{32} \(own/good\); embeddings of model f{32} do not compare with it; use its own model, .*$"
    with pytest.raises(ConfigError, match=said):
        add_items(tmp_path / "index", batches(rows()), "f" * 32)
    Index.open(tmp_path / "index").check_model(MODEL)
    assert Index.open(tmp_path / "index").num_items == 1200


@pytest.mark.parametrize(
    ("queries", "k", "said"),
    [
        (np.ones((1, 7), np.float32), 3, "of 16 dimensions, and the queries have 7"),
        (np.zeros((1, 16), np.float32), 3, "zero embeddings"),
        (np.full((1, 16), np.nan, np.float32), 3, "NaN"),
        (np.ones((1, 16), np.float32), 0, "ask for 1 or more"),
        (np.ones(16, np.float32), 3, "shape"),
    ],
)
def test_queries_that_cannot_be_searched(tmp_path: Path, queries: NDArray[Any], k: int, said: str) -> None:
    index = built(tmp_path / "index", rows(50))
    with pytest.raises((ConfigError, EvaluationError), match=said):
        index.search(queries, k)


@pytest.mark.parametrize(
    ("embeddings", "names", "said"),
    [
        (rows(2), ["a", "a"], "two images are named a"),
        (rows(2), ["a"], "2 embeddings for 1 images"),
        (np.zeros((2, 16), np.float32), ["a", "b"], "zero embeddings"),
        (rows(0), [], "nothing to index"),
    ],
)
def test_what_cannot_be_indexed_leaves_nothing(tmp_path: Path, embeddings: NDArray[Any], names: list[str], said: str) -> None:
    with pytest.raises((ConfigError, EvaluationError), match=said):
        build_index(tmp_path / "index", [Batch(embeddings, [Item(name) for name in names])], MODEL)
    assert [path.name for path in (tmp_path / "index").iterdir()] == [".lock"]
    built(tmp_path / "index", rows(20))  # another attempt succeeds


def test_a_place_that_is_taken(tmp_path: Path) -> None:
    built(tmp_path / "index", rows(20))
    with pytest.raises(ConfigError, match="has an index already"):
        built(tmp_path / "index", rows(30))
    assert build_index(tmp_path / "index", batches(rows(30)), MODEL, replace=True).num_items == 30
    (tmp_path / "index" / ".nfs00000000012345670000001a").touch()  # on NFS, a former version's file that a service has open
    assert build_index(tmp_path / "index", batches(rows(20)), MODEL, replace=True).num_items == 20
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"not empty \(thesis.tex\)"):
        build_index(tmp_path / "other", batches(rows(30)), MODEL, replace=True)
    (tmp_path / "index" / "thesis.tex").touch()  # an index folder must not contain other files, which --force would replace
    with pytest.raises(ConfigError, match=r"not empty \(thesis.tex\)"):
        build_index(tmp_path / "index", batches(rows(30)), MODEL, replace=True)
    with pytest.raises(StoreError, match="cannot be written"):
        built(tmp_path / "other" / "thesis.tex" / "index", rows(3))


@pytest.mark.parametrize("name", ["vectors-backup.f32", "items-mine.arrow", "approximate-0.faiss", "index.json.bak", ".index.json.swp"])
def test_a_file_with_a_similar_name_is_not_removed(tmp_path: Path, name: str) -> None:
    """A new index is refused in its folder; a change of an existing index keeps it."""
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"not empty \({re.escape(name)}\)"):
        built(folder, rows(20))
    assert (folder / name).read_text() == "mine"
    (folder / name).unlink()
    built(folder, rows(20))
    (folder / name).write_text("mine")
    remove_items(folder, ["0.png"])
    assert (folder / name).read_text() == "mine"


def test_an_error_of_the_callers_batches_is_not_one_of_the_folder(tmp_path: Path) -> None:
    """An image or a server that cannot be read; the index stays as it was."""

    def failing() -> Iterator[Batch]:
        yield from batches(rows(3), first=900)
        raise ConnectionError("the server of the images is gone")

    with pytest.raises(ConnectionError, match="the server of the images is gone"):
        build_index(tmp_path / "index", failing(), MODEL)
    assert [path.name for path in (tmp_path / "index").iterdir()] == [".lock"]
    built(tmp_path / "index", rows(20))
    with pytest.raises(ConnectionError):
        add_items(tmp_path / "index", failing(), MODEL)
    assert Index.open(tmp_path / "index").num_items == 20


def test_changes_that_are_refused_change_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    built(folder, rows(20))
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ConfigError, match=r"has no item named 20\.png, 21\.png, 22\.png and 1 more; nothing was removed"):
        remove_items(folder, ["0.png", *(f"{number}.png" for number in range(20, 24))])
    with pytest.raises(ConfigError, match="nothing would be left"):
        remove_items(folder, [f"{number}.png" for number in range(20)])
    with pytest.raises(ConfigError, match=r"has an item named 0\.png already"):
        add_items(folder, batches(rows(3)), MODEL)
    with pytest.raises(ConfigError, match="among some of 16"):
        add_items(folder, [Batch(rows(2, 8), [Item("a"), Item("b")])], MODEL)
    with pytest.raises(ConfigError, match="nothing to add"):
        add_items(folder, [], MODEL)
    assert sorted(path.name for path in folder.iterdir()) == before
    for change in (lambda: remove_items(tmp_path / "none", ["a"]), lambda: add_items(tmp_path / "none", [], MODEL)):
        with pytest.raises(ConfigError, match="no index there; build one"):
            change()
    assert not (tmp_path / "none").exists()


def test_too_few_to_compress(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="from 256 items at least, and there are 50"):
        built(tmp_path / "index", rows(50), "pq")


def test_the_kind_goes_by_size() -> None:
    assert choose(None, 10**9, 512) == ("exact", None, None)
    kinds = {size: choose("auto", *size) for size in [(1000, 64), (1_000_000, 64), (1_000_000, 512), (20_000_000, 512)]}
    assert [chosen.kind for chosen in kinds.values()] == ["exact", "exact", "ivf", "pq"]
    assert all(chosen.reason for chosen in kinds.values())
    assert choose("hnsw", 10, 64).reason is None
    approximation = choose("ivf", 1_000_000, 512).approximation
    assert approximation is not None
    assert (approximation.num_lists, approximation.num_probes) == (1024, 64)
    for num_dimensions in (1, 2, 10, 64, 97, 300, 512):
        approximation = choose("pq", 10_000, num_dimensions).approximation
        assert approximation is not None
        assert num_dimensions % approximation.num_code_bytes == 0
    with pytest.raises(ConfigError, match="expected one of ivf, pq, hnsw, auto"):
        choose("annoy", 10, 64)


def test_an_index_of_a_single_item_has_no_measured_recall(tmp_path: Path) -> None:
    assert built(tmp_path / "index", rows(3), "hnsw").info.found is not None
    assert remove_items(tmp_path / "index", ["0.png", "1.png"]).info.found is None


def test_the_reason_for_a_kind_is_of_the_present_number_of_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "index"
    assert (build_index(folder, batches(rows(10)), MODEL, approximate="auto").info.reason or "").startswith(
        "10 items of 16 dimensions are "
    )
    more = add_items(folder, batches(rows(20), first=10), MODEL)
    assert (more.info.reason or "").startswith("30 items of 16 dimensions are ")
    monkeypatch.setattr(choosing, "EXACT_BYTES", 4 * 16 * 40)
    for number in (1, 2):
        grown = add_items(folder, batches(rows(20, seed=number), first=100 * number), MODEL)
        assert grown.kind == "exact"
        said = f"for another number of items; build it again with --force as ivf: {30 + 20 * number} items of 16 dimensions are "
        assert (grown.info.reason or "").startswith(said)
    fewer = remove_items(folder, [name for name in grown.names() if int(name.removesuffix(".png")) >= 100])
    assert (fewer.info.reason or "").startswith("30 items of 16 dimensions are ")
    built(tmp_path / "requested", rows(30))
    assert remove_items(tmp_path / "requested", ["0.png"]).info.reason is None


def test_what_an_index_has_outgrown_is_reported_whoever_chose_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later index gets about the square root of its number of items as lists, and one that grew keeps those that it had."""
    index = built(tmp_path / "ivf", rows(100), "ivf")
    (line,) = outgrown(index.info)
    assert line.startswith("--approximate auto would choose exact for them: 100 items of 16 dimensions are ")
    monkeypatch.setattr(choosing, "EXACT_BYTES", 4 * 16 * 60)
    assert outgrown(index.info) == []
    grown = add_items(tmp_path / "ivf", batches(rows(900, seed=1), first=100), MODEL)
    lists = built(tmp_path / "anew", rows(1000), "ivf").info.approximation
    assert lists is not None
    assert grown.info.approximation is not None
    assert outgrown(grown.info) == [
        f"it has {grown.info.approximation.num_lists} lists; built again with --force it would have {lists.num_lists}"
    ]
    exact = built(tmp_path / "exact", rows(50))
    assert outgrown(exact.info) == []
    (line,) = outgrown(add_items(tmp_path / "exact", batches(rows(50, seed=1), first=50), MODEL).info)
    assert line.startswith("--approximate auto would choose ivf for them: 100 items of 16 dimensions are ")


# ---------------------------------------------------------------- interruptions and concurrency


def change_and_die(moment: str, change: str, folder: Path) -> None:
    """Kill this process in the middle of a change."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    where: dict[str, tuple[Any, str]] = {"writing": (writing, "_finish"), "before": (layout.Path, "replace"), "after": (layout, "_remove")}
    setattr(*where[moment], die)
    if change == "add":
        add_items(folder, [Batch(rows(50, seed=3), [Item(f"new {number}") for number in range(50)])], MODEL)
    else:
        remove_items(folder, [f"{number}.png" for number in range(100)])


@pytest.mark.parametrize("change", ["add", "remove"])
@pytest.mark.parametrize("moment", ["writing", "before", "after"])
def test_killed_in_the_middle_it_is_the_old_index_or_the_new(tmp_path: Path, moment: str, change: str) -> None:
    folder = tmp_path / "index"
    old = built(folder, rows(300), "ivf")
    queries = rows(20, seed=1)
    before = old.search(queries, 10)
    assert forked(change_and_die, moment, change, folder) == -signal.SIGKILL
    index = Index.open(folder)
    if moment == "after":
        assert index.num_items == (350 if change == "add" else 200)
    else:
        assert index.info == old.info
        np.testing.assert_array_equal(index.search(queries, 10)[1], before[1])
    # The next change removes the files of the killed one.
    names = [index.item(0).name]
    after = remove_items(folder, names)
    assert after.num_items == index.num_items - 1
    assert len(list(folder.iterdir())) == 5


@pytest.mark.parametrize("moment", ["_to_disk", "_remove"])
def test_an_error_while_the_change_is_made_true_leaves_a_whole_index(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before `index.json` is replaced leaves the old index without new files; after it, the new index with all of its files."""
    folder = tmp_path / "index"
    built(folder, rows(30))
    stopped = [True]

    def stop(*_: object) -> None:
        if stopped.pop() if stopped else False:
            raise KeyboardInterrupt

    monkeypatch.setattr(layout, moment, stop)
    with pytest.raises(KeyboardInterrupt):
        remove_items(folder, ["0.png"])
    monkeypatch.undo()
    index = Index.open(folder)
    assert index.num_items == (30 if moment == "_to_disk" else 29)
    assert {path for path in folder.iterdir() if index.info.version not in path.name} >= {folder / ".lock", folder / "index.json"}
    assert remove_items(folder, ["5.png"]).num_items == index.num_items - 1
    assert len(list(folder.iterdir())) == 4


def test_two_that_add_at_once_both_have_added(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    built(folder, rows(300))
    threads = [threading.Thread(target=add_items, args=(folder, batches(rows(50, seed=n), first=1000 * n), MODEL)) for n in (1, 2, 3)]
    sizes: list[int] = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sizes.append(Index.open(folder).num_items)  # concurrent readers always find a complete index
        time.sleep(0.001)
    assert Index.open(folder).num_items == 450
    assert set(sizes) <= {300, 350, 400, 450}


def test_a_change_that_waits_for_another_one_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "index"
    built(folder, rows(30))
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[Batch]:
        begun.set()
        go_on.wait(60)
        yield from batches(rows(5, seed=1), first=1000)

    adding = threading.Thread(target=add_items, args=(folder, slow(), MODEL))
    adding.start()
    assert begun.wait(60)
    assert not caplog.messages
    removing = threading.Thread(target=remove_items, args=(folder, ["1000.png"]))  # which the other one adds
    removing.start()
    said = f"{folder}: another process changes this index; this one waits for it"
    while said not in caplog.messages:
        assert removing.is_alive()
        time.sleep(0.01)
    go_on.set()
    for thread in (adding, removing):
        thread.join()
    assert (caplog.messages, Index.open(folder).num_items) == ([said], 34)


def test_opening_holds_no_vectors_in_memory(tmp_path: Path) -> None:
    """300 MB of vectors in a sparse file are verified and searched without being held in memory."""
    folder = tmp_path / "index"
    info = build_index(folder, [Batch(rows(2, 512), [Item("a"), Item("b")])], MODEL).info
    count = 150_000
    with info.path(folder, VECTORS).open("r+b") as file:
        file.truncate(4 * 512 * count)
    items = as_table([Item(f"{number}") for number in range(count)])
    with pa.ipc.new_file(str(info.path(folder, ITEMS)), items.schema) as writer:
        writer.write_table(items)
    commit(folder, info.model_copy(update={"num_items": count}))
    before = anonymous_bytes()
    index = Index.open(folder)
    assert index.item(count - 1).name == f"{count - 1}"
    assert index.search(np.asarray(index.vectors_ND[:1]), 2)[1][0, 0] == 0
    assert anonymous_bytes() - before < 60e6


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def test_exact_search_is_faisss_own(tmp_path: Path) -> None:
    """The same rows in the same order as IndexFlatIP over them, with its scores."""
    embeddings = rows()
    index = built(tmp_path / "index", embeddings)
    peer = faiss.IndexFlatIP(16)
    peer.add(np.asarray(index.vectors_ND))
    queries = np.asarray(index.vectors_ND[:30])
    scores, positions = index.search(queries, 5)
    expected, order = peer.search(queries, 5)
    np.testing.assert_array_equal(positions, order)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
