"""Read, extend, export and import the results of tables. A damaged result is set aside and rebuilt from the store, except by `dml gc`."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

from dml_core.config import check_known, located
from dml_core.epochs import EPOCHS
from dml_core.errors import ConfigError, DataError, DmlError
from tasks.data import dataset_if_intact
from tasks.environment import Project
from tasks.files import check_output
from tasks.locks import alone
from tasks.plans.plan import LocalState
from tasks.runs.comparable import present_digest
from tasks.runs.costs import costs_of
from tasks.runs.finished import intact_record, run_identities
from tasks.runs.params.comparison import runnable_runs
from tasks.runs.params.file import load_params
from tasks.runs.protocols import COMMON
from tasks.runs.records import DatasetRecord, ScoreRecord, read_scores
from tasks.runs.specs import SEEDS, Params, RunSpec
from tasks.runs.tuned import STANDING, TUNED
from tasks.sealed import DamagedError, move_damaged, read_or_set_aside, read_sealed, write_sealed
from tasks.storage import open_store
from tasks.tables.choice import Choice
from tasks.tables.file import TableFile, load_table, standing_table
from tasks.tables.present import has_present_settings, is_of_other_code, spec_today, table_today
from tasks.tables.result import (
    FailedRun,
    MeasuredRun,
    Place,
    TableResult,
    facts_of,
    imported_path,
    imported_runs,
    read_result,
    result_path,
    save_result,
)
from tasks.tables.runs import named_dataset, runs_of_tables
from tasks.wording import counted

FIRST_SEEDS = 10
_IDENTITY = re.compile(r"[\w-]+")
_SEED = re.compile(rb'seed\\?": ?(\d{1,10})\b')
logger = logging.getLogger(__name__)


def load_result(project: Project, name: str) -> TableResult:
    """Return the measured runs of a table so far; an empty result if there are none.

    A damaged result is renamed and replaced by one rebuilt from the store's finished records; a warning is logged.

    Raises:
        NewerFormatError: a newer version of the program wrote it.
        StoreError: the result cannot be read, or the rebuilt one cannot be written.
    """
    try:
        return read_result(project, name)
    except DamagedError:
        with alone(_lock(project)):
            return _read_or_rebuild(project, name)


def add_runs(
    project: Project,
    name: str,
    runs: Sequence[MeasuredRun],
    failed: Sequence[FailedRun],
    made: str | None,
    reused: Collection[Place] = (),
) -> None:
    """Add measured and failed runs to a table's result; other processes may add to it at the same time.

    Args:
        made: git commit of the flow.
        reused: places of runs of which the flow ran no step: the same run in the result, if there is one, keeps its commit.

    Raises:
        NewerFormatError, StoreError: as in `load_result`, or the result cannot be written.
    """
    with alone(_lock(project)):
        result = _read_or_rebuild(project, name)
        commits = {(run.place, run.identity): run.commit for run in result.runs if not run.is_imported}
        runs = [
            run.model_copy(update={"commit": commits.get((run.place, run.identity), run.commit)}) if run.place in reused else run
            for run in runs
        ]
        save_result(project, result.updated(runs, failed, made))


def standing_seeds(project: Project, params: Params) -> dict[str, list[int]]:
    """Return dataset -> seeds of the standing comparison on it: those of params.yaml, then others that ran, as with `--seeds auto`.

    Raises:
        NewerFormatError, StoreError: as in `load_result`.
    """
    seeds = {dataset: dict.fromkeys(params.comparison.seeds) for dataset in params.comparison.datasets}
    for dataset, seed in sorted((run.dataset, run.seed) for run in load_result(project, STANDING).runs):
        if dataset in seeds:
            seeds[dataset][seed] = None
    return {dataset: [*of_dataset] for dataset, of_dataset in seeds.items()}


def runs_today(project: Project, params: Params, result: TableResult) -> Iterator[tuple[RunSpec, DatasetRecord]]:
    """Yield, for each measured or failed run of a result, the run with today's settings and its dataset; none on one that is not prepared.

    Raises:
        ConfigError: there is no such table.
    """
    table = standing_table(params) if result.name == STANDING else load_table(result.name)
    records: dict[str, DatasetRecord | None] = {}
    for run in (*result.runs, *result.failed):
        spec = spec_today(params, result.name, table, run)
        if spec is None:
            continue
        if run.dataset not in records:
            own = run.dataset if result.name == STANDING else named_dataset(params, run.dataset, table.dataset_options(run.dataset))
            records[run.dataset] = None if own is None else dataset_if_intact(project, own)
        if (record := records[run.dataset]) is not None:
            yield spec.model_copy(update={"dataset": record.name}), record


def export_result(project: Project, name: str, path: Path) -> TableResult:
    """Write the measured runs of a table to a file, from which another project imports them, and return them.

    Runs that an import refuses, since their row, variant or dataset is no longer in the table, are left out with a warning.

    Raises:
        ConfigError: the table is unknown, or has no measured runs, or `path` is a file that was not exported.
        NewerFormatError, StoreError: as in `load_result`, or the file cannot be written.
    """
    check_output(path, "application/json", b'{"format": ')
    table, result = load_table(name), load_result(project, name)
    known = []
    for run in result.runs:
        with suppress(ConfigError):
            _check_imported(table, run)
            known.append(run)
    if not known:
        raise ConfigError(f"{name}: nothing is measured; run it first: dml reproduce {name}")
    if len(known) < len(result.runs):
        others = counted(len(result.runs) - len(known), "run")
        logger.warning("%s: left out %s whose row, variant or dataset is no longer in the table", name, others)
    runs = tuple(run.model_copy(update={"is_imported": False}) for run in known)
    exported = result.model_copy(update={"runs": runs, "failed": ()})
    write_sealed(path, exported, "choose another file with -o, or free space")
    return exported


def import_result(project: Project, path: Path) -> str:
    """Add the runs that another project exported to this project's result of their table; return their number, in words.

    A run with the present data and settings replaces one that has others; where both or neither have them, one of today's code replaces one
    of other code. Otherwise runs measured here are kept, and those imported earlier are replaced. `tasks.runs.comparable.select` decides
    which runs means use.

    Raises:
        ConfigError: the file is missing, or a run of it has a table, row, variant or dataset that is unknown here, another folder than that
            of its evaluation, or a number that is not finite, or params.yaml is wrong; nothing was added.
        NewerFormatError, StoreError: the file is damaged or of a newer version, or as in `load_result`.
    """
    remedy = "write one with: dml tables export TABLE -o FILE"
    try:
        exported = read_sealed(path, TableResult)
    except DamagedError:
        raise DamagedError(f"{path}: damaged, or not exported by dml; {remedy}") from None
    if exported is None:
        raise ConfigError(f"{path}: no such file; {remedy}")
    params = load_params(project.params_file)
    with located(str(path)):
        table = load_table(exported.name)
        for run in exported.runs:
            _check_imported(table, run)
    with alone(_lock(project)):
        result = _read_or_rebuild(project, exported.name)
        here = {run.place for run in result.runs if not run.is_imported}
        added = _replacing(project, params, table, result, exported.runs)
        result = result.updated([run.model_copy(update={"is_imported": True}) for run in added], (), result.made or exported.made)
        _keep_imported(project, result, exported.runs)
        save_result(project, result)
    num_replaced = sum(run.place in here for run in added)
    num_kept = sum(run.place in here for run in exported.runs) - num_replaced
    num_skipped = len(exported.runs) - len(added) - num_kept
    says = [f"{exported.name}: {counted(len(added), 'run')} imported"]
    says += [f"{counted(num_replaced, 'outdated run')} measured here replaced"] * bool(num_replaced)
    says += [f"{counted(num_kept, 'run')} measured here kept"] * bool(num_kept)
    says += [f"{counted(num_skipped, 'run')} with other data, settings or code skipped, imported ones of today kept"] * bool(num_skipped)
    return "; ".join([*says, f"show them with: dml tables show {exported.name}"])


def _replacing(project: Project, params: Params, table: TableFile, result: TableResult, runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return those of another project's runs that take their place in a result, as `import_result` describes."""
    in_place = {run.place: run for run in result.runs}
    digests = table_today(project, params, result.name, table, result).digests

    def rank(run: MeasuredRun) -> tuple[bool, bool]:
        is_present = has_present_settings(params, result.name, table, run, digests.get(run.dataset, run.digest))
        return is_present, not is_of_other_code(run)

    def replaces(run: MeasuredRun) -> bool:
        other = in_place.get(run.place)
        if other is None:
            return True
        return rank(run) >= rank(other) if other.is_imported else rank(run) > rank(other)

    return [run for run in runs if replaces(run)]


