"""Rule for the best run: at the end of `dml reproduce`, for MLflow's `@best`, `dml models` and runs named without a seed.

The test classes are never used to choose: a score on classes that were used to choose is no longer fair.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dml_core.evaluation.statistics.comparing import Scores
from dml_core.evaluation.statistics.paired import MIN_SEEDS

VALIDATION = "validation_recall@1"  # score of a run: Recall@1 on its held-out training classes
RULE = "the variant with the highest mean Recall@1 on held-out training classes, and of its seeds the one with the highest"
NO_BEST = (
    "no best run: no finished run has a score on held-out training classes; finish the runs, "
    "or hold classes out (validation: {share: 0.2} in params.yaml)"
)


@dataclass(frozen=True)
class Best:
    """Best run of a comparison by RULE, with its variant's mean and its own validation Recall@1 (fractions), and the variants left out."""

    variant: str
    seed: int
    mean: float
    score: float
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        scores = f"validation Recall@1 by cosine: mean {100 * self.mean:.1f}, this seed {100 * self.score:.1f}"
        others = f"; left out, with fewer than {MIN_SEEDS} seeds: {', '.join(self.left_out)}" if self.left_out else ""
        return f"best run: {self.variant}, seed {self.seed}: {RULE} ({scores}{others})"


def best_run(scores: Scores) -> Best | None:
    """Return the best run; None if no run has a validation score. Ties go to the first variant by name, and to the lowest seed.

    If any variant has MIN_SEEDS seeds, those with fewer are left out: of many variants one with a single, lucky seed would win too often.

    Args:
        scores: variant -> seed -> validation Recall@1, of the runs that have one.
    """
    means = {variant: sum(by_seed[seed] for seed in sorted(by_seed)) / len(by_seed) for variant, by_seed in scores.items() if by_seed}
    if not means:
        return None
    enough = [variant for variant in means if len(scores[variant]) >= MIN_SEEDS] or [*means]
    variant = min(enough, key=lambda name: (-means[name], name))
    seed = best_seed(scores[variant], scores[variant])
    return Best(variant, seed, means[variant], scores[variant][seed], tuple(sorted(means.keys() - {*enough})))


def best_seed(seeds: Iterable[int], scores: Mapping[int, float]) -> int:
    """Return the seed of a variant with the highest validation Recall@1; the lowest among equals, and if none has such a score."""
    return min(seeds, key=lambda seed: (-scores.get(seed, -1.0), seed))


def said_best(scores: Scores) -> str:
    """Return the best run, or why there is none, in one line, worded alike wherever it is printed."""
    found = best_run(scores)
    return NO_BEST if found is None else str(found)
