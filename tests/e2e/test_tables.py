"""A paper's table through the whole chain: run over seeds, protected, judged, shown, published as a page, its runs shared."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dml_core.config import merge, read_yaml
from dml_core.data.registry import materialise
from tests.conftest import ROOT
from tests.damage import contents
from tests.e2e.conftest import UNUSUAL, Project, make_project
from tests.e2e.disturbed import Disturbed, nobody_submits_work_without_the_token, nothing_listens_beyond_this_machine

pytestmark = pytest.mark.slow
TINY = {
    "model": {"backbone": {"name": "small_cnn", "width": 8, "weights": "none"}, "head": {"embedding_dim": 8}, "freeze_batchnorm": "none"},
    "sampler": {"batch_size": 8},
    "transform": {"train_resize": None, "test_resize": None, "crop": "padded", "padding": 2, "crop_size": 24, "scaling": "zero-one"},
    "num_epochs": 1,
}
TABLE: dict[str, Any] = {
    "title": "A table of the tests",
    "page": 1,
    "states": "Nothing.",
    "columns": [{"dataset": "cub200", "metrics": ["recall@1", "recall@2", "nmi"]}],
    "tolerance": {"value": 100, "reason": "everything is equal"},
    "rows": {
        "elsewhere": {"label": "Elsewhere", "kind": "quoted", "source": "somebody", "published": [1.5, None, 2.5]},
        "trained": {"label": "Trained", "kind": "own", "published": [50, None, 50], "variants": ["as_published"], "training": TINY},
        "untrained": {
            "label": "Untrained",
            "kind": "rerun",
            "published": [0.1, None, 99.9],
            "variants": ["as_published"],
            "training": TINY | {"num_epochs": 0},
            "tolerance": {"value": 0.2, "reason": "nothing is equal"},
        },
        "one-day": {"label": "One day", "kind": "own", "published": [3, 4, 5], "lacks": "a loss that nobody has written"},
    },
}
SEEDS = ("--seed", "0", "--seed", "1", "--seed", "2")

OWN = {
    "title": "A table of the project",
    "states": "Nothing.",
    "columns": [{"dataset": "synthetic", "metrics": ["recall@1", "csc_train"], "unit": "share"}],
    "measurements": {"training_separability": {}},
    "rows": {
        "untrained": {
            "label": "Untrained",
            "kind": "own",
            "published": [None, None],
            "variants": ["ours"],
            "training": TINY | {"num_epochs": 0},
        }
    },
}


def add_tables(project: Project, *names: str, num_epochs: int = 1) -> None:
    """Add a drawn CUB-200-2011 and paper tables of these names, all with the same rows, to a project."""
    trained = TABLE["rows"]["trained"] | {"training": TINY | {"num_epochs": num_epochs}}
    table = TABLE | {"rows": TABLE["rows"] | {"trained": trained}}
    raw = project.root / "data/raw/cub200"
    materialise("synthetic", {"num_classes": 8, "images_per_class": 5, "image_size": 24, "num_modes": 2}, raw)
    project.change(datasets={"cub200": {"reader": "cub200", "raw": "data/raw/cub200", "options": {"published_counts": False}}})
    for name in names:
        (project.root / f"flows/tables/softtriple/{name}.yaml").write_text(yaml.safe_dump(table))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a drawn CUB-200-2011, three paper tables with the same rows, and one table of the project.

    The last row of the first table fails. The project is an exported tree, without a git checkout, at a path with unusual characters.
    """
    made = make_project(tmp_path_factory.mktemp(UNUSUAL) / "project", ("untrained",))
    shutil.rmtree(made.root / ".git")
    made.change(scale={"num_workers": 1})  # a run that fails takes its workers with it
    add_tables(made, "table91", "table92", "table93", num_epochs=24)  # so that a test can stop the workers in between
    fails = TABLE["rows"]["trained"] | {"label": "Fails", "training": TINY | {"optimiser": {"name": "sgd", "learning_rate": 1e30}}}
    table91 = made.root / "flows/tables/softtriple/table91.yaml"
    table91.write_text(yaml.safe_dump(merge(read_yaml(table91), {"rows": {"fails": fails}})))
    (made.root / "flows/tables/project/tiny.yaml").write_text(yaml.safe_dump(OWN))
    return made


