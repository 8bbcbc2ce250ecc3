"""Check and benchmark training and evaluation on this machine's GPU with one command; prints Markdown and JSON.

    python benchmarks/gpu.py [--json FILE]             # at most 8 minutes
    python benchmarks/gpu.py --tiny --device cpu       # the same steps on a few small images without a GPU: its times mean nothing
    python benchmarks/gpu.py --expect H200             # what is expected of a card, without one

Needs this repository, torch 2.11 or later, torchvision, timm, pyarrow, pydantic, scipy, scikit-learn and Pillow, but not Ray, Prefect,
MLflow or FAISS.

Checks: the device's numbers against the CPU's, bfloat16, torch.compile, asynchronous copies, two processes on one device, steps in which
the CPU does not wait for the GPU. Then fine-tuning of ResNet-50 and BN-Inception at 224 pixels in bfloat16, compiled, with our loop on a
packed dataset of JPEG files. It is compared with (a) a bare loop of the same system over random tensors on the device, which is the limit,
and (b) that bare loop fed by torchvision's ImageFolder with as many loader processes. The time of a step is broken down by synchronising
with the device after each part. Then Recall@K and MAP@R of 60,502 embeddings of 512 dimensions in 11,316 classes (the size of Stanford
Online Products' test set), ours on the device and on the CPU compared with torch's brute force on the device, which computes only Recall@K;
and k-means of them on the device.

The speed of (a) is compared with an expectation from the card's data sheet. A step's operations are counted on torch's meta device;
products are taken to reach half of the card's peak, all operations read their inputs and write their outputs once at 0.8 of its bandwidth,
nothing is fused, and the two times add up. Of NVIDIA's published mixed precision training of ResNet-50 (NVIDIA/DeepLearningExamples,
PyTorch/Classification/ConvNets/resnet50v1.5, container 21.03) the A100's 2,470 images per second helped to choose the two shares; the
V100's 1,200 were not used, and are 12 % above the expectation. A speed outside of the factor refutes the model, or shows another limit.

Targets: 0.9 of (a), more than (b), evaluation 20 times as fast as the CPU's. What exceeds the time is reported as not measured.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from measuring import bare_step, drawn_photograph, gaussian_classes, image_folder, markdown_table
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.spawn import ProcessRaisedException, spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from dml_core.config import parse
from dml_core.data.prepare import pack
from dml_core.data.store import packed
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Manifest, Row
from dml_core.data.views.batches import Loader, TrainView
from dml_core.data.views.transform_config import Scaling, TransformConfig
from dml_core.data.views.transforms import scale
from dml_core.deterministic import fastest_convolutions
from dml_core.evaluation.clustering import kmeans
from dml_core.evaluation.config import EvaluationConfig, KMeansConfig
from dml_core.evaluation.retrieval.geometry import as_points
from dml_core.evaluation.retrieval.metrics import per_query_metrics
from dml_core.evaluation.retrieval.sweep import Shard, score_queries
from dml_core.float32 import full_float32
from dml_core.training.config import TrainingConfig
from dml_core.training.history import Progress
from dml_core.training.loop import build_system, fit
from dml_core.training.optimisation.optimisers import build_optimiser
from dml_core.training.parallel.workers import TrainingSystem, shard_sizes

CPU = torch.device("cpu")
SECONDS = 480.0
TRAINING_SECONDS, EVALUATION_SECONDS = 150.0, 60.0  # time limits for a network (mostly compilation) and for the evaluation
NOT_MEASURED = "not measured"
SMALL: dict[str, Any] = {"backbone": {"name": "small_cnn", "width": 16}, "head": {"kind": "linear", "embedding_dim": 16}}
RECALL_AT = (1, 10, 100, 1000)
META = torch.device("meta")
HALF, SINGLE = 2, 4  # bytes of a number: activations are bfloat16, weights and their gradients float32
SHARE_OF_PEAK, SHARE_OF_BANDWIDTH, FACTOR = 0.5, 0.8, 1.5
OPTIMISER_PASSES = 5  # SGD with momentum reads weight, gradient and momentum, and writes weight and momentum


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        models: networks to train, by name.
        side: side of the network's input; photographs are `width` by `height`.
        num_files: different photographs, of which the `num_images` of the dataset are made.
        evaluation: embeddings, classes, dimensions.
    """

    models: dict[str, dict[str, Any]]
    side: int
    width: int
    height: int
    num_classes: int
    num_files: int
    num_images: int
    batch_size: int
    num_epochs: int
    compile: bool
    evaluation: tuple[int, int, int]


