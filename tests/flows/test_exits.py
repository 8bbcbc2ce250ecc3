"""The exit of every verb after any error: exit code, a one-line message, and no traceback on the terminal.

All verbs end in the same place: each is tried with one error, those that end in their own way with one of each kind, and two with all.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dml_core.config import merge, read_yaml
from dml_core.errors import DmlError, SavedNetworkError
from flows.cli import exits, main
from tests.conftest import ROOT
from tests.flows.verbs import ARGUMENTS, dml, leaves

VERBS = dict(leaves())
SECRET = "a-very-secret-word"
ALL_ERRORS = ("run", "data list")  # a verb whose process is supervised, and one of a group
EACH_KIND = sorted({*exits.SUPERVISED, "data list", "doctor"})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in the working directory, in a process that counts as supervised."""
    (tmp_path / "params.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DML_STATE", raising=False)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(exits, "_supervised", lambda: tmp_path / "state/logs/dml-flow.log")
    monkeypatch.setattr(exits, "_end_at_once", lambda codes: None)  # pytest would end with the first verb's exit code
    return tmp_path


def ending(words: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of `dml` if a verb raises an error at its start."""

    def broken(**_: Any) -> None:
        raise error

    monkeypatch.setattr(VERBS[words], "callback", broken)
    monkeypatch.setattr(sys, "argv", ["dml", *words.split(), *ARGUMENTS[words]])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(str(ended.value.code))


def test_every_verb_has_arguments() -> None:
    assert sorted(ARGUMENTS) == sorted(VERBS), "a verb is new or gone: tests/flows/verbs.py names arguments for each"


def mendable() -> list[type[DmlError]]:
    """Return every class of errors that a user can fix."""
    found = [DmlError]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if not kind.unforeseen]


@pytest.mark.parametrize("words", sorted(VERBS))
def test_what_a_person_can_mend_is_one_line(
    words: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DML_TEST_TOKEN", SECRET)
    for kind in mendable() if words in ALL_ERRORS else [DmlError]:
        try:
            error = kind(f"here: wrong\n  with {SECRET}; mend it")
        except TypeError:
            continue  # its constructor takes other arguments
        assert ending(words, error, monkeypatch) == 2
        assert capsys.readouterr().err == "error: here: wrong with ***; mend it\n"
    assert not (project / "state").exists()


@pytest.mark.parametrize("words", EACH_KIND)
def test_what_nobody_foresaw_is_one_line_and_a_traceback_in_a_file(
    words: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DML_TEST_TOKEN", SECRET)
    code = exits.SUPERVISED_BUG if words in exits.SUPERVISED else 1
    errors = [RuntimeError(f"two\nlines with {SECRET} and \udcff"), EOFError("no more"), BrokenPipeError(32, "a socket's"), MemoryError()]
    for error in errors if words in ALL_ERRORS else errors[:1]:
        assert ending(words, error, monkeypatch) == code
        [line] = capsys.readouterr().err.splitlines()
        start, _, log = line.partition("; the traceback is in ")
        assert start == f"error: unexpected {type(error).__name__}"
        assert Path(log).parent == project / "state/logs"
        text = Path(log).read_text()
        assert f"{type(error).__name__}" in text.splitlines()[-1 if error is not errors[0] else -2]
        assert SECRET not in text
    assert "two\nlines with *** and \\udcff" in "".join(path.read_text() for path in (project / "state/logs").iterdir())


def test_too_little_memory_on_a_gpu_names_what_to_lower(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB.")  # torch.OutOfMemoryError
    assert ending("embed", error, monkeypatch) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: CUDA out of memory. Tried to allocate 2 GiB.; embed fewer images at a time (dml embed --batch-size,")
    assert line.count("\n") == 1


@pytest.mark.parametrize("words", EACH_KIND)
def test_a_fault_of_this_program_is_told_in_its_own_words(
    words: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = exits.SUPERVISED_BUG if words in exits.SUPERVISED else 1
    assert ending(words, SavedNetworkError("the network does not open again"), monkeypatch) == code
    assert capsys.readouterr().err.startswith(f"error: the network does not open again; details in {project}/state/logs/")


@pytest.mark.parametrize("words", EACH_KIND)
def test_a_file_that_cannot_be_used_is_named(
    words: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [
        (IsADirectoryError(21, "Is a directory", "a/b"), "a/b: Is a directory; check this path"),
        (PermissionError(13, "Permission denied", b"\xff"), "\\udcff: Permission denied; check this path"),
        (FileNotFoundError(2, "No such file or directory", ""), "the empty path: No such file or directory; check this path"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ]
    for error, said in errors if words in ALL_ERRORS else errors[:1]:
        assert ending(words, error, monkeypatch) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {said}; details in {project}/state/logs/")


@pytest.mark.parametrize("words", ALL_ERRORS)
def test_a_full_disk_is_named_whatever_failed_by_it(
    words: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "state").mkdir()
    (project / "state/logs").write_text("")  # no log can be written there
    monkeypatch.setattr("tempfile.tempdir", str(project / "elsewhere"))
    full = SimpleNamespace(f_blocks=100, f_bfree=1, f_bavail=1, f_frsize=4096)
    monkeypatch.setattr("os.statvfs", lambda path: full if path == project / "state" else SimpleNamespace(f_blocks=0))
    said = f"; No space left on device at {project}/state: free space, then rerun"
    for error, start in [
        (RuntimeError("Server error '500 Internal Server Error'"), f"unexpected RuntimeError{said}; details in {project}/elsewhere/"),
        (SavedNetworkError("the network does not open again"), f"the network does not open again{said}; details in {project}/elsewhere/"),
        (ConnectionResetError(104, "Connection reset by peer"), f"unexpected ConnectionResetError{said}; details in "),
        (DmlError("the server did not start"), f"the server did not start{said}\n"),
        (
            DmlError("x: cannot be written (No space left on device); free space"),
            "x: cannot be written (No space left on device); free space\n",
        ),
    ]:
        assert ending(words, error, monkeypatch) == 2
        assert capsys.readouterr().err.startswith(f"error: {start}")
    assert "Internal Server Error" in "".join(path.read_text() for path in (project / "elsewhere").iterdir())


@pytest.mark.parametrize("words", EACH_KIND)
def test_ctrl_c_is_130_without_a_line(
    words: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending(words, KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("state", ["a file", "a file below", "no project"])
def test_the_traceback_is_kept_where_the_state_cannot_be(
    state: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(project / "elsewhere"))
    if state == "no project":
        (project / "params.yaml").unlink()
    else:
        (project / "state" / ("" if state == "a file" else "logs")).parent.mkdir(exist_ok=True)
        (project / "state" / ("" if state == "a file" else "logs")).write_text("")
    assert ending("data list", ZeroDivisionError(), monkeypatch) == 1
    log = Path(capsys.readouterr().err.strip().rpartition(" ")[2])
    assert log.parent == project / "elsewhere"
    assert "ZeroDivisionError" in log.read_text()


def test_a_prefect_server_that_does_not_answer_or_refuses_the_login_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import httpx
    from prefect.client.base import PrefectHTTPStatusError

    error = RuntimeError("no flow run")
    error.__cause__ = httpx.ConnectError("refused")
    assert ending("run", error, monkeypatch) == exits.SUPERVISED_BUG
    capsys.readouterr()
    monkeypatch.setenv("PREFECT_API_URL", "http://me:word@127.0.0.1:9/api")
    assert ending("run", error, monkeypatch) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: Prefect's server at http://127.0.0.1:9/api does not answer; start it, or unset PREFECT_API_URL; details in "
    )
    refused = httpx.HTTPStatusError("401", request=httpx.Request("GET", "http://x"), response=httpx.Response(401))
    error.__cause__ = PrefectHTTPStatusError.from_httpx_error(refused)
    assert ending("run", error, monkeypatch) == 2
    assert "/api refuses the login; set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY; details in " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "server", "seconds", "advice"),
    [
        ("run", "", 0.0, "to resume from the last checkpoint"),
        ("run --force", "", 0.0, "without --force"),  # which would begin again from the initial weights
        ("run", "http://127.0.0.1:9/api", 4.0, "to resume from the last checkpoint"),
        ("serve", "", 8.0, "to start it again"),
    ],
)
def test_a_flow_that_a_server_records_has_time_to_report_its_end_and_an_interrupted_one_its_own_advice(
    words: str, server: str, seconds: float, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        os, "environ", os.environ | {"PREFECT_API_URL": server, "DML_STATE": str(tmp_path / "state"), "RAY_TMPDIR": str(tmp_path)}
    )
    (tmp_path / "params.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dml", *words.split()])
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("flows.cli.supervisor.supervise", lambda *arguments, **_: calls.append(arguments))
    exits._supervised()
    assert calls[0][:2] == (tmp_path / "state/logs", seconds)
    assert advice in calls[0][2]


# ---------------------------------------------------------------- real processes

INTERRUPTED_AT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == os.environ["AT"]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and background jobs ignore it
sys.meta_path.insert(0, Interrupt())
sys.argv = ["dml", *os.environ["WORDS"].split()]
from flows.cli import main
main()
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("flows.cli.app", "data list"),
        ("typer", "data list"),
        ("typer.core", "data list"),
        ("flows.cli.data", "data list"),
        ("dml_core.errors", "data list"),
        ("flows.cli.exits", "data list"),
        ("tasks.environment", "data list"),
        ("yaml", "data list"),
        ("rich.table", "doctor"),
        ("flows.cli.supervisor", "run own good"),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_130_without_a_line(module: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "AT": module, "WORDS": words}
    shown = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert (shown.returncode, shown.stdout, shown.stderr) == (130, "", "")


@pytest.fixture(scope="module")
def long_list(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose list of datasets exceeds a pipe's buffer."""
    folder = tmp_path_factory.mktemp("project")
    names = [f"a-dataset-of-many-{number:04}" for number in range(100)]
    datasets = {name: {"reader": "folder", "raw": "data/" + 4 * f"{'raw' * 80}/" + name} for name in names}
    text = yaml.safe_dump(merge(read_yaml(ROOT / "params.yaml"), {"datasets": datasets}), allow_unicode=True)
    (folder / "params.yaml").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("| head -1; exit ${PIPESTATUS[0]}", 141, ""),
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("<&-", 0, ""),
    ],
)
def test_standard_streams_that_cannot_be_used(shell: str, code: int, said: str, long_list: Path) -> None:
    shown = dml(["data", "list"], long_list, shell)
    assert (shown.returncode, shown.stderr) == (code, said)


