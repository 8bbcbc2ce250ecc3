"""Mutation testing of a fixed sample, for modules whose tests are too slow for all mutants: `make mutants-sample FILES=...`.

For each file `random.Random("2026 <path>")` draws a seventh of all single changes, at least 5 and at most 10. Assertions, annotations,
decorators and `strict=` are not changed. From the test files of its module a mutant runs the tests that cover its line, fastest first, then
slow ones, whose worker processes are not measured, up to an expected 25 seconds of CPU time; the first test runs in any case. Everything
happens in a copy of the working tree, one mutant at a time. docs/explanation/can-i-trust-the-numbers.md summarises the results.
"""

import argparse
import ast
import contextlib
import gc
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

# Folders of the tests of a folder's modules. A test file belongs to a module that its text or its file name mentions.
TESTS = {
    "dml_core/training": ("tests/training",),
    "tasks/tables": ("tests/tasks/tables", "tests/tasks/plans"),
    "tasks/tracking": ("tests/tasks/tracking", "tests/tasks/models"),
    "tasks/models": ("tests/tasks/models",),
}
_PAIRS = (
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitOr, ast.BitAnd)),
)
OTHER = {ast.FloorDiv: ast.Div, ast.Mod: ast.Div, ast.Pow: ast.Mult}
OTHER |= {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
# A node, its field, the field's new value, the lines that a test of it covers, and whether it is in a function's body.
Change = tuple[ast.AST, str, object, range, bool]


def changes(node: ast.AST, first_line: int = 1, inside: bool = False) -> Iterator[Change]:
    """Yield all single changes within `node`, in source order."""
    if isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and node.arg == "strict"):
        return
    if isinstance(node, ast.stmt):
        first_line = node.lineno
    lines = range(first_line, getattr(node, "end_lineno" if isinstance(node, ast.expr) else "lineno", first_line) + 1)
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield node, "ops", [*ops[:i], OTHER[type(op)](), *ops[i + 1 :]], lines, inside
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OTHER:
            yield node, "op", OTHER[type(op)](), lines, inside
        case ast.Constant(value=value) if type(value) in (int, float):
            yield node, "value", value + 1, lines, inside
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not _changed_within(test):
            yield node, "test", ast.UnaryOp(ast.Not(), test), lines, inside
        case ast.comprehension(ifs=ifs):
            for i, test in enumerate(ifs):
                if _changed_within(test):
                    continue
                yield node, "ifs", [*ifs[:i], ast.UnaryOp(ast.Not(), test), *ifs[i + 1 :]], range(test.lineno, test.lineno + 1), inside
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "operand", ast.UnaryOp(ast.Not(), operand), lines, inside
        case ast.Return(value=value) if not isinstance(value, ast.Constant | None) or (
            isinstance(value, ast.Constant) and value.value is not None
        ):
            yield node, "value", None, lines, inside
    for name, below in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        within = inside or (isinstance(node, ast.FunctionDef) and name == "body")
        for i, child in enumerate(below if isinstance(below, list) else [below]):
            match child:
                case (
                    ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_])
                ):
                    dropped = [*below[:i], ast.Pass(), *below[i + 1 :]]
                    yield node, name, dropped, range(child.lineno, (child.end_lineno or child.lineno) + 1), within
            if isinstance(child, ast.AST):
                yield from changes(child, first_line, within)


def _changed_within(test: ast.expr) -> bool:
    """Return whether a change of the condition's single operator negates it already."""
    negations = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
    return isinstance(getattr(test, "op", None), ast.Not) or (isinstance(test, ast.Compare) and isinstance(test.ops[0], negations))


class Mutant(NamedTuple):
    """One change: its description, its lines, whether it is in a function's body, and the changed module as text and code."""

    name: str
    lines: range
    inside: bool
    text: str
    code: types.CodeType


