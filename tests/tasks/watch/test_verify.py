"""A project whose runs are trained: verification reproduces accepted runs, and finds injected faults."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from dml_core.data.store import packed
from dml_core.data.views import batches
from dml_core.errors import ConfigError, DataError, StoreError
from dml_core.training import loop
from flows.reuse.step_cache import SealedJSON
from tasks.data import read_dataset
from tasks.environment import Project
from tasks.reports.table_pages import HISTORY, SITE
from tasks.runs import surroundings
from tasks.runs.finished import read_finished
from tasks.runs.identity import step_identities
from tasks.runs.params.file import load_params
from tasks.runs.replaced_data import use_packed
from tasks.runs.specs import RunSpec
from tasks.tables.alarms import open_alarms
from tasks.watch import accepting, bands, evidence, fresh_runs, history, verdicts, verifying
from tasks.watch.accepting import accept
from tasks.watch.fresh_runs import Workspace
from tasks.watch.history import _picture, write_history
from tasks.watch.records import Reference, RowVerdict, Verdict, Verification
from tasks.watch.rotation import Turn
from tasks.watch.storage import (
    read_reference,
    read_references,
    read_verifications,
    reference_path,
    rows_today,
    write_reference,
    write_verification,
)
from tasks.watch.verdicts import verdict_of
from tasks.watch.verifying import VerifyRequest, verify
from tasks.wording import Say
from tests.tasks.watch.conftest import EPOCHS, SEEDS, STEPS, commit, reference, say, slightly_other_numbers, train_here, verified

pytestmark = pytest.mark.slow
Fault = Callable[[Project, pytest.MonkeyPatch], None]


def test_a_run_that_nothing_changed_is_identical_and_all_it_wrote_is_removed(accepted: Project) -> None:
    row = verified(accepted)
    assert (row.verdict, row.reason) == (Verdict.IDENTICAL, "")
    assert [line.split()[0] for line in row.changed] == ["commit"]
    assert open_alarms(accepted.state) == []
    assert [path for path in (accepted.state / "verify").iterdir() if path.is_dir()] == []


def test_a_bucket_that_fails_while_it_is_cleaned_up_costs_no_verdict(
    accepted: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreachable:
        is_remote = True

        def __init__(self, *_: object) -> None:
            pass

        def clear(self, key: str) -> None:
            raise StoreError(f"{key}: 503")

    with monkeypatch.context() as patch:
        patch.setattr(fresh_runs, "Store", Unreachable)
        assert verified(accepted).verdict is Verdict.IDENTICAL
    (left,) = (path for path in (accepted.state / "verify").iterdir() if path.is_dir())
    assert f"train: 503; the next verification removes the files of {left}" in caplog.text
    verified(accepted)
    assert not left.exists()


def test_the_reference_names_who_why_and_the_commit_and_every_seed(accepted: Project) -> None:
    reference = read_reference(accepted, "own")
    assert reference is not None
    assert (reference.who, reference.why) == ("A Person <person@example.invalid>", "first results")
    assert [one.seed for one in reference.evidence] == list(range(10))
    assert {(len(one.losses), one.steps_per_epoch) for one in reference.evidence} == {(EPOCHS * STEPS, STEPS)}


def test_a_verification_that_is_killed_leaves_verdicts_and_alarms_of_what_had_ended_and_the_next_goes_on(
    accepted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of many tables take days."""
    left: list[list[Path]] = []

    def train(space: Workspace, specs: Sequence[RunSpec], until: float, say: Say) -> dict[tuple[str, int], str]:
        if specs[0].seed == 4:
            left.append([*Path(space.store.address).rglob("checkpoint.pt")])
            raise KeyboardInterrupt
        return train_here(space, specs, until, say)

    monkeypatch.setattr(verifying, "train", train)
    for seed in (0, 1):
        if seed == 1:
            slightly_other_numbers(monkeypatch)
        assert verifying._Verifier(accepted, VerifyRequest(), say, None)._plan().turns[0].seed == seed
        with pytest.raises(KeyboardInterrupt):
            verify(accepted, VerifyRequest(("own",), seeds=(seed, 4)), say)
    rows = [
        row for one in read_verifications(accepted.state) for row in one.rows if row.verdict is not Verdict.NEW
    ]  # before it was accepted
    assert [(row.seed, row.verdict) for row in rows] == [(0, Verdict.IDENTICAL), (1, Verdict.DRIFTED)]
    assert [alarm.since for alarm in open_alarms(accepted.state)] == [read_verifications(accepted.state)[-1].started_at]
    assert [len(files) for files in left] == [0, 1], "files are kept only of rows that drifted"


