"""An index used from a notebook: folders as text, numpy's integers, one name, and mistakes that end in one line."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dml_core.errors import ConfigError
from dml_core.index.index import Index
from dml_core.index.items import Item
from dml_core.index.writing import Batch, add_items, build_index, remove_items

ROWS = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
NAMES = [*"abcdefghij", "ab", "kl"]


def items(names: list[Any]) -> list[Item]:
    return [Item(name) for name in names]


def test_a_folder_may_be_text_and_k_an_integer_of_numpy(tmp_path: Path) -> None:
    folder = f"{tmp_path}/images.index"
    build_index(folder, [Batch(ROWS, items(NAMES))], "m")
    index = Index.open(folder)
    assert index.search(ROWS, np.int64(3))[1].shape == (12, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^k = 2.5 neighbours were asked for; ask for 1 or more$"):
        index.search(ROWS, 2.5)  # type: ignore[arg-type]
    assert remove_items(folder, "ab").names() == [*"abcdefghij", "kl"], "one name, not its letters"
    assert add_items(folder, [Batch(ROWS[:1], items(["ab"]))], "m").num_items == 12


@pytest.mark.parametrize(
    "wrong",
    [items([1, 2]), ["a", "b"], items(["a", os.fsdecode(b"caf\xe9.jpg")]), [Item("a"), Item("b", "caf\udce9")]],
    ids=["names that are numbers", "text", "a file name in Latin-1", "a class in Latin-1"],
)
def test_what_is_no_item_is_refused_by_name_and_leaves_no_index(tmp_path: Path, wrong: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"^.* is no item of an index: expected an Item whose name and class are text in UTF-8$"):
        build_index(tmp_path, [Batch(ROWS[:2], wrong)], "m")
    with pytest.raises(ConfigError, match=r"^metric 'dot': expected one of cosine, euclidean$"):
        build_index(tmp_path, [Batch(ROWS[:2], items(["a", "b"]))], "m", "dot")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no index there"):
        Index.open(tmp_path)
