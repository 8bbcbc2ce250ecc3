"""Measure time, memory and disk for a paper's dataset at its published size, from `dml data add` to the page.

    .venv/bin/python benchmarks/rehearsal.py [cub200 cars196 sop inshop]    # all four by default; 4 GB in the temporary folder
    .venv/bin/python benchmarks/rehearsal.py --share 0.01                   # a hundredth of the classes and images, in a few minutes

Each dataset is drawn as the publisher's archives, in the official layout, with the published numbers of images and classes in each role.
The images are small: 32 pixels a side. Then the commands of docs/how-to/papers-on-a-gpu.md run in a separate project, on a table with one
row for each dataset: SoftTriple on BN-Inception, or SGSL on ResNet-50 for In-shop, as published but from random weights, for one epoch, at
64 pixels. For each command: wall and processor seconds, images per second, peak memory of all its processes, and its disk use,
compared with the prediction of `dml plan`. Prints Markdown.

Memory is the proportional set size (a page shared by n processes counts 1/n for each); for a training process its own (anonymous) pages,
those of its libraries included. Memory and processor seconds are sampled once a second. With all images the archives' checksums in the
project's copy of the readers are those of the drawn archives, so that `dml data add` runs all its checks; a share is added as `--part`.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from measuring import PREFECT_FILE, copy_project, encoded, environment_of, markdown_table

from dml_core.data.drawing.layouts import WRITERS, Picture
from dml_core.data.readers.shared.contract import OfficialDataset
from dml_core.data.registry import dataset_class
from dml_core.data.store.info import read_info
from dml_core.data.store.rows import Counts
from tasks.runs.surroundings import processor

TABLE = "project/rehearsal"
NUM_TILES, TILE_PIXELS, BOX = 4, 8, (4.0, 4.0, 28.0, 28.0)
FEWEST_CLASSES = 32  # of a role, in a share: at least as many as there are in a batch of the rows below
SAMPLE_SECONDS = 1.0
MB, GB = 1e6, 1e9
PLAN_TITLES = (
    *("dataset", "disk planned, MB", "written, MB", "training memory planned, MB", "training process, MB"),
    *("train and embed planned, s", "taken, s"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", metavar="DATASET", help=f"of {', '.join(LAYOUTS)}; all where none is named")
    parser.add_argument("--share", type=float, default=1.0, help="of the classes and images of each role, above 0 and at most 1")
    parser.add_argument("--folder", type=Path, help="where project and archives are made and stay; a temporary folder where it is left out")
    arguments = parser.parse_args()
    datasets = list(dict.fromkeys(arguments.datasets)) or list(LAYOUTS)
    if unknown := [name for name in datasets if name not in LAYOUTS]:
        parser.error(f"unknown dataset '{unknown[0]}'; known are {', '.join(LAYOUTS)}")
    if not 0 < arguments.share <= 1:
        parser.error(f"--share {arguments.share:g}: expected a share above 0, at most 1")
    with contextlib.nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory() as folder:
        found, pages = rehearse(Path(folder).resolve(), datasets, arguments.share)
        print(as_markdown(found, pages, arguments.share))


# ---------------------------------------------------------------- archives


@dataclass(frozen=True)
class Layout:
    """The archive layout of a published dataset.

    Attributes:
        writer: name in `dml_core.data.drawing.layouts`.
        archived: folder of the layout -> archive that contains it.
        given: argument of `dml data add`: an archive, or "." for the folder with all files.
    """

    writer: str
    archived: tuple[str, str]
    given: str


LAYOUTS = {
    "cub200": Layout("cub200", ("CUB_200_2011", "CUB_200_2011.tgz"), "CUB_200_2011.tgz"),
    "cars196": Layout("cars-annos", ("car_ims", "car_ims.tgz"), "."),
    "sop": Layout("sop", ("Stanford_Online_Products", "Stanford_Online_Products.zip"), "Stanford_Online_Products.zip"),
    "inshop": Layout("inshop", ("Img/img", "Img/img.zip"), "."),
}


def official(name: str) -> type[OfficialDataset]:
    """Return the reader's class of a published dataset."""
    kind = dataset_class(name)
    assert issubclass(kind, OfficialDataset)
    return kind


