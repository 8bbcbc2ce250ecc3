"""Prefect's database of one flow: a copy of this user's empty one, or none, which the server then creates."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flows.local_database import copy_empty_database, keep_created_database
from tests.damage import DAMAGE


@pytest.fixture
def created(tmp_path: Path) -> Path:
    """A server's folder with a database of many pages with an index, in Prefect's journal mode."""
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE runs (id INTEGER PRIMARY KEY, name TEXT)")
        database.execute("CREATE INDEX by_name ON runs (name)")
        database.executemany("INSERT INTO runs (name) VALUES (?)", [(f"run {number} " + "x" * 100,) for number in range(3000)])
        database.commit()
    return tmp_path


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a new server."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture
def kept(created: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's kept database."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user")))
    keep_created_database(created)
    (path,) = Path(os.environ["XDG_CACHE_HOME"], "dml-repro").iterdir()
    return path


def test_a_new_server_gets_a_copy_of_the_kept_database(home: Path, kept: Path) -> None:
    assert copy_empty_database(home)
    assert [path.name for path in home.iterdir()] == ["prefect.db"]
    assert rows(home / "prefect.db") == rows(kept) == 3000


@pytest.mark.parametrize("how", DAMAGE)
def test_without_an_intact_one_the_server_creates_its_own(home: Path, kept: Path, how: str) -> None:
    DAMAGE[how](kept)
    assert not copy_empty_database(home)
    assert not list(home.iterdir())


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("user_home", [no_home, lambda: Path("/proc")], ids=["none", "read-only"])
def test_without_a_user_s_folder_the_server_creates_its_own(
    created: Path, home: Path, monkeypatch: pytest.MonkeyPatch, user_home: Callable[[], Path]
) -> None:
    monkeypatch.setattr(Path, "home", user_home)
    keep_created_database(created)
    assert not copy_empty_database(home)


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT count(*) FROM runs").fetchone()[0])
