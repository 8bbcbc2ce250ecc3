"""The pages' numbers compared with numpy's counts over all pairs; names that look like HTML; bounds; refusals."""

import json
import re
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dml_core.errors import ConfigError, EvaluationError, StoreError
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.reports import finished_runs, run_evaluation, run_pages
from tasks.reports.finished_runs import choose
from tasks.reports.run_pages import write_look
from tasks.runs.embeddings import load_embeddings
from tasks.runs.identity import step_identities
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.specs import Params
from tests.tasks.reports.conftest import Element, quiet, read
from tests.tasks.reports.made_up_runs import HOSTILE, SEEDS, TRIPLET, make_project

Made = tuple[Project, Params]


class Brute:
    """Neighbours of a run's embeddings by numpy in float64, without the evaluator's code."""

    def __init__(self, made: Made, variant: str, seed: int, query_role: str = "test", gallery_role: str = "test") -> None:
        project, params = made
        record = read_dataset(project, "photos")
        spec = comparison_runs(params, "photos", [variant], [seed])[0]
        folder = Path(project.store) / "embed" / step_identities(spec, record)["embed"]
        (queries, self.query_labels), (gallery, self.labels) = load_embeddings(folder, query_role), load_embeddings(folder, gallery_role)
        units = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries.astype(float), gallery.astype(float))]
        similarities = np.round(units[0] @ units[1].T, 9)
        if query_role == gallery_role:
            np.fill_diagonal(similarities, -9)
        right = self.query_labels[:, None] == self.labels
        index = np.broadcast_to(np.arange(len(self.labels)), right.shape)
        self.order: NDArray[Any] = np.lexsort((index, right, -similarities))[:, : len(self.labels) - (query_role == gallery_role)]
        self.similarities = np.take_along_axis(similarities, self.order, axis=1)
        self.first_rank = 1 + np.take_along_axis(right, self.order, axis=1).argmax(axis=1)
        self.found = self.first_rank == 1
        self.pairs = Counter(zip(self.query_labels[~self.found], self.labels[self.order[~self.found, 0]], strict=True))


def script(path: Path) -> Any:
    """Return the JSON of a script that assigns it to a name."""
    return json.loads(path.read_text().partition(" = ")[2].removesuffix(";\n"))


def page(path: Path) -> Element:
    return read(path.read_text())


def numbers(text: str) -> list[int]:
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", text)]


def counted_pairs(html: Element) -> Counter[tuple[str, str]]:
    """Return (class, mistaken for) -> number of queries from the page's table."""
    rows = [[cell.text for cell in row.all("td")] for row in html.all("table", "counts")[0].all("tr")]
    return Counter({(row[0], row[1]): int(row[2]) for row in rows if row})


@pytest.mark.parametrize("variant", ["softmax", "proxy_nca", TRIPLET])
def test_counts_of_a_run_s_page_are_those_of_numpy(made: Made, comparison: Path, variant: str) -> None:
    brute = Brute(made, variant, 0)
    names = script(comparison / "items.js")["classes"]
    number = list(made[1].comparison.variants).index(variant)
    [path] = comparison.glob(f"run-{number:02}-*.html")
    html = page(path)
    assert [int(strong.text) for strong in html.all("p", "lead")[0].all("strong")] == [brute.found.sum(), (~brute.found).sum()]
    assert counted_pairs(html) == {(names[one], names[other]): count for (one, other), count in brute.pairs.items()}
    assert sum(counted_pairs(html).values()) == (~brute.found).sum()
    cards = html.all("article", "card")
    assert [numbers(card.all("p")[0].text)[0] for card in cards] == sorted(brute.pairs.values(), reverse=True)[: run_evaluation.NUM_PAIRS]
    ranks = [numbers(row.all("h3")[0].text.partition("rank")[2])[0] for row in html.all("article", "row")]
    assert ranks == sorted(brute.first_rank, reverse=True)[: run_evaluation.NUM_WORST]
    for row in html.all("article", "row"):
        shots = row.all("figure", "shot")
        query = numbers(shots[0].all("span", "pic")[0].attributes["aria-label"] or "")[-1]
        shown = [numbers(one.all("span", "pic")[0].attributes["aria-label"] or "")[-1] for one in shots[1:]]
        assert shown == brute.order[query, : run_evaluation.NUM_NEIGHBOURS].tolist()
        marks = ["right" in (one.attributes["class"] or "") for one in shots[1:]]
        assert marks == (brute.labels[brute.order[query, : run_evaluation.NUM_NEIGHBOURS]] == brute.query_labels[query]).tolist()
        assert [("✓" in one.text, "✗" in one.text) for one in shots[1:]] == [(mark, not mark) for mark in marks]