def counts_of(name: str, share: float) -> dict[str, Counts]:
    """Return images and classes of each role: the published numbers, or a share of both that suffices to train and score."""
    published = official(name).published
    if share == 1:
        return dict(published)
    counts = {}
    for role, of_role in published.items():
        num_classes = min(of_role.num_classes, max(FEWEST_CLASSES, round(share * of_role.num_classes)))
        counts[role] = Counts(max(3 * num_classes, round(share * of_role.num_images)), num_classes)
    return counts


def class_sizes(name: str, counts: Mapping[str, Counts]) -> list[int]:
    """Return the uneven sizes of the classes, training classes first. The order is the writers', which alternate query and gallery."""
    random = np.random.default_rng(0)
    train = uneven(counts["train"], 1 if official(name).single_image_classes else 2, random)
    if "test" in counts:
        return [*train, *uneven(counts["test"], 2, random)]
    num_odd = counts["query"].num_images - counts["gallery"].num_images  # a class starts with a query and may have one more of these
    gallery = uneven(counts["gallery"], 1, random)
    assert 0 <= num_odd <= len(gallery)
    return [*train, *(2 * size + (number < num_odd) for number, size in enumerate(gallery))]


def uneven(counts: Counts, fewest: int, random: np.random.Generator) -> list[int]:
    """Return class sizes that add up to the number of images, each at least `fewest`."""
    weights = random.gamma(4.0, size=counts.num_classes)
    left = counts.num_images - fewest * counts.num_classes
    return (fewest + random.multinomial(left, weights / weights.sum())).tolist()


def draw_pictures(sizes: list[int], seed: int) -> Iterator[Picture]:
    """Draw coloured tiles that differ by class, with noise that differs by picture."""
    random = np.random.default_rng(seed)
    for class_index, size in enumerate(sizes):
        tiles = random.integers(64, 192, (NUM_TILES, NUM_TILES, 3))
        look_HW3 = tiles.repeat(TILE_PIXELS, axis=0).repeat(TILE_PIXELS, axis=1)
        for number in range(size):
            pixels_HW3 = look_HW3 + random.integers(-64, 64, look_HW3.shape)
            yield Picture(class_index, number, encoded(pixels_HW3.astype(np.uint8), "JPEG", quality=75), BOX)


def write_tree(name: str, folder: Path, counts: Mapping[str, Counts], pictures: Iterator[Picture]) -> None:
    """Write a dataset in its official layout. The writers train on half of the classes, so they get twice the training classes."""
    WRITERS[LAYOUTS[name].writer](folder, pictures, 2 * counts["train"].num_classes)


def write_archives(name: str, folder: Path, counts: Mapping[str, Counts]) -> None:
    """Draw a dataset and write it in the publisher's form."""
    write_tree(name, folder, counts, draw_pictures(class_sizes(name, counts), seed=list(LAYOUTS).index(name)))
    source, archive = (folder / path for path in LAYOUTS[name].archived)
    kind = "zip" if archive.suffix == ".zip" else "gztar"
    Path(shutil.make_archive(str(archive.with_suffix("")), kind, source.parent, source.name)).rename(archive)
    shutil.rmtree(source)


# ---------------------------------------------------------------- project


def write_project(project: Path, datasets: list[str]) -> None:
    """Copy this repository's code and parameters, and write the rehearsed table."""
    copy_project(project)
    (project / f"flows/tables/{TABLE}.yaml").write_text(yaml.safe_dump(table(datasets), sort_keys=False))


def table(datasets: list[str]) -> dict[str, Any]:
    """Return one row per trained paper: its protocol as published, made cheaper. Each run uses all cores."""
    retrieval = {"sop": [1, 10, 100], "inshop": [1, 10, 20, 40]}
    columns = [
        {"dataset": name, "metrics": [*(f"recall@{k}" for k in retrieval.get(name, [1, 2, 4, 8])), *(["nmi"] if name != "inshop" else [])]}
        for name in datasets
    ]
    small = {"train_resize": [72, 72], "test_resize": [72, 72], "crop_size": 64}
    cheap = {"model": {"backbone": {"weights": "none"}, "freeze_batchnorm": "none"}, "transform": small, "num_epochs": 1}
    rows = {}
    for protocol, label, own in (
        ("softtriple", "SoftTriple, BN-Inception", ["cub200", "cars196", "sop"]),
        ("sgsl", "SGSL, ResNet-50", ["inshop"]),
    ):
        if runs_on := [name for name in datasets if name in own]:
            published = [None] * sum(len(column["metrics"]) for column in columns)
            variants = {"protocol": protocol, "variants": ["as_published"], "training": cheap}
            rows[protocol] = {"label": label, "kind": "own", "published": published, "runs_on": runs_on, **variants}
    states = "Nothing of the papers: drawn images, random weights, one epoch at 64 pixels."
    title = "Rehearsal at the datasets' published counts"
    return {"title": title, "states": states, "columns": columns, "rows": rows, "scale": {"concurrent_runs": 1}}


