"""Unique centres: counts of centres at chosen angles, identical plots of identical runs, and refusal of losses without centres."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dml_core.errors import EvaluationError
from dml_core.measurements.unique_centres import Options, measure
from tests.measurements.conftest import MakeRun

# Angles in degrees of four centres of four classes in the plane: a chord of 0.1 is 5.7 degrees.
ANGLES = [[0, 0, 0, 0], [0, 5, 10, 15], [0, 90, 180, 270], [10, 12, 200, 203]]
COUNTS = [1, 1, 4, 2]
MODEL = {"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": "linear", "embedding_dim": 2}}


def lay_out(loss) -> None:
    angles_KC = torch.tensor(ANGLES).T.deg2rad()
    lengths_KC = torch.linspace(0.5, 2.0, 4)[:, None]  # only directions count
    loss.centres_KCD.data = torch.stack([angles_KC.cos(), angles_KC.sin()], dim=-1) * lengths_KC[..., None]


def test_centres_laid_out_by_hand_are_counted(finished: MakeRun, tmp_path: Path) -> None:
    run = finished(options={"num_centres": 4}, model=MODEL, change=lay_out)
    assert measure(run, Options(), tmp_path) == {"num_unique_centres": 2.0}
    assert np.load(tmp_path / "unique_centres.npy").tolist() == COUNTS
    assert measure(run, Options(max_distance=0.01), tmp_path) == {"num_unique_centres": 13 / 4}
    assert np.load(tmp_path / "unique_centres.npy").tolist() == [1, 4, 4, 4]


def test_the_same_run_draws_the_same_picture(finished: MakeRun, tmp_path: Path) -> None:
    pictures = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        measure(finished(options={"num_centres": 4}, model=MODEL, change=lay_out), Options(), tmp_path / name)
        pictures.append((tmp_path / name / "unique_centres.png").read_bytes())
    assert pictures[0] == pictures[1]
    with Image.open(tmp_path / "one" / "unique_centres.png") as picture:
        assert min(picture.size) > 400


def test_a_loss_without_centres_is_refused(finished: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"^run: the loss 'proxy_nca' has no centres to count$"):
        measure(finished("proxy_nca"), Options(), tmp_path)
