"""Synchronise a Prefect server's automations with a file: `python -m tasks.stack.automations infra/automations.yaml`.

Prefect's own command adds another automation of the same name on each call; this one replaces it. An action `call-webhook` names the
environment variable with the webhook's address; if that is unset, the address that the server has stays, and without one the automation is
left out. The login is that of Prefect's clients
(`PREFECT_API_AUTH_STRING` or `PREFECT_API_KEY`).
"""

import os
import sys
from http import HTTPStatus
from pathlib import Path

import requests

from dml_core.config import read_yaml
from dml_core.errors import ConfigError
from tasks.stack.prefect_api import prefect_session

SECONDS = 30
WEBHOOK_BLOCK = "dml-webhook"


def replace_automations(url: str, path: Path) -> None:
    """Make the server at `url` (which ends in /api) have each of the file's automations once.

    Raises:
        ConfigError: the server rejects one.
    """
    session = prefect_session()
    for automation in read_yaml(path)["automations"]:
        same_name = {"automations": {"name": {"any_": [automation["name"]]}}}
        response = session.post(f"{url}/automations/filter", json=same_name, timeout=SECONDS)
        response.raise_for_status()
        former = response.json()
        webhooks = [action for action in automation["actions"] if action["type"] == "call-webhook"]
        for action in webhooks:
            action["block_document_id"] = _webhook_block(session, url, os.environ.get(action.pop("webhook")))
        if all(action["block_document_id"] is not None for action in webhooks):
            response = session.post(f"{url}/automations/", json=automation, timeout=SECONDS)
            if not response.ok:  # the former one stays
                raise ConfigError(f"{path}: Prefect rejected '{automation['name']}' ({response.status_code}: {response.text[:300]})")
        for old in former:
            session.delete(f"{url}/automations/{old['id']}", timeout=SECONDS).raise_for_status()


def _webhook_block(session: requests.Session, url: str, address: str | None) -> str | None:
    """Return the id of the server's block with a webhook's address, created or updated if an address is given; None if there is none."""
    existing = session.get(f"{url}/block_types/slug/webhook/block_documents/name/{WEBHOOK_BLOCK}", timeout=SECONDS)
    if existing.ok and address:
        block = f"{url}/block_documents/{existing.json()['id']}"
        session.patch(block, json={"data": {"url": address}, "merge_existing_data": True}, timeout=SECONDS).raise_for_status()
    if existing.ok:
        return str(existing.json()["id"])
    if existing.status_code != HTTPStatus.NOT_FOUND:
        existing.raise_for_status()
    if not address:
        return None
    block_type = session.get(f"{url}/block_types/slug/webhook", timeout=SECONDS)
    block_type.raise_for_status()
    of_type = {"block_schemas": {"block_type_id": {"any_": [block_type.json()["id"]]}}}
    schemas = session.post(f"{url}/block_schemas/filter", json=of_type, timeout=SECONDS)
    schemas.raise_for_status()
    of_webhook = {"block_type_id": block_type.json()["id"], "block_schema_id": schemas.json()[0]["id"]}
    document = {"name": WEBHOOK_BLOCK, "data": {"method": "POST", "url": address}, **of_webhook}
    created = session.post(f"{url}/block_documents/", json=document, timeout=SECONDS)
    created.raise_for_status()
    return str(created.json()["id"])


if __name__ == "__main__":
    replace_automations(os.environ["PREFECT_API_URL"].rstrip("/"), Path(sys.argv[1]))
