"""Every verb that writes, twice at once and during a run: no result is lost, and every file is complete.

The result is compared with that of the same commands run one after the other. A verb in none of the lists below fails a test, and so does
one that is listed as reading only but writes.
"""

import json
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.errors import DataError
from dml_core.index.index import Index
from dml_core.trained import load_model
from dml_core.training.history import Progress
from flows import chain
from flows.reuse.step_cache import SealedJSON
from flows.reuse.step_lock import StepLock
from flows.services import Services
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.files import write_whole
from tasks.runs.identity import embed_step, evaluate_step, train_step
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import DatasetRecord, StepRecord
from tasks.runs.specs import RunSpec, ScaleSpec
from tasks.sealed import write_sealed
from tasks.tables.result import MeasuredRun, TableResult
from tasks.tracking.outbox import keep_report
from tasks.tracking.published import current_runs
from tasks.tracking.versions import registered_versions
from tasks.workers.group import Spent
from tasks.workers.jobs import Job
from tests.conftest import MODEL, SETTINGS
from tests.damage import contents
from tests.flows.test_damaged_runs import InProcess
from tests.flows.verbs import ARGUMENTS
from tests.forked import Processes
from tests.tasks.models.conftest import make_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
OPTIONS = {"num_classes": 8, "images_per_class": 6, "image_size": 24, "num_modes": 1}
PARAMS = {
    "datasets": {"own": {"reader": "synthetic", "raw": "data/raw/own", "options": OPTIONS}},
    "comparison": {
        "default_datasets": ["own"],
        "seeds": [0, 1],
        "protocol": {**SETTINGS, "model": MODEL, "num_epochs": 1},
        "datasets": {"own": {}},
        "variants": {"good": {"loss": {"name": "normalised_softmax"}}, "other": {"loss": {"name": "softmax"}}},
    },
}
View = Callable[[Path], Any]


# ---------------------------------------------------------------- the verbs


def files(root: Path) -> dict[str, bytes]:
    """Return the user-visible files of a project: those outside its state, except files with random names, paths or measured times."""
    left_out = ("state/", "index/", "new/", "exported/measured", "embedded/plan.json")
    return {name: data for name, data in contents(root).items() if not name.startswith(left_out)}


def below(*places: str) -> View:
    """Return a view of every file below some folders of a project."""
    return lambda root: {name: data for name, data in contents(root).items() if name.startswith(places)}


def items(*folders: str) -> View:
    """Return a view of the names and vectors of indexes, whose files have random names."""

    def view(root: Path) -> dict[str, dict[str, bytes]]:
        opened = {folder: Index.open(root / folder) for folder in folders}
        return {
            folder: dict(zip(index.names(), (row.tobytes() for row in index.vectors_ND), strict=True)) for folder, index in opened.items()
        }

    return view


def exported(root: Path) -> tuple[list[str], list[float]]:
    """Return the files of an exported network, which `load_model` verifies, and its output, without the measured time, which varies."""
    rows = load_model(root / "exported").embed([(root / "images/a/a0.png").read_bytes()])
    return sorted(path.name for path in (root / "exported").iterdir()), np.round(rows, 4).ravel().tolist()


def sets(root: Path) -> tuple[set[str], list[str]]:
    """Return a project's datasets, in any order, and the files next to its parameters."""
    params = load_params(root / "params.yaml")
    return set(params.datasets) & set(params.comparison.datasets), sorted(path.name for path in root.iterdir() if path.is_file())


def without(*places: str) -> Callable[[Path], None]:
    """Return a function that removes folders."""

    def remove(root: Path) -> None:
        for place in places:
            shutil.rmtree(root / place)

    return remove


def unused_step(root: Path) -> None:
    """Write a finished step that nothing references."""
    write_whole(root / "state/store/train/0123456789abcdef/file", "of nobody")


def damaged_table(root: Path) -> None:
    """Write a damaged result of a table."""
    write_whole(root / "state/tables/softtriple/table1.json", "damaged")


def exported_runs(root: Path) -> None:
    """Write two exported results of one table, each with a run of the other's row."""
    for name, row in (("one", "softtriple"), ("two", "softmax-norm")):
        run = MeasuredRun(
            row=row, variant="as_published", dataset="cub200", seed=0, project_dataset="cub200", identity=row, scores={"recall@1": 0.5},
            figures=f"evaluate/{row}", training={}, evaluation={},
        )  # fmt: skip
        write_sealed(root / f"{name}.json", TableResult(name="softtriple/table1", runs=(run,)))


