"""Datasets: fetching the raw files, preparing them and updating them through DVC. No other module uses DVC.

DVC runs as a command in a separate process with the project as working directory, because its Python interface uses that of the calling
process, and with `--wait-for-lock`. Concurrent flows wait for each other by a lock, because DVC's own lock covers its repository and not
the files another DVC process is writing. Modules that decode images are imported where they are used.
"""

import configparser
import csv
import hashlib
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dml_core.config import check_known
from dml_core.data.readers.shared.contract import DatasetConfig, OfficialDataset
from dml_core.data.readers.shared.rules import check_files
from dml_core.data.registry import fetch, parse_dataset, published_dataset
from dml_core.data.store.info import INFO_FILE, DatasetInfo, read_info, verify_files
from dml_core.errors import ConfigError, DataError
from dml_core.files import write_errors
from tasks.dvc_lock import add_seen, digests, dvc_digest, locked_stages, packed_digest, seen_hashes
from tasks.environment import Project
from tasks.files import check_output, hash_of_states, last_change, write_whole
from tasks.locks import alone
from tasks.mirror import copy_objects
from tasks.processes import kill_with_descendants
from tasks.runs.params.file import load_params
from tasks.runs.records import DatasetRecord
from tasks.runs.replaced_data import check_before_packing, check_unused, warning_of_moved_classes
from tasks.runs.specs import DatasetSpec, Params

if TYPE_CHECKING:  # importing it loads torch
    from dml_core.data.check import Finding

logger = logging.getLogger(__name__)


def dataset_spec(params: Params, name: str) -> DatasetSpec:
    """Return the named dataset's parameters.

    Raises:
        ConfigError: `params.yaml` has no such dataset.
    """
    if name not in params.datasets and published_dataset(name):
        raise ConfigError(f"dataset '{name}' is not in params.yaml; add it with its archive or folder: dml data add {name} PATH")
    check_known("dataset", name, params.datasets)
    return params.datasets[name]


def is_by_hand(spec: DatasetSpec) -> bool:
    """Return whether only the user can bring the raw files of a dataset: it has no mirror, and its reader neither downloads nor draws."""
    options = parse_dataset(spec.reader, spec.options)
    reader, base = type(options), OfficialDataset if isinstance(options, OfficialDataset) else DatasetConfig
    has_links = any(archive.url is not None for archive in getattr(options, "archives", ()))
    return spec.mirror is None and not has_links and reader.fetch is base.fetch and reader.materialise is base.materialise


def fetch_raw(project: Project, spec: DatasetSpec, progress: Callable[[int, int], None] | None = None) -> None:
    """Fetch the missing raw files of a dataset, from its mirror first if it names one (`copy_objects`); other files stay unchanged.

    `progress` is called with (bytes done, total bytes) of each file that is downloaded.

    Raises:
        DataError: files are missing and have to be obtained by hand; the message says how.
        StoreError: the mirror cannot be read, or the folder cannot be written.
    """
    raw = project.root / spec.raw

    def state(of: str) -> Path:
        return project.state / "fetch" / hashlib.sha256(of.encode()).hexdigest()[:16]

    with write_errors(f"{raw}:", "free space or choose another folder"), alone(state(spec.raw).with_suffix(".lock")):
        if spec.mirror is not None:
            record = state(f"{spec.raw} {spec.mirror}").with_suffix(".json")
            copy_objects(spec.mirror, raw, progress, record, parse_dataset(spec.reader, spec.options).own_images)
        fetch(spec.reader, spec.options, raw, progress)


def show_dataset(project: Project, name: str, role: str, num_classes: int, num_samples: int, path: Path) -> Path:
    """Draw a contact sheet of a prepared dataset: classes by samples.

    Raises:
        DataError: the dataset is not prepared, or a packed file is missing or damaged.
        ConfigError: the dataset has no such role, or `path` is a file that is not a PNG.
        StoreError: the file cannot be written.
    """
    from dml_core.data.sheet import contact_sheet

    check_output(path, "image/png", b"\x89PNG")
    verify_files(project.packed(name))
    with write_errors(f"{path}:", "choose another place with --output"):
        contact_sheet(project.packed(name), role, num_classes, num_samples, path)
    return path


def write_findings(project: Project, name: str, findings: "Sequence[Finding]") -> Path:
    """Write what a check of a dataset found, every image of it, to a file below the state folder, and return its path.

    Raises:
        StoreError: it cannot be written.
    """
    path, text = project.state / "checks" / f"{name}.csv", io.StringIO()
    csv.writer(text).writerows([("finding", "where"), *((finding.what, where) for finding in findings for where in finding.examples)])
    with write_errors(f"{path}:", "free space, or change DML_STATE"):
        write_whole(path, text.getvalue())
    return path


