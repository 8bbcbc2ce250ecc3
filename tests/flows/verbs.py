"""Every verb of `dml`, from the command tree, so that the tests cover a new verb or fail."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer._click.core import Context

from flows.cli.app import VERBS, load_verb
from tests import forked
from tests.conftest import ROOT

# Valid arguments of each verb, for the tests that run all verbs.
ARGUMENTS = {
    "accept": ["own", "--why", "reason"],
    "compare": [],
    "data add": ["own", "images"],
    "data check": ["own"],
    "data fetch": ["own"],
    "data list": [],
    "data prepare": ["own"],
    "data show": ["own"],
    "doctor": [],
    "embed": ["own/good", "images", "-o", "embedded"],
    "evaluate": ["--embeddings", "e.npy", "--labels", "l.npy"],
    "gc": [],
    "index add": ["index", "images"],
    "index build": ["own/good", "images", "-o", "index"],
    "index remove": ["index", "a"],
    "index show": ["index"],
    "look": ["own/good"],
    "models export": ["own/good", "-o", "exported"],
    "models list": [],
    "models promote": ["own/good"],
    "plan": ["softtriple/table1"],
    "receipt": ["own", "-o", "receipt.json"],
    "report": ["softtriple/table1"],
    "reproduce": ["-d", "own"],
    "run": ["own", "good"],
    "search": ["index", "images"],
    "serve": ["index"],
    "stack down": [],
    "stack logs": ["mlflow"],
    "stack restart": [],
    "stack status": [],
    "stack up": [],
    "sync": [],
    "tables export": ["softtriple/table1", "-o", "runs.json"],
    "tables import": ["runs.json"],
    "tables list": ["softtriple"],
    "tables show": ["softtriple/table1"],
    "tune": ["project/standing/softtriple"],
    "ui": [],
    "verify": ["own"],
}


def leaves() -> Iterator[tuple[str, Any]]:
    """Yield (words, command) of every verb."""
    for verb in VERBS:
        command = load_verb(verb)
        for name, inner in getattr(command, "commands", {"": command}).items():
            yield f"{verb} {name}".strip(), inner


def options() -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the words of each verb -> its options and arguments by their names."""
    by_words = {}
    for words, command in leaves():
        parameters = command.get_params(Context(command, info_name=words))
        by_words[tuple(words.split())] = {name: each for each in parameters for name in (*each.opts, *each.secondary_opts)}
    return by_words


def dml(words: list[str], cwd: Path, shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `dml` in a forked process, or in a new one if Python must start with redirections (`shell`, such as `>&-`) or variables."""
    if not shell and not environment:
        return forked.dml(words, cwd)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(forked.SETTINGS)}
    return subprocess.run(
        ["bash", "-c", f'"$@" {shell}', "bash", sys.executable, "-m", "flows.cli", *words],
        cwd=cwd,
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
