"""A Slurm of two nodes with one core each on this machine, for tests: `slurmctld`, two `slurmd` and `munged` in a folder, at free ports."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIGURATION = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=test Nodes=n[1-2] Default=YES State=UP
"""


def is_installed() -> bool:
    return os.geteuid() == 0 and all(shutil.which(name) for name in PROGRAMS)


class Slurm:
    """A running Slurm; `close` ends it.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        for name in ("controller", "n1", "n2"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        with ExitStack() as held:
            ports = [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(3)]
        configuration = folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(host=socket.gethostname(), ports=ports, folder=folder, user="root"))
        self.environment = {"SLURM_CONF": str(configuration)}
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "seed"}
        munged = ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in files.items())]
        nodes = [["slurmd", "-D", "-N", name] for name in ("n1", "n2")]
        self._log = (folder / "log.txt").open("ab")
        self._started = [self._start(command) for command in (munged, ["slurmctld", "-D"], *nodes)]
        until = time.monotonic() + 60
        try:
            while self("sinfo", "--noheader", "--format=%D %t", code=None) != "2 idle\n":
                assert time.monotonic() < until, (folder / "log.txt").read_text()
                time.sleep(0.5)
        except BaseException:
            self.close()
            raise

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=os.environ | self.environment, stdout=self._log, stderr=self._log)

    def __call__(self, *command: str, code: int | None = 0, folder: Path | None = None, **environment: str) -> str:
        """Run a command of Slurm, and return its output."""
        named = os.environ | environment | self.environment
        ran = subprocess.run(command, cwd=folder, env=named, capture_output=True, text=True, check=False)
        assert code in (None, ran.returncode), ran.stderr
        return ran.stdout

    def state(self, job: str) -> str:
        """Return the state of a job, for example `RUNNING`."""
        return self("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()

    def wait(self, job: str, *states: str) -> None:
        """Wait until a job is in one of these states; an error if it fails."""
        until = time.monotonic() + 3600
        while (state := self.state(job)) not in states:
            assert state != "FAILED", job
            assert time.monotonic() < until, (job, state)
            time.sleep(0.5)

    def close(self) -> None:
        self("scancel", "--user=root", code=None)
        time.sleep(1)
        for process in reversed(self._started):
            process.terminate()
            process.wait()
        self._log.close()
