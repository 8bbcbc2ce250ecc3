"""One cell of the matrix: a fault occurs while a run is at a certain place, and the run must give the same results as without it.

A run halts at its place (`placed/sitecustomize.py`); the test then injects the fault, lets the run continue, and starts the same command
again if it failed. The results are compared with those of an undisturbed run.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
import psutil
from moto.server import ThreadedMotoServer

from tasks.runs.costs import OTHER
from tests.damage import contents
from tests.e2e.conftest import Project, make_project
from tests.faults.published import published
from tests.faults.services import Clock, MlflowServer, Proxy, SmallDisk

COMMAND = ("run", "synthetic", "softtriple")
EPOCHS = 3
PLACED = Path(__file__).parent / "placed"
LONGEST_SECONDS = 400.0
PAUSE_SECONDS = 5.0
ENDING_SECONDS = 10.0  # a command may run on after the line with its times, which comes before Prefect's end
HOLD_SECONDS = 3.0  # halt at the place while other processes die: longer than the run takes to end the halted one
WHEN = ("before-checkpoint", "in-checkpoint", "after-checkpoint", "embedding", "evaluating", "publishing")
# The run's own processes: part of the command line in the run's process tree.
PROCESSES = {
    "worker": "RayTrainWorker",
    "board": "ray::Board",
    "raylet": "raylet/raylet",
    "GCS": "gcs/gcs_server",
    "Prefect's server": "flows.local_server",
}
HOWS: dict[str, tuple[str, ...]] = {
    "command": ("SIGKILL", "SIGTERM"),
    "driver": ("SIGKILL", "SIGTERM", "SIGSTOP 5 s"),
    "worker": ("SIGKILL", "SIGTERM", "SIGSTOP", "SIGSTOP 5 s"),
    "board": ("SIGKILL", "SIGTERM", "SIGSTOP 5 s"),
    "raylet": ("SIGKILL", "SIGTERM", "SIGSTOP 5 s"),
    "GCS": ("SIGKILL", "SIGTERM", "SIGSTOP 5 s"),
    "Prefect's server": ("SIGKILL", "SIGTERM", "SIGSTOP 5 s"),
    "MLflow": ("SIGKILL", "SIGSTOP", "503", "503 for 5 s"),
    "S3": ("away", "away for 5 s", "503", "503 for 5 s"),
    "disk": ("full", "full for 5 s"),
    "clock": ("+1 h", "-1 h"),
}


# The fault of each victim that the matrix has at every place; it has others at some places.
STANDING = {
    "driver": "SIGKILL",
    "worker": "SIGKILL",
    "board": "SIGKILL",
    "raylet": "SIGKILL",
    "GCS": "SIGKILL",
    "Prefect's server": "SIGKILL",
    "command": "SIGTERM",
    "MLflow": "SIGKILL",
    "S3": "away",
    "disk": "full",
    "clock": "+1 h",
}


@dataclass(frozen=True)
class Cell:
    """A fault: what fails, how, and at which pass `nth` of which place (the number of a checkpoint or of an embedding file)."""

    victim: str
    how: str
    when: str
    nth: int = 1

    @property
    def name(self) -> str:
        return f"{self.victim} / {self.how} / {self.when} {self.nth}"

    @property
    def is_after_training(self) -> bool:
        """True if the last checkpoint exists: a repeated command has nothing to train and does not reach this place again."""
        return self.when == "after-checkpoint" and self.nth == EPOCHS


def place(victim: str, how: str, when: str) -> Cell:
    """Return the cell at the second checkpoint, so that the run can resume from the first; at other places, at the first pass."""
    return Cell(victim, how, when, 2 if "checkpoint" in when else 1)


MATRIX = [place(victim, how, when) for victim, how in STANDING.items() for when in WHEN]
MATRIX += [place("worker", how, when) for how in ("SIGTERM", "SIGSTOP") for when in ("before-checkpoint", "in-checkpoint", "embedding")]
MATRIX += [place(victim, "SIGSTOP 5 s", "in-checkpoint") for victim in ("driver", "board", "raylet", "GCS", "Prefect's server")]
MATRIX += [place("MLflow", how, "publishing") for how in ("503", "503 for 5 s", "SIGSTOP")]
MATRIX += [place("S3", how, when) for how in ("503", "503 for 5 s") for when in ("after-checkpoint", "embedding", "publishing")]
MATRIX += [place("clock", "-1 h", when) for when in ("in-checkpoint", "publishing")]
MATRIX += [Cell("worker", "SIGKILL", "before-checkpoint", 1)]  # before the first checkpoint: training starts again


def every_cell() -> list[Cell]:
    """Return all possible cells, from which a campaign draws."""
    passes = {"embedding": 2, "evaluating": 1, "publishing": 1}
    return [
        Cell(victim, how, when, nth)
        for victim, hows in HOWS.items()
        for how in hows
        for when in WHEN
        for nth in range(1, 1 + passes.get(when, EPOCHS))
    ]


@dataclass
class Outcome:
    """How a cell ended.

    Attributes:
        ended: what completed the run: "by itself", "the same command again" or "dml sync"; "" if nothing did.
        exit_code: exit code of the first command.
        said: its last line.
        seconds_to_recover: time from the fault until the run was past the place of the fault.
        seconds_to_end: time from the fault to the run's end.
        epochs_lost: number of epochs that were trained completely more than once; there is a checkpoint after each.
        falls_short: violations of the requirements; empty means green.
        load: load average of the machine at the end of the cell.
        share_between_steps: part of the printed wall clock that belongs to no step; None if no command printed it.
    """

    cell: Cell
    ended: str = ""
    exit_code: int | None = None
    said: str = ""
    seconds_to_recover: float | None = None
    seconds_to_end: float = 0.0
    epochs_lost: int = 0
    falls_short: list[str] = field(default_factory=list)
    load: float = 0.0
    share_between_steps: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Ground:
    """The objects that the cells of a session share: a small project, and the files and MLflow entries of its undisturbed run.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project: Project = make_project(folder / "project", ("softtriple",))
        self.project.change(
            comparison={"protocol": {"num_epochs": EPOCHS}, "datasets": {"synthetic": {"num_epochs": EPOCHS}}},
            scale={"num_workers": 1, "hang_minutes": 0.5},
        )
        self._num_cells = 0

    @cached_property
    def undisturbed(self) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Every file of an undisturbed run in its store, and its entries in MLflow."""
        state = self.folder / "undisturbed"
        self.project.run("dml", *COMMAND, DML_STATE=str(state))
        store, mlflow = contents(state / "store"), published(state / "mlflow.db", state / "mlartifacts")
        trained = [run for run in mlflow["runs"] if run["points"] and run["settings"] and run["files"] and run["status"] == "FINISHED"]
        assert store, "nothing to compare with"
        assert trained, "nothing to compare with"
        assert mlflow["models"], "nothing to compare with"
        return store, mlflow

    @cached_property
    def _empty_databases(self) -> Path:
        """Folder of Prefect's and MLflow's databases with empty tables: creating them takes more time than a run."""
        folder = self.folder / "empty"
        (folder / "prefect").mkdir(parents=True)
        make = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1]).search_experiments()"
        subprocess.run([sys.executable, "-c", make, f"sqlite:///{folder / 'mlflow.db'}"], check=True, capture_output=True)
        environment = self.project.environment | {"PREFECT_HOME": str(folder / "prefect")}
        subprocess.run(
            [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"], env=environment, check=True, capture_output=True
        )
        return folder

    def new_folder(self) -> Path:
        """Make a folder for a cell."""
        self._num_cells += 1
        folder = self.folder / f"cell-{self._num_cells}"
        folder.mkdir()
        return folder

    def fill_state(self, state: Path) -> None:
        """Give a state folder its empty databases."""
        shutil.copytree(self._empty_databases, state, dirs_exist_ok=True)

    def run(self, cell: Cell) -> Outcome:
        """Run a cell and return its outcome."""
        expected = self.undisturbed  # computed before anything is timed
        with ExitStack() as stack:
            return _Struck(self, cell, stack).run(expected)


class _Struck:
    """One run with one fault."""

    def __init__(self, ground: Ground, cell: Cell, stack: ExitStack) -> None:
        self.cell, self.ground = cell, ground
        self.folder = ground.new_folder()
        self.state = self.folder / "state"
        self.outcome = Outcome(cell)
        self.prefix: list[str] = []
        self.mlflow: MlflowServer | None = None
        self.proxy: Proxy | None = None
        self.disk: SmallDisk | None = None
        self.clock: Clock | None = None
        self.undo: Callable[[], None] = lambda: None
        self.environment = {"DML_STATE": str(self.state), "PYTHONPATH": f"{PLACED}{os.pathsep}{ground.project.root}"}
        self.environment |= {"DML_FAULT_AT": f"{cell.when}:{cell.nth}", "DML_FAULT_FOLDER": str(self.folder)}
        self.process: subprocess.Popen[bytes] | None = None
        stack.callback(self._end_all)
        if cell.victim == "MLflow":
            self._put_on_mlflow(stack)
        if cell.victim == "S3":
            self._put_on_s3(stack)
        if cell.victim == "disk":
            self.disk = SmallDisk(self.state, 64)
            self.prefix = self.disk.inside(ground.project.root)
            stack.callback(self.disk.close)
        if cell.victim == "clock":
            self.clock = Clock(self.folder)
            self.environment |= self.clock.environment
        ground.fill_state(self.disk.seen_from_here if self.disk else self.state)

    # ------------------------------------------------------------ the run

    def run(self, expected: tuple[dict[str, bytes], dict[str, Any]]) -> Outcome:
        outcome = self.outcome
        started_at = time.monotonic()
        code = self._start("first")
        if not self._until(lambda: (self.folder / "hit").exists() or code() is not None) or not (self.folder / "hit").exists():
            outcome.falls_short.append(f"did not come to the place: {self._said()}")
            return outcome
        struck_at = time.monotonic()
        self._strike()
        if self.cell.how in ("SIGKILL", "SIGTERM") and self.mlflow is None:
            self._until(lambda: code() is not None, HOLD_SECONDS)
        (self.folder / "go").touch()
        if "5 s" in self.cell.how:
            time.sleep(PAUSE_SECONDS)
            self.undo()
        if not self._until(lambda: code() is not None):
            outcome.falls_short.append(f"did not end within {LONGEST_SECONDS:.0f} s")
            self._end_all()
        outcome.exit_code, outcome.said = code(), self._said()
        self._check_times("first", time.monotonic() - started_at)
        self._nothing_runs_on("the first command's end")
        self.undo()
        waiting = any((self._seen_state / "outbox").glob("*.json")) if (self._seen_state / "outbox").exists() else False
        if outcome.exit_code == 0 and not waiting:
            outcome.ended = "by itself"
        else:
            again = ("sync",) if outcome.exit_code == 0 else COMMAND
            started_at = time.monotonic()
            code = self._start("second", again)
            if self._until(lambda: code() is not None) and code() == 0:
                self._check_times("second", time.monotonic() - started_at)
                outcome.ended = "dml sync" if again == ("sync",) else "the same command again"
            else:
                outcome.falls_short.append(f"the second command ended with {code()}: {self._said('second')}")
            self._nothing_runs_on("the second command's end")
        outcome.seconds_to_end = round(time.monotonic() - struck_at, 1)
        outcome.load = round(os.getloadavg()[0], 1)
        self._read_trace(struck_at)
        self._compare(*expected)
        return outcome

    def _start(self, name: str, words: tuple[str, ...] = COMMAND) -> Callable[[], int | None]:
        command = [*self.prefix, sys.executable, "-m", "flows.cli", *words]
        environment = self.ground.project.environment | self.environment
        with (self.folder / f"{name}.txt").open("wb") as printed:
            root = self.ground.project.root
            process = subprocess.Popen(command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)
        self.process = process
        return process.poll

    def _until(self, found: Callable[[], bool], seconds: float = LONGEST_SECONDS) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found():
                return True
            time.sleep(0.05)
        return False

    # ------------------------------------------------------------ the fault

    def _strike(self) -> None:
        how = self.cell.how.removesuffix(f" for {PAUSE_SECONDS:.0f} s").removesuffix(f" {PAUSE_SECONDS:.0f} s")
        if self.mlflow is not None and how.startswith("SIG"):
            server = self.mlflow
            server.signal(getattr(signal, how))
            self.undo = (lambda: server.signal(signal.SIGCONT)) if how == "SIGSTOP" else server.start
        elif self.proxy is not None:
            proxy = self.proxy
            proxy.set(how)  # type: ignore[arg-type]
            self.undo = lambda: proxy.set("pass")
        elif self.disk is not None:
            self.disk.fill()
            self.undo = self.disk.free
        elif self.clock is not None:
            self.clock.jump(3600 * int(how.removesuffix(" h")))
        else:
            struck = self._victims()
            for process in struck:
                process.send_signal(getattr(signal, how))
            if how == "SIGSTOP" and how != self.cell.how:
                self.undo = lambda: [process.send_signal(signal.SIGCONT) for process in struck if process.is_running()] and None

    def _victims(self) -> list[psutil.Process]:
        assert self.process is not None
        command = psutil.Process(self.process.pid)
        if self.cell.victim == "command":
            return [command]
        if self.cell.victim == "driver":
            return command.children()[:1]
        part = PROCESSES[self.cell.victim]
        found = []
        for process in command.children(recursive=True):
            try:
                if any(part in word for word in process.cmdline()[:8]):
                    found.append(process)
            except psutil.Error:
                continue
        assert found, f"no process of this run is {self.cell.victim}"
        return found[:1]

    def _put_on_mlflow(self, stack: ExitStack) -> None:
        self.mlflow = MlflowServer(self.folder / "mlflow")
        self.proxy = Proxy(("127.0.0.1", self.mlflow.port))
        self.environment["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{self.proxy.port}"
        stack.callback(self.mlflow.signal, signal.SIGKILL)
        stack.callback(self.proxy.close)

    def _put_on_s3(self, stack: ExitStack) -> None:
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        stack.callback(server.stop)
        self.proxy = Proxy(server.get_host_and_port())
        stack.callback(self.proxy.close)
        address = f"http://127.0.0.1:{self.proxy.port}"
        login = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        self.bucket_name = f"faults-{self.folder.name}"  # moto's servers in one process share their buckets
        self.environment |= login | {"AWS_ENDPOINT_URL": address, "DML_STORE": f"s3://{self.bucket_name}/team"}
        self.bucket = boto3.client(
            "s3", endpoint_url=address, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
        )
        self.bucket.create_bucket(Bucket=self.bucket_name)

    # ------------------------------------------------------------ the outcome

    @property
    def _seen_state(self) -> Path:
        return self.disk.seen_from_here if self.disk else self.state

    def _said(self, name: str = "first") -> str:
        lines = [line for line in (self.folder / f"{name}.txt").read_text(errors="replace").splitlines() if line.strip()]
        said = lines[-1] if lines else ""
        return said.replace(str(self.folder), "CELL").replace(str(self.ground.folder), "GROUND")

    def _of_this_cell(self) -> list[psutil.Process]:
        """Return every process that one of the cell's commands started, directly or not.

        Each has inherited their environment and working folder. Ray's agents only show the folder: their title overwrites the environment.
        """
        found, mark, root = [], f"DML_FAULT_FOLDER={self.folder}\0".encode(), self.ground.project.root
        for process in psutil.process_iter():
            try:
                folder = Path(f"/proc/{process.pid}")
                ours = mark in (folder / "environ").read_bytes() or (folder / "cwd").readlink() == root
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def _check_times(self, command: str, seconds: float) -> None:
        """Compare the times that a command printed with the wall clock; one that failed or reused every step prints none."""
        line = re.search(
            rf"^time: ([\d.]+) s: .*, {OTHER} ([\d.]+)$", (self.folder / f"{command}.txt").read_text(errors="replace"), re.MULTILINE
        )
        if line is None:
            return
        total, of_no_step = map(float, line.groups())
        self.outcome.share_between_steps = round(of_no_step / total, 3)
        if not seconds - ENDING_SECONDS < total <= seconds:
            self.outcome.falls_short.append(f"the {command} command took {seconds:.1f} s: {line[0]}")

    def _nothing_runs_on(self, after: str) -> None:
        until = time.monotonic() + 15
        while (left := self._of_this_cell()) and time.monotonic() < until:
            time.sleep(0.2)
        if left:
            names = sorted({" ".join(process.cmdline())[:80] for process in left})
            self.outcome.falls_short.append(f"15 s after {after} there are still: {names}")

    def _end_all(self) -> None:
        for process in self._of_this_cell():
            with suppress(psutil.Error):
                process.kill()
        if self.process is not None:
            self.process.wait()

    def _read_trace(self, struck_at: float) -> None:
        """Read when the run was past the place again, and how many epochs it trained twice."""
        lines = [json.loads(line) for line in (self.folder / "trace.jsonl").read_text().splitlines()]
        past = [line for line in lines if line["event"] == "past" and line["at"] > struck_at]
        if past:  # of the process whose work was kept: one that continued and then failed does not count
            recovered = next(line["at"] for line in past if line["process"] == past[-1]["process"])
            self.outcome.seconds_to_recover = round(recovered - struck_at, 1)
        elif self.outcome.ended != "by itself" and not self.cell.is_after_training:
            self.outcome.falls_short.append("was never past the place where it was struck")
        times = Counter(line["epoch"] for line in lines if line["event"] == "epoch trained")
        assert len(times) == EPOCHS, f"the trace has epochs {sorted(times)}"
        self.outcome.epochs_lost = sum(count > 1 for count in times.values())
        if self.outcome.epochs_lost > 1:
            self.outcome.falls_short.append(f"{self.outcome.epochs_lost} epochs were trained again, with a checkpoint after each")

    def _compare(self, store: dict[str, bytes], mlflow: dict[str, Any]) -> None:
        differ = self.outcome.falls_short.append
        if self.disk:  # copied: SQLite does not open files in another mount namespace
            shutil.copytree(self.disk.seen_from_here, self.state, dirs_exist_ok=True, ignore=shutil.ignore_patterns("prefect", "ray"))
        found = self._store()
        if changed := sorted(name for name in found.keys() | store.keys() if found.get(name) != store.get(name)):
            differ(f"files differ from those of an undisturbed run: {', '.join(changed)}")
        of_mlflow = self.folder / "mlflow" if self.mlflow else self.state
        there = published(of_mlflow / "mlflow.db", of_mlflow / "mlartifacts")
        if there["models"] != mlflow["models"]:
            differ(f"models in MLflow differ: {_difference(there['models'], mlflow['models'])}")
        if [run["name"] for run in there["runs"]] != [run["name"] for run in mlflow["runs"]]:
            differ(f"runs in MLflow: {[run['name'] for run in there['runs']]}")
            return
        for run, other in zip(there["runs"], mlflow["runs"], strict=True):
            for what in run:
                if run[what] != other[what]:
                    differ(f"MLflow, {run['name']}: {what} differ: {_difference(run[what], other[what])}")

    def _store(self) -> dict[str, bytes]:
        if self.cell.victim != "S3":
            return contents(self.state / "store")
        names = [entry["Key"] for entry in self.bucket.list_objects_v2(Bucket=self.bucket_name).get("Contents", [])]
        steps = [name for name in names if name.split("/")[1] in ("train", "embed", "evaluate") and "/." not in name]
        return {name.removeprefix("team/"): self.bucket.get_object(Bucket=self.bucket_name, Key=name)["Body"].read() for name in steps}


def _difference(found: Any, expected: Any) -> str:
    if not isinstance(found, list):
        return f"{found} instead of {expected}"
    more, fewer = [entry for entry in found if entry not in expected], [entry for entry in expected if entry not in found]
    twice = sorted({str(entry) for entry in found if found.count(entry) > expected.count(entry)})
    return f"{len(more)} more {more[:2]}, {len(fewer)} fewer {fewer[:2]}, {len(twice)} twice {twice[:2]}"
