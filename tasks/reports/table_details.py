"""Details of a row of a table's page: how its runs were trained, where they are stored, and their pictures."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dml_core.config import flatten
from dml_core.epochs import Epoch
from dml_core.errors import ConfigError, StoreError
from tasks.environment import num_cores
from tasks.reports.pictures import Picture, PictureCache, load_picture, picture_files
from tasks.runs.comparable import KEEPING
from tasks.runs.specs import Params, comparison_title, table_comparison
from tasks.runs.tuned import STANDING, TUNED, read_tuned
from tasks.storage import Store
from tasks.tables.file import Row, TableFile
from tasks.tables.present import has_present_settings, spec_today
from tasks.tables.result import MeasuredRun, TableResult
from tasks.tables.runs import row_protocol
from tasks.tracking.child_run import current_tags
from tasks.tracking.connection import tag_filter
from tasks.tracking.tags import Tag

LineKey = tuple[str, str, Epoch]
Difference = tuple[str, str, str]  # setting, value in the run, value in the other settings; "-" if missing


@dataclass(frozen=True)
class Details:
    """The runs of one line on one dataset, represented by the one with the lowest seed.

    Attributes:
        run: that run.
        comparison, label: the comparison's title in MLflow, and the runs' label there.
        protocol_variant: the protocol's variant with which it is compared: the line's, or the one that tuned settings change.
        from_protocol: differences from the protocol's training; None if the protocol does not have the variant.
        changed: differences from the run that the current file has in its place, if they may change its scores.
        tuned: origin of the tuned settings according to the current file, or that it is missing; None for other variants.
        settings: all settings, by dotted name.
        pictures: pictures of that run.
        unavailable: reason why they cannot be shown.
    """

    run: MeasuredRun
    comparison: str
    label: str
    protocol_variant: str
    from_protocol: tuple[Difference, ...] | None
    changed: tuple[Difference, ...]
    tuned: str | None
    settings: tuple[tuple[str, str], ...]
    pictures: tuple[Picture, ...]
    unavailable: str | None

    @property
    def search(self) -> str:
        """Search that finds the line's runs in MLflow."""
        return tag_filter(current_tags(self.comparison) | {Tag.VARIANT: self.label})


def line_details(
    params: Params, name: str, table: TableFile, result: TableResult, store: Store, encoded: PictureCache
) -> dict[LineKey, list[Details]]:
    """Return the details of every line of a table, by dataset; their pictures share the space of a page."""
    groups: dict[tuple[LineKey, str], list[MeasuredRun]] = {}
    for run in sorted(result.runs, key=lambda run: (run.dataset, run.seed)):
        if run.row in table.rows:
            groups.setdefault(((run.row, run.variant, run.epoch), run.dataset), []).append(run)
    pictures, unavailable = _pictures(store, {runs[0].figures for runs in groups.values()}, encoded)
    details: dict[LineKey, list[Details]] = {}
    for (line, _), runs in groups.items():
        key = runs[0].figures
        details.setdefault(line, []).append(_details(params, name, table, runs, pictures.get(key, ()), unavailable.get(key)))
    return details


def _pictures(store: Store, keys: Collection[str], encoded: PictureCache) -> tuple[dict[str, tuple[Picture, ...]], dict[str, str]]:
    """Return key of a run's scores in the store -> its pictures, and key -> the reason why its scores are unavailable."""
    folders: dict[str, Path] = {}
    unavailable: dict[str, str] = {}
    for key in keys:
        try:
            folder = store.pull(key)
        except StoreError as error:
            unavailable[key] = str(error)
            continue
        if folder.is_dir():
            folders[key] = folder
        else:
            unavailable[key] = "not in this store"
    files = {key: picture_files(folder) for key, folder in folders.items()}
    num_pictures = sum(map(len, files.values()))
    with ThreadPoolExecutor(num_cores()) as threads:  # Pillow encodes without Python's lock
        loads = {
            key: [threads.submit(load_picture, path, folders[key], num_pictures, encoded) for path in paths] for key, paths in files.items()
        }
        return {key: tuple(load.result() for load in of_run) for key, of_run in loads.items()}, unavailable


def _details(
    params: Params, name: str, table: TableFile, runs: Sequence[MeasuredRun], pictures: tuple[Picture, ...], unavailable: str | None
) -> Details:
    run, row = runs[0], table.rows[runs[0].row]
    variant = row.variants[0] if run.variant == TUNED else run.variant
    title, label = table_comparison(name, run.project_dataset), run.label
    if name == STANDING:  # whose runs are labelled by the variants of params.yaml
        title, label = comparison_title(run.project_dataset, run.evaluation.get("role", "test")), row.label
    return Details(
        run=run,
        comparison=title,
        label=label,
        protocol_variant=variant,
        from_protocol=_from_protocol(name, row, variant, run),
        changed=_changed(params, name, table, run),
        tuned=_tuned(name, table, run),
        settings=tuple((key, _plain(value)) for key, value in flatten(run.training | {"evaluation": run.evaluation}).items()),
        pictures=pictures,
        unavailable=unavailable,
    )


def _from_protocol(name: str, row: Row, variant: str, run: MeasuredRun) -> tuple[Difference, ...] | None:
    """Return the differences from a row's protocol, except which epochs' weights are kept; None if that does not have the variant."""
    try:
        training = row_protocol(name, row).training_config(run.dataset, variant).model_dump(mode="json")
    except ConfigError:
        return None
    return tuple(difference for difference in _differences(run.training, training) if difference[0] not in KEEPING)


def _changed(params: Params, name: str, table: TableFile, run: MeasuredRun) -> tuple[Difference, ...]:
    """Return the differences from today's run in the same place; none if its scores would be averaged with this one's."""
    today = spec_today(params, name, table, run)
    if today is None or has_present_settings(params, name, table, run, run.digest):
        return ()
    then = run.training | {"evaluation": run.evaluation, "measurements": run.measurements}
    now = today.model_dump(mode="json", include={"training", "evaluation", "measurements"})
    return _differences(then, now.pop("training") | now)


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the settings that differ, by dotted name."""
    flat_here, flat_there = flatten(here), flatten(there)
    values = {name: (flat_here.get(name, "-"), flat_there.get(name, "-")) for name in sorted({*flat_here, *flat_there})}
    return tuple((name, _plain(value), _plain(other)) for name, (value, other) in values.items() if value != other)


def _tuned(name: str, table: TableFile, run: MeasuredRun) -> str | None:
    """Return the origin of a run's tuned settings, or what is wrong with their file; None for a run without."""
    if run.variant != TUNED:
        return None
    try:
        tuned = read_tuned(name, run.row, table.tuned_on(run.dataset))
    except ConfigError as error:
        return str(error)
    return tuned.says if tuned.dataset == run.dataset else f"{tuned.says}, on {tuned.dataset}"


def _plain(value: Any) -> str:
    """Return a setting as text: floats with few digits, lists without Python's brackets and quotes."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)
