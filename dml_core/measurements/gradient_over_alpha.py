"""Gradient at the embeddings of single images against alpha (heated-up softmax, Figure 2; section 3.1).

The samples are three hard or three easy ones, by their margins (`classifier.choose_samples`). Embeddings and weights have unit length.
"""

from pathlib import Path

import numpy as np

from dml_core.measurements.classifier import Floats, choose_samples, classifier_of, unit_rows
from dml_core.measurements.contract import FinishedRun
from dml_core.measurements.sample_curves import Options, draw_samples

SCORED_ALPHAS = (0.25, 4.0, 16.0, 64.0, 1024.0)
DRAWN_ALPHAS = np.geomspace(0.02, 1024, 241)
METRICS = tuple(f"gradient_norm@{alpha:g}" for alpha in SCORED_ALPHAS)


def measure(run: FinishedRun, options: Options, folder: Path) -> dict[str, float]:
    """Draw `gradient_over_alpha.png`, save the curves in `gradient_over_alpha.npz`; `gradient_norm@16` is the samples' mean at alpha 16.

    Without hard (or easy) samples there is no score, and the picture states this.

    Raises:
        EvaluationError: the run's loss has no classifier, or was not trained on the scored classes.
    """
    classifier = classifier_of(run)
    units_ND, labels_N = unit_rows(run.gallery.embeddings), run.gallery.labels
    margins_N = classifier.margins(units_ND, labels_N)
    chosen = choose_samples(margins_N, options.samples)

    def norms_at(alphas: Floats) -> Floats:
        """Return norms (S, A)."""
        return np.stack([classifier.gradient_norms(units_ND[chosen], labels_N[chosen], float(alpha)) for alpha in alphas], axis=1)

    curves_SA = norms_at(DRAWN_ALPHAS)
    np.savez(
        folder / "gradient_over_alpha.npz",
        alphas=DRAWN_ALPHAS,
        norms=curves_SA,
        indices=chosen,
        labels=labels_N[chosen],
        margins=margins_N[chosen],
    )
    scales = {"xscale": "log", "yscale": "log" if options.samples == "hard" else "linear", "xlabel": r"$\alpha$"}
    x_SA = np.broadcast_to(DRAWN_ALPHAS, curves_SA.shape)
    draw_samples(run, options.samples, chosen, margins_N[chosen], x_SA, curves_SA, scales, folder / "gradient_over_alpha.png")
    if not len(chosen):
        return {}
    return dict(zip(METRICS, norms_at(np.array(SCORED_ALPHAS)).mean(axis=0).tolist(), strict=True))
