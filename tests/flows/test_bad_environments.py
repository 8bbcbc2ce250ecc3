"""Every verb in every bad environment: the right result, or a one-line error and exit code 2; no traceback, and no half-written file.

The whole matrix is a proof test; the default tests run one verb of each kind.
"""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.damage import contents
from tests.flows.verbs import ARGUMENTS, dml
from tests.tasks.reports.made_up_runs import make_project

pytestmark = pytest.mark.slow
# Verbs that would start servers or train get arguments that they reject after reading the state.
REFUSED = {
    "reproduce": ["-v", "none"],
    "receipt": ["none", "-o", "receipt.json"],
    "run": ["photos", "none"],
    "serve": ["photos/none"],
    "stack up": ["--s3", "nowhere"],
    "tune": ["project/none/none"],
    "ui": ["--port", "99999999"],
    "verify": ["none"],
}
CALLS = {
    words: [argument.replace("own/good", "photos/softmax").replace("own", "photos") for argument in arguments]
    for words, arguments in (ARGUMENTS | REFUSED).items()
}
CALLS |= {"data add": ["added", "images"], "compare": ["photos"]}
SAMPLE = ("doctor", "tables show", "data list", "reproduce", "compare")


def _files_for_folders(root: Path) -> None:
    for path in (root / "state").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
            path.write_text("")


def _folders_for_files(root: Path) -> None:
    state = root / "state"
    for path in [path for path in state.rglob("*") if path.is_file()]:
        path.unlink()
        path.mkdir()
    for name in ("mlflow.db", "mlflow.lock", "stack/env"):
        (state / name).mkdir(parents=True, exist_ok=True)


def _empty_files(root: Path) -> None:
    for path in (root / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


def _state_is_a_file(root: Path) -> None:
    shutil.rmtree(root / "state")
    (root / "state").write_text("")


# name -> change of the project, shell redirection, environment variables
ENVIRONMENTS: dict[str, tuple[Callable[[Path], object] | None, str, dict[str, str]]] = {
    "as it should be": (None, "", {}),
    "the state is a file": (_state_is_a_file, "", {}),
    "files for the state's folders": (_files_for_folders, "", {}),
    "folders for the state's files": (_folders_for_files, "", {}),
    "empty files in the state": (_empty_files, "", {}),
    "no params.yaml": (lambda root: (root / "params.yaml").unlink(), "", {}),
    "params.yaml is a folder": (lambda root: ((root / "params.yaml").unlink(), (root / "params.yaml").mkdir()), "", {}),
    "standard output is closed": (None, ">&-", {}),
    "standard output is full": (None, ">/dev/full", {}),
    "nobody reads": (None, "| true; exit ${PIPESTATUS[0]}", {}),
    "standard input is closed": (None, "<&-", {}),
    "an ASCII terminal": (None, "", {"PYTHONIOENCODING": "ascii"}),
    "MLflow does not answer": (None, "", {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}),
    "the store is a file": (None, "", {"DML_STORE": "params.yaml"}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a project with scored runs, images and embeddings."""
    root = tmp_path_factory.mktemp("whole") / "project"
    make_project(root)
    (root / "state").mkdir()
    (root / "store").rename(root / "state/store")
    (root / "images").mkdir()
    for number, image in enumerate(sorted((root / "raw").glob("*.png"))[:6]):
        shutil.copy(image, root / f"images/{number}.png")
    np.save(root / "e.npy", np.eye(4, dtype=np.float32))
    np.save(root / "l.npy", np.array([0, 0, 1, 1]))
    return root


def check(words: str, environment: str, whole: Path, folder: Path) -> None:
    root = folder / "project"
    shutil.copytree(whole, root)
    change, shell, variables = ENVIRONMENTS[environment]
    if change is not None:
        change(root)
    before = contents(root)
    shown = dml([*words.split(), *CALLS[words]], root, shell, **variables)
    where = f"{words}, {environment}: {shown.returncode}\n{shown.stdout[-500:]}\n{shown.stderr[-3000:]}"
    assert shown.returncode in (0, 2, 141), where
    assert "Traceback" not in shown.stderr, where
    assert "Exception ignored" not in shown.stderr, where
    errors = [line for line in shown.stderr.splitlines() if line.lower().startswith("error: ")]
    assert len(errors) == (shown.returncode == 2), where
    if shown.returncode == 2:
        after = contents(root)
        lost = {name for name, data in before.items() if after.get(name) != data and not name.startswith("state/")}
        assert not lost, where


@pytest.mark.parametrize(("environment", "words"), list(zip(ENVIRONMENTS, itertools.cycle(SAMPLE), strict=False)))
def test_some_verbs_end_well_in_every_environment(words: str, environment: str, whole: Path, tmp_path: Path) -> None:
    check(words, environment, whole, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("words", sorted(CALLS))
def test_every_verb_ends_well_in_every_environment(words: str, environment: str, whole: Path, tmp_path: Path) -> None:
    check(words, environment, whole, tmp_path)
