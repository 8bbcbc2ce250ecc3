"""Figures of single images: one curve per image, with the image next to it."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dml_core.data.store.splits import open_role
from dml_core.figures.samples import SampleCurve, plot_sample_curves
from dml_core.measurements.classifier import Floats, Samples
from dml_core.measurements.contract import FinishedRun

NONE_OF_KIND = {"hard": "no image is classified wrongly", "easy": "no image is classified rightly"}
KIND = {"hard": "hard samples, classified wrongly", "easy": "easy samples, classified rightly"}


def draw_samples(
    run: FinishedRun,
    samples: Samples,
    chosen: NDArray[np.int64],
    margins_S: Floats,
    x_SA: Floats,
    y_SA: Floats,
    scales: dict[str, str],
    path: Path,
    marked_S: Floats | None = None,
) -> None:
    """Draw a curve for each chosen image (S,) of the run's gallery.

    Args:
        margins_S: margins of the images' logits, for the legend.
        x_SA, y_SA: the curves.
        scales: `xscale`, `yscale` and `xlabel` of the axes.
        marked_S: x position of a dot on each curve.
    """
    dataset = open_role(run.dataset, run.gallery.role, run.training.validation)
    curves = [
        SampleCurve(
            image=dataset.image(int(index)).permute(1, 2, 0).numpy(),
            label=f"{dataset.class_names[int(run.gallery.labels[index])]}, margin {margin:.2g}",
            x=x,
            y=y,
            marked=None if marked_S is None else float(marked_S[number]),
        )
        for number, (index, margin, x, y) in enumerate(zip(chosen, margins_S, x_SA, y_SA, strict=True))
    ]
    axes: dict[str, Any] = {**scales, "ylabel": "norm of the gradient"}
    plot_sample_curves(curves, axes, path, f"{run.title}\n{run.gallery.images}: {KIND[samples]}", NONE_OF_KIND[samples])