def prepare_dataset(project: Project, name: str, spec: DatasetSpec, progress: Callable[[int, int], None] | None = None) -> DatasetRecord:
    """Pack a dataset's raw files; the prepare stage of `dvc.yaml` runs this.

    Raises:
        DataError: raw files are missing or damaged, DVC would refuse them, own images break a rule of `check_own_images`, files changed
            meanwhile, or a flow uses the present images (the former packed data stay).
        StoreError: the packed data cannot be written.
    """
    from dml_core.data.check import check_own_images
    from dml_core.data.prepare import prepare

    raw = project.root / spec.raw

    def check(new: DatasetInfo) -> None:
        if hash_of_states([raw]) != before:
            raise DataError(f"{raw}: files changed while they were packed; run the command again when all of them are there")
        if (present := dataset_if_intact(project, name)) is not None and present.digest != new.fingerprint:
            check_unused(project, name)

    with alone(project.state / "prepare" / f"{name}.lock"):
        if raw.is_dir():
            check_files(raw)
        before = hash_of_states([raw])
        check_before_packing(project, name, parse_dataset(spec.reader, spec.options), raw)  # sooner than after packing
        check_own_images(spec.reader, raw, spec.options)  # `dml data add` did, but images, list or roles may have changed since
        with warning_of_moved_classes(project, name):
            prepare(spec.reader, raw, project.packed(name), spec.options, progress, check)
        write_whole(_packed_from(project, name), str(before))
        if "DVC_STAGE" in os.environ:  # `dvc.lock` has the hash of the raw files already
            add_seen(project, name, before, digests(project, name)[0], packed_digest(project, name))
    return read_dataset(project, name)


def read_dataset(project: Project, name: str) -> DatasetRecord:
    """Return the record of a prepared dataset.

    Raises:
        DataError: the dataset is not prepared.
    """
    return read_packed(project.packed(name), name)


def dataset_if_prepared(project: Project, name: str) -> DatasetRecord | None:
    """Return the record of a dataset, or None if it is not prepared.

    Raises:
        DataError: it is prepared, but damaged.
    """
    return read_dataset(project, name) if os.path.lexists(project.packed(name) / INFO_FILE) else None


def dataset_if_intact(project: Project, name: str) -> DatasetRecord | None:
    """Return the record of a dataset, or None if it is not prepared. A damaged one counts as not prepared, and a warning names it."""
    try:
        return dataset_if_prepared(project, name)
    except DataError as error:
        logger.warning("%s; until then it counts as not prepared", error)
        return None


def read_packed(folder: Path, name: str) -> DatasetRecord:
    """Return the record of the prepared dataset in a folder.

    Raises:
        DataError: it is not prepared.
    """
    info = read_info(folder)
    counts = {role: entry.num_images for role, entry in info.roles.items()}
    return DatasetRecord(name=name, folder=str(folder), digest=info.fingerprint, counts=counts, source=info.name)


def has_new_raw_files(project: Project, name: str, spec: DatasetSpec) -> bool:
    """Return whether raw files changed since a dataset was packed: most likely it has other images when it is packed again."""
    try:
        is_newer = _last_change(project.root / spec.raw) > (project.packed(name) / INFO_FILE).stat().st_mtime_ns
    except OSError:  # missing
        return False
    return is_newer and not _is_unchanged(project, name)


def update_dataset(project: Project, name: str) -> DatasetRecord:
    """Update a prepared dataset through DVC, and return its record.

    Inside a DVC stage it is only read: the stage's dependencies are up to date, and a stage must not call `dvc repro` on them. Packed data
    that `dvc.lock` records, as after `dvc pull`, does not need its raw files.

    Raises:
        DataError: DVC's stage failed (the message is the first error it printed), a packed file is damaged, or `_check_raw_files`.
    """
    if "DVC_STAGE" not in os.environ:
        spec = dataset_spec(load_params(project.params_file), name)
        if (raw := project.root / spec.raw).is_dir():
            check_files(raw)  # DVC hashes all of it, and would wait for a pipe for ever
        with alone(project.packed(name).parent / ".lock"):
            if not _is_unchanged(project, name):
                recorded, seen = digests(project, name), seen_hashes(project, name)
                if {None, *seen}.isdisjoint(recorded):  # else it was reset, or other raw files are packed alike
                    _check_raw_files(project, name, spec)
                with warning_of_moved_classes(project, name):  # DVC's output, with that of its stage, is not shown
                    _repro(project, name)
                if recorded[1] not in {None, dvc_digest(project, name), *seen[-1:]}:
                    logger.warning("%s: dvc.lock recorded other packed images; it now records these: see git diff dvc.lock", name)
    verify_files(project.packed(name))
    return read_dataset(project, name)