@pytest.mark.parametrize("words", [["data", "list"], ["--version"]])
def test_a_full_device_is_one_line(words: list[str], long_list: Path) -> None:
    shown = dml(words, long_list, ">/dev/full")
    assert shown.returncode == 2
    [line] = shown.stderr.splitlines()
    assert line.startswith("error: ")
    assert "No space left on device" in line


@pytest.mark.parametrize("shell", [">/dev/full 2>&1", "2>/dev/full", "2>&-"])
def test_an_error_that_cannot_be_printed_keeps_its_exit_code(shell: str, long_list: Path) -> None:
    assert dml(["data", "fetch", "none"], long_list, shell).returncode == 2


def test_what_a_terminal_cannot_print_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "vögel"
    folder.mkdir()
    shown = dml(["data", "list"], folder, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "v\\xf6gel: no params.yaml here" in shown.stderr
    shown = dml(["doctor"], tmp_path, PYTHONIOENCODING="ascii")
    assert "Traceback" not in shown.stderr


def test_a_supervised_verb_that_fails_in_an_unforeseen_way(tmp_path: Path) -> None:
    """The error is in the flow's process, whose log file the message names; the command's exit code is 1, not that of the process."""
    (tmp_path / "params.yaml").write_text("")
    code = (
        "import sys; from flows.cli import main, run\n"
        "def broken(*_): raise LookupError('odd')\n"
        "run._check = broken\n"
        "sys.argv = ['dml', 'run', 'own', 'good']\n"
        "main()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 1
    line = shown.stderr.splitlines()[-1]
    assert line.startswith(f"error: unexpected LookupError; the traceback is in {tmp_path}/state/logs/dml-")
    assert "LookupError: odd" in Path(line.rpartition(" ")[2]).read_text()


UNLOADED = """
import atexit, sys
from flows.cli.exits import _end_at_once
class Library:
    def __del__(self):
        print("unloaded", flush=True)
codes = []
atexit.register(_end_at_once, codes)
library = Library()
atexit.register(print, "handler of the library")
codes += {codes}
sys.stdout.write("last words\\n")
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("codes", "printed", "exit_code"),
    [
        ([0], "last words\nhandler of the library\n", 0),
        ([2], "last words\nhandler of the library\n", 2),
        ([], "last words\nhandler of the library\nunloaded\n", 7),
    ],
)
def test_a_supervised_process_ends_after_its_exit_handlers_and_unloads_nothing(codes: list[int], printed: str, exit_code: int) -> None:
    done = subprocess.run([sys.executable, "-c", UNLOADED.format(codes=codes)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (printed, "", exit_code)