def _model(name: str, **more: Any) -> dict[str, Any]:
    return {"backbone": {"name": name, **more}, "head": {"kind": "linear", "embedding_dim": 512}}


FULL = Sizes(
    models={"ResNet-50": _model("resnet50"), "BN-Inception": _model("bn_inception")},
    side=224, width=500, height=375, num_classes=64, num_files=256, num_images=4096, batch_size=128, num_epochs=5, compile=True,
    evaluation=(60_502, 11_316, 512),
)  # fmt: skip
TINY = Sizes(
    models={"small network": SMALL},
    side=16, width=24, height=20, num_classes=4, num_files=8, num_images=32, batch_size=8, num_epochs=3, compile=False,
    evaluation=(300, 40, 16),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--tiny", action="store_true", help="a few small images, to see that it works")
    parser.add_argument("--json", type=Path, help="where the figures go beside what is printed")
    parser.add_argument("--loaders", type=int, help="loader processes; one for each core but one where not given, 16 at most")
    parser.add_argument("--expect", choices=CARDS, help="only print what is expected of this card")
    arguments = parser.parse_args()
    if arguments.expect is not None:
        print(expected_table(expectations(FULL, CARDS[arguments.expect]), {}))
        return
    name = arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device, sizes = torch.device(name), TINY if arguments.tiny else FULL
    if device.type == "cpu" and not arguments.tiny:
        parser.error("no GPU here: --tiny --device cpu goes through the same steps with small sizes")
    until = time.monotonic() + SECONDS
    cores = len(os.sched_getaffinity(0))
    num_loaders = min(16, max(1, cores - 1)) if arguments.loaders is None else arguments.loaders
    here = machine(device, cores, num_loaders)
    card = card_of(here["device"])
    found: dict[str, Any] = {"machine": here, "expected": {} if card is None else expectations(sizes, card)}
    found |= {"checks": checks(device, "aot_eager" if arguments.tiny else "inductor"), "training": {}, "evaluation": {}}
    packed._KEPT_BYTES = 0  # photographs kept decoded would be decoded only once: a real dataset is larger than that cache
    with tempfile.TemporaryDirectory() as folder, fastest_convolutions():
        photographs = write_photographs(Path(folder), sizes)
        for model, settings in sizes.models.items():
            found["training"][model] = {}
            if until - time.monotonic() > TRAINING_SECONDS:
                found["training"][model] = training(settings, *photographs, Path(folder) / model, sizes, device, num_loaders)
    if until - time.monotonic() > EVALUATION_SECONDS:
        found["evaluation"] = evaluation(sizes.evaluation, device, until)
    print(as_markdown(found, sizes))
    as_json = json.dumps(found, indent=1)
    print(f"\n```json\n{as_json}\n```")
    if arguments.json is not None:
        arguments.json.write_text(as_json + "\n")
    if any(verdict.startswith("failed") for verdict in found["checks"].values()):
        sys.exit(1)


def machine(device: torch.device, cores: int, num_loaders: int) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": f"{device.type} ({name})", "torch": torch.__version__, "cores": cores, "loaders": num_loaders}


# ---------------------------------------------------------------- checks


def checks(device: torch.device, compiler: str) -> dict[str, str]:
    """Return check -> "passed: ..." or "failed: ..."."""
    named: dict[str, Callable[[], str]] = {
        "pixels are scaled to the same bits": lambda: check_scaling(device),
        "batches that were copied ahead are those of the CPU": lambda: check_copies(device),
        "a step's loss and gradients are the CPU's": lambda: check_step(device),
        "bfloat16 is near float32": lambda: check_bfloat16(device),
        "compiled is near what is compiled": lambda: check_compiled(device, compiler),
        "two processes on the device have the gradients of one": lambda: check_two_processes(device),
        "the CPU waits for the GPU in no step": lambda: check_no_waiting(device),
    }
    return {name: verdict(check) for name, check in named.items()}


def verdict(check: Callable[[], str]) -> str:
    try:
        return f"passed: {check()}"
    except Exception as error:  # noqa: BLE001 - the other checks and the measurements continue after any error
        lines = str(error).strip().splitlines() or ["no reason given"]
        return f"failed: {type(error).__name__}: {lines[0]}"


def check_scaling(device: torch.device) -> str:
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3 * 2 * 5).reshape(2, 3, 5, 256)
    scalings = get_args(Scaling)
    for scaling in scalings:
        assert torch.equal(scale(pixels.to(device), scaling).cpu(), scale(pixels, scaling)), scaling
    return f"256 values, {len(scalings)} scalings"


