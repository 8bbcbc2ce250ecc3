"""Steps that `dml gc` may delete: invented steps in a store with every kind of reference, in files as the project writes them."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dml_core.data.store.info import INFO_FILE
from dml_core.errors import ConfigError, DataError, StoreError, TrackingError
from dml_core.files import set_aside
from tasks import gc
from tasks.environment import Project, find_project, finished_records
from tasks.files import write_whole
from tasks.gc import delete, find_unused
from tasks.locks import FileLock, alone, running
from tasks.plans.plan import LocalState, plan_tables
from tasks.plans.results import load_result
from tasks.runs.costs import journal_file
from tasks.runs.finished import record_provenance, steps_before
from tasks.runs.identity import StepIdentity, identity_in, step_identities, train_step
from tasks.runs.params.file import load_params
from tasks.sealed import NewerFormatError, seal
from tasks.tables.choice import Choice
from tasks.tables.file import load_table, table_names
from tasks.tables.result import MeasuredRun, TableResult, result_path, save_result
from tasks.tracking.outbox import OUTBOX
from tasks.tuning.training_rows import training_rows
from tests.conftest import ROOT
from tests.damage import DAMAGE, as_format, folder

LONG_AGO = 1_600_000_000.0


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_database: Path) -> Project:
    """Three runs r1, r2, r3 in the store, each with a network, embeddings, scores, and the provenance of each step; one table has plans.

    MLflow's database shows none of them.
    """
    for name in ("DML_STORE", "DML_STATE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "state" / "prefect"))
    monkeypatch.delenv("PREFECT_LOCAL_STORAGE_PATH", raising=False)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gc, "table_names", lambda: ["softtriple/table1"])
    found = find_project()
    for run in ("r1", "r2", "r3"):
        make_run(found, run, LONG_AGO)
    shutil.copy(mlflow_database, found.state)
    return found


def make_run(project: Project, run: str, when: float, is_noted: bool = True) -> None:
    before = None
    for step in ("train", "embed", "evaluate"):
        folder, identity = Path(project.store) / step / f"{run}-{step}", f"{run}-{step}"
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x" * 1000)
        for path in (folder / "file", folder):
            os.utime(path, (when, when))
        if is_noted:
            record_provenance(project.state, StepIdentity(identity, f"settings-of-{identity}", (), before))
        before = identity


def unused(project: Project, days: float = 7.0) -> set[str]:
    return {step.key for step in find_unused(project, days)[0]}


def run_of(name: str) -> set[str]:
    return {f"{step}/{name}-{step}" for step in ("train", "embed", "evaluate")}


def measured(project: Project, run: str) -> None:
    entry = MeasuredRun(
        row="row", variant="v", dataset="d", project_dataset="d", seed=0, identity=f"{run}-evaluate", scores={}, figures="",
        training={}, evaluation={},
    )  # fmt: skip
    save_result(project, TableResult(name="softtriple/table1", runs=(entry,)))


def published(project: Project, identity: str, comparison: str) -> str:
    client = MlflowClient(project.tracking_uri)
    found = client.get_experiment_by_name("dml-repro/d")
    experiment = found.experiment_id if found else client.create_experiment("dml-repro/d")
    return client.create_run(experiment, tags={"dml.identity": identity, "dml.part_of": comparison}).info.run_id


def test_what_a_step_read_is_kept_beside_the_state(project: Project) -> None:
    assert steps_before(project.state)["r1-evaluate"] == "r1-embed"
    assert "r1-train" not in steps_before(project.state)


def test_nothing_refers_to_anything(project: Project) -> None:
    assert unused(project) == run_of("r1") | run_of("r2") | run_of("r3")


def test_a_dangling_link_is_removed_with_its_step(project: Project) -> None:
    folder = Path(project.store) / "train/r1-train"
    (folder / "link").symlink_to("nowhere")
    for path in (folder / "link", folder):
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    found, *_ = find_unused(project, 7.0)
    assert {step.key for step in found} >= run_of("r1")
    delete(project, found)
    assert not folder.exists()


def test_files_and_folders_that_vanish_meanwhile_are_skipped(project: Project) -> None:
    """A run in progress writes, renames and removes files below its step's folder all the time."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            for number in range(20):
                inside = Path(project.store) / f"train/r2-train/{number}"
                inside.mkdir()
                (inside / "file").touch()
            for number in range(20):
                shutil.rmtree(Path(project.store) / f"train/r2-train/{number}")

    run = threading.Thread(target=work)
    run.start()
    try:
        for _ in range(10):
            assert run_of("r1") | run_of("r3") <= unused(project)
    finally:
        ended.set()
        run.join()


