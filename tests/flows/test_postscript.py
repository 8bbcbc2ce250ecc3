"""An EPS with the name of a JPEG is refused by every verb that decodes images, and Ghostscript, which would run it, is not started."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from dml_core.config import parse, read_yaml
from dml_core.models.config import ModelConfig
from dml_core.models.embedder import Embedder
from dml_core.trained import save_network
from tests.conftest import MODEL, ROOT, SETTINGS
from tests.forked import dml

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 24\n%%EndComments\n{} loop\n%%EOF\n"
VERBS = {
    "add": "data add other own",
    "check": "data check d",
    "prepare": "data prepare d",
    "index": "index network images -o other.index",
    "index, without thumbnails": "index network images -o other.index --thumbnail 0",
    "index, the image left out": "index network images -o other.index --skip-bad",
    "embed": "embed network images -o embeddings",
    "search": "search good.index images/a/cat.jpg --html page.html",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a network, an index of good images, a dataset of the same and an EPS, and a Ghostscript that leaves a trace."""
    root = tmp_path_factory.mktemp("project")
    params = read_yaml(ROOT / "params.yaml")
    params["datasets"]["d"] = {"reader": "folder", "raw": "images", "options": {}}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    rng = np.random.default_rng(0)
    for name in "abcd":
        (root / "images" / name).mkdir(parents=True)
        for number in range(2):
            Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(root / "images" / name / f"{number}.png")
    state = {f"model.{name}": value for name, value in Embedder(parse(ModelConfig, MODEL, "test"), 4).state_dict().items()}
    save_network(root / "network", {"model": MODEL, "transform": SETTINGS["transform"]}, 4, state)
    (root / "bin").mkdir()
    (root / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {root}/started\n")
    (root / "bin" / "gs").chmod(0o755)
    made = dml(["index", "network", "images", "-o", "good.index"], root)
    assert made.returncode == 0, made.stderr
    (root / "images/a/cat.jpg").write_bytes(EPS)
    shutil.copytree(root / "images", root / "own")
    return root


@pytest.mark.parametrize("verb", VERBS)
def test_an_eps_is_refused_by_name_and_not_run(project: Path, verb: str) -> None:
    ended = dml(VERBS[verb].split(), project, PATH=f"{project / 'bin'}:{os.environ['PATH']}")
    assert not (project / "started").exists()
    assert (ended.returncode == 0) == ("--skip-bad" in VERBS[verb]), ended.stderr
    assert "cat.jpg" in ended.stdout + ended.stderr
