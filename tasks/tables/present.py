"""Present state of a table's runs: content of the prepared datasets, and settings in its file or params.yaml."""

from contextlib import suppress

from dml_core.config import parse
from dml_core.epochs import EPOCHS
from dml_core.errors import ConfigError, DataError
from dml_core.models.backbones.published import PUBLISHED
from tasks.environment import Project
from tasks.runs.comparable import Today, commonest, occurrences, present_digest, spec_settings
from tasks.runs.identity import step_identities
from tasks.runs.params.comparison import comparison_runs, row_name
from tasks.runs.protocols import COMMON
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import Params, RunSpec
from tasks.runs.tuned import STANDING
from tasks.tables.choice import Choice, Track
from tasks.tables.file import TableFile
from tasks.tables.result import MeasuredRun, TableResult, TableRun
from tasks.tables.runs import named_dataset, runs_of


def table_today(project: Project, params: Params, name: str, table: TableFile, result: TableResult) -> Today:
    """Return digests and settings of the measured datasets and lines, without those unprepared, damaged or no longer in the file.

    Settings on a dataset that is not prepared are those on the content of most of its runs, which `select` uses then.
    """
    contents = occurrences((run.dataset, run.digest) for run in result.runs)
    digests = {dataset: digest for dataset in contents if (digest := _digest(project, params, name, table, dataset)) is not None}
    settings = {}
    for run in {(run.dataset, run.label): run for run in result.runs}.values():
        spec = spec_today(params, name, table, run)
        if spec is not None:
            digest = digests.get(run.dataset) or commonest(contents[run.dataset])
            settings[run.dataset, run.label] = spec_settings(spec, digest)
    return Today(digests, settings, is_one_protocol=name == STANDING)


def has_present_settings(params: Params, name: str, table: TableFile, run: MeasuredRun, digest: str | None) -> bool:
    """Return whether a run was measured on content with this digest and with the settings of today's file in its place."""
    spec = spec_today(params, name, table, run)
    return spec is not None and run.facts.settings == spec_settings(spec, digest)


def is_of_other_code(run: MeasuredRun) -> bool:
    """Return whether today's code, with the run's own settings and data, has another identity than the run.

    False also if that is unknown, as the run starts from a converted file of weights that is not on this machine.
    """
    if run.digest is None:
        return True  # the code of that time did not record it
    values = run.model_dump(include={"variant", "seed", "training", "evaluation", "measurements"}) | {"dataset": run.project_dataset}
    record = DatasetRecord(name=run.project_dataset, folder="", digest=run.digest, counts={}, source="")
    try:
        spec = parse(RunSpec, values, "run")
        backbone = spec.training.model.backbone
        start = PUBLISHED.get(backbone.name) if backbone.weights == "imagenet" else None
        is_unknown = start is not None and start.sha256 is None and start.kept_sha256 is None
        return not is_unknown and step_identities(spec, record)["evaluate"] != run.identity
    except ConfigError:
        return True  # today's code does not have these settings


def _digest(project: Project, params: Params, name: str, table: TableFile, dataset: str) -> str | None:
    try:
        own = dataset if name == STANDING else named_dataset(params, dataset, table.dataset_options(dataset))
        return None if own is None else present_digest(project, own)
    except (ConfigError, DataError):
        return None  # what prepares or reads the dataset reports it; the measured values do not depend on it


def spec_today(params: Params, name: str, table: TableFile, run: TableRun) -> RunSpec | None:
    """Return the run in a measured or failed run's place with the present settings, of the table's file or params.yaml.

    It keeps the epochs that the measured run kept, too. None if the settings no longer have the row, its variant or its dataset, or if the
    row is not tuned.
    """
    track: Track = "common" if run.variant == COMMON else "paper"
    kept = run.training.get("keep_epochs", ()) if isinstance(run, MeasuredRun) else ()
    epochs = tuple(epoch for epoch in EPOCHS if epoch == run.epoch or epoch in kept)
    choice = Choice((run.row,), (run.dataset,), run.variant, track, (run.seed,), epochs=epochs)
    with suppress(ConfigError):
        if name == STANDING:
            variants = [variant for variant in params.comparison.variants if row_name(variant) == run.row]
            return comparison_runs(params, run.dataset, variants, (run.seed,))[0] if variants else None
        runs = runs_of(name, table, choice).get(run.dataset, ())
        return next((spec for spec in runs if spec.evaluation.epoch == run.epoch), None)
    return None
