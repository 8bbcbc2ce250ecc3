"""`--seeds auto` in a flow: rounds of runs on the same workers; a comparison gets more seeds until its differences are precise enough."""

from collections.abc import Callable, Sequence

from dml_core.evaluation.statistics.comparing import is_share_of_queries, tested_on
from flows.outcomes import Failure, Outcome
from tasks.runs.comparable import scores_by_seed
from tasks.runs.specs import RunSpec
from tasks.tables.seeds_auto import FIRST_SEEDS, Resolve, next_seeds, widest

Looked = Callable[[RunSpec], tuple[str, str | None] | None]
Runner = Callable[[Sequence[RunSpec]], tuple[list[Outcome], list[Failure]]]


def run_until_resolved(
    runs: Sequence[RunSpec], resolve: Resolve, looked_at: Looked, run: Runner, say: Callable[[str], None], fail_fast: bool = False
) -> tuple[list[Outcome], list[Failure]]:
    """Run with the first seeds, then with more while differences to the reference are too imprecise; return all runs, in order.

    A system with a failed run gets no more seeds, and does not delay the others.

    Args:
        runs: with one seed each, whose value does not matter.
        resolve: required precision, and the maximum number of seeds.
        looked_at: returns for a run's comparison the metric and the reference (None: the best), or None if there is no metric.
        run: runs specs, as `flows.chain.run_chains` does.
        say: reports progress.
        fail_fast: end with the round in which a run fails.
    """
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    counts = {spec.comparison: 0 for spec in runs}
    wanted = dict.fromkeys(counts, min(FIRST_SEEDS, resolve.most))
    while wanted != counts:
        failed = {(failure.spec.comparison, failure.spec.label) for failure in failures}
        batch = [
            spec.model_copy(update={"seed": seed})
            for spec in runs
            if (spec.comparison, spec.label) not in failed
            for seed in range(counts[spec.comparison], wanted[spec.comparison])
        ]
        if not batch:
            break
        ran, did_not = run(batch)
        outcomes, failures, counts = [*outcomes, *ran], [*failures, *did_not], wanted
        if failures and fail_fast:
            break
        wanted = {title: _next(title, counts[title], outcomes, failures, resolve, looked_at, say) for title in counts}
    return outcomes, failures


def _next(
    title: str,
    num_seeds: int,
    outcomes: Sequence[Outcome],
    failures: Sequence[Failure],
    resolve: Resolve,
    looked_at: Looked,
    say: Callable[[str], None],
) -> int:
    """Return the number of seeds a comparison needs next; its current number if that is enough."""
    failed = {failure.spec.label for failure in failures if failure.spec.comparison == title}
    own = [outcome for outcome in outcomes if outcome.spec.comparison == title and outcome.spec.label not in failed]
    looked = looked_at(own[0].spec) if own else None
    if looked is None:
        return num_seeds
    metric, reference = looked
    measured = [one for one in own if metric in one.scores.metrics]
    scores = scores_by_seed((one.spec.label, one.spec.seed, 100 * one.scores.metrics[metric]) for one in measured)
    tested = tested_on(measured[0].scores.metrics)["num_queries"] if measured and is_share_of_queries(metric) else None
    found = widest(scores, resolve.points, reference, tested)
    wanted = next_seeds(found, num_seeds, resolve)
    if found is None:
        say(f"{title}: {num_seeds} seeds; fewer than two systems to compare")
        return num_seeds
    said = (
        f"{title}: {num_seeds} seeds; the least precise difference is {found.system} - {found.reference}, ± {found.half_width:.1f} points"
    )
    if wanted > num_seeds:
        say(f"{said}; continuing with {wanted} seeds")
    elif found.half_width > resolve.points:
        say(f"{said}; more than {resolve.points:g}, but --max-seeds is reached")
    else:
        say(f"{said}, within {resolve.points:g}")
    return wanted
