"""`dvc.lock` names the committed code, parameters and results. Whether this code gives these results, only `dml verify` shows."""

import json
import subprocess
import sys

from tests.conftest import ROOT


def test_dvc_lock_fits_the_tree() -> None:
    """Only for paths in git (code, parameters, results): DVC reports raw and packed data as missing in a fresh clone."""
    asked = subprocess.run([sys.executable, "-m", "dvc", "status", "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    differing = {
        f"{stage}: {path} {state}"
        for stage, changes in json.loads(asked.stdout).items()
        if stage.endswith(("@synthetic", "@fashion-mnist"))
        for change in changes
        if isinstance(change, dict)
        for changed in change.values()
        for path, state in changed.items()
        if any(name == path or name.startswith(f"{path}/") for name in tracked)
    }
    assert differing == set(), "update dvc.lock: docs/how-to/contribute.md, Checks"
