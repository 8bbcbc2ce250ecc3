"""Check that the gain reported by `dml tune` is reproduced on further folds and seeds.

    .venv/bin/python benchmarks/tuned_gains.py [--table project/standing] [--dataset synthetic] [--pairs 5]

For every row of a table with a search on the dataset: the winner and the row's own settings are trained again on pairs of fold and seed
used by neither the search nor its confirmation. Prints the gain of the file and the gain on these pairs, each with half of its 95 %
interval (Student's t over paired differences), and whether they agree: whether their difference is at most the root of the sum of the
squares of both halves. A row whose own settings won has no gain to compare. Finished runs are reused, as in any search.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from prefect import flow

from dml_core.evaluation.statistics.paired import paired_difference
from flows.chain import STEPS_AT_ONCE, prepare
from flows.cli.session import open_project
from flows.services import Services
from flows.tune import Scores
from tasks.runs.params.file import load_params
from tasks.runs.tuned import TunedFile, read_tuned, tuned_path
from tasks.tables.file import load_table
from tasks.tuning.halving import CONFIRMATION_PAIRS, NUM_SEARCH_PAIRS
from tasks.tuning.proposals import Trial
from tasks.tuning.search import plan_searches
from tasks.tuning.training_rows import training_rows

FIRST_PAIR = NUM_SEARCH_PAIRS + CONFIRMATION_PAIRS


def line(file: TunedFile, own: Sequence[float], winner: Sequence[float]) -> str:
    """Return a row of the table, in per cent."""
    shown = file.confirmation
    assert shown is not None
    fresh = paired_difference([100 * value for value in winner], [100 * value for value in own])
    gain, half_width = 100 * shown.gain, 100 * shown.half_width
    agree = abs(fresh.mean - gain) <= (half_width**2 + fresh.half_width**2) ** 0.5
    result = "winner" if file.training else "own settings"
    cells = [file.row, f"{gain:+.1f} ± {half_width:.1f}", result, f"{fresh.mean:+.1f} ± {fresh.half_width:.1f}", "yes" if agree else "NO"]
    return f"| {' | '.join(cells)} |"


@flow(name="tuned gains", task_runner=STEPS_AT_ONCE)
def tuned_gains(table: str, dataset: str, num_pairs: int) -> None:
    """Train the pairs and print the table."""
    project = open_project()
    params = load_params(project.params_file)
    pairs = range(FIRST_PAIR, FIRST_PAIR + num_pairs)
    rows = [row for row in load_table(table).rows if tuned_path(table, row, dataset).is_file()]
    files = {row: read_tuned(table, row, dataset) for row in rows}
    print("| row | gain in the file | uses | gain on further pairs | agree |\n|---|---|---|---|---|", flush=True)
    with closing(Services(project, params.scale)) as services:
        for row, file in files.items():
            if file.confirmation is None:
                print(f"| {row} | none: no trial was better | own settings | | |", flush=True)
                continue
            (search,) = plan_searches(params, f"{table}/{row}", [dataset], file.folds, file.seed, file.metric)
            packed = Path(prepare(services, search.dataset).folder)
            scores = Scores(search.on(packed), training_rows(project, search.dataset, packed), services)
            trials = [Trial(0, search.own), Trial(file.trial, search.own | file.tried[file.trial].params)]
            own, winner = scores.add(trials, pairs)
            print(line(file, own.scores, winner.scores), flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="project/standing")
    parser.add_argument("--dataset", default="synthetic")
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    tuned_gains(given.table, given.dataset, given.pairs)


if __name__ == "__main__":
    main()