class Drawn(PackedDataset):
    """Images of noise."""

    def __init__(self) -> None:
        """Open no files."""

    def image(self, index: int) -> Tensor:
        """Return an image of 40 by 40 pixels."""
        return torch.from_numpy(np.random.default_rng(index).integers(0, 256, (3, 40, 40), dtype=np.uint8))

    def box(self, index: int) -> None:
        """Return None: the images have no boxes."""

    def expect(self, indices: np.ndarray) -> None:
        """Do nothing: images are made when needed."""


def check_copies(device: torch.device) -> str:
    view = TrainView(TransformConfig(crop="random", crop_size=32, flip=True), 0, 0)
    batches = list(np.arange(60).reshape(12, 5))
    for num_loaders in (0, 2):
        loader = Loader(Drawn(), num_loaders, device)
        for _ in range(2):
            busy = torch.zeros(256, 256, device=device)
            for (images, indices), (expected, _) in zip(loader.batches(batches, view), Loader(Drawn()).batches(batches, view), strict=True):
                busy = busy @ busy  # keeps the device busy while the next batch arrives
                assert images.device.type == device.type
                assert torch.equal(images.cpu(), expected), indices
        loader.close()
    return "12 batches, twice, from 0 and 2 processes"


def small_system(device: torch.device, loss: str = "normalised_softmax") -> TrainingSystem:
    settings = settings_of(SMALL, TINY) | {"loss": {"name": loss}}
    return build_system(parse(TrainingConfig, settings, "check"), TINY.num_classes, 0, device)


def one_step(system: TrainingSystem, device: torch.device, autocast: bool = False) -> dict[str, Tensor]:
    """Return the loss and the gradients of a batch."""
    images, labels_N = check_batch()
    system.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        output = system(images.to(device), labels_N.to(device), [len(labels_N)], torch.Generator().manual_seed(0))
    output.total.backward()
    return {"loss": output.total.detach().cpu()} | {n: p.grad.cpu() for n, p in system.named_parameters() if p.grad is not None}


def check_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(16) // 2 % TINY.num_classes


