"""The committed receipt is of the committed scores and parameters, so that `dml verify --receipt` compares with what the pages show."""

import csv

import pytest

from tasks.runs.params.file import load_params
from tasks.watch.evidence import settings_hash
from tasks.watch.receipts import RECEIPTS, read_receipt
from tasks.watch.records import Receipt
from tasks.watch.storage import protocol_of, rows_today
from tests.conftest import ROOT

ADDED = "a new setting that has no effect at its default belongs in ADDED of tasks/runs/comparable.py; otherwise"
RENEW = "renew it: dml reproduce --dataset synthetic, dml verify synthetic, dml receipt synthetic -o results/receipts/synthetic.json"


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    return read_receipt(ROOT / RECEIPTS / "synthetic.json")


def test_its_scores_are_the_committed_ones(receipt: Receipt) -> None:
    with (ROOT / "results/synthetic/scores.csv").open() as file:
        committed = {
            (row["variant"], int(column.removeprefix("seed_")), row["metric"]): value
            for row in csv.DictReader(file)
            for column, value in row.items()
            if column.startswith("seed_")
        }
    received = {
        (run.row.removeprefix("synthetic/"), run.seed, metric): f"{value:.6f}"
        for run in receipt.evidence
        for metric, value in run.scores.items()
    }
    assert {run[:2] for run in received} == {run[:2] for run in committed}, RENEW
    assert {run: value for run, value in received.items() if run in committed and committed[run] != value} == {}, RENEW
    assert {metric for _, _, metric in committed} <= {metric for _, _, metric in received}


def test_its_settings_are_those_of_the_parameters(receipt: Receipt) -> None:
    params = load_params(ROOT / "params.yaml")
    today = {row: settings_hash(spec) for row, spec in rows_today(params, "synthetic").items()}
    assert {run.row: run.settings for run in receipt.evidence}.items() <= today.items(), f"{ADDED} {RENEW}"
    assert receipt.protocol == protocol_of(params, "synthetic"), RENEW
