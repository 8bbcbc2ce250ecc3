"""An error on one worker ends all workers with that error and leaves the process group usable: all cases run in one group."""

import itertools
import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dml_core.config import merge, parse
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import DataError, DmlError, StoreError
from dml_core.training import loop, validation
from dml_core.training.checkpoints import writing
from dml_core.training.checkpoints.file import load_checkpoint
from dml_core.training.checkpoints.writing import Saving
from dml_core.training.config import TrainingConfig
from dml_core.training.validation import HeldOutRecall, ScoredImages
from tests.conftest import SETTINGS, small_training
from tests.workers import spawn

CPU = torch.device("cpu")
NUM_WORKERS = 2
PLAIN = small_training(num_epochs=2)
MINED = small_training("triplet_global", sampler={"kind": "mined_triplets", "batch_size": 9}, num_epochs=1)
PLACED = parse(
    TrainingConfig,
    merge(SETTINGS, {"loss": {"name": "heated_up_softmax", "options": {"better_init": True}}, "model": PLAIN.model.model_dump()}),
    "test",
)
WARMED = small_training(
    model={"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": "bn", "embedding_dim": 8}}, warm_up_batchnorm=True
)


class BadImages(PackedDataset):
    """A dataset that raises an error after `num_good` images are read."""

    def __init__(self, folder: Path, role: str, num_good: int, error: Exception) -> None:
        super().__init__(folder, role)
        self.num_left, self.error = num_good, error

    def image(self, index: int) -> Tensor:
        self.num_left -= 1
        if self.num_left < 0:
            raise self.error
        return super().image(index)


def raising(error: Exception, after: int = 0, instead_of: Callable[..., Any] = lambda *arguments: None) -> Callable[..., Any]:
    """Return a function that calls `instead_of` for the first `after` calls and raises from then on."""
    calls = itertools.count()

    def work(*arguments: Any) -> Any:
        if next(calls) >= after:
            raise error
        return instead_of(*arguments)

    return work


@dataclass(frozen=True)
class Case:
    """One run with a failure on one worker.

    Attributes:
        text: part of the error message.
        culprit: rank of the worker that fails.
        patched: name in the loop's module -> its replacement on that worker.
        there: arguments of `fit` on that worker.
        elsewhere: arguments of `fit` on the others.
    """

    text: str
    culprit: int = 0
    config: TrainingConfig = PLAIN
    patched: dict[str, Any] = field(default_factory=dict)
    there: dict[str, Any] = field(default_factory=dict)
    elsewhere: dict[str, Any] = field(default_factory=dict)


def cases(packed: Path) -> dict[str, Case]:
    """Return every place of a run where a single worker can fail."""
    full, bad, fault = StoreError("disk full"), DataError("image 5 is damaged"), OSError("no route")
    by_steps = {"saving": Saving(every_steps=2)}

    def images(num_good: int, error: Exception = bad) -> dict[str, Any]:
        return {"dataset": BadImages(packed, "train", num_good, error)}

    def held_out(dataset: PackedDataset) -> dict[str, Any]:
        return {"validate": HeldOutRecall(ScoredImages(CPU), dataset, PLAIN.transform)}

    return {
        "the checkpoint cannot be read": Case("disk full", patched={"resumable_checkpoint": raising(full)}),
        "a fault in reading the checkpoint": Case("no route", patched={"resumable_checkpoint": raising(fault)}),
        "the history at the beginning": Case("disk full", patched={"write_history": raising(full)}),
        "the history of an epoch": Case("disk full", patched={"write_history": raising(full, after=1)}),
        "a checkpoint in an epoch": Case("disk full", patched={"save_checkpoint": raising(full)}, there=by_steps, elsewhere=by_steps),
        "a checkpoint in the background": Case(
            "disk full",
            patched={"save_checkpoint": raising(full)},
            there={"saving": Saving(every_steps=2, in_background=True)},
            elsewhere=by_steps,
        ),
        "the last checkpoint": Case("disk full", patched={"save_checkpoint": raising(full, after=1, instead_of=loop.save_checkpoint)}),
        "the copy to a store": Case("no route", there={"saving": Saving(saved=raising(fault))}),
        "a report": Case("no route", there={"report": raising(fault)}),
        "the question whether to stop": Case("no route", 1, there={"saving": Saving(stop_wanted=raising(fault, after=3))}),
        "an image of the first batch": Case("image 5", 1, there=images(0)),
        "an image of a later epoch": Case("image 5", 1, there=images(25)),
        "an image on rank 0": Case("image 5", 0, there=images(6)),
        "a fault in a loader": Case("no route", 1, there=images(2, fault)),
        "an image while negatives are mined": Case("image 5", 0, MINED, there=images(3)),
        "an image while centres are placed": Case("image 5", 1, PLACED, there=images(3)),
        "an image while averages are moved": Case("image 5", 1, WARMED, there=images(3)),
        "an image of the held-out classes": Case(
            "image 5", 1, there=held_out(BadImages(packed, "test", 3, bad)), elsewhere=held_out(PackedDataset(packed, "test"))
        ),
    }


