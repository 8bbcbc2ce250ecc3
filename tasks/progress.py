"""The driver's terminal while runs train: a bar a run with epoch, loss, rate and time left; plain lines where there is no terminal."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dml_core.training import history

PLAIN_SECONDS = 15.0


class ProgressDisplay:
    """Called with every message of every training run; `close` takes the bars away."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}  loss {task.fields[loss]:.3f}  {task.fields[rate]:.0f} images/s"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._told = time.monotonic()

    def __call__(self, title: str, message: history.Progress) -> None:
        """Show where a run is."""
        done = message.epoch * message.num_steps + message.step
        total = message.num_epochs * message.num_steps
        loss = message.metrics["loss"]
        if not self._console.is_terminal:
            if time.monotonic() - self._told >= PLAIN_SECONDS:
                self._told = time.monotonic()
                where = f"epoch {message.epoch + 1}/{message.num_epochs}, loss {loss:.3f}, {message.images_per_second:.0f} images/s"
                self._console.print(f"{title}: {where}", highlight=False, soft_wrap=True)
            return
        if title not in self._tasks:
            self._bars.start()
            self._tasks[title] = self._bars.add_task(title, total=total, epoch=0, epochs=message.num_epochs, loss=loss, rate=0.0)
        self._bars.update(
            self._tasks[title], completed=done, epoch=message.epoch + 1, loss=loss, rate=message.images_per_second, visible=done < total
        )

    def close(self) -> None:
        """Take the bars away."""
        self._bars.stop()
