"""Datasets: raw files brought into place, prepared, and kept up to date through DVC. The only module that knows DVC.

DVC is called as a command in a process of its own with the project as working directory (its Python interface depends on the calling
process's own), and with `--wait-for-lock`; several flows may ask at once, and wait for each other, because DVC's wait is for its repository
and not for the files that another DVC is making. What decodes images is imported where it is used.
"""

import configparser
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dml_core.config import unknown_name
from dml_core.data.readers.shared.rules import check_files
from dml_core.data.store.info import INFO_FILE, read_info, verify_files
from dml_core.errors import DataError, StoreError
from tasks.environment import Project
from tasks.files import write_whole
from tasks.locks import alone
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import DatasetSpec, Params, load_params
from tasks.storage import copy_objects

if TYPE_CHECKING:
    from dml_core.data.check import CheckReport


def dataset_spec(params: Params, name: str) -> DatasetSpec:
    """The named dataset's parameters.

    Raises:
        ConfigError: no such dataset in `params.yaml`.
    """
    if name not in params.datasets:
        raise unknown_name("dataset", name, list(params.datasets))
    return params.datasets[name]


def fetch_raw(project: Project, spec: DatasetSpec, progress: Callable[[int, int], None] | None = None) -> Path:
    """Make sure that a dataset's raw files are where the parameters say; what is there already stays as it is.

    Args:
        project: whose folder the raw files are in.
        spec: the dataset; where it names a mirror, what `raw` lacks is copied from there first.
        progress: called with (bytes done, bytes in all) of each file that is downloaded.

    Raises:
        DataError: they are not there and a person has to bring them; the line says how.
        StoreError: the mirror cannot be read, or the folder cannot be written.
    """
    from dml_core.data.registry import fetch

    raw = project.root / spec.raw
    try:
        with alone(project.state / "fetch" / f"{hashlib.sha256(spec.raw.encode()).hexdigest()[:16]}.lock"):
            if spec.mirror is not None:
                copy_objects(spec.mirror, raw, progress)
            fetch(spec.reader, spec.options, raw, progress)
    except OSError as error:
        raise StoreError(f"{raw}: cannot be written ({error.strerror or error}); free space or choose another folder") from None
    return raw


def check_raw(project: Project, spec: DatasetSpec, progress: Callable[[int, int], None] | None = None) -> "CheckReport":
    """Look at everything in a dataset's raw folder: counts, unreadable images, duplicates, boxes.

    Raises:
        DataError: the annotations cannot be read.
    """
    from dml_core.data.check import check_dataset

    return check_dataset(spec.reader, project.root / spec.raw, spec.options, progress)


def show_dataset(project: Project, name: str, role: str, num_classes: int, num_samples: int, path: Path) -> Path:
    """Draw a contact sheet of a prepared dataset: classes by samples.

    Raises:
        DataError: it is not prepared.
        ConfigError: it has no such role.
        StoreError: the file cannot be written.
    """
    from dml_core.data.sheet import contact_sheet

    try:
        contact_sheet(project.packed(name), role, num_classes, num_samples, path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror or error}); choose another place with --out") from None
    return path


def prepare_dataset(project: Project, name: str, spec: DatasetSpec, progress: Callable[[int, int], None] | None = None) -> DatasetRecord:
    """Pack a dataset's raw files; what `dvc.yaml`'s prepare stage runs.

    Raises:
        DataError: raw files missing or damaged.
        StoreError: the packed data cannot be written.
    """
    from dml_core.data.prepare import prepare

    folder = project.packed(name)
    with alone(project.state / "prepare" / f"{name}.lock"):
        prepare(spec.reader, project.root / spec.raw, folder, spec.options, progress)
    return read_dataset(project, name)


def read_dataset(project: Project, name: str) -> DatasetRecord:
    """The record of a prepared dataset.

    Raises:
        DataError: it is not prepared.
    """
    folder = project.packed(name)
    info = read_info(folder)
    counts = {role: entry.num_images for role, entry in info.roles.items()}
    return DatasetRecord(name=name, folder=str(folder), digest=info.fingerprint, counts=counts, source=info.name)