def fail_each(rank: int, packed: Path, folder: Path) -> None:
    writing.LOOK_SECONDS, loop.PROGRESS_SECONDS = 0.0, math.inf  # a check after every step, a report only after every epoch
    validation.BATCH_SIZE = 8  # gives every worker held-out images
    outcomes: dict[str, Any] = {}
    for name, case in cases(packed).items():
        own, is_culprit = folder / name / f"rank{rank}", rank == case.culprit
        given = {"dataset": PackedDataset(packed, "train")} | (case.there if is_culprit else case.elsewhere)
        with pytest.MonkeyPatch.context() as patch:
            for attribute, value in case.patched.items() if is_culprit else ():
                patch.setattr(loop, attribute, value)
            try:
                loop.fit(case.config, seed=0, folder=own, device=CPU, **given)
                error = ("no error", False, "trained to the end")
            except Exception as raised:  # noqa: BLE001 - of whatever kind, on every worker
                error = (type(raised).__name__, isinstance(raised, DmlError), str(raised))
        dist.barrier()  # without it, a worker that raised earlier would enter a collective call of another case
        state = load_checkpoint(own)
        outcomes[name] = (error, state and (state["num_epochs_done"], len(state.get("under_way", {"rows": []})["rows"])))
    torch.save(outcomes, folder / f"{rank}.pt")


# The last checkpoint when the error is raised: finished epochs, and steps of the next. No checkpoint includes a step with black images.
SAVED = {
    "the history of an epoch": (1, 0),  # a checkpoint includes the history
    "the last checkpoint": (1, 0),
    "a report": (1, 0),
    "the copy to a store": (1, 0),
    "an image of a later epoch": (1, 0),
}


@pytest.mark.slow
def test_what_fails_on_one_worker_is_raised_on_all(packed: Path, tmp_path: Path) -> None:
    spawn(fail_each, NUM_WORKERS, packed, tmp_path)
    by_rank = [torch.load(tmp_path / f"{rank}.pt") for rank in range(NUM_WORKERS)]
    for name, case in cases(packed).items():
        (error, saved), *others = (outcomes[name] for outcomes in by_rank)
        assert case.text in error[2], (name, error)
        for other, _ in others:
            assert case.text in other[2], (name, other)
            assert other[1] == error[1], f"{name}: a mistake of the user on one worker and a fault on another"
        assert saved == SAVED.get(name), name


def test_a_run_that_fails_before_its_first_epoch_ends_its_loader_processes(packed: Path, tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    damaged = BadImages(packed, "train", 3, DataError("image 5 is damaged"))
    with pytest.raises(DataError, match="image 5") as error:  # kept, so that no garbage collection ends the processes
        loop.fit(PLACED, damaged, 0, tmp_path, CPU, num_loader_workers=1)
    assert set(multiprocessing.active_children()) == before, error
