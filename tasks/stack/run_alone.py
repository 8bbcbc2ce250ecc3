"""Run a server of the stack after ending what an earlier one has left: `python -m tasks.stack.run_alone COMMAND...`.

If only the process that supervisor watches is killed, those that it started (MLflow's server, Ray's GCS and raylet) continue and keep its
ports; without this, supervisor could not restart it. Their environments have the stack's mark and, from supervisor, the server's name.
"""

import os
import sys
from contextlib import suppress

import psutil

from tasks.stack.settings import MARK

SERVER = "SUPERVISOR_PROCESS_NAME"


def run_alone(command: list[str]) -> None:
    """Kill the other processes of this server in this stack, and become the command."""
    server, own = (os.environ[MARK], os.environ[SERVER]), {os.getpid(), os.getppid()}
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            environment = process.environ()
            if process.pid not in own and (environment.get(MARK), environment.get(SERVER)) == server:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=10)
    os.execvp(command[0], command)


if __name__ == "__main__":
    run_alone(sys.argv[1:])
