"""`make audit`: pip-audit's output is parsed, skipped packages do not count as audited, and ages are those of the pins."""

import json
import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from dml_core.errors import ConfigError
from tasks import audit
from tasks.audit import Audit, Vulnerability, describe_ages, parse_ages, parse_audit

# Output of pip-audit 2.10; if an index has no advisories, all packages are reported like the second.
ANSWER = {
    "dependencies": [
        {
            "name": "flask",
            "version": "0.5",
            "vulns": [
                {"id": "PYSEC-2019-179", "fix_versions": ["1.0"], "aliases": ["CVE-2019-1010083"], "description": "..."},
                {"id": "PYSEC-2018-66", "fix_versions": [], "aliases": [], "description": "..."},
            ],
        },
        {"name": "colorama", "skip_reason": "Dependency not found on PyPI and could not be audited: colorama (0.4.6)"},
        {"name": "click", "version": "8.1.0", "vulns": []},
    ],
    "fixes": [],
}
SKIPPED = {"dependencies": [ANSWER["dependencies"][1]], "fixes": []}


def test_an_answer_with_vulnerabilities() -> None:
    found = parse_audit(json.dumps(ANSWER))
    assert found == Audit(
        2, ("colorama",), (Vulnerability("flask", "0.5", "PYSEC-2019-179", ("1.0",)), Vulnerability("flask", "0.5", "PYSEC-2018-66", ()))
    )
    lines = [vulnerability.line for vulnerability in found.vulnerabilities]
    assert lines == ["flask 0.5: PYSEC-2019-179; fixed in 1.0", "flask 0.5: PYSEC-2018-66; no fixed version"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"dependencies": [{"name": "a", "vulns": [{}]}]}', "No known vulnerabilities found"])
def test_an_answer_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="not JSON of pip-audit 2"):
        parse_audit(text)


def locked(folder: Path, *days: str) -> Path:
    """Create a repository whose lock file got a pin on each of these days."""
    lock = folder / "requirements.lock"
    for number, day in enumerate(days):
        with lock.open("a") as file:
            file.write(f"package-{number}==1.{number} ; sys_platform == 'linux' \\\n    --hash=sha256:{number:064x}\n")
        for words in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-qm", day]):
            when = {"GIT_AUTHOR_DATE": f"{day}T12:00:00Z", "GIT_COMMITTER_DATE": f"{day}T12:00:00Z"}
            subprocess.run(["git", *words], cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **when}, check=True)
    return lock


def test_a_pin_is_as_old_as_the_commit_that_brought_it(tmp_path: Path) -> None:
    lock = locked(tmp_path, "2026-01-10", "2026-11-20")
    blame = subprocess.run(["git", "blame", "--line-porcelain", lock.name], cwd=tmp_path, capture_output=True, text=True, check=True)
    ages = parse_ages(blame.stdout)
    assert ages == {"package-0==1.0": date(2026, 1, 10), "package-1==1.1": date(2026, 11, 20)}
    said, is_old = describe_ages(ages, date(2026, 11, 22))
    assert said == "1 of 2 pins are older than 180 days; the oldest: package-0==1.0 (2026-01-10), package-1==1.1 (2026-11-20)"
    assert is_old
    assert not describe_ages(ages, date(2026, 3, 1))[1]
    assert describe_ages({}, date(2026, 3, 1))[1]


def test_where_everything_was_skipped_nothing_is_called_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    young = locked(tmp_path, datetime.now(UTC).date().isoformat())
    for answer in (None, parse_audit(json.dumps(SKIPPED))):
        monkeypatch.setattr(audit, "ask", lambda lock, answer=answer: answer)
        audit.main(young)
        said = capsys.readouterr().out
        assert said.startswith("NOT AUDITED")
        assert "packages audited" not in said
    monkeypatch.setattr(audit, "ask", lambda lock: parse_audit(json.dumps(ANSWER)))
    with pytest.raises(ConfigError, match="2 known vulnerabilities"):
        audit.main(young)
    assert "2 packages audited; 1 skipped: colorama" in capsys.readouterr().out


def test_pip_audit_takes_the_command_and_the_whole_lock() -> None:
    """A dry run collects the packages to audit without a request to pip-audit's service."""
    lock = Path(__file__).parents[2] / "requirements.lock"
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes", "--disable-pip", "--dry-run"]
    ran = subprocess.run([*command, "--format", "json", "--progress-spinner", "off"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "would have audited" in ran.stderr.lower(), ran.stderr
