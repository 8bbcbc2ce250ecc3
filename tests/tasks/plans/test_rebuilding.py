"""A damaged result of a table is kept under another name, reported, and rebuilt from the finished runs in the store."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import yaml

from dml_core.config import merge, read_yaml
from flows.reuse.step_cache import SealedJSON
from tasks.environment import Project, finished_records
from tasks.files import files_set_aside
from tasks.gc import find_unused
from tasks.plans.progress import table_states
from tasks.plans.results import add_runs, load_result
from tasks.runs import identity
from tasks.runs.costs import FACT, Cost
from tasks.runs.finished import record_provenance
from tasks.runs.identity import embed_step, evaluate_step, train_step
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import CheckpointRecord, ScoreRecord, StepRecord, describe_folder, read_scores
from tasks.runs.specs import RunSpec
from tasks.runs.tuned import STANDING
from tasks.sealed import NewerFormatError, seal, unseal
from tasks.tables.choice import Choice
from tasks.tables.file import load_table
from tasks.tables.result import FailedRun, MeasuredRun, TableResult, result_path
from tasks.tables.runs import runs_of_tables
from tests.damage import DAMAGE, as_format
from tests.tasks.plans.conftest import look

TABLE = "softtriple/table1"
OTHER = "softtriple/table2"
SOME = Choice(seeds=(0, 3, 2**32 - 1))


def keep(record: StepRecord) -> None:
    """Write a record as Prefect does."""
    path = finished_records() / record.identity
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"metadata": {"storage_key": record.identity}, "result": SealedJSON().dumps(record).decode()}))


def finish(project: Project, spec: RunSpec, dataset: str) -> MeasuredRun:
    """Write a run's files to the store and to Prefect's storage, and return the run as its flow adds it to the table."""
    here = look(project)
    record = here.dataset(dataset, load_table(TABLE))
    spec = spec.model_copy(update={"dataset": record.name})
    trained = train_step(spec, record)
    embedded = embed_step(spec, trained.identity)
    scored = evaluate_step(spec, embedded.identity)
    for step in (trained, embedded, scored):
        record_provenance(project.state, step)
    folder = Path(project.store) / "evaluate" / scored.identity
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps({"recall@1": spec.seed / 2**33}))
    cost = Cost(cpu_seconds=25.0)
    facts = {"seconds": 12.5, FACT: cost.model_dump(mode="json")}
    files = describe_folder(folder)
    checkpoint = CheckpointRecord(step="train", identity=trained.identity, key=f"train/{trained.identity}", files=files, facts=facts)
    scores = ScoreRecord(step="evaluate", identity=scored.identity, key=f"evaluate/{scored.identity}", files=files)
    keep(checkpoint)
    keep(scores)
    return MeasuredRun.of(spec, read_scores(scores, folder), record.digest, 12.5, costs={"train": cost})


def finished_table(project: Project, choice: Choice = SOME) -> TableResult:
    """Finish a table's runs of three seeds, in the store and in the result."""
    runs = [finish(project, spec, dataset) for (_, dataset), specs in runs_of_tables([TABLE], choice)[0].items() for spec in specs]
    failed = FailedRun(row="softtriple", variant="as_published", dataset="cub200", seed=9, reason="failed")
    add_runs(project, TABLE, runs, [failed], "commit")
    return load_result(project, TABLE)


