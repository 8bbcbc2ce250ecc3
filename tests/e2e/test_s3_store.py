"""Whole runs whose store is S3: workers' files are there, another machine's driver can use them, and images may stay there."""

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


def test_images_that_stay_in_the_bucket_change_nothing(tmp_path: Path, s3_bucket: str) -> None:
    project = make_project(tmp_path / "project", ("softtriple",))
    bound = 30_000
    project.change(scale={"num_workers": 2, "image_cache_gb": bound / 10**9})
    project.run("dml", "run", "synthetic", "softtriple", DML_STORE=f"s3://{s3_bucket}/team")
    names = [entry["Key"] for entry in boto3.client("s3").list_objects_v2(Bucket=s3_bucket, Prefix="team/data/")["Contents"]]
    assert sorted(Path(name).name for name in names) == ["dataset.json", "images.arrow", "manifest.parquet", "ranges.npy"]
    cache = project.root / "state/cache"
    assert not list(cache.rglob("images.arrow"))
    assert (
        bound / 2 < sum(path.stat().st_size for path in (cache / "images").rglob("*") if path.is_file() and path.name != ".lock") <= bound
    )

    project.run("dml", "run", "synthetic", "softtriple", DML_STORE=str(tmp_path / "folder"))
    checkpoints = list((tmp_path / "folder/train").glob("*/checkpoint.pt"))
    assert len(checkpoints) == 1
    for name in ("checkpoint.pt", "history.jsonl"):
        path = checkpoints[0].with_name(name)
        assert (cache / "train" / path.parent.name / name).read_bytes() == path.read_bytes()
