"""Results are accepted, trained again and compared through the real commands; a fault in a commit is found, and ends with its revert."""

import json
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import Project, make_project

pytestmark = [pytest.mark.slow, pytest.mark.proof]
SEEDS = tuple(range(8))  # a band needs seven
ROWS = ["synthetic/untrained", "synthetic/softtriple"]


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose runs are finished, verified once, and accepted."""
    project = make_project(tmp_path_factory.mktemp("verify") / "project", ("untrained", "softtriple"))
    project.change(comparison={"seeds": list(SEEDS)}, scale={"num_workers": 1, "concurrent_runs": 2})
    project.git("config", "user.name", "t")
    project.git("config", "user.email", "t@example.invalid")
    project.run("dml", "reproduce", "--dataset", "synthetic", "--all")
    project.commit("results")
    printed = project.run("dml", "verify", "synthetic")
    assert printed.count("identical to the finished run") == 2
    assert f"accepted 2 rows, {2 * len(SEEDS)} runs, by t <t@example.invalid>" in project.run(
        "dml", "accept", "synthetic", "--why", "first results"
    )
    project.commit("accept synthetic")
    return project


def rows(project: Project, *options: str, code: int = 0, **environment: str) -> dict[str, dict]:
    printed = project.run("dml", "verify", "--json", *options, code=code, **environment)
    (verification,) = json.loads(next(line for line in printed.splitlines() if line.startswith("[{")))
    return {row["row"]: row for row in verification["rows"]}


def results(project: Project) -> dict[Path, bytes]:
    """Return the content of the results, without the pages."""
    paths = [path for path in (project.root / "results").rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in paths if not path.is_relative_to(project.root / "results/site")}


def left(project: Project) -> list[Path]:
    return [path for path in (project.root / "state/verify").glob("*") if path.is_dir()]


def test_accepted_results_are_reproduced_with_identical_bits_and_the_project_is_unchanged(accepted: Project) -> None:
    before = results(accepted)
    found = rows(accepted)
    assert {name: row["verdict"] for name, row in found.items()} == dict.fromkeys(ROWS, "identical")
    assert left(accepted) == []
    assert results(accepted) == before
    assert "reproduced on" in (accepted.root / "results/site/verification.html").read_text()
    assert "without alarms" in accepted.run("dml", "doctor")


def test_a_clone_without_data_reproduces_a_receipt_and_what_is_accepted(accepted: Project, tmp_path: Path) -> None:
    accepted.run("dml", "receipt", "synthetic", "-o", str(tmp_path / "receipt.json"))
    subprocess.run(["git", "clone", "--quiet", accepted.root, tmp_path / "clone"], check=True)
    clone = Project(tmp_path / "clone", accepted.environment | {"PYTHONPATH": str(tmp_path / "clone")})
    for options in (["--receipt", str(tmp_path / "receipt.json")], []):
        assert {name: row["verdict"] for name, row in rows(clone, *options).items()} == dict.fromkeys(ROWS, "identical")
    assert not (clone.root / "state/store").exists(), "nothing is finished there"


def test_with_deterministic_algorithms_all_operations_have_one_on_a_cpu(accepted: Project) -> None:
    for row in rows(accepted, "--deterministic").values():
        assert row["verdict"] == "identical"
        assert "deterministic False -> True" in row["changed"]


@dataclass(frozen=True)
class Fault:
    """A commit that changes results without an error: text of a file is replaced, or a function is wrapped at the file's end."""

    file: str
    old: str
    new: str
    reason: str

    def change(self, root: Path) -> None:
        text = (root / self.file).read_text()
        assert not self.old or text.count(self.old) == 1
        (root / self.file).write_text(text.replace(self.old, self.new) if self.old else f"{text}\n\n{self.new}")


