"""Every kind of file that a run writes, damaged in every way and read by every reader: the right result, or a one-line error.

A cell damages one file of a copy of a real run's state, calls one reader, and compares its result with that for the undamaged state: each
number is equal or missing, never different; an error is one line; and the damaged bytes are kept, except in files of a step that ran again.
A file that matches no row of the matrix fails a test, so a new kind of file needs a row.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dml_core.data.store.info import verify_files
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import DmlError
from dml_core.training.checkpoints.file import load_checkpoint
from flows import chain
from flows.outcomes import Outcome
from flows.reuse.step_cache import SealedJSON
from flows.reuse.step_lock import StepLock
from tasks import gc
from tasks.environment import STACK_ENV, Project, stack_environment, stack_text
from tasks.files import files_set_aside, write_whole
from tasks.locks import alone
from tasks.plans.results import add_runs, load_result
from tasks.plans.times import note_rate, read_rates
from tasks.reports.compare import write_report
from tasks.runs import identity
from tasks.runs.embeddings import kept_epoch, load_embeddings, query_and_gallery
from tasks.runs.finished import (
    finished_identities,
    finished_scores,
    forget_provenance,
    read_finished,
    record_provenance,
    steps_before,
)
from tasks.runs.identity import train_step
from tasks.runs.records import CheckpointRecord, ComparisonReport, EmbeddingRecord, MetricRecord, RunReport, StepRecord
from tasks.runs.tuned import STANDING
from tasks.sealed import seal, unseal
from tasks.stack.settings import write_private
from tasks.tables.result import MeasuredRun
from tasks.tracking.outbox import keep_report, read_report
from tasks.tuning.training_rows import training_rows
from tests.conftest import ROOT
from tests.damage import as_format, cut, empty, flip, garble
from tests.flows.test_damaged_runs import SPEC, Place, prefect, quick_figures, undisturbed  # noqa: F401 - fixtures

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "quick_figures")]


def folder(path: Path) -> None:
    """Replace the file by a folder with a file."""
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(b"x")


def dangling(path: Path) -> None:
    """Replace the file by a dangling link, which even root cannot read."""
    path.unlink()
    path.symlink_to(path.parent / "nothing")


def newer(path: Path) -> None:
    """Give the file an unknown format; random bytes if it is not sealed."""
    resealed(path, lambda sealed: as_format(sealed, 7))


def more(path: Path) -> None:
    """Add an unknown field."""
    resealed(path, lambda sealed: seal(json.dumps(json.loads(unseal(sealed)) | {"weather": "rain"})))


def resealed(path: Path, change: Callable[[str], str]) -> None:
    """Change every sealed record of a file; garble a file that is not sealed."""
    try:
        if path.parent.name == "kept":
            outer = json.loads(path.read_text())
            path.write_text(json.dumps(outer | {"result": change(outer["result"])}))
        else:
            path.write_text("".join(f"{change(line)}\n" for line in filter(None, path.read_text().splitlines())))
    except (ValueError, KeyError, TypeError):
        garble(path)


HOW: dict[str, Callable[[Path], None]] = {
    "flip": flip, "cut": cut, "empty": empty, "folder": folder, "dangling": dangling, "newer": newer, "more": more,
}  # fmt: skip

# Kind of file -> its place in the state folder.
KINDS = {
    "step record": "kept/*",
    "note of a step": "made/*.json",
    "rates": "rates.jsonl",
    "table": "tables/**/*.json",
    "waiting run": "outbox/[0-9a-f]*.json",
    "waiting comparison": "outbox/~*.json",
    "checkpoint": "store/train/*/checkpoint.pt",
    "history": "store/train/*/history.jsonl",
    "validation split": "store/train/*/validation_split.json",
    "manifest": "store/embed/*/manifest.json",
    "shard": "store/embed/*/*-of-*.npy",
    "labels": "store/embed/*/*-labels.npy",
    "kept epoch": "store/embed/*/kept_epoch.json",
    "scores": "store/evaluate/*/metrics.json",
    "class scores": "store/evaluate/*/class_recalls.json",
    "recall over epochs": "store/evaluate/*/recall_by_epoch.json",
    "figure": "store/evaluate/*/figures/*",
    "dataset": "packed/dataset.json",
    "images": "packed/images.arrow",
    "rows of a dataset": "packed/manifest.parquet",
    "training rows": "tuning/datasets/*/*",
    "servers": "stack/env",
    "log": "**/*log",
    "report": "reports/**/*",
    "lock": "**/.*lock*",
    "lock of a step": "store/.locks/.*",
    "lock of a search": "tuning/locks/*",
    "lock of MLflow": "mlflow.lock",
    "lock of a record": "mlflow.locks/*",
}
SEALED = ("step record", "note of a step", "rates", "table", "waiting run", "waiting comparison")
OF_STEPS = [kind for kind, place in KINDS.items() if place.startswith("store/") and "lock" not in kind]


def files_of(state: Path, kind: str) -> list[Path]:
    return sorted(path for path in state.glob(KINDS[kind]) if path.is_file())


class Reader:
    """Calls of the code that reads a state, in this process; each returns its numbers by name."""

    def __init__(self, place: Place) -> None:
        self.place, self.state = place, place.state
        self.project = Project(ROOT, place.state, str(place.state / "store"), f"sqlite:///{place.state / 'mlflow.db'}")
        self.step = train_step(SPEC, place.dataset)

    def show(self) -> dict[Any, Any]:
        """Read a table, as `dml tables show` and other readers do."""
        return {run.place: run.scores for run in load_result(self.project, STANDING).runs}

    def add(self) -> dict[Any, Any]:
        """Add a run to a table, as the end of `dml reproduce` does for some rows."""
        add_runs(self.project, STANDING, (measured(5),), (), None)
        found = self.show()
        assert found.pop(measured(5).place) == {"recall@1": 0.05}
        return found

    def plan(self) -> dict[Any, Any]:
        """Read the rates for time estimates."""
        return {rate.key: rate.images_per_second for rate in read_rates(self.state)}

    def note(self) -> dict[Any, Any]:
        """Record the rate and the provenance of a step, as at its end."""
        note_rate(self.state, "embed", SPEC, dataset(self.place), rate_facts(9, 9.0))
        record_provenance(self.state, self.step)
        found = self.plan()
        assert [found.pop(rate) for rate in list(found) if 9 in rate] == [9.0]
        assert finished_identities(self.state, self.step) == {self.step.identity: ()}
        return found

    def notes(self) -> dict[Any, Any]:
        """Read the provenance, as `--code keep` and `dml gc` do."""
        assert len(finished_identities(self.state, self.step)) == 1
        return dict(steps_before(self.state))

    def forget(self) -> dict[Any, Any]:
        """Forget provenance, as at the end of `dml gc --delete`."""
        forget_provenance(self.state, {"nothing"})
        return dict(steps_before(self.state))

    def sync(self) -> dict[Any, Any]:
        """Read the outbox, as `dml sync` does, without MLflow."""
        reports = [read_report(path) for path in sorted((self.state / "outbox").glob("*.json"))]
        return {report.outbox_name: report.model_dump(mode="json", exclude={"weather", "kept_at"}) for report in reports}

    def publish(self) -> dict[Any, Any]:
        """Write the reports of an ending run to the outbox."""
        for report in reports(self.place):
            keep_report(self.state / "outbox", report)
        return self.sync()

    def unused(self) -> dict[Any, Any]:
        """Find unused steps, as `dml gc` does. Every step that is unused in the damaged state was unused before; a lock is no step."""
        return {step.key: True for step in gc.find_unused(self.project, days=-1.0)[0] if not step.folder.name.startswith(".")}

    def models(self) -> dict[Any, Any]:
        """Read the scores, as `dml models` and `dml look` do."""
        trained = self.step.identity
        embedded, scored = identity.embed_step(SPEC, trained).identity, self.place.evaluate_id
        return finished_scores(self.place.store.folder(f"evaluate/{scored}"), trained=trained, embedded=embedded, scored=scored) or {}

    def embeddings(self) -> dict[Any, Any]:
        """Read the embeddings, as scoring, promotion and pages do: only files with the right hashes."""
        record = read_finished(self.state / "kept", "embed", identity.embed_step(SPEC, self.step.identity).identity)
        if record is None:
            return {}
        place = self.place.store.checked(record)
        role = query_and_gallery(place)[0]
        return {role: [array.tolist() for array in load_embeddings(place, role)]} | kept_epoch(place)

    def network(self) -> dict[Any, Any]:
        """Read the checkpoint, as `dml export` and `dml embed` do."""
        found = load_checkpoint(self.place.store.folder(f"train/{self.step.identity}"), self.step.identity)
        return {} if found is None else {"epochs": found["num_epochs_done"]}

    def data(self) -> dict[Any, Any]:
        """Verify the dataset, as at the start of a flow, whose steps then read the verified files."""
        info = verify_files(Path(self.place.dataset.folder))
        return info.model_dump() | pixels(Path(self.place.dataset.folder), "test")

    def tune(self) -> dict[Any, Any]:
        """Read the training rows that `dml tune` gives its runs."""
        record = training_rows(self.project, "d", Path(self.place.dataset.folder))
        return {"digest": record.digest} | pixels(Path(record.folder), "train")

    def environment(self) -> dict[Any, Any]:
        """Read the addresses of the servers, as every verb does."""
        return dict(stack_environment(self.state))

    def lock(self) -> dict[Any, Any]:
        """Acquire each lock once."""
        for path in (*files_of(self.state, "lock"), *self.state.glob("tables/.lock"), *self.state.glob("tuning/locks/*")):
            with alone(path):
                pass
        return {}


def pixels(folder: Path, role: str) -> dict[Any, Any]:
    """Return image number -> its label and the hash of its pixels."""
    images = PackedDataset(folder, role)
    return {
        number: (int(images.labels[number]), hashlib.sha256(images.image(number).numpy().tobytes()).hexdigest())
        for number in range(len(images))
    }


READERS = [name for name, member in vars(Reader).items() if not name.startswith("_") and callable(member)]


def measured(seed: int) -> MeasuredRun:
    return MeasuredRun(
        row="softmax", variant="standing", dataset="d", project_dataset="d", seed=seed, identity=f"i{seed}",
        scores={"recall@1": seed / 100}, figures="", training={}, evaluation={},
    )  # fmt: skip


def dataset(place: Place) -> Any:
    return place.dataset.model_copy(update={"counts": {"train": 600, "test": 600}})


def rate_facts(num_workers: int, images_per_second: float) -> dict[str, Any]:
    """Return the facts of a step that embedded the 600 images at this speed."""
    return {"device": "cpu", "num_workers": num_workers, "cost": {"wall_seconds": 600 / images_per_second}}


def reports(place: Place) -> list[RunReport | ComparisonReport]:
    """Return the reports of a run and its comparison, as they wait for MLflow."""
    steps = {
        kind: model.model_validate({"step": kind, "identity": "i", "key": f"{kind}/i", "files": (), **more})
        for kind, model, more in (
            ("train", CheckpointRecord, {}),
            ("embed", EmbeddingRecord, {}),
            ("evaluate", MetricRecord, {"metrics": {"recall@1": 0.25}}),
        )
    }
    dataset = place.dataset.model_copy(update={"folder": "/packed"})  # the place of the copied state does not matter
    run: Any = {"comparison": "c", "identity": "0123", "dataset": dataset, "variant": "v", "seed": 0, "parameters": {}, "tags": {}}
    run |= {"dvc_digest": None, "checkpoint": steps["train"], "embeddings": steps["embed"], "scores": steps["evaluate"]}
    return [RunReport(**run), ComparisonReport(comparison="c", dataset="d", role="test", folder=None, tags={})]


def run_steps(place: Place) -> None:
    """Run the chain's steps in order, without Prefect, and keep their records as Prefect does."""
    trained = identity.train_step(SPEC, place.dataset)
    embedded = identity.embed_step(SPEC, trained.identity)
    scored = identity.evaluate_step(SPEC, embedded.identity)
    records: list[StepRecord] = []
    for step, of, more in ((chain.train, trained, ("published",)), (chain.embed, embedded, ()), (chain.evaluate, scored, ())):
        lock = StepLock(step, of, SPEC.title, place.services, is_forced=True)
        record = step.fn(of.identity, SPEC, place.dataset, *records, *more, services=place.services, lock=lock)
        lock.release()
        records.append(record)
        path = place.state / "kept" / of.identity
        write_whole(path, json.dumps({"metadata": {"storage_key": of.identity}, "result": SealedJSON().dumps(record).decode()}))


