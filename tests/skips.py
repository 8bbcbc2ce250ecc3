"""With CI=true, a test skipped for a reason that is not allowed fails the run."""

import os
from typing import Any

import pytest

# `.ci/run` installs everything else that tests need. TensorFlow and OpenCV, with which proofs compare converted weights, have separate
# environments, as does Lightning, in which one block of the documentation runs; the papers' texts may not be
# distributed; a machine may not reach PyPI.
ALLOWED_SKIPS = (
    "no GPU here",
    "no npm here",
    "no PyPI here",
    "no TensorFlow here",
    "no OpenCV here",
    "no Lightning here",
    "no buildah, debootstrap and crun here",
    "no Slurm here",
    "no texts of the papers here",
    "no notes on released code here",
)
ENDED_WELL = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
SKIPPED = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SKIPPED] = []
    config.pluginmanager.register(_Skips(config.stash[SKIPPED]))


class _Skips:
    """Collect tests and files skipped for a reason that is not allowed; xdist sends the reports of all its processes here."""

    def __init__(self, skipped: list[str]) -> None:
        self._skipped = skipped

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")
        if reason not in ALLOWED_SKIPS:
            self._skipped.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[SKIPPED] and os.environ.get("CI") == "true" and session.exitstatus in ENDED_WELL:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash[SKIPPED] and os.environ.get("CI") == "true":
        terminalreporter.section("skipped, and not in ALLOWED_SKIPS (tests/skips.py)", red=True)
        for line in config.stash[SKIPPED]:
            terminalreporter.line(line)
