"""A random walk over a project's life: run, run again, damage, change data and code, rename, publish, clean up.

The records, the table's result, the outbox and `dml gc` are real; training is a step that writes a few bytes derived from its
identity, so that a score of another run is detected.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from dml_core.errors import StoreError
from flows.reuse.step_cache import SealedJSON
from tasks import gc
from tasks.environment import Project, finished_records
from tasks.files import files_set_aside, write_whole
from tasks.plans import results
from tasks.plans.results import add_runs, load_result
from tasks.runs import identity
from tasks.runs.finished import read_finished, record_provenance
from tasks.runs.identity import StepIdentity, embed_step, evaluate_step, train_step
from tasks.runs.params.comparison import comparison_runs, row_name
from tasks.runs.params.file import load_params
from tasks.runs.records import (
    CheckpointRecord,
    DatasetRecord,
    EmbeddingRecord,
    MetricRecord,
    RunReport,
    ScoreRecord,
    StepRecord,
    describe_folder,
    read_scores,
)  # fmt: skip
from tasks.runs.specs import RunSpec
from tasks.runs.tuned import STANDING
from tasks.sealed import DamagedError, or_set_aside
from tasks.storage import Store
from tasks.tables import present
from tasks.tables.file import STANDING_VARIANT, standing_table
from tasks.tables.present import table_today
from tasks.tables.result import MeasuredRun, result_path
from tasks.tables.view import comparable
from tasks.tracking.outbox import keep_report, read_report
from tests.conftest import small_training
from tests.damage import contents, cut, empty, flip, folder

PROTOCOL = small_training().model_dump(mode="json", exclude_defaults=True)
NUM_EPOCHS = (3, 2)  # epochs of the two variants, their only difference


def params_text(dataset: str, variants: Sequence[str]) -> str:
    """Return a `params.yaml` with one dataset and two variants of these names."""
    settings = {name: {"num_epochs": epochs} for name, epochs in zip(variants, NUM_EPOCHS, strict=True)}
    comparison = {"datasets": {dataset: {}}, "default_datasets": [dataset], "seeds": [0, 1], "protocol": PROTOCOL, "variants": settings}
    return yaml.safe_dump({"datasets": {dataset: {"reader": "synthetic", "raw": "data/raw/d"}}, "comparison": comparison})


KINDS = {"train": CheckpointRecord, "embed": EmbeddingRecord, "evaluate": ScoreRecord}
DAMAGES = {"flip": flip, "cut": cut, "empty": empty, "folder": folder}


def score_of(scored: str) -> float:
    """Return the score of an evaluation, derived from what was evaluated."""
    return int(hashlib.sha256(scored.encode()).hexdigest()[:8], 16) / 2**32


class Walk(RuleBasedStateMachine):
    """A project and what its user was shown: `measured` maps place in the table -> identity of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.outside = self.home / "outside"
        self.outside.mkdir()
        (self.outside / "images").write_bytes(b"a person's")
        root = self.home / "project"
        root.mkdir()
        self.project = Project(root, root / "state", str(root / "state/store"), f"sqlite:///{root}/state/mlflow.db")
        self.store = Store(self.project.store, root / "state/cache")
        self.digest, self.code = "0", "0"
        self.name, self.variants = "d", ["one", "two"]
        self.write_params()
        self.origins: dict[str, tuple[str, int]] = {}  # identity of scores -> digest of the data and number of epochs of its training
        self.measured: dict[Any, str] = {}
        self.waiting: dict[str, str] = {}  # name of a report in the outbox -> the scores' identity
        self.published: dict[str, float] = {}
        self.damaged_reports: set[str] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.home)

    @property
    def dataset(self) -> DatasetRecord:
        return DatasetRecord(name=self.name, folder="/nowhere", digest=self.digest, counts={"train": 1}, source="synthetic")

    @initialize()
    def begin(self) -> None:
        """Make everything that reads the environment use this project."""
        os.environ["PREFECT_LOCAL_STORAGE_PATH"] = str(self.project.state / "prefect/storage")
        results.dataset_if_intact = gc.dataset_if_prepared = lambda project, name: self.dataset  # type: ignore[attr-defined]
        identity.source_digest = lambda modules: self.code  # type: ignore[assignment]
        identity.source_digests = lambda modules: {"loop.py": self.code}  # type: ignore[assignment]
        gc.runs_of_tables = lambda *_: ({}, {})  # type: ignore[attr-defined]
        gc._in_mlflow = lambda *_: set()  # type: ignore[assignment]
        present.present_digest = lambda project, name: self.digest if name == self.name else None  # type: ignore[attr-defined]

    # ------------------------------------------------------------ actions of a user

    @rule(number=st.integers(0, 1), seed=st.integers(0, 2))
    def reproduce(self, number: int, seed: int) -> None:
        """Run `dml reproduce -v VARIANT -s SEED`."""
        (spec,) = comparison_runs(self.params, self.name, (self.variants[number],), (seed,))
        records: dict[str, Any] = {}
        before = ""
        for name, step in (("train", train_step), ("embed", embed_step), ("evaluate", evaluate_step)):
            of = step(spec, self.dataset if name == "train" else before)  # type: ignore[operator]
            records[name] = self.step(name, of)
            before = of.identity
        scores = read_scores(records["evaluate"], self.store.checked(records["evaluate"]))
        assert scores.metrics == {"recall@1": score_of(before)}
        self.origins[before] = self.digest, NUM_EPOCHS[number]
        run = self.entry(spec, before, scores)
        add_runs(self.project, STANDING, (run,), (), None)
        self.measured[run.place] = before
        self.publish_later(spec, before, records | {"evaluate": scores})

    def step(self, name: str, of: StepIdentity) -> StepRecord:
        """Return the step's record if all its files match, else run the step and save its record, as the flow does."""
        path = finished_records() / of.identity
        record = or_set_aside(path, lambda: read_finished(finished_records(), name, of.identity))
        if record is None or self.store.changed_files(record):
            key = f"{name}/{of.identity}"
            self.store.clear(key)
            text = json.dumps({"recall@1": score_of(of.identity)}) if name == "evaluate" else of.identity
            write_whole(self.store.folder(key) / ("metrics.json" if name == "evaluate" else "file"), text)
            record = KINDS[name](step=name, identity=of.identity, key=key, files=describe_folder(self.store.folder(key)))
            write_whole(path, json.dumps({"metadata": {}, "result": SealedJSON().dumps(record).decode()}))
        record_provenance(self.project.state, of)
        return record

    def entry(self, spec: RunSpec, scored: str, scores: MetricRecord) -> MeasuredRun:
        return MeasuredRun(
            row=row_name(spec.variant), variant=STANDING_VARIANT, dataset=self.name,
            project_dataset=self.name, seed=spec.seed, identity=scored,
            scores=scores.metrics, figures=f"evaluate/{scored}", training=spec.training.model_dump(mode="json"),
            evaluation=spec.evaluation.model_dump(mode="json"), digest=self.digest,
        )  # fmt: skip

    def publish_later(self, spec: RunSpec, scored: str, records: dict[str, Any]) -> None:
        if scored in self.published:
            return
        report = RunReport(
            comparison="c", identity=scored, dataset=self.dataset, variant=spec.variant, seed=spec.seed, parameters={}, tags={},
            dvc_digest=None, checkpoint=records["train"], embeddings=records["embed"], scores=records["evaluate"],
        )  # fmt: skip
        keep_report(self.project.state / "outbox", report)
        name = report.outbox_name.removesuffix(".json")  # a newer run of the variant and seed replaces the one that waits
        self.waiting[name] = scored
        self.damaged_reports.discard(name)

    @rule()
    def publish(self) -> None:
        """Run `dml sync`."""
        for path in sorted((self.project.state / "outbox").glob("*.json")):
            try:
                report = read_report(path)
            except DamagedError:
                continue
            assert isinstance(report, RunReport)
            self.published[report.identity] = report.scores.metrics["recall@1"]
            path.unlink()
            del self.waiting[path.stem]

    @rule(number=st.integers(0, 2))
    def change_data(self, number: int) -> None:
        """Switch to other images, or back."""
        self.digest = str(number)

    @rule(number=st.integers(0, 2))
    def change_code(self, number: int) -> None:
        """Switch to other code, or back."""
        self.code = str(number)

    @rule(what=st.sampled_from(["dataset", "first", "second", "both"]))
    def rename(self, what: str) -> None:
        """Rename the dataset or a variant, or swap the variants' names; if already renamed, undo it."""
        if what == "dataset":
            self.name = "e" if self.name == "d" else "d"
        elif what == "both":
            self.variants.reverse()
        else:
            number = int(what == "second")
            self.variants[number] = other if (other := f"other-{number}") not in self.variants else ("one", "two")[number]
        if len(set(self.variants)) == 1:
            self.variants[1] = "two" if self.variants[0] == "one" else "one"
        self.write_params()

    def write_params(self) -> None:
        self.text = params_text(self.name, self.variants)
        self.project.params_file.write_text(self.text)
        self.params = load_params(self.project.params_file)

    @precondition(lambda self: any(self.files()))
    @rule(data=st.data(), how=st.sampled_from([*DAMAGES]))
    def damage(self, data: st.DataObject, how: str) -> None:
        """Damage a file of the state."""
        path = self.files()[data.draw(st.integers(0, len(self.files()) - 1))]
        if path == result_path(self.project, STANDING):
            self.forget_what_cannot_be_rebuilt()
        if path.parent.name == "outbox":
            self.waiting.pop(path.stem, None)
            self.damaged_reports.add(path.stem)
        DAMAGES[how](path)

    def files(self) -> list[Path]:
        """Return the files that are not locks, temporary, empty or set aside."""
        found = sorted(path for path in self.project.state.rglob("*") if path.is_file() and not path.name.startswith("."))
        return [path for path in found if ".damaged-" not in str(path) and path.stat().st_size]

    def forget_what_cannot_be_rebuilt(self) -> None:
        """Keep only the runs that a damaged result gets back: those of the current settings and data with intact scores."""
        today = {
            (row_name(spec.variant), STANDING_VARIANT, "last", self.name, spec.seed): identity.step_identities(spec, self.dataset)[
                "evaluate"
            ]
            for spec in comparison_runs(self.params, self.name, None, range(3))
        }
        self.measured = {place: scored for place, scored in self.measured.items() if scored == today.get(place) and self.is_whole(scored)}

    def is_whole(self, scored: str) -> bool:
        try:
            record = read_finished(finished_records(), "evaluate", scored)
        except StoreError:
            return False
        return record is not None and not self.store.changed_files(record)

    @rule()
    def clean_up(self) -> None:
        """Run `dml gc --delete`: shown and waiting results are kept; nothing is deleted while a file is damaged."""
        state = self.project.state
        unreadable = files_set_aside(state / "tables") + files_set_aside(state / "outbox")
        before = {step.key for step in gc._stored(self.store)}
        try:
            gc.delete(self.project, gc.find_unused(self.project, -1.0)[0])
        except StoreError as error:
            assert unreadable or "damaged" in str(error)  # noqa: PT017
            assert {step.key for step in gc._stored(self.store)} == before
        else:
            assert not unreadable
            there = {step.key for step in gc._stored(self.store)}
            for scored in {*self.measured.values(), *self.waiting.values()}:
                assert f"evaluate/{scored}" in there or f"evaluate/{scored}" not in before

    @rule()
    def remove_what_was_set_aside(self) -> None:
        """Remove the files set aside, as a user may."""
        for path in files_set_aside(self.project.state):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    # ------------------------------------------------------------ invariants

    @invariant()
    def no_run_is_lost_and_no_number_is_another_runs(self) -> None:
        """The table shows every run shown before, each with the score of its own data, code and settings."""
        runs = {run.place: run for run in load_result(self.project, STANDING).runs}
        assert self.measured.items() <= {place: run.identity for place, run in runs.items()}.items()
        assert all(run.scores == {"recall@1": score_of(run.identity)} for run in runs.values())

    @invariant()
    def no_pair_of_unlike_runs(self) -> None:
        """Averaged runs share the current data and settings, or, for a removed dataset or variant, one origin."""
        result = load_result(self.project, STANDING)
        today = table_today(self.project, self.params, STANDING, standing_table(self.params), result)
        compared, left_out = comparable(result, today)
        origins: dict[tuple[str, str], set[tuple[str, int]]] = {}
        for run in compared.runs:
            origins.setdefault((run.dataset, run.row), set()).add(self.origins[run.identity])
        for (dataset, row), found in origins.items():
            assert len(found) == 1, f"{row} on {dataset}"
            epochs = {row_name(name): number for name, number in zip(self.variants, NUM_EPOCHS, strict=True)}
            if dataset == self.name:
                assert found == {(self.digest, epochs[row] if row in epochs else next(iter(found))[1])}
        assert all(len({digest for (of, _), found in origins.items() if of == name for digest, _ in found}) <= 1 for name in "de")
        assert (len(compared.runs) < len(result.runs)) == bool(left_out), "what is left out is named"

    @invariant()
    def every_report_waits_or_was_published(self) -> None:
        """Every report is unchanged."""
        assert all((self.project.state / "outbox" / f"{name}.json").is_file() for name in self.waiting)
        assert all(score == score_of(scored) for scored, score in self.published.items())

    @invariant()
    def nothing_outside_is_touched(self) -> None:
        """Outside the project nothing changes, and inside only its state."""
        assert contents(self.outside) == {"images": b"a person's"}
        assert sorted(path.name for path in self.home.iterdir()) == ["outside", "project"]
        assert {path.name for path in self.project.root.iterdir()} <= {"params.yaml", "state"}
        assert (self.project.root / "params.yaml").read_text() == self.text


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore after the walk what it replaces."""
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", "")
    for module, name in (
        (results, "dataset_if_intact"), (gc, "dataset_if_prepared"), (gc, "runs_of_tables"), (gc, "_in_mlflow"),
        (identity, "source_digest"), (identity, "source_digests"), (present, "present_digest"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, getattr(module, name))


def walk(examples: int, steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=checks,
            phases=[Phase.generate, Phase.shrink],
        ),
    )


def test_a_walk(undone: None) -> None:
    walk(15, 20)


@pytest.mark.proof
def test_a_long_walk(undone: None) -> None:
    walk(300, 60)
