"""`infra/slurm/job.sh` of docs/how-to/slurm.md: its options exist, and jobs of a real Slurm end with the bits of this machine."""

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.damage import contents
from tests.e2e.conftest import Project, make_project
from tests.e2e.slurm import Slurm, is_installed

SCRIPT = "infra/slurm/job.sh"
WORDS = ("reproduce", "--dataset", "synthetic")


def test_the_script_is_bash_and_the_page_submits_it() -> None:
    subprocess.run(["bash", "-n", str(ROOT / SCRIPT)], check=True)
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/how-to/slurm.md").read_text(), re.MULTILINE | re.DOTALL)
    submitted = [line for block in blocks for line in block.splitlines() if line.startswith("sbatch") and "--wrap" not in line]
    assert len(submitted) == 3
    assert all(re.fullmatch(rf"sbatch( --[a-z-]+=\S+)+ {SCRIPT} reproduce .+", line) for line in submitted)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if not is_installed():
        pytest.skip("no Slurm here")
    (tmp_path / "slurm").mkdir()
    running = Slurm(tmp_path / "slurm")
    yield running
    running.close()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = make_project(tmp_path / "project", ("softtriple",))
    made.change(scale={"num_workers": 1, "concurrent_runs": 2}, comparison={"seeds": [0, 1], "protocol": {"num_epochs": 60}})
    (made.root / SCRIPT).parent.mkdir(parents=True)
    (made.root / SCRIPT).write_bytes((ROOT / SCRIPT).read_bytes())
    return made


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The nodes' folder for temporary files, with a path short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="dml-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.proof
def test_jobs_end_with_the_bits_of_this_machine_and_leave_nothing_on_their_nodes(slurm: Slurm, project: Project, temporary: Path) -> None:
    def submit(state: str, *options: str) -> str:
        places = project.environment | {"DML_STATE": str(project.root / state), "TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary)}
        return slurm("sbatch", "--parsable", *options, SCRIPT, *WORDS, folder=project.root, **places).strip()

    def checkpoints(state: str) -> list[Path]:
        return list((project.root / state / "store/train").glob("*/checkpoint.pt"))

    project.run("dml", *WORDS, DML_STATE=str(project.root / "state"), SLURM_CPUS_ON_NODE="1")
    undisturbed = contents(project.root / "state/store")

    job = submit("requeued")
    while not checkpoints("requeued"):
        assert slurm.state(job) != "FAILED", (project.root / f"slurm-{job}.out").read_text()
        time.sleep(0.1)
    slurm("scancel", "--batch", "--signal=USR1", job)  # as before the time limit
    slurm.wait(job, "PENDING")
    assert not list(temporary.glob("dml-*"))
    slurm.wait(job, "COMPLETED")
    printed = (project.root / f"slurm-{job}.out").read_text()
    assert "interrupted; rerun the command to resume" in printed
    assert "resum" in printed.partition("interrupted")[2]
    assert contents(project.root / "requeued/store") == undisturbed

    job = submit("two-nodes", "--nodes=2")
    slurm.wait(job, "COMPLETED")
    assert "training on 2 CPUs: 1 worker a run, 2 runs at a time" in (project.root / f"slurm-{job}.out").read_text()
    assert contents(project.root / "two-nodes/store") == undisturbed

    jobs = submit("array", "--array=0-1")
    slurm.wait(f"{jobs}_0", "COMPLETED")
    slurm.wait(f"{jobs}_1", "COMPLETED")
    assert contents(project.root / "array/store") == undisturbed
    assert not list(temporary.glob("dml-*"))