def test_neighbours_of_every_image_are_those_of_numpy(made: Made, single: Path) -> None:
    brute = Brute(made, "softmax", 2)
    items, run = script(single / "items.js"), script(single / "run.js")
    assert items["queries"] == list(range(len(brute.labels)))
    assert items["labels"] == brute.labels.tolist()
    assert np.array(run["neighbours"]).reshape(-1, run["width"]).tolist() == brute.order[:, : run["width"]].tolist()
    shown = np.array(run["similarities"]).reshape(-1, run["width"])
    assert np.abs(shown - 1000 * brute.similarities[:, : run["width"]]).max() <= 0.51
    assert run["firstRanks"] == brute.first_rank.tolist()
    assert sorted(run["map"]["queries"]) == items["queries"]
    assert len(run["map"]["x"]) == len(run["map"]["y"]) == len(items["queries"])


def test_a_comparison_counts_queries_correct_in_one_run_and_wrong_in_another(made: Made, comparison: Path) -> None:
    html = page(comparison / "index.html")
    variants = list(made[1].comparison.variants)
    brute = {variant: Brute(made, variant, 0) for variant in variants}
    table = html.all("section")[-1].all("table", "pairs")[0]
    heads = [head.text for head in table.all("thead")[0].all("th")]
    assert sorted(heads) == sorted(variants)
    for row in table.all("tbody")[0].all("tr"):
        for other, cell in zip(heads, row.all("td"), strict=True):
            one = row.all("th")[0].text
            assert cell.text == ("-" if one == other else str((brute[one].found & ~brute[other].found).sum()))
    for run in script(comparison / "comparison.js"):
        assert run["firstRanks"] == brute[run["name"]].first_rank.tolist()
        assert run["neighbours"] == brute[run["name"]].order[:, 0].tolist()
        assert (comparison / run["page"]).is_file()


def test_a_comparison_has_means_over_seeds_and_paired_differences(made: Made, comparison: Path) -> None:
    html = page(comparison / "index.html")
    recalls = {variant: [100 * Brute(made, variant, seed).found.mean() for seed in SEEDS] for variant in made[1].comparison.variants}
    best = max(recalls, key=lambda variant: float(np.mean(recalls[variant])))
    rows = html.all("section")[1].all("tbody")[0].all("tr")
    assert rows[0].all("th")[0].text == best
    for row in rows:
        variant = row.all("th")[0].text
        assert row.all("td")[0].text == "3"
        assert row.all("td")[1].text.startswith(f"{np.mean(recalls[variant]):.1f} ± ")
        assert row.all("a")[0].attributes["href"] in {path.name for path in comparison.glob("run-*.html")}
    difference = np.array(recalls["proxy_nca"]) - recalls["softmax"]
    width = 6.205346816570857 * difference.std(ddof=1) / 3**0.5  # Student's t for three seeds, at 0.05 over two comparisons
    [said] = [row.all("td")[-1].text for row in rows if row.all("th")[0].text == "proxy_nca"]
    assert said == f"{difference.mean():+.1f} ± {width:.1f}"
    of_pairs = width * 7.648892318 / 6.205346816570857  # at 0.05 over three pairs
    assert f"{difference.mean():+.1f} ± {of_pairs:.1f}" in html.all("section", "differences")[0].text


def test_a_run_s_scores_are_the_evaluator_s_with_intervals_around_them(made: Made, single: Path) -> None:
    project, params = made
    spec = comparison_runs(params, "photos", ["softmax"], [2])[0]
    scores = Path(project.store) / "evaluate" / step_identities(spec, read_dataset(project, "photos"))["evaluate"] / "metrics.json"
    recall = 100 * json.loads(scores.read_text())["recall@1"]
    brute = Brute(made, "softmax", 2)
    assert recall == pytest.approx(100 * brute.found.mean())
    table = page(single / "index.html").all("table", "numbers")[0]
    rows = {row.all("th")[0].text: [cell.text for cell in row.all("td")] for row in table.all("tbody")[0].all("tr")}
    assert list(rows) == ["R@1", "R@2", "R@4", "R@8", "MAP@R", "R-precision", "NMI"]
    value, over_queries, over_classes, over_seeds = rows["R@1"]
    assert value == f"{recall:.1f}"
    for interval in (over_queries, over_classes):
        low, high = map(float, interval.split(" to "))
        assert low < recall < high
    low, high = map(float, over_queries.split(" to "))
    error = 100 * (brute.found.mean() * (1 - brute.found.mean()) / len(brute.found)) ** 0.5
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)  # approximately that of independent queries
    assert over_seeds.startswith(f"{np.mean([100 * Brute(made, 'softmax', seed).found.mean() for seed in SEEDS]):.1f} ± ")
    assert rows["NMI"][1:3] == ["-", "-"]


