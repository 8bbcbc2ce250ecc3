"""Backbone weights from an S3 store: gives `dml_core`, which knows no stores, a way to fetch `s3://` addresses."""

from pathlib import Path

from dml_core.errors import ConfigError
from dml_core.models.backbones.weights import DOWNLOADERS


def enable_s3_weights() -> None:
    """Let `weights: s3://bucket/key` work in this process; every process that builds a network calls it."""
    DOWNLOADERS["s3"] = _fetch_s3


def _fetch_s3(address: str, path: Path) -> None:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, key = address.removeprefix("s3://").partition("/")
    try:
        boto3.client("s3").download_file(bucket, key, str(path))
    except (BotoCoreError, ClientError) as error:
        raise ConfigError(
            f"backbone weights '{address}' cannot be fetched ({error}); check the bucket, AWS_ENDPOINT_URL and credentials"
        ) from None
