"""Prefect's local database: unchanged if it is intact, set aside if it is damaged, and never touched if the user configured it."""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import prefect
import pytest

from dml_core.errors import StoreError
from flows import local_database
from flows.local_database import DATABASE_VARIABLES, copy_empty_database, find_fault, keep_created_database, set_aside_if_damaged
from tasks.files import files_set_aside
from tests.damage import DAMAGE


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of many pages with an index, in Prefect's journal mode."""
    path = tmp_path_factory.mktemp("database") / "prefect.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE runs (id INTEGER PRIMARY KEY, name TEXT)")
        database.execute("CREATE INDEX by_name ON runs (name)")
        database.executemany("INSERT INTO runs (name) VALUES (?)", [(f"run {number} " + "x" * 100,) for number in range(3000)])
        database.commit()
    return path


@pytest.fixture
def home(tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in DATABASE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    shutil.copy(sound, tmp_path)
    return tmp_path


def test_a_sound_database_stays_also_while_another_process_writes_it(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        database.execute("BEGIN IMMEDIATE")
        set_aside_if_damaged(home)
    assert not files_set_aside(home)
    assert (home / "prefect.db").exists()
    assert not caplog.records


@pytest.mark.parametrize("how", ["cut", "garble"])
def test_a_damaged_database_is_set_aside_with_one_line(home: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    DAMAGE[how](home / "prefect.db")
    damaged = (home / "prefect.db").read_bytes()
    (home / "prefect.db-wal").write_bytes(b"left over")
    set_aside_if_damaged(home)
    assert files_set_aside(home)[0].name == "prefect.db.damaged-1"
    assert not (home / "prefect.db-wal").exists(), "it would be read with the database that is made anew"
    assert (home / "prefect.db.damaged-1").read_bytes() == damaged
    (record,) = caplog.records
    assert "replaced by a new one" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_every_damaged_database_is_kept(home: Path) -> None:
    for number in (1, 2):
        (home / "prefect.db").write_bytes(b"damaged " * 1000 + bytes([number]))
        set_aside_if_damaged(home)
        assert (home / f"prefect.db.damaged-{number}").read_bytes()[-1] == number
    assert (home / "prefect.db.damaged-1").read_bytes()[-1] == 1


def test_several_that_find_the_same_damage_set_it_aside_once(home: Path) -> None:
    DAMAGE["garble"](home / "prefect.db")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(set_aside_if_damaged, [home] * 4))
    assert [path.name for path in files_set_aside(home)] == ["prefect.db.damaged-1"]


def test_damaged_pages_are_found(home: Path) -> None:
    data = bytearray((home / "prefect.db").read_bytes())
    data[4096 * 20 : 4096 * 24] = b"\xff" * 4096 * 4
    (home / "prefect.db").write_bytes(data)
    assert find_fault(home / "prefect.db") is not None


def test_a_newer_prefect_s_database_is_set_aside_and_an_older_one_s_is_left_to_the_server(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server ended at each start, and no advice in the error helped."""
    from alembic.script import ScriptDirectory

    migrations = Path(prefect.__file__).parent / "server/database/_migrations"
    scripts = ScriptDirectory(str(migrations), version_locations=[str(migrations / "versions/sqlite")])
    with closing(sqlite3.connect(home / "prefect.db")) as database, database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("INSERT INTO alembic_version VALUES (?)", [scripts.get_base()])
    for revision in (scripts.get_current_head(), "0123456789ab"):
        set_aside_if_damaged(home)
        assert not files_set_aside(home), "the revision before is known"
        with closing(sqlite3.connect(home / "prefect.db")) as database, database:
            database.execute("UPDATE alembic_version SET version_num = ?", [revision])
    set_aside_if_damaged(home)
    assert rows(home / "prefect.db.damaged-1") == 3000
    (record,) = caplog.records
    assert "prefect.db: a newer Prefect wrote it; kept as prefect.db.damaged-1 and replaced by a new one" in record.getMessage()


def test_a_log_without_its_database_and_no_database_are_no_damage(home: Path) -> None:
    (home / "prefect.db-wal").write_bytes(b"left over")
    assert find_fault(home / "prefect.db") is None
    (home / "prefect.db").unlink()
    set_aside_if_damaged(home)


def test_a_database_that_a_person_named_is_not_touched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DAMAGE["garble"](home / "prefect.db")
    monkeypatch.setenv(DATABASE_VARIABLES[0], "postgresql+asyncpg://somewhere")
    set_aside_if_damaged(home)
    assert (home / "prefect.db").exists()


def test_a_folder_in_its_place_is_set_aside(home: Path) -> None:
    (home / "prefect.db").unlink()
    (home / "prefect.db").mkdir()
    (home / "prefect.db" / "mine.txt").write_text("mine")
    set_aside_if_damaged(home)
    assert files_set_aside(home) == [home / "prefect.db.damaged-1"]
    assert (home / "prefect.db.damaged-1" / "mine.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_set_aside_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "prefect.db").write_bytes(b"damaged")

    def refuse(path: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local_database, "set_aside", refuse)
    with pytest.raises(StoreError, match="cannot be set aside"):
        set_aside_if_damaged(home)


@pytest.fixture
def kept(home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's kept database, made of the sound one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user")))
    keep_created_database(home)
    (path,) = Path(os.environ["XDG_CACHE_HOME"], "dml-repro").iterdir()
    return path


def test_a_new_project_gets_a_copy_of_the_kept_database(home: Path, kept: Path) -> None:
    clear(home)
    assert copy_empty_database(home)
    assert not list(home.glob("prefect.db-*"))
    assert rows(home / "prefect.db") == rows(kept) == 3000


@pytest.mark.parametrize("how", DAMAGE)
def test_without_an_intact_one_the_server_creates_its_own(home: Path, kept: Path, how: str) -> None:
    DAMAGE[how](kept)
    clear(home)
    assert not copy_empty_database(home)
    assert not list(home.glob("*prefect.db*"))


def test_the_log_of_a_lost_database_is_not_applied_to_a_copy(home: Path, kept: Path) -> None:
    clear(home)
    (home / "prefect.db-wal").write_bytes(b"left over")
    assert not copy_empty_database(home)
    assert not (home / "prefect.db").exists()


def test_a_project_keeps_its_database(home: Path, kept: Path) -> None:
    with closing(sqlite3.connect(home / "prefect.db")) as database, database:
        database.execute("DELETE FROM runs")
    assert copy_empty_database(home)
    assert rows(home / "prefect.db") == 0


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("user_home", [no_home, lambda: Path("/proc")], ids=["none", "read-only"])
def test_without_a_user_s_folder_the_server_creates_its_own(
    home: Path, monkeypatch: pytest.MonkeyPatch, user_home: Callable[[], Path]
) -> None:
    monkeypatch.setattr(Path, "home", user_home)
    keep_created_database(home)
    clear(home)
    assert not copy_empty_database(home)


def test_of_two_flows_that_start_at_once_one_copies(home: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other finds the first one's database, which its server may have opened, and leaves it."""
    clear(home)
    written: list[Path] = []
    write = local_database.write_whole

    def slowly(path: Path, content: bytes) -> None:
        written.append(path)
        time.sleep(0.3)
        write(path, content)

    monkeypatch.setattr(local_database, "write_whole", slowly)
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(copy_empty_database, [home] * 3)) == [True] * 3
    assert written == [home / "prefect.db"]


def clear(home: Path) -> None:
    for path in home.iterdir():
        path.unlink()


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT count(*) FROM runs").fetchone()[0])
