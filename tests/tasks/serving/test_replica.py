"""A replica's batch without Ray: images of several requests, and one with a zero embedding."""

import asyncio
import io
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.exceptions import HTTPException

from dml_core.index.index import Index
from dml_core.index.items import Item
from dml_core.index.writing import Batch, build_index
from dml_core.network_description import WEIGHTS_FILE, read_description, write_description
from dml_core.trained import load_model, save_network
from tasks.serving import limits
from tasks.serving.replica import Answer, Replica, _Query
from tasks.serving.replicas import Replicas
from tests.conftest import MODEL
from tests.tasks.serving.conftest import IDENTITY, Made


def test_a_batch_of_several_requests_gives_each_its_own(made: Made) -> None:
    """The requests are embeddings, and searches with different k."""
    model, wanted = made.load(), (0, 3, 30, 0, 1)
    replica = Replica(model, Index.open(made.index), 1, 32)
    results = replica._compute([_Query(model.view(path), k) for path, k in zip(made.files, wanted, strict=False)])
    expected = model.embed(made.files[:5])
    positions = Index.open(made.index).search(expected, 30)[1]
    np.testing.assert_allclose([result.row for result in results], expected, rtol=0, atol=1e-5)
    assert [None if result.nearest is None else result.nearest[1].tolist() for result in results] == [
        positions[place, :k].tolist() if k else None for place, k in enumerate(wanted)
    ]
    assert [result.batch_size for result in results] == [5, None, None, None, None]


def test_what_comes_while_the_network_works_is_the_next_batch(made: Made) -> None:
    """No batch exceeds its limit, a single request is a batch of one, and a network failure is raised for its batch."""
    replica = Replica(made.load(), None, 2, 16)
    data = [path.read_bytes() for path in made.files]

    async def ask() -> tuple[list[Answer], Answer]:
        together = await asyncio.gather(*(replica.answer([one], 0, False) for one in data))
        return together, await replica.answer(data[:1], 0, False)

    together, alone = asyncio.run(ask())
    rows = np.concatenate([answer.embeddings for answer in together if answer.embeddings is not None])
    np.testing.assert_allclose(rows, made.load().embed(data), rtol=0, atol=1e-5)
    sizes = [size for answer in together for size in answer.batch_sizes]
    assert sum(sizes) == len(data)
    assert 1 < max(sizes) <= 16
    assert len(sizes) < len(data) / 2
    assert alone.batch_sizes == (1,)

    replica._model = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        asyncio.run(replica._in_a_batch(_Query(made.load().view(data[0]), 0)))


def test_as_many_neighbours_as_requested_among_copies_of_an_item(made: Made, tmp_path: Path) -> None:
    """The item itself may then be missing among its neighbours: each copy has the same cosine."""
    rows = np.repeat(np.eye(2, made.load().num_dimensions, dtype=np.float32), (5, 1), axis=0)
    items = [Item(f"{number}.png", None, None) for number in range(len(rows))]
    build_index(tmp_path / "index", [Batch(rows, items)], IDENTITY)
    replica = Replica(made.load(), Index.open(tmp_path / "index"), 1, 32)
    for position in range(5):
        (hits,) = asyncio.run(replica.neighbours(position, 3, False)).hits
        assert len({hit.position for hit in hits} - {position}) == 3
        assert {hit.position for hit in hits} <= set(range(5))


def test_an_image_without_a_direction_is_refused_where_it_is_searched_with(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.model, tmp_path / "model")
    weights = tmp_path / "model" / WEIGHTS_FILE
    torch.save({name: torch.zeros_like(value) for name, value in torch.load(weights).items()}, weights)
    write_description(weights.parent, read_description(weights.parent))
    replica = Replica(load_model(tmp_path / "model", "cpu"), Index.open(made.index), 1, 32)
    view = made.load().view(made.files[0])
    embedded, searched = replica._compute([_Query(view, 0), _Query(view, 3)])
    assert embedded.refused is None
    assert not embedded.row.any()
    assert searched.refused == "its embedding is zero and has no cosine similarity"


def test_images_of_abandoned_requests_are_not_computed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a service with too much to do would embed nothing but images whose clients have given up."""
    replica, computed, go_on = Replica(made.load(), None, 2, 1), [], threading.Event()
    compute = replica._compute

    def wait(queries: list[_Query]) -> object:
        computed.append(len(queries))
        go_on.wait(60)
        return compute(queries)

    monkeypatch.setattr(replica, "_compute", wait)
    data = [path.read_bytes() for path in made.files[:8]]

    async def ask() -> Answer:
        monkeypatch.setattr(limits, "ANSWER_SECONDS", 5)  # on a busy machine, the first image is decoded within
        with pytest.raises(HTTPException, match="no answer within"):
            await Replicas(replica).answer(data)
        monkeypatch.setattr(limits, "ANSWER_SECONDS", 60)
        go_on.set()
        return await Replicas(replica).answer(data[:1])

    np.testing.assert_allclose(asyncio.run(ask()).embeddings, made.load().embed(data[:1]), rtol=0, atol=1e-5)
    assert computed == [1, 1], "of the first request the image in progress, and the second request's"


def test_an_image_of_a_size_that_the_network_does_not_take_fails_no_other(made: Made, tmp_path: Path) -> None:
    """The network has no crop, so views keep the size of their image; one pixel is too few for its normalisation."""
    state = {f"model.{name}": value for name, value in torch.load(made.model / WEIGHTS_FILE).items()}
    save_network(tmp_path / "model", {"model": MODEL, "transform": {"scaling": "zero-one"}}, 4, state, IDENTITY)
    model = load_model(tmp_path / "model", "cpu")
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    replica = Replica(model, None, 1, 32)
    whole, tiny = replica._compute([_Query(model.view(made.files[0]), 0), _Query(model.view(file.getvalue()), 0)])
    np.testing.assert_allclose(whole.row, model.embed(made.files[0])[0], rtol=0, atol=1e-5)
    assert tiny.refused is not None
    assert tiny.refused.startswith("the network does not take its 1 x 1 pixels (")


def test_whether_an_image_needs_a_direction_is_decided_by_the_index(made: Made, tmp_path: Path) -> None:
    """An index keeps its metric when the network's is changed in params.yaml; both have the same identity."""
    weights = torch.load(made.model / WEIGHTS_FILE)
    state = {f"model.{name}": torch.zeros_like(value) for name, value in weights.items()}
    save_network(tmp_path / "model", {"model": MODEL, "transform": {"scaling": "zero-one"}}, 4, state, IDENTITY, metric="euclidean")
    model = load_model(tmp_path / "model", "cpu")
    replica = Replica(model, Index.open(made.index), 1, 32)
    assert replica._compute([_Query(model.view(made.files[0]), 3)])[0].refused == "its embedding is zero and has no cosine similarity"
