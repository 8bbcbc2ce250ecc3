"""Measure a scheduled run on the local stack: the seconds from the time at which it is due to its first epoch and to its end.

The comparison is that of the tests: two variants on 80 drawn images, two epochs, the untrained one without training. Times are those of
Prefect's server: of the states of the flow run, and of the lines that the run logs, which the server has with the time at which they were
written. The first night finds a new project; the second has nothing to do.

    PYTHONPATH=. python benchmarks/schedule.py

For an older commit, copy this file into a checkout of it.
"""

import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Project
from tests.e2e.stacks import ask, project_with_stack, stack_up

AHEAD_SECONDS = 75  # the server's scheduler runs once a minute
LIMIT_SECONDS = 600
ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
EVENTS = {  # what is printed -> the part of a line that the run logs then
    "preparing the data": "preparing synthetic",
    "first training or embedding waits for its workers": "starting the workers",
    "first epoch trained": "epoch 1 of",
}


def main() -> None:
    """Start a stack, let two nights pass, print."""
    with tempfile.TemporaryDirectory() as folder:
        project = project_with_stack(Path(folder) / "project", ("untrained", "softtriple"))
        with stack_up(project):
            for name in ("dataset-change", "nightly", "weekly"):  # must not run between
                replace_schedules(project, name, None)
            for night in ("first night", "second night, nothing to do"):
                due = datetime.now(UTC) + timedelta(seconds=AHEAD_SECONDS)
                replace_schedules(project, "nightly", due)
                print_night(project, night, wait_for_run(project, due))


def replace_schedules(project: Project, name: str, due: datetime | None) -> None:
    """Delete a deployment's schedules; create one that is due once, unless `due` is None."""
    (deployment,) = [entry for entry in ask(project, "deployments/filter") if entry["name"] == name]
    schedules = f"deployments/{deployment['id']}/schedules"
    for schedule in deployment["schedules"]:
        ask(project, f"{schedules}/{schedule['id']}", method="DELETE")
    if due is not None:
        once = {"rrule": f"DTSTART:{due:%Y%m%dT%H%M%S}\nRRULE:FREQ=DAILY;COUNT=1", "timezone": "UTC"}
        ask(project, schedules, [{"active": True, "schedule": once}])


def wait_for_run(project: Project, due: datetime) -> dict[str, Any]:
    """Return the flow run that was due then, once it has ended."""
    until = time.monotonic() + AHEAD_SECONDS + LIMIT_SECONDS
    while time.monotonic() < until:
        for run in ask(project, "flow_runs/filter"):
            expected = datetime.fromisoformat(run["expected_start_time"])
            if abs((expected - due).total_seconds()) < 1 and run["state"]["type"] in ENDS:
                return dict(run)
        time.sleep(1)
    raise SystemExit("the scheduled run did not end")


def print_night(project: Project, night: str, run: dict[str, Any]) -> None:
    """Print the seconds from the due time to each state and event."""
    print(f"\n{night}: {run['state']['name']}; seconds after the due time")
    due = datetime.fromisoformat(run["expected_start_time"])
    states = ask(project, f"flow_run_states/?flow_run_id={run['id']}", method="GET")
    moments = [(state["name"].lower(), state["timestamp"]) for state in states if state["name"] != "Scheduled"]
    logs = ask(project, "logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "sort": "TIMESTAMP_ASC"})
    for event, part in EVENTS.items():
        moments += [(event, line["timestamp"]) for line in logs if part in line["message"]][:1]
    for event, moment in sorted(moments, key=lambda pair: datetime.fromisoformat(pair[1])):
        print(f"{event:55} {(datetime.fromisoformat(moment) - due).total_seconds():6.1f}", flush=True)


if __name__ == "__main__":
    main()
