"""Mined negatives equal a search by hand, and an interrupted run that mines ends in the weights of an undisturbed one."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dml_core.data.store.packed import PackedDataset
from dml_core.training import mining
from dml_core.training.history import read_history
from dml_core.training.loop import fit
from dml_core.training.mining import nearest_of_other_classes
from dml_core.training.parallel.workers import equal_buffers, world_size
from tests.conftest import small_training
from tests.training.stopping import StoppedError, same, stop_after
from tests.workers import spawn

CPU = torch.device("cpu")
MINED = small_training("triplet_global", sampler={"kind": "mined_triplets", "batch_size": 9})


@pytest.mark.parametrize("rows_at_once", [1, 7, 1024])
def test_the_nearest_of_other_classes(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mining, "ROWS_AT_ONCE", rows_at_once)
    embeddings = np.random.default_rng(0).standard_normal((30, 4))
    labels = np.arange(30) % 5
    found = nearest_of_other_classes(torch.from_numpy(embeddings), torch.from_numpy(labels), 3)
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    for row in range(30):
        others = [other for other in np.argsort(-(unit @ unit[row])) if labels[other] != labels[row]]
        assert found[row].tolist() == others[:3]


def test_no_more_negatives_than_the_largest_class_leaves() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 2])
    found = nearest_of_other_classes(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), labels, 10)
    assert found.shape == (6, 2)
    assert (labels.numpy()[found] != labels.numpy()[:, None]).all()


def search_in_parts(rank: int, folder: Path) -> None:
    random = torch.Generator().manual_seed(0)
    embeddings_ND, labels_N = torch.randn(50, 4, generator=random), torch.arange(50) % 5
    mining.ROWS_AT_ONCE = 7
    buffers = torch.nn.BatchNorm1d(3)
    buffers.running_mean.fill_(rank)
    equal_buffers(buffers)
    found = nearest_of_other_classes(embeddings_ND, labels_N, 3)
    torch.save((torch.from_numpy(found), buffers.running_mean), folder / f"{world_size()}-{rank}.pt")


@pytest.mark.slow
def test_workers_search_in_parts_and_have_the_whole_and_the_buffers_of_the_first(tmp_path: Path) -> None:
    for num_workers in (1, 3):
        spawn(search_in_parts, num_workers, tmp_path)
    alone, _ = torch.load(tmp_path / "1-0.pt")
    for rank in range(3):
        together, buffers = torch.load(tmp_path / f"3-{rank}.pt")
        assert torch.equal(together, alone)
        assert torch.equal(buffers, torch.zeros(3))


def test_a_run_that_mines_ends_as_if_it_had_not_been_interrupted(packed: Path, tmp_path: Path) -> None:
    dataset = PackedDataset(packed, "train")
    undisturbed = fit(MINED, dataset, 0, tmp_path / "undisturbed", CPU).state_dict()
    with pytest.raises(StoppedError):
        fit(MINED, dataset, 0, tmp_path / "resumed", CPU, report=stop_after(2))
    resumed = fit(MINED, dataset, 0, tmp_path / "resumed", CPU).state_dict()
    assert same(resumed, undisturbed)
    assert len(read_history(tmp_path / "resumed")) == 3 * 12  # 36 images, each an anchor once: 12 batches of 3 triplets
