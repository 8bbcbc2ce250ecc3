"""The stack's S3 server answers clients that have its user's name, and nobody else."""

import threading
from collections.abc import Iterator

import boto3
import pytest
import requests
from botocore.config import Config
from moto import server
from werkzeug.serving import make_server

from tasks.stack import s3_server


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a running server, whose user is `known`."""
    monkeypatch.setenv("S3_USER", "known")
    applications = []
    monkeypatch.setattr(server, "DomainDispatcherApplication", server.DomainDispatcherApplication)
    monkeypatch.setattr(server, "run_simple", lambda host, port, application, **options: applications.append(application))
    monkeypatch.setattr("sys.argv", ["s3_server"])
    monkeypatch.setattr(server.signal, "signal", lambda *arguments: None)
    s3_server.main()
    running = make_server("127.0.0.1", 0, applications[0], threaded=True)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.port}"
    running.shutdown()


def test_it_answers_those_who_know_its_user(address: str) -> None:
    login = {"endpoint_url": address, "aws_access_key_id": "known", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    client = boto3.client("s3", **login)
    client.create_bucket(Bucket="dml")
    client.put_object(Bucket="dml", Key="a", Body=b"bytes")
    for version in ("s3", "s3v4"):
        signing = boto3.client("s3", config=Config(signature_version=version), **login)
        signed = signing.generate_presigned_url("get_object", {"Bucket": "dml", "Key": "a"})
        assert requests.get(signed, timeout=60).content == b"bytes"
    assert requests.get(f"{address}/moto-api/", timeout=60).ok, "the stack asks it whether it runs"

    refused = {"Authorization": "AWS4-HMAC-SHA256 Credential=dml/20261130/known/s3/aws4_request"}
    for method, path in (
        ("GET", "dml/a"),
        ("PUT", "dml/a"),
        ("DELETE", "dml/a"),
        ("GET", ""),
        ("GET", "dml/a?known"),
        ("POST", "moto-api/reset"),
        ("POST", "moto-api/"),
    ):
        for headers in ({}, refused):
            assert requests.request(method, f"{address}/{path}", headers=headers, data=b"", timeout=60).status_code == 403
    assert client.get_object(Bucket="dml", Key="a")["Body"].read() == b"bytes"
