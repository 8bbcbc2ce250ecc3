"""`--seeds auto` in a flow: rounds of runs on the same workers; a comparison gets more seeds until its differences are precise enough."""

from collections.abc import Callable, Sequence

from dml_core.evaluation.metric_info import metric_info
from dml_core.evaluation.statistics.comparing import tested_on
from flows.outcomes import Failure, Outcome
from tasks.runs.comparable import scores_by_seed
from tasks.runs.specs import RunSpec
from tasks.tables.seeds_auto import FIRST_SEEDS, Resolve, next_seeds, widest
from tasks.wording import significant

Compared = Callable[[RunSpec], tuple[str, str | None] | None]
Runner = Callable[[Sequence[RunSpec]], tuple[list[Outcome], list[Failure]]]


def run_until_resolved(
    runs: Sequence[RunSpec], resolve: Resolve, compared: Compared, run: Runner, say: Callable[[str], None], fail_fast: bool = False
) -> tuple[list[Outcome], list[Failure]]:
    """Run with the first seeds, then with more while differences to the reference are too imprecise; return all runs, in order.

    A system with a failed run gets no more seeds, and does not delay the others.

    Args:
        runs: with one seed each, whose value does not matter.
        resolve: required precision, and the maximum number of seeds.
        compared: returns the metric by which a run is compared and the reference (None: the best), or None if it is not compared.
        run: runs specs, as `flows.chain.run_chains` does.
        fail_fast: end with the round in which a run fails.
    """
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    counts = {spec.comparison: 0 for spec in runs}
    wanted = dict.fromkeys(counts, min(FIRST_SEEDS, resolve.most))
    systems = list(runs)
    while systems and wanted != counts:
        seeds = {title: range(counts[title], wanted[title]) for title in counts}
        ran, failed = run([spec.model_copy(update={"seed": seed}) for spec in systems for seed in seeds[spec.comparison]])
        outcomes, failures, counts = [*outcomes, *ran], [*failures, *failed], wanted
        if failures and fail_fast:
            break
        out = {(failure.spec.comparison, failure.spec.label) for failure in failures}
        systems = [spec for spec in systems if (spec.comparison, spec.label) not in out]
        measured: dict[str, list[Outcome]] = {title: [] for title in counts}
        for outcome in outcomes:
            if (outcome.spec.comparison, outcome.spec.label) not in out:
                measured[outcome.spec.comparison].append(outcome)
        judged = {title: _next_count(title, counts[title], measured[title], resolve, compared, say) for title in counts if seeds[title]}
        wanted = counts | judged
    return outcomes, failures


def _next_count(
    title: str, num_seeds: int, outcomes: Sequence[Outcome], resolve: Resolve, compared: Compared, say: Callable[[str], None]
) -> int:
    """Return the number of seeds that a comparison with these runs needs next; its current number if that is enough."""
    compared_by = [(outcome, by) for outcome in outcomes if (by := compared(outcome.spec)) is not None]
    if not compared_by:
        return num_seeds
    metric, reference = compared_by[0][1]
    measured = [outcome for outcome, _ in compared_by if metric in outcome.scores.metrics]
    scores = scores_by_seed((outcome.spec.label, outcome.spec.seed, 100 * outcome.scores.metrics[metric]) for outcome in measured)
    num_queries = tested_on(measured[0].scores.metrics)["num_queries"] if measured and metric_info(metric).is_share_of_queries else None
    least = widest(scores, resolve.points, reference, num_queries)
    if least is None:
        say(f"{title}: {num_seeds} seeds; fewer than two systems to compare")
        return num_seeds
    wanted = next_seeds(least, num_seeds, resolve)
    if wanted > num_seeds:
        result = f"; continuing with {wanted} seeds"
    elif least.half_width > resolve.points:
        result = f"; more than {resolve.points:g}, but --max-seeds is reached"
    else:
        result = f", within {resolve.points:g} among the requested systems"
    difference = f"{least.system} - {least.reference}, ± {significant(least.half_width, 3)} points"
    say(f"{title}: {num_seeds} seeds; the least precise difference is {difference}{result}")
    return wanted
