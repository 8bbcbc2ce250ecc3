"""The end of every `dml` verb: the exit code (`flows.cli.exit_codes`), and at most one line on standard error."""

import atexit
import contextlib
import os
import select
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TextIO

from typer._click.exceptions import NoArgsIsHelpError, UsageError

from dml_core.errors import ConfigError, DmlError, StoreError, first_line, printable
from flows.cli.app import HiddenError, app
from flows.cli.exit_codes import BROKEN_PIPE, BUG, DONE, INTERRUPTED, MENDABLE, SUPERVISED_BUG
from tasks.environment import find_project, open_project, prefect_server, ray_folder, shown, without_secrets

SUPERVISED = {"reproduce", "run", "serve", "tune"}
SERVE_GRACE_SECONDS = 8.0  # for requests in progress
PREFECT_GRACE_SECONDS = 4.0  # for a flow that must report its end to a Prefect server
FULL_BYTES = 1 << 20  # of a disk on which databases cannot write any more
FEWER_IMAGES = "embed fewer images at a time (dml embed --batch-size, dml serve --batch), or end other programs on the GPU"
EXTRAS = {  # module -> the extra of pyproject.toml that installs it
    **dict.fromkeys(("ray", "prefect", "mlflow", "sqlalchemy", "dvc", "boto3", "botocore", "optuna", "pandas"), "pipeline"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "h11", "prometheus_client"), "serve"),
}


def run_and_exit() -> None:
    """Run the command and exit. A flow runs in a process supervised by another (`flows.cli.supervisor`)."""
    log: Path | None = None
    codes: list[int] = []  # of a supervised process: its exit code, once it is known
    try:
        _make_streams_safe()
        if set(sys.argv[1:2]) & SUPERVISED and "--help" not in sys.argv and (log := _supervised()) is not None:
            atexit.register(_end_at_once, codes)  # the first to be registered, so that it runs last
        try:
            code: int | str | None = app(standalone_mode=False) or DONE
        except SystemExit as ended:  # from a verb or from completion
            code = ended.code
        except UsageError as error:
            code = _say_usage(error)
        _flush_output()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001  the one place for all that no verb has handled
        code = _report(error.__cause__ if isinstance(error, HiddenError) and error.__cause__ else error, log)
    _close_output()
    if isinstance(code, int):
        codes.append(code)
    sys.exit(code)


def _end_at_once(codes: list[int]) -> None:
    """End a supervised process, whose libraries Python would unload for three seconds; the supervisor ends any process that is left.

    Without an exit code Python ends the process.
    """
    if codes:
        _close_output()
        os._exit(codes[0])


def _supervised() -> Path | None:
    """Continue in a supervised process and return its log file; None outside a project, an error that the command itself reports."""
    from flows.cli.supervisor import supervise
    from tasks.processes import go_on

    try:
        state = open_project().state
    except ConfigError:
        return None
    ray = ray_folder()
    try:
        if sys.argv[1] == "serve":
            return supervise(state / "logs", SERVE_GRACE_SECONDS, "rerun the command to start it again", ray)
        return supervise(state / "logs", PREFECT_GRACE_SECONDS if prefect_server() else 0.0, go_on(), ray)
    except OSError as error:
        if ray is not None:
            ray.rmdir()
        raise StoreError(f"{state}: cannot be written ({error.strerror}); set DML_STATE to a writable folder") from None


# ---------------------------------------------------------------- errors


