"""A small project with its own local stack, and the contents of the stack's servers, read directly, not through the project's code."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import psutil
import psycopg2
from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.environment import login, stack_environment
from tasks.stack.lifecycle import processes_of
from tasks.stack.prefect_api import prefect_session
from tasks.stack.settings import run_folder
from tests.conftest import ROOT
from tests.e2e.conftest import Project, make_project


def project_with_stack(root: Path, variants: tuple[str, ...]) -> Project:
    """Make a small project with `infra/`; its stack is not started yet."""
    project = make_project(root, variants)
    shutil.copytree(ROOT / "infra", project.root / "infra")
    project.commit("infra")
    return project


@contextmanager
def stack_up(project: Project) -> Iterator[None]:
    """Start the project's stack, and stop it afterwards in any case."""
    try:
        print(project.run("dml", "stack", "up"))
        yield
    finally:
        project.run("dml", "stack", "down")


def told(project: Project) -> dict[str, str]:
    """Return the environment variables that the stack gives its users."""
    return stack_environment(project.root / "state")


def chosen(project: Project) -> dict[str, Any]:
    """Return the stack's ports and secrets."""
    found: dict[str, Any] = json.loads((project.root / "state" / "stack" / "chosen.json").read_text())
    return found


def processes(project: Project) -> list[psutil.Process]:
    """Return every process of the stack."""
    state = project.root / "state"
    return processes_of(state / "stack", run_folder(state))


def ask(project: Project, path: str, body: Any = None, method: str = "POST") -> Any:
    """Return the response of Prefect's server."""
    url = f"{told(project)['PREFECT_API_URL']}/{path}"
    answer = prefect_session().request(method, url, json=body or {}, headers=login(told(project)["PREFECT_API_AUTH_STRING"], None))
    answer.raise_for_status()
    return answer.json() if answer.content else None


def slots(project: Project) -> dict[str, int]:
    """Return the number of occupied slots of each limit of the server that has any."""
    return {limit["name"]: limit["active_slots"] for limit in ask(project, "v2/concurrency_limits/filter") if limit["active_slots"]}


def in_postgres(project: Project, database: str, query: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query."""
    of = chosen(project)
    connection = psycopg2.connect(
        host="127.0.0.1", port=of["ports"]["postgres"], user="dml", password=of["secrets"]["postgres"], dbname=database
    )
    with connection, connection.cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())


def bucket(project: Project) -> Any:
    """Return a client of the stack's S3 server."""
    settings = told(project)
    return boto3.client(
        "s3",
        endpoint_url=settings["AWS_ENDPOINT_URL"],
        aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )


def stored(project: Project) -> dict[str, str]:
    """Return the names of all objects in the stack's bucket, with their ETags, which are hashes of their bytes."""
    pages = bucket(project).get_paginator("list_objects_v2").paginate(Bucket="dml")
    return {entry["Key"]: entry["ETag"] for page in pages for entry in page.get("Contents", [])}


def mlflow_runs(project: Project, filter_string: str = "", uri: str | None = None) -> list[Run]:
    """Return this software's runs in the stack's MLflow, or in the one at `uri`."""
    client = MlflowClient(uri or told(project)["MLFLOW_TRACKING_URI"])
    experiments = [found.experiment_id for found in client.search_experiments(filter_string="name LIKE 'dml-repro/%'")]
    return list(client.search_runs(experiments, filter_string, max_results=5000))
