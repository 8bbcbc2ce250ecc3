"""Receipts: the evidence of a project's finished and verified runs in one file, which others reproduce from nothing.

A receipt is JSON with its own SHA-256. The hash detects damage, but not a person who changes content and hash together: that needs a
signature, which OpenSSH makes and verifies (`ssh-keygen -Y`). It is in the file with ".sig" added.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dml_core.errors import ConfigError, StoreError
from dml_core.files import file_sha256, json_sha256
from tasks.environment import Project
from tasks.files import check_output
from tasks.watch.accepting import verified_reference
from tasks.watch.records import Receipt, Reference, Verdict
from tasks.watch.storage import check_runs_once, read_evidence, write_evidence
from tasks.watch.summary import verdict_counts
from tasks.watch.verdicts import verdict_of
from tasks.wording import Say, counted

RECEIPTS = Path("results") / "receipts"  # in the project: receipts that others sent
SIGNERS = "signers"  # file of allowed signers among them, in the format of ssh-keygen(1)
NAMESPACE = "dml-receipt"  # of signatures
LOCK = "requirements.lock"


@dataclass(frozen=True)
class Reproduced:
    """A receipt that others sent, compared with the accepted reference: a line of the page.

    Attributes:
        file: its name.
        receipt: its content; None if it cannot be trusted.
        result: number of runs with each verdict, or why it cannot be trusted.
        signer: who signed it, in words.
    """

    file: str
    receipt: Receipt | None
    result: str
    signer: str = ""


def write_receipt(project: Project, name: str, path: Path, rows: Sequence[str], key: Path | None, say: Say) -> Receipt:
    """Write the receipt of a dataset's standing comparison or of a table, replacing an earlier file and its signature.

    Arguments are as of `accept`; `key` is the private SSH key that signs it, or a public key whose private key ssh-agent holds.

    Raises:
        ConfigError: there is no such key, it cannot sign, `path` is a file that is not a receipt, or as `verified_reference`.
        StoreError: the file cannot be written.
    """
    if key is not None and not key.is_file():
        raise ConfigError(f"--sign {key}: no such file; name an SSH key, for example ~/.ssh/id_ed25519")
    check_output(path, "application/json", b'{\n"accepted_at": ')
    reference = verified_reference(project, name, "", rows, (), say, num_nights=1)
    receipt = Receipt(**reference.model_dump(), lock=lock_hash(project.root))
    content = receipt.model_dump(mode="json")
    _signature(path).unlink(missing_ok=True)
    write_evidence(path, content | {"sha256": json_sha256(content)})
    if key is not None:
        _ssh_keygen(path, "sign", "-f", str(key), "-n", NAMESPACE, str(path))
    return receipt


def read_receipt(path: Path) -> Receipt:
    """Read a receipt.

    Raises:
        ConfigError: there is no such file.
        StoreError: its content does not fit its hash, it has a run twice, or a newer version of the program wrote it.
    """
    try:
        content = read_evidence(path)
        if content.pop("sha256", None) != json_sha256(content):
            raise StoreError(f"{path}: altered or damaged: its content does not fit its hash")
        receipt = Receipt.model_validate(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError:
        raise StoreError(f"{path}: not a receipt; write one with: dml receipt NAME -o FILE") from None
    check_runs_once(path, receipt)
    return receipt


def signer_of(path: Path, signers: Path | None = None) -> str | None:
    """Return who signed a receipt: a person in the file of allowed signers, else the fingerprint of the key; None if it is not signed.

    Raises:
        ConfigError: the signature is not of this file, or, with `signers`, it is missing or of another person.
    """
    signature = _signature(path)
    if not signature.is_file():
        if signers is not None:
            raise ConfigError(f"{path}: not signed ({signature.name} is missing)")
        return None
    if signers is None:
        printed = _ssh_keygen(path, "check-novalidate", "-n", NAMESPACE, "-s", str(signature))
        return printed.strip().rpartition("with ")[2]
    if not signers.is_file():
        raise ConfigError(f"--signers {signers}: no such file")
    person = _ssh_keygen(path, "find-principals", "-f", str(signers), "-s", str(signature)).splitlines()[0]
    _ssh_keygen(path, "verify", "-f", str(signers), "-I", person, "-n", NAMESPACE, "-s", str(signature))
    return person


def lock_hash(root: Path) -> str | None:
    """Return the hash of a project's requirements.lock; None if it has none."""
    path = root / LOCK
    return file_sha256(path) if path.is_file() else None


def read_receipts(project: Project, references: dict[str, Reference], level: float) -> list[Reproduced]:
    """Return the receipts in results/receipts, oldest first, each run compared with the accepted runs of its row.

    `references` has the accepted reference of each name; `level` is that of the bands (`tasks.watch.bands.shared_level`).
    """
    read = [_compared(path, references, level) for path in (project.root / RECEIPTS).glob("[!.]*.json")]
    return sorted(read, key=lambda one: ("" if one.receipt is None else one.receipt.accepted_at.isoformat(), one.file))


def _compared(path: Path, references: dict[str, Reference], level: float) -> Reproduced:
    """Return a receipt with the number of its runs with each verdict, or with the reason why it cannot be trusted.

    With a file of allowed signers one of them must have signed it. Runs that trained for exactly the accepted seconds are the same runs.
    """
    signers = path.with_name(SIGNERS)
    try:
        receipt = read_receipt(path)
        signer = signer_of(path, signers if signers.is_file() else None)
    except (ConfigError, StoreError) as error:
        return Reproduced(path.name, None, str(error).removeprefix(f"{path}: "))
    reference = references.get(receipt.name)
    verdicts, copies = [], []
    for run in receipt.evidence:
        accepted = [] if reference is None else reference.of_row(run.row)
        if any((one.seed, one.weights, one.seconds) == (run.seed, run.weights, run.seconds) for one in accepted):
            copies.append(run)
        else:
            verdicts.append(verdict_of(run, accepted, level).verdict if accepted else Verdict.NEW)
    of_copies = f"{counted(len(copies), 'run')} accepted here, no reproduction" if copies else ""
    return Reproduced(path.name, receipt, "; ".join(filter(None, [verdict_counts(verdicts), of_copies])), signer or "not signed")


def _signature(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def _ssh_keygen(path: Path, action: str, *arguments: str) -> str:
    """Run an action of `ssh-keygen -Y` with the receipt as its input; return what it prints."""
    try:
        with path.open("rb") as content:  # signing takes the file's name and may ask for a passphrase
            ran = subprocess.run(
                ["ssh-keygen", "-Y", action, *arguments],
                stdin=None if action == "sign" else content,
                capture_output=True,
                text=True,
                check=False,
            )
    except FileNotFoundError:
        raise ConfigError("ssh-keygen is not installed; on Debian or Ubuntu: apt-get install openssh-client") from None
    if ran.returncode != 0:
        problem = "written, but not signed" if action == "sign" else "the signature is not of this file, or of no allowed signer"
        reason = (ran.stderr.strip() or ran.stdout.strip() or "no reason given").splitlines()[-1]
        raise ConfigError(f"{path}: {problem} (ssh-keygen: {reason})")
    return ran.stdout
