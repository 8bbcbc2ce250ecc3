"""Simulate how a search should spend its scores: successive halving, a median pruner, or the same number of scores for every setting.

    python benchmarks/tuning_allocation.py [--searches 4000]

Settings have a true quality (0 for the row's own, the others normal with the standard deviation of the first column); a score is the
quality plus noise of 2.2 points. The peers are a median pruner over two folds, and plain averages. Prints how many scores a search costs,
how often it finds the best setting, the true quality of its winner, and by how much the winner's score overstates it.
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np

from tasks.tuning.halving import FEWEST_KEPT, RUNGS

NOISE = 2.2
SPREADS = (1.5, 3.0, 5.0)
Result = tuple[int, float, int]  # the winner, its score, number of scores spent
Random = np.random.Generator


def halving(quality: np.ndarray, random: Random) -> Result:
    """Spend scores as `tasks.tuning.halving` does."""
    num_trials = len(quality)
    total = quality + NOISE * random.normal(size=num_trials)
    count, cost, kept = np.ones(num_trials), num_trials, np.arange(num_trials)
    for one_in, more in RUNGS:
        kept = kept[np.argsort(-(total / count)[kept])][: max(FEWEST_KEPT, num_trials // one_in)]
        total[kept] += more * quality[kept] + NOISE * more**0.5 * random.normal(size=len(kept))
        count[kept] += more
        cost += more * len(kept)
    winner = int(kept[np.argmax((total / count)[kept])])
    return winner, float(total[winner] / count[winner]), cost


def same_for_all(quality: np.ndarray, random: Random, num_scores: int) -> Result:
    """Give every setting the same number of scores."""
    means = quality + NOISE / num_scores**0.5 * random.normal(size=len(quality))
    winner = int(np.argmax(means))
    return winner, float(means[winner]), num_scores * len(quality)


def median_pruner(quality: np.ndarray, random: Random, num_folds: int = 2, round_size: int = 4) -> Result:
    """Drop a setting if its first score is below the median of those of earlier rounds."""
    means: dict[int, float] = {}
    firsts: list[float] = []
    cost = 0
    for start in range(0, len(quality), round_size):
        median = np.median(firsts) if firsts else -np.inf
        for trial in range(start, min(start + round_size, len(quality))):
            scores = quality[trial] + NOISE * random.normal(size=num_folds)
            firsts.append(scores[0])
            given_up = trial > 0 and scores[0] < median
            cost += 1 if given_up else num_folds
            if not given_up:
                means[trial] = float(scores.mean())
    winner = max(means, key=lambda trial: means[trial])
    return winner, means[winner], cost


WAYS: dict[str, tuple[int, Callable[[np.ndarray, Random], Result]]] = {
    "successive halving, 12 settings": (12, halving),
    "successive halving, 16 settings": (16, halving),
    "median pruner, 16 settings, 2 folds": (16, median_pruner),
    "2 scores each, 16 settings": (16, lambda quality, random: same_for_all(quality, random, 2)),
    "1 score each, 32 settings": (32, lambda quality, random: same_for_all(quality, random, 1)),
}


def simulate(num_trials: int, way: Callable[[np.ndarray, Random], Result], spread: float, num_searches: int) -> Sequence[float]:
    """Return the mean cost, share of searches that find the best, mean true quality of the winner, mean overstatement of its score."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(num_searches):
        quality = np.concatenate([[0.0], random.normal(0.0, spread, num_trials - 1)])
        winner, score, cost = way(quality, random)
        rows.append((cost, winner == int(np.argmax(quality)), quality[winner], score - quality[winner]))
    return [float(mean) for mean in np.mean(np.array(rows, dtype=float), axis=0)]


def main() -> None:
    """Print a row for each method and spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=4000)
    num_searches = parser.parse_args().searches
    print(f"{'sd of settings':>14}  {'way':36} {'scores':>6} {'best found':>10} {'quality':>8} {'overstated':>10}")
    for spread in SPREADS:
        for name, (num_trials, way) in WAYS.items():
            cost, best, quality, overstated = simulate(num_trials, way, spread, num_searches)
            print(f"{spread:14.1f}  {name:36} {cost:6.1f} {best:10.2f} {quality:8.2f} {overstated:10.2f}")


if __name__ == "__main__":
    main()
