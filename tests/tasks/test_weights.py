"""Backbone weights from S3, with moto's in-process S3."""

import hashlib
import io

import boto3
import pytest
import torch
from moto import mock_aws

from dml_core.errors import StoreError
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import build_backbone
from tasks.storage import enable_s3_weights


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """SHA-256 and state of a LeNet whose weights are in a bucket."""
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    state = build_backbone(BackboneConfig(name="lenet")).state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        client.put_object(Bucket="models", Key="nets/lenet.pth", Body=buffer.getvalue())
        enable_s3_weights()
        yield hashlib.sha256(buffer.getvalue()).hexdigest(), state


def test_weights_come_from_a_bucket(stored):
    sha256, state = stored
    backbone = build_backbone(BackboneConfig(name="lenet", weights="s3://models/nets/lenet.pth", weights_sha256=sha256))
    assert all(torch.equal(value, state[key]) for key, value in backbone.state_dict().items())


def test_an_absent_object_is_one_line(stored):
    with pytest.raises(StoreError, match=r"s3://models.*check the bucket"):
        build_backbone(BackboneConfig(name="lenet", weights="s3://models/other.pth", weights_sha256=stored[0]))
