"""A whole run whose store is S3: both workers' files are there, and another machine's driver can use them."""

from pathlib import Path

import boto3
import pytest

from tests.e2e.conftest import make_project

pytestmark = [pytest.mark.slow, pytest.mark.proof]


def test_a_run_on_an_s3_store_leaves_every_step_there(tmp_path: Path, s3_bucket: str) -> None:
    project = make_project(tmp_path / "project", ("softtriple",))  # copies the AWS environment
    project.change(scale={"num_workers": 2, "concurrent_runs": 2})
    store = {"DML_STORE": f"s3://{s3_bucket}/team"}
    printed = project.run("dml", "run", "synthetic", "softtriple", **store)
    assert "train: ran" in printed
    assert ": 2 workers a run" in printed, "a single run has the workers of both"
    names = [entry["Key"] for entry in boto3.client("s3").list_objects_v2(Bucket=s3_bucket, Prefix="team/")["Contents"]]
    for step, file in (("train", "checkpoint.pt"), ("embed", "manifest.json"), ("evaluate", "metrics.json")):
        assert any(name.startswith(f"team/{step}/") and name.endswith(file) for name in names), (step, names)

    # Without the cache, as on another machine, the files are fetched from the store, and nothing is computed again.
    for name in ("train", "embed", "evaluate"):
        assert (project.root / "state/cache" / name).exists()
        (project.root / "state/cache" / name).rename(tmp_path / name)
    again = project.run("dml", "run", "synthetic", "softtriple", **store)
    assert [line for line in again.splitlines() if line.endswith(": reused")] == ["train: reused", "embed: reused", "evaluate: reused"]