def test_a_run_whose_beginning_needs_all_images_again_is_named_first(project: Project) -> None:
    """Of a large dataset it takes hours, in one thread."""
    spec, lines = rows_today(load_params(project.params_file), "own")["own/good"], list[str]()
    named = "own/good, seed 0: computing its beginning again, with all 48 training images in one CPU thread"
    for warm_up, expected in ((False, []), (True, [named])):
        training = spec.training.model_copy(update={"warm_up_batchnorm": warm_up})
        evidence.beginning(spec.model_copy(update={"training": training}), project.packed("own"), lines.append)
        assert lines == expected


def test_a_verification_by_a_clock_that_was_wrong_delays_no_row_and_is_not_the_last_one(accepted: Project) -> None:
    """Its rows would have their next turn in ten years, and until then the page had its verdict and nothing could be accepted."""

    def next_turn() -> Turn:
        return verifying._Verifier(accepted, VerifyRequest(), say, None)._plan().turns[0]

    turn, reference = next_turn(), read_reference(accepted, "own")
    assert reference is not None
    (evidence,) = (one for one in reference.of_row(turn.row) if one.seed == turn.seed)
    row = RowVerdict(row=turn.row, seed=turn.seed, verdict=Verdict.IDENTICAL, reason="", evidence=evidence)
    at = datetime.now(UTC) + timedelta(days=3650)
    write_verification(accepted.state, Verification(name="own", started_at=at, seconds=1, commit="c", rows=(row,)))
    assert next_turn() == turn
    verified(accepted)
    write_history(accepted, read_references(accepted))
    assert f"{at:%Y-%m-%d}" not in (accepted.root / SITE / HISTORY).read_text()
    accept(accepted, "own", "again", (), say)


def test_nothing_is_accepted_without_a_verification_a_reason_or_a_commit(project: Project) -> None:
    with pytest.raises(ConfigError, match="not verified yet; run: dml verify own"):
        accept(project, "own", "first results", (), say)
    verified(project)
    with pytest.raises(ConfigError, match="--why: give the reason"):
        accept(project, "own", " ", (), say)
    (project.root / "params.yaml").write_text((project.root / "params.yaml").read_text() + "# edited\n")
    with pytest.raises(ConfigError, match="commit first"):
        accept(project, "own", "first results", (), say)
    commit(project.root, "other settings")
    with pytest.raises(ConfigError, match="verified with other code than the present"):
        accept(project, "own", "first results", (), say)
    assert not reference_path(project, "own").exists()


def test_scores_of_a_former_network_are_those_of_an_unfinished_run(project: Project) -> None:
    """`dml reproduce --force` was stopped between training and scoring, and the networks have other bits."""
    spec, dataset = rows_today(load_params(project.params_file), "own")["own/good"], read_dataset(project, "own")
    verified(project)
    before: dict[Path, str] = {}
    for seed in SEEDS:
        scored = step_identities(spec.model_copy(update={"seed": seed}), dataset)["evaluate"]
        path, record = project.root / "records" / scored, read_finished(project.root / "records", "evaluate", scored)
        assert record is not None
        before[path] = path.read_text()
        former = record.model_copy(update={"inputs": "0" * 64})
        path.write_text(json.dumps({"metadata": {}, "result": SealedJSON().dumps(former).decode()}))
    try:
        with pytest.raises(ConfigError, match="own: no row is finished by this code; run them with dml reproduce"):
            accept(project, "own", "first results", (), say)
    finally:
        for path, content in before.items():
            path.write_text(content)


