"""`benchmarks/rehearsal.py` on a small share of every dataset: the real commands, from drawn archives to the page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rehearsal
from dml_core.data.store.info import read_info
from dml_core.data.store.rows import Counts
from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.proof]
SHARE = 0.002


def tables(printed: str) -> list[list[dict[str, str]]]:
    """Return the printed Markdown tables, each as a list of rows by column title."""
    found = []
    for block in printed.strip().split("\n\n")[1:]:
        titles, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        found.append([dict(zip(titles, row, strict=True)) for row in rows])
    return found


def test_every_dataset_goes_from_its_archive_to_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/rehearsal.py", "--share", str(SHARE), "--folder", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stdout + ran.stderr
    names = list(rehearsal.LAYOUTS)
    for name in names:
        roles = read_info(tmp_path / f"project/data/packed/{name}").roles
        assert {role: Counts(of.num_images, of.num_classes) for role, of in roles.items()} == rehearsal.counts_of(name, SHARE)
    site = tmp_path / "project/results/site"
    assert (site / "project/rehearsal.html").is_file()
    page = json.loads((site / "project/rehearsal.json").read_text())
    measured = {column["dataset"]: 0 for column in page["columns"]}
    for line in (line for row in page["rows"] for line in row["lines"]):
        for column, cell in zip(page["columns"], line["cells"], strict=True):
            measured[column["dataset"]] += cell is not None and 0 <= cell["mean"] <= 100
    assert measured == {name: sum(column["dataset"] == name for column in page["columns"]) for name in names}
    times, disk, plans = tables(ran.stdout)
    assert {row["dataset"] for row in times} == {*names, "all"}
    assert {name: sum(row["dataset"] == name for row in times) for name in names} == dict.fromkeys(names, 13)
    assert [row["dataset"] for row in disk] == [row["dataset"] for row in plans] == names
    for row in plans:  # before packing, the plan uses the published counts, so it overestimates for a share
        planned, written = (float(row[title].replace(",", "")) for title in ("disk planned, MB", "written, MB"))
        assert planned > 0.9 * written, "the databases and pages of the state are not planned"