@pytest.fixture(scope="module")
def whole(one_thread: None, packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A finished run, its entry in a table, measured rates, and records that wait for MLflow."""
    state = tmp_path_factory.mktemp("whole") / "state"
    shutil.copytree(packed, state / "packed")
    place = Place(state, state / "packed")
    run_steps(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(state / "kept"))
        place.services.meter.close()  # as at the end of a flow
    project = Project(ROOT, state, str(state / "store"), f"sqlite:///{state / 'mlflow.db'}")
    training_rows(project, "d", state / "packed")
    scores = MetricRecord(step="evaluate", identity="i", key="evaluate/i", files=(), metrics={"recall@1": 0.25})
    write_report("title", [(SPEC, scores)], state / "reports/d/v-seed-0")
    (state / "stack").mkdir()
    write_private(state / STACK_ENV, stack_text({"DML_STORE": str(state / "store"), "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"}))
    for path in (state / "logs/dml-flow.log", state / "stack/mlflow/log"):
        write_whole(path, "said\n")
    for lock in ("mlflow.lock", "mlflow.locks/database", "tuning/locks/softtriple-table1-softtriple@d"):
        with alone(state / lock):
            pass
    add_runs(project, STANDING, tuple(measured(seed) for seed in range(4)), (), "commit")
    note_rate(state, "train", SPEC, dataset(place), rate_facts(1, 100.0))
    note_rate(state, "embed", SPEC, dataset(place), rate_facts(1, 300.0))
    for report in reports(place):
        keep_report(state / "outbox", report)
    return place


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Use a state's records as Prefect's, show nothing in MLflow, and skip computing the runs of current tables, which takes seconds."""
    monkeypatch.setattr(gc, "_of_today", lambda project, results: set())
    monkeypatch.setattr(gc, "_in_mlflow", lambda project, stored: set())
    return lambda state: monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(state / "kept"))