def trust_archives(project: Path, name: str, folder: Path) -> None:
    """Replace the published checksums by those of the drawn archives in the project's copy of the reader."""
    path = project / f"dml_core/data/readers/{name}.py"
    text = path.read_text()
    for archive in official(name).archives:
        if archive.md5 and (folder / archive.file_name).is_file():
            with (folder / archive.file_name).open("rb") as file:
                text = text.replace(f'md5="{archive.md5}"', f'md5="{hashlib.file_digest(file, "md5").hexdigest()}"')
    path.write_text(text)


# ---------------------------------------------------------------- measurement


@dataclass
class Usage:
    """Resources used by a command.

    Attributes:
        seconds: wall-clock time; cpu_seconds: processor time of all its processes.
        all_bytes: peak memory of all its processes together.
        training_bytes: peak of a training process's own memory; 0 without one.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    all_bytes: int = 0
    training_bytes: int = 0


def run(project: Path, words: Sequence[str]) -> tuple[str, Usage]:
    """Run a `dml` or `dvc` command in the project; return its standard output and its resource use.

    Raises:
        SystemExit: it failed or printed a traceback; contains all its output.
    """
    print(shown(words), file=sys.stderr, flush=True)
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as complained:
        process = subprocess.Popen(
            [sys.executable, "-m", {"dml": "flows.cli", "dvc": "dvc"}[words[0]], *words[1:]],
            cwd=project,
            env=environment_of(project),
            stdout=printed,
            stderr=complained,
        )
        usage = watch(process)
        printed.seek(0)
        complained.seek(0)
        output, errors = printed.read(), complained.read()
    if process.returncode != 0 or "Traceback" in output + errors:
        sys.exit(f"{output}{errors}{shown(words)}: exit code {process.returncode}")
    return output, usage


def shown(words: Sequence[str]) -> str:
    """Return a command as typed, with only the last part of absolute paths."""
    return " ".join(Path(word).name if Path(word).is_absolute() else word for word in words)


def watch(process: "subprocess.Popen[bytes]") -> Usage:
    """Wait for a process; return the resources used by it and its descendants. One that ends between two samples counts up to the first."""
    usage, root, cpu = Usage(), psutil.Process(process.pid), dict[psutil.Process, float]()
    began = time.perf_counter()
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            sample([root, *root.children(recursive=True)], usage, cpu)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SAMPLE_SECONDS)
    usage.seconds, usage.cpu_seconds = time.perf_counter() - began, sum(cpu.values())
    return usage


def sample(processes: list[psutil.Process], usage: Usage, cpu: dict[psutil.Process, float]) -> None:
    """Record the processes' current memory, and their processor seconds so far."""
    all_bytes = 0
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            times, memory = process.cpu_times(), process.memory_full_info()
            cpu[process] = times.user + times.system
            all_bytes += memory.pss
            if process.name().startswith("ray::RayTrainWorker"):
                usage.training_bytes = max(usage.training_bytes, memory.rss - memory.shared)
    usage.all_bytes = max(usage.all_bytes, all_bytes)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder; 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def step_seconds(project: Path, name: str) -> dict[str, float]:
    """Return the seconds of each step in the last flow run from Prefect's records; training time is its own, without the wait for Ray."""
    with contextlib.closing(sqlite3.connect(project / PREFECT_FILE)) as database:
        rows = database.execute(
            "select name, julianday(end_time) - julianday(start_time) from task_run"
            " where flow_run_id = (select id from flow_run order by start_time desc limit 1) and state_name = 'Completed'"
        ).fetchall()
    tasks = {task.partition(" ")[0]: days * 86400 for task, days in rows}
    page = json.loads((project / f"results/site/{TABLE}.json").read_text())
    runs = [run for row in page["rows"] for line in row["lines"] for run in line["runs"] if run["dataset"] == name]
    training = float(runs[0]["seconds"])
    return {"DVC": tasks["prepare"], "start of Ray": tasks["train"] - training, "train": training} | {
        step: tasks[step] for step in ("embed", "evaluate", "publish")
    }


