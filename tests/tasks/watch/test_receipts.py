"""A receipt of one clone is verified in another, and whatever was altered in it is refused or found."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dml_core.data.prepare import prepare
from dml_core.data.registry import materialise
from dml_core.errors import ConfigError, StoreError
from dml_core.files import json_sha256
from tasks.environment import Project
from tasks.reports.table_pages import HISTORY, SITE
from tasks.tables.alarms import open_alarms
from tasks.watch import verifying
from tasks.watch.history import write_history
from tasks.watch.receipts import NAMESPACE, RECEIPTS, SIGNERS, read_receipt, read_receipts, signer_of, write_receipt
from tasks.watch.records import Receipt, Reference, RowVerdict, Verdict, Verification
from tasks.watch.storage import read_references, read_verifications, reference_path, write_reference, write_verification
from tasks.watch.summary import first_sentence
from tasks.watch.verdicts import verdict_of
from tasks.watch.verifying import VerifyRequest, verify
from tests.forked import dml
from tests.tasks.watch.conftest import OPTIONS, evidence, git, reference, say, slightly_other_numbers, verified

pytestmark = pytest.mark.slow
PERSON = "person@example.invalid"
Alteration = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key and, as soon as a test needs it, the signed receipt."""
    folder = tmp_path_factory.mktemp("files")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", PERSON, "-f", folder / "key"], check=True)
    return folder


@pytest.fixture
def key(files: Path) -> Path:
    return files / "key"


@pytest.fixture
def signers(key: Path, tmp_path: Path) -> Path:
    path = tmp_path / "signers"
    path.write_text(f"{PERSON} {key.with_suffix('.pub').read_text()}")
    return path


@pytest.fixture
def receipt(accepted: Project, files: Path, tmp_path: Path) -> Path:
    """A copy of the signed receipt of the accepted project's runs, verified with the commit that accepted them."""
    made = files / "receipt.json"
    if not made.exists():
        verified(accepted)
        write_receipt(accepted, "own", made, (), files / "key", say)
    shutil.copy(f"{made}.sig", tmp_path)
    return Path(shutil.copy(made, tmp_path))


