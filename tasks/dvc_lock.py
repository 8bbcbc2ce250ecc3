"""DVC's record of the stages that it ran: `dvc.lock`."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from dml_core.data.store.info import IMAGES_FILE, INFO_FILE, MANIFEST_FILE
from dml_core.errors import DataError, first_line
from tasks.environment import Project
from tasks.files import hash_of_states, write_whole


def locked_stages(project: Project) -> dict[str, Any]:
    """Return the stages in `dvc.lock`: name -> command, dependencies and outputs with their hashes.

    Raises:
        DataError: the file cannot be parsed, or has a conflict of a merge.
    """
    lock = project.root / "dvc.lock"
    try:
        content = yaml.load(lock.read_bytes(), Loader=yaml.CSafeLoader) if lock.is_file() else None  # 15 times faster than yaml.safe_load
        stages = dict((content or {}).get("stages") or {})
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        if b"<<<<<<< " in lock.read_bytes():
            page = "docs/how-to/recover-and-clean-up.md"
            raise DataError(f"{lock}: has a merge conflict; keep the stages of both sides, as {page} describes") from None
        reason = first_line(error) if isinstance(error, yaml.YAMLError) else "no stages"
        raise DataError(f"{lock}: cannot be parsed ({reason}); restore it: git checkout HEAD dvc.lock") from None
    return stages


def dvc_digest(project: Project, name: str) -> str | None:
    """Return the content hash of a prepared dataset, or None if DVC has not run."""
    return _output_digest(project, f"prepare@{name}")


def _output_digest(project: Project, stage: str) -> str | None:
    outs = locked_stages(project).get(stage, {}).get("outs", [])
    if outs and "md5" not in outs[0]:
        raise DataError(f"{project.root / 'dvc.lock'}: {stage}: has no md5, as of a version_aware remote, which dml does not support")
    return str(outs[0]["md5"]) if outs else None


def or_pull(project: Project, name: str) -> str:
    """Return how else to get packed data of which raw files are missing, to end a message with; empty if `dvc.lock` records none."""
    with suppress(DataError):
        return f"; or, if it was pushed, run: dvc pull prepare@{name}" if dvc_digest(project, name) else ""
    return ""


def digests(project: Project, name: str) -> tuple[str | None, str | None]:
    """Return the content hash of a dataset's raw files, None if DVC has not run, and `dvc_digest`."""
    return _output_digest(project, f"fetch@{name}"), dvc_digest(project, name)


def packed_digest(project: Project, name: str) -> str | None:
    """Return the content hash that DVC records of the present packed files, or None if one is missing.

    It is kept below the state folder and computed again when a file's size, time of change or inode has changed.
    """
    folder, kept = project.packed(name), project.state / "prepare" / f"{name}.packed_md5"
    entries, state = [], hash_of_states([folder])
    with suppress(OSError, ValueError):  # missing or damaged
        of_state, digest = kept.read_text(encoding="utf-8").split()
        if of_state == state:
            return digest
    try:
        for part in sorted((INFO_FILE, IMAGES_FILE, MANIFEST_FILE)):
            with (folder / part).open("rb") as file:
                entries.append({"md5": hashlib.file_digest(file, "md5").hexdigest(), "relpath": part})
    except OSError:
        return None
    digest = f"{hashlib.md5(json.dumps(entries).encode()).hexdigest()}.dir"
    write_whole(kept, f"{state} {digest}")
    return digest


def seen_hashes(project: Project, name: str) -> list[str]:
    """Return what `add_seen` has added on this machine, the latest last."""
    with suppress(OSError, ValueError, TypeError):  # missing or damaged
        return list(map(str, json.loads(_seen(project, name).read_bytes())))
    return []


def add_seen(project: Project, name: str, *hashes: str | None) -> None:
    """Add hashes of raw files that were packed here: their state, DVC's content hash, and last that of the packed files."""
    before = [known for known in seen_hashes(project, name) if known not in hashes]
    write_whole(_seen(project, name), json.dumps([*before, *filter(None, hashes)]))


def _seen(project: Project, name: str) -> Path:
    return project.state / "prepare" / f"{name}.seen.json"
