"""Train a row of `project/finetuned` or `project/glyphs` without any code of this project: plain PyTorch, timm, pytorch-metric-learning.

    .venv/bin/python benchmarks/independent.py icons --weights WEIGHTS/efficientnet-lite0.pth --seed 0 --seed 1 --seed 2
    .venv/bin/python benchmarks/independent.py glyphs-2000 --seed 0 --seed 1 --seed 2

It reads the pictures of `dml data fetch`. Network, loss, batch size, optimiser, schedule and augmentation are those of the row
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from pytorch_metric_learning.losses import NormalizedSoftmaxLoss
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.common_functions import TorchInitWrapper
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

ROOT = Path(__file__).parents[1]
ROW = "normalised-softmax"
PER_CLASS = 4  # images of a class in a batch
FLOOR = 0.01  # of the cosine schedule


@dataclass(frozen=True)
class Recipe:
    """Settings of a table's row on its dataset; `rates` are those of backbone, head and loss."""

    table: str
    side: int
    padding: int
    num_epochs: int
    batch_size: int
    num_dimensions: int
    optimiser: type[torch.optim.Optimizer]
    rates: tuple[float, float, float]


RECIPES = {
    "icons": Recipe("finetuned", 64, 4, 5, 64, 128, torch.optim.AdamW, (1e-4, 1e-3, 1e-2)),
    "glyphs-2000": Recipe("glyphs", 48, 3, 12, 128, 64, torch.optim.Adam, (1e-3, 1e-3, 1e-2)),
}


def main() -> None:
    """Train and score each seed, and compare the means with those of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=RECIPES)
    parser.add_argument("--weights", type=Path, help="of EfficientNet-Lite0, for icons (docs/reference/backbones-and-datasets.md)")
    parser.add_argument("--seed", type=int, action="append")
    args = parser.parse_args()
    recipe, images = RECIPES[args.dataset], ROOT / "data/raw" / args.dataset
    if not (images / "images.zip").is_file():
        parser.error(f"{images / 'images.zip'}: no such file; run dml data fetch {args.dataset}")
    if args.dataset == "icons" and (args.weights is None or not args.weights.is_file()):
        parser.error("--weights: name a file; see docs/reference/backbones-and-datasets.md, Converted weights")
    train, test = read_images(images, recipe.side)
    scores: dict[str, list[float]] = {"recall@1": [], "map@r": []}
    for seed in args.seed or [0]:
        began = time.monotonic()
        torch.manual_seed(seed)
        network = FineTuned(args.weights, recipe.num_dimensions) if args.dataset == "icons" else Small(recipe.num_dimensions)
        of_seed = score(fit_plainly(network, train, recipe, recipe.num_epochs), test)
        for name, value in of_seed.items():
            scores[name].append(value)
        said = ", ".join(f"{name} {value:.1f}" for name, value in of_seed.items())
        print(f"seed {seed}: {said}; {time.monotonic() - began:.0f} s", flush=True)
    for name, values in scores.items():
        spread = f", standard deviation {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        print(f"{name}: {statistics.mean(values):.1f}{spread}; the page's {page_mean(recipe.table, args.dataset, name)}")


def read_images(folder: Path, side: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (N, 3, side, side) pictures in 0..255 and (N,) labels of the training classes, then of the test classes."""
    rows = [row for row in csv.DictReader((folder / "images.csv").open()) if not row["left_out"]]
    names = sorted({row["class"] for row in rows})
    numbers = {name: number for number, name in enumerate(names)}
    resize = v2.Resize((side, side))
    with zipfile.ZipFile(folder / "images.zip") as archive:
        pictures = torch.stack([v2.functional.pil_to_tensor(resize(picture(archive, row["path"]))) for row in rows])
    labels = torch.tensor([numbers[row["class"]] for row in rows])
    trains = labels < math.ceil(len(names) / 2)
    return (pictures[trains], labels[trains]), (pictures[~trains], labels[~trains])


def picture(archive: zipfile.ZipFile, name: str) -> Image.Image:
    """Return a picture of the archive in RGB."""
    with archive.open(name) as file:
        return Image.open(file).convert("RGB")


class FineTuned(nn.Module):
    """EfficientNet-Lite0 with frozen statistics of BatchNorm, average pooling, and a linear layer."""

    def __init__(self, weights: Path, num_dimensions: int) -> None:
        super().__init__()
        self.backbone = timm.create_model("tf_efficientnet_lite0", num_classes=0)
        state = torch.load(weights, weights_only=True)
        self.backbone.load_state_dict({name: value for name, value in state.items() if not name.startswith("classifier.")})
        self.head = nn.Linear(self.backbone.num_features, num_dimensions)

    def train(self, mode: bool = True) -> "FineTuned":
        """Train all but the statistics of BatchNorm."""
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, pictures: Tensor) -> Tensor:
        """Return (N, D) embeddings of (N, 3, H, W) pictures in 0..255."""
        return self.head(self.backbone((pictures.float() / 127.5 - 1).to(memory_format=torch.channels_last)))