def imported_runs(root: Path) -> None:
    """Write a result of a table."""
    exported_runs(root)
    write_whole(root / "state/tables/softtriple/table1.json", (root / "one.json").read_text())


@dataclass(frozen=True)
class Case:
    """Two commands of a verb, the view that must be as after running them one after the other, and a preparation."""

    first: str
    second: str
    view: View = field(default=files)
    before: Callable[[Path], None] = field(default=lambda root: None)

    @property
    def commands(self) -> list[list[str]]:
        return [self.first.split(), self.second.split()]


def same(words: str, view: View = files, before: Callable[[Path], None] = lambda root: None) -> Case:
    return Case(words, words, view, before)


# Verb -> its two commands.
WRITING = {
    "data add": Case("data add one mine/one", "data add two mine/two", sets),
    "data fetch": same("data fetch own", before=without("data/raw/own")),
    "data prepare": same("data prepare own", before=without("data/packed/own")),
    "data show": same("data show own --output sheet.png"),
    "embed": same("embed own/good images -o embedded.npz"),
    "evaluate": same("evaluate --embeddings e.npy --labels l.npy --output scores.json"),
    "gc": same("gc --delete --days 0", below("state/store/"), unused_step),
    "index build": same("index build own/good images -o new", items("new")),
    "index add": Case("index add index images/a", "index add index images/b", items("index")),
    "index remove": Case("index remove index c0.png", "index remove index c1.png", items("index")),
    "look": same("look own/good/0 -o pages --map pca"),
    "models export": same("models export own/good -o exported --format torch-export", exported),
    "report": Case("report softtriple/table1 -o site", "report softtriple/table2 -o site"),
    "search": same("search index images/c --html page.html"),
    "tables export": same("tables export softtriple/table1 -o runs.json", before=imported_runs),
    "tables import": Case("tables import one.json", "tables import two.json", below("state/tables/"), exported_runs),
    "tables show": same("tables show softtriple/table1", below("state/tables/"), damaged_table),
}
MORE = {
    "embed, a folder": same("embed own/good images -o embedded"),
    "embed, another network": Case("embed own/good images -o embedded", "embed own/other images -o embedded"),
    "data prepare, a damaged one": same("data prepare own", before=lambda root: (root / "data/packed/own/images.arrow").write_bytes(b"")),
}  # fmt: skip
QUICK = {"data add", "data fetch", "data prepare", "data show", "embed, another network", "evaluate", "index add", "report", "tables show"}
# Verb -> the test that runs it twice at once, or why there is none.
ELSEWHERE = {
    "models promote": "test_two_promotions_and_two_deliveries_at_once",
    "sync": "test_two_promotions_and_two_deliveries_at_once",
    "reproduce": "tests/e2e/test_table_faults.py: two shells that share runs",
    "run": "tests/flows/test_damaged_runs.py: two flows at once train once",
    "tune": "tests/e2e/test_tune.py: two at once are one search",
    "stack up": "tests/e2e/test_stack.py: a second up changes nothing; one lock is held by up and down",
    "stack down": "tests/e2e/test_stack.py",
    "stack restart": "down without deleting, then up; one lock is held by each",
    "serve": "writes logs alone",
    "ui": "is MLflow's server",
    "verify": "tests/e2e/test_verify.py: two at once",
    "accept": "replaces one file, after a verification",
    "receipt": "replaces one file, after a verification",
    "plan": "replaces one file, which only saves time",
    "data check": "replaces one file, the list of what it found",
}
READING = {
    "compare", "data list", "doctor", "index show", "models list", "stack logs", "stack status", "tables list",
}  # fmt: skip


def test_every_verb_is_in_one_of_the_lists() -> None:
    listed = [*WRITING, *ELSEWHERE, *READING]
    assert sorted(listed) == sorted(ARGUMENTS), "give a verb that writes a row in WRITING"


# ---------------------------------------------------------------- a project


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    return Processes(tmp_path_factory.mktemp("printed"))


