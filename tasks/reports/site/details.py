"""Details of a page's row: how its runs were trained, where they are stored, and their pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dml_core.config import flatten
from dml_core.errors import ConfigError, StoreError
from dml_core.training.epochs import Epoch
from tasks.reports.site.pictures import Picture, all_pictures
from tasks.runs.protocols import load_protocol
from tasks.runs.tuned import TUNED, read_tuned
from tasks.storage import Store
from tasks.tables.file import TableFile
from tasks.tables.result import MeasuredRun, TableResult
from tasks.tables.runs import row_training

Settings = dict[str, Any]
LineKey = tuple[str, str, Epoch]


@dataclass(frozen=True)
class Difference:
    """A setting's dotted name, with its values in the run and in the other settings; "-" if missing."""

    name: str
    here: str
    there: str


@dataclass(frozen=True)
class Details:
    """The runs of one line on one dataset, represented by the one with the lowest seed.

    Attributes:
        dataset, seed: dataset and seed of that run.
        differs: differences from the protocol; None if the protocol does not have the line's variant.
        changed: differences from the row's current file.
        mixed: whether other seeds were trained with other settings.
        tuned: origin of the tuned settings according to the current file, or that it is missing; None for other variants.
        settings: all settings, by dotted name.
        pictures: pictures of that run.
        figures: key of the store's folder with all of them.
        gone: reason why they cannot be shown.
    """

    dataset: str
    seed: int
    differs: tuple[Difference, ...] | None
    changed: tuple[Difference, ...]
    mixed: bool
    tuned: str | None
    settings: tuple[tuple[str, str], ...]
    pictures: tuple[Picture, ...]
    figures: str
    gone: str | None


def line_details(name: str, table: TableFile, result: TableResult, store: Store) -> dict[LineKey, list[Details]]:
    """Return the details of every line of a table, by dataset."""
    groups: dict[tuple[LineKey, str], list[MeasuredRun]] = {}
    for run in sorted(result.runs, key=lambda run: (run.dataset, run.seed)):
        if run.row in table.rows:
            groups.setdefault(((run.row, run.variant, run.epoch), run.dataset), []).append(run)
    folders = {runs[0].figures: _folder(store, runs[0].figures) for runs in groups.values()}
    pictures = all_pictures([folder for folder in folders.values() if isinstance(folder, Path)])
    found: dict[LineKey, list[Details]] = {}
    for (line, _), runs in groups.items():
        found.setdefault(line, []).append(_details(name, table, runs, folders[runs[0].figures], pictures))
    return found


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the settings that differ, by dotted name."""
    one, other = flatten(here), flatten(there)
    names = [name for name in sorted({*one, *other}) if one.get(name, "-") != other.get(name, "-")]
    return tuple(Difference(name, _plain(one.get(name, "-")), _plain(other.get(name, "-"))) for name in names)


def _details(
    name: str, table: TableFile, runs: Sequence[MeasuredRun], folder: Path | str, pictures: Mapping[Path, Sequence[Picture]]
) -> Details:
    run, row = runs[0], table.rows[runs[0].row]
    variant = row.variants[0] if run.variant == TUNED else run.variant
    protocol = _protocol_training(row.protocol or name.partition("/")[0], run.dataset, variant)
    today = _training_today(name, table, run)
    return Details(
        dataset=run.dataset,
        seed=run.seed,
        differs=None if protocol is None else differences(run.training, protocol),
        changed=() if today is None else differences(run.training, today),
        mixed=any(other.training != run.training or other.evaluation != run.evaluation for other in runs),
        tuned=_tuned(name, run),
        settings=tuple((key, _plain(value)) for key, value in flatten(run.training | {"evaluation": run.evaluation}).items()),
        pictures=tuple(pictures.get(folder, ())) if isinstance(folder, Path) else (),
        figures=run.figures,
        gone=folder if isinstance(folder, str) else None,
    )


def _tuned(name: str, run: MeasuredRun) -> str | None:
    try:
        return read_tuned(name, run.row, run.dataset).says if run.variant == TUNED else None
    except ConfigError as error:
        return str(error)


def _protocol_training(protocol: str, dataset: str, variant: str) -> Settings | None:
    try:
        return load_protocol(protocol).training_config(dataset, variant).model_dump(mode="json")
    except ConfigError:
        return None


def _training_today(name: str, table: TableFile, run: MeasuredRun) -> Settings | None:
    try:
        return row_training(name, table.rows[run.row], run.dataset, run.variant, called=run.row).model_dump(mode="json")
    except ConfigError:
        return None


def _plain(value: Any) -> str:
    """Return a setting as text: floats with few digits, lists without Python's brackets and quotes."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _folder(store: Store, key: str) -> Path | str:
    """Return the folder of a run's scores, or the reason why it is unavailable."""
    try:
        folder = store.pull(key)
    except StoreError as error:
        return str(error)
    return folder if folder.is_dir() else "they are not in this store"