# ---------------------------------------------------------------- rehearsal


@dataclass
class Rehearsal:
    """Results for one dataset.

    Attributes:
        counts: counts by role.
        usages: command -> resources used; "drawing" is the creation of the archives.
        plan: output of `dml plan --json` before anything was packed or trained.
        steps: step of the first `dml reproduce` -> seconds.
        num_bytes: archive, raw, packed, DVC's cache, store, rest of the state -> size of its files.
    """

    counts: dict[str, Counts]
    usages: dict[str, Usage] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def num_images(self) -> int:
        """Number of images of all roles."""
        return sum(of_role.num_images for of_role in self.counts.values())

    @property
    def num_tested(self) -> int:
        """Number of images of all roles except training."""
        return self.num_images - self.counts["train"].num_images


def rehearse(folder: Path, datasets: list[str], share: float) -> tuple[dict[str, Rehearsal], dict[str, Usage]]:
    """Process every dataset from its archive to its runs, one by one in one project, and then the page of all of them.

    Raises:
        SystemExit: a command failed, or its result does not match the drawn data.
    """
    project = folder / "project"
    write_project(project, datasets)
    found = {name: rehearse_dataset(project, folder / "downloads" / name, name, share) for name in datasets}
    pages = {shown(words): run(project, words)[1] for words in (("dml", "tables", "show", TABLE), ("dml", "report", TABLE))}
    check_page(project, datasets)
    return found, pages


def rehearse_dataset(project: Path, downloads: Path, name: str, share: float) -> Rehearsal:
    """Run the commands of docs/how-to/papers-on-a-gpu.md for one dataset in their order, with packing as a separate command."""
    found = Rehearsal(counts_of(name, share))
    print(f"drawing {name}: {found.num_images:,} images", file=sys.stderr, flush=True)
    began, cpu_began = time.perf_counter(), time.process_time()
    write_archives(name, downloads, found.counts)
    found.usages["drawing"] = Usage(time.perf_counter() - began, time.process_time() - cpu_began)
    before = sizes(project, downloads, name)
    if share == 1:
        trust_archives(project, name, downloads)
    for words in commands(name, downloads / LAYOUTS[name].given, share):
        key = shown(words) if shown(words) not in found.usages else f"{shown(words)} (again)"
        printed, found.usages[key] = run(project, words)
        if words[1] == "plan":
            found.plan = json.loads(printed)
        if words[1] == "reproduce" and not found.steps:
            found.steps = step_seconds(project, name)
    found.num_bytes = {"archive": before["raw"]} | {what: size - before[what] for what, size in sizes(project, downloads, name).items()}
    check_counts(project, name, found.counts)
    return found


def commands(name: str, given: Path, share: float) -> list[tuple[str, ...]]:
    """Return the commands for a dataset."""
    part = ("--part",) if share < 1 else ()
    reproduce = ("dml", "reproduce", TABLE, "--dataset", name)
    return [
        ("dml", "data", "add", name, str(given), *part),
        ("dml", "data", "check", name),
        ("dml", "plan", TABLE, "--dataset", name, "--json"),
        ("dvc", "repro", f"prepare@{name}"),
        reproduce,
        reproduce,
    ]


def sizes(project: Path, downloads: Path, name: str) -> dict[str, int]:
    """Return kind of output -> bytes. Raw files are in the project, or next to the archive if a folder was added."""
    state, store = folder_bytes(project / "state"), folder_bytes(project / "state/store")
    return {
        "raw": folder_bytes(downloads) + folder_bytes(project / "data/raw" / name),
        "packed": folder_bytes(project / "data/packed" / name),
        "DVC's cache": folder_bytes(project / ".dvc/cache"),
        "store": store,
        "rest of the state": state - store,
    }