@pytest.fixture(scope="module")
def stopped(project: Project) -> Iterator[Disturbed]:
    """Run a row of a table with three seeds, and stop its worker while it trains."""
    run = Disturbed(project, project.root / "state", ("dml", "reproduce", "softtriple/table91", "--row", "trained", *SEEDS))
    run.freeze_in_the_middle()
    yield run
    run.process.terminate()  # unless it has ended
    run.process.communicate()


@pytest.fixture(scope="module")
def printed(stopped: Disturbed) -> str:
    """Let that run continue to its end, and return what it has printed."""
    return stopped.continues()


def cells(printed: str, beginning: str) -> list[str]:
    """Return the result cells of the row whose second cell starts with `beginning`."""
    rows = [[cell.strip() for cell in re.split("[|│]", line)[1:-1]] for line in printed.splitlines()]
    (found,) = [row for row in rows if len(row) == 5 and row[1].startswith(beginning)]
    return found[2:]


def page_of(project: Project, name: str) -> str:
    return (project.root / f"state/reports/tables/{name}.md").read_text()


def test_while_it_runs_nobody_else_reaches_it_nor_replaces_its_images(project: Project, stopped: Disturbed, tmp_path: Path) -> None:
    nothing_listens_beyond_this_machine(stopped)
    nobody_submits_work_without_the_token(stopped)
    one, other = sorted((project.root / "data/raw/cub200").rglob("*.jpg"))[:2]
    before, packed = one.read_bytes(), contents(project.root / "data/packed/cub200")
    one.write_bytes(other.read_bytes())
    refused = project.run("dml", "data", "prepare", "cub200", code=2, DML_STATE=str(tmp_path))  # as another flow's stage of DVC, elsewhere
    one.write_bytes(before)
    assert re.search(r"cub200: in use by process \d+, whose runs would be lost", refused), refused
    assert contents(project.root / "data/packed/cub200") == packed


def test_it_is_run_and_judged_and_shown_again_and_has_a_page(project: Project, printed: str) -> None:
    assert "does not answer" not in printed
    assert [path.name for path in project.root.parent.iterdir()] == ["project"], "nothing is written elsewhere"
    assert (project.root / "state/mlflow.db").is_file()
    assert (project.root / ".dvc/config").read_bytes() == (ROOT / ".dvc/config").read_bytes()
    recall_1, recall_2, nmi = cells(printed, "as_published, 3 seeds")
    assert re.fullmatch(r"\d+\.\d ± \d+\.\d (compatible|above|below), mean equal", recall_1)
    assert re.fullmatch(r"\d+\.\d ± \d+\.\d", recall_2), "the paper has no figure to compare with"
    assert nmi.endswith(", mean equal")
    assert "| One day | published, own | 3.0 | 4.0 | 5.0 |" in printed
    assert "not run: a loss that nobody has written" in printed
    assert page_of(project, "softtriple/table91") in printed
    assert cells(project.run("dml", "tables", "show", "softtriple/table91"), "as_published, 3 seeds") == [recall_1, recall_2, nmi]
    site = (project.root / "results/site/softtriple/table91.html").read_text()
    assert recall_1.partition(" ")[0] in site
    assert site.count("data:image/webp") == 4, "curve, gallery, similarities and map of the first seed"
    assert "a loss that nobody has written" in site
    assert "other code" not in site
    assert list((project.root / "state/mlartifacts").rglob("table91.html")), "MLflow has the page with the table's parent run"


@pytest.mark.proof
@pytest.mark.usefixtures("printed")
def test_a_run_that_fails_stops_no_other(project: Project) -> None:
    printed = project.run("dml", "reproduce", "softtriple/table91", "--row", "trained", "--row", "fails", *SEEDS, code=2)
    failed = re.findall(r" / fails as_published / seed (\d): FAILED: the loss '\w+' is not finite", printed)
    assert set(failed) == {*"012"}
    assert "error: 3 of 6 runs failed" in printed.splitlines()[-1]
    assert page_of(project, "softtriple/table91").count("\n- Fails: FAILED, as_published, cub200, seed ") == 3


