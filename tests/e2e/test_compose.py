"""The services of infra/compose.yaml from the built image: a scheduled comparison, killed services, nothing left. See compose.py.

The tests run in order on the same services. The image is that of test_image.py, whose `DML_TEST_IMAGES` counts here, too.
"""

import json
import os
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.compose import Services
from tests.e2e.containers import Image, can_build, make_debian
from tests.e2e.test_image import image, images, small_params  # noqa: F401 - fixtures

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.skipif(not can_build(), reason="no buildah, debootstrap and crun here")]

ASK = """
import base64, json, os, sys, urllib.request
path, method, body = sys.argv[1:]
login = base64.b64encode(os.environ["PREFECT_API_AUTH_STRING"].encode()).decode()
url, headers = "http://prefect-server:4200/api/" + path, {"Content-Type": "application/json", "Authorization": "Basic " + login}
request = urllib.request.Request(url, body.encode(), headers, method=method)
print(urllib.request.urlopen(request).read().decode() or "null")
"""
BUCKET = "import boto3; boto3.client('s3').create_bucket(Bucket='dml')"
OBJECTS = "import boto3; print(*[o['Key'] for o in boto3.client('s3').list_objects_v2(Bucket='dml').get('Contents', [])], sep='\\n')"
RUNS = """
from mlflow import MlflowClient
client = MlflowClient()
ids = [found.experiment_id for found in client.search_experiments(filter_string="name LIKE 'dml-repro/%'")]
print(*[run.info.status for run in client.search_runs(ids, "params.variant = 'softtriple'")])
"""


@pytest.fixture(scope="module")
def services(
    image: Image,  # noqa: F811
    small_params: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("compose")
    kept = Path(os.environ.get("DML_TEST_IMAGES") or folder) / "postgres"
    debian = kept if kept.exists() else make_debian(kept, "postgresql")
    variables = {
        "POSTGRES_PASSWORD": f"{secrets.token_hex(8)}@:/% x",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PREFECT_API_AUTH_STRING": f"dml:{secrets.token_hex(8)}",
        "AWS_ENDPOINT_URL": "http://s3:5555",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
    }
    names = {"dml-repro:cpu": image, "postgres:15": Image(debian, {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]})}
    running = Services(folder, names, variables, {"/srv/dml/params.yaml": small_params})
    try:
        yield running
    finally:
        running.close()


def ask(services: Services, path: str, body: object = None, method: str = "POST") -> Any:
    """Return the response of Prefect's server, asked from the worker's container."""
    return json.loads(services.python("prefect-worker", ASK, path, method, json.dumps(body or {})))


def test_all_services_start_and_the_setup_ends(services: Services) -> None:
    services.up()
    services.python("prefect-worker", BUCKET)
    names = {entry["name"] for entry in ask(services, "deployments/filter")}
    assert {"nightly", "weekly", "dataset-change"} <= names
    assert services.containers["prefect-setup"].exit_code() == 0
    page = services.python("prefect-worker", "import urllib.request as u; print(u.urlopen('http://prefect-server:4200/').read().decode())")
    assert "<title>Prefect" in page
    until = time.monotonic() + 180
    while True:
        ran = services.containers["prefect-worker"].execute("dml", "doctor")
        if ran.returncode == 0 and "4 nodes" in ran.stdout:
            break
        assert time.monotonic() < until, ran.stdout + ran.stderr
        time.sleep(2)
    print(ran.stdout)


def nightly_of(services: Services) -> dict[str, Any]:
    """Remove every schedule, and return the nightly deployment."""
    deployments = ask(services, "deployments/filter")
    for entry in deployments:
        for old in entry["schedules"]:
            ask(services, f"deployments/{entry['id']}/schedules/{old['id']}", method="DELETE")
    (nightly,) = [entry for entry in deployments if entry["name"] == "nightly"]
    return dict(nightly)


def state_of(services: Services, wanted: dict[str, Any], *states: str, kind: str = "flow_runs") -> str:
    """Wait until one of the flow runs or task runs that a filter finds is in one of these states, and return the state."""
    until = time.monotonic() + 900
    while time.monotonic() < until:
        try:
            runs = ask(services, f"{kind}/filter", wanted)
        except AssertionError:
            runs = []  # a killed server or worker is not back yet
        for run in runs:
            if run["state"]["type"] in states:
                return str(run["state"]["type"])
        time.sleep(2)
    raise AssertionError(services.text("prefect-worker")[-5000:])


def test_a_scheduled_comparison_ends_although_servers_are_killed(services: Services) -> None:
    nightly = nightly_of(services)
    once = {"rrule": f"DTSTART:{datetime.now(UTC) + timedelta(seconds=40):%Y%m%dT%H%M%S}\nRRULE:FREQ=DAILY;COUNT=1", "timezone": "UTC"}
    ask(services, f"deployments/{nightly['id']}/schedules", [{"active": True, "schedule": once, "parameters": {}}])
    scheduled = {"deployments": {"id": {"any_": [nightly["id"]]}}}
    assert state_of(services, scheduled, "RUNNING", "COMPLETED") == "RUNNING"
    for name in ("prefect-server", "mlflow", "postgres"):
        services.kill(name)
    ended = state_of(services, scheduled, "COMPLETED", "FAILED", "CRASHED")
    assert ended == "COMPLETED", services.text("prefect-worker")[-5000:]
    assert min(services.starts[name] for name in ("prefect-server", "mlflow", "postgres")) >= 2
    assert "FINISHED" in services.python("prefect-worker", RUNS)
    assert "store/train/" in services.python("prefect-worker", OBJECTS)
    volumes = services.folder / "volumes"
    assert (volumes / "results" / "synthetic" / "report.md").is_file()
    assert "prepare@synthetic" in (volumes / "state" / "dvc.lock").read_text()


def test_a_flow_whose_worker_and_ray_node_are_killed_in_training_is_retried(services: Services) -> None:
    """Not a scheduled flow: once schedules were changed, Prefect 3.8.8 delays a retry by 15 minutes."""
    nightly = nightly_of(services)
    forced = {"parameters": {"request": nightly["parameters"]["request"] | {"force": True}}}
    flow = {"flow_runs": {"id": {"any_": [ask(services, f"deployments/{nightly['id']}/create_flow_run", forced)["id"]]}}}
    train = flow | {"task_runs": {"name": {"like_": "train"}}}
    assert state_of(services, train, "RUNNING", "COMPLETED", kind="task_runs") == "RUNNING"
    for name in ("ray-node-1", "prefect-worker"):
        services.kill(name)
    ended = state_of(services, flow, "COMPLETED", "FAILED")
    assert ended == "COMPLETED", services.text("prefect-worker")[-5000:]
    (run,) = ask(services, "flow_runs/filter", flow)
    assert run["run_count"] == 2


def test_nothing_is_left_of_it(services: Services) -> None:
    started = {process.pid for container in services.containers.values() for process in container.processes()}
    assert len(started) > 20
    services.close()
    assert not [pid for pid in started if psutil.pid_exists(pid)]
    assert str(services.folder) not in Path("/proc/mounts").read_text()