def check_counts(project: Path, name: str, counts: Mapping[str, Counts]) -> None:
    """Exit if the packed dataset's counts differ from those drawn."""
    roles = read_info(project / "data/packed" / name).roles
    packed = {role: Counts(of_role.num_images, of_role.num_classes) for role, of_role in roles.items()}
    if packed != counts:
        sys.exit(f"{name}: packed are {packed}, drawn were {dict(counts)}")


def check_page(project: Path, datasets: list[str]) -> None:
    """Exit if a column of these datasets has no measured figure on the table's page."""
    page = json.loads((project / f"results/site/{TABLE}.json").read_text())
    measured = [line["cells"] for row in page["rows"] for line in row["lines"]]
    for number, column in enumerate(page["columns"]):
        if column["dataset"] in datasets and all(cells[number] is None for cells in measured):
            sys.exit(f"{TABLE}: {column['metric']} on {column['dataset']} was not measured")


# ---------------------------------------------------------------- report


def as_markdown(found: Mapping[str, Rehearsal], pages: Mapping[str, Usage], share: float) -> str:
    """Return the machine and three tables: time and memory of each command, disk use, and the plan compared with the measurements."""
    of = "all images" if share == 1 else f"a share of {share:g}"
    usages = [usage for one in found.values() for usage in one.usages.values()] + list(pages.values())
    minutes = sum(usage.seconds for usage in usages) / 60

    times = [line for name, one in found.items() for line in time_rows(name, one)]
    times += [usage_row("all", command, None, usage) for command, usage in pages.items()]
    kinds = list(next(iter(found.values())).num_bytes)
    disk = [[name, *(f"{one.num_bytes[kind] / MB:.1f}" for kind in kinds)] for name, one in found.items()]
    return "\n\n".join(
        [
            f"{processor()}, {os.cpu_count()} cores; {of}; {minutes:.0f} minutes in all",
            markdown_table(("dataset", "command", "images", "s", "processor s", "images/s", "memory, GB", "training process, GB"), times),
            markdown_table(("dataset", *(f"{kind}, MB" for kind in kinds)), disk),
            markdown_table(PLAN_TITLES, [plan_row(name, one) for name, one in found.items()]),
        ]
    )


def time_rows(name: str, found: Rehearsal) -> Iterator[list[str]]:
    """Yield a row for each command, and below the first `dml reproduce` one for each of its steps."""
    seen = {"train": found.counts["train"].num_images, "embed": found.num_tested, "evaluate": found.num_tested}
    for command, usage in found.usages.items():
        is_whole = command == "drawing" or command.startswith(("dml data", "dvc"))
        yield usage_row(name, command, found.num_images if is_whole else None, usage)
        for step, seconds in found.steps.items() if command.startswith("dml reproduce") and "again" not in command else ():
            yield usage_row(name, f"of it: {step}", seen.get(step), Usage(seconds))


def usage_row(name: str, command: str, num_images: int | None, usage: Usage) -> list[str]:
    """Return the cells of a row; unmeasured values are empty."""
    rate = f"{num_images / max(usage.seconds, 0.01):,.0f}" if num_images else ""
    memory = [f"{size / GB:.1f}" if size else "" for size in (usage.all_bytes, usage.training_bytes)]
    cpu = f"{usage.cpu_seconds:.0f}" if usage.cpu_seconds else ""
    return [name, command, f"{num_images:,}" if num_images else "", f"{usage.seconds:.0f}", cpu, rate, *memory]


def plan_row(name: str, found: Rehearsal) -> list[str]:
    """Return the planned and the measured values."""
    training_bytes = max(usage.training_bytes for usage in found.usages.values())
    written = sum(found.num_bytes[kind] for kind in ("packed", "DVC's cache", "store", "rest of the state"))
    sizes = [found.plan["disk_bytes"], written, found.plan["memory_bytes"], training_bytes]
    planned = found.plan["seconds"]
    taken = found.steps["train"] + found.steps["embed"]
    return [name, *(f"{size / MB:,.0f}" for size in sizes), "no estimate" if planned is None else f"{planned:.0f}", f"{taken:.0f}"]


if __name__ == "__main__":
    main()
