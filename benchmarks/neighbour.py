"""Run another benchmark while a process keeps one core busy, as on a shared machine: compare with a run of it alone.

python benchmarks/neighbour.py benchmarks/evaluation.py retrieval --size sop
"""

import os
import subprocess
import sys
import time

SECONDS_TO_START = 2
BUSY = "while True: pass"


def main() -> None:
    """Start the neighbour, run the benchmark, end the neighbour."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\n{BUSY}"]) as neighbour:
        try:
            time.sleep(SECONDS_TO_START)
            code = subprocess.run([sys.executable, *sys.argv[1:]], check=False).returncode
        finally:
            neighbour.kill()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
