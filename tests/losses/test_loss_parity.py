"""Every registered loss has the same gradients, losses and weights with 1 and 3 workers and the same global batches.

All losses run in one set of processes, as `TrainingSystem` under DistributedDataParallel, on global batches of
7 (uneven shards), of 2 (a worker without images) and of 9 (equal shards).
"""

import copy
from functools import cache

import pytest
import torch
import torch.distributed as dist
from loss_cases import CASES, DIM, NUM_CLASSES, build, case_id
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dml_core.losses.contract import Needs
from dml_core.training.parallel.workers import TrainingSystem, shard_sizes
from tests.workers import spawn

pytestmark = pytest.mark.slow

NUM_WORKERS = 3
BATCH_SIZES = [7, 2, 9]
GATE_BETWEEN_SHARDS = ("sgsl", {"gate": 1.6097})
PML = ("pml:TripletMarginLoss", {"triplets_per_anchor": 2})
TRAINED = [*CASES, GATE_BETWEEN_SHARDS, PML]
# SGSL needs the global batch only for its gate: with a gate on which all shards agree, it is the same without gathering.
UNGATHERED = [case for case in TRAINED if build(case).needs.global_batch and (case[0] != "sgsl" or case is GATE_BETWEEN_SHARDS)]


def batch(step):
    """Return a step's global batch: images (N, 6) and labels with pairs of one class."""
    random = torch.Generator().manual_seed(100 + step)
    num_samples = BATCH_SIZES[step]
    return torch.randn(num_samples, 6, generator=random, dtype=torch.float64), torch.arange(num_samples) // 2 % NUM_CLASSES


def system(case, gathered):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, DIM)).double()
    loss = build(case)
    if not gathered:
        loss.__class__ = type("Ungathered", (type(loss),), {"needs": Needs()})
    return TrainingSystem(model, loss)


def train(case, rank, num_workers, gathered=True):
    """Return losses and gradients of the first two steps, and the state after the last step."""
    trained = system(case, gathered)
    module = DistributedDataParallel(trained) if num_workers > 1 else trained
    seen = {}
    for step in range(len(BATCH_SIZES)):
        images, labels_N = batch(step)
        sizes = shard_sizes(len(labels_N), num_workers)
        trained.zero_grad()
        shard = torch.split(images, sizes)[rank]
        total, parts = module(shard, labels_N, sizes, torch.Generator().manual_seed(step))
        total.backward()
        if step < 2:
            seen |= {f"step {step} {name}": p.grad.clone() for name, p in trained.named_parameters() if p.grad is not None}
            seen[f"step {step} loss"] = averaged(total.detach().clone(), num_workers)
            for name in names_of_all(set(parts), num_workers):
                seen[f"step {step} {name}"] = averaged(parts.get(name, torch.zeros_like(total)).detach().clone(), num_workers)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter -= 0.1 * (0.0 if parameter.grad is None else parameter.grad)
    return seen | {f"trained {name}": value.clone() for name, value in copy.deepcopy(trained).state_dict().items()}


def names_of_all(own, num_workers):
    """Return the names of the loss's parts on any worker: one without images or pairs has fewer."""
    names = [own]
    if num_workers > 1:
        names = [None] * num_workers
        dist.all_gather_object(names, own)
    return sorted(set().union(*names))


def averaged(value, num_workers):
    if num_workers > 1:
        dist.all_reduce(value)
    return value / num_workers


def worker(rank, num_workers, folder):
    results = {
        "gathered": [train(case, rank, num_workers) for case in TRAINED],
        "ungathered": [train(case, rank, num_workers, gathered=False) for case in UNGATHERED],
    }
    torch.save(results, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    """Losses, gradients and final state of each of three workers."""
    folder = tmp_path_factory.mktemp("workers")
    spawn(worker, NUM_WORKERS, NUM_WORKERS, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(NUM_WORKERS)]


@cache
def alone(index):
    return train(TRAINED[index], 0, 1)


@pytest.mark.parametrize("case", TRAINED, ids=case_id)
def test_three_workers_learn_the_same(case, by_rank):
    for result in by_rank:
        torch.testing.assert_close(result["gathered"][TRAINED.index(case)], alone(TRAINED.index(case)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", UNGATHERED, ids=case_id)
def test_without_gathering_the_test_above_would_fail(case, by_rank):
    with pytest.raises(AssertionError):
        torch.testing.assert_close(by_rank[0]["ungathered"][UNGATHERED.index(case)], alone(TRAINED.index(case)), rtol=1e-6, atol=1e-6)