def _keep_imported(project: Project, result: TableResult, runs: Sequence[MeasuredRun]) -> None:
    """Add imported runs to the copy of a table's imported ones, except what was measured here and comes back in another's file.

    Those in its result come last, as a later run in a place counts.
    """
    path = imported_path(project, result.name)
    before = read_or_set_aside(path, TableResult) or TableResult(name=result.name)
    in_place = {run.facts: run for run in result.runs if run.is_imported}
    in_result = {run.facts for run in result.runs}
    others = {run.facts: run.model_copy(update={"is_imported": True}) for run in (*before.runs, *runs)}
    kept = [run for facts, run in others.items() if facts not in in_result]
    write_sealed(path, before.model_copy(update={"runs": (*kept, *in_place.values())}))


def unmeasured_runs(project: Project, runs: Sequence[RunSpec]) -> tuple[list[RunSpec], dict[str, list[MeasuredRun]], list[str]]:
    """Return those of the tables' runs that were not imported with the present data and settings, and table -> imported runs of the others.

    The last are notes, a line for each dataset with imported runs that is not prepared: whether these have the same data is unknown. A
    damaged dataset counts as not prepared; whatever reads it names it.

    Raises:
        NewerFormatError, StoreError: as in `load_result`.
    """
    results = {name: load_result(project, name) for name in {str(spec.table) for spec in runs}}
    imported = {name: imported_runs(project, result) for name, result in results.items()}
    digests: dict[str, str | None] = dict.fromkeys(spec.dataset for spec in runs)
    for name in digests:
        with suppress(DataError):
            digests[name] = present_digest(project, name)
    remaining, reused, unprepared = list[RunSpec](), defaultdict[str, list[MeasuredRun]](list), dict[str, None]()
    for spec in runs:
        of_table = imported[str(spec.table)]
        facts = facts_of(spec, digests[spec.dataset]) if of_table else None
        if facts is not None and facts in of_table:
            reused[str(spec.table)].append(of_table[facts])
            continue
        remaining.append(spec)
        if facts is not None and facts.digest is None and facts.dataset in {other.dataset for other in of_table}:
            unprepared[spec.dataset] = None
    notes = [f"note: imported runs on {name} are reused only if it is prepared: dml data prepare {name}" for name in unprepared]
    return remaining, dict(reused), notes


