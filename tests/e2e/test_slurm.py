"""`infra/slurm/job.sh` of docs/how-to/slurm.md: its options exist, and jobs of a real Slurm end with the bits of this machine."""

import os
import re
import signal
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
def programs(tmp_path: Path) -> Path:
    """A folder of stand-ins for the commands that the script runs; they write their words into `log`."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, lines in {
        "dml": "exec sleep 60",
        "scontrol": "",
        "scancel": "",
        "srun": 'exec bash -c "${@: -1}"',
        "ray": "echo reason; exit 1",
    }.items():
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"{tmp_path}/log"\n{lines}\n')
        (folder / name).chmod(0o755)
    return folder


def start(programs: Path, **environment: str) -> subprocess.Popen[str]:
    """Start the script as Slurm does in job 7 on one node."""
    paths = {"PATH": f"{programs}:{os.environ['PATH']}", "RAY_TMPDIR": str(programs.parent)}
    named = os.environ | paths | {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"} | environment
    return subprocess.Popen(["bash", str(ROOT / SCRIPT), "reproduce"], env=named, stderr=subprocess.PIPE, text=True)


def end_at_the_time_limit(programs: Path, **environment: str) -> tuple[int, str, list[str]]:
    """Return the script's exit code, its errors, and the commands that it ran, the first without its words."""
    log = programs.with_name("log")
    script = start(programs, **environment)
    while not log.exists():
        assert script.poll() is None
        time.sleep(0.01)
    script.send_signal(signal.SIGUSR1)
    _, errors = script.communicate()
    first, *others = log.read_text().splitlines()
    return script.returncode, errors, [first.split()[0], *others]


@pytest.mark.parametrize("code", [0, 3])
def test_the_job_ends_with_the_command_s_exit_code(programs: Path, code: int) -> None:
    (programs / "dml").write_text(f"exit {code}\n")
    script = start(programs)
    script.communicate()
    assert script.returncode == code


@pytest.mark.parametrize(
    ("array", "job"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}, "7_1")], ids=["job", "array"]
)
def test_the_time_limit_requeues_this_job_alone(programs: Path, array: dict[str, str], job: str) -> None:
    assert end_at_the_time_limit(programs, SECONDS="300", **array) == (0, "", ["dml", f"scontrol requeue {job}"])


def test_a_time_limit_that_leaves_no_time_for_work_is_an_error(programs: Path) -> None:
    error = "error: the time limit leaves less than five minutes for work; submit with a longer --time\n"
    assert end_at_the_time_limit(programs) == (1, error, ["dml"]), "it would be requeued without end"


def test_the_reason_why_ray_did_not_start_is_printed(programs: Path) -> None:
    script = start(programs, SLURM_JOB_NUM_NODES="2", SLURM_NODEID="0", SLURM_CPUS_ON_NODE="1")
    _, errors = script.communicate()
    assert script.returncode == 1
    assert errors == "error: Ray on node 0 ended; the end of its output:\nreason\n"
    assert "dml" not in programs.with_name("log").read_text().replace("dml-ray", "")
    assert not list(programs.parent.glob("dml-ray-*"))


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
        nodes_folder = temporary / state
        nodes_folder.mkdir()
        places = project.environment | {
            "DML_STATE": str(project.root / state),
            "TMPDIR": str(nodes_folder),
            "RAY_TMPDIR": str(nodes_folder),
        }
        places["SECONDS"] = "300"  # as if the script had run for five minutes
        return slurm("sbatch", "--parsable", *options, SCRIPT, *WORDS, folder=project.root, **places).strip()

    project.run("dml", *WORDS, DML_STATE=str(project.root / "state"), SLURM_CPUS_ON_NODE="1")
    undisturbed = contents(project.root / "state/store")

    jobs = {}
    for state, nodes in (("one", 1), ("two", 2)):
        job = jobs[state] = submit(state, f"--nodes={nodes}")
        while not list((project.root / state / "store/train").glob("*/checkpoint.pt")):
            assert slurm.state(job) != "FAILED", (project.root / f"slurm-{job}.out").read_text()
            time.sleep(0.1)
        slurm("scancel", "--batch", "--signal=USR1", job)  # as before the time limit
        slurm.wait(job, "PENDING")
        assert not list((temporary / state).glob("dml-*"))
    for state, training in (("one", "training on 1 CPU"), ("two", "training on 2 CPUs: 1 worker a run, 2 runs at a time")):
        slurm.wait(jobs[state], "COMPLETED")
        printed = (project.root / f"slurm-{jobs[state]}.out").read_text()
        assert training in printed
        assert "interrupted; rerun the command to resume" in printed
        assert "resum" in printed.partition("interrupted")[2]
        assert contents(project.root / state / "store") == undisturbed

    array = submit("all", "--array=0-1")
    slurm.wait(f"{array}_0", "COMPLETED")
    slurm.wait(f"{array}_1", "COMPLETED")
    assert contents(project.root / "all/store") == undisturbed
    assert not list(temporary.glob("*/dml-*"))
