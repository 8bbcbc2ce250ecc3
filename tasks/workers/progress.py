"""Progress of a flow in the driver's terminal: current work, position, finished runs.

In a terminal: permanent lines, and below them the progress of all runs and a bar for the current one. Piped: the same lines, and every 15
seconds one with a run's position. The runs' own log lines (`logging`) are for Prefect's pages and are not printed here.
"""

import logging
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from dml_core.errors import printable
from dml_core.training import history
from tasks.wording import duration

PLAIN_SECONDS = 15.0
WIDE = 110  # columns; narrower terminals have no room for the bar and the rate next to the time left
logger = logging.getLogger(__name__)


class Terminal(Console):
    """Standard error. If its reader has closed it, BrokenPipeError is raised; rich would end the process with exit code 1."""

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False)

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled."""
        raise


class ProgressDisplay:
    """Shows every run's steps, messages and end, by default on standard error; thread-safe. `close` removes the bars."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Terminal()
        self._is_wide = self._console.width >= WIDE
        self._bars = Progress(
            TextColumn("{task.description}"),
            *([_TrainingOnly(BarColumn(bar_width=24))] if self._is_wide else []),
            TextColumn("{task.fields[where]}"),
            _TrainingOnly(TimeRemainingColumn()),
            console=self._console,
            transient=True,
            refresh_per_second=4,
        )
        self._rows: dict[str, TaskID] = {}
        self._training: set[str] = set()  # titles of the runs that have begun to train and have not ended
        self._all: TaskID | None = None
        self._printed = time.monotonic()
        self._num_runs = self._num_to_train = self._num_done = self._num_trained = 0
        self._first_started: float | None = None

    def say(self, text: str) -> None:
        """Print a permanent line above the bars."""
        text = printable(text)
        self._console.print(text, markup=False, soft_wrap=True)
        logger.info("%s", text)

    def plan(self, num_runs: int, num_to_train: int) -> None:
        """Add this many runs, some of which have to train; called before the first of them ends."""
        self._num_runs += num_runs
        self._num_to_train += num_to_train
        if self._console.is_terminal and num_to_train and self._all is None:
            self._bars.start()
            self._all = self._bars.add_task(self._overall(), total=None, where="", training=False)

    def step(self, title: str, doing: str) -> None:
        """Show a run's current step other than training."""
        logger.info("%s: %s", title, doing)
        self._show(title, None, 0, doing)

    def __call__(self, title: str, message: history.Progress) -> None:
        """Show the position of a run's training."""
        self._training.add(title)
        loss, rate = message.metrics["loss"], message.images_per_second
        where = f"epoch {message.epoch + 1}/{message.num_epochs}  loss {loss:.3f}"
        if self._is_wide or not self._console.is_terminal:
            where += f"  {rate:.0f} images/s"
        if message.epoch_ended:
            parts = ", ".join(f"{name} {value:.4f}" for name, value in message.metrics.items())
            logger.info("%s: epoch %d of %d: %s (%.0f images/s)", title, message.epoch + 1, message.num_epochs, parts, rate)
        self._show(title, message.num_epochs * message.num_steps, message.epoch * message.num_steps + message.step, where)
        if not self._console.is_terminal and time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._printed = time.monotonic()
            self._console.print(f"{title}: {where}", markup=False, soft_wrap=True)

    def finished(self, title: str, trained: bool, line: str | None) -> None:
        """Record that a run has ended, and print a line unless it was reused (None); `trained`: it was one of those that had to train."""
        self._num_done += 1
        self._num_trained += trained
        self._training.discard(title)
        if title in self._rows:
            self._bars.remove_task(self._rows.pop(title))
        if line is not None:
            is_counted = self._num_runs > 1 and self._all is None
            self.say(f"{line}  ({self._num_done} of {self._num_runs} done{self._left()})" if is_counted else line)
        if self._all is not None:
            self._bars.update(self._all, description=self._overall())

    def close(self) -> None:
        """Remove the bars."""
        if self._all is not None:
            self._bars.stop()

    def _show(self, title: str, total: int | None, completed: int, where: str) -> None:
        """Update the row of a run; the first call starts the clock for the time estimate."""
        if self._first_started is None:
            self._first_started = time.monotonic()
        if self._all is None:
            return
        if title not in self._rows:
            self._rows[title] = self._bars.add_task(title, total=total, where=where, training=False)
        self._bars.update(self._rows[title], total=total, completed=completed, where=where, training=total is not None)

    def _overall(self) -> str:
        """Return the progress of all runs, with the time left."""
        return f"run {min(self._num_done + 1, self._num_runs)} of {self._num_runs}{self._left()}"

    def _left(self) -> str:
        """Return the time left by the rate at which runs end, published and all; those that train now are half done on average."""
        num_left = self._num_to_train - self._num_trained
        if not self._num_trained or not num_left or self._first_started is None:
            return ""
        half_done = min(len(self._training), num_left) / 2
        elapsed = time.monotonic() - self._first_started
        return f", about {duration((num_left - half_done) * elapsed / (self._num_trained + half_done))} left"


class _TrainingOnly(ProgressColumn):
    """Wraps a column, which stays empty for runs that are not training and for the row of all runs."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__(column.get_table_column())
        self._column = column

    def render(self, task: Task) -> Text:
        """Return the column's cell."""
        return self._column(task) if task.fields["training"] else Text("")  # type: ignore[return-value]
