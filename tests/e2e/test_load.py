"""Two hundred small runs through the local stack, eight at a time: none is lost, and both databases, the bucket and the records agree."""

import hashlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.runs.records import unseal
from tests.e2e.conftest import Project
from tests.e2e.stacks import bucket, in_postgres, mlflow_runs, project_with_stack, slots, stack_up, stored, told

pytestmark = [pytest.mark.slow, pytest.mark.proof]
VARIANTS = (
    "softmax",
    "normalised-softmax",
    "softtriple",
    "heated-up-softmax",
    "discriminative",
    "tuplet-margin",
    "sgsl",
    "proxy-nca",
    "contrastive",
    "triplet-batch-hard",
)
SEEDS = 20
RUNS = len(VARIANTS) * SEEDS
AT_A_TIME = 8


def scores(project: Project, uri: str | None = None) -> dict[tuple[str, str], dict[str, float]]:
    """The final scores of every run that MLflow has, by variant and seed; each is there once and is finished."""
    runs = [run for run in mlflow_runs(project, uri=uri) if "variant" in run.data.params]
    found = {(run.data.params["variant"], run.data.params["seed"]): run for run in runs}
    assert len(found) == len(runs) == RUNS
    assert {run.info.status for run in runs} == {"FINISHED"}
    return {
        key: {name: value for name, value in run.data.metrics.items() if name in ("recall_at_1", "map_at_r", "r_precision", "nmi")}
        for key, run in found.items()
    }


def objects(project: Project) -> dict[str, tuple[str, dict[str, str]]]:
    """Every object of the bucket: the SHA-256 of its bytes as they are read now, and what was noted with it."""
    client = bucket(project)

    def look(name: str) -> tuple[str, tuple[str, dict[str, str]]]:
        got = client.get_object(Bucket="dml", Key=name)
        return name, (hashlib.sha256(got["Body"].read()).hexdigest(), got["Metadata"])

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(look, stored(project)))


def records(folder: Path) -> list[dict[str, Any]]:
    """Every sealed record of a finished step."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        kept = json.loads(path.read_text()).get("result")
        if kept is not None and '"record"' in kept:
            found.append(json.loads(unseal(kept.encode()))["data"])
    return found


def test_nothing_of_two_hundred_runs_is_lost(tmp_path: Path) -> None:
    project = project_with_stack(tmp_path / "project", VARIANTS)
    file = project.root / "infra" / "stack.yaml"  # two nodes of four CPUs, whatever this machine has
    file.write_text(re.sub(r"--num-cpus=\{share\}", f"--num-cpus={AT_A_TIME // 2}", file.read_text()))
    sampler = {"batch_size": 16, "num_classes_per_batch": 4, "num_samples_per_class": 4}
    project.change(
        comparison={"seeds": list(range(SEEDS)), "protocol": {"sampler": sampler}}, scale={"num_workers": 1, "concurrent_runs": AT_A_TIME}
    )
    began = time.monotonic()
    project.run("dml", "reproduce", DML_STATE=str(tmp_path / "state"))
    one_machine = time.monotonic() - began
    expected = scores(project, f"sqlite:///{tmp_path / 'state' / 'mlflow.db'}")
    with stack_up(project):
        began = time.monotonic()
        printed = project.run("dml", "reproduce", PREFECT_API_URL=told(project)["PREFECT_API_URL"], timeout_seconds=7200)
        through = time.monotonic() - began
        print(f"{RUNS} runs: {through:.0f} s through the stack, {one_machine:.0f} s on this machine alone")
        print(f"a run: {through / RUNS:.2f} s and {one_machine / RUNS:.2f} s, ratio {through / one_machine:.2f}")
        assert f"{AT_A_TIME} runs at a time" in printed

        assert scores(project) == expected
        assert slots(project) == {}
        assert in_postgres(project, "mlflow", "SELECT DISTINCT status, lifecycle_stage FROM runs") == [("FINISHED", "active")]
        assert in_postgres(project, "prefect", "SELECT DISTINCT state_type FROM flow_run WHERE start_time IS NOT NULL") == [("COMPLETED",)]
        assert in_postgres(project, "prefect", "SELECT DISTINCT state_type FROM task_run") == [("COMPLETED",)]
        assert not list((project.root / "state" / "outbox").glob("*.json"))

        there = objects(project)
        in_store = {name: found for name, found in there.items() if name.startswith("store/")}
        assert {name for name, (sha256, noted) in in_store.items() if noted.get("sha256") != sha256} == set()
        steps = [record for record in records(Path(told(project)["PREFECT_LOCAL_STORAGE_PATH"])) if "files" in record]
        assert sorted(record["step"] for record in steps) == sorted(["train", "embed", "evaluate"] * RUNS)
        recorded = {f"store/{record['key']}/{file['name']}": file["sha256"] for record in steps for file in record["files"]}
        assert {name: in_store[name][0] for name in recorded} == recorded
        assert {name for name in in_store if name.split("/")[1] in ("train", "embed", "evaluate")} == set(recorded)
        # What MLflow has of a run's steps has the same bytes.
        of_runs = {sha256 for name, (sha256, _) in there.items() if name.startswith("mlflow/") and "/steps/" in name}
        assert of_runs <= set(recorded.values())
        assert sum(name.endswith("steps/train/checkpoint.pt") for name in there) == RUNS