def test_a_table_keeps_its_scores_and_what_they_were_made_of(project: Project) -> None:
    measured(project, "r1")
    assert unused(project) == run_of("r2") | run_of("r3")


def test_a_run_in_mlflow_is_kept_also_in_another_comparison_and_a_deleted_one_is_not(project: Project) -> None:
    published(project, "r1-evaluate", "comparison on d")
    published(project, identity_in("softtriple/table1 on d", "r2-evaluate"), "softtriple/table1 on d")
    superseded = published(project, "r3-evaluate", "comparison on d")
    assert unused(project) == set()
    MlflowClient(project.tracking_uri).delete_run(superseded)
    assert unused(project) == run_of("r3")


def test_without_mlflow_s_database_it_is_unknown_what_it_shows(project: Project) -> None:
    """A shell without the usual MLFLOW_TRACKING_URI lists every run that only MLflow shows."""
    database = Path(project.tracking_uri.removeprefix("sqlite:///"))
    database.rename(elsewhere := database.with_name("elsewhere.db"))
    with pytest.raises(TrackingError, match=r"^MLflow's database sqlite:\S+ is missing, so .* unknown; [^\n]+$"):
        find_unused(project, 7.0)
    assert unused(replace(project, tracking_uri=f"sqlite:///{elsewhere}")) == run_of("r1") | run_of("r2") | run_of("r3")
    shutil.rmtree(Path(project.store) / "evaluate")
    assert find_unused(project, 7.0)[0], "what has no scores was never published"


def test_what_a_table_would_run_today_stays(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "table_names", table_names)
    local, today = LocalState(project, load_params(project.params_file)), set()
    for name in ("softtriple/table1", "sgsl/table1"):
        table, (plan,) = load_table(name), plan_tables(local, [name], Choice())
        identities = step_identities(plan.runs[-1].spec, local.dataset(plan.runs[-1].dataset, table))
        today |= {f"{step}/{identity}" for step, identity in identities.items()}
    for key in today:
        folder = Path(project.store) / key
        folder.mkdir()
        os.utime(folder, (LONG_AGO, LONG_AGO))
    found = unused(project)
    assert "evaluate/r1-evaluate" in found
    assert not found & today


def test_what_older_code_trained_of_todays_runs_stays_before_it_is_scored(project: Project) -> None:
    """A table was stopped after its trainings, then the code changed: `--code keep` reuses the networks, but they were deleted."""
    local = LocalState(project, load_params(project.params_file))
    (plan,) = plan_tables(local, ["softtriple/table1"], Choice())
    run = plan.runs[0]
    step = train_step(run.spec, local.dataset(run.dataset, load_table("softtriple/table1")))
    record_provenance(project.state, replace(step, identity="r1-train"))
    assert unused(project) == run_of("r1") - {"train/r1-train"} | run_of("r2") | run_of("r3")


def test_where_it_was_not_noted_what_a_step_read_everything_older_stays(project: Project) -> None:
    make_run(project, "old", LONG_AGO + 100, is_noted=False)
    make_run(project, "new", LONG_AGO + 200)
    measured(project, "old")
    scores = {f"evaluate/{run}-evaluate" for run in ("r1", "r2", "r3")}
    assert unused(project) == scores | run_of("new")


def test_what_is_young_or_being_made_stays(project: Project) -> None:
    make_run(project, "young", time.time())
    assert not unused(project) & run_of("young")
    found, _, num_recent = find_unused(project, 7.0)
    assert num_recent == 3
    lock = FileLock(Path(project.store) / ".locks" / ".train-r1-train")
    lock.acquire()
    delete(project, found)
    lock.release()
    assert (Path(project.store) / "train" / "r1-train" / "file").exists()
    assert not (Path(project.store) / "train" / "r2-train").exists()


