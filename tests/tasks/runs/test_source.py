"""Effect of a source file's edit on the steps that use it: formatting is ignored, behaviour counts."""

import gc
import threading
import time

import pytest

from tasks.runs.source import read_source
from tests.conftest import ROOT

SOURCE = '''"""What this is."""

from typing import Any
from math import sqrt

LIMIT = 3


class Box:
    """A box."""

    size: int = 4
    name: str

    def area(self, factor: float = 1.5, *rest: Any) -> float:
        """Its area."""
        width: float = sqrt(self.size)  # not the height
        return width * factor + LIMIT


def empty() -> None:
    """Does nothing."""
'''

SAME = {
    "a moved and rewrapped docstring": ('"""What this is."""', '"""What\nthis is, in\nother words."""'),
    "no module docstring": ('"""What this is."""\n', ""),
    "a comment": ("  # not the height", ""),
    "a comment of its own": ("LIMIT = 3", "# three\nLIMIT = 3"),
    "a local variable's annotation": ("width: float", "width: Any"),
    "no annotation at all": ("width: float = ", "width = "),
    "a parameter's annotation": ("factor: float", "factor: int"),
    "a result's annotation": ("-> float", "-> Any"),
    "a field's annotation": ("name: str", "name: Any"),
    "an import for annotations": ("from typing import Any", "from typing import Any, Protocol\nfrom collections.abc import Sequence"),
    "a block for type checkers": ("LIMIT = 3", "if TYPE_CHECKING:\n    import tasks.tracking.tracker\nLIMIT = 3"),
    "layout": ("width * factor + LIMIT", "(\n            width * factor\n            + LIMIT\n        )"),
    "an empty body": ('"""Does nothing."""', "pass"),
    "quotes and digits": ("1.5", "1.50"),
}

OTHER = {
    "a constant": ("LIMIT = 3", "LIMIT = 4"),
    "a default": ("1.5", "1.6"),
    "a field's default": ("size: int = 4", "size: int = 5"),
    "a field's name": ("name: str", "title: str"),
    "a field less": ("    name: str\n", ""),
    "the order of fields": ("    size: int = 4\n    name: str\n", "    name: str\n    size: int = 4\n"),
    "an operator": ("width * factor", "width / factor"),
    "the order of operations": ("width * factor + LIMIT", "width * (factor + LIMIT)"),
    "the order of statements": ("from math import sqrt\n\nLIMIT = 3", "LIMIT = 3\nfrom math import sqrt"),
    "an import": ("from math import sqrt", "from numpy import sqrt"),
    "a parameter's name": ("factor", "times"),
    "a statement more": ('"""Does nothing."""', '"""Does nothing."""\n    print()'),
    "a string that is not a docstring": ("LIMIT = 3", "LIMIT = 3\nNAME = 'box'"),
    "an int for a float": ("1.5", "1"),
    "True for 1": ("LIMIT = 3", "LIMIT = True"),
}


@pytest.mark.parametrize("edit", SAME.values(), ids=SAME)
def test_how_it_is_written_counts_for_nothing(edit: tuple[str, str]) -> None:
    assert SOURCE.count(edit[0]) >= 1
    assert read_source(SOURCE.replace(*edit)).normal_form == read_source(SOURCE).normal_form


@pytest.mark.parametrize("edit", OTHER.values(), ids=OTHER)
def test_what_it_does_counts(edit: tuple[str, str]) -> None:
    assert SOURCE.count(edit[0]) >= 1
    assert read_source(SOURCE.replace(*edit)).normal_form != read_source(SOURCE).normal_form


def test_one_and_true_and_one_point_zero_are_three_things() -> None:
    assert len({read_source(f"x = {value}").normal_form for value in ("1", "True", "1.0", "'1'", "b'1'")}) == 5


def test_imports_inside_functions_count_and_those_for_type_checkers_do_not() -> None:
    source = "import a.b\nif TYPE_CHECKING:\n    import c\ndef f():\n    from d import e\n"
    assert read_source(source).imports == ("a.b", "d", "d.e")


def test_relative_imports_are_resolved_from_the_module_s_package() -> None:
    source = "from .helper import f\nfrom . import g\nfrom ..other.part import h\nfrom a import b"
    names = ["p.q.helper", "p.q.helper.f", "p.q", "p.q.g", "p.other.part", "p.other.part.h", "a", "a.b"]
    assert read_source(source, "p.q").imports == tuple(names)


@pytest.mark.parametrize(
    "source",
    [
        "class C:\n    margin: Annotated[float, Field(default={})]",
        "class C:\n    margin: Annotated[float, pydantic.Field({}, gt=0)]",
        "class C:\n    margin: Annotated[float, Field(default_factory=lambda: {})]",
        "def f(margin: Annotated[float, Field(default={})]): pass",
    ],
)
def test_a_default_in_an_annotation_counts(source: str) -> None:
    assert read_source(source.format(0.35)).normal_form != read_source(source.format(0.9)).normal_form


def test_imports_in_every_kind_of_block_count() -> None:
    source = """
if x: import a
elif y: import b
else: import c
try: import d
except E: import e
else: import f
finally: import g
for i in x: import h
while x: import i
with x: import j
match x:
    case 1: import k
class C: import l
async def f():
    async for i in x: import m
"""
    assert sorted(read_source(source).imports) == list("abcdefghijklm")


def test_every_file_of_the_project_has_a_form_and_no_two_the_same() -> None:
    files = [path for folder in ("dml_core", "tasks", "flows") for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]
    forms = {read_source(path.read_text()).normal_form for path in files}
    assert len(files) == len(forms) > 100


def test_threads_parse_at_once_although_python_s_parser_cannot() -> None:
    """A run was FAILED by "AST constructor recursion depth mismatch" (Python 3.11.7): a thread was switched within another's parsing."""
    source = "\n".join(f"x{place} = [y * {place} for y in (1, 2, 3) if y > {place}]" for place in range(200))
    read = []

    def parse_at(depth: int) -> None:
        if depth > 0:
            parse_at(depth - 1)
        else:
            read.extend(read_source(source) for _ in range(10))

    def switch(_phase: str, _info: dict[str, int]) -> None:
        time.sleep(1e-4)

    threads = [threading.Thread(target=parse_at, args=(10 * place,)) for place in range(4)]
    gc.callbacks.append(switch)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(switch)
    assert len(read) == 40