@pytest.fixture
def clone(accepted: Project, receipt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Another clone of the project, without runs or data; in place of DVC, functions prepare its own copy of the dataset."""
    root = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(accepted.root), str(root))
    (root / "results/accepted/own.json").unlink()
    project = Project(root, root / "state", str(root / "state/store"), f"sqlite:///{root / 'state/mlflow.db'}")

    def update_dataset(of: Project, name: str) -> None:
        materialise("synthetic", OPTIONS, of.root / "data/raw" / name)
        prepare("synthetic", of.root / "data/raw" / name, of.packed(name), OPTIONS)

    monkeypatch.setattr(verifying, "update_dataset", update_dataset)
    monkeypatch.setenv("PREFECT_LOCAL_STORAGE_PATH", str(root / "records"))
    return project


def verified_by_receipt(project: Project, path: Path, seed: int = 3) -> RowVerdict:
    (verification,) = verify(project, VerifyRequest(seeds=(seed,)), say, read_receipt(path)).verifications
    (row,) = verification.rows
    return row


def test_the_author_of_a_receipt_cannot_know_which_seed_is_trained_and_no_plan_counts_further_nights(clone: Project, receipt: Path) -> None:
    """Verifications of a receipt are not recorded: the seed verified longest ago was always the first."""
    says: list[str] = []
    drawn = set()
    for _ in range(8):
        (turn,) = verifying._Verifier(clone, VerifyRequest(), says.append, read_receipt(receipt))._plan().turns
        assert says[-1] == f"drawn at random: seed {turn.seed}"
        drawn.add(turn.seed)
    assert len(drawn) > 1, "of ten seeds"
    assert {line.rpartition("about")[0] for line in says[::2]} == {"1 run to verify, "}
    assert [line for line in says if "cover" in line] == []


def test_a_receipt_is_judged_by_bands_of_one_verification_which_are_shown(
    clone: Project, receipt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # is recorded: another environment
    slightly_other_numbers(monkeypatch)
    given = read_receipt(receipt)
    (verification,) = verify(clone, VerifyRequest(seeds=(3,)), say, given).verifications
    (row,) = verification.rows
    assert row.verdict is Verdict.WITHIN_BAND, row.reason
    name = str(given.evidence[0].first_recall)
    scores = [one.scores[name] for one in given.evidence]
    half = 2.933 * 1.1**0.5 * np.std(scores, ddof=1)  # Student's t of 9 degrees at 1 - 0.1 / 12: one row, six scores, two sides
    assert row.bands[name].high - np.mean(scores) == pytest.approx(half, rel=0.01)
    assert row.recall_band == f"{100 * row.bands[name].low:.1f} to {100 * row.bands[name].high:.1f}"
    assert first_sentence(verification, given).endswith(": 1 within the band; 1 of 10 runs trained.")


def score(content: dict[str, Any]) -> None:
    content["evidence"][3]["scores"]["recall@1"] += 0.001


def loss(content: dict[str, Any]) -> None:
    content["evidence"][3]["losses"][0] += 0.001


def dataset(content: dict[str, Any]) -> None:
    for run in content["evidence"]:
        run["dataset"] = "0" * len(run["dataset"])


def images(content: dict[str, Any]) -> None:
    dataset(content)
    content["evidence"][3]["batches"] = "0" * 64


def version(content: dict[str, Any]) -> None:
    for run in content["evidence"]:
        run["environment"]["packages"]["torch"] = "1.0"


def commit(content: dict[str, Any]) -> None:
    content["commit"] = "0" * 40


def who(content: dict[str, Any]) -> None:
    content["who"] = "Another <another@example.invalid>"


ALTERATIONS: tuple[Alteration, ...] = (score, loss, dataset, version, commit, who)


def altered(path: Path, alter: Alteration, is_rehashed: bool) -> None:
    content = json.loads(path.read_text())
    recorded = content.pop("sha256")
    alter(content)
    path.write_text(json.dumps(content | {"sha256": json_sha256(content) if is_rehashed else recorded}))


def test_a_receipt_is_verified_in_another_clone_which_stays_without_alarm_or_history(clone: Project, receipt: Path, signers: Path) -> None:
    assert signer_of(receipt, signers) == PERSON
    assert (signer_of(receipt) or "").startswith("ED25519 key SHA256:")
    row = verified_by_receipt(clone, receipt)
    assert (row.verdict, row.reason) == (Verdict.IDENTICAL, "")
    assert open_alarms(clone.state) == []
    assert read_verifications(clone.state) == []


def test_an_altered_receipt_is_refused_by_its_hash_and_with_a_new_hash_by_its_signature(receipt: Path, signers: Path) -> None:
    before = receipt.read_text()
    for alter in ALTERATIONS:
        receipt.write_text(before)
        altered(receipt, alter, is_rehashed=False)
        with pytest.raises(StoreError, match=r"^[^\n]*altered or damaged[^\n]*$"):
            read_receipt(receipt)
        receipt.write_text(before)
        altered(receipt, alter, is_rehashed=True)
        read_receipt(receipt)
        for allowed in (None, signers):
            with pytest.raises(ConfigError, match=r"^[^\n]*the signature is not of this file[^\n]*$"):
                signer_of(receipt, allowed)


@pytest.mark.parametrize(
    ("alter", "reason"),
    [(score, "scoring differs"), (loss, "the loss differs from step 1"), (images, "the dataset's content differs")],
)
def test_without_a_signature_training_finds_an_altered_result(alter: Alteration, reason: str, clone: Project, receipt: Path) -> None:
    receipt.with_name("receipt.json.sig").unlink()
    altered(receipt, alter, is_rehashed=True)
    row = verified_by_receipt(clone, receipt)
    assert row.verdict is Verdict.DRIFTED
    assert reason in row.reason


def test_the_same_images_packed_by_another_version_are_identical_with_a_note(clone: Project, receipt: Path) -> None:
    altered(receipt, dataset, is_rehashed=True)  # its digest, which the bytes of pyarrow's files determine
    receipt.with_name("receipt.json.sig").unlink()
    row = verified_by_receipt(clone, receipt)
    assert row.verdict is Verdict.IDENTICAL
    assert row.reason == "the dataset's digest differs (another packing, or images that no score shows)"


def test_without_a_signature_another_version_is_named(clone: Project, receipt: Path) -> None:
    altered(receipt, version, is_rehashed=True)
    row = verified_by_receipt(clone, receipt)
    assert row.verdict is Verdict.IDENTICAL
    assert any(line.startswith("torch 1.0 -> ") for line in row.changed)


def test_a_receipt_that_is_unsigned_or_signed_by_another_person_is_refused_with_allowed_signers(
    receipt: Path, signers: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    signers.write_text(f"another@example.invalid {other.with_suffix('.pub').read_text()}")
    with pytest.raises(ConfigError, match="of no allowed signer"):
        signer_of(receipt, signers)
    receipt.with_name("receipt.json.sig").unlink()
    assert signer_of(receipt) is None
    with pytest.raises(ConfigError, match="not signed"):
        signer_of(receipt, signers)


def test_a_file_that_is_no_receipt_or_cannot_sign_is_one_line(accepted: Project, tmp_path: Path) -> None:
    for content, problem in (
        ("[]", "not a receipt"),
        ("{", "not a receipt"),
        ("{}", "altered or damaged"),
        ('{"format": 9}', "newer version"),
    ):
        (tmp_path / "file").write_text(content)
        with pytest.raises(StoreError, match=rf"^[^\n]*{problem}[^\n]*$"):
            read_receipt(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_receipt(tmp_path / "none")
    verified(accepted)
    with pytest.raises(ConfigError, match=r"^--sign [^\n]*: no such file[^\n]*$"):
        write_receipt(accepted, "own", tmp_path / "new", (), tmp_path / "none", say)
    (tmp_path / "file").chmod(0o600)
    with pytest.raises(ConfigError, match=r"^[^\n]*written, but not signed[^\n]*$"):
        write_receipt(accepted, "own", tmp_path / "new", (), tmp_path / "file", say)
    assert read_receipt(tmp_path / "new").name == "own"
    write_receipt(accepted, "own", tmp_path / "new", (), None, say)  # an earlier receipt is replaced


def of_others(accepted: Reference) -> dict[str, Any]:
    """Return a receipt with the bits of accepted runs, trained at another time."""
    runs = tuple(run.model_copy(update={"seconds": run.seconds + 1}) for run in accepted.evidence)
    return Receipt(**accepted.model_dump() | {"evidence": runs}).model_dump(mode="json")


def test_a_bad_receipt_of_others_is_listed_with_its_problem_and_stops_nothing(tmp_path: Path) -> None:
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/none.db")
    folder = tmp_path / RECEIPTS
    folder.mkdir(parents=True)
    accepted = reference("own", "own/good", seeds=range(10))
    content = of_others(accepted)
    one = content["evidence"][0]
    contents = {
        "d": content,
        "b": content | {"evidence": [one | {"curve": [0.1, 0.2], "curve_epochs": [1]}]},
        "c": content | {"evidence": []},
        "f": content | {"evidence": [*content["evidence"], one]},
        "g": Receipt(**accepted.model_dump()).model_dump(mode="json"),
    }
    (folder / "a.json").write_text("[" * 200_000)
    for name, values in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(values | {"sha256": json_sha256(values)}))
    os.mkfifo(folder / "e.json")
    results = {one.file: one.result for one in read_receipts(project, {"own": accepted}, 0.001)}
    assert [file for file, result in results.items() if result.startswith("not a receipt; ")] == ["a.json", "b.json", "c.json"]
    assert (results["d.json"], results["e.json"]) == ("10 identical", "cannot be read (not a regular file)")
    assert results["f.json"] == "2 runs of own/good have seed 0, as after a merge that kept both; keep one of them"
    assert results["g.json"] == "10 runs accepted here, no reproduction"
    write_reference(project, accepted)
    write_history(project, read_references(project))
    assert "10 identical" in (tmp_path / SITE / HISTORY).read_text()
    reference_path(project, "own").write_text("[" * 200_000)
    with pytest.raises(StoreError, match="damaged; restore it with git"):
        read_references(project)


def test_fields_that_a_newer_program_added_are_kept_and_covered_by_the_hash(tmp_path: Path) -> None:
    """An older checkout, as of a bisection, called newer receipts no receipts, references damaged, and renamed newer verifications."""
    project = Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), f"sqlite:///{tmp_path}/none.db")
    accepted = reference("own", "own/good", seeds=range(2))
    newer = of_others(accepted) | {"later": 1}
    for run in newer["evidence"]:
        run["later"] = run["environment"]["later"] = "2"
    path = tmp_path / RECEIPTS / "newer.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(newer | {"sha256": json_sha256(newer)}))
    assert [one.result for one in read_receipts(project, {"own": accepted}, 0.001)] == ["2 identical"]
    assert read_receipt(path).model_dump(mode="json") == newer
    write_reference(project, Reference.model_validate(newer))
    kept = read_references(project)["own"]
    assert kept.model_dump(mode="json") == newer
    drifted = verdict_of(evidence("own/good", weights="1" * 64), kept.of_row("own/good"), 0.001)
    assert drifted.reason.endswith("in an equal environment"), "no known field differs"
    row = {"row": "own/good", "seed": 0, "verdict": "no reference", "reason": "", "later": 3}
    night = {"name": "own", "started_at": "2026-11-30T00:00:00Z", "seconds": 1.0, "commit": "c", "rows": [row], "later": 4}
    written = write_verification(project.state, Verification.model_validate(night))
    (read,) = read_verifications(project.state)
    assert read == Verification.model_validate(night)
    assert (read.model_extra, read.rows[0].model_extra) == ({"later": 4}, {"later": 3})
    assert [path.name for path in written.parent.iterdir() if path.suffix == ".json"] == [written.name]
    altered(path, lambda content: content["evidence"][1]["environment"].update(later="3"), is_rehashed=False)
    with pytest.raises(StoreError, match="altered or damaged"):
        read_receipt(path)


def trained_elsewhere(content: dict[str, Any]) -> None:
    for run in content["evidence"]:
        run["seconds"] += 1


def test_the_page_lists_receipts_of_others_with_their_result_and_signer(accepted: Project, receipt: Path, key: Path, signers: Path) -> None:
    folder = accepted.root / RECEIPTS
    folder.mkdir(parents=True)
    (folder / "copy.json").write_text(receipt.read_text())
    altered(receipt, trained_elsewhere, is_rehashed=True)
    signature = receipt.with_name("receipt.json.sig")
    signature.unlink()
    subprocess.run(["ssh-keygen", "-Y", "sign", "-f", key, "-n", NAMESPACE, receipt], check=True, capture_output=True)
    for file in (receipt, signature):
        (folder / file.name).write_bytes(file.read_bytes())
    drifted = folder / "drifted.json"
    drifted.write_text(receipt.read_text())
    altered(drifted, score, is_rehashed=True)
    damaged = folder / "damaged.json"
    damaged.write_text(receipt.read_text())
    altered(damaged, score, is_rehashed=False)
    verified(accepted)
    page = (accepted.root / SITE / HISTORY).read_text()
    assert "<td>10 identical</td><td>" in page
    assert "<td>10 runs accepted here, no reproduction</td>" in page
    assert "<td>9 identical, 1 drifted</td>" in page
    assert "<td>not signed</td>" in page
    assert "<td>damaged.json</td>" in page
    assert "not counted: altered or damaged" in page
    (folder / SIGNERS).write_text(signers.read_text())
    write_history(accepted, read_references(accepted))
    page = (accepted.root / SITE / HISTORY).read_text()
    assert f"<td>{PERSON}</td>" in page
    assert "10 identical" in page
    assert "9 identical" not in page, "its author would only have to remove the signature of an unlisted key"
    assert "not counted: not signed (drifted.json.sig is missing)" in page


def test_the_commands_write_a_receipt_and_refuse_an_altered_one(accepted: Project, key: Path, signers: Path, tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        kept = {"PREFECT_LOCAL_STORAGE_PATH": str(accepted.root / "records"), "DVC_STAGE": "tests"}
        ended = dml(words, accepted.root, **kept)
        return ended.returncode, ended.stdout, ended.stderr

    path = tmp_path / "receipt.json"
    for verification in (accepted.state / "verifications").glob("*"):
        verification.unlink()
    code, _, said = run("receipt", "own", "-o", str(path))
    assert (code, path.exists()) == (2, False), "nothing was verified"
    assert "not verified yet; run: dml verify own" in said
    verified(accepted)
    code, printed, said = run("receipt", "own", "-o", str(path), "--sign", str(key))
    assert (code, printed.strip()) == (0, f"{path}: 1 row, 10 runs, by A Person <{PERSON}>, signed: {path}.sig"), said
    assert signer_of(path, signers) == PERSON
    for name, words in {"--signers: only with --receipt": ["--signers", "x"], "without NAME": ["own", "--receipt", str(path)]}.items():
        code, printed, said = run("verify", *words)
        assert (code, printed) == (2, "")
        assert name in said
    altered(path, score, is_rehashed=False)
    code, printed, said = run("verify", "--receipt", str(path))
    assert (code, printed) == (2, "")
    assert re.fullmatch(r"error: [^\n]*altered or damaged[^\n]*\n", said)