def _check_raw_files(project: Project, name: str, spec: DatasetSpec) -> None:
    """Check that own images have changed since they were packed here, where `dvc.lock` has neither their hash nor one of before.

    Raises:
        DataError: they have not, as after `git pull`: packing them would undo another machine's update.
    """
    raw = project.root / spec.raw
    if not is_by_hand(spec) or hash_of_states([raw]) not in seen_hashes(project, name):
        return  # the stage `fetch` may change them, or they have changed, or are not here
    raise DataError(
        f"{name}: dvc.lock records other images than those in {raw}, which is as it was packed here: bring the new ones there, or move it "
        f"away to use those of `dvc pull prepare@{name}`; to pack the present ones all the same, run: dvc repro prepare@{name}"
    )


def unchanged_dataset(project: Project, name: str) -> DatasetRecord | None:
    """Return the record of a prepared dataset, or None if `update_dataset` would start DVC.

    Raises:
        DataError: a packed file is damaged.
    """
    if "DVC_STAGE" not in os.environ and not _is_unchanged(project, name):
        return None
    verify_files(project.packed(name))
    return read_dataset(project, name)


def _is_unchanged(project: Project, name: str) -> bool:
    """Return whether nothing that DVC looks at has changed since it last updated a dataset. DVC itself takes seconds to start.

    Like DVC, this considers a file with the same size, time of change and inode unchanged.
    """
    mark = _mark(project, name)
    return mark.is_file() and mark.read_bytes() == json.dumps(_dvc_state(project, name)).encode()


def _last_change(raw: Path) -> int:
    """Return when raw files last changed (`last_change`), or a link on the way to them, which may lead to an older folder now."""
    return max([last_change([raw]), *(path.lstat().st_ctime_ns for path in (raw, *raw.parents) if path.is_symlink())])


def _mark(project: Project, name: str) -> Path:
    return project.state / "prepare" / f"{name}.unchanged.json"


def _packed_from(project: Project, name: str) -> Path:
    """Return the file with the state of the raw files that were packed, until DVC is known to have recorded the same ones."""
    return project.state / "prepare" / f"{name}.packed_from"


def _changed_since_packed(project: Project, name: str, params: Params) -> bool:
    """Return whether raw files changed between their packing and DVC's record of them, with which DVC compares."""
    packed_from, raw = _packed_from(project, name), project.root / dataset_spec(params, name).raw
    return packed_from.is_file() and raw.exists() and packed_from.read_bytes() != str(hash_of_states([raw])).encode()


def _repro(project: Project, name: str) -> None:
    """Run `dvc repro` of a dataset. If a file may have changed while DVC ran, no mark is left, and DVC runs again the next time."""
    mark, before = _mark(project, name), _dvc_state(project, name)
    mark.unlink(missing_ok=True)
    written, raw = project.packed(name) / INFO_FILE, project.root / dataset_spec(load_params(project.params_file), name).raw
    # For DVC, data of `dvc.lock` that its cache lacks are then missing, too, whatever is in their place.
    is_pulled = not raw.exists() and (digest := packed_digest(project, name)) is not None and digest == dvc_digest(project, name)
    allow_missing = ["--allow-missing"] if is_pulled else []
    try:
        run_dvc(project, "--wait-for-lock", "repro", *allow_missing, f"prepare@{name}")
        if _changed_since_packed(project, name, load_params(project.params_file)):
            run_dvc(project, "--wait-for-lock", "repro", "--force", "--single-item", f"prepare@{name}")
    except DataError as error:  # a comparison that DVC runs (`make results`) reads the dataset, which then nothing may write
        if " is busy, " not in str(error) or changed_datasets(project, load_params(project.params_file), [name]):
            raise
    after = _dvc_state(project, name)
    if after is None or after["inputs"] is None:
        return
    # DVC itself may have written inputs: raw files that it fetched. They are older than what was packed from them.
    if (before is not None and before["inputs"] == after["inputs"]) or last_change(_inputs(project, name)) <= written.stat().st_mtime_ns:
        write_whole(mark, json.dumps(after))
        add_seen(project, name, hash_of_states([raw]), *digests(project, name))
        _packed_from(project, name).unlink(missing_ok=True)