def copied(whole: Place, to: Path) -> Reader:
    shutil.copytree(whole.state, to, symlinks=True)
    folder = Path(whole.dataset.folder)
    return Reader(Place(to, to / "packed" if folder.is_relative_to(whole.state) else folder, whole.dataset.digest))


def held(path: Path) -> set[bytes]:
    """Return the bytes of a file or of a folder's files, or the target of a link."""
    if path.is_symlink():
        return {str(path.readlink()).encode()}
    return {one.read_bytes() for one in path.rglob("*") if one.is_file()} if path.is_dir() else {path.read_bytes()}


def test_every_file_that_a_run_leaves_has_a_row_and_every_row_a_file(whole: Place) -> None:
    found = {path: [kind for kind in KINDS if path in files_of(whole.state, kind)] for path in whole.state.rglob("*") if path.is_file()}
    assert not [path for path, kinds in found.items() if not kinds], "give each kind of file a row in KINDS"
    assert {kind for kinds in found.values() for kind in kinds} == set(KINDS)


EXPECTED: dict[str, dict[Any, Any]] = {}  # reader -> its result for the undamaged state


def check(whole: Place, kind: str, how: str, readers: list[str], tmp_path: Path, environment: Callable[[Path], None]) -> None:
    for name in readers:
        if name not in EXPECTED:
            undamaged = copied(whole, tmp_path / name / "undamaged")
            environment(undamaged.state)
            EXPECTED[name] = getattr(undamaged, name)()
        expected = EXPECTED[name]
        for number, path in enumerate(files_of(whole.state, kind)[:3]):
            reader = copied(whole, tmp_path / name / str(number))
            environment(reader.state)
            damaged = reader.state / path.relative_to(whole.state)
            HOW[how](damaged)
            before = held(damaged)
            where = f"{kind}, {how}, {name}, {damaged.name}"
            refused, found = None, {}
            try:
                found = getattr(reader, name)()
            except DmlError as error:
                refused = str(error)
            if refused is not None:
                assert refused, where
                assert "\n" not in refused, where
            else:
                assert all(expected[key] == value for key, value in found.items() if key != "weather"), where
                if kind in SEALED and how == "more":
                    assert found == expected, f"{where}: what a newer program added is no damage"
            if kind in SEALED:
                there = [held(damaged)] if os.path.lexists(damaged) else []
                there += [held(aside) for aside in files_set_aside(reader.state)]
                is_kept = any(before <= one for one in there) or (how == "more" and not files_set_aside(reader.state))
                is_kept = is_kept or (kind == "rates" and damaged.read_bytes().startswith(next(iter(before))))
                assert is_kept, f"{where}: overwritten"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", SEALED)
