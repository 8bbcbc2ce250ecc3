"""The papers' claims: how each is measured, over seeds, and whether it holds. The claims themselves are `flows/tables/claims.yaml`.

A measurement is a function of (bench, seed) that returns the value and what the claim compares it with.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from dml_core.config import Config, merge, parse, unknown_name
from dml_core.evaluation.confidence import mean_over_seeds
from dml_core.evaluation.separability import num_unique_centres
from dml_core.losses.multi_centre import MultiCentre
from dml_core.losses.registry import build_loss
from dml_core.training.config import TrainingConfig
from tasks.runs.specs import DatasetSpec
from tasks.side.local_runs import LocalRun, train_here
from tasks.side.side_by_side import side_by_side


class Claim(Config):
    """One claim; see the head of `flows/tables/claims.yaml`.

    Attributes:
        history: how its measurement was changed after a first look, and what that look had shown.
    """

    id: str
    paper: str
    claim: str
    evidence: str
    measure: str
    quantity: str
    side: Literal["above", "below"]
    history: str | None = None


class ClaimsSpec(Config):
    """`flows/tables/claims.yaml`.

    Attributes:
        history: of what all claims share.
    """

    history: str
    datasets: dict[str, DatasetSpec]
    seeds: tuple[int, ...] = Field(min_length=2)
    protocol: dict[str, Any]
    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Bench:
    """What measurements train on: packed datasets by name, and the settings that all runs share."""

    packed: dict[str, Path]
    protocol: dict[str, Any]

    def train(self, dataset: str, seed: int, loss: str, options: dict[str, Any], **changes: Any) -> LocalRun:
        """Train one system on a dataset."""
        values = merge(merge(self.protocol, {"loss": {"name": loss, "options": options}}), changes)
        return train_here(parse(TrainingConfig, values, f"claims: {loss}"), self.packed[dataset], seed)


@dataclass(frozen=True)
class Verdict:
    """A measured claim: value and reference by seed, and "holds", "refuted" or "not shown"."""

    claim: Claim
    values: list[float]
    references: list[float]
    verdict: Literal["holds", "refuted", "not shown"]


def judge(claim: Claim, pairs: list[tuple[float, float]]) -> Verdict:
    """The verdict from one (value, reference) a seed: by the 95 % interval of their paired difference."""
    values, references = [value for value, _ in pairs], [reference for _, reference in pairs]
    mean, half = mean_over_seeds([value - reference for value, reference in pairs])
    if abs(mean) <= half or mean == 0.0:
        return Verdict(claim, values, references, "not shown")
    return Verdict(claim, values, references, "holds" if (mean > 0) == (claim.side == "above") else "refuted")


def measure_claims(spec: ClaimsSpec, bench: Bench, watch: Callable[[str], None]) -> list[Verdict]:
    """Measure every claim with every seed, side by side, one process on each core.

    Raises:
        ConfigError: a claim names a measurement that does not exist.
    """
    for claim in spec.claims:
        if claim.measure not in MEASUREMENTS:
            raise unknown_name("measurement", claim.measure, list(MEASUREMENTS))
    jobs = [(claim.measure, seed) for claim in spec.claims for seed in spec.seeds]
    pairs: dict[tuple[str, int], tuple[float, float]] = {}
    for job, pair in side_by_side(partial(_measured, bench), jobs):
        pairs[job] = pair
        watch(f"{len(pairs)} of {len(jobs)}: {job[0]}, seed {job[1]}: {pair[0]:.3g} against {pair[1]:.3g}")
    return [judge(claim, [pairs[claim.measure, seed] for seed in spec.seeds]) for claim in spec.claims]


def _measured(bench: Bench, job: tuple[str, int]) -> tuple[float, float]:
    """Value and reference of a measurement with one seed."""
    measure, seed = job
    return MEASUREMENTS[measure](bench, seed)


def claims_table(verdicts: list[Verdict]) -> str:
    """The verdicts as Markdown."""
    lines = ["| paper | claim | paper's evidence | measured here | value | reference | verdict |", f"|{'---|' * 7}"]
    for found in verdicts:
        (value, half), (reference, reference_half) = mean_over_seeds(found.values), mean_over_seeds(found.references)
        figures = f"{value:.3g} ± {half:.2g} | {reference:.3g} ± {reference_half:.2g}"
        claim = found.claim
        lines.append(f"| {claim.paper} | {claim.claim} | {claim.evidence} | {claim.quantity} | {figures} | {found.verdict} |")
    return "\n".join(lines)


def claims_history(spec: ClaimsSpec) -> str:
    """What was changed of each claim's measurement after a first look, as a Markdown list."""
    return "\n".join([f"- {spec.history}", *(f"- {claim.claim} {claim.history}" for claim in spec.claims if claim.history)])


