"""Check the locked packages for known vulnerabilities with pip-audit; without its service, report the age of each pin: `make audit`.

pip-audit also exits with 0 if it audited nothing, for example behind a mirror of a package index that has no advisories; it then lists the
packages it skipped. So the number of audited packages is what counts. Age is not reported as an audit: it is counted from the day the pin
was added to the lock file according to git; the release itself is older.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from dml_core.errors import ConfigError, DmlError

OLD_DAYS = 180
SECONDS = 900
_PIN = re.compile(r"^\t([A-Za-z0-9._-]+)==([^\s;]+)")


@dataclass(frozen=True)
class Vulnerability:
    """A package with a known vulnerability; `fixed_in` are the versions without it."""

    package: str
    version: str
    identifier: str
    fixed_in: tuple[str, ...]

    @property
    def line(self) -> str:
        """The vulnerability as one line of text."""
        mend = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no fixed version"
        return f"{self.package} {self.version}: {self.identifier}; {mend}"


@dataclass(frozen=True)
class Audit:
    """Result of pip-audit: the number of audited packages, the skipped packages and the vulnerabilities."""

    num_audited: int
    skipped: tuple[str, ...]
    vulnerabilities: tuple[Vulnerability, ...]


def parse_audit(text: str) -> Audit:
    """Parse the JSON output of pip-audit.

    Raises:
        ConfigError: the text is not the JSON of pip-audit 2.
    """
    try:
        entries = json.loads(text)["dependencies"]
        found = [
            Vulnerability(entry["name"], entry["version"], vulnerability["id"], tuple(vulnerability["fix_versions"]))
            for entry in entries
            for vulnerability in entry.get("vulns", ())
        ]
        skipped = tuple(entry["name"] for entry in entries if "skip_reason" in entry)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"pip-audit: the output is not JSON of pip-audit 2 ({type(error).__name__}); run pip-audit by hand") from None
    return Audit(len(entries) - len(skipped), skipped, tuple(found))


def parse_ages(blame: str) -> dict[str, date]:
    """Return the day each pin was added to the lock file, from its `git blame --line-porcelain`."""
    found: dict[str, date] = {}
    day = None
    for line in blame.splitlines():
        if line.startswith("committer-time "):
            day = datetime.fromtimestamp(int(line.partition(" ")[2]), UTC).date()
        elif (pin := _PIN.match(line)) and day is not None:
            found[f"{pin[1]}=={pin[2]}"] = day
    return found


def describe_ages(ages: Mapping[str, date], today: date) -> tuple[str, bool]:
    """Return the pins' ages as one line of text, and whether a pin is older than half a year."""
    if not ages:
        return "the ages of the pins are unknown: the lock file is not in a git checkout", True
    oldest = sorted(ages, key=lambda pin: (ages[pin], pin))
    num_old = sum((today - day).days > OLD_DAYS for day in ages.values())
    first = ", ".join(f"{pin} ({ages[pin]})" for pin in oldest[:3])
    return f"{num_old} of {len(ages)} pins are older than {OLD_DAYS} days; the oldest: {first}", num_old > 0


def ask(lock: Path) -> Audit | None:
    """Audit a lock file with hashes, without downloading or installing anything. Return None if pip-audit's service does not answer."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes", "--disable-pip"]
    ran = subprocess.run(
        [*command, "--format", "json", "--progress-spinner", "off"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    return parse_audit(ran.stdout) if ran.stdout.strip() else None


def main(lock: Path) -> None:
    """Audit a lock file and print the result.

    Raises:
        ConfigError: there are vulnerabilities, or nothing could be audited and pins are old.
    """
    audit = ask(lock)
    if audit is not None and audit.num_audited:
        for found in audit.vulnerabilities:
            print(found.line)
        beside = f"; {len(audit.skipped)} skipped: {', '.join(audit.skipped)}" if audit.skipped else ""
        print(f"{audit.num_audited} packages audited{beside}")
        if audit.vulnerabilities:
            raise ConfigError(f"{len(audit.vulnerabilities)} known vulnerabilities; raise the pins in pyproject.toml, then make lock")
        return
    blame = subprocess.run(
        ["git", "blame", "--line-porcelain", lock.name], cwd=lock.absolute().parent, capture_output=True, text=True, check=False
    )
    said, is_old = describe_ages(parse_ages(blame.stdout), datetime.now(UTC).date())
    print("NOT AUDITED: pip-audit's advisory service cannot be reached")
    print(said)
    if is_old:
        raise ConfigError("not audited, and pins are old or their age is unknown; audit on a machine with a network, or make lock")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except DmlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
