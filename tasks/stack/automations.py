"""Synchronise a Prefect server's automations with a file: `python -m tasks.stack.automations infra/automations.yaml`.

Prefect's own command adds another automation of the same name on each call; this one replaces it.
"""

import os
import sys
from pathlib import Path

import requests

from dml_core.config import read_yaml
from dml_core.errors import ConfigError

SECONDS = 30


def replace_automations(url: str, path: Path) -> None:
    """Make the server at `url` (which ends in /api) have each of the file's automations once.

    Raises:
        ConfigError: the server rejects one.
    """
    for automation in read_yaml(path)["automations"]:
        same_name = {"automations": {"name": {"any_": [automation["name"]]}}}
        response = requests.post(f"{url}/automations/filter", json=same_name, timeout=SECONDS)
        response.raise_for_status()
        for old in response.json():
            requests.delete(f"{url}/automations/{old['id']}", timeout=SECONDS).raise_for_status()
        response = requests.post(f"{url}/automations/", json=automation, timeout=SECONDS)
        if not response.ok:
            raise ConfigError(f"{path}: Prefect rejected '{automation['name']}' ({response.status_code}: {response.text[:300]})")


if __name__ == "__main__":
    replace_automations(os.environ["PREFECT_API_URL"].rstrip("/"), Path(sys.argv[1]))
