"""Settings found by a search (`dml tune`), as files: `flows/tables/tuned/<paper>/<table>/<row>@<dataset>.yaml`.

A file has the settings that override the row's own, and their origin. Runs with it are the row's variant `tuned`.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from dml_core.config import Config, parse, read_yaml
from dml_core.errors import ConfigError
from dml_core.files import write_errors
from dml_core.search_space import Search
from tasks.files import write_whole
from tasks.runs import protocols
from tasks.wording import counted
from tasks.yaml_text import yaml_text

TUNED = "tuned"  # name of the variant and of the folder
STANDING = "project/standing"  # name of the standing comparison's table


class Tried(Config):
    """One trial: changes to the row's own settings by dotted name, and its score on each pair of fold and seed, or why it failed."""

    params: dict[str, Any]
    scores: tuple[float, ...] = ()
    failed: str | None = None


class ConfirmedGain(Config):
    """Scores of own settings and winner on the same fresh pairs of fold and seed; `half_width` is half of the gain's 95 % interval."""

    own: tuple[float, ...]
    winner: tuple[float, ...]
    gain: float
    half_width: float


class TunedFile(Config):
    """Result of a search.

    Attributes:
        table, row, dataset: what was tuned; the dataset as the table's columns name it.
        training: changes to the row's settings; none if the winner's gain was not confirmed.
        trial: the winner's number; 0 has the row's own settings.
        score: its mean metric over its scored pairs of fold and seed; own_score: that of the row's own settings over theirs, often fewer.
        confirmation: winner and own settings on fresh pairs; None if the own settings won, and for searches without confirmation.
        failed: which of the two could not be trained on the fresh pairs, and why.
        metric, folds, seed: of the search.
        num_trials: number of settings tried; tried: each of them, by number (missing if the search kept no list).
        requested_trials: number requested, without those of extended ranges; None for files made before it was recorded.
        space: the searched ranges, by dotted name.
        fingerprint: fingerprint of the packed training images, the only images that the search could read.
        searched_on: hash of the row's own settings and of the dataset (`tasks.tables.runs.searched_on`); None if it was not recorded.
        sampler: method that proposed and stopped trials.
        commit: git commit of the code that searched; dirty: whether it had changes.
        study: the search's identity.
    """

    table: str
    row: str
    dataset: str
    training: dict[str, Any]
    trial: int = Field(ge=0)
    score: float
    own_score: float
    confirmation: ConfirmedGain | None = None
    failed: str | None = None
    metric: str
    folds: int = Field(ge=2)
    seed: int = Field(ge=0)
    num_trials: int = Field(ge=1)
    requested_trials: int | None = None
    tried: tuple[Tried, ...] = ()
    space: dict[str, Search]
    fingerprint: str
    searched_on: str | None = None
    sampler: str
    commit: str | None
    dirty: bool = False
    study: str

    @property
    def command(self) -> str:
        """Command that makes the file again."""
        trials = "" if self.requested_trials is None else f" --trials {self.requested_trials}"
        return f"{tune_command(self.table, self.row, self.dataset)}{trials} --folds {self.folds} --seed {self.seed} --metric {self.metric}"

    @property
    def says(self) -> str:
        """Origin of the settings, in one line."""
        at = f", commit {self.commit[:10]}{' with changes' if self.dirty else ''}" if self.commit else ""
        search = f"dml tune, {self.num_trials} trials, seed {self.seed}{at}"
        gain = self.confirmation
        if gain is None:
            if self.trial == 0:
                return f"{search}: no trial was better than the row's own settings"
            scores = ((self.score, self.trial), (self.own_score, 0))
            winner, own = (f"{100 * score:.1f}{self._pairs_of(trial)}" for score, trial in scores)
            why = f": {self.failed}" if self.failed else ""
            return f"{search}: trial {self.trial}, {self.metric} {winner}, own settings {own}; not confirmed{why}"
        result = "trial" if self.training else "the row's own settings stay, trial"
        return (
            f"{search}: {result} {self.trial} gains {100 * gain.gain:+.1f} ± {100 * gain.half_width:.1f} {self.metric} "
            f"on held-out training classes, {len(gain.own)} fresh pairs of fold and seed"
        )

    def _pairs_of(self, trial: int) -> str:
        """Return over how many pairs of fold and seed a trial was scored, in words; nothing if the search kept no list."""
        return f" over {counted(len(self.tried[trial].scores), 'pair')} of fold and seed" if self.tried else ""


def tuned_path(table: str, row: str, dataset: str) -> Path:
    """Return the path of a search's file."""
    return protocols.TABLES / TUNED / table / f"{row}@{dataset}.yaml"


def write_tuned(tuned: TunedFile) -> Path:
    """Write the result of a search and return its path.

    Raises:
        StoreError: the tables' folder cannot be written.
    """
    path = tuned_path(tuned.table, tuned.row, tuned.dataset)
    title = f"# Made by `{tuned.command}`: settings that override the row's in its variant 'tuned'.\n"
    title += "# score and own_score are means over different pairs of fold and seed (tried); confirmation compares the same pairs.\n"
    values = tuned.model_dump(mode="json", exclude_defaults=True)  # None can be a setting
    values["space"] = {name: search.model_dump(mode="json", exclude_defaults=True) for name, search in tuned.space.items()}
    with write_errors(f"{path}:", "run dml where flows/tables is writable"):
        write_whole(path, title + yaml_text(values, width=140, default_flow_style=None))
    return path


def read_before(table: str, row: str, dataset: str) -> TunedFile | None:
    """Return the result of the row's earlier search, which another search may replace; None if there is none.

    Raises:
        ConfigError: there is a file that cannot be read, as one of a newer version or with marks of a merge.
    """
    if not tuned_path(table, row, dataset).is_file():
        return None
    try:
        return read_tuned(table, row, dataset)
    except ConfigError as error:
        raise ConfigError(f"{error}; correct the file or move it away: a search would replace it") from None


def confirmed_before(found: TunedFile) -> TunedFile | None:
    """Return the result of `read_before` if that search confirmed its settings and `found` confirmed none; None otherwise."""
    before = read_before(found.table, found.row, found.dataset)
    return before if before is not None and before.training and not found.training else None


def is_kept(before: TunedFile, found: TunedFile) -> bool:
    """Return whether the file of `confirmed_before` stays: another command made it, and it records the same images and own settings."""
    is_same = before.searched_on is not None and before.searched_on == found.searched_on and before.fingerprint == found.fingerprint
    return is_same and before.command != found.command


def read_tuned(table: str, row: str, dataset: str) -> TunedFile:
    """Read the result of a search.

    Raises:
        ConfigError: there is no such file (the error names the command that makes it), or it is damaged or belongs to another row.
    """
    path = tuned_path(table, row, dataset)
    if not path.is_file():
        raise ConfigError(f"{table}/{row} is not tuned on {dataset}; run: {tune_command(table, row, dataset)}")
    where = f"{TUNED}/{table}/{path.name}"
    tuned = parse(TunedFile, read_yaml(path), where)
    if (tuned.table, tuned.row, tuned.dataset) != (table, row, dataset):
        raise ConfigError(
            f"{where}: is for {tuned.table}/{tuned.row} on {tuned.dataset}; move it away, then run: {tune_command(table, row, dataset)}"
        )
    return tuned


def tune_command(table: str, row: str, dataset: str) -> str:
    """Return the command that makes a missing file, with the default options."""
    return f"dml tune {table}/{row} --dataset {dataset}"