def test_a_finished_run_that_is_trained_again_meanwhile_costs_no_verdict(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `dml reproduce --force` in another shell: its files are no longer those of its record."""
    changed: dict[Path, bytes] = {}

    def train(space: Workspace, specs: Sequence[RunSpec], until: float, say: Say) -> dict[tuple[str, int], str]:
        changed.update({path: path.read_bytes() for path in Path(project.store).glob("train/*/checkpoint.pt")})
        for path in changed:
            path.write_bytes(b"of an epoch before the last")
        return train_here(space, specs, until, say)

    monkeypatch.setattr(verifying, "train", train)
    try:
        row = verified(project)
    finally:
        for path, before in changed.items():
            path.write_bytes(before)
    assert row.verdict is Verdict.NEW
    assert row.reason.startswith("not compared with the finished run: ")
    assert "/checkpoint.pt: changed or gone since its step recorded it" in row.reason
    assert row.evidence is not None


def test_a_nights_file_has_the_losses_that_are_judged_and_its_rows_can_be_accepted(
    accepted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of a million steps has fourteen megabytes of losses, in every night."""

    def written() -> int:
        (row,) = read_verifications(accepted.state)[-1].rows
        assert row.evidence is not None
        return len(row.evidence.losses)

    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with monkeypatch.context() as patch:
        slightly_other_numbers(patch)
        assert verified(accepted).verdict is Verdict.WITHIN_BAND
        assert written() == 2 * STEPS
    verified(accepted)
    reference, _ = accept(accepted, "own", "again", (), say)
    assert (written(), {len(one.losses) for one in reference.evidence}) == (2 * STEPS, {EPOCHS * STEPS})
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    with monkeypatch.context() as patch:
        slightly_other_numbers(patch)
        assert verified(accepted).verdict is Verdict.WITHIN_BAND, "of another environment again"
    with pytest.raises(ConfigError, match="the finished runs are not what the verification trained"):
        accept(accepted, "own", "again", (), say)


def test_rows_that_are_accepted_at_once_are_all_kept(accepted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = read_reference(accepted, "own")
    assert reference is not None

    def of_row(row: str) -> Reference:
        return reference.model_copy(update={"evidence": tuple(one.model_copy(update={"row": row}) for one in reference.evidence)})

    def slowly(project: Project, name: str) -> Reference | None:
        found = read_reference(project, name)
        time.sleep(0.1)
        return found

    monkeypatch.setattr(accepting, "verified_reference", lambda project, name, why, rows, kept, say: of_row(rows[0]))
    monkeypatch.setattr(accepting, "read_reference", slowly)
    rows = [f"own/row-{number}" for number in range(4)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda row: accept(accepted, "own", "more rows", [row], say), rows))
    after = read_reference(accepted, "own")
    assert after is not None
    assert {one.row for one in after.evidence} == {"own/good", *rows}


def test_rows_that_another_person_accepts_leave_the_others_theirs(accepted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = read_reference(accepted, "own")
    assert reference is not None

    def accept_as(who: str, row: str) -> list[tuple[str, tuple[str, ...]]]:
        runs = tuple(one.model_copy(update={"row": row}) for one in reference.evidence)
        new = reference.model_copy(update={"evidence": runs, "who": who, "why": f"by {who}"})
        monkeypatch.setattr(accepting, "verified_reference", lambda *_: new)
        accept(accepted, "own", "more", [row], say)
        after = read_reference(accepted, "own")
        assert after is not None
        assert (after.who, after.why) == (who, f"by {who}")
        return [(one.who, one.rows) for one in after.earlier]

    first = reference.who
    write_reference(accepted, reference.model_copy(update={"later": 1}))
    assert accept_as("B", "own/b") == [(first, ("own/good",))]
    assert accept_as("C", "own/c") == [(first, ("own/good",)), ("B", ("own/b",))]
    assert accept_as("D", "own/b") == [(first, ("own/good",)), ("C", ("own/c",))]
    after = read_reference(accepted, "own")
    assert after is not None
    assert after.model_extra == {"later": 1}, "a field that a newer program added"
    assert accept_as("E", "own/good") == [("C", ("own/c",)), ("D", ("own/b",))]
    verify(accepted, VerifyRequest(("own",), ("own/good",), seeds=(3,)), say)
    page = (accepted.root / SITE / HISTORY).read_text()
    assert "by E: by E<br>own/c: on " in page
    assert "by C: by C<br>own/b: on " in page


# ---------------------------------------------------------------- injected faults


def halved_rate(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = loop.learning_rate_factor
    monkeypatch.setattr(loop, "learning_rate_factor", lambda *arguments: 0.5 * factor(*arguments))


def noisy_labels(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def labels(self: packed.PackedDataset) -> np.ndarray:
        right = of_dataset(self)
        wrong = np.random.default_rng(0).random(len(right)) < 0.05
        return np.where(wrong, (right + 1) % (right.max() + 1), right) if self.role == "train" else right

    of_dataset = packed.PackedDataset.labels.func
    monkeypatch.setattr(packed.PackedDataset, "labels", property(labels))


def no_augmentation(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(image: Any, config: Any, seed: int, epoch: int, index: int, box: Any, copy: int) -> Any:
        return batches.test_pixels(image, config, box)

    monkeypatch.setattr(batches, "train_pixels", plain)


def wrong_scaling(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train_pixels", "test_pixels"):
        scaled = getattr(batches, name)
        monkeypatch.setattr(batches, name, lambda *args, scaled=scaled: scaled(*args) * 2 - 1)


def leaked_test_classes(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on the test images: the scores are too good."""
    opened = packed.PackedDataset.__init__

    def init(self: packed.PackedDataset, folder: Path, role: str, *more: Any, **named: Any) -> None:
        opened(self, folder, "test" if role == "train" else role, *more, **named)

    monkeypatch.setattr(packed.PackedDataset, "__init__", init)


def batchnorm_in_training_mode(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave networks in training mode while they embed."""
    monkeypatch.setattr(torch.nn.Module, "eval", lambda self: self)


def repeating_sampler(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def repeated(*arguments: Any) -> list[Any]:
        drawn = list(epoch_batches(*arguments))
        return [drawn[place % (len(drawn) // 2)] for place in range(len(drawn))]

    epoch_batches = loop.epoch_batches
    monkeypatch.setattr(loop, "epoch_batches", repeated)
    monkeypatch.setattr(evidence, "epoch_batches", repeated)


FAULTS: dict[str, tuple[Fault, str]] = {
    "rate halved": (halved_rate, "the loss differs from step 3 of epoch 1"),
    "label noise of 5 %": (noisy_labels, "samples, labels or order"),
    "augmentation dropped": (no_augmentation, "the images of the first batch differ"),
    "wrong pixel scaling": (wrong_scaling, "the images of the first batch differ"),
    "test classes leaked": (leaked_test_classes, "the images of the first batch differ"),
    "BatchNorm in training mode": (batchnorm_in_training_mode, "scoring differs, of equal weights"),
    "sampler that repeats": (repeating_sampler, "samples, labels or order"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_found_by_the_first_verification(fault: str, accepted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, reason = FAULTS[fault]
    with monkeypatch.context() as patch:
        inject(accepted, patch)
        row = verified(accepted)
    assert row.verdict is Verdict.DRIFTED
    assert reason in row.reason
    assert [reason in alarm.text for alarm in open_alarms(accepted.state)] == [True]


def test_a_corrupted_byte_of_a_dataset_is_found_and_nothing_is_trained(accepted: Project) -> None:
    path = next(path for path in accepted.packed("own").rglob("*") if path.is_file() and path.stat().st_size > 10_000)
    content = path.read_bytes()
    path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    try:
        row = verified(accepted)
    finally:
        path.write_bytes(content)
    assert (row.verdict, row.evidence) == (Verdict.FAILED, None)
    assert path.name in row.reason


def test_a_dataset_whose_code_alone_differs_is_packed_again_unless_a_flow_uses_other_images(
    accepted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pull all accepted rows had drifted without a training, although the images were the same."""
    updated: list[str] = []
    monkeypatch.setattr(verifying, "unchanged_dataset", lambda *_: None)
    monkeypatch.setattr(verifying, "changed_datasets", lambda project, params, names: dict.fromkeys(names, True))
    monkeypatch.setattr(verifying, "update_dataset", lambda project, name: updated.append(name))
    assert verified(accepted).verdict is Verdict.IDENTICAL
    assert updated == ["own"]

    def refuse(project: Project, name: str) -> None:
        raise DataError(f"{name}: in use")

    monkeypatch.setattr(verifying, "update_dataset", refuse)
    flow = use_packed(accepted, "own")
    (verification,) = verify(accepted, VerifyRequest(("own",)), say).verifications
    flow.release(remove=True)
    assert (verification.rows, verification.skipped) == ((), ("own/good",))
    assert (verified(accepted).verdict, len(open_alarms(accepted.state))) == (Verdict.FAILED, 1)
    monkeypatch.setattr(verifying, "changed_datasets", lambda project, params, names: dict.fromkeys(names, False))
    assert (row := verified(accepted)).verdict is Verdict.DRIFTED
    assert row.reason == "own is not as it was packed: raw or packed files or settings differ; run: dml reproduce"
    monkeypatch.setattr(verifying, "or_pull", lambda project, name: f"; or pull {name}")
    assert verified(accepted).reason == row.reason
    (accepted.root / "data/raw/own").rename(accepted.root / "data/raw/away")
    found = verified(accepted).reason
    (accepted.root / "data/raw/away").rename(accepted.root / "data/raw/own")
    assert found == f"{row.reason}; or pull own"


def test_rounding_errors_of_another_library_or_processor_are_within_the_band_and_named(
    accepted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # is recorded; the numbers change as follows
    monkeypatch.setattr(surroundings, "version", lambda name: "9.9" if name == "torch" else version(name))
    slightly_other_numbers(monkeypatch)
    row = verified(accepted, 7)
    assert row.verdict is Verdict.WITHIN_BAND, row.reason
    assert row.reason.startswith("the loss differs from step ")
    assert [line.split()[0] for line in row.changed] == ["commit", "processor", "torch"]
    assert row.changed[2].endswith("-> 9.9")


FOUR_WORKERS = {"num_workers": 4}  # whose sums have another order


def trained_with(facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each run that is read from now on be one with these facts of its training."""

    def read(*step: Any) -> Any:
        record = read_finished(*step)
        return record and record.model_copy(update={"facts": record.facts | facts})

    monkeypatch.setattr(evidence, "read_finished", read)


@pytest.mark.parametrize(
    ("facts", "changed"), [(FOUR_WORKERS, "workers 1 -> 4"), ({"device": "cuda"}, "device cpu -> GPU of a cluster, driver ")]
)
def test_a_run_of_more_workers_or_of_a_gpu_that_this_machine_lacks_is_judged_by_its_band(
    accepted: Project, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], changed: str
) -> None:
    trained_with(facts, monkeypatch)
    slightly_other_numbers(monkeypatch)
    row = verified(accepted)
    assert row.verdict is Verdict.WITHIN_BAND, row.reason
    assert [line.startswith(changed) for line in row.changed[1:]] == [True]


NODE = {"processor": "EPYC", "device": "H200", "threads": 3, "python": "3.12.1", "packages": {"torch": "2.14.1"}}


def test_on_a_cluster_the_machine_that_trained_counts_not_the_one_that_verifies(accepted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a node less its workers have more threads, so other bits; that was drift in an equal environment, with an alarm."""
    with monkeypatch.context() as patch:
        trained_with({surroundings.SURROUNDINGS: NODE}, patch)
        slightly_other_numbers(patch)
        row = verified(accepted)
    assert row.verdict is Verdict.WITHIN_BAND, row.reason
    assert row.evidence is not None
    assert NODE.items() <= row.evidence.environment.model_dump().items()
    trained_with({surroundings.SURROUNDINGS: NODE}, monkeypatch)
    reference, _ = accept(accepted, "own", "of a cluster", (), say)
    assert {one.environment.processor for one in reference.evidence} == {"EPYC"}
    commit(accepted.root, "accept a cluster's")
    with monkeypatch.context() as patch:
        trained_with({surroundings.SURROUNDINGS: NODE | {"threads": 4}}, patch)  # a node less
        repeating_sampler(accepted, patch)
        patch.setattr(verdicts, "judge", lambda *_: ({}, None))  # as if all scores were within their bands
        assert verified(accepted).verdict is Verdict.DRIFTED, "batches are the flow's, whose machine is the same"
    monkeypatch.setattr(surroundings, "processor", lambda: "the driver is another machine now")
    row = verified(accepted)
    assert row.verdict is Verdict.IDENTICAL
    assert [line.split()[:2] for line in row.changed[1:]] == [["flow's", "processor"]]
    assert row.evidence is not None
    on_cpu = {"environment": row.evidence.environment.model_copy(update={"device": "cpu"})}
    on_cpus = [one.model_copy(update=on_cpu) for one in reference.evidence]
    rounded = {name: value + 1e-9 for name, value in row.evidence.scores.items()}
    for update, verdict in (({"scores": rounded}, Verdict.WITHIN_BAND), ({"weights": "0" * 64}, Verdict.DRIFTED)):
        judged = verdict_of(row.evidence.model_copy(update=on_cpu | update), on_cpus, 0.01)
        assert judged.verdict is verdict, "scores are computed on the flow's machine, weights on the node"


def test_other_batches_are_drift_whatever_the_number_of_workers(accepted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_with(FOUR_WORKERS, monkeypatch)
    repeating_sampler(accepted, monkeypatch)
    monkeypatch.setattr(verdicts, "judge", lambda *_: ({}, None))  # as if all scores were within their bands
    row = verified(accepted)
    assert row.verdict is Verdict.DRIFTED
    assert row.reason == "samples, labels or order of the first epoch's batches differ, in an equal environment"


def test_runs_that_a_verification_with_more_workers_trained_are_accepted_by_their_band(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        trained_with(FOUR_WORKERS, patch)
        slightly_other_numbers(patch)
        verified(project)
    reference, _ = accept(project, "own", "first results", (), say)
    assert {one.environment.workers for one in reference.evidence} == {1}


def test_a_first_verification_says_before_it_trains_how_many_seeds_a_band_needs(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it cannot be accepted with fewer, after days."""
    write_reference(project, reference("other", *(f"other/{row}" for row in range(44))))
    lines: list[str] = []

    def train(space: Workspace, specs: Sequence[RunSpec], until: float, say: Say) -> dict[tuple[str, int], str]:
        lines.append("training")
        return train_here(space, specs, until, say)

    monkeypatch.setattr(verifying, "train", train)
    verify(project, VerifyRequest(("own",), seeds=(3,)), lines.append)
    note = "note: 10 seeds; 11 are needed for a band: until then any other bits are drift, as each training on a GPU has"
    assert lines.index(note) < lines.index("training")


def test_a_gpu_s_runs_of_too_few_seeds_for_a_band_name_a_remedy_that_leads_to_a_reference(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second training has other bits again: `--force` would end in the same way, after the same hours."""
    trained_with({"device": "cuda"}, monkeypatch)
    with monkeypatch.context() as patch:
        slightly_other_numbers(patch)
        verified(project)
    monkeypatch.setattr(accepting, "seeds_needed", lambda level: 11)
    monkeypatch.setattr(bands, "seeds_needed", lambda level: 11)
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"on a GPU finish 11 seeds for a band, or train with scale\.deterministic; then dml verify$"):
        accept(project, "own", "first results", (), lines.append)
    assert lines[-1].startswith("note: 10 seeds; 11 are needed for a band")


def test_all_accepted_rows_share_the_false_alarms_and_accept_names_those_who_lose_their_bands(
    accepted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """44 rows need 10 seeds for their bands, 45 need 11."""
    other, lines = write_reference(accepted, reference("other", *(f"other/{row}" for row in range(44)), seeds=range(10))), list[str]()
    verified(accepted)
    accept(accepted, "own", "again", (), lines.append)
    assert lines[-2:] == [
        "note: 10 seeds; 11 are needed for a band: until then any other bits are drift, as each training on a GPU has",
        "note: with the rows of own, other has too few seeds for bands: 10, and 11 are needed",
    ]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    slightly_other_numbers(monkeypatch)
    row = verified(accepted)
    assert row.verdict is Verdict.DRIFTED
    assert row.reason.endswith("; 10 accepted seeds, and a band needs 11")
    other.unlink()
    assert verified(accepted).verdict is Verdict.WITHIN_BAND


def test_a_reference_that_a_merge_doubled_is_refused_in_one_line(accepted: Project) -> None:
    """The band of eight seeds would be that of sixteen."""
    path = reference_path(accepted, "own")
    lines = path.read_text().splitlines()
    (place,) = (number for number, line in enumerate(lines) if '"seed": 3,' in line)
    path.write_text("\n".join([*lines[:place], lines[place], *lines[place:]]) + "\n")
    with pytest.raises(StoreError, match=r"own\.json: 2 runs of own/good have seed 3, as after a merge that kept both; keep one of them$"):
        verified(accepted)


def test_a_damaged_reference_can_be_accepted_again_as_its_error_says(accepted: Project) -> None:
    verified(accepted)
    reference_path(accepted, "own").write_text("{")
    with pytest.raises(StoreError, match="or accept again: dml accept own"):
        verified(accepted)
    reference_path(accepted, "own").write_text('{"format": 9}')
    with pytest.raises(StoreError, match=r"written by a newer version \(format 9\)"):
        accept(accepted, "own", "again", (), say)
    reference_path(accepted, "own").write_text("{")
    accept(accepted, "own", "again", (), say)
    assert verified(accepted).verdict is Verdict.IDENTICAL


def test_the_same_rounding_errors_in_an_equal_environment_are_drift_whose_alarm_ends_with_them(
    accepted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_picture", _picture)
    with monkeypatch.context() as patch:
        slightly_other_numbers(patch)
        row = verified(accepted)
    assert row.verdict is Verdict.DRIFTED
    assert row.reason.endswith("in an equal environment; all judged scores are within their bands")
    (alarm,) = open_alarms(accepted.state)
    page = (accepted.root / SITE / HISTORY).read_text()
    assert f"NOT reproduced since {alarm.since:%Y-%m-%d}" in page
    assert 'src="data:image/png;base64,' in page
    assert verified(accepted).verdict is Verdict.IDENTICAL
    assert open_alarms(accepted.state) == []
    assert "NOT reproduced" not in (accepted.root / SITE / HISTORY).read_text()


def test_rows_and_settings_that_changed_are_named_and_not_trained(accepted: Project) -> None:
    path = accepted.root / "params.yaml"
    params = yaml.safe_load(path.read_text())
    params["comparison"]["variants"]["new"] = {"loss": {"name": "softmax"}}
    params["comparison"]["variants"]["good"]["num_epochs"] = 9
    path.write_text(yaml.safe_dump(params))
    (verification,) = verify(accepted, VerifyRequest(("own",)), say).verifications
    assert {row.row: row.verdict for row in verification.rows} == {"own/good": Verdict.DRIFTED, "own/new": Verdict.NEW}
    assert "settings differ" in verification.rows[0].reason
    params["comparison"]["variants"].pop("good")
    path.write_text(yaml.safe_dump(params))
    (verification,) = verify(accepted, VerifyRequest(("own",)), say).verifications
    assert {row.row: row.verdict for row in verification.rows} == {"own/good": Verdict.VANISHED, "own/new": Verdict.NEW}


def test_an_accepted_name_that_the_project_has_no_more_stops_no_other(accepted: Project) -> None:
    write_reference(accepted, reference("old", "old/good"))
    path = write_reference(accepted, reference("old/table", "old/table:row:cub200"))
    everything = VerifyRequest(seeds=(3,))
    verifications = {one.name: one for one in verify(accepted, everything, say).verifications}
    assert {name: [row.verdict for row in one.rows] for name, one in verifications.items()} == {
        "old": [Verdict.VANISHED],
        "old/table": [Verdict.VANISHED],
        "own": [Verdict.IDENTICAL],
    }
    assert "restore old, or remove its file from results/accepted" in verifications["old"].rows[0].reason
    assert [alarm.name for alarm in open_alarms(accepted.state)] == ["old", "old/table"]
    reference_path(accepted, "old").unlink()
    path.unlink()
    lines: list[str] = []
    verify(accepted, everything, lines.append)
    assert open_alarms(accepted.state) == []
    (plan,) = (line for line in lines if "to verify" in line)
    assert plan.endswith("min; each verification covers every row"), "other seeds than the named one never have a turn"
    with pytest.raises(ConfigError, match="unknown dataset of the comparison or table 'old'"):
        verify(accepted, VerifyRequest(("old",)), say)


def test_deterministic_algorithms_are_a_setting_of_the_copy_only(accepted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = []

    def train(space: Workspace, specs: Sequence[RunSpec], until: float, say: Say) -> dict[tuple[str, int], str]:
        settings.append(load_params(space.project.params_file).scale.deterministic)
        return train_here(space, specs, until, say)

    monkeypatch.setattr(verifying, "train", train)
    (verification,) = verify(accepted, VerifyRequest(("own",), seeds=(3,), deterministic=True), say).verifications
    assert [row.verdict for row in verification.rows] == [Verdict.IDENTICAL]
    assert settings == [True]
    assert not load_params(accepted.params_file).scale.deterministic
