"""Number of distinct SoftTriple centres on random embeddings with few modes per class, with and without its regulariser (figure 3).

Only the run's seed matters. Shapes: N samples, D dimensions, C classes, M modes of a class, K centres of a class.
"""

from pathlib import Path

import torch
from torch.nn import functional

from dml_core.config import Config
from dml_core.evaluation.separability import num_unique_centres
from dml_core.losses.softtriple import SoftTriple, SoftTripleConfig
from dml_core.measurements.contract import FinishedRun

METRICS = ("drawn_unique_centres", "drawn_unique_centres_unregularised")
NUM_CLASSES, NUM_MODES, DIM, BATCH_SIZE = 10, 3, 64, 32
LEARNING_RATE, REGULARISER_WEIGHT = 0.01, 0.2  # published: for Adam, and tau
NOISE = 0.7
NUM_STEPS = 1_000  # of the centres; the embeddings are not trained


def measure(run: FinishedRun, options: Config, folder: Path) -> dict[str, float]:
    """Return the mean number of different centres per class, of the published ten, with tau and with tau = 0."""
    counts = [num_centres(run.seed, weight, NUM_STEPS) for weight in (REGULARISER_WEIGHT, 0.0)]
    return dict(zip(METRICS, counts, strict=True))


def num_centres(seed: int, regulariser_weight: float, num_steps: int) -> float:
    """Return the mean number of different centres per class after training on embeddings drawn around each class's modes."""
    generator = torch.Generator().manual_seed(seed)
    loss = SoftTriple(SoftTripleConfig(regulariser_weight=regulariser_weight), NUM_CLASSES, DIM)
    start_KCD = torch.rand(loss.centres_KCD.shape, generator=generator)  # the loss's own initialisation, with only this seed
    loss.centres_KCD.data = (2 * start_KCD - 1) * (NUM_CLASSES * loss.config.num_centres) ** -0.5
    modes_CMD = functional.normalize(torch.randn(NUM_CLASSES, NUM_MODES, DIM, generator=generator), dim=-1)
    optimiser = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE)
    for _ in range(num_steps):
        labels_N, mode_N = (torch.randint(most, (BATCH_SIZE,), generator=generator) for most in (NUM_CLASSES, NUM_MODES))
        noise_ND = functional.normalize(torch.randn(BATCH_SIZE, DIM, generator=generator))
        optimiser.zero_grad()
        torch.autograd.backward(loss(modes_CMD[labels_N, mode_N] + NOISE * noise_ND, labels_N).total)
        optimiser.step()
    return float(num_unique_centres(loss.centres_CKD.numpy()).mean())