# ---------------------------------------------------------------- SoftTriple

# Batches as published; twice the epochs, since each of ten centres sees a tenth of the images.
MODES = {"sampler": {"kind": "shuffled", "batch_size": 32}, "transform": {"crop_size": 48, "padding": 4}, "num_epochs": 20}


def multi_centre_recall(bench: Bench, seed: int) -> tuple[float, float]:
    """Test R@1 with ten centres a class and with one."""
    several, one = (bench.train("modes", seed, "softtriple", {"num_centres": number}, **MODES).scores() for number in (10, 1))
    return several["recall@1"], one["recall@1"]


def unique_centres(bench: Bench, seed: int) -> tuple[float, float]:
    """Mean number of unique centres a class, of ten, with and without the regulariser, over drawn embeddings of three modes a class."""
    return _num_unique_centres(seed, 0.2), _num_unique_centres(seed, 0.0)


def _num_unique_centres(seed: int, regulariser_weight: float) -> float:
    """After a thousand steps of the centres alone, ten classes in 64 dimensions, batches of 32, Adam at the published 1e-2."""
    generator = torch.Generator().manual_seed(seed)
    modes_CMD = functional.normalize(torch.randn(10, 3, 64, generator=generator), dim=-1)
    loss = build_loss("softtriple", {"regulariser_weight": regulariser_weight}, 10, 64)
    assert isinstance(loss, MultiCentre)
    optimiser = torch.optim.Adam(loss.parameters(), lr=0.01)
    for _ in range(1_000):
        labels_N, mode_N = torch.randint(10, (32,), generator=generator), torch.randint(3, (32,), generator=generator)
        noise_ND = functional.normalize(torch.randn(32, 64, generator=generator))
        optimiser.zero_grad()
        torch.autograd.backward(loss(modes_CMD[labels_N, mode_N] + 0.7 * noise_ND, labels_N).total)
        optimiser.step()
    return float(num_unique_centres(loss.centres_CKD.detach().numpy()).mean())


# ---------------------------------------------------------------- heated-up softmax

COLD_EPOCHS = 6


def hard_gradients(bench: Bench, seed: int) -> tuple[float, float]:
    """Mean gradient norm of samples nearer to another class's weight, at alpha 64 and 16."""
    return _gradient_norm(seed, 64.0, 1), _gradient_norm(seed, 16.0, 1)


def easy_gradients(bench: Bench, seed: int) -> tuple[float, float]:
    """Mean gradient norm of samples near their own class's weight, at alpha 64 and 16."""
    return _gradient_norm(seed, 64.0, 0), _gradient_norm(seed, 16.0, 0)


def easy_gradients_at_small_alpha(bench: Bench, seed: int) -> tuple[float, float]:
    """The same at alpha 0.25 and 4."""
    return _gradient_norm(seed, 0.25, 0), _gradient_norm(seed, 4.0, 0)


def heating_compacts(bench: Bench, seed: int) -> tuple[float, float]:
    """CSC of the training classes after the heated epochs, and at their start."""
    return _heated(bench, seed, 4.0).scores("train")["csc"], _heated(bench, seed, None, num_epochs=COLD_EPOCHS).scores("train")["csc"]