FAULTS = {
    "the rate is halved": Fault(
        "dml_core/training/optimisation/schedules.py",
        "",
        "_right = learning_rate_factor\n\n\ndef learning_rate_factor(*a):\n    return 0.5 * _right(*a)\n",
        "the loss differs from step ",
    ),
    "5 % of the labels are wrong": Fault(
        "dml_core/training/loop.py",
        "    labels = torch.from_numpy(run.dataset.labels[np.concatenate(batches)])\n",
        "    labels = torch.from_numpy(run.dataset.labels[np.concatenate(batches)])\n"
        "    labels[::20] = (labels[::20] + 1) % (labels.max() + 1)\n",
        "the loss differs from step ",
    ),
    "augmentation is dropped": Fault(
        "dml_core/data/views/batches.py",
        "return train_pixels(image, self.config, self.seed, self.epoch, index, box, copy)",
        "return test_pixels(image, self.config, box)",
        "the images of the first batch differ",
    ),
    "pixels are scaled twice": Fault(
        "dml_core/data/views/transforms.py",
        "return torch.mul(pixels, factor_C11, out=out).add_(shift_C11)",
        "return torch.mul(pixels, factor_C11, out=out).add_(shift_C11).mul_(2)",
        "the images of the first batch differ",
    ),
    "test classes are trained on": Fault(
        "tasks/workers/work.py",
        'dataset = open_role(packed, "train", validation, source)',
        'dataset = open_role(packed, "test", validation, source)',
        "the loss differs from step ",
    ),
    "BatchNorm is in training mode": Fault(
        "tasks/workers/embedding.py", "    model.eval()\n", "    model.train()\n", "scoring differs, of equal weights"
    ),
    "the sampler repeats": Fault(
        "dml_core/data/views/samplers.py",
        "",
        "_right = epoch_batches\n\n\ndef epoch_batches(*a):\n"
        "    drawn = _right(*a)\n    return [drawn[place % (len(drawn) // 2)] for place in range(len(drawn))]\n",
        "samples, labels or order",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_commit_is_an_alarm_until_it_is_reverted(name: str, accepted: Project) -> None:
    fault = FAULTS[name]
    fault.change(accepted.root)
    accepted.commit(name)
    try:
        found = rows(accepted, code=1)
        (kept,) = left(accepted)
        doctor = accepted.run("dml", "doctor")
    finally:
        accepted.git("revert", "--no-edit", "HEAD")
    assert found[ROWS[1]]["verdict"] == "drifted"
    assert fault.reason in found[ROWS[1]]["reason"]
    assert [line.split()[0] for line in found[ROWS[1]]["changed"]] == ["commit"]
    assert list(kept.glob("state/store/train/*/checkpoint.pt")), "the drifted run is kept to be looked at"
    assert "synthetic/softtriple, seed" in doctor
    assert {row["verdict"] for row in rows(accepted).values()} == {"identical"}
    assert "without alarms" in accepted.run("dml", "doctor")
    assert left(accepted) == []


def test_a_byte_of_the_dataset_that_changed_is_found_and_nothing_is_trained(accepted: Project) -> None:
    path = next(path for path in (accepted.root / "data/packed/synthetic").rglob("*") if path.is_file() and path.stat().st_size > 10_000)
    content = path.read_bytes()
    path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    try:
        found = rows(accepted, code=1)
    finally:
        path.write_bytes(content)
    assert all("not as it was packed: raw or packed files" in row["reason"] for row in found.values())
    assert {row["evidence"] for row in found.values()} == {None}
    assert {row["verdict"] for row in rows(accepted).values()} == {"identical"}


def test_another_kind_of_processor_is_named_and_judged_by_the_band(accepted: Project) -> None:
    """Torch and oneDNN are limited to what every x86-64 processor has."""
    older = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    found = rows(accepted, **older)
    assert found[ROWS[1]]["verdict"] == "within the band", found[ROWS[1]]["reason"]
    assert {line.split()[0] for line in found[ROWS[1]]["changed"]} == {"commit", "processor"}


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_ended_verification_leaves_no_process_and_the_next_removes_its_files(ended_by: signal.Signals, accepted: Project) -> None:
    process = accepted.start("dml", "verify", "--json")
    while not list(accepted.root.glob("state/verify/*/state/store/train/*")):
        assert process.poll() is None
        time.sleep(0.05)
    (folder,) = left(accepted)
    process.send_signal(ended_by)
    process.wait(60)
    deadline = time.monotonic() + 60
    while processes := [path for path in Path("/proc").glob("[0-9]*") if _works_in(path, folder)]:
        assert time.monotonic() < deadline, [(path / "cmdline").read_text() for path in processes]
        time.sleep(0.2)
    assert {row["verdict"] for row in rows(accepted).values()} == {"identical"}
    assert left(accepted) == []


def _works_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").readlink().is_relative_to(folder)
    except OSError:
        return False


def test_two_at_once_both_verify_and_leave_nothing(accepted: Project) -> None:
    started = [accepted.start("dml", "verify", "--json") for _ in range(2)]
    printed = [process.communicate(timeout=1200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    assert all(text.count('"verdict": "identical"') == 2 for text in printed)
    assert left(accepted) == []


def test_a_budget_is_kept_and_rows_take_turns(accepted: Project) -> None:
    verified = [rows(accepted, "--share", "0.5") for _ in range(2)]
    assert sorted(name for night in verified for name in night) == sorted(ROWS)
    began = time.monotonic()
    printed = accepted.run("dml", "verify", "--budget", "1s", code=2)
    assert "no row fits" in printed
    assert time.monotonic() - began < 60