class Small(nn.Module):
    """Four convolutions with group normalisation, three of them pooled; the maximum over positions; a layer, BatchNorm without scale."""

    def __init__(self, num_dimensions: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, is_pooled in ((3, 16, True), (16, 32, True), (32, 64, True), (64, 64, False)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.GroupNorm(8, after), nn.ReLU()]
            layers += [nn.MaxPool2d(2, ceil_mode=True)] if is_pooled else []
        self.backbone = nn.Sequential(*layers)
        norm = nn.BatchNorm1d(num_dimensions, eps=0.001, momentum=0.05)
        norm.weight.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(64, num_dimensions, bias=False), norm)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return (N, D) embeddings of (N, 3, H, W) pictures in 0..255."""
        maps = self.backbone((pictures.float() / 255).to(memory_format=torch.channels_last))
        return self.head(maps.amax((2, 3)))


def fit_plainly(network: nn.Module, train: tuple[Tensor, Tensor], recipe: Recipe, num_epochs: int) -> nn.Module:
    """Train the network on the training classes, and return it."""
    pictures, labels = train
    network = network.to(memory_format=torch.channels_last).train()
    num_classes = int(labels.max()) + 1
    start = TorchInitWrapper(nn.init.uniform_, a=-(num_classes**-0.5), b=num_classes**-0.5)  # the norm sets how far a step rotates a class
    loss = NormalizedSoftmaxLoss(num_classes, recipe.num_dimensions, temperature=1 / 20, weight_init_func=start)
    parts = zip((network.backbone, network.head, loss), recipe.rates, strict=True)
    groups: list[dict[str, Any]] = [{"params": part.parameters(), "lr": rate} for part, rate in parts]
    optimiser = recipe.optimiser(groups, weight_decay=1e-4)  # type: ignore[call-arg]
    per_epoch = len(labels) // recipe.batch_size
    num_steps = num_epochs * per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_factor(step / per_epoch, num_epochs))
    sampler = MPerClassSampler(labels, PER_CLASS, recipe.batch_size, length_before_new_iter=num_steps * recipe.batch_size)
    crop = v2.RandomCrop(recipe.side, padding=recipe.padding)
    for indices in torch.tensor(list(sampler)).view(-1, recipe.batch_size):
        views = torch.stack([crop(pictures[index]) for index in indices])
        optimiser.zero_grad()
        loss(network(views), labels[indices]).backward()
        optimiser.step()
        schedule.step()
    return network


def rate_factor(epoch: float, num_epochs: int) -> float:
    """Return the factor of all rates after a number of epochs: a cosine to FLOOR, during the first epoch times a linear warm-up."""
    return min(1.0, epoch) * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * epoch / num_epochs)) / 2)


@torch.no_grad()
def embed_all(network: nn.Module, pictures: Tensor, batch_size: int) -> Tensor:
    """Return (N, D) embeddings of unit length of (N, 3, H, W) pictures in 0..255."""
    return functional.normalize(torch.cat([network(batch) for batch in torch.split(pictures, batch_size)]))


@torch.no_grad()
def score(network: nn.Module, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return Recall@1 and MAP@R of the test classes, in percent."""
    pictures, labels = test
    embeddings = embed_all(network.eval(), pictures, 500)
    wanted = ("precision_at_1", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(include=wanted, k="max_bin_count", device=torch.device("cpu"))
    values = calculator.get_accuracy(embeddings, labels, embeddings, labels, ref_includes_query=True)
    return {"recall@1": 100 * values["precision_at_1"], "map@r": 100 * values["mean_average_precision_at_r"]}


def page_mean(table: str, dataset: str, metric: str) -> str:
    """Return the row's mean on the table's committed page."""
    path = ROOT / f"docs/pages/project/{table}.json"
    if not path.is_file():
        return "not measured"
    page = json.loads(path.read_text())
    number = [(column["dataset"], column["metric"]) for column in page["columns"]].index((dataset, metric))
    (row,) = [row for row in page["rows"] if row["name"] == ROW]
    cell = row["lines"][0]["cells"][number]
    return f"{cell['mean']:.1f} ± {cell['half_width']:.1f} ({len(cell['values'])} seeds)"


if __name__ == "__main__":
    main()