def farthest(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> str:
    """Return the largest difference of a tensor, relative to its norm; raise an error above the bound."""
    assert found.keys() == expected.keys()
    shares = {name: float((found[name] - value).norm() / value.norm().clamp_min(1e-12)) for name, value in expected.items()}
    worst = max(shares, key=shares.__getitem__)
    assert shares[worst] <= bound, f"{worst} is {shares[worst]:.1e} of its length off, allowed {bound:.0e}"
    return f"{shares[worst]:.1e} of a tensor's length at most (allowed {bound:.0e})"


def check_step(device: torch.device) -> str:
    with full_float32():
        return "; ".join(
            farthest(one_step(small_system(device, loss), device), one_step(small_system(CPU, loss), CPU), 1e-4)
            for loss in ("normalised_softmax", "contrastive", "triplet_semi_hard")
        )


def check_bfloat16(device: torch.device) -> str:
    """Compare gradients; those of a single small batch are right to a few of bfloat16's 8 bits."""
    return farthest(one_step(small_system(device), device, autocast=True), one_step(small_system(device), device), 0.25)


def check_compiled(device: torch.device, compiler: str) -> str:
    compiled = small_system(device)
    compiled.model.compile(backend=compiler)
    compiled.loss.compile(backend=compiler)
    with full_float32():
        return farthest(one_step(compiled, device), one_step(small_system(device), device), 1e-4)


def check_two_processes(device: torch.device) -> str:
    """Compare over gloo: NCCL needs a GPU for each process."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(two_processes_worker, (Path(folder), device), nprocs=2)  # type: ignore[no-untyped-call]
        except ProcessRaisedException as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]
    with full_float32():
        expected = one_step(small_system(device), device)
    gradients = [{name: value for name, value in rank.items() if name != "loss"} for rank in found]
    return farthest(gradients[0], {n: v for n, v in expected.items() if n != "loss"}, 1e-4) + f", {farthest(gradients[1], gradients[0], 0)}"


def two_processes_worker(rank: int, folder: Path, device: torch.device) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", timedelta(seconds=120), rank=rank, world_size=2)
    system = small_system(device)
    parallel = DistributedDataParallel(system, broadcast_buffers=False)
    images, labels_N = check_batch()
    sizes = shard_sizes(len(labels_N), 2)
    with full_float32():
        output = parallel(torch.split(images, sizes)[rank].to(device), labels_N.to(device), sizes, torch.Generator().manual_seed(0))
        output.total.backward()
    torch.save({n: p.grad.cpu() for n, p in system.named_parameters() if p.grad is not None}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def check_no_waiting(device: torch.device) -> str:
    """Use torch's sync debug mode, which raises an error if a call would wait for the GPU."""
    if device.type != "cuda":
        return "nothing to wait for on the CPU"
    settings = settings_of(SMALL, TINY)
    config = parse(TrainingConfig, settings, "check")
    system = build_system(config, TINY.num_classes, 0, device).train()
    optimiser = build_optimiser(config.optimiser, system)
    images, labels_N = (tensor.to(device) for tensor in check_batch())
    for number in range(4):
        if number == 1:  # the first step's initialisation may wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            bare_step(system, optimiser, images, labels_N, autocast(device))
        finally:
            if number in (0, 3):
                torch.cuda.set_sync_debug_mode("default")
    return "3 steps"


# ---------------------------------------------------------------- expectations


@dataclass(frozen=True)
class Card:
    """Data sheet: dense operations per second of 16-bit products on tensor cores, and bytes per second."""

    peak: float
    bandwidth: float


CARDS = {  # NVIDIA's data sheets, SXM where there are several; without sparsity
    "H200": Card(989e12, 4.8e12),
    "H100": Card(989e12, 3.35e12),
    "A100": Card(312e12, 2.04e12),
    "L4": Card(121e12, 0.3e12),
    "V100": Card(125e12, 0.9e12),
}


@dataclass(frozen=True)
class Step:
    """A counted training step.

    Attributes:
        flops: floating-point operations of products; a multiplication and an addition are two.
        moved_bytes: bytes that all operations read and write.
        weight_bytes: bytes of the weights in float32.
        saved_bytes: bytes of the activations that are kept for the backward pass.
    """

    flops: int
    moved_bytes: int
    weight_bytes: int
    saved_bytes: int

    @property
    def memory(self) -> int:
        """Bytes of weights, gradients, momentum and activations; without the allocator's reserve and the libraries' workspaces."""
        return 3 * self.weight_bytes + self.saved_bytes

    def seconds(self, card: Card) -> float:
        """Return the expected time on a card."""
        moved = self.moved_bytes + OPTIMISER_PASSES * self.weight_bytes
        return self.flops / (SHARE_OF_PEAK * card.peak) + moved / (SHARE_OF_BANDWIDTH * card.bandwidth)


def count_step(system: TrainingSystem, batch_size: int, side: int) -> Step:
    """Count a training step.

    Args:
        system: network and loss on the meta device, in training mode.
        batch_size: images of a batch.
        side: height and width of an image in pixels.
    """
    images = torch.empty(batch_size, 3, side, side, device=META)
    labels_N = torch.empty(batch_size, dtype=torch.int64, device=META)
    flops, traffic = FlopCounterMode(display=False), _Traffic()
    with flops, traffic, _saved_tensors() as saved:
        output = system.loss.compute(system.model(images), labels_N, None)  # not `forward`: the meta device has no autocast
        output.total.backward()  # type: ignore[no-untyped-call]
    weights = sum(parameter.numel() for parameter in system.parameters())
    kept = {key: numel for key, numel in saved.items() if key not in {id(parameter) for parameter in system.parameters()}}
    return Step(flops.get_total_flops(), traffic.moved_bytes, SINGLE * weights, HALF * sum(kept.values()))


def card_of(device_name: str) -> Card | None:
    """Return the card that is part of a device's name, or None."""
    return next((card for name, card in CARDS.items() if name in re.split(r"[^A-Za-z0-9]", device_name)), None)


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the bytes of the floating-point inputs and outputs of operations; views move nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.detach.default:
            tensors = (leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor) and leaf.is_floating_point())
            self.moved_bytes += HALF * sum(tensor.numel() for tensor in tensors)
        return result