@pytest.mark.proof
@pytest.mark.usefixtures("printed")
def test_what_tables_share_is_run_once_and_stands_in_each(project: Project) -> None:
    printed = project.run("dml", "reproduce", "softtriple/table9[23]", "project/tiny", "--seeds", "3")
    assert "6 of 15 runs to train" in printed  # runs of the rows that no table has run yet, once for both tables
    assert "9 of 15 runs reused" in printed
    for name in ("softtriple/table92", "softtriple/table93"):
        assert f"{name}: 6 runs; page: " in printed
        rows = [line for line in page_of(project, name).splitlines() if "as_published, 3 seeds" in line]
        assert len(rows) == 2
        assert " equal" not in rows[1]
        assert re.search(r" (below|compatible)$", rows[1].rstrip(" |"))
        shown = project.run("dml", "tables", "show", name)
        assert shown.count("as_published, 3 seeds") == 2, "the result is kept for each table"
        kept = json.loads(json.loads((project.root / f"state/tables/{name}.json").read_text())["record"])
        assert [run["row"] for run in kept["runs"]] == ["trained"] * 3 + ["untrained"] * 3
        assert all(run["seconds"] > 0 for run in kept["runs"])


@pytest.mark.proof
def test_seeds_are_added_in_one_flow_until_the_cap_and_the_page_says_what_can_be_told(project: Project) -> None:
    """A precision of 0.05 points cannot be reached with so few queries."""
    printed = project.run("dml", "reproduce", "softtriple/table92", "--seeds", "auto", "--resolve", "0.05", "--max-seeds", "5")
    rounds = re.findall(r"softtriple/table92 on cub200: (\d) seeds; the least precise difference is (\w+) as_published -", printed)
    assert [count for count, _ in rounds] == ["3", "5"]
    assert "continuing with 5 seeds" in printed
    assert "more than 0.05, but --max-seeds is reached" in printed
    assert printed.count("starting Ray") == 1
    assert "4 of 4 runs to train" in printed
    page = page_of(project, "softtriple/table92")
    assert page.count("as_published, 5 seeds") == 2
    assert re.search(r"^Best mean R@1 on these \d+ classes: (Trained|Untrained).* 5 seeds\.$", page, re.MULTILINE)
    assert "Significant differences" in (project.root / "results/site/softtriple/table92.html").read_text()


@pytest.mark.proof
def test_a_table_of_the_project_is_kept_with_its_measurements_under_the_columns_dataset(project: Project) -> None:
    """The test before this one ran the table, in one flow with paper tables."""
    kept = json.loads(json.loads((project.root / "state/tables/project/tiny.json").read_text())["record"])
    assert {(run["dataset"], run["seed"], run["scores"]["csc_train"] > 0) for run in kept["runs"]} == {
        ("synthetic", n, True) for n in range(3)
    }
    assert re.search(r"ours, 3 seeds \| 0\.\d{3} ± \d\.\d{3} \| \d\.\d{3} ± \d\.\d{3} \|", page_of(project, "project/tiny"))
    shown = project.run("dml", "tables", "show", "project/tiny")
    assert "ours, 3 seeds" in shown
    assert "page" not in shown


@pytest.mark.proof
def test_a_smoke_run_shows_that_the_chain_runs_and_no_figure(project: Project, tmp_path: Path) -> None:
    printed = project.run("dml", "reproduce", "softtriple/table91", "--row", "trained", "--smoke", DML_STATE=str(tmp_path / "state"))
    page = (tmp_path / "state/reports/tables/softtriple/table91-smoke.md").read_text()
    assert page in printed
    assert "| trained as_published | cub200-smoke |" in page
    assert not re.search(r"50|recall|nmi", page)
    assert list((tmp_path / "state/store/evaluate").rglob("metrics.json"))
    assert not (tmp_path / "state/tables").exists()
    assert not list((tmp_path / "state/store/train").rglob("checkpoint.pt")), "nobody wants a smoke run's network"


@pytest.mark.proof
def test_one_row_of_each_of_the_39_runs_through_the_whole_chain(tmp_path: Path) -> None:
    project = make_project(tmp_path, ("untrained",))
    printed = project.run("dml", "reproduce", "*/*", "--smoke", "--one-row")
    assert "FAILED" not in printed
    can_be_run = [entry for entry in json.loads(project.run("dml", "tables", "--json")) if entry["can_be_run"]]
    assert [line.partition(":")[0] for line in printed.splitlines() if ": 1 run; page: " in line] == [entry["name"] for entry in can_be_run]
    assert {entry["state"] for entry in can_be_run} == {"not run"}, "a smoke run is no result"
