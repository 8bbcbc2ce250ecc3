"""Centres sharded over 3 workers train as on one worker, and a run's files contain all of them."""

import contextlib
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dml_core.config import merge, parse
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError
from dml_core.losses.class_shards import ClassShard, cross_entropy, logsumexp
from dml_core.losses.registry import build_loss
from dml_core.training import loop, validation
from dml_core.training.checkpoints.file import weights_of
from dml_core.training.config import TrainingConfig
from dml_core.training.history import read_history
from dml_core.training.parallel.grad_cache import ChunkedSystem, backward_in_chunks
from dml_core.training.parallel.sharded_state import leave_to_their_worker, whole_optimiser_state, whole_state
from dml_core.training.parallel.workers import TrainingSystem, shard_sizes
from tests.conftest import small_training
from tests.training.stopping import StoppedError, checkpoint_of
from tests.workers import load_float64, spawn

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
NUM_WORKERS, NUM_CLASSES, DIM = 3, 5, 4  # the last worker has a single class
BATCH_SIZES = [7, 2, 9]  # the last worker has no image of the second batch; the third is shared equally
CASES: list[tuple[str, dict[str, Any]]] = [
    ("normalised_softmax", {}),
    ("softtriple", {"num_centres": 1}),
    ("softtriple", {"num_centres": 2, "margin": 0.1}),
    ("softtriple", {"num_centres": 5}),
    ("hardtriple", {"num_centres": 2}),
    ("heated_up_softmax", {}),
    ("heated_up_softmax", {"bias": False}),
    ("heated_up_softmax", {"bias_inside_alpha": False}),
    ("sgsl", {}),
    ("sgsl", {"gate": 1.6094, "dropout": 0.5, "label_smoothing": 0.1}),
    ("sgsl", {"label_smoothing": 0.0, "weight": 5.0}),
]
PRECISIONS = {"float64": torch.float64, "float32": torch.float32}


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    return " ".join([case[0], *(f"{name} {value}" for name, value in case[1].items())])


