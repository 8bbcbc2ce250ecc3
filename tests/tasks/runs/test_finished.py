"""Names of runs; steps that older code made, by settings and inputs, with the names of the files that differ."""

from pathlib import Path

import pytest

from flows.reuse.planned import finished_record
from tasks.environment import finished_records
from tasks.files import files_set_aside
from tasks.runs import identity
from tasks.runs.finished import RunName, finished_identities, made_by_older_code, parse_run_name, record_provenance, run_identities
from tasks.runs.records import CheckpointRecord
from tasks.storage import Store
from tests.damage import DAMAGE
from tests.tasks.plans.test_rebuilding import keep
from tests.tasks.runs.test_identity import DATASET, SPEC, changed

LOSS = "dml_core/losses/softtriple.py"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cub200", RunName("cub200", None, None)),
        ("cub200/softmax", RunName("cub200", "softmax", None)),
        ("cub200/softmax/07", RunName("cub200", "softmax", 7)),
        ("", None),
        ("cub200/", None),
        ("/softmax", None),
        ("cub200//1", None),
        ("cub200/softmax/-1", None),
        ("cub200/softmax/\u0662", None),
        ("cub200/softmax/1/2", None),
        (f"cub200/softmax/{'1' * 5000}", None),
    ],
)
def test_a_run_has_a_dataset_and_may_have_a_variant_and_a_seed(text: str, name: RunName | None) -> None:
    assert parse_run_name(text) == name


def test_a_record_that_names_no_file_is_damaged_so_that_its_step_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(tmp_path / "records"))
    keep(CheckpointRecord(step="train", identity="0123", key="train/0123", files=()))
    assert finished_record("train", "0123", Store(str(tmp_path / "store"), tmp_path / "cache"), "a run") is None
    assert [path.name for path in files_set_aside(finished_records())] == ["0123.damaged-1"]


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Source files of every step -> their behaviour, which a test may change."""
    files = {"dml_core/training/loop.py": "loop", LOSS: "loss"}
    monkeypatch.setattr(identity, "source_digest", lambda modules: str(sorted(files.items())))
    monkeypatch.setattr(identity, "source_digests", lambda modules: dict(files))
    return files


def test_what_the_code_as_it_is_made_is_not_older(tmp_path: Path, code: dict[str, str]) -> None:
    step = identity.train_step(SPEC, DATASET)
    assert finished_identities(tmp_path, step) == {step.identity: ()}
    record_provenance(tmp_path, step)
    assert finished_identities(tmp_path, step) == {step.identity: ()}


def test_edited_added_and_removed_files_are_named_and_the_newest_is_found(tmp_path: Path, code: dict[str, str]) -> None:
    first = identity.train_step(SPEC, DATASET)
    record_provenance(tmp_path, first)
    code[LOSS] = "edited"
    second = identity.train_step(SPEC, DATASET)
    assert first.identity != second.identity
    assert first.settings == second.settings
    assert list(finished_identities(tmp_path, second).items()) == [(second.identity, ()), (first.identity, (LOSS,))]
    assert made_by_older_code((LOSS,)) == f"made by other code: {LOSS}"
    record_provenance(tmp_path, second)
    del code["dml_core/training/loop.py"]
    code["dml_core/training/steps.py"] = "loop"
    found = finished_identities(tmp_path, identity.train_step(SPEC, DATASET))
    assert found[second.identity] == ("dml_core/training/loop.py", "dml_core/training/steps.py")
    assert first.identity not in found


def test_a_run_may_be_finished_in_part_by_older_code(tmp_path: Path, code: dict[str, str]) -> None:
    before = identity.step_identities(SPEC, DATASET)
    record_provenance(tmp_path, identity.train_step(SPEC, DATASET))
    code[LOSS] = "edited"
    first, second = run_identities(tmp_path, SPEC, DATASET)
    assert {"train": first.trained, "embed": first.embedded, "evaluate": first.scored} == identity.step_identities(SPEC, DATASET)
    assert (first.older_code, second.trained, second.older_code) == ((), before["train"], (LOSS,))
    assert second.embedded not in (before["embed"], first.embedded), "by the present code, of the older network"


def test_other_settings_data_or_inputs_find_nothing(tmp_path: Path, code: dict[str, str]) -> None:
    record_provenance(tmp_path, identity.train_step(SPEC, DATASET))
    record_provenance(tmp_path, identity.embed_step(SPEC, "one training"))
    code[LOSS] = "edited"
    others = [identity.train_step(changed(seed=1), DATASET), identity.train_step(SPEC, DATASET.model_copy(update={"digest": "4567"}))]
    others.append(identity.embed_step(SPEC, "another training"))
    assert [len(finished_identities(tmp_path, step)) for step in others] == [1, 1, 1]
    assert len(finished_identities(tmp_path, identity.embed_step(SPEC, "one training"))) == 2


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_note_is_kept_aside_and_written_again(tmp_path: Path, code: dict[str, str], how: str) -> None:
    record_provenance(tmp_path, identity.train_step(SPEC, DATASET))
    (note,) = (tmp_path / "made").iterdir()
    DAMAGE[how](note)
    damaged = note.read_bytes() if note.exists() else None
    code[LOSS] = "edited"
    step = identity.train_step(SPEC, DATASET)
    assert finished_identities(tmp_path, step) == {step.identity: ()}
    record_provenance(tmp_path, step)
    assert [path.name for path in (tmp_path / "made").glob("*.json")] == [note.name]
    assert [path.read_bytes() for path in files_set_aside(tmp_path)] == ([damaged] if damaged is not None else [])


def test_the_files_of_a_step_are_named_as_in_the_repository() -> None:
    files = identity.train_step(SPEC, DATASET).sources()
    assert {LOSS, "dml_core/training/loop.py"} <= set(files)
    assert not [name for name in files if not name.startswith(("dml_core/", "tasks/")) or not name.endswith(".py")]
    assert set(identity.source_digests(("tasks.runs", "dml_core.errors"))) == {"tasks/runs/__init__.py", "dml_core/errors.py"}