def heating_beside_cooling_the_rate(bench: Bench, seed: int) -> tuple[float, float]:
    """CSC of the training classes with alpha 16 to 4, and with alpha kept; the learning rate drops in both."""
    return _heated(bench, seed, 4.0).scores("train")["csc"], _heated(bench, seed, 16.0).scores("train")["csc"]


def _heated(bench: Bench, seed: int, heated_alpha: float | None, num_epochs: int = COLD_EPOCHS + 10) -> LocalRun:
    """First at alpha 16, then the other epochs at `heated_alpha` and a tenth of the learning rate."""
    options = {"heated_alpha": heated_alpha, "heat_from": COLD_EPOCHS / num_epochs}
    return bench.train("clothes", seed, "heated_up_softmax", options, num_epochs=num_epochs)


def _gradient_norm(seed: int, alpha: float, nearest_class: int) -> float:
    """Mean norm of eq. 3's gradient for samples of class 0 that lie near the weight of `nearest_class`, 64-d, 20 classes."""
    generator = torch.Generator().manual_seed(seed)
    weight_CD = functional.normalize(torch.randn(20, 64, generator=generator))
    noise_ND = functional.normalize(torch.randn(200, 64, generator=generator))
    embeddings_ND = functional.normalize(weight_CD[nearest_class] + noise_ND).requires_grad_()
    loss = build_loss("heated_up_softmax", {"alpha": alpha, "bias": False}, 20, 64)
    loss.get_parameter("classifier.weight").data = weight_CD
    (gradient_ND,) = torch.autograd.grad(loss(embeddings_ND, torch.zeros(200, dtype=torch.int64)).total * 200, embeddings_ND)
    return float(gradient_ND.norm(dim=1).mean())


# ---------------------------------------------------------------- discriminative loss


def exponent_in_classes(bench: Bench, seed: int) -> tuple[float, float]:
    """Growth of a batch's cost with the number of classes, and 1.5, midway between linear and quadratic."""
    few, many = 2_000, 16_000
    return math.log(_discriminative_seconds(seed, 128, many) / _discriminative_seconds(seed, 128, few)) / math.log(many / few), 1.5


def exponents_in_samples(bench: Bench, seed: int) -> tuple[float, float]:
    """Growth of the cost with the number of samples: of the discriminative loss, and of the sum over all triplets."""
    few, many = 1_024, 4_096
    ours = math.log(_discriminative_seconds(seed, many, 1_000) / _discriminative_seconds(seed, few, 1_000)) / math.log(many / few)
    few, many = 128, 320
    return ours, math.log(_all_triplets_seconds(seed, many) / _all_triplets_seconds(seed, few)) / math.log(many / few)


def _discriminative_seconds(seed: int, num_samples: int, num_classes: int) -> float:
    embeddings_ND, labels_N = _batch(seed, num_samples, num_classes, num_classes)
    loss = build_loss("discriminative", {}, num_classes, num_classes)
    return _cpu_seconds(lambda: torch.autograd.grad(loss(embeddings_ND, labels_N).total, embeddings_ND))


def _all_triplets_seconds(seed: int, num_samples: int) -> float:
    """Cost of sum over (i, j, k) of ||x_i - x_j|| - ||x_i - x_k||, each triplet taken by itself, as equation 1 has it."""
    embeddings_ND, labels_N = _batch(seed, num_samples, 4, 64)

    def every_triplet() -> None:
        distance_NN = torch.cdist(embeddings_ND, embeddings_ND)
        same_NN = labels_N[:, None] == labels_N
        valid_NNN = same_NN[:, :, None] & ~same_NN[:, None, :]
        torch.autograd.grad((distance_NN[:, :, None] - distance_NN[:, None, :])[valid_NNN].sum(), embeddings_ND)

    return _cpu_seconds(every_triplet)