def test_what_was_made_or_used_since_the_oldest_running_flow_began_stays(project: Project) -> None:
    lock = running(Path(project.store) / ".locks")
    make_run(project, "new", time.time() + 1)
    assert unused(project, days=-1.0) == run_of("r1") | run_of("r2") | run_of("r3")
    lock.release(remove=True)
    assert run_of("new") <= unused(project, days=-1.0)


def test_what_was_used_since_it_was_found_stays(project: Project) -> None:
    found, *_ = find_unused(project, 7.0)
    os.utime(Path(project.store) / "train" / "r1-train")
    delete(project, found)
    assert (Path(project.store) / "train" / "r1-train" / "file").exists()
    assert not (Path(project.store) / "train" / "r2-train").exists()


def test_records_of_what_is_deleted_go_with_it(project: Project) -> None:
    record = project.state / "prefect" / "storage" / "r1-train"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    cost = journal_file(project.state, "train", "r1-train")
    write_whole(cost, "so far")
    measured(project, "r2")
    found, *_ = find_unused(project, 7.0)
    assert delete(project, found) == sum(step.num_bytes for step in found) > 6000
    assert not record.exists()
    assert not cost.exists()
    assert set(steps_before(project.state)) == {"r2-embed", "r2-evaluate"}
    assert unused(project) == set()


@pytest.mark.parametrize("damage", [*DAMAGE.values(), folder])
def test_a_damaged_record_of_an_unused_step_stops_nothing(project: Project, damage: Callable[[Path], None]) -> None:
    record = finished_records() / "r1-evaluate"
    record.parent.mkdir(parents=True)
    record.write_text("a record")
    damage(record)
    delete(project, find_unused(project, 7.0)[0])
    assert not record.exists()
    assert not (Path(project.store) / "evaluate" / "r1-evaluate").exists()


@pytest.mark.parametrize("how", [how for how in DAMAGE if how != "remove"])
def test_a_damaged_result_stops_it_until_the_person_removes_what_was_set_aside(project: Project, how: str) -> None:
    measured(project, "r1")
    path = result_path(project, "softtriple/table1")
    DAMAGE[how](path)
    with pytest.raises(StoreError, match=r"table1\.json: damaged, so the steps that it refers to are unknown; dml tables show rebuilds it"):
        find_unused(project, 7.0)
    assert load_result(project, "softtriple/table1").runs == ()
    with pytest.raises(StoreError, match=r"table1\.json\.damaged-1: damaged, so .* unknown; remove it when you need none of them"):
        find_unused(project, 7.0)
    aside = path.with_name("table1.json.damaged-1")
    assert aside.exists()
    if how == "flip":
        aside.unlink()
        assert unused(project) == run_of("r1") | run_of("r2") | run_of("r3")


def test_copies_of_training_images_that_no_dataset_has_any_more_are_unused(project: Project, packed: Path) -> None:
    """After each change of a dataset's images the former copy of `dml tune` stayed for ever."""
    shutil.copytree(packed, project.packed("synthetic"))
    today = training_rows(project, "synthetic", project.packed("synthetic")).folder
    former = shutil.copytree(today, Path(today).with_name("0123456789abcdef"))
    for copy in (Path(today), former):
        for path in (*copy.iterdir(), copy):
            os.utime(path, (LONG_AGO, LONG_AGO))
    found, num_kept, _ = find_unused(project, 7.0)
    assert {step.key for step in found} == run_of("r1") | run_of("r2") | run_of("r3") | {"tuning/0123456789abcdef"}
    assert num_kept == 1
    delete(project, found)
    assert not former.exists()
    assert Path(today).is_dir()


def test_a_damaged_dataset_stops_it(project: Project) -> None:
    """It was taken for one that is not prepared, so its runs of the standing comparison were unused."""
    write_whole(project.packed("synthetic") / INFO_FILE, "{")
    with pytest.raises(DataError, match=r"synthetic/dataset\.json: damaged"):
        find_unused(project, 7.0)


