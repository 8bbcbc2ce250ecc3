"""Norm of heated-up softmax's gradient (eq. 3) at random embeddings, over alpha (figure 2 shows it for six images).

Only the run's seed matters. Shapes: N samples, D dimensions, C classes.
"""

from pathlib import Path

import torch
from torch.nn import functional

from dml_core.config import Config
from dml_core.losses.heated_up_softmax import HeatedUpSoftmax, HeatedUpSoftmaxConfig
from dml_core.measurements.contract import FinishedRun

ALPHAS = (0.25, 4.0, 16.0, 64.0)
NEAREST = {"easy": 0, "hard": 1}  # samples of class 0 near the weight of this class
METRICS = tuple(f"gradient_norm_{kind}_{alpha:g}" for kind in NEAREST for alpha in ALPHAS)
NUM_CLASSES, NUM_SAMPLES, DIM = 20, 200, 64


def measure(run: FinishedRun, options: Config, folder: Path) -> dict[str, float]:
    """Return the mean norm for samples near their own class's weight (easy) and near another's (hard), at each alpha."""
    norms = [gradient_norm(run.seed, alpha, nearest) for nearest in NEAREST.values() for alpha in ALPHAS]
    return dict(zip(METRICS, norms, strict=True))


def gradient_norm(seed: int, alpha: float, nearest_class: int) -> float:
    """Return the mean norm of the gradient at unit-length samples of class 0 near the weight of `nearest_class`."""
    generator = torch.Generator().manual_seed(seed)
    weight_CD = functional.normalize(torch.randn(NUM_CLASSES, DIM, generator=generator))
    noise_ND = functional.normalize(torch.randn(NUM_SAMPLES, DIM, generator=generator))
    embeddings_ND = functional.normalize(weight_CD[nearest_class] + noise_ND).requires_grad_()
    loss = HeatedUpSoftmax(HeatedUpSoftmaxConfig(alpha=alpha, heated_alpha=None, bias=False), NUM_CLASSES, DIM)
    loss.classifier.weight.data = weight_CD
    total = loss(embeddings_ND, torch.zeros(NUM_SAMPLES, dtype=torch.int64)).total
    (gradient_ND,) = torch.autograd.grad(total * NUM_SAMPLES, embeddings_ND)
    return float(gradient_ND.norm(dim=1).mean())
