"""A curve of 100 training steps for each registered loss, accepted by hand: `<loss>.json` next to this file.

    python -m tests.golden.curves                 # print differences from the accepted curves
    python -m tests.golden.curves --accept LOSS   # accept the current curves of the named losses, at least one

Everything except the precision is real: the training loop, a packed dataset, the loss with its published options. Images are drawn with
integers only, and networks are trained in float64, so that only the summation order of a CPU can make a difference. With another memory
layout, and so another order, all curves but one stayed within 3e-14 of their values; that of triplet_semi_hard, which passes a
non-differentiable point of its loss at step 43, differed by 1e-5 in the end. So the first steps must agree to the float32 precision of a
history, which detects any change of a loss's formula; later steps have a larger tolerance.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dml_core.config import merge, parse
from dml_core.data.prepare import prepare
from dml_core.data.store.packed import PackedDataset
from dml_core.data.views.batches import Loader
from dml_core.losses.registry import LOSSES
from dml_core.training.config import TrainingConfig
from dml_core.training.history import read_history
from dml_core.training.loop import fit
from dml_core.training.validation import HeldOutRecall, ScoredImages

FOLDER = Path(__file__).parent
CPU = torch.device("cpu")
EARLY_STEPS, EARLY, LATE = 20, 1e-6, 1e-3  # tolerances are fractions of a value, or of 0.1 if that is more
RECALL = 0.02  # two queries
SHOWN_STEPS = (0, 1, 2, 5, 10, 20, 40, 60, 80, 99)
NUM_CLASSES, NUM_PER_CLASS, SIDE = 8, 16, 16
SETTINGS: dict[str, Any] = {
    "model": {"backbone": {"name": "small_cnn", "width": 8}, "head": {"kind": "linear", "embedding_dim": NUM_CLASSES}},
    "sampler": {"kind": "k_by_n", "num_classes_per_batch": 4, "num_samples_per_class": 4},
    "transform": {"crop": "padded", "crop_size": SIDE, "padding": 2, "flip": True, "scaling": "minus-one-one"},
    "optimiser": {"name": "adam", "learning_rate": 2e-3},
    "schedule": {"kind": "cosine"},
    "num_epochs": 13,  # 8 steps each
    "checkpoint_every_epochs": 13,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "combined": {"terms": [{"name": "softmax"}, {"name": "triplet_batch_hard", "weight": 0.5}, {"name": "ring_loss"}]},
}
CHANGES: dict[str, dict[str, Any]] = {"triplet_global": {"sampler": {"kind": "mined_triplets", "batch_size": 48}}}

Curve = dict[str, Any]


def draw(folder: Path) -> Path:
    """Make a packed dataset of coarse patterns with noise, one pattern per class."""
    random = np.random.default_rng(0)
    for label in range(2 * NUM_CLASSES):
        pattern = random.integers(60, 196, (4, 4, 3)).repeat(SIDE // 4, 0).repeat(SIDE // 4, 1)
        (folder / f"raw/class{label:02d}").mkdir(parents=True)
        for number in range(NUM_PER_CLASS):
            pixels = pattern + random.integers(-60, 61, pattern.shape)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"raw/class{label:02d}/{number}.png")
    prepare("folder", folder / "raw", folder / "packed", {})
    return folder / "packed"


@contextmanager
def in_float64() -> Iterator[None]:
    """Use double precision for networks, losses and images."""
    batches, dtype = Loader.batches, torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    Loader.batches = lambda *arguments: ((images.double(), indices) for images, indices in batches(*arguments))
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        Loader.batches = batches


def curve(loss: str, packed: Path) -> Curve:
    """Train with a loss; return its values at some steps, the norms of the learned parameters, and Recall@1 on unseen classes."""
    choice = {"loss": {"name": loss, "options": OPTIONS.get(loss, {})}}
    config = parse(TrainingConfig, merge(SETTINGS, CHANGES.get(loss, {})) | choice, f"golden {loss}")
    with in_float64(), tempfile.TemporaryDirectory() as folder:
        system = fit(config, PackedDataset(packed, "train"), 0, Path(folder), CPU)
        values = [row["loss"] for row in read_history(Path(folder))]
        recall = HeldOutRecall(ScoredImages(CPU), PackedDataset(packed, "test"), config.transform)(system.model)
    parts = {"model": system.model, "loss": system.loss}
    norms = {name: math.sqrt(sum(float(p.detach().square().sum()) for p in part.parameters())) for name, part in parts.items()}
    shown = {str(step): values[step] for step in SHOWN_STEPS if step < len(values)}
    return {"loss": shown, "norm": norms, "recall_at_1": next(iter(recall.values()))}


def differences(found: Curve, accepted: Curve) -> list[str]:
    """Return one line for each value that differs from the accepted one."""
    lines = []
    for part in ("loss", "norm"):
        for name in sorted(found[part].keys() | accepted[part].keys(), key=lambda name: (len(name), name)):
            new, old = found[part].get(name), accepted[part].get(name)
            share = EARLY if part == "loss" and int(name) < EARLY_STEPS else LATE
            if new is None or old is None or not math.isclose(new, old, rel_tol=share, abs_tol=0.1 * share):
                lines.append(f"{part} {name}: {new}, accepted {old}")
    if not abs(found["recall_at_1"] - accepted["recall_at_1"]) <= RECALL:
        lines.append(f"recall_at_1: {found['recall_at_1']}, accepted {accepted['recall_at_1']}")
    return lines


def accepted_curve(loss: str) -> Curve:
    path = FOLDER / f"{loss}.json"
    return json.loads(path.read_text()) if path.exists() else {"loss": {}, "norm": {}, "recall_at_1": math.inf}


def parsed(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the losses whose curves are computed, and those whose curves are accepted; exit if a name is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", nargs="+", metavar="LOSS", choices=LOSSES)
    parser.add_argument("losses", nargs="*", metavar="LOSS", choices=[[], *LOSSES])
    found = parser.parse_args(arguments)
    if found.accept and found.losses:
        parser.error("name every loss behind --accept")
    return found.accept or found.losses or list(LOSSES), found.accept or []


def main() -> None:
    losses, accepted = parsed(sys.argv[1:])
    torch.set_num_threads(1)
    num_changed = 0
    with tempfile.TemporaryDirectory() as folder:
        packed = draw(Path(folder))
        for loss in losses:
            found = curve(loss, packed)
            lines = differences(found, accepted_curve(loss))
            num_changed += bool(lines)
            print("\n".join([f"{loss}: {'changed' if lines else 'as accepted'}", *(f"  {line}" for line in lines)]), flush=True)
            if loss in accepted and lines:
                (FOLDER / f"{loss}.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if num_changed and not accepted else 0)


if __name__ == "__main__":
    main()
