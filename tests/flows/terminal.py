"""Real commands in a pseudo-terminal of a given width.

python -m tests.flows.terminal FOLDER    in a project with finished runs: records every verb that prints a table at 80 and at 120 columns

FOLDER has a text file of each command and width, and `index.html` with all of them, in the terminal's bold and colours.
"""

import argparse
import errno
import fcntl
import html
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tests.conftest import ROOT

WIDTHS = (80, 120)
NUM_LINES = 50
INDEX = "recorded.index"
STYLE = "pre { border: 1px solid #999; white-space: pre-wrap; word-break: break-all; }"  # long lines wrap as in a terminal
COMMANDS = (
    "models",
    "models synthetic --all",
    "compare synthetic",
    "compare fashion-mnist",
    "tables",
    "tables show softtriple/table1",
    "tables show project/claims",
    "tables show discriminative/table3",
    "plan softtriple/table1",
    "plan softtriple/* sgsl/*",
    "data check synthetic",
    "reproduce --dataset synthetic --seed 0 --seed 1 --seed 2 --variant softmax --variant softtriple --variant untrained",
    f"index synthetic/softtriple data/raw/synthetic/CUB_200_2011/images/083.Species_83 -o {INDEX} --force",
    f"search {INDEX} data/raw/synthetic/CUB_200_2011/images/083.Species_83/Species_83_0001.jpg",
    "doctor",
    "stack status",
    "gc --days 0",
    "verify synthetic --row untrained",  # after `dml accept synthetic --why recording`
    "tune project/standing/softmax --dataset synthetic --trials 2 --folds 2",  # trains for minutes
)


def run_in_terminal(arguments: Sequence[str], width: int) -> tuple[str, int]:
    """Return what `dml` prints on a terminal of this width, with its control sequences, and the exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", NUM_LINES, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "flows.cli", *arguments]
    ran = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    printed = b""
    try:
        while chunk := os.read(ours, 65536):
            printed += chunk
    except OSError as error:  # Linux reports the end of a pseudo-terminal so
        if error.errno != errno.EIO:
            raise
    os.close(ours)
    return printed.decode().replace("\r\n", "\n"), ran.wait()


def plain(printed: str) -> str:
    """Return printed text without control sequences; of a line that was overwritten, what was left."""
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", printed)
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))


def record(folder: Path, commands: Sequence[str]) -> None:
    """Run the commands at each width and write what they print."""
    folder.mkdir(parents=True, exist_ok=True)
    page = [f"<!doctype html><meta charset='utf-8'><style>{STYLE}</style>"]
    for command in commands:
        for width in WIDTHS:
            printed, code = run_in_terminal(command.split(), width)
            name = f"{re.sub(r'[^a-z0-9]+', '-', command).strip('-')[:60]}-{width}"
            (folder / f"{name}.txt").write_text(plain(printed))
            console = Console(record=True, width=width, file=io.StringIO())
            console.print(Text.from_ansi(printed), soft_wrap=True)
            shown = console.export_html(inline_styles=True, code_format="{code}")
            title = f"dml {html.escape(command)}: {width} columns, exit code {code}"
            page.append(f"<h2>{title}</h2><pre style='width: {width}ch'>{shown}</pre>")
            num_long = sum(cell_len(line) > width for line in plain(printed).splitlines())
            print(f"{name}: exit code {code}, {num_long} lines longer than the terminal", flush=True)
            (folder / "index.html").write_text("\n".join(page))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--command", action="append", help="instead of all; repeat for several")
    chosen = parser.parse_args()
    record(chosen.folder, chosen.command or COMMANDS)
