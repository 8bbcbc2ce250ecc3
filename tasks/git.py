"""Git: the commit that a project's results name, and why there is none with its code and settings."""

import logging
import os
import subprocess
from functools import cache
from pathlib import Path

from dml_core.errors import ConfigError
from tasks.environment import Project

NO_CODE = (":(exclude)results", ":(exclude)docs", ":(exclude)tests", ":(exclude)*.md", ":(exclude)dvc.lock")  # paths that change no result
NEW_CODE = [f"{part}/*.{kind}" for part in ("dml_core", "tasks", "flows") for kind in ("py", "yaml", "html", "css", "js")]
OTHER_CHECKOUT = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # git sets them for hooks
logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)


def run_git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command in the project at `root`, or None if it failed or there is no git."""
    ran = _ran(root, *arguments)
    return ran.stdout.strip() if ran is not None and ran.returncode == 0 else None


def _ran(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str] | None":
    environment = {name: value for name, value in os.environ.items() if name not in OTHER_CHECKOUT}
    try:
        return subprocess.run(["git", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False)
    except OSError:
        return None


def trust_command(root: Path) -> str | None:
    """Return the command that lets git use the checkout at `root`, which it refuses as another user owns it; None if it does not refuse."""
    ran = _ran(root, "rev-parse", "HEAD")
    return None if ran is None else next((line.strip() for line in ran.stderr.splitlines() if "safe.directory" in line), None)


def code_commit(root: Path, unread: tuple[str, ...] = ()) -> str | None:
    """Return the commit of the project at `root`, with "-dirty" if code or settings differ, or a new file among the code is not ignored.

    None: there is no git, or it refuses the checkout, with a warning, or its repository around `root`, perhaps another project's, has no
    `params.yaml` there. `unread`: as NO_CODE.
    """
    found = run_git(root, "rev-parse", "HEAD", "HEAD:./params.yaml")
    if found is None:
        if command := trust_command(root):
            _warn_once("%s: git refuses this checkout, as another user owns it, so results name no commit; run: %s", root, command)
        return None
    changed = run_git(root, "status", "--porcelain", "-uno", "--", ".", *NO_CODE, *unread)
    new = run_git(root, "ls-files", "--others", "--exclude-standard", "--", *NEW_CODE, ":(exclude)*/.*", *NO_CODE, *unread)
    return f"{found.split()[0]}{'-dirty' if changed or new or _unrecorded_params(root) else ''}"


def _unrecorded_params(root: Path) -> Path | None:
    """Return the file that `params.yaml` is a link to if the commit does not have it as it is, or None: of links git records the text."""
    if not (root / "params.yaml").is_symlink():
        return None
    file = (root / "params.yaml").resolve()
    commands = ("ls-files", "--error-unmatch"), ("diff", "--quiet", "HEAD")
    return None if all(run_git(root, *command, "--", str(file)) is not None for command in commands) else file


def recorded_commit(root: Path) -> str:
    """Return the commit that has the code and settings of the project at `root`.

    Raises:
        ConfigError: there is none, or they differ from it.
    """
    commit = code_commit(root)
    if commit is not None and not commit.endswith("-dirty"):
        return commit
    where = "git shows no commit with this params.yaml" if commit is None else "code or settings differ from the commit"
    if commit is None and (command := trust_command(root)):
        problem = f"git refuses this checkout, as another user owns it; run: {command}"
    elif commit is not None and (file := _unrecorded_params(root)):
        problem = f"params.yaml is a link to {file}, which the commit does not have as it is; replace the link by a copy, and commit"
    else:
        problem = f"{where}; commit first (git status lists changes)"
    raise ConfigError(f"{problem}: results are named by the commit that made them")


def git_tags(project: Project, unread: tuple[str, ...] = ()) -> dict[str, str]:
    """Return tags for the project's commit (`code_commit`) and for whether code or settings differ from it; empty without a commit."""
    commit = code_commit(project.root, unread)
    return {} if commit is None else {"git_commit": commit, "git_dirty": str(commit.endswith("-dirty")).lower()}
