"""Train one row of `project/finetuned` without any code of this project: plain PyTorch, timm and pytorch-metric-learning.

    .venv/bin/python benchmarks/independent.py WEIGHTS/efficientnet-lite0.pth --seed 0 --seed 1 --seed 2

It reads the pictures of `dml data fetch icons`. Network, loss, batch size, optimiser, schedule and augmentation are those of the row
`normalised-softmax`. Sampler, loss and scores are pytorch-metric-learning's, so the batches differ. It prints Recall@1 and MAP@R of the
test classes for each seed, then their means and the means on the committed page.
"""

import argparse
import csv
import json
import math
import statistics
import time
import zipfile
from pathlib import Path

import timm
import torch
from PIL import Image
from pytorch_metric_learning.losses import NormalizedSoftmaxLoss
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "data/raw/icons"
PAGE = ROOT / "docs/pages/project/finetuned.json"
ROW = "normalised-softmax"
SIDE, NUM_EPOCHS, BATCH_SIZE, PER_CLASS, NUM_DIMENSIONS = 64, 5, 64, 4, 128
RATES = {"backbone": 1e-4, "head": 1e-3, "loss": 1e-2}
FLOOR = 0.01  # of the cosine schedule


def main() -> None:
    """Train and score each seed, and compare the means with those of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--seed", type=int, action="append")
    args = parser.parse_args()
    for path, how_to_get in (
        (args.weights, "see docs/reference/backbones-and-datasets.md, Converted weights"),
        (IMAGES / "images.zip", "run dml data fetch icons"),
    ):
        if not path.is_file():
            parser.error(f"{path}: no such file; {how_to_get}")
    train, test = read_icons()
    scores: dict[str, list[float]] = {"recall@1": [], "map@r": []}
    for seed in args.seed or [0]:
        began = time.monotonic()
        of_seed = score(fine_tune(args.weights, train, seed), test)
        for name, value in of_seed.items():
            scores[name].append(value)
        said = ", ".join(f"{name} {value:.1f}" for name, value in of_seed.items())
        print(f"seed {seed}: {said}; {time.monotonic() - began:.0f} s", flush=True)
    for name, values in scores.items():
        spread = f", standard deviation {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        print(f"{name}: {statistics.mean(values):.1f}{spread}; the page's {page_mean(name)}")


def read_icons() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (N, 3, SIDE, SIDE) pictures in 0..255 and (N,) labels of the training classes, then of the test classes."""
    rows = [row for row in csv.DictReader((IMAGES / "images.csv").open()) if not row["left_out"]]
    names = sorted({row["class"] for row in rows})
    numbers = {name: number for number, name in enumerate(names)}
    resize = v2.Resize((SIDE, SIDE))
    with zipfile.ZipFile(IMAGES / "images.zip") as archive:
        pictures = torch.stack([v2.functional.pil_to_tensor(resize(picture(archive, row["path"]))) for row in rows])
    labels = torch.tensor([numbers[row["class"]] for row in rows])
    trains = labels < math.ceil(len(names) / 2)
    return (pictures[trains], labels[trains]), (pictures[~trains], labels[~trains])


def picture(archive: zipfile.ZipFile, name: str) -> Image.Image:
    """Return a picture of the archive in RGB."""
    with archive.open(name) as file:
        return Image.open(file).convert("RGB")


class Network(nn.Module):
    """EfficientNet-Lite0 with frozen statistics of BatchNorm, average pooling, and a linear layer."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self.backbone = timm.create_model("tf_efficientnet_lite0", num_classes=0)
        state = torch.load(weights, weights_only=True)
        self.backbone.load_state_dict({name: value for name, value in state.items() if not name.startswith("classifier.")})
        self.head = nn.Linear(self.backbone.num_features, NUM_DIMENSIONS)

    def train(self, mode: bool = True) -> "Network":
        """Train all but the statistics of BatchNorm."""
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, pictures: Tensor) -> Tensor:
        """Return (N, NUM_DIMENSIONS) embeddings of (N, 3, SIDE, SIDE) pictures in 0..255."""
        embeddings: Tensor = self.head(self.backbone((pictures.float() / 127.5 - 1).to(memory_format=torch.channels_last)))
        return embeddings


def fine_tune(weights: Path, train: tuple[Tensor, Tensor], seed: int) -> Network:
    """Return the network after NUM_EPOCHS on the training classes."""
    torch.manual_seed(seed)
    pictures, labels = train
    network = Network(weights).to(memory_format=torch.channels_last).train()
    loss = NormalizedSoftmaxLoss(int(labels.max()) + 1, NUM_DIMENSIONS, temperature=1 / 20)
    parts = {"backbone": network.backbone, "head": network.head, "loss": loss}
    optimiser = torch.optim.AdamW([{"params": parts[name].parameters(), "lr": rate} for name, rate in RATES.items()], weight_decay=1e-4)
    per_epoch = len(labels) // BATCH_SIZE
    num_steps = NUM_EPOCHS * per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_factor(step / per_epoch))
    sampler = MPerClassSampler(labels, PER_CLASS, BATCH_SIZE, length_before_new_iter=num_steps * BATCH_SIZE)
    crop = v2.RandomCrop(SIDE, padding=4)
    for indices in torch.tensor(list(sampler)).view(-1, BATCH_SIZE):
        views = torch.stack([crop(pictures[index]) for index in indices])
        optimiser.zero_grad()
        loss(network(views), labels[indices]).backward()
        optimiser.step()
        schedule.step()
    return network


def rate_factor(epoch: float) -> float:
    """Return the factor of all rates after a number of epochs: a cosine to FLOOR, during the first epoch times a linear warm-up."""
    return min(1.0, epoch) * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * epoch / NUM_EPOCHS)) / 2)


@torch.no_grad()
def score(network: Network, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return Recall@1 and MAP@R of the test classes, in percent."""
    network.eval()
    pictures, labels = test
    embeddings = functional.normalize(torch.cat([network(batch) for batch in pictures.chunk(20)]))
    wanted = ("precision_at_1", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(include=wanted, k="max_bin_count", device=torch.device("cpu"))
    values = calculator.get_accuracy(embeddings, labels, embeddings, labels, ref_includes_query=True)
    return {"recall@1": 100 * values["precision_at_1"], "map@r": 100 * values["mean_average_precision_at_r"]}


def page_mean(metric: str) -> str:
    """Return the row's mean on the committed page."""
    if not PAGE.is_file():
        return "not measured"
    table = json.loads(PAGE.read_text())
    number = [column["metric"] for column in table["columns"]].index(metric)
    (row,) = [row for row in table["rows"] if row["name"] == ROW]
    cell = row["lines"][0]["cells"][number]
    return f"{cell['mean']:.1f} ± {cell['half_width']:.1f} ({len(cell['values'])} seeds)"


if __name__ == "__main__":
    main()
