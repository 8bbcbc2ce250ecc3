"""The start-up benchmark: phases by the printed lines, the picture, and a small run of the whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.startup import Bar, Measured, draw_timeline, phases_of
from tests.conftest import ROOT

LINES = [
    (1.0, "dml reproduce: checking parameters\n"),
    (2.0, "starting Prefect and loading the libraries (about 12 s)\n"),
    (10.0, "starting Ray on this machine\n"),
    (10.5, "preparing synthetic: bringing it up to date through DVC\n"),
    (11.0, "2 of 2 runs to train\n"),
    (30.0, "synthetic / softtriple / seed 0: R@1 50.0 %, 5 s  (1 of 2 done, about 9 s left)\n"),
    (40.0, "writing the reports\n"),
    (41.0, "# comparison on synthetic\n"),
    (41.0, "# another heading\n"),
]


def test_phases_follow_each_other_from_the_start_to_the_end() -> None:
    phases = phases_of(LINES, ended=45.0)
    assert phases == {
        "loading the command": (0.0, 1.0),
        "checking parameters": (1.0, 2.0),
        "starting Prefect": (2.0, 10.0),
        "preparing the data": (10.0, 11.0),
        "runs": (11.0, 40.0),
        "reports": (40.0, 41.0),
        "printing and ending": (41.0, 45.0),
    }
    assert Measured(phases, []).seconds == 45.0


def test_phases_that_do_not_happen_are_omitted() -> None:
    assert phases_of([LINES[0], LINES[-1]], ended=50.0) == {
        "loading the command": (0.0, 1.0),
        "checking parameters": (1.0, 41.0),
        "printing and ending": (41.0, 50.0),
    }


def test_the_timeline_has_a_panel_for_each_number_of_runs(tmp_path: Path) -> None:
    phases = phases_of(LINES, ended=45.0)
    heights = []
    for numbers in ((1,), (1, 11), (1, 11, 132)):
        calls = {number: Measured(phases, [Bar(run, "train", 12.0, 20.0) for run in range(number)]) for number in numbers}
        draw_timeline(calls, tmp_path / "timeline.png")
        with Image.open(tmp_path / "timeline.png") as image:
            assert len(image.getcolors(1 << 20) or ()) > 5
            heights.append(image.height)
    assert heights == sorted(set(heights))


@pytest.mark.slow
@pytest.mark.proof
def test_a_small_run_prints_phases_and_ratios(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/startup.py", "--runs", "1", "2", "--epochs", "1", "--images", "4"]
    command += ["--timeline", str(tmp_path / "timeline.png")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "1 run\n",
        "2 runs\n",
        "starting Prefect and libraries",
        "from Ray's start to the first training",
        "publishing each other run",
    ):
        assert text in done.stdout
    ratios = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith(("training to", "publishing", "all, each"))]
    assert len(ratios) == 7
    assert min(ratios) > 0
    assert (tmp_path / "timeline.png").is_file()
