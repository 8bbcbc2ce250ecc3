"""What DVC recorded of the stages that it ran: `dvc.lock`."""

from typing import Any

import yaml

from dml_core.errors import DataError, first_line
from tasks.environment import Project


def locked_stages(project: Project) -> dict[str, Any]:
    """Return the stages in `dvc.lock`: name -> command, dependencies and outputs with their hashes.

    Raises:
        DataError: the file cannot be parsed, for example after a merge with a conflict.
    """
    lock = project.root / "dvc.lock"
    try:
        content = yaml.load(lock.read_bytes(), Loader=yaml.CSafeLoader) if lock.is_file() else None  # 15 times faster than yaml.safe_load
        stages = dict((content or {}).get("stages") or {})
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        reason = first_line(error) if isinstance(error, yaml.YAMLError) else "no stages"
        raise DataError(f"{lock}: cannot be parsed ({reason}); restore it: git checkout HEAD dvc.lock") from None
    return stages


def dvc_digest(project: Project, name: str) -> str | None:
    """Return the content hash of a prepared dataset, or None if DVC has not run."""
    return _output_digest(project, f"prepare@{name}")


def raw_digest(project: Project, name: str) -> str | None:
    """Return the content hash of a dataset's raw files, or None if DVC has not run."""
    return _output_digest(project, f"fetch@{name}")


def _output_digest(project: Project, stage: str) -> str | None:
    outs = locked_stages(project).get(stage, {}).get("outs", [])
    return str(outs[0]["md5"]) if outs else None
