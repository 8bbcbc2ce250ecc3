"""Add a user's images to the project as a dataset: check them, fit settings to them, and write both blocks into `params.yaml`.

The images are not copied: `raw` is a path in the project or, for a folder outside it, an absolute one. DVC keeps a hash of them and neither
moves nor deletes them (the `fetch` stage's output is persistent and uncached).
"""

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dml_core.config import MAX_FILE_BYTES, check_name, merge, parse, read_value, read_yaml
from dml_core.data.readers.shared.own import guess_reader, is_list_name
from dml_core.data.registry import parse_dataset
from dml_core.data.store.rows import Counts
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import ConfigError, DataError
from dml_core.files import write_errors, writing
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.trained_on import trained_on
from dml_core.overrides import nested
from tasks.data import write_findings
from tasks.environment import Project
from tasks.locks import alone
from tasks.own_images.params_text import with_entry
from tasks.own_images.settings import fine_tuning_settings, fitted_settings
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import check_raw_places, load_params
from tasks.runs.specs import DatasetSpec, Params
from tasks.wording import counted
from tasks.yaml_text import yaml_text

if TYPE_CHECKING:
    from dml_core.data.check import CheckReport, Finding

_MIN_CLASSES = 2
_LARGE_PIXELS, _STORED_PIXELS = 512, 256  # photographs are packed smaller, so that no epoch decodes them in full size


@dataclass(frozen=True)
class Added:
    """The added dataset, the change of `params.yaml` as a unified diff, and what the check of its images found that stops nothing."""

    spec: DatasetSpec
    counts: dict[str, Counts]
    diff: str
    notes: "tuple[Finding, ...]" = ()


def add_images(
    project: Project,
    name: str,
    path: Path,
    reader: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    backbone: BackboneConfig | None = None,
) -> Added:
    """Write a dataset of a user's images into `params.yaml`, with settings that fit them.

    Args:
        path: the folder, or the list (CSV or Parquet) of a manifest.
        reader: "folder" or "manifest"; None detects it from `path`.
        progress: called with (images checked, total images).
        backbone: pretrained backbone to fine-tune; None keeps the protocol's network.

    Raises:
        ConfigError: the name or place cannot be used, or `params.yaml` is invalid already.
        DataError: the images cannot be trained on; the message names the first, and of several a file that lists all.
        StoreError: `params.yaml` cannot be written.
    """
    params = load_params(project.params_file)
    check_new_name(name, params)
    chosen, raw, options = guess_reader(as_linked(path), reader)
    for file in raw.iterdir() if reader is None and chosen == "folder" else ():
        if is_list_name(file) and file.stem.lower() == "manifest":  # as Windows may write it
            raise DataError(f"{file}: a list of images is named manifest.csv or manifest.parquet; rename it, or set --reader folder")
    spec = parse(DatasetSpec, {"reader": chosen, "raw": as_raw(project, raw), "options": options}, str(raw))
    check_raw_places(project.root, params.datasets | {name: spec})
    report = _check_images(project, name, spec, raw, progress)
    if report.short_sides[1] > _LARGE_PIXELS and not report.num_boxes:
        images = trained_on(backbone.name) if backbone is not None else None
        as_stored: dict[str, Any] = {"stored_size": max(_STORED_PIXELS, images.resize if images is not None else 0)}
        if images is not None:
            as_stored["stored_interpolation"] = images.interpolation  # of the backbone's own resize, which this is the first part of
        spec = spec.model_copy(update={"options": spec.options | as_stored})
    diff = write_dataset(project, name, spec, report, backbone)
    stored_size = parse_dataset(spec.reader, spec.options).stored_size
    notes = report.notes_on_views(views_of(load_params(project.params_file), name), stored_size)
    return Added(spec, report.counts, diff, (*report.notes, *notes))


def views_of(params: Params, name: str) -> list[TransformConfig]:
    """Return the settings of the views that the standing comparison makes of a dataset's images; none if it does not have the dataset."""
    if name not in params.comparison.datasets:
        return []
    runs = comparison_runs(params, name, None, params.comparison.seeds[:1], tuned=False)  # all seeds have the same views
    return list(dict.fromkeys(run.training.transform for run in runs))