@pytest.mark.parametrize("how", [how for how in DAMAGE if how != "remove"])
@pytest.mark.parametrize("name", ["run.json", "~comparison.json"])
def test_a_damaged_record_in_the_outbox_stops_it(project: Project, name: str, how: str) -> None:
    path = project.state / OUTBOX / name
    path.parent.mkdir()
    path.write_text(seal("{}" * 20))
    DAMAGE[how](path)
    with pytest.raises(StoreError, match="damaged, so the steps that it refers to are unknown; dml sync sets it aside"):
        find_unused(project, 7.0)
    set_aside(path)
    with pytest.raises(StoreError, match=r"damaged-1: damaged, so the steps"):
        find_unused(project, 7.0)


def test_a_result_of_a_newer_version_stops_it(project: Project) -> None:
    measured(project, "r1")
    path = result_path(project, "softtriple/table1")
    path.write_text(as_format(path.read_text(), 2))
    with pytest.raises(NewerFormatError, match=r"table1\.json: written by a newer version \(format 2, this program reads up to 1\)"):
        find_unused(project, 7.0)


def test_of_a_bucket_the_copies_on_this_machine_go_unless_they_are_in_use(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are fetched again when they are needed, so what refers to them does not matter, and the steps stay finished."""
    Path(project.store).rename(project.state / "cache")
    monkeypatch.setenv("DML_STORE", "s3://bucket/prefix")
    measured(project, "r1")
    record = finished_records() / "r1-train"
    write_whole(record, "its record")
    cache, found = find_project().state / "cache", find_project()
    (cache / "train/r2-train/file").write_bytes(b"resumed")
    copies, num_kept, num_recent = find_unused(found, 7.0)
    old = (run_of("r1") | run_of("r2") | run_of("r3")) - {"train/r2-train"}
    assert ({step.key for step in copies}, num_kept, num_recent) == (old, 1, 1)
    with alone(cache / ".locks/.embed-r2-embed"), alone(cache / ".locks/.worker-train-r3-train"):
        assert delete(found, copies) == sum(step.num_bytes for step in copies if step.key not in ("embed/r2-embed", "train/r3-train"))
    assert {f"{path.parent.name}/{path.name}" for path in cache.glob("*/*") if path.is_dir()} == {
        "train/r2-train",
        "embed/r2-embed",
        "train/r3-train",
    }
    assert record.exists()
    assert steps_before(found.state)["r1-evaluate"] == "r1-embed"


def test_on_a_node_datasets_and_what_verifications_left_go_unless_they_are_in_use(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else removes them there."""
    monkeypatch.setenv("DML_STORE", "s3://bucket/prefix")
    node, copies = find_project(), project.state / "verify"
    left = {"cache/data/old", "cache/data/fetched", "verify/ended", "verify/running", "verify/of-the-flow"}
    for name in left:
        write_whole(project.state / name / "state/cache/file", "content")
    (copies / "of-the-flow/.lock").touch()
    used = running(copies / "running/state/cache/.locks")
    for path in [*copies.rglob("*"), *(project.state / "cache").rglob("*")]:
        os.utime(path, (LONG_AGO, LONG_AGO))
    found, *_ = find_unused(node, 7.0)
    assert {step.key for step in found} == {"data/old", "data/fetched", "verify/ended"}
    with alone(project.state / "cache/.locks/.data-fetched"):
        delete(node, found)
    assert {name for name in left if (project.state / name).exists()} == left - {"cache/data/old", "verify/ended"}
    used.release()


@pytest.mark.parametrize("place", ["shared", "state/../shared"])
def test_a_folder_that_other_projects_may_use_is_refused_and_a_link_to_an_own_one_is_not(
    place: str, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No project knows which of another one's networks in a common folder are still needed."""
    shared = tmp_path / "shared"
    Path(project.store).rename(shared)
    monkeypatch.setenv("DML_STORE", str(tmp_path / place))
    with pytest.raises(
        ConfigError, match=r"shared: may have other users, .*; if only this project uses it, unset DML_STORE and make .* a link"
    ):
        find_unused(find_project(), 7.0)
    monkeypatch.delenv("DML_STORE")
    (project.state / "store").symlink_to(shared)
    assert unused(find_project()) == run_of("r1") | run_of("r2") | run_of("r3")
