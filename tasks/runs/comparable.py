"""Select runs for one mean or paired difference: same data, same settings, one run per seed.

Every mean, interval and comparison of runs takes its values from `scores_by_seed`; `select` chooses the runs.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dml_core.config import parse
from dml_core.data.store.info import INFO_FILE, read_info
from dml_core.errors import ConfigError, EvaluationError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.files import json_sha256
from dml_core.training.config import TrainingConfig
from tasks.environment import Project
from tasks.runs.params.comparison import runnable_runs
from tasks.runs.specs import Params, RunSpec

# Settings that do not change the results of the last epoch's weights, and those of where a score is computed.
NEUTRAL_TRAINING = {"checkpoint_every_epochs"}
KEEPING = {"keep_epochs", "keep_every_epochs"}
NEUTRAL_EVALUATION = {"device", "max_block_bytes"}
# Settings that were added after 30 November 2026, as "training.optimiser.nesterov", with the value that has no effect. With it they are
# left out of hashes, so that those recorded before, in MLflow and in accepted references, stay those of today's settings.
ADDED: dict[str, Any] = {}
FORMER = "measured with former settings; no run has the present ones"
T = TypeVar("T")
Place = TypeVar("Place")


def settings_identity(
    training: Mapping[str, Any], evaluation: Mapping[str, Any], digest: str | None, measurements: Mapping[str, Any]
) -> str:
    """Return a hash of everything that runs of one mean share: all settings without the seed, and the digest.

    Args:
        training, evaluation: as in a `RunSpec`, as plain values. A missing setting has its default, so settings recorded before an option
            existed equal today's with its default.
        digest: digest of the dataset's content; None if not recorded.
        measurements: name -> options; without any, the hash is that of versions that did not know them.
    """
    try:
        trained = parse(TrainingConfig, dict(training), "training").model_dump(mode="json")
        scored = parse(EvaluationConfig, dict(evaluation), "evaluation").model_dump(mode="json")
    except ConfigError:
        trained, scored = dict(training), dict(evaluation)  # settings of another version match no run of today
    if not scored.get("clustering", True):
        scored.pop("kmeans", None)  # k-means is not run
    trained, scored = without_added("training", trained), without_added("evaluation", scored)
    left_out = NEUTRAL_TRAINING | (KEEPING if scored.get("epoch") == "last" else set())
    parts = [
        {name: value for name, value in trained.items() if name not in left_out},
        {name: value for name, value in scored.items() if name not in NEUTRAL_EVALUATION},
        digest,
        *([measurements] if measurements else []),
    ]
    return json_sha256(parts)[:32]


def without_added(place: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those of `ADDED` that have the value named there."""
    names = {name: f"{place}.{name}" for name, value in settings.items() if value != ADDED.get(f"{place}.{name}", ...)}
    return {name: without_added(at, settings[name]) if isinstance(settings[name], dict) else settings[name] for name, at in names.items()}


def spec_settings(spec: RunSpec, digest: str | None) -> str:
    """Return the settings identity of a run on a dataset with this digest."""
    training, evaluation = spec.training.model_dump(mode="json"), spec.evaluation.model_dump(mode="json")
    return settings_identity(training, evaluation, digest, spec.measurements)


def scores_by_seed(values: Iterable[tuple[str, int, float]]) -> dict[str, dict[int, float]]:
    """Return system -> seed -> value from (system, seed, value), in the order given.

    Raises:
        EvaluationError: two values have the same system and seed; counted twice they would look like independent runs.
    """
    scores: dict[str, dict[int, float]] = {}
    for system, seed, value in values:
        by_seed = scores.setdefault(system, {})
        if seed in by_seed:
            raise EvaluationError(f"{system} has two results for seed {seed}; only one run per seed can be averaged")
        by_seed[seed] = value
    return scores


@dataclass(frozen=True)
class Facts:
    """Facts that decide whether a run may be averaged with others; `settings` is a `settings_identity`, None if not recorded."""

    dataset: str
    system: str
    seed: int
    digest: str | None
    settings: str | None


