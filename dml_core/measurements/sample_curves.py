"""Figures of single images: one curve per image, with the image next to it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dml_core.config import Config
from dml_core.data.store.splits import open_role
from dml_core.figures.samples import plot_sample_curves
from dml_core.measurements.classifier import Floats, Samples
from dml_core.measurements.contract import FinishedRun

NONE_OF_KIND = {"hard": "no image is classified wrongly", "easy": "no image is classified rightly"}
KIND = {"hard": "hard samples, classified wrongly", "easy": "easy samples, classified rightly"}


class Options(Config):
    """Options of a measurement of single images.

    Attributes:
        samples: the figure's panel, "hard" or "easy".
    """

    samples: Samples


def draw_samples(
    run: FinishedRun,
    samples: Samples,
    index_S: NDArray[np.int64],
    margins_S: Floats,
    x_SA: Floats,
    y_SA: Floats,
    scales: dict[str, str],
    path: Path,
    marked_S: Floats | None = None,
) -> None:
    """Draw a curve for each of S images of the run's gallery, with the margin of its logits as caption.

    Args:
        scales: `xscale`, `yscale` and `xlabel` of the axes.
        marked_S: x position of a dot on each curve.
    """
    dataset = open_role(run.dataset, run.gallery.role, run.training.validation)
    images = [dataset.image(int(index)).permute(1, 2, 0).numpy() for index in index_S]
    names = [dataset.class_names[label] for label in run.gallery.labels[index_S]]
    captions = [f"{name}, margin {margin:.2g}" for name, margin in zip(names, margins_S, strict=True)]
    axes = {**scales, "ylabel": "norm of the gradient"}
    title = f"{run.title}\n{run.gallery.description}: {KIND[samples]}"
    plot_sample_curves(images, captions, x_SA, y_SA, axes, path, title, NONE_OF_KIND[samples], marked_S)