def test_separate_queries_are_searched_in_the_gallery(tmp_path: Path) -> None:
    made = make_project(tmp_path / "shop", ("query", "gallery"))
    folder = write_look(made[0], choose(*made, "photos/softmax"), None, tmp_path / "pages", "tsne", quiet).parent
    brute = Brute(made, "softmax", 0, "query", "gallery")
    items, run = script(folder / "items.js"), script(folder / "run.js")
    num_gallery = len(brute.labels)
    assert items["queries"] == list(range(num_gallery, 2 * num_gallery))  # after the gallery in the album
    assert np.array(run["neighbours"]).reshape(-1, run["width"]).tolist() == brute.order[:, : run["width"]].tolist()
    html = page(folder / "index.html")
    assert [int(strong.text) for strong in html.all("p", "lead")[0].all("strong")] == [brute.found.sum(), (~brute.found).sum()]
    assert [path for path, place in zip(items["paths"], range(2 * num_gallery), strict=True) if place in items["queries"]] == [
        path for path in items["paths"] if path.startswith("query")
    ]


def test_older_code_behind_a_mean_is_named_also_if_the_shown_seed_is_current(made: Made, tmp_path: Path) -> None:
    project, params = made
    selected = choose(project, params, "photos")
    older = tuple(
        replace(run, is_current=(run.spec.variant, run.spec.seed) not in {("softmax", 1), ("softmax", 2)}) for run in selected.runs
    )
    for runs, says in ((older, "softmax (seeds 1, 2)"), (tuple(replace(run, is_current=False) for run in older), "all of them")):
        folder = tmp_path / says[:3]
        write_look(project, replace(selected, runs=runs), "softmax", folder, "pca", quiet)
        assert [note.text for note in page(folder / "index.html").all("p", "note")][:1] == [f"Made by other code: {says}."]
    heads = [head.text for head in page(tmp_path / "sof" / "run-00-softmax.html").all("th")]
    assert "over 3 seeds, 2 made by other code" in heads
    assert not [note for note in page(tmp_path / "sof" / "run-00-softmax.html").all("p", "note") if "Made by" in note.text]


def test_names_are_text_and_never_markup(comparison: Path) -> None:
    for path in comparison.glob("*.html"):
        html = page(path)  # fails unless every element is closed
        assert not [image for image in html.all("img") if not (image.attributes.get("src") or "").startswith("data:image/")]
        assert not html.all("b", "triplet")
        assert "<img src=x" not in path.read_text()
    assert any(HOSTILE in cell.text for path in comparison.glob("run-*.html") for cell in page(path).all("td"))
    assert all(script(path) is not None for path in comparison.glob("*.js") if path.name != "plotly.min.js")


def test_pages_load_only_files_of_their_folder(comparison: Path) -> None:
    there = {path.name for path in comparison.iterdir()}
    for path in comparison.glob("*.html"):
        text = path.read_text()
        named = {str(one.attributes["src"]) for one in page(path).all("script") if "src" in one.attributes}
        named |= {str(one.attributes["data-library"]) for one in page(path).all("div") if "data-library" in one.attributes}
        named |= set(re.findall(r"background-image:url\(([^)]*)\)", text))
        named |= {str(one.attributes["href"]).partition("#")[0] for one in page(path).all("a")} - {""}
        assert named <= there
        assert "Content-Security-Policy" in text
        assert "JavaScript" in page(path).all("noscript")[-1].text, "what it lacks without scripts"
    assert {path.suffix for path in comparison.iterdir()} == {".html", ".js", ".webp"}


def test_a_page_without_a_map_has_no_library_for_it(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_evaluation, "MAX_POINTS", 4)  # too few for a map
    index = write_look(made[0], choose(*made, "photos/softmax"), None, tmp_path / "pages", "pca", quiet)
    assert "data-library" not in index.read_text()
    assert not (index.parent / "plotly.min.js").exists()


def test_queries_of_a_large_dataset_are_sampled_and_counts_cover_all(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_pages, "MAX_PICTURES", 100)
    folder = write_look(made[0], choose(*made, "photos"), None, tmp_path / "pages", "pca", quiet).parent
    items = script(folder / "items.js")
    assert len(items["queries"]) == 100 // (1 + 8 * 3)
    assert len(items["labels"]) <= 100
    for number, variant in enumerate(made[1].comparison.variants):
        brute = Brute(made, variant, 0)
        run = script(next(folder.glob(f"run-{number:02}-*.js")))
        numbers_of = items["numbers"]
        for query, place in enumerate(items["queries"]):
            shown = run["neighbours"][query * run["width"] : (query + 1) * run["width"]]
            assert [numbers_of[neighbour] for neighbour in shown] == brute.order[numbers_of[place], : run["width"]].tolist()
        html = page(next(folder.glob(f"run-{number:02}-*.html")))
        assert [int(strong.text) for strong in html.all("p", "lead")[0].all("strong")] == [brute.found.sum(), (~brute.found).sum()]
        assert "4 of 108 queries can be selected here" in html.text