@dataclass(frozen=True)
class Today:
    """Present datasets and settings, with which runs are compared.

    Attributes:
        digests: dataset -> digest; datasets that are not prepared here are missing.
        settings: (dataset, system) -> settings identity.
        is_one_protocol: omit runs with other settings than `settings` even if a system has no others, since its systems are compared under
            one protocol.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[tuple[str, str], str] = field(default_factory=dict)
    is_one_protocol: bool = False


UNKNOWN = Today()


def present_digest(project: Project, dataset: str) -> str | None:
    """Return the digest of a dataset as prepared here; None if it is not prepared.

    Raises:
        DataError: the prepared data are damaged.
    """
    folder = project.packed(dataset)
    return read_info(folder).fingerprint if os.path.lexists(folder / INFO_FILE) else None


def standing_today(params: Params, dataset: str, digest: str | None, overrides: Sequence[str] = ()) -> Today:
    """Return the present of the standing comparison on one dataset; variants with unknown settings (not tuned yet) are missing."""
    runs = runnable_runs(params, dataset, (0,), overrides)
    settings = {(dataset, spec.variant): spec_settings(spec, digest) for spec in runs}
    return Today({} if digest is None else {dataset: digest}, settings, is_one_protocol=True)


def select(runs: Sequence[T], facts: Callable[[T], Facts], today: Today = UNKNOWN) -> tuple[tuple[T, ...], tuple[str, ...]]:
    """Select the runs on each dataset's present content and with each system's present settings.

    Returns them, which may be averaged by system and paired by seed, and a line for each system's omitted runs and for each system whose
    selected runs have former settings.

    If the present content is unknown, the content of most runs is used; if no run of a system has its present settings, the settings of
    most of its runs are used and reported (but see `Today.is_one_protocol`). Ties go to the first.

    The runs may be of any systems and datasets.
    """
    described = [(run, facts(run)) for run in runs]
    contents = occurrences((fact.dataset, fact.digest) for _, fact in described)
    digests = {dataset: today.digests.get(dataset, commonest(counts)) for dataset, counts in contents.items()}
    on_present = [fact for _, fact in described if fact.digest == digests[fact.dataset]]
    settings = {}
    for place, counts in occurrences(((fact.dataset, fact.system), fact.settings) for fact in on_present).items():
        present = today.settings.get(place, "")  # no run has these: unknown settings are not those that were not recorded
        is_fixed = present in counts or (today.is_one_protocol and today.settings)
        settings[place] = present if is_fixed else commonest(counts)
    selected = []
    reported = defaultdict[tuple[str, str, str], list[int]](list)
    for run, fact in described:
        place = fact.dataset, fact.system
        why = _why_not(fact, digests[fact.dataset], settings.get(place))
        if why is None:
            selected.append(run)
            why = FORMER if fact.settings != today.settings.get(place, fact.settings) else None
        if why is not None:
            reported[(*place, why)].append(fact.seed)
    return tuple(selected), tuple(_line(*place, seeds) for place, seeds in reported.items())


def occurrences(values: Iterable[tuple[Place, str | None]]) -> dict[Place, Counter[str | None]]:
    """Return place -> how often each value occurs there, as settings or the digest of a dataset."""
    counts = defaultdict[Place, Counter[str | None]](Counter)
    for place, value in values:
        counts[place][value] += 1
    return counts


def commonest(counts: Counter[str | None]) -> str | None:
    """Return the most frequent value; of equals the first, and None of none."""
    return max(counts, key=counts.__getitem__, default=None)


def _why_not(fact: Facts, digest: str | None, settings: str | None) -> str | None:
    """Return why a run is omitted; None if it is selected."""
    if fact.digest != digest:
        return "measured on data that was not recorded" if fact.digest is None else "measured on other data than the present"
    return None if fact.settings == settings else "measured with other settings"


def _line(dataset: str, system: str, why: str, seeds: Collection[int]) -> str:
    return f"{'shown' if why == FORMER else 'left out'}: {system} on {dataset}, {named_seeds(seeds)}: {why}"


def named_seeds(seeds: Collection[int]) -> str:
    """Return `seed 0`, or `seeds 0, 2`."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, sorted(seeds)))}"
