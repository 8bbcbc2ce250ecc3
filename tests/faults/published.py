"""What MLflow has, read from its database and its artifacts: the same for runs that ended the same, whatever happened on their way."""

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def published(database: Path, artifacts: Path) -> dict[str, Any]:
    """Every run by its name: how it stands, settings, every point of every curve, files; and how many models there are.

    A list has twice what was published twice: runs of one name, points of one step, files, models.
    """
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as data:

        def rows(query: str, *values: str) -> list[tuple[Any, ...]]:
            return sorted(data.execute(query, values).fetchall())

        runs = [
            {
                "name": name,
                "status": status,
                "stage": stage,
                "settings": rows("SELECT key, value FROM params WHERE run_uuid = ?", run),
                "points": rows("SELECT key, step, value FROM metrics WHERE run_uuid = ?", run),
                "files": _files(artifacts, run),
            }
            for run, name, status, stage in rows("SELECT run_uuid, name, status, lifecycle_stage FROM runs")
        ]
        return {"runs": sorted(runs, key=lambda run: run["name"]), "models": rows("SELECT name, status FROM logged_models")}


def _files(artifacts: Path, run: str) -> list[tuple[str, str]]:
    """Name below the run's artifacts and SHA-256 of each; figures carry no date and are compared too."""
    return [
        (path.as_posix().partition(f"{run}/artifacts/")[2], hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(artifacts.glob(f"*/{run}/artifacts/**/*"))
        if path.is_file()
    ]
