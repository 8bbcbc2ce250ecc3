"""`dml compare` from the user's side."""

import shutil
from pathlib import Path

import pytest

from flows.cli import tracking
from tasks.runs.comparable import spec_settings
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.tracking.child_run import PublishedRun
from tasks.tracking.tags import Tag
from tests.conftest import ROOT


def test_runs_on_a_dataset_that_is_not_prepared_here_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a laptop, with the MLflow server of the machine that trained."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DML_STATE", raising=False)
    params = load_params(tmp_path / "params.yaml")

    def published(variant: str, seed: int, digest: str) -> PublishedRun:
        (spec,) = comparison_runs(params, "synthetic", (variant,), (seed,))
        tags = {Tag.VARIANT: variant, Tag.SEED: str(seed), Tag.DIGEST: digest, Tag.SETTINGS: spec_settings(spec, digest)}
        return PublishedRun(f"{variant}{seed}", {"recall_at_1": 0.5 + seed / 100}, tags)

    former = published("softmax", 7, "former images")
    runs = [published(variant, seed, "their images") for variant in ("softmax", "contrastive") for seed in range(3)]
    monkeypatch.setattr(tracking, "published_runs", lambda *_: [former, *runs])
    tracking.compare("synthetic")
    printed = capsys.readouterr().out
    assert printed.startswith("left out: softmax on synthetic, seed 7: measured on other data than the present\n")
    assert printed.count("left out: ") == 1
    assert all(any(line.startswith(f"│ {variant} ") for line in printed.splitlines()) for variant in ("softmax", "contrastive"))