@pytest.mark.parametrize("how", [how for how in DAMAGE if how != "remove"])
def test_a_damaged_result_is_rebuilt_and_a_part_run_again_loses_nothing(
    project: Project, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = finished_table(project)
    assert len(before.runs) == 6
    path = result_path(project, TABLE)
    DAMAGE[how](path)
    damaged = path.read_bytes()
    one = before.runs[0].model_copy(update={"scores": {"recall@1": 0.5}})
    add_runs(project, TABLE, (one,), (), "new commit")
    found = load_result(project, TABLE)
    # A seed beyond the first ten is found only if the damaged bytes still contain it.
    expected = [run for run in before.runs if run.seed < 10 or how in ("flip", "lengthen", "cut")]
    assert found.runs == tuple(one if run.place == one.place else run for run in expected)
    assert path.with_name("table1.json.damaged-1").read_bytes() == damaged
    (line,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    rebuilt = f"rebuilt {len(expected)} runs from the store; rerun dml reproduce to add the others"
    assert line == f"{path}: damaged; kept as table1.json.damaged-1; {rebuilt}"


def test_who_reads_a_damaged_result_first_repairs_it_for_all(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    before = finished_table(project)
    (state,) = table_states(look(project), [TABLE])
    path = result_path(project, TABLE)
    path.unlink()
    path.mkdir()
    (again,) = table_states(look(project), [TABLE])
    assert [(one.how, one.own_data.done, one.own_data.stale) for one in (state, again)] == [("done", 2, 0)] * 2
    assert load_result(project, TABLE).runs == tuple(run for run in before.runs if run.seed < 10)
    assert [one.name for one in files_set_aside(project.state)] == ["table1.json.damaged-1"]
    assert len(caplog.records) == 1


def test_a_variant_that_is_not_tuned_yet_stops_neither_rebuilding_nor_cleaning_up(project: Project, mlflow_database: Path) -> None:
    shutil.copy(mlflow_database, project.state)
    values = read_yaml(project.params_file)
    variants = {"softmax": {"loss": {"name": "softmax"}}, "mine": {"loss": {"name": "softmax"}, "tuned": True}}
    values["comparison"] |= {"default_datasets": ["cub200"], "datasets": {"cub200": {}}, "variants": variants}
    project.params_file.write_text(yaml.safe_dump(values))
    (spec,) = comparison_runs(load_params(project.params_file), "cub200", ("softmax",), (0,))
    run = finish(project, spec, "cub200")
    add_runs(project, STANDING, [run], [], None)
    path = result_path(project, STANDING)
    path.write_bytes(b"damaged")
    assert load_result(project, STANDING).runs == (run,)
    path.unlink()
    path.with_name("standing.json.damaged-1").unlink()
    (Path(project.store) / "evaluate" / "unused").mkdir()
    unused, *_ = find_unused(project, -1.0)
    assert [step.key for step in unused] == ["evaluate/unused"]  # the run is of today's settings


@pytest.mark.parametrize("name", [STANDING, TABLE])
def test_a_damaged_dataset_is_named_where_its_runs_are_not_rebuilt(name: str, project: Project, caplog: pytest.LogCaptureFixture) -> None:
    values = read_yaml(project.params_file)
    values["comparison"] |= {"default_datasets": ["cub200"], "datasets": {"cub200": {}}}
    project.params_file.write_text(yaml.safe_dump(values))
    info = project.packed("cub200") / "dataset.json"
    for path in (info, result_path(project, name)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"damaged")
    assert load_result(project, name).runs == ()
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [str(info), str(result_path(project, name))]


def test_nothing_to_rebuild_of_is_not_run_and_the_damaged_file_stays(project: Project) -> None:
    path = result_path(project, TABLE)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"first")
    assert load_result(project, TABLE) == TableResult(name=TABLE)
    path.write_bytes(b"second")
    assert load_result(project, TABLE) == TableResult(name=TABLE)
    assert [one.read_bytes() for one in files_set_aside(project.state)] == [b"first", b"second"]


def test_scores_that_do_not_fit_their_record_are_not_rebuilt(project: Project) -> None:
    before = finished_table(project)
    for run in before.runs:
        metrics = Path(project.store) / run.figures / "metrics.json"
        if run.seed == 3:
            metrics.write_text('{"recall@1": 0.999}')
    result_path(project, TABLE).write_bytes(b"")
    assert [run.seed for run in load_result(project, TABLE).runs] == [0, 0]


@pytest.mark.parametrize("how", [how for how in DAMAGE if how != "remove"])
def test_a_damaged_record_of_the_training_loses_only_its_time_and_cost(project: Project, how: str) -> None:
    before = finished_table(project, Choice(seeds=(0,)))
    here = look(project)
    for (_, dataset), specs in runs_of_tables([TABLE], Choice(seeds=(0,)))[0].items():
        record = here.dataset(dataset, load_table(TABLE))
        for spec in specs:
            DAMAGE[how](finished_records() / train_step(spec.model_copy(update={"dataset": record.name}), record).identity)
    result_path(project, TABLE).write_bytes(b"")
    assert [run.seconds for run in before.runs] == [12.5, 12.5]
    assert load_result(project, TABLE).runs == tuple(run.model_copy(update={"seconds": None, "costs": {}}) for run in before.runs)


def test_runs_of_older_code_and_of_other_variants_are_rebuilt_and_marked(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [
        *finished_table(project, Choice(variant="as_released")).runs,
        *finished_table(project, Choice(track="common")).runs,
    ]
    digests = identity.source_digests
    monkeypatch.setattr(identity, "source_digest", lambda modules: f"edited {modules}")
    monkeypatch.setattr(identity, "source_digests", lambda modules: digests(modules) | {"dml_core/training/loop.py": "edited"})
    result_path(project, TABLE).write_bytes(b"")
    found = {run.place: run for run in load_result(project, TABLE).runs}
    assert {run.place for run in before} <= set(found)
    assert {run.identity for run in before} == {run.identity for run in found.values()}
    assert {run.older_code for run in found.values()} == {("dml_core/training/loop.py",)}


def test_the_standing_comparison_is_rebuilt_with_the_seeds_of_params(project: Project) -> None:
    block = {"comparison": {"datasets": {"cub200": {}}, "seeds": [0, 77]}}
    project.params_file.write_text(yaml.safe_dump(merge(read_yaml(project.params_file), block)))
    specs = comparison_runs(load_params(project.params_file), "cub200", ("softtriple", "softmax"))
    before = [finish(project, spec, "cub200") for spec in specs]
    add_runs(project, STANDING, tuple(before), (), None)
    before = list(load_result(project, STANDING).runs)
    assert len(before) == 4
    DAMAGE["empty"](result_path(project, STANDING))
    assert list(load_result(project, STANDING).runs) == before


def test_another_tables_result_is_not_believed(project: Project) -> None:
    finished_table(project)
    other = result_path(project, OTHER)
    other.write_bytes(result_path(project, TABLE).read_bytes())
    assert load_result(project, OTHER).runs == ()
    assert other.with_name("table2.json.damaged-1").exists()


def test_a_newer_version_and_unknown_fields(project: Project) -> None:
    before = finished_table(project)
    path = result_path(project, TABLE)
    content = json.loads(unseal(path.read_bytes()))
    content["weather"] = content["runs"][0]["weather"] = "rain"
    path.write_text(seal(json.dumps(content)))
    add_runs(project, TABLE, (before.runs[-1],), (), None)
    after = json.loads(unseal(path.read_bytes()))
    assert (after["weather"], after["runs"][0]["weather"]) == ("rain", "rain")
    path.write_text(as_format(path.read_text(), 2))
    newer = path.read_bytes()
    for act in (lambda: load_result(project, TABLE), lambda: add_runs(project, TABLE, (), (), None)):
        with pytest.raises(NewerFormatError, match=r"table1\.json: written by a newer version \(format 2, this program reads up to 1\)"):
            act()
    assert path.read_bytes() == newer
