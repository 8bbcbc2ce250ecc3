"""The flow of the schedules of verification."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from flows import verify as module
from tasks.environment import Project
from tasks.watch.storage import ACCEPTED
from tasks.watch.verifying import Verified, VerifyRequest


def test_a_verification_holds_a_runs_slots_of_the_server_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs are of a process that knows no server: other flows would give up no room on a full cluster."""
    done: list[object] = []

    @contextmanager
    def slots(num_workers: int, check_going_on: Callable[[], None]) -> Iterator[None]:
        done.append(num_workers)
        yield
        done.append("released")

    def verify_now(*_: object, room: Callable[[], AbstractContextManager[None]]) -> Verified:
        done.append("planned")
        with room():
            done.append("trained")
        return Verified((), {}, None)

    (tmp_path / "params.yaml").write_text((Path(__file__).parents[2] / "params.yaml").read_text())
    monkeypatch.setattr(module, "open_project", lambda: Project(tmp_path, tmp_path / "state", "store", "sqlite:///none.db"))
    monkeypatch.setattr(module, "prefect_server", lambda: "http://server/api")
    monkeypatch.setattr(module, "ensure_limit", lambda num_workers, capacity, say: done.append((num_workers, capacity)))
    monkeypatch.setattr(module, "slots", slots)
    monkeypatch.setattr(module, "verify_now", verify_now)
    assert module.verify.fn(VerifyRequest()) == []
    assert done == [], "nothing is accepted"
    (tmp_path / ACCEPTED).mkdir(parents=True)
    (tmp_path / ACCEPTED / "synthetic.json").write_text("{")
    module.verify.fn(VerifyRequest())
    scale = module.load_params(tmp_path / "params.yaml").scale
    assert done == [(scale.most_workers, scale.most_workers * scale.concurrent_runs), "planned", scale.most_workers, "trained", "released"]
