"""The model that a run has logged, if MLflow answers with errors, and the checks before one is logged."""

import io
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.entities import LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, REQUEST_LIMIT_EXCEEDED, RESOURCE_DOES_NOT_EXIST
from PIL import Image

from dml_core.config import parse
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import StoreError
from dml_core.trained import save_network
from dml_core.training.config import TrainingConfig
from dml_core.training.loop import build_system
from tasks.tracking import packaged_model
from tasks.tracking.models import _requirements, check_opens, content_of, drawn_image, pack_code
from tasks.tracking.registered import find_model
from tasks.tracking.tags import Tag
from tests.conftest import small_training

READY, PENDING = LoggedModelStatus.READY, LoggedModelStatus.PENDING


class Client:
    """Fake MLflow client with models by id: each has a status, or the error code of the answer."""

    def __init__(self, models: dict[str, LoggedModelStatus | int]) -> None:
        self.models = models

    def get_logged_model(self, model_id: str) -> SimpleNamespace:
        found = self.models[model_id]
        if not isinstance(found, LoggedModelStatus):
            raise MlflowException("no", error_code=found)
        tags = {} if model_id.startswith("user's") else {Tag.CONTENT: "hash"}
        return SimpleNamespace(model_id=model_id, status=found, tags=tags, model_type="reranker")

    def delete_logged_model(self, model_id: str) -> None:
        self.models[model_id] = RESOURCE_DOES_NOT_EXIST

    def run(self) -> SimpleNamespace:
        return SimpleNamespace(outputs=SimpleNamespace(model_outputs=[SimpleNamespace(model_id=name) for name in self.models]))


def test_deleted_models_are_passed_over_and_broken_ones_deleted() -> None:
    """A user's models of the run are neither."""
    of_user: dict[str, LoggedModelStatus | int] = {"user's": READY, "user's upload": PENDING}
    client = Client(of_user | {"deleted": RESOURCE_DOES_NOT_EXIST, "broken": PENDING, "whole": READY})
    assert find_model(client, client.run()) == "whole"
    assert client.models == of_user | {"deleted": RESOURCE_DOES_NOT_EXIST, "broken": RESOURCE_DOES_NOT_EXIST, "whole": READY}
    del client.models["whole"]
    assert find_model(client, client.run()) is None
    assert find_model(client, SimpleNamespace(outputs=None)) is None


@pytest.mark.parametrize("code", [INTERNAL_ERROR, REQUEST_LIMIT_EXCEEDED])
def test_a_server_that_fails_is_not_taken_for_one_without_the_model(code: int) -> None:
    """Otherwise the network would be logged twice."""
    client = Client({"whole": code})
    with pytest.raises(MlflowException):
        find_model(client, client.run())


def test_two_models_are_one_only_if_all_their_parts_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def content(
        description: str = "{}", code: str = "pass", module: str = "code/a.py", requirement: str = "torch==2", example: bytes = b"1"
    ) -> str:
        shutil.rmtree(tmp_path)
        for name, text in (("network/network.json", description), (module, code), ("network/weights.pt", "in the description")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return content_of(tmp_path, [requirement], example)

    others = [content("{1}"), content(code="return"), content(module="code/b.py"), content(requirement="torch==3"), content(example=b"2")]
    assert content() == content()
    before = content()
    monkeypatch.setattr(packaged_model, "__file__", __file__)  # another loader
    assert len({before, content(), *others}) == 7


def test_a_model_asks_for_timm_where_its_backbone_is_timms_alone() -> None:
    assert "timm" in _requirements("timm:resnet18")
    assert "timm" not in _requirements("resnet18")


def test_models_of_other_code_and_backbones_are_loaded_in_one_process(packed: Path, tmp_path: Path) -> None:
    """Each has its own code, and the process its own again."""
    image = PackedDataset(packed, "test").raw_bytes(0)
    code, folder, rows = tmp_path / packaged_model.CODE, tmp_path / "network", dict[str, np.ndarray]()
    for name, edit in (("small_cnn", ""), ("resnet18", ""), ("small_cnn", "-")):
        training = small_training().model_dump(mode="json")
        training["model"]["backbone"] = {"name": name}
        config = parse(TrainingConfig, training, "training")
        save_network(folder, training, 4, build_system(config, 4, 0, torch.device("cpu")).state_dict())
        pack_code(name, code)
        with zipfile.ZipFile(code) as packed_code:
            texts = {file: packed_code.read(file).decode() for file in packed_code.namelist()}
        with zipfile.ZipFile(code, "w") as other_code:
            for file, text in texts.items():
                other_code.writestr(file, text.replace("np.concatenate(rows)", f"{edit}np.concatenate(rows)"))
        path = tmp_path / f"{edit}{name}"
        mlflow.pyfunc.save_model(
            path, python_model=packaged_model.__file__, artifacts={"network": str(folder)}, code_paths=[str(code)], pip_requirements=[]
        )
        model = mlflow.pyfunc.load_model(str(path))
        rows[path.name] = model.predict(pd.DataFrame({"image": [image]}))
        assert sys.modules["dml_core.config"].parse is parse
    np.testing.assert_array_equal(rows["-small_cnn"], -rows["small_cnn"])
    assert rows["resnet18"].shape == rows["small_cnn"].shape


def test_the_example_of_a_model_is_drawn_in_the_size_of_the_images(packed: Path) -> None:
    image = PackedDataset(packed, "train").raw_bytes(0)
    example = drawn_image(image)
    assert Image.open(io.BytesIO(example)).size == Image.open(io.BytesIO(image)).size
    assert example == drawn_image(example), "depends on nothing else"


CONFIG = small_training()


def save(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Save a network with the initial weights of a seed; return the weights of seed 0."""
    for_file, weights = (build_system(CONFIG, 4, number, torch.device("cpu")).state_dict() for number in (seed, 0))
    save_network(folder, CONFIG.model_dump(mode="json"), 4, for_file, title="ours")
    return weights


def test_only_the_network_that_was_trained_is_published(packed: Path, tmp_path: Path) -> None:
    image = PackedDataset(packed, "train").raw_bytes(0)
    check_opens(tmp_path / "same", CONFIG, 4, save(tmp_path / "same"), image)
    with pytest.raises(StoreError, match=r"^ours: the saved network gives other embeddings than the trained one; it was not published$"):
        check_opens(tmp_path / "other", CONFIG, 4, save(tmp_path / "other", seed=1), image)
