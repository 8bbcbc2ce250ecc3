"""Every registered dataset has a module, and every dataset module is registered."""

import ast
from pathlib import Path

import pytest

import dml_core.data.readers
from dml_core.data.readers.shared.contract import DatasetConfig
from dml_core.data.registry import DATASETS, dataset_class

FOLDER = Path(dml_core.data.readers.__file__).parent


@pytest.mark.parametrize("name", DATASETS)
def test_every_name_leads_to_a_dataset_with_its_own_module(name: str) -> None:
    found = dataset_class(name)
    assert issubclass(found, DatasetConfig)
    assert found.__module__ == f"dml_core.data.readers.{name}"
    assert found.how_to_get != DatasetConfig.how_to_get, "it says what to do where its files are missing"


def test_every_dataset_module_has_a_name() -> None:
    bases = {"DatasetConfig", "OfficialDataset", "IdxDataset", "DrawnDataset"}
    found = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name not in bases and bases & {ast.unparse(base) for base in node.bases}:
                found.add(f"dml_core.data.readers.{path.stem}:{node.name}")
    assert found == set(DATASETS.values())
