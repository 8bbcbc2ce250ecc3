"""Verbs of datasets: `dml data ...`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from dml_core.data.registry import DATASETS, published_dataset
from dml_core.data.store.info import INFO_FILE
from dml_core.data.store.rows import Counts, Role
from dml_core.errors import DataError
from flows.cli.app import examples, new_group
from flows.cli.columns import Column, print_table
from flows.cli.options import check_file
from flows.cli.plan import time_of
from flows.cli.session import open_project, print_lines
from tasks.data import dataset_if_prepared, dataset_spec, fetch_raw, is_by_hand, prepare_dataset, show_dataset, write_findings
from tasks.dvc_lock import or_pull
from tasks.environment import Project
from tasks.own_images.add import add_images, views_of
from tasks.own_images.published import add_published
from tasks.own_images.settings import pretrained_backbone
from tasks.runs.params.file import load_params
from tasks.runs.params.requested import standing_runs
from tasks.runs.specs import FROZEN, DatasetSpec
from tasks.wording import counted

if TYPE_CHECKING:  # importing it loads torch
    from dml_core.data.check import CheckReport, Finding

data_app = new_group("data", no_args_is_help=True)
MAX_EXAMPLES = 5
ADDED = "added to params.yaml (to undo it, delete these lines)"
TRAINED = "softtriple"  # in a first look, compared with the network without training
DatasetName = Annotated[str, typer.Argument(metavar="DATASET", help="Dataset of params.yaml; `dml data list` prints all.")]


@data_app.command("list", epilog=examples("dml data list"))
def data_list() -> None:
    """List the datasets and their state.

    Also prints the readers that params.yaml may name.
    """
    project = open_project()
    for name, spec in load_params(project.params_file).datasets.items():
        try:
            record = dataset_if_prepared(project, name)
        except DataError as error:
            state = str(error).rpartition(f"{INFO_FILE}: ")[2]  # damaged, or of a newer version
        else:
            if record is None:
                is_here = (project.root / spec.raw).exists()
                other_way = or_pull(project, name) if not is_here and is_by_hand(spec) else ""
                state = f"not prepared; dml data {'prepare' if is_here else 'fetch'} {name}{other_way}"
            else:
                state = f"prepared, {', '.join(f'{count} {role}' for role, count in record.counts.items())}, digest {record.digest}"
        print_lines(f"{name}: reader {spec.reader}, raw files in {spec.raw}: {state}")
    print_lines(f"readers: {', '.join(DATASETS)}")


@data_app.command("add", epilog=examples("dml data add birds images", "dml data add cub200 CUB_200_2011.tgz"))
def data_add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name for the dataset.")],
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="Folder with one subfolder of images per class, list of images, or archive of a published dataset."
        ),
    ],
    reader: Annotated[Literal["folder", "manifest"] | None, typer.Option(help="Kind of PATH. Default: detected.")] = None,
    part: Annotated[bool, typer.Option("--part", help="PATH has only a part of a published dataset; do not check its counts.")] = False,
    backbone: Annotated[
        str | None,
        typer.Option(help="Fine-tune this pretrained backbone: resnet50, timm:<model> and others. Default: train the protocol's network."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights of --backbone, saved by torch. Default: its ImageNet weights.")
    ] = None,
) -> None:
    """Add your own images, or a published dataset, to params.yaml.

    Checks every image and writes the dataset with suitable settings (crop, sampler, epochs; with --backbone those of fine-tuning). The
    images stay in place. If NAME is a published dataset (cub200, cars196, sop, inshop), PATH is the publisher's archive or folder, for the
    papers' tables.
    """
    project = open_project()
    if weights is not None and backbone is None:
        raise typer.BadParameter("needs --backbone", param_hint="--weights")
    if reader is None and published_dataset(name):
        if backbone is not None:
            raise typer.BadParameter(f"'{name}' is a published dataset; its tables name their backbones", param_hint="--backbone")
        published = add_published(project, name, path, part)
        print_lines(*published.diff.split("\n"), "", f"{name}: {_images_of(published.counts)}; raw files in {published.spec.raw}; {ADDED}")
        print_lines(f"next: dml data check {name}")
        return
    if part:
        why = "cannot be combined with --reader" if published_dataset(name) else f"'{name}' is not a published dataset"
        raise typer.BadParameter(why, param_hint="--part")
    pretrained = None
    if backbone is not None:
        pretrained = pretrained_backbone(backbone, weights)
    with _bar(f"checking {name}") as progress:
        added = add_images(project, name, path, reader, progress, pretrained)
    print_lines(*added.diff.split("\n"), "", f"{name}: {_images_of(added.counts)}; {ADDED}")
    for note in added.notes:
        print_lines(f"note: {note.what}: {counted(note.num_found, 'file')} ({', '.join(_examples(note))})")
    _print_next(project, name, added.counts)


def _examples(finding: "Finding") -> list[str]:
    return [*finding.examples[:MAX_EXAMPLES], *["..."] * (len(finding.examples) > MAX_EXAMPLES)]


def _print_next(project: Project, name: str, counts: Mapping[str, Counts]) -> None:
    """Print the commands of a small comparison and of the whole one, with the time that each takes here."""
    from tasks.plans.speed import comparison_times

    params = load_params(project.params_file)
    searched = counts["gallery"].num_images if "gallery" in counts else counts["test"].num_images - 1
    if params.evaluation.role == "test" and params.evaluation.recall_at[-1] > searched:
        print_lines(
            f"note: a test image is compared with {searched}, fewer than {params.evaluation.recall_at[-1]}, the largest of "
            "evaluation.recall_at in params.yaml: lower that first, or add images"
        )
    runs = standing_runs(params, [name])[name]
    initial = FROZEN if any(run.variant == FROZEN for run in runs) else "untrained"
    few = [run for run in runs if run.variant in (initial, TRAINED) and run.seed == runs[0].seed]
    options = "".join(f" --variant {run.variant}" for run in few)
    comparisons = {"the comparison": (runs, "")}
    if 1 < len(few) < len(runs):
        comparisons = {"a first look": (few, f"{options} --seed {runs[0].seed}"), **comparisons}
    images = {role: count.num_images for role, count in counts.items()}
    times = comparison_times([selected for selected, _ in comparisons.values()], images, params.scale)
    for (title, (selected, options)), estimate in zip(comparisons.items(), times, strict=True):
        num_variants, num_seeds = len({run.variant for run in selected}), len({run.seed for run in selected})
        print_lines(f"next: {title}, {num_variants} variants with {counted(num_seeds, 'seed')}, {time_of(estimate)} on this machine:")
        print_lines(f"  dml reproduce --dataset {name}{options}")


def _images_of(counts: Mapping[str, Counts]) -> str:
    return ", ".join(f"{count.num_images} {role} images of {count.num_classes} classes" for role, count in counts.items())


@data_app.command("fetch", epilog=examples("dml data fetch synthetic"))
def data_fetch(name: DatasetName) -> None:
    """Fetch raw files, or print how to get them.

    Generates, copies, downloads and unpacks. Existing files stay unchanged, except copies of objects of which the mirror has new versions.
    """
    with _working_on(name, "fetching") as (project, spec, progress):
        raw = project.root / spec.raw
        try:
            fetch_raw(project, spec, progress)
        except DataError as error:
            raise DataError(f"{error}{'' if raw.exists() else or_pull(project, name)}") from None
    print_lines(f"{name}: raw files are in {raw}")


@data_app.command("check", epilog=examples("dml data check synthetic"))
def data_check(name: DatasetName) -> None:
    """Check every raw image and list problems.

    Checks counts and boxes, and finds unreadable images and duplicates across train and test. Exits with code 2 on a violation. Notes what
    decoding and the comparison's test views change: transparency, more than 8 bits per channel, animations, images that are padded or of
    which less than a quarter is seen. Prints five files of each kind; a file below state/checks lists all.
    """
    from dml_core.data.check import check_dataset

    with _working_on(name, "checking") as (project, spec, progress):
        transforms = views_of(load_params(project.params_file), name)
        report = check_dataset(spec.reader, project.root / spec.raw, spec.options, progress, transforms)
    _print_check(name, report)
    findings = [*report.violations, *report.notes]
    listed = write_findings(project, name, findings)  # always: it would keep what has been repaired
    if any(len(finding.examples) > MAX_EXAMPLES for finding in findings):
        print_lines(f"all of them: {listed}")
    if report.violations:
        raise DataError(f"{name}: {counted(len(report.violations), 'kind')} of violation, see the table; fix the raw files in {spec.raw}")


def _print_check(name: str, report: "CheckReport") -> None:
    """Print the result of a check of raw files: counts and published counts, notes, violations."""
    rows: list[tuple[str, str, str]] = []
    for role, counts in report.counts.items():
        published = report.published.get(role)
        expected = f"{published.num_images} images of {published.num_classes} classes" if published else "no published counts"
        sizes = " to ".join(str(size) for size in dict.fromkeys(report.class_sizes[role]))
        rows.append((role, f"{counts.num_images} images of {counts.num_classes} classes, {sizes} per class", expected))
    for kind, findings in (("note", report.notes), ("VIOLATION", report.violations)):
        for finding in findings:
            rows.append((f"{kind}: {finding.what}", str(finding.num_found), "\n".join(_examples(finding))))
    what, files, expected_or_examples = zip(*rows, strict=True)
    print_table(
        Column("part", what, wraps=True),
        Column("files", files, wraps=True),
        Column("published or examples", expected_or_examples, wraps=True),
        title=f"{name}: raw files",
    )


@data_app.command("prepare", epilog=examples("dml data prepare synthetic"))
def data_prepare(name: DatasetName) -> None:
    """Pack raw files into the dataset's store.

    `dvc repro prepare@NAME` does the same, but only if something changed.
    """
    with _working_on(name, "packing") as (project, spec, progress):
        record = prepare_dataset(project, name, spec, progress)
    print_lines(f"{name}: {', '.join(f'{count} {role}' for role, count in record.counts.items())}, digest {record.digest}")


@data_app.command("show", epilog=examples("dml data show synthetic --role test -o sheet.png"))
def data_show(
    name: DatasetName,
    role: Annotated[Role, typer.Option(help="Role of the images.")] = "train",
    classes: Annotated[int, typer.Option(min=1, help="Number of classes, one per row.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Number of images per class.")] = 8,
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG file to write.")] = Path("contact_sheet.png"),
) -> None:
    """Draw a contact sheet of a prepared dataset.

    Each row has the name of a class and some of its images, with boxes.
    """
    check_file(output)
    project = open_project()
    dataset_spec(load_params(project.params_file), name)  # raises a clear error if params.yaml lacks the name
    print_lines(show_dataset(project, name, role, classes, samples, output))


@contextmanager
def _working_on(name: str, verb: str) -> Iterator[tuple[Project, DatasetSpec, Callable[[int, int], None]]]:
    """Yield the project, one of its datasets, and a function that moves a bar on standard error."""
    project = open_project()
    spec = dataset_spec(load_params(project.params_file), name)
    with _bar(f"{verb} {name}") as progress:
        yield project, spec, progress


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error; the yielded function moves it with (done, total)."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(escape(title), total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total or None)
