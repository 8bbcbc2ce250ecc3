"""Automations of Prefect's server are replaced one by one: the former one stays until the new one is accepted."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from dml_core.errors import ConfigError
from tasks.stack.automations import replace_automations


class Automations(BaseHTTPRequestHandler):
    """Keeps automations by id; rejects those without a trigger, as Prefect's server does."""

    kept: ClassVar[dict[str, dict[str, Any]]] = {}

    def _answer(self, status: int, value: Any = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/filter"):
            names = body["automations"]["name"]["any_"]
            self._answer(200, [entry | {"id": key} for key, entry in self.kept.items() if entry["name"] in names])
        elif not body["trigger"]:
            self._answer(422, {"detail": "trigger"})
        else:
            self.kept[str(len(self.kept) + 1)] = body
            self._answer(201, {})

    def do_DELETE(self) -> None:
        del self.kept[self.path.rpartition("/")[2]]
        self._answer(204)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Automations.kept.clear()
    with HTTPServer(("127.0.0.1", 0), Automations) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


def test_a_mistake_in_the_file_leaves_the_alarm_that_worked(server: str, tmp_path: Path) -> None:
    file = tmp_path / "automations.yaml"

    def load(trigger: dict[str, Any]) -> None:
        file.write_text(yaml.safe_dump({"automations": [{"name": "alarm", "trigger": trigger, "actions": [{"type": "do-nothing"}]}]}))
        replace_automations(server, file)

    load({"after": 1})
    with pytest.raises(ConfigError, match=r"automations.yaml: Prefect rejected 'alarm' \(422: "):
        load({})
    assert [entry["trigger"] for entry in Automations.kept.values()] == [{"after": 1}]
    load({"after": 2})
    assert [entry["trigger"] for entry in Automations.kept.values()] == [{"after": 2}]
