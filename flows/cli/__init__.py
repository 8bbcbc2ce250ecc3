"""The `dml` command: a thin layer; every verb calls a flow or a plain function."""

import sys

from flows.cli.exit_codes import INTERRUPTED


def main() -> None:
    """Run the command and exit. Ctrl-C gives its exit code without a line, also while modules are imported."""
    try:
        from flows.cli.exits import run_and_exit

        run_and_exit()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
