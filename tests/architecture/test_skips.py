"""With CI=true, disallowed skips fail the test run; exceptions in threads and destructors always do."""

import pytest

from tests.conftest import ROOT

pytest_plugins = ["pytester"]

PLAIN = "def test_plain():\n    pass\n"
GPU = "import pytest\ndef test_gpu():\n    pytest.skip('no GPU here')\n"
OTHER = "import pytest\ndef test_other():\n    pytest.skip('PostgreSQL is not installed')\n"
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_package_at_all')\ndef test_other():\n    pass\n"
IN_A_THREAD = (
    "import threading\ndef test_thread():\n    def fail():\n        raise RuntimeError('unseen')\n"
    "    thread = threading.Thread(target=fail)\n    thread.start()\n    thread.join()\n"
)
IN_A_DESTRUCTOR = (
    "class Loader:\n    def __del__(self):\n        raise RuntimeError('DataLoader worker exited unexpectedly')\n"
    "def test_destructor():\n    Loader()\n"
)


@pytest.mark.parametrize(
    ("content", "ci", "rc", "said"),
    [
        (PLAIN, "true", 0, "1 passed"),
        (GPU, "true", 0, "1 skipped"),
        (OTHER, "true", 1, "test_it.py::test_other: PostgreSQL is not installed"),
        (OTHER, "false", 0, "1 skipped"),
        (WHOLE_FILE, "true", 1, "could not import 'no_such_package_at_all'"),
        (IN_A_THREAD, "false", 1, "PytestUnhandledThreadExceptionWarning"),
        (IN_A_DESTRUCTOR, "false", 1, "PytestUnraisableExceptionWarning"),
    ],
    ids=["plain", "gpu", "other", "other, not in CI", "whole file", "thread", "destructor"],
)
def test_what_a_run_ends_with(
    content: str, ci: str, rc: int, said: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    (pytester.path / "test_it.py").write_text(content)
    options = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.skips", "-p", "no:xdist", "-p", "no:hypothesispytest"]
    ran = pytester.runpytest_inprocess(*options, f"--rootdir={pytester.path}", str(pytester.path))
    assert said in ran.stdout.str()
    assert ran.ret == rc