def mutants(path: str, text: str) -> tuple[int, list[Mutant]]:
    """Return the number of possible changes, and the drawn ones."""
    tree = ast.parse(text)
    possible = list(changes(tree))
    drawn = random.Random(f"2026 {path}").sample(range(len(possible)), min(len(possible), max(5, min(10, len(possible) // 7))))
    plain, found = ast.unparse(tree).splitlines(), []
    for i in sorted(drawn):
        node, field, new, lines, inside = possible[i]
        old = getattr(node, field)
        setattr(node, field, new)
        changed = ast.unparse(ast.fix_missing_locations(tree))
        code = compile(tree, str(Path(path).resolve()), "exec")
        setattr(node, field, old)
        before, after = next((one, other) for one, other in zip(plain, changed.splitlines(), strict=False) if one != other)
        at = max(0, next((n for n in range(len(before)) if not after.startswith(before[: n + 1])), 0) - 60)
        name = f"{path}:{lines[-1]}: {before[at:][:160].strip()}  ->  {after[at:][:160].strip()}"
        found.append(Mutant(name, lines, inside, changed, code))
    return len(possible), found


def test_files(path: str) -> list[str]:
    """Return the test files of a module."""
    module, folder = path.removesuffix(".py").replace("/", "."), str(Path(path).parent)
    stem = Path(path).stem
    found = [file for place in TESTS[folder] for file in sorted(Path(place).glob("test_*.py"))]
    return [str(file) for file in found if stem in file.stem.split("_") or re.search(rf"\b{re.escape(module)}\b", file.read_text())]


ARGUMENTS = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-s", "-m", "not proof"]


def forked(work, *arguments, log: Path, seconds: float | None = None) -> int | None:
    """Return the exit status of `work` in a forked process, None if it ran longer than `seconds`; its child processes are killed too."""

    def run() -> None:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            status = work(*arguments)
        except BaseException:  # noqa: BLE001 - a failed mutant is a killed one
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)  # does not wait for threads left by a failed test

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(seconds)
    late = process.is_alive()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return None if late else process.exitcode


class Runner:
    """A pytest plugin that collects the test files once; measurements and mutants run in forks of that process.

    A fork replaces the code of the changed module's functions. The file is also changed in the copy, for processes that a test starts.
    """

    def __init__(self, options: argparse.Namespace, kept: Path) -> None:
        self.options, self.kept, self.failed = options, kept, False
        self.seconds: dict[str, float] = {}  # CPU time, by test
        self.items: dict[str, object] = {}

    def pytest_runtest_logreport(self, report) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for path in self.options.files:
            seen = [self.measured(file) for file in test_files(path)]
            text = Path(path).read_text()
            possible, found = mutants(path, text)
            num_killed = 0
            for i, mutant in enumerate(found):
                if self.options.only not in mutant.name:
                    continue
                Path(path).write_text(mutant.text)
                os.utime(path, (i + 1, i + 1))  # bytecode is matched to its source by modification time in whole seconds
                tests = self.tests_of(path, mutant.lines, seen)
                begun = time.monotonic()
                status = forked(self.run_mutant, mutant, tests, log=self.kept / "mutant.log", seconds=self.options.limit)
                word = "clock" if status is None else "killed" if status else "SURVIVED"
                num_killed += status != 0
                print(f"{word:8} {time.monotonic() - begun:5.1f} s of {len(tests)} tests  {mutant.name}", file=sys.__stderr__, flush=True)
            Path(path).write_text(text)
            print(f"| `{path.removesuffix('.py')}` | {possible} | {len(found)} | {num_killed} |", file=sys.__stderr__, flush=True)
        return True

    def measured(self, file: str) -> dict:
        """Return the time of each test of a file and the tests that cover each line; cached between runs."""
        out = self.kept / (file.replace("/", "-") + ".json")
        if not out.exists():
            forked(self.measure, file, out, log=self.kept / "measure.log")
        return json.loads(out.read_text())

    def measure(self, file: str, out: Path) -> int:
        import coverage

        seen = coverage.Coverage(data_file=None, include=[f"{source}/*" for source in TESTS], config_file=False)
        seen.start()
        self.run([name for name in self.items if name.startswith(f"{file}::")], seen.switch_context)
        seen.stop()
        data = seen.get_data()
        lines = {str(Path(name).relative_to(Path.cwd())): data.contexts_by_lineno(name) for name in data.measured_files()}
        out.write_text(json.dumps({"seconds": self.seconds, "lines": lines}))
        return 0

    def tests_of(self, path: str, lines: range, seen: list[dict]) -> list[str]:
        """Return the tests to run for a change of these lines, in order."""
        took = {test: found for file in seen for test, found in file["seconds"].items()}
        passing = {test for file in seen for line in lines for test in file["lines"].get(path, {}).get(str(line), []) if test}
        slow = {test for test in took if self.items[test].get_closest_marker("slow")}
        chosen, left = [], self.options.seconds
        for test in sorted(passing | slow or took, key=lambda test: (test not in passing, took[test])):
            if not chosen or took[test] <= left:
                chosen.append(test)
                left -= took[test]
        return chosen

    def run(self, names: list[str], begin: Callable[[str], None] | None = None) -> None:
        """Run tests and call `begin` before each; without `begin`, stop at the first failure."""
        for name, following in zip(names, [*names[1:], None], strict=False):  # empty for a file of proofs
            if begin is not None:
                begin(name)
            item, before = self.items[name], sum(os.times()[:4])
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following and self.items[following])
            self.seconds[name] = sum(os.times()[:4]) - before
            if self.failed and begin is None:
                return

    def run_mutant(self, mutant: Mutant, names: list[str]) -> int:
        if not (mutant.inside and replace_code(mutant.code)):  # otherwise run in a process that imports the changed module
            return subprocess.run([sys.executable, "-m", "pytest", *ARGUMENTS, "-x", *names], check=False).returncode
        self.run(names)
        return int(self.failed)


def replace_code(module: types.CodeType) -> bool:
    """Replace the code of every existing function of a module by that in `module`; return whether this was possible."""
    codes, left = {}, [module]
    while left:
        code = left.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        left += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    there = [
        found for found in gc.get_objects() if isinstance(found, types.FunctionType) and found.__code__.co_filename == module.co_filename
    ]
    for function in there:
        new = codes.get((function.__code__.co_qualname, function.__code__.co_firstlineno), function.__code__)
        if new.co_freevars != function.__code__.co_freevars:
            return False
        function.__code__ = new
    return bool(there)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="modules to change, as tasks/models/card.py")
    parser.add_argument("--list", action="store_true", help="name the mutants and run none")
    parser.add_argument("--seconds", type=float, default=25.0, help="of processors, that the tests of a mutant are expected to take")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a mutant counts as killed by the clock")
    parser.add_argument("--only", default="", help="run those alone whose description holds this")
    options = parser.parse_args()
    if options.list:
        for path in options.files:
            possible, found = mutants(path, Path(path).read_text())
            print(f"{path}: {len(found)} of {possible}", *[mutant.name for mutant in found], sep="\n  ")
        return
    root = Path.cwd()
    kept = root / ".mutants"
    kept.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as where:
        copy = Path(where)
        for name in subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        os.chdir(copy)
        sys.path[0] = os.environ["PYTHONPATH"] = str(copy)
        files = sorted({file for path in options.files for file in test_files(path)})
        sys.exit(pytest.main([*ARGUMENTS, *files], plugins=[Runner(options, kept)]))


if __name__ == "__main__":
    main()