@contextlib.contextmanager
def _saved_tensors() -> Iterator[dict[int, int]]:
    """Collect id of a tensor's storage owner -> number of elements, of tensors saved for the backward pass."""
    found: dict[int, int] = {}
    kept: list[Tensor] = []  # an id is used again after its tensor has ended

    def pack(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        kept.append(base)
        found[id(base)] = base.numel() if base.is_floating_point() else 0
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def expectations(sizes: Sizes, card: Card) -> dict[str, dict[str, float]]:
    """Return network -> images per second of (a) and gigabytes that are expected of a card."""
    expected = {}
    for name, model in sizes.models.items():
        config = parse(TrainingConfig, settings_of(model, sizes), "expected")
        step = count_step(build_system(config, sizes.num_classes, 0, META).train(), sizes.batch_size, sizes.side)
        expected[name] = {"images_per_second": sizes.batch_size / step.seconds(card), "gigabytes": step.memory / 1e9}
    return expected


def expected_table(expected: dict[str, dict[str, float]], training: dict[str, dict[str, Any]]) -> str:
    """Return the expectations as a Markdown table, the memory with the measured one."""
    rows = []
    for model, values in expected.items():
        speed, measured = values["images_per_second"], training.get(model, {}).get("bare_gigabytes")
        range_of_speed = f"{shown(speed)} ({shown(speed / FACTOR)} to {shown(speed * FACTOR)})"
        rows.append([model, range_of_speed, shown(values["gigabytes"]), shown(measured)])
    return markdown_table(["expected of this card", f"(a), images/s, within a factor of {FACTOR}", "memory of (a), GB", "measured"], rows)


# ---------------------------------------------------------------- training


def write_photographs(folder: Path, sizes: Sizes) -> tuple[PackedDataset, Path]:
    """Write drawn photographs, each repeated; return the same ones as a packed dataset and as a folder of files."""
    random = np.random.default_rng(0)
    encoded = [drawn_photograph(random, sizes.width, sizes.height) for _ in range(sizes.num_files)]
    names = [f"class_{number % sizes.num_classes:03d}/{number}.jpg" for number in range(sizes.num_images)]
    rows = [Row(name, number % sizes.num_classes, name.partition("/")[0], "train") for number, name in enumerate(names)]
    pack("folder", {}, Manifest(rows, lambda row: encoded[int(Path(row.path).stem) % len(encoded)]), folder / "packed")
    for number, name in enumerate(names):
        path = folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded[number % len(encoded)])
    return PackedDataset(folder / "packed", "train"), folder / "files"


def settings_of(model: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    return {
        "model": model,
        "loss": {"name": "normalised_softmax"},
        "sampler": {"batch_size": sizes.batch_size, "drop_last": True},
        "transform": {"crop": "random_resized", "crop_size": sizes.side, "flip": True},
        "optimiser": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9},
        "num_epochs": sizes.num_epochs,
        "checkpoint_every_epochs": sizes.num_epochs,
    } | ({"compile": True} if sizes.compile else {})


