"""What several benchmarks share: memory, fresh processes, exponents, bare training steps, drawn images and embeddings, copied projects.

Scripts in this folder import it as `measuring`. It needs no library beyond those of `benchmarks/gpu.py`.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision import datasets, transforms

from dml_core.training.parallel.workers import TrainingSystem

ROOT = Path(__file__).parents[1]
CODE = ("dml_core", "tasks", "flows")
COPIED = (*CODE, "dvc.yaml", "params.yaml", ".dvc/config", ".gitignore", ".dvcignore")
PREFECT_FILE = "state/prefect/prefect.db"  # in a copied project
SERVICES = ("MLFLOW_", "PREFECT_", "DML_", "RAY_", "DVC_")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels


# ---------------------------------------------------------------- measurement


def mebibytes(field: str) -> float:
    """Return a size of this process in MiB: VmRSS, VmHWM (the peak of it), RssAnon (its own pages) or RssFile (mapped files)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    """Let VmHWM be the peak from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def in_a_fresh_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function of a module, called in a new process."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def exponent(costs: Mapping[int, float]) -> str:
    """Return e of cost ~ size^e, by least squares over the logarithms; costs are by size."""
    if len(costs) < 2 or min(costs.values()) <= 0:
        return "-"
    slope: Any = np.polyfit(np.log(list(costs)), np.log(list(costs.values())), 1)[0]
    return f"{slope:.2f}"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows))


# ---------------------------------------------------------------- training


def bare_step(
    system: TrainingSystem,
    optimiser: torch.optim.Optimizer,
    images: torch.Tensor,
    labels_N: torch.Tensor,
    autocast: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
    """Train one step: forward, loss, backward and optimiser, and nothing else."""
    optimiser.zero_grad(set_to_none=True)
    with autocast or contextlib.nullcontext():
        total = system(images, labels_N, [len(images)]).total
    total.backward()
    optimiser.step()


# ---------------------------------------------------------------- inputs


def drawn_photograph(random: np.random.Generator, width: int, height: int, grain: float = 12.0) -> bytes:
    """Return a JPEG of smooth noise with fine grain of this standard deviation, about as hard to encode as a photograph."""
    coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    pixels_HW3 = np.asarray(coarse) + random.normal(0, grain, (height, width, 1))
    return encoded(pixels_HW3.clip(0, 255).astype(np.uint8), "JPEG", quality=90)


def encoded(pixels: NDArray[np.uint8], kind: str, **options: Any) -> bytes:
    """Return pixels, (H, W) or (H, W, 3), as an image file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def image_folder(folder: Path, side: int) -> datasets.ImageFolder:
    """Return torchvision's dataset of a folder of classes, with its usual training views."""
    steps = [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    return datasets.ImageFolder(str(folder), transforms.Compose(steps))


def gaussian_classes(
    num_samples: int, num_classes: int, width: float, num_dimensions: int, common: float = 0.0
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return embeddings (N, D) of length 1 and their classes (N,), of unequal sizes.

    Args:
        width: standard deviation of a class; at 2 in 512 dimensions some of the nearest neighbours are wrong.
        common: length of a direction that is added to all embeddings.
    """
    random = np.random.default_rng(0)
    labels_N = np.concatenate([np.arange(num_classes).repeat(2), random.integers(0, num_classes, num_samples - 2 * num_classes)])
    random.shuffle(labels_N)
    centres_CD = random.standard_normal((num_classes, num_dimensions), dtype=np.float32)
    embeddings_ND = centres_CD[labels_N]
    embeddings_ND += np.float32(width) * random.standard_normal(embeddings_ND.shape, dtype=np.float32)
    embeddings_ND /= np.linalg.norm(embeddings_ND, axis=1, keepdims=True)
    if common:
        embeddings_ND += np.float32(common / num_dimensions**0.5)
        embeddings_ND /= np.linalg.norm(embeddings_ND, axis=1, keepdims=True)
    return embeddings_ND, labels_N


# ---------------------------------------------------------------- projects


def copy_project(project: Path) -> None:
    """Copy this repository's code and parameters to a new project, a git repository, since DVC watches the code.

    It has an empty database of Prefect, which keeps the flows of all commands in the project (`environment_of`).
    """
    from flows.local_database import copy_empty_database

    for name in COPIED:
        target = project / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
    (project / PREFECT_FILE).parent.mkdir(parents=True, exist_ok=True)
    copy_empty_database((project / PREFECT_FILE).parent)


def environment_of(project: Path) -> dict[str, str]:
    """Return the environment of commands in a copied project: its code, this Python's programs, and no servers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SERVICES)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    database = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{project.absolute() / PREFECT_FILE}"}
    return kept | database | {"PATH": path, "PYTHONPATH": str(project), "PYTHONUNBUFFERED": "1"}


def address_in(lines: IO[str]) -> str:
    """Return the address that `dml serve` prints once it listens."""
    return next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line)))
