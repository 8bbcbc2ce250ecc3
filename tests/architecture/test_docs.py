"""Lists and values that the docs repeat from the code."""

import os
import re
from pathlib import Path

import pytest
import yaml

from dml_core.losses.registry import LOSSES
from dml_core.measurements.registry import MEASUREMENTS
from tasks.environment import Project, set_environment
from tests.conftest import ROOT

DOCS = ROOT / "docs"


def test_every_measurement_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", (DOCS / "evaluation.md").read_text()))
    assert set(MEASUREMENTS) <= named


def test_every_loss_is_listed_with_its_source() -> None:
    table = [line.split("|")[1] for line in (DOCS / "losses.md").read_text().splitlines() if line.startswith("| `")]
    assert set(LOSSES) <= {name for cell in table for name in re.findall(r"`(\w+)`", cell)}


def test_the_environment_of_every_process_is_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    now = dict(before)
    monkeypatch.setattr(os, "environ", now)
    set_environment(Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "sqlite:///mlflow.db"))
    text = (DOCS / "mechanics.md").read_text().partition("## The environment of every process")[2].partition("\n## ")[0]
    values = dict(re.findall(r"`([A-Z][A-Za-z_0-9]+)=(\S+?)`", text))
    assert values
    assert {name: now.get(name) for name in values} == values
    documented = re.findall(r"`([A-Z][A-Za-z_0-9*]+)(?:=\S+?)?`", text)
    patterns = [re.compile(name.replace("*", r"\w+")) for name in documented]
    assert [name for name in now if name not in before and not any(pattern.fullmatch(name) for pattern in patterns)] == []


def test_own_images_counts_the_variants_and_seeds_of_params_yaml() -> None:
    comparison = yaml.safe_load((ROOT / "params.yaml").read_text())["comparison"]
    variants, seeds = comparison["variants"], comparison["seeds"]
    num_default = sum(changes.get("by_default", True) for changes in variants.values())
    said = (
        f"{num_default} systems with {comparison['num_default_seeds']} seeds each; "
        f"`--all` runs all {len(variants)} systems with all {len(seeds)} seeds of `params.yaml`"
    )
    assert said in " ".join((DOCS / "own-images.md").read_text().split())