def test_a_comparison_keeps_the_embeddings_of_none_of_its_runs(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a large dataset have a hundred megabytes each; only the sides that all pages share are kept."""
    opened: list[weakref.ref[NDArray[Any]]] = []
    alive: list[int] = []

    def open_sides(*given: Any) -> Any:
        alive.append(sum(embeddings() is not None for embeddings in opened))
        sides = finished_runs.open_sides(*given)
        opened.append(weakref.ref(sides[1].embeddings))
        return sides

    monkeypatch.setattr(run_pages, "open_sides", open_sides)
    write_look(made[0], choose(*made, "photos"), None, tmp_path / "pages", "pca", quiet)
    assert len(alive) > 3
    assert max(alive) == 1


def test_runs_that_are_scored_on_different_classes_have_no_common_pages(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants that hold out different classes, scored on these: the first one's pictures would be shown for all."""
    opened: list[Any] = []

    def open_sides(*given: Any) -> Any:
        queries, gallery = finished_runs.open_sides(*given)
        opened.append(gallery)
        others: Any = SimpleNamespace(class_names=["another class"])
        return (queries, gallery if len(opened) < 3 else replace(gallery, dataset=others))

    monkeypatch.setattr(run_pages, "open_sides", open_sides)
    with pytest.raises(EvaluationError, match="scored on other classes than the first run; look at each run alone"):
        write_look(made[0], choose(*made, "photos"), None, tmp_path / "pages", "pca", quiet)


def test_writing_again_replaces_the_pages_and_nothing_else(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, params = made
    folder = tmp_path / "pages"
    write_look(project, choose(project, params, "photos"), None, folder, "pca", quiet)
    write_look(project, choose(project, params, "photos/softmax"), None, folder, "pca", quiet)
    assert sorted(path.name for path in folder.iterdir()) == [
        "images-000.webp",
        "index.html",
        "items.js",
        "plotly.min.js",
        "run-000.webp",
        "run.js",
    ]
    assert list(tmp_path.iterdir()) == [folder]
    (folder / "notes.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"contains other files \(notes\.txt\)"):
        write_look(project, choose(project, params, "photos/softmax"), None, folder, "pca", quiet)
    (folder / "notes.txt").unlink()
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(folder)
    write_look(project, choose(project, params, "photos/softmax"), None, Path(), "pca", quiet)
    assert (folder / "index.html").is_file()
    (tmp_path / "own" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="contains other files"):
        write_look(project, choose(project, params, "photos/softmax"), None, tmp_path / "own", "pca", quiet)
    assert (tmp_path / "own" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("photos", "dml look photos --seed 1 --set 'comparison.protocol.optimiser={name: sgd}' --map pca"),
        ("photos/softmax/1", "dml look photos/softmax/1 --set 'comparison.protocol.optimiser={name: sgd}' --map pca"),
    ],
)
def test_the_command_at_the_end_writes_the_same_pages_again(made: Made, tmp_path: Path, named: str, says: str) -> None:
    selected = choose(*made, named, 1 if named == "photos" else None)
    setting = ("comparison.protocol.optimiser={name: sgd}",)
    runs = tuple(replace(run, spec=run.spec.model_copy(update={"overrides": setting})) for run in selected.runs)
    write_look(made[0], replace(selected, runs=runs), None, tmp_path / "look", "pca", quiet)
    [footer] = page(tmp_path / "look" / "index.html").all("footer")
    assert footer.all("code")[-1].text == says


def test_scores_that_do_not_match_the_embeddings_are_refused(tmp_path: Path) -> None:
    made = make_project(tmp_path / "project")
    spec = comparison_runs(made[1], "photos", ["softmax"], [0])[0]
    path = Path(made[0].store) / "evaluate" / step_identities(spec, read_dataset(made[0], "photos"))["evaluate"] / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"recall@1": 0.999}))
    with pytest.raises(StoreError, match=r"recall@1 is 0\.999000, but 0\.\d+ by the embeddings"):
        write_look(made[0], choose(*made, "photos/softmax"), None, tmp_path / "pages", "pca", quiet)
    assert list(tmp_path.iterdir()) == [made[0].root]
