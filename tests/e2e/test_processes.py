"""What remains of a flow after one of its processes is killed, and how damaged files are handled.

One unfinished run is interrupted and resumed several times; its result must equal, byte for byte, that of an uninterrupted run. Then its
files are damaged, and it runs again.
"""

import re
import signal
from pathlib import Path

import pytest

from tests.damage import contents, cut, flip, garble
from tests.e2e.conftest import Project, make_project
from tests.e2e.disturbed import RUN, Disturbed

pytestmark = [pytest.mark.slow, pytest.mark.proof]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = make_project(tmp_path_factory.mktemp("project"), ("softtriple",))
    # The run must not replace the workers that this test stops.
    made.change(comparison={"protocol": {"num_epochs": 24}, "datasets": {"synthetic": {"num_epochs": 24}}}, scale={"hang_minutes": 60.0})
    return made


def test_a_run_ends_the_same_after_every_loss(project: Project, tmp_path: Path) -> None:
    run = Disturbed(project, tmp_path / "state")
    run.until(lambda: run.named("RayTrainWorker"), "a worker")
    run.named("flows.local_server")[0].kill()
    run.ends(2, "error: Prefect's server died", within_seconds=15)

    run = Disturbed(project, tmp_path / "state")
    run.freeze_in_the_middle()
    run.process.send_signal(signal.SIGTERM)
    run.ends(143, "interrupted", within_seconds=10)

    run = Disturbed(project, tmp_path / "state")
    run.freeze_in_the_middle()
    run.named("gcs/gcs_server")[0].kill()
    run.ends(2, "error: Ray's GCS (gcs_server) died", within_seconds=15)

    run = Disturbed(project, tmp_path / "state")
    run.until(lambda: run.named("RayTrainWorker"), "a worker")
    run.named("raylet/raylet")[0].kill()
    run.ends(2, "error: Ray's raylet died", within_seconds=15)

    run = Disturbed(project, tmp_path / "state")
    run.until(lambda: run.named("RayTrainWorker"), "a worker")
    (flow,) = run.supervisor.children()
    flow.kill()
    run.ends(2, "error: the flow's process was killed (SIGKILL)", within_seconds=15)

    run = Disturbed(project, tmp_path / "state")
    run.trains_further()
    run.named("RayTrainWorker")[0].kill()
    run.trains_further()
    run.named("ray::Board")[0].kill()
    printed, _ = run.process.communicate(timeout=600)
    assert run.process.returncode == 0, printed

    project.run(*RUN, DML_STATE=str(tmp_path / "undisturbed"))
    undisturbed = contents(tmp_path / "undisturbed/store")
    assert contents(tmp_path / "state/store") == undisturbed
    assert not list((tmp_path / "undisturbed/logs").iterdir())

    damage_much(tmp_path / "state")
    printed = project.run(*RUN, DML_STATE=str(tmp_path / "state"))
    assert contents(tmp_path / "state/store") == undisturbed
    assert "checkpoint.pt: the checkpoint is damaged" in printed
    assert "begins from the initial weights" in printed
    assert re.search(r"damaged; kept as \w+\.damaged-1; embed of .* runs again", printed)
    assert {line for line in printed.splitlines() if line.endswith(": ran")} == {f"{step}: ran" for step in ("train", "embed", "evaluate")}


def damage_much(state: Path) -> None:
    """Damage a checkpoint, a shard, the scores, and Prefect's record of a step."""
    flip(next((state / "store/train").rglob("checkpoint.pt")))
    cut(next((state / "store/train").rglob("history.jsonl")))
    garble(next((state / "store/embed").rglob("test-00000*.npy")))
    scores = next((state / "store/evaluate").rglob("metrics.json"))
    scores.write_text(scores.read_text().replace("0.", "0.9", 1))
    (kept,) = [path for path in (state / "prefect/storage").iterdir() if "EmbeddingRecord" in path.read_text()]
    cut(kept)
