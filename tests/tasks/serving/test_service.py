"""Start of the service, its reachable addresses, the effect of a killed replica, and an end that leaves no process."""

import asyncio
import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from typer.testing import CliRunner

from dml_core.errors import ConfigError
from flows.cli.app import app
from tasks.serving import limits
from tasks.serving.guard import Guard
from tasks.serving.replicas import ServiceError
from tasks.serving.service import host_names, listen, serve_http
from tests.conftest import ROOT
from tests.loopback_cluster import LOOPBACK, SETTINGS, listening, loopback_cluster
from tests.tasks.serving.conftest import Made, Service, wait_until


def refused(made: Made, *arguments: str, **environment: str) -> str:
    """Return the error of a `dml serve` that refuses to start."""
    run = subprocess.run(
        [sys.executable, "-m", "flows.cli", "serve", *arguments],
        cwd=made.project,
        env={name: value for name, value in os.environ.items() if not name.startswith("DML_")} | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 2, run.stderr
    (line,) = (line for line in run.stderr.splitlines() if not line.startswith("starting the service: "))  # the clock of a slow start
    return line


@pytest.mark.slow
@pytest.mark.proof
def test_what_it_refuses_to_start_with(made: Made) -> None:
    index = str(made.index)
    assert "set a token" in refused(made, index, "--host", "0.0.0.0")
    assert "set a token" in refused(made, index, "--host", "::")
    assert "at least 16" in refused(made, index, "--host", "0.0.0.0", DML_SERVE_TOKEN="short")
    assert "MY_TOKEN" in refused(made, index, "--token-env", "MY_TOKEN")
    assert "not an address" in refused(made, index, "--host", "nowhere.invalid")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another --port" in refused(made, index, "--port", str(taken.getsockname()[1]))
    assert "does not name a trained network" in refused(made, "nothing-there")


def test_with_a_model_the_index_must_exist(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped index is not a service without search."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(made.project)
    monkeypatch.setattr("tasks.serving.service.run_service", lambda *_, **__: None)
    wrong = CliRunner().invoke(app, ["serve", f"{made.index}x", "--model", str(made.model)])
    assert str(wrong.exception).startswith(f"{made.index}x: no index there; build one with")
    assert CliRunner().invoke(app, ["serve", str(made.index), "--model", str(made.model)]).exit_code == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "LocalHost", "2130706689"])  # the last one is 127.0.1.1
def test_the_printed_address_and_the_host_are_answered(host: str) -> None:
    with listen(host, 0, None) as listener:
        client = TestClient(Guard(FastAPI(), None, host_names(host, listener)))
        for name in (listener.getsockname()[0], host, "localhost"):
            assert client.get("/docs", headers={"host": f"{name}:8321"}).status_code == 200
        assert client.get("/docs", headers={"host": "evil.example"}).status_code == 403


def test_an_http_server_that_does_not_start_is_told_and_not_waited_for() -> None:
    """Its socket is closed before it listens, and no address is printed."""
    listener = listen("127.0.0.1", 0, None)
    listener.close()
    said: list[str] = []
    with pytest.raises(ServiceError, match=r"cannot listen \(Bad file descriptor\); start it again"):
        asyncio.run(asyncio.wait_for(serve_http(FastAPI(), listener, said.append), 10))
    assert said == []


