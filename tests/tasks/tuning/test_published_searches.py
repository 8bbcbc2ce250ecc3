"""Every published search (`flows/tables/tuned`) is made again by its command: with the recorded scores, the same trials and winner.

Another version of Optuna may propose other settings; then `dml tune` has to make the files again."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dml_core.config import parse, read_yaml
from tasks.runs.params.file import load_params
from tasks.runs.tuned import TunedFile
from tasks.tuning.halving import NUM_SEARCH_PAIRS, search
from tasks.tuning.proposals import Trial
from tasks.tuning.search import plan_searches
from tests.conftest import ROOT

FILES = sorted((ROOT / "flows/tables/tuned").rglob("*.yaml"))
NUM_TRIALS = {"project/standing": 16, "project/glyphs": 8}  # of `--trials`, for files that do not have it


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_published_search_is_made_again(path: Path) -> None:
    file = parse(TunedFile, read_yaml(path), path.name)
    (planned,) = plan_searches(
        load_params(ROOT / "params.yaml"), f"{file.table}/{file.row}", (file.dataset,), file.folds, file.seed, file.metric
    )

    def score(trials: Sequence[Trial], pairs: range) -> list[Trial]:
        if pairs.start == NUM_SEARCH_PAIRS:
            assert file.confirmation is not None
            fresh = file.confirmation.own, file.confirmation.winner
            return [replace(trial, scores=scores) for trial, scores in zip(trials, fresh, strict=True)]
        recorded = [file.tried[trial.number].scores[pairs.start : pairs.stop] for trial in trials]
        return [replace(trial, scores=trial.scores + scores) for trial, scores in zip(trials, recorded, strict=True)]

    num_trials = file.requested_trials or NUM_TRIALS[file.table]
    result = search(planned.space, planned.guesses, num_trials, planned.draw, planned.fits, score)
    assert [planned.changes(trial.params) for trial in result.trials] == [trial.params for trial in file.tried]
    assert (result.winner.number, result.confirmation) == (file.trial, file.confirmation)
    assert result.changes_settings == bool(file.training)
