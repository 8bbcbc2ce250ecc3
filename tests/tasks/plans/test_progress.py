"""State of a table: not run, failed, partly run, done; stale as soon as settings, data or code would give another run."""

from dataclasses import astuple

import pytest
import yaml

from dml_core.config import merge, read_yaml
from tasks.environment import Project
from tasks.plans.plan import plan_tables
from tasks.plans.progress import TableState, table_states
from tasks.plans.results import load_result
from tasks.runs import identity
from tasks.runs.identity import step_identities
from tasks.tables.choice import Choice
from tasks.tables.file import load_table, paper_tables
from tasks.tables.result import FailedRun, MeasuredRun, TableResult, save_result
from tests.tasks.plans.conftest import look

TABLE, FIGURE = "softtriple/table1", "softtriple/figure3"


def state_of(project: Project) -> TableState:
    (found,) = table_states(look(project), [TABLE])
    return found


def measure(project: Project, choice: Choice, table: str = TABLE) -> None:
    """Save the result that a flow of these runs saves."""
    here = look(project)
    runs = [
        MeasuredRun(
            row=run.spec.row,
            variant=run.spec.variant,
            dataset=run.dataset,
            project_dataset=run.spec.dataset,
            seed=run.spec.seed,
            identity=step_identities(run.spec, here.dataset(run.dataset, load_table(table)))["evaluate"],
            scores={},
            figures="",
            training={},
            evaluation={},
        )
        for run in plan_tables(here, [table], choice)[0].runs
    ]
    save_result(project, load_result(project, table).updated(tuple(runs), (), None))


@pytest.mark.parametrize(
    ("choice", "how", "num_done", "num_seeds"),
    [
        (Choice(rows=("softtriple",)), "partly", 1, 1),
        (Choice(), "done", 2, 1),
        (Choice(seeds=(0, 1, 2)), "done", 2, 3),
        (Choice(variant="as_released"), "done", 2, 1),
        (Choice(track="common", seeds=(0, 1, 2)), "not run", 0, 0),
    ],
)
def test_what_was_measured_counts(project: Project, choice: Choice, how: str, num_done: int, num_seeds: int) -> None:
    before = state_of(project)
    assert (before.how, before.own_data.done, before.own_data.seeds) == ("not run", 0, 0)
    measure(project, choice)
    state = state_of(project)
    assert (state.how, *astuple(state.own_data)) == (how, 2, num_done, 0, num_seeds, 0)


def test_runs_with_tuned_settings_are_not_of_the_table_s_systems(project: Project) -> None:
    measure(project, Choice())
    tuned = [run.model_copy(update={"variant": "tuned"}) for run in load_result(project, TABLE).runs]
    save_result(project, TableResult(name=TABLE, runs=tuple(tuned)))
    assert (state_of(project).how, state_of(project).own_data.done) == ("not run", 0)


def test_a_pair_has_the_seeds_of_its_variant_with_the_most(project: Project) -> None:
    """Seeds of two variants are never averaged."""
    measure(project, Choice())
    measure(project, Choice(variant="as_released", seeds=(1, 2)))
    assert (state := state_of(project)).how == "done"
    assert state.own_data.seeds == 2


def test_a_failed_run_counts_until_its_row_is_measured(project: Project) -> None:
    failed = [FailedRun.of(run.spec, "no memory") for run in plan_tables(look(project), [TABLE], Choice())[0].runs]
    save_result(project, TableResult(name=TABLE).updated((), failed, None))
    assert ((state := state_of(project)).how, state.own_data.failed) == ("failed", 2)
    measure(project, Choice(rows=("softtriple",)))
    measured = load_result(project, TABLE)
    save_result(project, TableResult(name=TABLE, failed=measured.failed).updated(measured.runs, failed, None))
    assert ((state := state_of(project)).how, state.own_data.failed) == ("partly", 1)


def test_other_code_makes_it_stale(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(project, Choice())
    monkeypatch.setattr(identity, "source_digest", lambda modules: "edited")
    state = state_of(project)
    assert (state.how, state.own_data.done, state.own_data.stale) == ("stale", 0, 2)


def test_other_data_make_it_stale(project: Project) -> None:
    measure(project, Choice())
    block = {"datasets": {"cub200": {"options": {"stored_size": 16}}}}  # must be prepared again
    project.params_file.write_text(yaml.safe_dump(merge(read_yaml(project.params_file), block)))
    assert state_of(project).how == "stale"


def test_there_are_40_of_the_papers(project: Project) -> None:
    assert len(table_states(look(project), paper_tables())) == 40


def test_what_was_measured_on_stand_ins_is_counted_apart_and_makes_no_table_done(project: Project) -> None:
    block = {"datasets": {"drawn-80": {"reader": "synthetic", "raw": "data/raw/drawn-80"}}}
    project.params_file.write_text(yaml.safe_dump(merge(read_yaml(project.params_file), block)))
    measure(project, Choice(datasets=("drawn-80",)), FIGURE)
    (state,) = table_states(look(project), [FIGURE])
    assert (state.how, state.own_data.done, state.stand_in.done, state.stand_in.runs) == ("not run", 0, 2, 2)