@pytest.fixture(scope="module")
def whole(one_thread: None, processes: Processes, mlflow_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a prepared dataset, two runs, images, an index of some of them, embeddings, images to add, and MLflow's database."""
    root = tmp_path_factory.mktemp("whole")
    (root / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    generator = np.random.default_rng(0)
    for place in (*(f"images/{label}" for label in "abc"), *(f"mine/{name}/{label}" for name in ("one", "two") for label in "abcd")):
        (root / place).mkdir(parents=True)
        for number in range(2):
            image = Image.fromarray(generator.integers(0, 256, (24, 24, 3), np.uint8))
            image.save(root / place / f"{Path(place).name}{number}.png")
    np.save(root / "e.npy", generator.normal(size=(8, 4)).astype(np.float32))
    np.save(root / "l.npy", np.arange(8) % 2)
    project = project_at(root)
    materialise("synthetic", OPTIONS, root / "data/raw/own")
    prepare("synthetic", root / "data/raw/own", project.packed("own"), OPTIONS)
    for spec in comparison_runs(load_params(project.params_file), "own"):
        if spec.seed == 0:
            make_run(project, spec)
    shutil.copy(mlflow_database, project.state)
    (ended,) = processes.at_once(root, ["index", "build", "own/good", "images/c", "-o", "index", "--thumbnail", "16"])
    assert ended.code == 0, ended.printed
    return root


def project_at(root: Path) -> Project:
    return Project(root, root / "state", str(root / "state/store"), f"sqlite:///{root}/state/mlflow.db")


def copied(whole: Path, to: Path, case: Case | None = None) -> Path:
    shutil.copytree(whole, to)
    if case is not None:
        case.before(to)
    return to


def hidden(root: Path) -> set[str]:
    """Return the lock files and other files whose names begin with a dot."""
    return {path.relative_to(root).as_posix() for path in root.rglob(".*") if path.is_file()}


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.proof) for name in WRITING | MORE])
def test_twice_at_once_is_as_one_after_the_other(whole: Path, processes: Processes, name: str, tmp_path: Path) -> None:
    case = (WRITING | MORE)[name]
    root = copied(whole, tmp_path / "at_once", case)
    ended = processes.at_once(root, *case.commands)
    found, expected = case.view(root), list[Any]()
    codes: list[int] = []
    hidden_files: set[str] = set()
    for number, order in enumerate((case.commands, case.commands[::-1])[: 1 + (case.first != case.second)]):
        one = copied(whole, tmp_path / str(number), case)
        codes = sorted(command.code for command in processes.one_by_one(one, *order))
        expected.append(case.view(one))
        hidden_files |= hidden(one)
        if found == expected[-1]:
            break  # the other order would be another result that is right
    said = "\n".join(one.printed for one in ended)
    assert found in expected, said
    assert codes[0] == 0, "neither did its work"
    assert sorted(one.code for one in ended) == codes or ("error: " in said and "another dml" in said), said
    for one in ended:
        assert one.code in (0, 2), said
        assert one.code == 0 or len(re.findall("^error: ", one.printed, re.MULTILINE)) == 1, said
    assert "Traceback" not in said
    assert hidden(root) <= hidden_files, "nothing temporary is left"


def test_a_verb_that_is_said_to_write_nothing_writes_nothing(whole: Path, processes: Processes) -> None:
    before = contents(whole)
    for name in sorted(READING):
        (ended,) = processes.at_once(whole, [*name.split(), *ARGUMENTS[name]])
        assert ended.code in (0, 2), ended.printed
        assert contents(whole) == before, name


# ---------------------------------------------------------------- during a run


