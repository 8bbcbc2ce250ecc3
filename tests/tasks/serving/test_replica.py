"""A batch of a replica, without Ray: images of several requests, and one that its network can do nothing with."""

import shutil
from pathlib import Path

import numpy as np
import torch

from dml_core.index.index import Index
from dml_core.trained import WEIGHTS_FILE, read_description, write_description
from tasks.serving.replica import Replica, _Asked
from tests.tasks.serving.conftest import Made


def test_a_batch_of_several_requests_gives_each_its_own(made: Made) -> None:
    """Embeddings alone and searches of different k."""
    model, wanted = made.load(), (0, 3, 30, 0, 1)
    replica = Replica(str(made.model), str(made.index), 1, 32)
    found = replica._compute([_Asked(model.view(path), k) for path, k in zip(made.files, wanted, strict=False)])
    expected = model.embed(made.files[:5])
    positions = Index.open(made.index).search(expected, 30)[1]
    np.testing.assert_allclose([one.row for one in found], expected, rtol=0, atol=1e-5)
    assert [None if one.positions is None else one.positions.tolist() for one in found] == [
        positions[place, :k].tolist() if k else None for place, k in enumerate(wanted)
    ]
    assert [one.batch_size for one in found] == [5, None, None, None, None]


def test_an_image_without_a_direction_is_refused_where_it_is_searched_with(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.model, tmp_path / "model")
    weights = tmp_path / "model" / WEIGHTS_FILE
    torch.save({name: torch.zeros_like(value) for name, value in torch.load(weights).items()}, weights)
    write_description(weights.parent, read_description(weights.parent))
    replica = Replica(str(tmp_path / "model"), str(made.index), 1, 32)
    view = made.load().view(made.files[0])
    embedded, searched = replica._compute([_Asked(view, 0), _Asked(view, 3)])
    assert embedded.refused is None
    assert not embedded.row.any()
    assert searched.refused == "the network gives it an embedding of zeros, which is near to nothing"
