"""Breakpoints in the processes of a run: Python imports this module automatically if its folder is on PYTHONPATH.

With `DML_FAULT_AT=<point>:<n>` and `DML_FAULT_FOLDER` set, the first process of the run that reaches the n-th pass of the point halts: it
makes `hit` in the folder and waits for `go`. The test sees the file and injects the fault. Later passes do not halt. `trace.jsonl` in the
folder records every trained epoch, and every process that passed the point.

This module imports neither torch nor the project: functions are wrapped when the run imports their module.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from pathlib import Path

AT, _, NTH = os.environ.get("DML_FAULT_AT", "").partition(":")
FOLDER = Path(os.environ.get("DML_FAULT_FOLDER", ""))
# point -> module, function in it, and whether the halt is before or after the call
POINTS = {
    "before-checkpoint": ("dml_core.training.checkpoints.file", "save_checkpoint", "before"),
    "in-checkpoint": (
        "dml_core.training.checkpoints.file",
        "_prove",
        "before",
    ),  # the state is in a temporary file, without its proof
    "after-checkpoint": ("dml_core.training.checkpoints.file", "save_checkpoint", "after"),
    "embedding": ("tasks.runs.embeddings", "np.save", "after"),  # a shard is written to a temporary file, not renamed yet
    "evaluating": ("tasks.scores.drawing", "draw_figures", "before"),  # scored, no figures drawn
    "publishing": ("tasks.tracking.tracker", "_new_scores", "before"),  # the model is published; curves, scores and files are not
}
LONGEST_WAIT_SECONDS = 120.0
num_passed = 0


def note(event, **facts):
    """Append a line to the trace, in one write so that lines of several processes do not mix."""
    line = json.dumps({"at": time.monotonic(), "event": event, "process": os.getpid(), **facts}) + "\n"
    with (FOLDER / "trace.jsonl").open("a") as file:
        file.write(line)


def nth():
    """Return the pass to halt at, from a file if there is one, for workers that start before the test sets it."""
    with contextlib.suppress(FileNotFoundError):
        return int((FOLDER / "nth").read_text())
    return int(NTH or 1)


def halt():
    """Wait for `go` if this is the n-th pass and no process has halted yet."""
    global num_passed
    num_passed += 1
    if num_passed != nth():
        return
    with contextlib.suppress(FileExistsError):
        (FOLDER / "hit").touch(exist_ok=False)
        until = time.monotonic() + LONGEST_WAIT_SECONDS
        while not (FOLDER / "go").exists() and time.monotonic() < until:
            time.sleep(0.01)


def halting(function, when):
    @functools.wraps(function)
    def wrapped(*arguments, **named):
        if when == "before":
            halt()
        result = function(*arguments, **named)
        if when == "after":
            halt()
        note("past")
        return result

    return wrapped


def tracing(record_epoch):
    """Trace an epoch when its curves are recorded: its steps are done, its checkpoint is not."""

    @functools.wraps(record_epoch)
    def wrapped(run, epoch, done):
        metrics = record_epoch(run, epoch, done)
        if os.environ.get("RANK", "0") == "0":
            note("epoch trained", epoch=epoch)
        return metrics

    return wrapped


def waiting(train_step):
    """Delay each step until the last checkpoint is written: a thread writes it, which takes longer than an epoch here."""

    @functools.wraps(train_step)
    def wrapped(run, *arguments):
        while run.writer.is_behind:
            sys.modules["dml_core.training.loop"].beat()
            time.sleep(0.01)
        return train_step(run, *arguments)

    return wrapped


def wrap(module, name, wrapper):
    """Wrap a function of a module, or a method of a class in it."""
    *owners, last = name.split(".")
    owner = functools.reduce(getattr, owners, module)
    setattr(owner, last, wrapper(getattr(owner, last)))


def changes():
    """Return module -> functions to wrap and their wrappers, in order."""
    found = {"dml_core.training.loop": [("_record_epoch", tracing), ("_train_step", waiting)]}
    if AT:
        module, name, when = POINTS[AT]
        found.setdefault(module, []).append((name, functools.partial(halting, when=when)))
    return found


class Finder(importlib.abc.MetaPathFinder):
    """Import hook that finds modules in the usual way and wraps their functions after they have been executed."""

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def find_spec(self, name, path, target=None):
        if name not in self.wrapped:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def run_and_wrap(module):
            run(module)
            for function, wrapper in self.wrapped[name]:
                wrap(module, function, wrapper)

        spec.loader.exec_module = run_and_wrap
        return spec


if "DML_FAULT_FOLDER" in os.environ:
    sys.meta_path.insert(0, Finder(changes()))