def test_sealed_files(whole: Place, kind: str, how: str, tmp_path: Path, environment: Callable[[Path], None]) -> None:
    of_kind = {
        "step record": ["models", "embeddings", "unused"],
        "note of a step": ["note", "notes", "forget", "unused"],
        "rates": ["plan", "note"],
        "table": ["show", "add", "unused"],
        "waiting run": ["sync", "publish", "unused"],
        "waiting comparison": ["sync", "publish", "unused"],
    }
    check(whole, kind, how, of_kind[kind], tmp_path, environment)


@pytest.mark.proof
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_every_way_by_every_reader(
    whole: Place, kind: str, how: str, tmp_path: Path, environment: Callable[[Path], None]
) -> None:
    check(whole, kind, how, READERS, tmp_path, environment)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "kind",
    [
        "scores",
        "class scores",
        "recall over epochs",
        "manifest",
        "shard",
        "kept epoch",
        "checkpoint",
        "lock",
        "dataset",
        "images",
        "rows of a dataset",
        "training rows",
        "servers",
    ],
)
def test_files_of_steps(whole: Place, kind: str, how: str, tmp_path: Path, environment: Callable[[Path], None]) -> None:
    of_kind = {
        "scores": "models",
        "class scores": "models",
        "recall over epochs": "models",
        "checkpoint": "network",
        "lock": "lock",
        "training rows": "tune",
        "servers": "environment",
    }
    reader = "data" if KINDS[kind].startswith("packed/") else of_kind.get(kind, "embeddings")
    check(whole, kind, how, [reader], tmp_path, environment)


@pytest.mark.proof
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["step record", "note of a step", *OF_STEPS])
def test_a_rerun_ends_as_the_undisturbed_run_or_in_one_line(
    undisturbed: Place,  # noqa: F811
    kind: str,
    how: str,
    tmp_path: Path,
) -> None:
    place = copied(undisturbed, tmp_path / "state").place
    for path in files_of(place.state, kind)[:3]:
        HOW[how](path)
        before = held(path)
        outcome: Outcome | Exception
        try:
            outcome = place.run()
        except DmlError as error:
            outcome = error
        if isinstance(outcome, Outcome):
            assert place.files() == undisturbed.files(), path
            assert kind not in SEALED or how != "newer", path
        else:
            assert isinstance(outcome, DmlError), outcome
            assert len(str(outcome).splitlines()) == 1
            assert held(path) == before, "refused, and left as it was"
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
