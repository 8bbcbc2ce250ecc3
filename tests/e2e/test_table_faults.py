"""A table of ten rows, run by two shells at once with shared runs, and run by one command that is killed several times: the same bytes.

The project's copy logs every training that starts, so that the tests can count them.
"""

import re
from pathlib import Path

import pytest
import yaml

from dml_core.config import merge
from dml_core.data.registry import materialise
from tests.damage import contents
from tests.e2e.conftest import Project, make_project
from tests.e2e.disturbed import Disturbed
from tests.e2e.test_tables import TABLE, TINY

pytestmark = [pytest.mark.slow, pytest.mark.proof]
TEN, SHARING = "softtriple/table91", "softtriple/table92"
WRITES_DOWN = """

def _written_down(job, *arguments, _train=train):
    if rank() == 0:
        with (Path(job.cache).parent / "begun.txt").open("a") as file:
            print(job.train_key, file=file)
    return _train(job, *arguments)


WORK["train"] = _written_down
"""


def table(dims: list[int]) -> str:
    """Return a table file with a row for each embedding size."""
    row = TABLE["rows"]["trained"]
    training = {dim: merge(TINY, {"model": {"head": {"embedding_dim": dim}}, "num_epochs": 3}) for dim in dims}
    rows = {f"of-{dim}": {**row, "label": f"Of {dim}", "training": training[dim]} for dim in dims}
    return yaml.safe_dump({**TABLE, "rows": rows})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a table of ten rows, and a table with five of these rows and one other."""
    made = make_project(tmp_path_factory.mktemp("project"), ("untrained",))
    materialise("synthetic", {"num_classes": 8, "images_per_class": 5, "image_size": 24, "num_modes": 2}, made.root / "data/raw/cub200")
    made.change(datasets={"cub200": {"reader": "cub200", "raw": "data/raw/cub200", "options": {"published_counts": False}}})
    for name, dims in ((TEN, [*range(4, 14)]), (SHARING, [*range(4, 9), 20])):
        (made.root / f"flows/tables/{name}.yaml").write_text(table(dims))
    with (made.root / "tasks/workers/work.py").open("a") as file:
        file.write(WRITES_DOWN)
    return made


@pytest.fixture(scope="module")
def shared(project: Project) -> Path:
    """State folder after both tables ran at the same time, from two shells."""
    state = project.root / "state"
    started = [project.start("dml", "reproduce", name) for name in (TEN, SHARING)]
    printed = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n\n".join(printed)
    assert not re.search("Traceback|wait for MLflow|FAILED|damaged", "".join(printed)), "\n\n".join(printed)
    assert [measured_rows(state, name) for name in (TEN, SHARING)] == [10, 6]
    return state


def measured_rows(state: Path, name: str) -> int:
    """Return the number of rows with measured values on a table's page."""
    return len(re.findall(r"\| as_published, 1 seed \| \d", (state / f"reports/tables/{name}.md").read_text()))


def begun(state: Path) -> list[str]:
    """Return the identity of every started training, in order."""
    return [line.removeprefix("train/") for line in (state / "begun.txt").read_text().splitlines()]


def finished(state: Path) -> set[str]:
    """Return the identities of the trainings with a finished record."""
    kept = [path for path in (state / "prefect/storage").glob("*") if "CheckpointRecord" in path.read_text()]
    return {path.name for path in kept}


def test_two_shells_that_share_runs_train_each_once_and_both_tables_are_whole(shared: Path) -> None:
    assert len(begun(shared)) == len(set(begun(shared))) == 11
    assert len(list((shared / "store/evaluate").iterdir())) == 11


def test_a_table_that_is_killed_three_times_is_finished_by_the_same_command(project: Project, shared: Path, tmp_path: Path) -> None:
    state, command = tmp_path / "state", ("dml", "reproduce", TEN)

    run = Disturbed(project, state, command)
    run.until(lambda: len(finished(state)) >= 3, "a third finished training")
    (flow,) = run.supervisor.children()
    flow.kill()
    run.ends(2, "error: the flow's process was killed (SIGKILL)", within_seconds=30)
    before, left = finished(state), len(begun(state))
    assert 3 <= len(before) < 10

    run = Disturbed(project, state, command)
    run.until(lambda: len(finished(state)) > len(before), "another finished training")
    run.named("flows.local_server")[0].kill()
    run.ends(2, "error: Prefect's server died", within_seconds=30)
    assert not before & set(begun(state)[left:])
    before, left = finished(state), len(begun(state))
    assert len(before) < 10

    run = Disturbed(project, state, command)
    run.until(lambda: len(begun(state)) > left, "a training")
    run.named("RayTrainWorker")[0].kill()
    printed, _ = run.process.communicate(timeout=900)
    assert run.process.returncode == 0, printed
    assert not before & set(begun(state)[left:])
    assert len(finished(state)) == measured_rows(state, TEN) == 10
    made, undisturbed = contents(state / "store"), contents(shared / "store")
    assert {Path(name).name for name in made} >= {"checkpoint.pt", "metrics.json", "manifest.json"}
    assert made == {name: undisturbed[name] for name in made}
