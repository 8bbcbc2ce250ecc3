"""Gradient at the embeddings of single images against the embedding's norm (heated-up softmax, Figure 4(c) and (d); section 3.4).

Alpha is 1. The samples are three hard or three easy ones, by their margins (`classifier.choose_samples`). Embeddings keep their direction.
"""

from pathlib import Path

import numpy as np

from dml_core.measurements.classifier import Floats, choose_samples, classifier_of, unit_rows
from dml_core.measurements.contract import FinishedRun
from dml_core.measurements.sample_curves import Options, draw_samples

SCORED_FACTORS = (0.1, 1.0, 10.0, 100.0)
NUM_DRAWN = 241
METRICS = (*(f"gradient_norm@{factor:g}x" for factor in SCORED_FACTORS), *(f"gradient_to_limit@{factor:g}x" for factor in SCORED_FACTORS))


def measure(run: FinishedRun, options: Options, folder: Path) -> dict[str, float]:
    """Draw `gradient_over_norm.png` and save the curves in `gradient_over_norm.npz`.

    `gradient_norm@10x` is the samples' mean with each embedding at ten times its norm; `gradient_to_limit@10x`, for hard samples, is the
    same relative to its limit, the distance between the weights of the predicted class and of the own class. Without hard (or easy) samples
    there is no score, and the picture states this.

    Raises:
        EvaluationError: the run's loss has no classifier, or was not trained on the scored classes.
    """
    classifier = classifier_of(run)
    raw_ND, labels_N = run.gallery.embeddings.astype(np.float64), run.gallery.labels
    margins_N = classifier.margins(raw_ND, labels_N)
    chosen = choose_samples(margins_N, options.samples)
    own_norms_S, units_SD = np.linalg.norm(raw_ND[chosen], axis=1), unit_rows(raw_ND[chosen])

    def norms_at(lengths_SF: Floats) -> Floats:
        """Return the norms (S, F) of the gradients with the samples at these lengths."""
        columns = [classifier.gradient_norms(units_SD * lengths_S[:, None], labels_N[chosen], 1.0) for lengths_S in lengths_SF.T]
        return np.stack(columns, axis=1)

    known_S = own_norms_S if len(chosen) else np.ones(1)
    drawn_F = np.geomspace(0.01 * known_S.min(), 10 * known_S.max(), NUM_DRAWN)
    x_SF = np.broadcast_to(drawn_F, (len(chosen), NUM_DRAWN))
    curves_SF = norms_at(x_SF)
    np.savez(
        folder / "gradient_over_norm.npz", lengths=drawn_F, norms=curves_SF, indices=chosen, labels=labels_N[chosen], own_norms=own_norms_S
    )
    scales = {"xscale": "log", "yscale": "linear", "xlabel": "norm of the embedding; dot: as the network gives it"}
    picture = folder / "gradient_over_norm.png"
    draw_samples(run, options.samples, chosen, margins_N[chosen], x_SF, curves_SF, scales, picture, own_norms_S)
    if not len(chosen):
        return {}
    norms_SF = norms_at(own_norms_S[:, None] * np.array(SCORED_FACTORS))
    scores = {f"gradient_norm@{factor:g}x": float(norms_SF[:, at].mean()) for at, factor in enumerate(SCORED_FACTORS)}
    if options.samples == "easy":
        return scores
    taken_S = (units_SD @ classifier.weight.T).argmax(axis=1)
    limits_S = np.linalg.norm(classifier.weight[taken_S] - classifier.weight[labels_N[chosen]], axis=1)
    if not limits_S.all():  # hard only by the bias: its direction is its own class's, and the limit 0
        return scores
    shares_SF = norms_SF / limits_S[:, None]
    return scores | {f"gradient_to_limit@{factor:g}x": float(shares_SF[:, at].mean()) for at, factor in enumerate(SCORED_FACTORS)}
