"""Many small runs at a time through the local stack: none is lost, and both databases, the bucket and the records agree."""

import hashlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.sealed import unseal
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


def scores(project: Project, num_runs: int, uri: str | None = None) -> dict[tuple[str, str], dict[str, float]]:
    """Return the final scores of MLflow's runs by variant and seed; each run must exist once and be finished."""
    runs = [run for run in mlflow_runs(project, uri=uri) if "variant" in run.data.params]
    found = {(run.data.params["variant"], run.data.params["seed"]): run for run in runs}
    assert len(found) == len(runs) == num_runs
    assert {run.info.status for run in runs} == {"FINISHED"}
    return {
        key: {name: value for name, value in run.data.metrics.items() if name in ("recall_at_1", "map_at_r", "r_precision", "nmi")}
        for key, run in found.items()
    }


def objects(project: Project) -> dict[str, tuple[str, dict[str, str]]]:
    """Return object name -> SHA-256 of its current bytes and its metadata, for every object of the bucket."""
    client = bucket(project)

    def look(name: str) -> tuple[str, tuple[str, dict[str, str]]]:
        got = client.get_object(Bucket="dml", Key=name)
        return name, (hashlib.sha256(got["Body"].read()).hexdigest(), got["Metadata"])

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(look, stored(project)))


def records(folder: Path) -> list[dict[str, Any]]:
    """Return every sealed record of a finished step."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        kept = json.loads(path.read_text()).get("result")
        if kept is not None and '"record"' in kept:
            found.append(json.loads(unseal(kept.encode()))["data"])
    return found


def databases_are_settled(project: Project) -> None:
    """Assert that all flow, task and MLflow runs ended successfully and hold no slots."""
    assert slots(project) == {}
    assert in_postgres(project, "mlflow", "SELECT DISTINCT status, lifecycle_stage FROM runs") == [("FINISHED", "active")]
    assert in_postgres(project, "prefect", "SELECT DISTINCT state_type FROM flow_run WHERE start_time IS NOT NULL") == [("COMPLETED",)]
    assert in_postgres(project, "prefect", "SELECT DISTINCT state_type FROM task_run") == [("COMPLETED",)]
    assert not list((project.root / "state" / "outbox").glob("*.json"))


def bytes_are_those_recorded(project: Project, num_runs: int) -> None:
    """Assert that the bucket has exactly the recorded step files, with their hashes, and that MLflow's copies have the same bytes."""
    there = objects(project)
    in_store = {name: found for name, found in there.items() if name.startswith("store/")}
    assert {name for name, (sha256, noted) in in_store.items() if noted.get("sha256") != sha256} == set()
    steps = [record for record in records(Path(told(project)["PREFECT_LOCAL_STORAGE_PATH"])) if "files" in record]
    assert sorted(record["step"] for record in steps) == sorted(["train", "embed", "evaluate"] * num_runs)
    recorded = {f"store/{record['key']}/{file['name']}": file["sha256"] for record in steps for file in record["files"]}
    in_steps = {name: sha256 for name, (sha256, _) in in_store.items() if name.split("/")[1] in ("train", "embed", "evaluate")}
    assert in_steps == recorded
    copies = {name: sha256 for name, (sha256, _) in there.items() if name.startswith("mlflow/") and "/steps/" in name}
    assert set(copies.values()) <= set(recorded.values())
    assert sum(name.endswith("steps/train/checkpoint.pt") for name in copies) == num_runs


def damage_is_seen(project: Project, num_runs: int) -> None:
    """Assert that a flipped bit in the store or in MLflow, or a missing file of the store, is detected; restore the file each time."""
    client, names = bucket(project), stored(project)
    in_store = next(name for name in names if name.startswith("store/train/") and name.endswith("checkpoint.pt"))
    in_mlflow = next(name for name in names if name.endswith("steps/train/checkpoint.pt"))
    for name, gone in ((in_store, False), (in_mlflow, False), (in_store, True)):
        got = client.get_object(Bucket="dml", Key=name)
        whole = got["Body"].read()
        if gone:
            client.delete_object(Bucket="dml", Key=name)
        else:
            client.put_object(Bucket="dml", Key=name, Body=bytes([whole[0] ^ 1]) + whole[1:], Metadata=got["Metadata"])
        with pytest.raises(AssertionError):
            bytes_are_those_recorded(project, num_runs)
        client.put_object(Bucket="dml", Key=name, Body=whole, Metadata=got["Metadata"])
    bytes_are_those_recorded(project, num_runs)


@pytest.mark.parametrize(
    ("num_seeds", "at_a_time"),
    [pytest.param(4, 2, id="forty-on-two-cores"), pytest.param(4, 8, id="forty-on-eight"), pytest.param(20, 2, id="two-hundred")],
)
def test_of_many_runs_nothing_is_lost(tmp_path: Path, num_seeds: int, at_a_time: int) -> None:
    num_runs = len(VARIANTS) * num_seeds
    project = project_with_stack(tmp_path / "project", VARIANTS)
    file = project.root / "infra" / "stack.yaml"  # two nodes that offer `at_a_time` cores, whatever the size of this machine
    file.write_text(re.sub(r"--num-cpus=\{share\}", f"--num-cpus={at_a_time // 2}", file.read_text()))
    sampler = {"batch_size": 16, "num_classes_per_batch": 4, "num_samples_per_class": 4}
    project.change(
        comparison={"seeds": list(range(num_seeds)), "protocol": {"sampler": sampler}},
        scale={"num_workers": 1, "concurrent_runs": at_a_time},
    )
    began = time.monotonic()
    project.run("dml", "reproduce", DML_STATE=str(tmp_path / "state"))
    one_machine = time.monotonic() - began
    expected = scores(project, num_runs, f"sqlite:///{tmp_path / 'state' / 'mlflow.db'}")
    with stack_up(project):
        began = time.monotonic()
        printed = project.run("dml", "reproduce", PREFECT_API_URL=told(project)["PREFECT_API_URL"])
        through = time.monotonic() - began
        print(f"{num_runs} runs: {through:.0f} s through the stack, {one_machine:.0f} s on this machine alone")
        print(f"a run: {through / num_runs:.2f} s and {one_machine / num_runs:.2f} s, ratio {through / one_machine:.2f}")
        assert f"{at_a_time} runs at a time" in printed
        assert scores(project, num_runs) == expected
        databases_are_settled(project)
        bytes_are_those_recorded(project, num_runs)
        damage_is_seen(project, num_runs)
