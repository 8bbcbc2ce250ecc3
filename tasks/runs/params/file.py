"""Reading and checking `params.yaml`, with a command's `--set` settings."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dml_core.config import check_known, flatten, located, read_yaml, refuse_repeats
from dml_core.data.registry import parse_dataset
from dml_core.errors import ConfigError
from dml_core.overrides import PART, override, parse_overridden
from dml_core.training.config import TrainingConfig
from tasks.environment import state_folder
from tasks.runs.params.comparison import row_name, training_of, variants_on
from tasks.runs.params.set_options import parsed, path_of, rank_of
from tasks.runs.specs import DatasetSpec, Params


def load_params(path: Path, overrides: Sequence[str] = ()) -> Params:
    """Read and check `params.yaml`, including every dataset's options and every run of the comparison. Imports no torch.

    `tasks.checks.check_parts` checks what needs torch (a loss's own options, parts that do not fit).

    The overrides are `dotted.path=value`, each with a YAML value. Their order does not matter.

    Raises:
        ConfigError: the first error, in one line.
    """
    values = read_yaml(path)
    refuse_repeats("--set", map(path_of, overrides))
    for setting in sorted(overrides, key=rank_of):
        values = override(values, parsed(values, setting))
    params = parse_overridden(Params, path.name, values)
    for name, dataset in params.datasets.items():
        with located(f"{path.name}: datasets.{name}"):
            parse_dataset(dataset.reader, dataset.options)
    with located(path.name):
        check_raw_places(path.parent, params.datasets)
    for kind, names in (("datasets", params.comparison.datasets), ("default_datasets", params.comparison.default_datasets)):
        with located(f"{path.name}: comparison.{kind}"):
            for name in names:
                check_known("dataset", name, params.datasets)
    reference, variants = params.comparison.reference, params.comparison.variants
    if reference is not None:
        with located(f"{path.name}: comparison.reference"):
            check_known("variant", reference, variants)
    by_row: dict[str, str] = {}
    for variant in variants:
        if (other := by_row.setdefault(row_name(variant), variant)) != variant:
            where = f"{path.name}: comparison.variants"
            raise ConfigError(f"{where}: '{other}' and '{variant}' have the same row '{row_name(variant)}'; rename one")
    for name in params.comparison.datasets:
        # `dml tune` reads this file too: only runs refuse a variant with `tuned: true` that is not tuned
        trainings = {variant: training_of(params, name, variant, tuned=False) for variant in variants}
        with located(f"{path.name}: comparison: {name}"):
            check_same_classes({variant: trainings[variant] for variant in variants_on(params, name)}, params.evaluation.role)
    return params


def check_same_classes(trainings: Mapping[str, TrainingConfig], role: str) -> None:
    """Check that runs of one comparison are scored on the same images, and hold out the same classes if they hold out any.

    On held-out classes the best trained run is chosen, also if the test classes are scored.

    Args:
        trainings: label of the runs -> their training settings.
        role: role that they are scored on.

    Raises:
        ConfigError: two hold out different classes; or one of them none, and another role than "test" is scored.
    """
    labels = {
        training.validation: label
        for label, training in trainings.items()
        if role != "test" or (training.validation is not None and training.num_epochs)
    }
    if len(labels) > 1:
        first, second, *_ = labels.values()
        raise ConfigError(
            f"'{first}' and '{second}' hold out different classes (validation), so they would be compared on different images; "
            "set the same validation for both"
        )


def dropped_options(path: Path, overrides: Sequence[str]) -> list[str]:
    """Return a line for each setting that names another part and thereby drops options of the file's: `--set a.name=b drops a.width: 16`.

    `load_params` must have accepted the overrides.
    """
    values, lines = read_yaml(path), []
    for setting in sorted(overrides, key=rank_of):
        before = flatten(values)
        values = override(values, parsed(values, setting))
        after = flatten(values)
        others = [part for part in after if part.endswith(f".{PART}") and part in before and before[part] != after[part]]
        parts = tuple(part.removesuffix(PART) for part in others)  # each with the dot before its options
        gone = [f"{name}: {value}" for name, value in before.items() if name not in after and name.startswith(parts)]
        lines += [f"--set {setting} drops {', '.join(gone)}"] if gone else []
    return lines


def check_raw_places(root: Path, datasets: Mapping[str, DatasetSpec]) -> None:
    """Check that no raw folder shares a file with another one or with what the project or DVC owns: DVC allows one owner per file.

    Raises:
        ConfigError: they overlap, links followed; of two datasets it names the later. Or `dvc add` tracks the folder, or one around it.
    """
    inside, top = _real(root), root.absolute()
    written = {"packed data": root / "data/packed", "reports": root / "results", "the state of runs": state_folder(root)}
    own = {what: _real(place) for what, place in written.items()}
    others: dict[str, str] = {}
    for name, spec in datasets.items():
        raw = _real(root / spec.raw)
        with located(f"datasets.{name}: raw: {raw}"):
            if inside.startswith(raw):
                raise ConfigError("contains the project; put the images into a separate folder")
            folder = (root / spec.raw).absolute()
            around = [folder, *folder.parents]
            for owner in (Path(f"{place}.dvc") for place in around[: around.index(top) if top in around else 0]):
                if os.path.isfile(owner):  # noqa: PTH113 - `Path.is_file` raises for a name that is too long
                    raise ConfigError(f"tracked by {owner}, and DVC allows one owner: run dvc remove {owner}, or use a `mirror` elsewhere")
            for what, place in (others | own).items():
                if raw.startswith(place) or place.startswith(raw):
                    raise ConfigError(f"overlaps {what} ({place}); put the images into a separate folder")
        others[f"the raw files of '{name}'"] = raw


def _real(path: Path) -> str:
    """Return a folder's path with a final "/" and its links followed as far as possible (`Path.resolve` raises if they form a circle)."""
    return f"{os.path.realpath(path).rstrip('/')}/"