def use_imported(project: Project, imported: Mapping[str, Sequence[MeasuredRun]]) -> None:
    """Put imported runs back into their tables' results, whose places others have taken, as on a branch with other settings or data."""
    for name, runs in imported.items():
        with alone(_lock(project)):
            result = _read_or_rebuild(project, name)
            in_place, reusable = {run.place: run for run in result.runs}, imported_runs(project, result)
            displaced = [run for run in runs if in_place.get(run.place) != run and run.facts in reusable]
            if displaced:
                save_result(project, result.updated(displaced, (), result.made))


def _check_imported(table: TableFile, run: MeasuredRun) -> None:
    """Check every name and number of a run from another project. Its folder is a path in the store, whose files are read and removed."""
    check_known("row", run.row, table.rows)
    check_known("variant", run.variant, (*table.rows[run.row].variants, TUNED, COMMON))
    check_known("dataset", run.dataset, table.datasets)
    if not _IDENTITY.fullmatch(run.identity) or run.figures != f"evaluate/{run.identity}":
        raise ConfigError(f"the run of {run.label}, seed {run.seed}, has the folder '{run.figures}'; expected evaluate/ and its identity")
    try:
        json.dumps(run.model_dump(), allow_nan=False, default=str)
    except ValueError:
        raise ConfigError(f"the run of {run.label}, seed {run.seed}, has a number that is not finite (NaN or infinite)") from None


def _lock(project: Project) -> Path:
    return project.state / "tables" / ".lock"