def train(case: tuple[str, dict[str, Any]], dtype: torch.dtype, rank: int, num_workers: int, embed_at_once: int | None = None) -> Any:
    """Return losses, parts, embeddings' gradients and, on rank 0, all weights of three steps; several workers shard the classes.

    In float64 with Adam, in float32 with SGD: Adam moves a weight equally far for a gradient and for a rounding error around 0.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, DIM)).to(dtype)
    system = TrainingSystem(model, build_loss(*case, NUM_CLASSES, DIM).to(dtype))
    parallel = last = system if embed_at_once is None else ChunkedSystem(system)
    if num_workers > 1:
        system.loss.shard_classes(ClassShard(tuple(shard_sizes(NUM_CLASSES, num_workers)), rank))
        leave_to_their_worker(parallel, system)
        last = DistributedDataParallel(parallel)
    adam = torch.optim.Adam(system.parameters(), lr=0.01)
    optimiser = adam if dtype == torch.float64 else torch.optim.SGD(system.parameters(), lr=0.01, momentum=0.9)
    seen = []
    for step, num_samples in enumerate(BATCH_SIZES):
        random = torch.Generator().manual_seed(100 + step)
        images = torch.randn(num_samples, 6, generator=random, dtype=torch.float64).to(dtype)
        labels_N = torch.arange(num_samples) % NUM_CLASSES
        sizes, outputs = shard_sizes(num_samples, num_workers), []
        shard, generator = torch.split(images, sizes)[rank], torch.Generator().manual_seed(step)
        optimiser.zero_grad()
        if embed_at_once is None:
            handle = model.register_forward_hook(
                lambda module, inputs, output, outputs=outputs: output.retain_grad() or outputs.append(output)
            )
            output = last(shard, labels_N, sizes, generator)
            output.total.backward()
            handle.remove()
            seen.append({"embeddings": gathered(outputs[0].grad / num_workers, sizes)})
        else:
            output = backward_in_chunks(last, shard, labels_N, sizes, generator, embed_at_once, contextlib.nullcontext)
        optimiser.step()
        weights = {name: value.clone() for name, value in whole_state(system).items()}
        seen.append({"loss": output.total.detach(), **output.parts} | (weights if rank == 0 else {}))
    moments = whole_optimiser_state(optimiser, system)["state"]
    held = [tuple(parameter.shape) for parameter in system.loss.parameters()]
    return {"seen": seen, "moments": moments, "held": held}


def gathered(part: Tensor, sizes: list[int]) -> Tensor:
    return part if len(sizes) == 1 else ClassShard(tuple(sizes), dist.get_rank()).join(part, 0)


def of_same_names(steps: list[dict[str, Tensor]], found: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: step[name] for name in of} for step, of in zip(steps, found, strict=True)]


def train_all(rank: int, num_workers: int, folder: Path) -> None:
    found = {(case_id(case), name): train(case, dtype, rank, num_workers) for case in CASES for name, dtype in PRECISIONS.items()}
    found |= {(case_id(case), "chunks"): train(case, torch.float64, rank, num_workers, embed_at_once=1) for case in CASES}
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("workers")
    spawn(train_all, NUM_WORKERS, NUM_WORKERS, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(NUM_WORKERS)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_spread_classes_train_as_those_of_one_worker(case: tuple[str, dict[str, Any]], precision: str, by_rank: list[Any]) -> None:
    """Losses, embeddings' gradients, weights and optimiser moments: in float64 each number to 1e-9, in float32 each tensor.

    In float32 the bound is 1e-6, except for the gradients of later steps: SoftTriple's scale over its temperature, 200, multiplies
    the rounding of earlier steps.
    """
    alone = train(case, PRECISIONS[precision], 0, 1)
    if precision == "float64":
        torch.testing.assert_close(by_rank[0][case_id(case), precision]["moments"], alone["moments"], rtol=1e-9, atol=1e-10)
    for ranks in by_rank:
        found = ranks[case_id(case), precision]
        if precision == "float64":
            torch.testing.assert_close(found["seen"], of_same_names(alone["seen"], found["seen"]), rtol=1e-9, atol=1e-10)
            continue
        for step, (seen, expected) in enumerate(zip(found["seen"], of_same_names(alone["seen"], found["seen"]), strict=True)):
            for name, value in expected.items():
                bound = 5e-6 if name == "embeddings" and step > 0 else 1e-6
                assert (seen[name] - value).norm() <= bound * value.norm(), f"{name}, {step}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_spread_classes_with_a_batch_in_chunks_too(case: tuple[str, dict[str, Any]], by_rank: list[Any]) -> None:
    alone = [step for step in train(case, torch.float64, 0, 1)["seen"] if "embeddings" not in step]
    for found in by_rank:
        seen = found[case_id(case), "chunks"]["seen"]
        torch.testing.assert_close(seen, of_same_names(alone, seen), rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_a_worker_holds_its_part_alone(by_rank: list[Any]) -> None:
    sizes = shard_sizes(NUM_CLASSES, len(by_rank))
    for size, found in zip(sizes, by_rank, strict=True):
        assert found[case_id(CASES[0]), "float64"]["held"] == [(size, DIM)]
        assert found[case_id(CASES[2]), "float64"]["held"] == [(2, size, DIM)]
        assert found[case_id(CASES[5]), "float64"]["held"] == [(size, DIM), (size,)]


def take_state(rank: int, folder: Path) -> None:
    """Count the tensors of all classes that are held at a time while a checkpoint's state is collected."""
    joined: list[weakref.ref[Tensor]] = []
    join = ClassShard.join
    held = []

    def noted(shard: ClassShard, part: Tensor, dim: int) -> Tensor:
        held.append(sum(whole() is not None for whole in joined))
        joined.append(weakref.ref(whole := join(shard, part, dim)))
        return whole

    ClassShard.join = noted
    system = TrainingSystem(nn.Linear(6, DIM), build_loss("softtriple", {}, NUM_CLASSES, DIM))
    system.loss.shard_classes(ClassShard(tuple(shard_sizes(NUM_CLASSES, 2)), rank))
    optimiser = torch.optim.Adam(system.parameters())
    sum(parameter.sum() for parameter in system.parameters()).backward()
    optimiser.step()
    states = whole_state(system), whole_optimiser_state(optimiser, system)
    (folder / f"{rank}").write_text(json.dumps([len(held), max(held), tuple(states[0]["loss.centres_KCD"].shape)]))


@pytest.mark.slow
def test_the_other_workers_hold_one_tensor_of_all_classes_at_a_time(tmp_path: Path) -> None:
    """Centres and two moments together are what one device could not hold."""
    spawn(take_state, 2, tmp_path)
    assert json.loads((tmp_path / "1").read_text()) == [3, 0, [10, 2, DIM]]
    assert json.loads((tmp_path / "0").read_text())[2] == [10, NUM_CLASSES, DIM]


def sum_up(rank: int, folder: Path) -> None:
    """Compare logits of four magnitudes, some far below the other worker's, with torch's result over all classes."""
    shard, worst = ClassShard((3, 2), rank), 0.0
    for scale in (1.0, 1e2, 1e4, 1e30):
        logits_NC = scale * torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
        logits_NC[0, :3], logits_NC[1, 3:] = -1e32, -1e32
        labels_N = torch.tensor([4, 1, 0, 2, 3, 4])
        whole, part = logits_NC.clone().requires_grad_(), shard.cut(logits_NC, 1).requires_grad_()
        expected, found = nn.functional.cross_entropy(whole, labels_N, label_smoothing=0.1), cross_entropy(part, labels_N, shard, 0.1)
        expected.backward()
        found.backward()
        assert whole.grad is not None
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(part.grad, shard.cut(whole.grad, 1))
        torch.testing.assert_close(logsumexp(part, shard), whole.logsumexp(dim=1))
        worst = max(worst, float((shard.join(part.detach(), 1) - logits_NC).abs().max()))
    (folder / f"{rank}").write_text(str(worst))


@pytest.mark.slow
def test_a_softmax_in_parts_is_the_whole_one_s_whatever_the_logits_size(tmp_path: Path) -> None:
    spawn(sum_up, 2, tmp_path)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["0.0", "0.0"]


