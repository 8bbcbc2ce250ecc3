"""The contents of MLflow, read from its database and artifacts: equal for runs with equal results, even if they were disturbed."""

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def published(database: Path, artifacts: Path) -> dict[str, Any]:
    """Return every run by name, with status, settings, every point of every curve and files; and every model, with its files.

    Duplicates appear twice in a list: runs of one name, points of one step, files, models. Costs are omitted: a fault has its price.
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
                "points": rows("SELECT key, step, value FROM metrics WHERE run_uuid = ? AND key NOT GLOB 'cost_*'", run),
                "files": _files(artifacts, run),
            }
            for run, name, status, stage in rows("SELECT run_uuid, name, status, lifecycle_stage FROM runs")
        ]
        models = rows("SELECT name, status FROM logged_models") + _models(artifacts)
        return {"runs": sorted(runs, key=lambda run: run["name"]), "models": models}


def _files(artifacts: Path, run: str) -> list[tuple[str, str]]:
    """Return path in the run's artifacts and SHA-256 of each file; figures contain no date and are compared too."""
    return [
        (path.as_posix().partition(f"{run}/artifacts/")[2], hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(artifacts.glob(f"*/{run}/artifacts/**/*"))
        if path.is_file()
    ]


def _models(artifacts: Path) -> list[tuple[str, str]]:
    """Return name and SHA-256 of every file of every model; the hash is empty for the file with the model's id and time."""
    return sorted(
        (name.partition("/artifacts/")[2], "" if path.name == "MLmodel" else hashlib.sha256(path.read_bytes()).hexdigest())
        for path in artifacts.glob("*/models/*/artifacts/**/*")
        if path.is_file() and "__pycache__" not in (name := path.as_posix())
    )
