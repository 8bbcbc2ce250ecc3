"""Images of a dataset that change while a step reads them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dml_core.data.store.info import INFO_FILE, read_info, write_info
from dml_core.errors import DataError
from tasks.data import read_packed
from tasks.runs.replaced_data import of_same_data


def test_a_checkpoint_is_removed_if_images_are_others_and_stays_if_they_cannot_be_read(tmp_path: Path, packed: Path) -> None:
    """A network disk may be away for a moment at the end of a week."""
    folder = shutil.copytree(packed, tmp_path / "packed")
    dataset, info, cleared = read_packed(folder, "d"), read_info(folder), list[None]()

    def step(change: Callable[[], object]) -> None:
        with of_same_data(dataset, lambda: cleared.append(None)):
            change()

    step(lambda: None)
    with pytest.raises(DataError, match="no prepared dataset"):
        step((folder / INFO_FILE).unlink)
    assert cleared == []
    write_info(info, folder)
    with pytest.raises(DataError, match="was prepared again during the run"):
        step(lambda: write_info(info.model_copy(update={"images_sha256": "0" * 64}), folder))
    assert cleared == [None]
