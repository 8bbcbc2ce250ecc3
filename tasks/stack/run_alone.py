"""Run a server of the stack after ending what an earlier one has left: `python -m tasks.stack.run_alone NAME COMMAND...`.

If only the parent of a server is killed, its child continues and keeps the port; without this, supervisor could not restart the server.
"""

import os
import sys
from contextlib import suppress

import psutil

from tasks.stack.settings import MARK

SERVER = "DML_STACK_SERVER"  # variable with the stack's folder and the server's name, in the environment of all its processes


def run_alone(name: str, command: list[str]) -> None:
    """Kill the processes that an earlier server of this name has left in this stack, and become the command."""
    server = f"{os.environ[MARK]}/{name}"
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(SERVER) == server:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=10)
    os.environ[SERVER] = server
    os.execvp(command[0], command)


if __name__ == "__main__":
    run_alone(sys.argv[1], sys.argv[2:])
