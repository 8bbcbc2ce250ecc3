"""Packages that are hidden from the Python processes of a test, as if they were not installed."""

import os
from collections.abc import Iterable
from pathlib import Path

# Read by every Python process that has its folder in PYTHONPATH.
HIDE = """
import os, sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *others):
        return None if name.partition(".")[0] in os.environ["HIDDEN"].split() else self.finder.find_spec(name, *others)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def hiding(folder: Path, names: Iterable[str], path: Path) -> dict[str, str]:
    """Return the environment variables that hide packages, with `path` for the project's own; writes into `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(HIDE)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{path}", "HIDDEN": " ".join(names)}