def _report(error: BaseException, log: Path | None) -> int:
    """Print a verb's error as one line, and return the exit code; `log` is the log file of a supervised flow."""
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        return BROKEN_PIPE
    full = "" if "No space left" in str(error) else _full_disk()
    if isinstance(error, DmlError) and not error.unforeseen:
        return _say(f"{error}{full}", MENDABLE)
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get(str(error.name).partition(".")[0])):
        return _say(f"{error.name} is not installed; in the project's folder: pip install -e '.[{extra}]'", MENDABLE)
    path = _write_traceback(error, log)
    what = str(error) if isinstance(error, DmlError) else f"unexpected {type(error).__name__}"
    if full:
        return _say(f"{what}{full}; details in {path}", MENDABLE)
    if isinstance(error, DmlError):
        return _say(f"{what}; details in {path}", BUG if log is None else SUPERVISED_BUG)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which most commands do not load
        return _say(f"{first_line(error)}; {FEWER_IMAGES}; details in {path}", MENDABLE)
    api = prefect_server()
    if api and (fault := _fault_of_server(error)):
        return _say(f"Prefect's server at {shown(api)} {fault}; details in {path}", MENDABLE)
    if isinstance(error, OSError) and error.strerror and not isinstance(error, BrokenPipeError):
        path_name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
        what = error.strerror if error.filename is None else f"{path_name or 'the empty path'}: {error.strerror}; check this path"
        return _say(f"{what}; details in {path}", MENDABLE)
    return _say(f"{what}; the traceback is in {path}", BUG if log is None else SUPERVISED_BUG)


def _say(line: str, code: int) -> int:
    """Print an error as one line, without secrets; return the exit code."""
    with contextlib.suppress(OSError):  # standard error itself may be closed or full
        print(f"error: {printable(' '.join(without_secrets(line).split()))}", file=sys.stderr, flush=True)
    return code


def _say_usage(error: UsageError) -> int:
    """Print what is wrong with the command's words as one line, or the help of a group without a verb; return the exit code."""
    if isinstance(error, NoArgsIsHelpError):
        error.show()
        return MENDABLE
    message = error.format_message().replace("Value error, ", "")  # pydantic's prefix
    end = "" if message.endswith((".", "?")) else "."
    return _say(f"{message}{end} See {error.ctx.command_path} --help" if error.ctx else message, MENDABLE)


def _full_disk() -> str:
    """Return words on the state folder's disk if it is full, else nothing: servers and libraries then fail with errors of their own."""
    with contextlib.suppress(Exception):  # the cause of the error may also break this
        state = find_project().state
        disk = os.statvfs(state)
        free = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail  # root writes into a reserve
        if disk.f_blocks and free * disk.f_frsize < FULL_BYTES:
            return f"; No space left on device at {state}: free space, then rerun"
    return ""


def _write_traceback(error: BaseException, log: Path | None) -> Path:
    """Append a traceback to the log file, or without one to a new file in the state folder; else in the system's temporary folder."""
    text = without_secrets("".join(traceback.format_exception(error)))
    name = f"dml-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    paths = [Path(tempfile.gettempdir()) / name]
    with contextlib.suppress(Exception):  # the cause of the error may also break this
        paths.insert(0, log or find_project().state / "logs" / name)
    for path in paths:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return path
    return Path(os.devnull)


def _fault_of_server(error: BaseException | None) -> str | None:
    """Return what the server did and what to do, if it caused an error: it, or one of its causes, is of httpx, Prefect's client."""
    while error is not None:
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            return "refuses the login; set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY"
        if type(error).__module__.partition(".")[0] in ("httpx", "httpcore"):
            return "does not answer; start it, or unset PREFECT_API_URL"
        error = error.__cause__ or error.__context__
    return None


# ---------------------------------------------------------------- standard streams


def _make_streams_safe() -> None:
    """Replace closed standard streams by the null device, and print characters the terminal cannot encode as escapes."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  open until the end
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StoreError(f"standard output cannot be written ({error.strerror}); send it elsewhere") from None


def _reader_is_gone() -> bool:
    """Return whether standard output or standard error is a pipe whose reader has closed it."""
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    return any(flags & select.POLLERR for _, flags in poll.poll(0))


def _close_output() -> None:
    """Flush both streams; a stream that cannot be written is redirected to the null device, or Python would report it at exit."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
