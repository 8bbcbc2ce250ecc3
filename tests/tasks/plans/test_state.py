"""How far a table is: not run, partly, done; and stale as soon as settings, data or code would give another run."""

import pytest
import yaml

from dml_core.config import merge, read_yaml
from tasks.environment import Project
from tasks.plans.plan import plan_tables
from tasks.plans.state import TableState, table_states
from tasks.runs import identity
from tasks.runs.identity import evaluate_identity
from tasks.tables.choice import Choice
from tasks.tables.file import load_table, paper_tables
from tasks.tables.result import MeasuredRun, TableResult, save_result
from tests.tasks.plans.conftest import look

TABLE = "softtriple/table1"


def state_of(project: Project) -> TableState:
    (found,) = table_states(look(project), [TABLE])
    return found


def measure(project: Project, choice: Choice) -> None:
    """Leave the result that a flow of these runs leaves."""
    here = look(project)
    runs = [
        MeasuredRun(
            row=run.spec.variant.partition(" ")[0],
            variant=run.spec.variant.partition(" ")[2],
            dataset=run.dataset,
            project_dataset=run.spec.dataset,
            seed=run.spec.seed,
            identity=evaluate_identity(run.spec, here.dataset(run.dataset, load_table(TABLE))),
            scores={},
            figures="",
            training={},
            evaluation={},
        )
        for run in plan_tables(here, [TABLE], choice)[0].runs
    ]
    save_result(project, TableResult(name=TABLE).updated(tuple(runs), {}, None))


@pytest.mark.parametrize(
    ("choice", "how", "num_done", "num_seeds"),
    [
        (Choice(rows=("softtriple",)), "partly", 1, 1),
        (Choice(), "done", 2, 1),
        (Choice(seeds=(0, 1, 2)), "done", 2, 3),
        (Choice(variant="as_released"), "done", 2, 1),
        (Choice(track="common"), "done", 2, 1),
    ],
)
def test_what_was_measured_counts(project: Project, choice: Choice, how: str, num_done: int, num_seeds: int) -> None:
    before = state_of(project)
    assert (before.how, before.num_done, before.num_seeds) == ("not run", 0, 0)
    measure(project, choice)
    state = state_of(project)
    assert (state.how, state.num_runs, state.num_done, state.num_stale, state.num_seeds) == (how, 2, num_done, 0, num_seeds)


def test_other_code_makes_it_stale(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(project, Choice())
    monkeypatch.setattr(identity, "source_digest", lambda modules: "edited")
    state = state_of(project)
    assert (state.how, state.num_done, state.num_stale) == ("stale", 0, 2)


def test_other_data_make_it_stale(project: Project) -> None:
    measure(project, Choice())
    block = {"datasets": {"cub200": {"options": {"stored_size": 16}}}}  # to be prepared anew
    project.params_file.write_text(yaml.safe_dump(merge(read_yaml(project.params_file), block)))
    assert state_of(project).how == "stale"


def test_there_are_39_of_the_papers(project: Project) -> None:
    assert len(table_states(look(project), paper_tables())) == 40
