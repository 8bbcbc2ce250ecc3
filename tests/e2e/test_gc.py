"""`dml gc` on real runs: superseded steps are removed, referenced steps are kept, and the next run reuses all of them."""

import re
from pathlib import Path

import pytest

from tests.e2e.conftest import Project, steps_run

pytestmark = [pytest.mark.slow, pytest.mark.proof]


def stored(project: Project) -> set[str]:
    store = project.root / "state" / "store"
    return {path.relative_to(store).as_posix() for step in ("train", "embed", "evaluate") for path in (store / step).glob("*")}


def test_what_was_superseded_goes_and_the_rest_is_reused(project: Project) -> None:
    project.run("dml", "reproduce")
    superseded = stored(project)
    beside = ["-v", "softtriple", "--set", "evaluation.recall_at=[1]"]
    project.run("dml", "reproduce", *beside)  # a separate comparison: only MLflow refers to its scores; its network is that of the first
    project.change(comparison={"protocol": {"num_epochs": 1}})
    project.run("dml", "reproduce")
    before = stored(project)

    listed = project.run("dml", "gc", "--days", "0")
    assert stored(project) == before, "without --delete nothing goes"
    named = set(re.findall(r"(?:train|embed|evaluate)/[0-9a-f]{32}", listed))
    # Only softtriple's first scores: the other comparison uses the same network and embeddings, and untrained has not changed.
    assert len(named) == 1, listed
    assert named < superseded
    assert "nothing was removed" in listed

    assert project.run("dml", "gc", "--days", "7").startswith("0 unused steps"), "what is young stays"
    project.run("dml", "gc", "--days", "0", "--delete")
    assert stored(project) == before - named
    assert not any((project.root / "state" / "prefect" / "storage" / Path(key).name).exists() for key in named)

    again = project.run("dml", "reproduce")
    assert steps_run(again) == {}, again
