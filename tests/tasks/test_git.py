"""The commit that results name, of checkouts of every kind."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dml_core.errors import ConfigError
from tasks.environment import Project
from tasks.files import write_whole
from tasks.git import git_tags, recorded_commit, trust_command


def git(folder: Path, *arguments: str) -> str:
    named = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    return subprocess.run(["git", *named, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def committed(root: Path) -> Project:
    """Make a project in a separate repository, with one commit."""
    (root / "results").mkdir(parents=True)
    for name in ("params.yaml", "results/page.md"):
        (root / name).write_text("a: 1\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "one")
    return Project(root, root / "state", str(root / "store"), "sqlite:///x")


def test_a_machine_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = committed(tmp_path / "project")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_tags(project) == {}


def test_the_recorded_commit_of_a_changed_tree_says_dirty(tmp_path: Path) -> None:
    project = committed(tmp_path / "project")
    commit = git(project.root, "rev-parse", "HEAD")
    assert git_tags(project) == {"git_commit": commit, "git_dirty": "false"}
    (project.root / "notes").write_text("not tracked\n")
    (project.root / "results/page.md").write_text("made by dml itself\n")
    assert git_tags(project) == {"git_commit": commit, "git_dirty": "false"}
    project.params_file.write_text("a: 2\n")
    assert git_tags(project) == {"git_commit": f"{commit}-dirty", "git_dirty": "true"}


def test_new_files_among_the_code_are_changes(tmp_path: Path) -> None:
    """As the settings that `dml tune` writes: a run that uses them would name a commit without them."""
    project = committed(tmp_path / "project")
    commit = git(project.root, "rev-parse", "HEAD")
    write_whole(project.root / ".git/info/exclude", "__pycache__/\n")
    write_whole(project.root / "dml_core/__pycache__/x.pyc", "")
    for name in ("README.md", ".x.py.swp", "x.py.orig", ".DS_Store", ".ipynb_checkpoints/x-checkpoint.py"):  # of editors and viewers
        write_whole(project.root / "tasks" / name, "")
    assert git_tags(project)["git_commit"] == commit
    write_whole(project.root / "flows/tables/tuned/project/standing/softtriple@synthetic.yaml", "")
    assert git_tags(project) == {"git_commit": f"{commit}-dirty", "git_dirty": "true"}
    git(project.root, "add", "flows")
    assert git_tags(project)["git_dirty"] == "true"
    git(project.root, "commit", "--quiet", "-m", "tuned")
    assert git_tags(project)["git_dirty"] == "false"


def test_the_commit_of_another_repository_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the one that an archive of the project was unpacked in, or the one whose hook started the command."""
    project, around = committed(tmp_path / "around/project"), committed(tmp_path / "around")
    monkeypatch.setenv("GIT_DIR", str(around.root / ".git"))
    assert git_tags(project)["git_commit"] == git(project.root, "--git-dir=.git", "rev-parse", "HEAD")
    shutil.rmtree(project.root / ".git")
    assert git_tags(project) == {}


def test_a_checkout_that_another_user_owns_is_named_with_the_command_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container with the checkout mounted: results lost their commit, and `dml accept` said that there was none."""
    project, config = committed(tmp_path / "project"), tmp_path / "gitconfig"
    commit = git(project.root, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert [git_tags(project), git_tags(project)] == [{}, {}]
    (record,) = caplog.records
    command = f"git config --global --add safe.directory {project.root}"
    assert record.getMessage().endswith(f"git refuses this checkout, as another user owns it, so results name no commit; run: {command}")
    assert trust_command(project.root) == command
    with pytest.raises(ConfigError, match=rf"^git refuses this checkout, as another user owns it; run: {command}: results are named"):
        recorded_commit(project.root)
    subprocess.run(command.split(), check=True)
    assert (recorded_commit(project.root), trust_command(project.root)) == (commit, None)


def test_settings_behind_a_link_are_changes_unless_the_commit_has_them(tmp_path: Path) -> None:
    """Git records only where the link leads: runs named a commit that does not have their settings."""
    project = committed(tmp_path / "project")
    params, shared = project.params_file, tmp_path / "shared.yaml"
    shared.write_text("a: 1\n")
    params.unlink()
    params.symlink_to(shared)
    git(project.root, "commit", "--quiet", "-am", "shared")
    assert git_tags(project)["git_dirty"] == "true"
    with pytest.raises(
        ConfigError, match=rf"^params.yaml is a link to {shared}, which the commit does not have as it is; replace the link"
    ):
        recorded_commit(project.root)
    own = project.root / "own.yaml"
    own.write_text("a: 1\n")
    params.unlink()
    params.symlink_to("own.yaml")
    git(project.root, "commit", "--quiet", "-am", "own")
    assert git_tags(project)["git_dirty"] == "true", "not added"
    git(project.root, "add", "own.yaml")
    git(project.root, "commit", "--quiet", "-m", "add")
    assert recorded_commit(project.root) == git(project.root, "rev-parse", "HEAD")
    own.write_text("a: 2\n")
    assert git_tags(project)["git_dirty"] == "true"
