"""Times of starts on this machine (Prefect, Ray, its workers, the service): the last one of each announces the next.

`start_times.json` in the state folder is sealed and has host name -> what was started -> seconds.
"""

import contextvars
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dml_core.errors import StoreError
from tasks.locks import alone
from tasks.sealed import read_or_set_aside, write_sealed

START_TIMES_FILE = "start_times.json"
CLOCK_SECONDS = 15.0
_TIMES = dict[str, dict[str, float]]


class StartTimes:
    """Announces starts, measures them, and reports how long the slow ones have taken. Thread-safe.

    Times are optional: if the file cannot be read or written, nothing is announced or recorded, and the start continues. `say` receives
    lines about starts that take longer than the last ones.
    """

    def __init__(self, state: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = state / START_TIMES_FILE, say
        self._shown: set[str] = set()  # starts whose clock is running; of several at the same time one is shown

    def about(self, what: str) -> str:
        """Return ` (about 20 s)` by the last start on this machine, or an empty text if none was measured."""
        seconds = self._last(what)
        return "" if seconds is None else f" (about {seconds:.0f} s)"

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Measure the start in the body, and record it unless it fails.

        One that takes longer than the last one, and longer than CLOCK_SECONDS, is reported, and again whenever its time has doubled.
        """
        began, over = time.monotonic(), threading.Event()
        if is_shown := what not in self._shown:
            self._shown.add(what)
            inside = contextvars.copy_context()  # of the flow, for its log
            threading.Thread(target=inside.run, args=(self._report, what, began, over), name=f"clock-{what}", daemon=True).start()
        try:
            yield
        finally:
            over.set()
            if is_shown:
                self._shown.discard(what)
        self._record(what, time.monotonic() - began)

    def _report(self, what: str, began: float, over: threading.Event) -> None:
        last = self._last(what)
        before = "" if last is None else f" (last time {last:.0f} s)"
        next_line = max(CLOCK_SECONDS, last or 0.0)
        while not over.wait(began + next_line - time.monotonic()):
            with suppress(BrokenPipeError):  # the flow's own lines report a closed terminal
                self._say(f"starting {what}: {time.monotonic() - began:.0f} s so far{before}")
            next_line *= 2

    def _last(self, what: str) -> float | None:
        with suppress(StoreError):
            return (read_or_set_aside(self._path, _TIMES) or {}).get(platform.node(), {}).get(what)
        return None

    def _record(self, what: str, seconds: float) -> None:
        with suppress(StoreError), alone(self._path.with_name(f".{START_TIMES_FILE}.lock")):
            times = read_or_set_aside(self._path, _TIMES) or {}
            times.setdefault(platform.node(), {})[what] = round(seconds, 1)
            write_sealed(self._path, times)
