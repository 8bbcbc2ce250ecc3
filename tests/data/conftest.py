"""Small generated datasets, made once per session, and the real Fashion-MNIST files."""

from pathlib import Path

import pytest

from dml_core.data.prepare import prepare
from dml_core.data.readers.fashion_mnist import FashionMnist
from dml_core.data.registry import materialise
from dml_core.errors import DataError

OPTIONS = {"num_classes": 6, "images_per_class": 5, "image_size": 32, "grayscale_share": 0.2, "seed": 3}


@pytest.fixture(scope="session")
def raw_synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tmp_path_factory.mktemp("raw") / "synthetic"
    materialise("synthetic", OPTIONS, raw)
    return raw


@pytest.fixture(scope="session")
def packed_synthetic(raw_synthetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "synthetic"
    prepare("synthetic", raw_synthetic, out, OPTIONS)
    return out


@pytest.fixture(scope="session")
def published() -> Path:
    """Folder of the real files, found or downloaded; fails with a short message without a network or the package."""
    try:
        return FashionMnist().locate_raw()
    except DataError as error:
        pytest.fail(str(error), pytrace=False)
