"""A small project with a local stack of its own, and what the stack's servers have: read from them directly, not through our own code."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import psutil
import psycopg2
from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.environment import stack_environment
from tasks.stack.life import processes_of
from tasks.stack.settings import run_folder
from tests.conftest import ROOT
from tests.e2e.conftest import Project, make_project


def project_with_stack(root: Path, variants: tuple[str, ...]) -> Project:
    """A small project that has `infra/`; its stack is not up yet."""
    project = make_project(root, variants)
    shutil.copytree(ROOT / "infra", project.root / "infra")
    project.commit("infra")
    return project


@contextmanager
def stack_up(project: Project) -> Iterator[None]:
    """The project's stack, from nothing; ended afterwards, whatever happened."""
    try:
        print(project.run("dml", "stack", "up"))
        yield
    finally:
        project.run("dml", "stack", "down")


def told(project: Project) -> dict[str, str]:
    """What the stack tells who uses it."""
    return stack_environment(project.root / "state")


def chosen(project: Project) -> dict[str, Any]:
    """The stack's ports and secrets."""
    found: dict[str, Any] = json.loads((project.root / "state" / "stack" / "chosen.json").read_text())
    return found


def processes(project: Project) -> list[psutil.Process]:
    """Every process of the stack."""
    state = project.root / "state"
    return processes_of(state / "stack", run_folder(state))


def ask(project: Project, path: str, body: object = None, method: str = "POST") -> Any:
    """What Prefect's server answers."""
    url = f"{told(project)['PREFECT_API_URL']}/{path}"
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or b"null")


def slots(project: Project) -> dict[str, int]:
    """Slots of the server's limits that are taken, but for those of none."""
    return {limit["name"]: limit["active_slots"] for limit in ask(project, "v2/concurrency_limits/filter") if limit["active_slots"]}


def in_postgres(project: Project, database: str, query: str) -> list[tuple[Any, ...]]:
    """The rows of a query."""
    of = chosen(project)
    connection = psycopg2.connect(
        host="127.0.0.1", port=of["ports"]["postgres"], user="dml", password=of["secrets"]["postgres"], dbname=database
    )
    with connection, connection.cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())


def bucket(project: Project) -> Any:
    """A client of the stack's S3 server."""
    settings = told(project)
    return boto3.client(
        "s3",
        endpoint_url=settings["AWS_ENDPOINT_URL"],
        aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )


def stored(project: Project) -> dict[str, str]:
    """The names of all objects in the stack's bucket, with their ETags, which are hashes of their bytes."""
    pages = bucket(project).get_paginator("list_objects_v2").paginate(Bucket="dml")
    return {entry["Key"]: entry["ETag"] for page in pages for entry in page.get("Contents", [])}


def mlflow_runs(project: Project, filter_string: str = "", uri: str | None = None) -> list[Run]:
    """The runs of this software that MLflow has: the stack's, or the one at `uri`."""
    client = MlflowClient(uri or told(project)["MLFLOW_TRACKING_URI"])
    experiments = [found.experiment_id for found in client.search_experiments(filter_string="name LIKE 'dml-repro/%'")]
    return list(client.search_runs(experiments, filter_string, max_results=5000))
