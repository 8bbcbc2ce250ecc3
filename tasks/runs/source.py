"""Normal form of Python code for a step's identity: what a source file does, independent of how it is written.

It omits docstrings, comments, layout, type annotations, imports from typing modules, and blocks for type checkers. An edited comment does
not retrain anything; a changed constant, operator, default or order of statements does.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TYPING_MODULES = frozenset({"typing", "collections.abc", "__future__"})
ANNOTATION_FIELDS = frozenset({"annotation", "returns", "type_comment", "type_params"})
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)  # and what contains some
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceCode:
    """A source file's content, in as far as it counts.

    Attributes:
        normal_form: text that two sources share if and only if they do the same by their syntax.
        imports: every module named by an executed import statement; `from a import b` counts as both `a` and `a.b`.
    """

    normal_form: str
    imports: tuple[str, ...]


def read_source(source: str) -> SourceCode:
    """Parse Python code.

    Raises:
        SyntaxError: the source is not Python.
    """
    tree = ast.parse(source)
    return SourceCode(repr(_form(tree)), tuple(_imports(tree)))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _form(value: Any) -> Any:
    """Return a node as nested tuples. Empty fields are omitted: newer Pythons add some, and the same source must give the same form."""
    if isinstance(value, list):
        return tuple(_form(item) for item in value if not _is_for_types(item))
    if not isinstance(value, ast.AST):
        return value
    names = [name for name in value._fields if name not in ANNOTATION_FIELDS]
    counted = {name: _form(_body(value) if name == "body" else getattr(value, name, None)) for name in names}
    kind = "Assign" if isinstance(value, ast.AnnAssign) and value.value is not None else type(value).__name__
    if isinstance(value, ast.AnnAssign):
        counted = {"targets": (counted["target"],)} | ({"value": counted["value"]} if "value" in counted else {})
    return (kind, *((name, field) for name, field in counted.items() if field not in (None, ())))


def _body(node: ast.AST) -> Any:
    """Return a node's body without its docstring; `pass` if nothing else is in it, since a lone docstring does nothing."""
    body = node.body  # type: ignore[attr-defined]
    if isinstance(node, Definition) and ast.get_docstring(node, clean=False) is not None:
        return body[1:] or [ast.Pass()]
    return body


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree's statements except those below a block for type checkers."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, STATEMENTS) and not _is_type_checking(child):
            yield from _executed(child)


def _is_for_types(node: Any) -> bool:
    return _is_type_checking(node) or (isinstance(node, ast.ImportFrom) and node.module in TYPING_MODULES)


def _is_type_checking(node: Any) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