def training(
    model: dict[str, Any], store: PackedDataset, files: Path, folder: Path, sizes: Sizes, device: torch.device, num_loaders: int
) -> dict[str, Any]:
    """Return images per second of each loop, without its first epoch and our last, which writes; and milliseconds of a step's parts."""
    config = parse(TrainingConfig, settings_of(model, sizes), "benchmark")
    speeds: list[float] = []

    def watch(progress: Progress) -> None:
        if progress.epoch_ended:
            speeds.append(progress.images_per_second)

    fit(config, store, 0, folder, device, num_loaders, watch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    bare = BareLoop(config, sizes, device)
    images = torch.randn(sizes.batch_size, 3, sizes.side, sizes.side, device=device)
    labels_N = torch.randint(sizes.num_classes, (sizes.batch_size,), device=device)
    num_steps = sizes.num_images // sizes.batch_size
    without_loading = [bare.images_per_second(itertools.repeat((images, labels_N), num_steps)) for _ in range(sizes.num_epochs)][1:]
    gigabytes = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    loader = folder_loader(files, sizes, device, num_loaders)
    from_files = [bare.images_per_second(iter(loader)) for _ in range(sizes.num_epochs)][1:]
    ours, bare_speed, folder_speed = map(statistics.median, (speeds[1:-1], without_loading, from_files))
    return {
        "images_per_second": ours,
        "bare": bare_speed,
        "image_folder": folder_speed,
        "bare_gigabytes": gigabytes,
        "share_of_bare": ours / bare_speed,
        "of_image_folder": ours / folder_speed,
        "milliseconds": bare.parts(config, store, num_loaders),
    }


class BareLoop:
    """Forward, loss, backward and optimiser step of the same system, and nothing else."""

    def __init__(self, config: TrainingConfig, sizes: Sizes, device: torch.device) -> None:
        self.device, self.sizes = device, sizes
        self.system = build_system(config, sizes.num_classes, 0, device).train()
        if sizes.compile:
            self.system.model.compile()
            self.system.loss.compile()
        self.optimiser = build_optimiser(config.optimiser, self.system)

    def images_per_second(self, batches: Iterator[Any]) -> float:
        """Return the images per second over all batches, until the device has finished the last."""
        wait_for(self.device)
        began, num_images = time.perf_counter(), 0
        for images, labels_N in batches:
            images, labels_N = images.to(self.device, non_blocking=True), labels_N.to(self.device, non_blocking=True)
            bare_step(self.system, self.optimiser, images, labels_N, autocast(self.device))
            num_images += len(images)
        wait_for(self.device)
        return num_images / (time.perf_counter() - began)

    def parts(self, config: TrainingConfig, store: PackedDataset, num_loaders: int) -> dict[str, float]:
        """Return the median milliseconds of a step's parts, each with device synchronisation; a prefetched batch costs no wait."""
        size = self.sizes.batch_size
        batches = np.split(np.arange(len(store) // size * size), len(store) // size)
        loaded = Loader(store, num_loaders, CPU).batches(batches, TrainView(config.transform, 0, 0))
        spent: dict[str, list[float]] = {name: [] for name in ("loader", "copy and scale", "forward", "backward", "optimiser")}
        pixels = torch.zeros(size, 3, self.sizes.side, self.sizes.side, dtype=torch.uint8)
        pixels = pixels.pin_memory() if self.device.type == "cuda" else pixels
        while True:
            with self._timed(spent["loader"]):
                batch = next(loaded, None)
            if batch is None:
                break
            labels_N = torch.from_numpy(store.labels[batch[1]]).to(self.device)
            with self._timed(spent["copy and scale"]):
                images = scale(pixels.to(self.device, non_blocking=True), config.transform.scaling)
            with self._timed(spent["forward"]), autocast(self.device):
                output = self.system(images, labels_N, [size])
            with self._timed(spent["backward"]):
                output.total.backward()
            with self._timed(spent["optimiser"]):
                self.optimiser.step()
                self.optimiser.zero_grad(set_to_none=True)
        return {name: 1000 * statistics.median(values[1:]) for name, values in spent.items()}

    @contextlib.contextmanager
    def _timed(self, spent: list[float]) -> Iterator[None]:
        began = time.perf_counter()
        yield
        wait_for(self.device)
        spent.append(time.perf_counter() - began)


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context of the training loop's `precision: auto`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def folder_loader(files: Path, sizes: Sizes, device: torch.device, num_loaders: int) -> DataLoader[Any]:
    options: dict[str, Any] = {"num_workers": num_loaders, "persistent_workers": num_loaders > 0, "pin_memory": device.type == "cuda"}
    return DataLoader(image_folder(files, sizes.side), batch_size=sizes.batch_size, shuffle=True, drop_last=True, **options)


# ---------------------------------------------------------------- evaluation


def evaluation(size: tuple[int, int, int], device: torch.device, until: float) -> dict[str, Any]:
    """Return the seconds of ours on the device and on the CPU and of brute force, and whether all three agree."""
    num_samples, num_classes, num_dimensions = size
    embeddings_ND, labels_N = gaussian_classes(num_samples, num_classes, 2.2, num_dimensions)
    warm = as_points(embeddings_ND[:100], "cosine"), labels_N[:100]
    exact(*warm, device)
    points = as_points(embeddings_ND, "cosine")
    ours, seconds = timed(lambda: exact(points, labels_N, device))
    brute, brute_seconds = timed(lambda: brute_force(embeddings_ND, labels_N, device))
    found = {"seconds": seconds, "brute_force_seconds": brute_seconds, "of_brute_force": seconds / brute_seconds}
    found |= {name: ours[name] for name in [f"recall@{k}" for k in RECALL_AT if k < len(labels_N)] + ["map@r"]}
    # Brute force rounds products, so items at nearly the same distance may be swapped.
    found["largest_difference_of_recall"] = max(abs(ours[name] - value) for name, value in brute.items())
    if device.type == "cpu" or until - time.monotonic() < EVALUATION_SECONDS:
        return found
    _, found["k_means_seconds"] = timed(lambda: kmeans(points, num_classes, KMeansConfig(), 0, device))  # the CPU's would need FAISS
    on_cpu, cpu_seconds = timed(lambda: exact(points, labels_N, CPU))
    return found | {"cpu_seconds": cpu_seconds, "times_as_fast_as_the_cpu": cpu_seconds / seconds, "same_numbers": float(on_cpu == ours)}


def exact(points: Any, labels_N: np.ndarray, device: torch.device) -> dict[str, float]:
    """Run the evaluator's own sweep, without the module that imports FAISS."""
    shard, max_block_bytes = Shard(lambda: points, labels_N), EvaluationConfig().max_block_bytes
    scores = score_queries([shard], points, labels_N, np.arange(len(labels_N)), max_block_bytes, device)
    return {name: float(values.mean()) for name, values in per_query_metrics(scores, RECALL_AT).items()}


def brute_force(embeddings_ND: np.ndarray, labels_N: np.ndarray, device: torch.device) -> dict[str, float]:
    """Compute Recall@K with float32 products and topk, in blocks of queries."""
    with full_float32():
        vectors_ND, labels = torch.from_numpy(embeddings_ND).to(device), torch.from_numpy(labels_N).to(device)
        most = min(max(RECALL_AT), len(labels_N) - 1)
        hits = torch.zeros(most, device=device)
        for start in range(0, len(labels_N), 4096):
            rows = torch.arange(start, min(start + 4096, len(labels_N)), device=device)
            similarities = vectors_ND[rows] @ vectors_ND.T
            similarities[torch.arange(len(rows), device=device), rows] = -torch.inf
            found = labels[similarities.topk(most, dim=1).indices] == labels[rows][:, None]
            hits += (found.int().cumsum(1) > 0).sum(0)
        return {f"recall@{k}": float(hits[k - 1] / len(labels_N)) for k in RECALL_AT if k <= most}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


# ---------------------------------------------------------------- what is printed


def as_markdown(found: dict[str, Any], sizes: Sizes) -> str:
    settings = f"batch {sizes.batch_size}, {sizes.side} px" + (", compiled" if sizes.compile else "")
    speeds = {
        "ours": "images_per_second",
        "(a) bare, random tensors": "bare",
        "ours / (a)": "share_of_bare",
        "(b) bare, ImageFolder": "image_folder",
        "ours / (b)": "of_image_folder",
    }
    parts = ["loader", "copy and scale", "forward", "backward", "optimiser"]
    num_samples, num_classes, num_dimensions = sizes.evaluation
    scored = {
        "ours on the device, s": "seconds",
        "torch brute force on the device, s": "brute_force_seconds",
        "ours on the CPU, s": "cpu_seconds",
        "times as fast as the CPU": "times_as_fast_as_the_cpu",
        "k-means on the device, s": "k_means_seconds",
        "largest difference of a recall from brute force's": "largest_difference_of_recall",
    }
    tables = [
        markdown_table(["check", "verdict"], found["checks"].items()),
        markdown_table(
            [f"training, images/s ({settings})", *speeds],
            ([model, *(shown(values.get(key)) for key in speeds.values())] for model, values in found["training"].items()),
        ),
        *([expected_table(found["expected"], found["training"])] if found["expected"] else []),
        markdown_table(
            ["milliseconds of a step", *parts],
            ([model, *(shown(values.get("milliseconds", {}).get(part)) for part in parts)] for model, values in found["training"].items()),
        ),
        markdown_table(
            [f"evaluation, {num_samples:,} x {num_dimensions}, {num_classes:,} classes", ""],
            ([name, shown(found["evaluation"].get(key))] for name, key in scored.items()),
        ),
    ]
    return "\n\n".join([", ".join(f"{name} {value}" for name, value in found["machine"].items()), *tables])


def shown(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