def _batch(seed: int, num_samples: int, num_classes: int, num_dimensions: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings_ND = functional.normalize(torch.randn(num_samples, num_dimensions, generator=generator)).requires_grad_()
    return embeddings_ND, torch.arange(num_samples) % num_classes


def _cpu_seconds(work: Callable[[], object]) -> float:
    """The least processor time of five goes after one to warm up; what else the machine does hardly counts in it."""
    work()
    times = []
    for _ in range(5):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


# ---------------------------------------------------------------- tuplet margin


def slack_gap(bench: Bench, seed: int) -> tuple[float, float]:
    """Mean positive less mean negative cosine of the training set, with the slack margin and without."""
    gaps = []
    for slack in (0.1, 0.0):
        positive, negative = _pair_cosines(bench.train("clothes", seed, "tuplet_margin", {"slack_margin": slack, "variance_weight": 0.0}))
        gaps.append(float(positive.mean() - negative.mean()))
    return gaps[0], gaps[1]


def pair_spread(bench: Bench, seed: int) -> tuple[float, float]:
    """L_pos + L_neg of eq. 15 and 16 over all pairs of the training set, trained with the intra-pair term and without."""
    with_it, without = (
        _intra_pair_variation(*_pair_cosines(bench.train("clothes", seed, "tuplet_margin", {"variance_weight": weight})))
        for weight in (0.5, 0.0)
    )
    return with_it, without


def _intra_pair_variation(positive: np.ndarray, negative: np.ndarray) -> float:
    """Mean squared excess of the pairs that are worse than the mean of their kind, epsilon 0.01."""
    too_far, too_near = 0.99 * positive.mean() - positive, negative - 1.01 * negative.mean()
    return float(np.square(too_far.clip(0.0)).mean() + np.square(too_near.clip(0.0)).mean())


def _pair_cosines(run: LocalRun) -> tuple[np.ndarray, np.ndarray]:
    """Cosines of all positive and of all negative pairs of the training set."""
    embeddings_ND, labels_N = run.embed("train")
    cos_NN = embeddings_ND @ embeddings_ND.T
    first, second = np.triu_indices(len(labels_N), k=1)
    same = labels_N[first] == labels_N[second]
    return cos_NN[first, second][same], cos_NN[first, second][~same]


# ---------------------------------------------------------------- SGSL

NECK = {"model": {"head": {"kind": "bn_neck", "normalise_at_test": False}}}  # CSC as published, of features that are not normalised


def final_softmax(bench: Bench, seed: int) -> tuple[float, float]:
    """Mean softmax loss of the last epoch: softmax + SGSL, and a softmax on unit vectors of scale 1."""
    runs = [
        bench.train("clothes", seed, "sgsl", {"label_smoothing": 0.0}, **NECK),
        bench.train("clothes", seed, "normalised_softmax", {"scale": 1.0}, **NECK),
    ]
    ours, plain = (float(np.mean([step["softmax"] for step in run.history if step["epoch"] == run.config.num_epochs - 1])) for run in runs)
    return ours, plain


def separability(bench: Bench, seed: int) -> tuple[float, float]:
    """Test CSC of softmax + SGSL, and of the same softmax alone; label smoothing as released for SOP and In-shop."""
    return _separability(bench, seed, "test")


def training_separability(bench: Bench, seed: int) -> tuple[float, float]:
    """The same of the training classes."""
    return _separability(bench, seed, "train")


def _separability(bench: Bench, seed: int, role: str) -> tuple[float, float]:
    with_it, without = (bench.train("clothes", seed, "sgsl", {"label_smoothing": 0.1, "weight": weight}, **NECK) for weight in (1.0, 0.0))
    return with_it.scores(role)["csc"], without.scores(role)["csc"]


Measurement = Callable[[Bench, int], tuple[float, float]]
MEASUREMENTS: dict[str, Measurement] = {
    measurement.__name__: measurement
    for measurement in (
        multi_centre_recall,
        unique_centres,
        hard_gradients,
        easy_gradients,
        easy_gradients_at_small_alpha,
        heating_compacts,
        heating_beside_cooling_the_rate,
        exponent_in_classes,
        exponents_in_samples,
        slack_gap,
        pair_spread,
        final_softmax,
        separability,
        training_separability,
    )
}