def check_unchanged(dataset: DatasetRecord) -> None:
    """Refuse a dataset that was prepared anew, with other content, since a flow began: its runs are of the former images.

    Raises:
        DataError: it was, or is gone.
    """
    found = read_info(Path(dataset.folder)).fingerprint
    if found != dataset.digest:
        before = dataset.digest
        raise DataError(f"{dataset.folder}: prepared anew during the run (digest {found}, before {before}); start the same command again")


def update_dataset(project: Project, name: str) -> DatasetRecord:
    """Bring a prepared dataset up to date through DVC, and return its record.

    Inside a DVC stage it only reads: the stage's own dependencies are up to date, and a stage must not call `dvc repro` on them. Packed
    data that `dvc pull` brought does not need its raw files: they count as unchanged while they are missing.

    Raises:
        DataError: DVC's stage failed, and the line is what it said last; or a packed file is damaged.
    """
    if "DVC_STAGE" not in os.environ:
        raw = project.root / dataset_spec(load_params(project.params_file), name).raw
        if raw.is_dir():
            check_files(raw)  # DVC, which hashes all of it, would wait for a pipe for ever
        without_raw = ["--allow-missing"] if (project.packed(name) / INFO_FILE).is_file() else []
        with alone(project.packed(name).parent / ".lock"):
            run_dvc(project, "--wait-for-lock", "repro", *without_raw, f"prepare@{name}")
    verify_files(project.packed(name))
    return read_dataset(project, name)


def changed_datasets(project: Project, params: Params, names: Sequence[str]) -> list[str]:
    """Those of the datasets whose packed data are not, or no longer, what DVC would make of the raw files, settings and code of today.

    Raw files that are not on this machine count as unchanged.

    Raises:
        DataError: DVC cannot say.
        ConfigError: no such dataset in `params.yaml`.
    """
    here = [name for name in names if (project.root / dataset_spec(params, name).raw).exists()]
    if not here:
        return []
    for name in here:
        check_files(project.root / params.datasets[name].raw)
    status = json.loads(run_dvc(project, "--wait-for-lock", "status", "--json", *(f"prepare@{name}" for name in here)))
    return [name for name in here if f"prepare@{name}" in status]


def dvc_digest(project: Project, name: str) -> str | None:
    """DVC's content hash of a prepared dataset as `dvc.lock` has it; None where DVC has not run."""
    lock = project.root / "dvc.lock"
    stages = (yaml.safe_load(lock.read_text()) or {}).get("stages", {}) if lock.exists() else {}
    outs = stages.get(f"prepare@{name}", {}).get("outs", [])
    return str(outs[0]["md5"]) if outs else None


def run_dvc(project: Project, *arguments: str) -> str:
    """Run one DVC command in the project, and return what it printed.

    Raises:
        DataError: it failed; the line is the error of the stage, or DVC's own.
    """
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"} | _without_git(project)
    ran = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], cwd=project.root, env=environment, capture_output=True, text=True, check=False
    )
    if ran.returncode != 0:
        said = [line for line in (ran.stdout + ran.stderr).splitlines() if line.startswith(("error:", "ERROR:"))]
        raise DataError(f"dvc {' '.join(arguments)} failed: {said[0].partition(':')[2].strip() if said else f'exit code {ran.returncode}'}")
    return ran.stdout


def _without_git(project: Project) -> dict[str, str]:
    """What DVC's environment needs where the project is in no git checkout, as in an image or an unpacked archive: `core.no_scm`.

    It stands in a copy of the machine's DVC configuration below the state folder; the project's own and the user's stay as they are, and
    come before it.
    """
    root = project.root.resolve()
    if any((folder / ".git").exists() for folder in [root, *root.parents]):
        return {}
    from dvc.dirs import system_config_dir

    folder = project.state / "dvc"
    config = configparser.ConfigParser(interpolation=None)
    if Path(system_config_dir()) != folder:
        config.read(Path(system_config_dir()) / "config", encoding="utf-8")
    config.read_dict({"core": {"no_scm": "true"}})
    text = io.StringIO()
    config.write(text)
    write_whole(folder / "config", text.getvalue())
    return {"DVC_SYSTEM_CONFIG_DIR": str(folder)}
