"""The commands of docs/how-to/papers-on-a-gpu.md, from an archive in the official layout to the verdicts of a table, on a CPU.

Three things are replaced: the images are drawn (`--part` is appended to `dml data add`), the weights file is generated (its hash is set
in the table of published files), and the paper's protocol gets smaller crops and fewer epochs.
"""

import hashlib
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch

from dml_core.data.drawing.layouts import write_cub200
from dml_core.data.readers.synthetic import Synthetic, draw_pictures
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import build_backbone
from tests.e2e.conftest import ROOT, Project, make_project

pytestmark = [pytest.mark.slow, pytest.mark.proof]
PAGE = (ROOT / "docs/how-to/papers-on-a-gpu.md").read_text()
WEIGHTS = "bn_inception-52deb4733.pth"
DRAWN = Synthetic(num_classes=4, images_per_class=5, image_size=72, num_modes=1, seed=3)
SMALLER = {
    "crop_size: 224": "crop_size: 64",
    "test_resize: 256": "test_resize: 72",
    "train_resize: 256": "train_resize: 72",
    "num_epochs: 50": "num_epochs: 2",
}


def blocks() -> list[str]:
    """Return the page's command blocks."""
    return re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def replace(path: Path, changes: dict[str, str]) -> None:
    text = path.read_text()
    for old, new in changes.items():
        assert old in text, (path, old)
        text = text.replace(old, new)
    path.write_text(text)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with none of the papers' datasets, next to a folder with the downloads that the page names."""
    downloads = tmp_path / "downloads"
    write_cub200(tmp_path / "drawn", draw_pictures(DRAWN), DRAWN.num_classes)
    downloads.mkdir()
    with tarfile.open(downloads / "CUB_200_2011.tgz", "w:gz") as archive:
        archive.add(tmp_path / "drawn/CUB_200_2011", "CUB_200_2011")
    torch.manual_seed(1)
    features = build_backbone(BackboneConfig(name="bn_inception")).state_dict()
    torch.save(features | {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}, downloads / WEIGHTS)
    made = make_project(tmp_path / "project", ("untrained",))
    made.change(scale={"num_workers": 1})
    sha256 = hashlib.sha256((downloads / WEIGHTS).read_bytes()).hexdigest()
    replace(made.root / "dml_core/models/backbones/published.py", {f'"{WEIGHTS}", "52deb4733"': f'"{WEIGHTS}", "{sha256[:9]}"'})
    replace(made.root / "flows/tables/softtriple/protocol.yaml", SMALLER)
    return made


def run_page(project: Project) -> list[str]:
    """Run the page's blocks in one shell and return the output of each."""
    mark = "--- the next block of the page"
    script = f"\necho '{mark}'\n".join(blocks()).replace("CUB_200_2011.tgz\n", "CUB_200_2011.tgz --part\n")
    script = f'dml() {{ python -m flows.cli "$@"; }}\n{script}'
    ran = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=project.root,
        env=project.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout.split(mark)


def test_the_page_ends_with_the_verdicts(project: Project) -> None:
    assert len(blocks()) == 6
    data, weights, plan, reproduced, again, verdicts = run_page(project)
    assert "+  cub200:" in data
    assert "10 train images of 2 classes, 10 test images of 2 classes; raw files in data/raw/cub200" in data
    assert not weights.strip()
    assert "10 runs, 10 to train: no time estimate (not measured here)" in plan
    assert re.search(
        r"disk: about [\d.]+ GB \(cub200 packed, and DVC's copy \d+ MB, 10 trained networks with embeddings [\d.]+ GB\); ", plan
    ), plan
    memory = r"memory: about \d+ MB in addition to the libraries' own \(bn_inception, 32 images of 64 pixels at a time: "
    assert re.search(memory, plan), plan
    assert "missing" not in plan
    assert "not downloaded yet" not in plan
    assert "FAILED" not in reproduced
    measured = re.findall(r"as_published, 5 seeds .*(?:compatible|above|below)", reproduced)
    assert len(measured) == 2, reproduced
    assert "SoftTriple is better than the normalised softmax." in reproduced
    assert "starting Ray" not in again, "everything is reused"
    assert re.findall(r"as_published, 5 seeds .*(?:compatible|above|below)", again) == measured
    assert verdicts.count("as_published, 5 seeds") == 2
    assert "Measured on the paper's datasets: 2 of 2 rows. Verdicts on published values: " in verdicts
    assert len(list((project.root / "state/store/train").iterdir())) == 10
    assert (project.root / "results/site/softtriple/table1.html").is_file()