def _dvc_state(project: Project, name: str) -> dict[str, str | None] | None:
    """Return hashes of what decides whether DVC runs a dataset's stages; None if DVC has not run them.

    Inputs and outputs: each file's path, size, time and inode, and for inputs also settings and definitions; None if a file is missing.
    Lock: what DVC recorded.
    """
    stages = [locked_stages(project).get(f"{stage}@{name}") for stage in ("fetch", "prepare")]
    if None in stages:
        return None
    stage_text = (project.root / "dvc.yaml").read_text(encoding="utf-8")
    settings = dataset_spec(load_params(project.params_file), name).model_dump_json() + stage_text
    return {
        "inputs": hash_of_states(_inputs(project, name), settings),
        "outputs": hash_of_states([project.packed(name)]),
        "lock": hashlib.sha256(str(stages).encode()).hexdigest(),
    }


def _inputs(project: Project, name: str) -> list[Path]:
    """Return the files and folders on which a dataset's stages depend, as DVC recorded them."""
    stages = locked_stages(project)
    return [project.root / str(dep["path"]) for stage in ("fetch", "prepare") for dep in stages[f"{stage}@{name}"].get("deps", [])]


def changed_datasets(project: Project, params: Params, names: Sequence[str]) -> dict[str, bool]:
    """Return the datasets whose packed data differs from what DVC would make of the current raw files, settings and code.

    True: only code differs, and most likely packs the same. Without raw files here they differ if `dvc.lock` records other packed data.

    Raises:
        DataError: DVC failed.
        ConfigError: `params.yaml` has no such dataset.
    """
    here = [name for name in names if (project.root / dataset_spec(params, name).raw).exists()]
    away = {name: {packed_digest(project, name), dvc_digest(project, name)} for name in names if name not in here}
    changed = {name: False for name, packed in away.items() if len(packed - {None}) == 2}
    if not here:
        return changed
    for name in here:
        check_files(project.root / params.datasets[name].raw)
    status = json.loads(run_dvc(project, "--wait-for-lock", "status", "--json", *(f"prepare@{name}" for name in here)))
    for name in here:
        entries, has_arrived = status.get(f"prepare@{name}", []), _changed_since_packed(project, name, params)
        if entries or has_arrived:
            places = [place for entry in entries if isinstance(entry, dict) for of_kind in entry.values() for place in of_kind]
            changed[name] = not has_arrived and all(place.startswith("dml_core/") for place in places)
    return changed


def run_dvc(project: Project, *arguments: str) -> str:
    """Run one DVC command in the project, and return its output.

    Raises:
        DataError: the command failed; the message is the error of the stage, or DVC's own.
    """
    if {"{", "}"} & {*str(project.root)}:
        raise DataError(f"{project.root}: DVC fails in a folder whose path has braces; rename it")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"} | _without_git(project)
    command, pipe = [sys.executable, "-m", "dvc", *arguments], subprocess.PIPE
    with subprocess.Popen(command, cwd=project.root, env=environment, stdout=pipe, stderr=pipe, text=True) as ran:
        try:
            printed, errors = ran.communicate()
        except BaseException:  # an interrupt, or Prefect cancels the flow: the command of a stage would continue without DVC
            kill_with_descendants(ran)
            raise
    if ran.returncode != 0:
        error = re.search(r"^(?:error|ERROR):(.*(?:(?<=:)\n.*(?:\n\t- .*)*)?)", printed + errors, re.MULTILINE)  # with a list after a colon
        reason = " ".join(error[1].split()) if error else f"exit code {ran.returncode}"
        remedy = "; copy the hidden folder .dvc of the repository into the project" if "not inside of a DVC repository" in reason else ""
        raise DataError(f"dvc {' '.join(arguments)} failed: {reason}{remedy}")
    return printed


def _without_git(project: Project) -> dict[str, str]:
    """Return the variables DVC needs if the project is not in a git checkout, as in an image or an unpacked archive: `core.no_scm`.

    The setting is written to a copy of the machine's DVC configuration below the state folder. The configurations of the project and the
    user stay unchanged and override it. In an image `dvc.lock` is a link into a volume; DVC refuses one that leads nowhere.
    """
    root = project.root.resolve()
    if any((folder / ".git").exists() for folder in [root, *root.parents]):
        return {}
    lock = root / "dvc.lock"
    if lock.is_symlink() and not lock.exists():
        write_whole(lock.resolve(), "schema: '2.0'\n")
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