def test_a_client_that_does_not_read_is_disconnected_and_a_slow_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two requests would occupy a place for ever; a client that reads all the time gets the whole answer."""
    monkeypatch.setattr(limits, "QUIET_SECONDS", 0.5)
    num_bytes, ended, addresses = 32_000_000, asyncio.Queue[str](), list[str]()

    async def answer(scope: Scope, _: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(num_bytes).encode())]})
        await send({"type": "http.response.body", "body": bytes(num_bytes)})
        ended.put_nowait(scope["path"])

    async def serve() -> None:
        listener, loop = listen("127.0.0.1", 0, None), asyncio.get_running_loop()
        server = asyncio.create_task(serve_http(answer, listener, addresses.append))
        with socket.create_connection(listener.getsockname()) as idle, socket.create_connection(listener.getsockname()) as slow:
            idle.sendall(b"".join(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path for path in (b"/first", b"/second")))
            async with asyncio.timeout(30):
                assert [await ended.get(), await ended.get()] == ["/first", "/second"]
            slow.sendall(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n")
            slow.setblocking(False)
            num_read, begun = 0, time.monotonic()
            while num_read < num_bytes:
                piece = await loop.sock_recv(slow, 1_000_000)
                assert piece, f"disconnected after {num_read} bytes"
                num_read += len(piece)
                await asyncio.sleep(0.05)
            assert time.monotonic() - begun > 3 * limits.QUIET_SECONDS
        server.cancel()

    asyncio.run(serve())


@pytest.mark.parametrize("token", ["a token of letters enough\n", " a token of letters enough"])
def test_a_token_that_no_client_can_send_is_refused(token: str) -> None:
    """As a secret of Kubernetes that was made from a line of text: every request would be refused."""
    with pytest.raises(ConfigError, match="begins or ends with white space"):
        listen("127.0.0.1", 0, token)


def test_answers_are_sent_without_delay() -> None:
    """Headers and body are sent separately: without TCP_NODELAY the body waits some 40 ms for the client's acknowledgement."""
    found: list[int] = []

    async def connect() -> None:
        done = asyncio.Event()

        async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            done.set()

        listener = listen("127.0.0.1", 0, None)
        async with await asyncio.start_server(note, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            await done.wait()
            writer.close()

    asyncio.run(connect())
    assert found[0] != 0


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("kind", ["service", "ray_service"])
def test_nothing_listens_but_on_loopback(request: pytest.FixtureRequest, kind: str) -> None:
    service: Service = request.getfixturevalue(kind)
    found = []
    for process in [psutil.Process(service.process.pid), *service.descendants()]:
        try:
            found += [connection for connection in process.net_connections("inet") if connection.status == psutil.CONN_LISTEN]
        except psutil.NoSuchProcess:
            continue
    assert service.port in {connection.laddr.port for connection in found}
    assert {connection.laddr.ip for connection in found} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.slow
@pytest.mark.proof
def test_replicas_on_a_cluster_listen_on_its_loopback_address_alone_and_end_if_their_service_is_killed(
    made: Made, start: Callable[..., Service]
) -> None:
    """As on the local stack: Serve opens a port in each replica, at which anyone who reaches it could run code."""
    with loopback_cluster(2) as (address, cluster):
        service = start(str(made.index), RAY_ADDRESS=address, **SETTINGS)
        found = listening(cluster, psutil.Process(service.process.pid))
        service.end(signal.SIGKILL)
        assert wait_until(lambda: not any("ServeReplica" in name for name in listening(cluster)), 120), "they would keep their GPUs"
    assert any("ServeReplica" in name and len(places) > 0 for name, places in found.items()), found
    assert {place for places in found.values() for place in places} <= LOOPBACK, found


@pytest.mark.slow
@pytest.mark.proof
def test_replicas_share_all_cores(ray_service: Service) -> None:
    """Ray's default is 1 core for each."""
    threads = [int(replica.environ()["OMP_NUM_THREADS"]) for replica in ray_service.replicas()]
    assert threads == [max(1, (os.cpu_count() or 1) // 2)] * 2


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize(("number", "num_replicas"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)])
def test_a_signal_ends_it_with_what_was_begun_answered_and_nothing_left(
    made: Made, start: Callable[..., Service], number: signal.Signals, num_replicas: int
) -> None:
    """Requests in progress are answered before the end."""
    service = start(str(made.index), "--replicas", str(num_replicas))
    processes = [psutil.Process(service.process.pid), *service.descendants()]
    body = json.dumps({"images": [base64.b64encode(made.files[0].read_bytes()).decode()] * 60}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.putrequest("POST", "/v1/search")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(body)))
    connection.endheaders(body[:100])
    assert wait_until(lambda: "dml_requests_open 2.0" in service.client.get("/metrics").text, 60), "this request, and that for the metrics"
    service.client.close()
    service.process.send_signal(number)
    connection.send(body[100:])
    response = connection.getresponse()
    assert (response.status, len(json.loads(response.read())["results"])) == (200, 60)
    _, said = service.process.communicate(timeout=60)
    code = service.process.returncode
    assert code == 128 + number
    assert said.endswith("interrupted; rerun the command to start it again\n"), "after the clock of a slow start"
    _, left = psutil.wait_procs(processes, timeout=5)
    assert left == []


@pytest.mark.slow
@pytest.mark.proof
def test_a_replica_killed_under_load_loses_no_request(made: Made, start: Callable[..., Service]) -> None:
    """Eight clients send requests without pause while one of two replicas is killed, later the other; all answers are right."""
    service = start(str(made.index), "--replicas", "2")
    data = made.files[0].read_bytes()
    expected = made.load().embed([data])[0].tolist()
    answers: list[tuple[int, Any]] = []
    ending = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=service.url, timeout=90) as client:
            while not ending.is_set():
                response = client.post("/v1/embed", files={"image": data})
                answers.append((response.status_code, response.json()))

    clients = [threading.Thread(target=ask) for _ in range(8)]
    for client in clients:
        client.start()
    time.sleep(3)
    first, second = service.replicas()
    num_before = len(answers)
    first.send_signal(signal.SIGKILL)
    time.sleep(3)
    num_with_one = len(answers) - num_before
    assert wait_until(lambda: len(service.replicas()) == 2, 60)
    time.sleep(5)
    second.send_signal(signal.SIGKILL)
    time.sleep(5)
    ending.set()
    for client in clients:
        client.join()
    assert num_before > 0
    assert num_with_one > 0
    assert [answer for status, answer in answers if status != 200] == []
    assert all(abs(value - wanted) < 1e-5 for _, answer in answers for value, wanted in zip(answer["embeddings"][0], expected, strict=True))
    metrics = service.client.get("/metrics").text
    print(len(answers), "answers;", next(line for line in metrics.splitlines() if line.startswith("dml_retries_total")))
    service.end()
