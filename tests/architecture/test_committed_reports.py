"""The committed reports of the standing comparison are what today's code writes of the committed scores.

Only `make results` writes them, from the store of all runs. `scores.csv` has every value of their text but the intervals over seeds and
classes, which are taken from the report itself. After a change of words `python -m tests.architecture.test_committed_reports` writes the
text again.
"""

import csv
import re
from pathlib import Path

import pytest

from tasks.reports import compare
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.records import MetricRecord
from tasks.runs.specs import comparison_title
from tests.conftest import ROOT

DATASETS = ("synthetic", "fashion-mnist")
TEXTS = (compare.REPORT_FILE, f"{compare.DIFFERENCES_FOLDER}/{compare.DIFFERENCES_FILE}")
OVER_CLASSES = re.compile(r"^\| (\S+) +\| [^|]* \| ([-+][\d.]+ ± [\d.]+) +\|$", re.MULTILINE)  # a row of three columns


def write_again(dataset: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Write the report of a dataset's committed scores into a folder."""
    with (ROOT / "results" / dataset / compare.SCORES_FILE).open() as file:
        rows = list(csv.DictReader(file))
    seeds = sorted(int(name.removeprefix("seed_")) for name in rows[0] if name.startswith("seed_"))
    params = load_params(ROOT / "params.yaml")
    runs = []
    for spec in comparison_runs(params, dataset, tuple(dict.fromkeys(row["variant"] for row in rows)), seeds):
        values = {row["metric"]: row[f"seed_{spec.seed}"] for row in rows if row["variant"] == spec.variant}
        metrics = {name: float(value) for name, value in values.items() if value}
        runs.append((spec, MetricRecord(metrics=metrics, step="evaluate", identity="", key="", files=())))
    over_classes = dict(OVER_CLASSES.findall((ROOT / "results" / dataset / TEXTS[1]).read_text()))
    patch.setattr(compare, "_over_classes", lambda *_: over_classes)
    patch.setattr(compare, "_draw_figures", lambda *_: (ROOT / "results" / dataset / compare.EPOCHS_FILE).is_file())
    patch.setattr("dml_core.figures.mean_ranks.plot_mean_ranks", lambda *_: None)
    compare.write_report(comparison_title(dataset, params.evaluation.role), runs, folder, reference=params.comparison.reference)


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_committed_report_is_what_today_s_code_writes_of_its_scores(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_again(dataset, tmp_path, monkeypatch)
    for text in TEXTS:
        assert (ROOT / "results" / dataset / text).read_text() == (tmp_path / text).read_text(), text


if __name__ == "__main__":
    import tempfile

    for name in DATASETS:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as context:
            write_again(name, Path(folder), context)
            for text in TEXTS:
                (ROOT / "results" / name / text).write_text((Path(folder) / text).read_text())