def _read_or_rebuild(project: Project, name: str) -> TableResult:
    """Return the result; a damaged one is set aside and rebuilt. The caller holds the lock."""
    try:
        return read_result(project, name)
    except DamagedError as error:
        aside = move_damaged(result_path(project, name))
        imported = read_or_set_aside(imported_path(project, name), TableResult) or TableResult(name=name)
        rebuilt = _rebuilt_runs(project, name, aside)
        result = imported.updated(rebuilt, (), None)
        if result.runs:
            save_result(project, result)
        runs = counted(len(rebuilt), "run")
        logger.warning("%s; kept as %s; rebuilt %s from the store; rerun dml reproduce to add the others", error, aside.name, runs)
        return result


# ---------------------------------------------------------------- rebuilding


def _rebuilt_runs(project: Project, name: str, damaged: Path) -> tuple[MeasuredRun, ...]:
    """Return the runs of a table that are finished in the store with the current settings and data; their code may be older.

    Of the damaged file only the seeds that it names are used, in addition to the first ten.
    """
    named = map(int, _SEED.findall(damaged.read_bytes())) if damaged.is_file() else ()
    seeds = {*range(FIRST_SEEDS), *(seed for seed in named if seed in SEEDS)}
    try:
        params = load_params(project.params_file)
        run_specs = list(_standing(project, params, seeds) if name == STANDING else _of_table(project, params, name, seeds))
    except DmlError:
        return ()  # the parameters or the table's file are wrong; the command that uses them reports it
    runs = (_measured(project, spec, record) for spec, record in run_specs)
    return tuple(run for run in runs if run is not None)


def _standing(project: Project, params: Params, seeds: set[int]) -> Iterator[tuple[RunSpec, DatasetRecord]]:
    for dataset in params.comparison.datasets:
        if (record := dataset_if_intact(project, dataset)) is not None:  # else no run of it has an identity
            for spec in runnable_runs(params, dataset, sorted({*seeds, *params.comparison.seeds})):
                yield spec, record


def _of_table(project: Project, params: Params, name: str, seeds: set[int]) -> Iterator[tuple[RunSpec, DatasetRecord]]:
    local, table = LocalState(project, params), load_table(name)
    specs: dict[tuple[str, str, int], RunSpec] = {}  # several choices name the same run
    for choice in _choices(table, seeds):
        try:
            requested, _ = runs_of_tables([name], choice)
        except DmlError:
            continue  # the row is only quoted, the variant is not tuned, or the protocol does not have the dataset
        for (_, dataset), of_dataset in requested.items():
            for spec in of_dataset:
                specs.setdefault((dataset, spec.label, spec.seed), spec)
    for (dataset, _, _), spec in specs.items():
        record = local.dataset(dataset, table)
        yield spec.model_copy(update={"dataset": record.name}), record


def _choices(table: TableFile, seeds: set[int]) -> Iterator[Choice]:
    """Yield the choices of one row and dataset that lead to every run of a table."""
    for (row, entry), dataset in product(table.rows.items(), table.datasets):
        plain = Choice((row,), (dataset,), seeds=tuple(sorted(seeds)))
        yield from (replace(plain, variant=variant) for variant in (*entry.variants, TUNED))
        yield replace(plain, track="common")
        yield replace(plain, epochs=EPOCHS)


def _measured(project: Project, spec: RunSpec, record: DatasetRecord) -> MeasuredRun | None:
    """Return a run as its flow adds it to the result, without the commit; None if its scores in the store are missing or damaged."""
    for run in run_identities(project.state, spec, record):
        trained, embedded = intact_record("train", run.trained), intact_record("embed", run.embedded)
        scored = intact_record("evaluate", run.scored)
        if not isinstance(scored, ScoreRecord) or not scored.is_made_from([trained, embedded]):
            continue
        try:
            scores = read_scores(scored, open_store(project).pull(scored.key))
        except DmlError:
            continue
        seconds = None if trained is None else trained.facts.get("seconds")
        costs = costs_of(filter(None, (trained, embedded, scored)))
        return MeasuredRun.of(spec, scores, record.digest, seconds, run.older_code, costs)
    return None
