"""Costs on a table's page: sums over runs and steps, predicted beside actual work."""

from tasks.plans.prices import Prices
from tasks.reports.table_costs import cost_rows
from tasks.runs.costs import Cost
from tasks.tables.file import load_table
from tasks.tables.result import MeasuredRun, TableResult

NAME = "softtriple/table1"


def run(seed: int, **costs: Cost) -> MeasuredRun:
    place = {"row": "softtriple", "variant": "as_published", "dataset": "cub200", "seed": seed, "project_dataset": "cub200"}
    return MeasuredRun(**place, identity="i", scores={}, figures="", training={}, evaluation={}, costs=costs)


def test_costs_are_summed_and_predictions_stand_beside_the_work() -> None:
    train = Cost(wall_seconds=50, work_seconds=40, predicted_seconds=44, cpu_seconds=3600, lost_seconds=5, peak_memory_bytes=2_000_000_000)
    evaluate = Cost(wall_seconds=9, work_seconds=9, cpu_seconds=3600, peak_memory_bytes=1_000_000_000)
    result = TableResult(name=NAME, runs=(run(0, train=train, evaluate=evaluate), run(1, train=train), run(2)))
    header, row = cost_rows(load_table(NAME), result, Prices(currency="EUR", cpu_hour=2))
    shown = dict(zip(header, row, strict=True))
    assert (shown["runs"], shown["wall"], shown["lost"]) == ("2", "2 min", "10 s")
    assert (shown["predicted work"], shown["work"]) == ("88 s", "80 s")
    assert (shown["CPU hours"], shown["peak memory"], shown["energy"], shown["money"]) == ("3", "2.00 GB", "-", "EUR 6.00")


def test_runs_without_costs_have_no_section_and_unknown_predictions_are_no_sum() -> None:
    assert cost_rows(load_table(NAME), TableResult(name=NAME, runs=(run(0),))) == []
    runs = (run(0, train=Cost(work_seconds=3, predicted_seconds=3)), run(1, train=Cost(work_seconds=3)))
    header, row = cost_rows(load_table(NAME), TableResult(name=NAME, runs=runs))
    assert dict(zip(header, row, strict=True))["predicted work"] == "-"


def test_a_training_of_which_two_epochs_are_scored_or_that_two_rows_show_counts_once_in_the_sum() -> None:
    train, last, oracle = (Cost(wall_seconds=seconds, cpu_seconds=seconds) for seconds in (36000, 600, 660))
    runs = [
        run(0, train=train, evaluate=last),
        run(0, train=train, evaluate=oracle).model_copy(update={"epoch": "oracle", "identity": "o"}),
        run(0, train=train, evaluate=last).model_copy(update={"row": "npairs"}),
        run(1, train=train, evaluate=last),
    ]
    table = load_table(NAME)
    header, *lines, total = cost_rows(table, TableResult(name=NAME, runs=tuple(runs)))
    assert [line[header.index("runs")] for line in lines] == ["1", "2", "1"], "npairs is first in the table"
    shown = dict(zip(header, total, strict=True))
    assert (shown["runs"], shown["wall"], shown["CPU hours"]) == ("2", "20 h 31 min", "21")


def test_large_costs_are_whole_numbers_without_an_exponent() -> None:
    """A week on eight GPUs: 1e+03 hours would hide that these are 1,344."""
    train = Cost(gpu_seconds=1344 * 3600, cpu_seconds=99.7 * 3600, moved_bytes=104_000_000_000, energy_joules=0.018 * 3.6e6)
    header, row = cost_rows(load_table(NAME), TableResult(name=NAME, runs=(run(0, train=train),)))
    shown = dict(zip(header, row, strict=True))
    assert [shown[name] for name in ("GPU hours", "CPU hours", "moved", "energy")] == ["1,344", "100", "104 GB", "0.018 kWh"]