def check_new_name(name: str, params: Params) -> None:
    """Check that a new dataset can have this name.

    Raises:
        ConfigError: the name is invalid or taken.
    """
    try:
        check_name(name)
        is_text = read_value(name, name) == yaml.safe_load(name) == name  # `1e5` is a number in YAML 1.2, and `3_000` in 1.1 and for DVC
    except ValueError:
        is_text = False
    if not is_text:
        raise ConfigError(
            f"'{name}': not a name for a dataset; use up to 100 letters, digits, - and _, but no YAML value (1e5, on) or - first"
        )
    if name in params.datasets or name in params.comparison.datasets:
        raise ConfigError(f"params.yaml has a dataset '{name}' already; choose another name, or remove its blocks first")


def as_linked(path: Path) -> Path:
    """Return an absolute path; a link stays one, which may lead to other images later, and to which paths in a list are relative."""
    return path.parent.resolve() / path.name if path.is_symlink() else path.resolve()


def as_raw(project: Project, raw: Path) -> str:
    """Return `raw` as it is written in `params.yaml`: a path in the project, or an absolute one.

    Raises:
        ConfigError: it is the user's home folder, or contains it, as of a list there: DVC reads every file of a raw folder.
    """
    if Path.home().resolve().is_relative_to(raw.resolve()):
        raise ConfigError(
            f"{raw}: is or contains your home folder, all of which DVC would read; put images and list into a separate folder"
        )
    root = project.root.resolve()
    return raw.relative_to(root).as_posix() if raw.is_relative_to(root) else str(raw)


def _check_images(project: Project, name: str, spec: DatasetSpec, raw: Path, progress: Callable[[int, int], None] | None) -> "CheckReport":
    """Return the report on images that can be trained on; else a DataError names the first that cannot, and a file that lists several."""
    from dml_core.data.check import check_dataset

    report = check_dataset(spec.reader, raw, spec.options, progress)
    tested = sum(counts.num_classes for role, counts in report.counts.items() if role in ("test", "query"))
    trained = report.counts["train"].num_classes if "train" in report.counts else 0
    if min(trained, tested) < _MIN_CLASSES:
        raise DataError(
            f"{raw}: {trained} classes to train on and {tested} others to test on, at least {_MIN_CLASSES} of each are needed; "
            "add classes, or name the roles (docs/reference/backbones-and-datasets.md)"
        )
    if report.violations:
        finding = report.violations[0]
        several = sum(violation.num_found for violation in report.violations) > 1
        listed = f"; {write_findings(project, name, report.violations)} lists all" if several else ""
        num_images = counted(finding.num_found, "image")
        raise DataError(f"{raw}: {num_images}: {finding.what}, the first is {finding.examples[0]}; fix or remove them{listed}")
    return report


def write_dataset(
    project: Project, name: str, spec: DatasetSpec, report: "CheckReport | None" = None, backbone: BackboneConfig | None = None
) -> str:
    """Write a dataset's block, and with a report its settings in the comparison, into `params.yaml`, all or nothing; no other byte changes.

    Returns the change as a unified diff.

    Raises:
        ConfigError: name or place was taken meanwhile, a mapping is written in braces, or the result would not be a valid `params.yaml`.
        StoreError: `params.yaml` cannot be written.
    """
    path = project.params_file
    with alone(project.state / "params.lock"):
        params = load_params(path)  # another dataset may have been added since the caller's own checks
        check_new_name(name, params)
        check_raw_places(project.root, params.datasets | {name: spec})
        before, expected = path.read_bytes().decode(), read_yaml(path)
        blocks: dict[tuple[str, ...], dict[str, Any]] = {("datasets",): spec.model_dump(exclude_defaults=True)}
        if report is not None:
            protocol = expected["comparison"]["protocol"]
            blocks["comparison", "datasets"] = (
                fitted_settings(protocol, report) if backbone is None else fine_tuning_settings(protocol, report, backbone)
            )
        after = before
        for keys, block in blocks.items():
            after = with_entry(after, keys, [f"{name}:{'' if block else ' {}'}", *_lines(block)])
            expected = merge(expected, nested({".".join((*keys, name)): block}))
        with write_errors(f"{path}:", "nothing was changed"), writing(path.resolve()) as file:  # a link stays one
            file.write(after.encode())
            file.flush()
            os.fchmod(file.fileno(), path.stat().st_mode)
            beside = Path(file.name)
            load_params(beside)
            assert read_yaml(beside) == expected
    return "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), path.name, path.name, n=1, lineterm=""))


def _lines(block: dict[str, Any]) -> list[str]:
    """Return a block's entries, one per line, with nested values in braces."""
    flow: dict[str, Any] = {"default_flow_style": True, "width": MAX_FILE_BYTES}
    return [f"  {yaml_text({key: value}, **flow).strip()[1:-1]}" for key, value in block.items()]