ADAM = {"name": "adam", "momentum": 0.0, "learning_rate": 1e-3}
RUNS = {
    "softtriple": {"optimiser": ADAM, "average": {"decay": 0.5, "after": 0.4}, "keep_epochs": ["oracle"]},
    "heated_up_softmax": {"embed_at_once": 3},
    "normalised_softmax": {"average": {"decay": 0.5, "after": 0.0}},
    "sgsl": {"optimiser": ADAM},
}


def config_of(name: str, sharded: bool) -> TrainingConfig:
    config = small_training(name, **merge(RUNS[name], {"num_epochs": 3}))
    return parse(TrainingConfig, config.model_dump() | ({"shard_classes": True} if sharded else {}), "test")


def fit_all(rank: int, packed: Path, folder: Path, sharded: bool, stop_after: int | None) -> None:
    """Train each run in float64, with rank 0's checkpoint in one folder for all, to the end or until `stop_after` epochs are done."""
    load_float64()

    def stop(epoch: int) -> None:
        if epoch + 1 == stop_after:
            raise StoppedError

    for name in RUNS:
        config = config_of(name, sharded)
        _, tested, _ = validation.scorers(packed, config, validation.ScoredImages(CPU))
        own = loop._train_epoch
        loop._train_epoch = lambda run, epoch, under_way, own=own: (own(run, epoch, under_way), stop(epoch))
        with contextlib.suppress(StoppedError):
            system = loop.fit(config, PackedDataset(packed, "train"), 0, folder / name, CPU, identity="a run", score_test=tested)
            torch.save(system.state_dict(), folder / f"{name}-{rank}.pt")
        loop._train_epoch = own


@pytest.fixture(scope="module")
def unsharded(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unsharded")
    spawn(fit_all, 1, packed, folder, False, None)
    return folder


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_workers_ends_in_the_weights_of_one(packed: Path, tmp_path: Path, unsharded: Path) -> None:
    """The runs have 4 classes and 3 epochs: one of 3 workers, one of 1, one of 2."""
    spawn(fit_all, 3, packed, tmp_path, True, 1)
    spawn(fit_all, 1, packed, tmp_path, True, 2)
    assert not list(tmp_path.glob("*.pt"))
    spawn(fit_all, 2, packed, tmp_path, True, None)
    for name in RUNS:
        expected, found = checkpoint_of(unsharded / name), checkpoint_of(tmp_path / name)
        expected["optimiser"], found["optimiser"] = expected["optimiser"]["state"], found["optimiser"]["state"]
        for part in ("system", "averaged", "optimiser"):
            torch.testing.assert_close(found[part], expected[part], rtol=1e-7, atol=1e-9, msg=lambda m, n=name, p=part: f"{n}: {p}: {m}")
        if RUNS[name].get("keep_epochs"):
            torch.testing.assert_close(weights_of(found, "oracle"), weights_of(expected, "oracle"), rtol=1e-7, atol=1e-9)
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{name}-{rank}.pt"), weights_of(expected, "last")[0], rtol=1e-7, atol=1e-9)
        expected_losses = [row["loss"] for row in read_history(unsharded / name)]
        assert [row["loss"] for row in read_history(tmp_path / name)] == pytest.approx(expected_losses, rel=1e-7)


def train_in_bfloat16(rank: int, packed: Path, folder: Path) -> None:
    config = small_training("softtriple", precision="bfloat16", num_epochs=8, shard_classes=True)
    loop.fit(config, PackedDataset(packed, "train"), 0, folder / str(rank), CPU)


@pytest.mark.slow
def test_bfloat16_trains(packed: Path, tmp_path: Path) -> None:
    spawn(train_in_bfloat16, 2, packed, tmp_path)
    losses = [row["loss"] for row in read_history(tmp_path / "0")]
    assert sum(losses[-5:]) < sum(losses[:5])


def refuse(rank: int, packed: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"shard_classes: 4 classes cannot be spread over 5 workers"):
        loop.fit(small_training(shard_classes=True), PackedDataset(packed, "train"), 0, folder, CPU)


@pytest.mark.slow
def test_more_workers_than_classes_are_refused(packed: Path, tmp_path: Path) -> None:
    spawn(refuse, 5, packed, tmp_path)


def test_a_loss_without_classes_to_spread_is_refused_on_one_worker_too(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shard_classes: the classes of loss 'softmax' cannot be spread.*take one of .*softtriple"):
        loop.fit(small_training("softmax", shard_classes=True), PackedDataset(packed, "train"), 0, tmp_path, CPU)


def test_one_worker_trains_as_without_the_setting_to_the_bit(packed: Path, tmp_path: Path) -> None:
    trained = [
        loop.fit(config_of("sgsl", sharded), PackedDataset(packed, "train"), 0, tmp_path / str(sharded), CPU).state_dict()
        for sharded in (False, True)
    ]
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


def test_it_is_set_or_left_out() -> None:
    with pytest.raises(ConfigError, match="shard_classes"):
        small_training(shard_classes=False)