class Held(InProcess):
    """Workers that start one step of a run and wait there until released."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self._step, self.is_there, self.may_go_on = step, threading.Event(), threading.Event()

    def run(self, job: Job, watch: Callable[[Progress], None], spent: Spent) -> dict[str, object]:
        if job.step == self._step:
            self.is_there.set()
            assert self.may_go_on.wait(600)
        return super().run(job, watch, spent)

    def close(self) -> None:
        """Do nothing at the end of the flow."""


class Run(threading.Thread):
    """A run of the project: its steps in order, with their locks and kept records, without Prefect and Ray."""

    def __init__(self, root: Path, held_at: str) -> None:
        super().__init__()
        self.project, self.workers = project_at(root), Held(held_at)
        self.kept = root / "state/prefect/storage"
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with closing(Services(self.project, ScaleSpec())) as services:
                services.workers, services.tracker = self.workers, SimpleNamespace(begin_run=lambda *_: "run", log_epochs=lambda *_: None)  # type: ignore[assignment]
                self._steps(services, read_dataset(self.project, "own"), comparison_runs(load_params(self.project.params_file), "own")[1])
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def _steps(self, services: Services, dataset: DatasetRecord, spec: RunSpec) -> None:
        trained = train_step(spec, dataset)
        embedded = embed_step(spec, trained.identity)
        records: list[StepRecord] = []
        for step, of, more in (
            (chain.train, trained, ("published",)),
            (chain.embed, embedded, ()),
            (chain.evaluate, evaluate_step(spec, embedded.identity), ()),
        ):
            lock = StepLock(step, of, spec.title, services, is_forced=False)
            record = step.fn(of.identity, spec, dataset, *records, *more, services=services, lock=lock)
            write_whole(self.kept / of.identity, json.dumps({"metadata": {}, "result": SealedJSON().dumps(record).decode()}))
            lock.release()
            records.append(record)


def held_run(root: Path, monkeypatch: pytest.MonkeyPatch, at: str = "embed") -> Run:
    """Start a run and return it once it waits in a step."""
    monkeypatch.chdir(root)
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(root / "state/prefect/storage"))
    found = Run(root, at)
    found.start()
    while not found.workers.is_there.wait(0.1):
        assert found.is_alive(), found.error
    return found


@pytest.mark.proof
def test_beside_a_run_every_verb_does_its_work_and_the_run_ends_as_without_them(
    whole: Path, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run waits between its training, which nothing references yet, and its embeddings."""
    places = {name: copied(whole, tmp_path / name) for name in ("beside", "alone")}
    codes = {}
    for name, root in places.items():
        for case in WRITING.values():
            if case.before in (unused_step, imported_runs, exported_runs):
                case.before(root)
        begun = held_run(root, monkeypatch) if name == "beside" else None
        ended = processes.one_by_one(root, *(case.commands[0] for case in WRITING.values()))
        codes[name] = dict(zip(WRITING, [(one.code, one.printed if one.code else "") for one in ended], strict=True))
        begun = begun or held_run(root, monkeypatch)
        begun.workers.may_go_on.set()
        begun.join()
        assert begun.error is None, begun.error
    assert codes["beside"] == codes["alone"]
    assert {code for code, _ in codes["alone"].values()} == {0}, codes["alone"]
    for name, case in WRITING.items():
        assert case.view(places["beside"]) == case.view(places["alone"]), name
    assert not (places["beside"] / "state/store/train/0123456789abcdef").exists()


@pytest.mark.parametrize("step", ["embed", pytest.param("train", marks=pytest.mark.proof)])
def test_data_that_change_during_a_run_end_it_in_one_line_and_no_number_is_kept(
    whole: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("same", "other"):
        root = copied(whole, tmp_path / name)
        before = set((root / "state/store/evaluate").iterdir())
        begun = held_run(root, monkeypatch, step)
        num_records = len(list(begun.kept.glob("*")))
        images = sorted((root / "data/raw/own").rglob("*.jpg"))
        if name == "other":
            shutil.copy(images[-1], images[0])
        prepare("synthetic", root / "data/raw/own", root / "data/packed/own", OPTIONS)
        begun.workers.may_go_on.set()
        begun.join()
        if name == "same":
            assert begun.error is None, begun.error
        else:
            assert isinstance(begun.error, DataError)
            assert "prepared again during the run" in str(begun.error)
            assert len(list(begun.kept.glob("*"))) == num_records
            assert set((root / "state/store/evaluate").iterdir()) == before


# ---------------------------------------------------------------- MLflow


@pytest.mark.proof
def test_two_promotions_and_two_deliveries_at_once(whole: Path, processes: Processes, tmp_path: Path) -> None:
    """Each run is delivered once; there is one champion, which was compared with the version before it."""
    root = copied(whole, tmp_path / "project")
    project = project_at(root)
    for spec in comparison_runs(load_params(project.params_file), "own"):
        if spec.seed == 0:
            keep_report(project.state / "outbox", make_run(project, spec))
    delivered = processes.at_once(root, ["sync"], ["sync"])
    assert [one.code for one in delivered] == [0, 0], delivered
    counts = [int(found) for one in delivered for found in re.findall(r"(\d+) records? delivered", one.printed)]
    assert sum(counts) == 2
    assert not list((root / "state/outbox").glob("*"))
    (spec, *_) = comparison_runs(load_params(project.params_file), "own")
    assert len(current_runs(project.tracking_uri, "own", spec.comparison)) == 2

    ended = processes.at_once(root, ["models", "promote", "own/good"], ["models", "promote", "own/other"])
    said = "\n".join(one.printed for one in ended)
    assert sorted(one.code for one in ended)[0] == 0, said
    assert "Traceback" not in said
    versions = registered_versions(project.tracking_uri, "own")
    assert len([version for version in versions if "champion" in version.aliases]) == 1, said
    assert len(versions) == sum(one.code == 0 for one in ended)
    assert said.count("the first; there was nothing to compare with") == 1, "the other was compared with it"
