"""Normal form of Python code for a step's identity: what a source file does, independent of how it is written.

It omits docstrings, comments, layout, type annotations without a default, imports from typing modules, and blocks for type checkers. An
edited comment does not retrain anything; a changed constant, operator, default or order of statements does.
"""

import ast
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TYPING_MODULES = frozenset({"typing", "collections.abc", "__future__"})
ANNOTATION_FIELDS = frozenset({"annotation", "returns", "type_comment", "type_params"})
DEFAULTS = frozenset({"default", "default_factory"})  # in `Annotated[float, Field(default=0.35)]`
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)  # and what contains some
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_parsing = threading.Lock()  # Python before 3.11.8 and 3.12.2 may raise a SystemError if two threads parse at once


@dataclass(frozen=True)
class SourceCode:
    """A source file's content, in as far as it counts.

    Attributes:
        normal_form: text that two sources share if and only if they do the same by their syntax.
        imports: every module named by an executed import statement, by its full name; `from a import b` counts as both `a` and `a.b`.
    """

    normal_form: str
    imports: tuple[str, ...]


def read_source(source: str, package: str = "") -> SourceCode:
    """Parse Python code of a module in `package`, from which its relative imports start.

    Raises:
        SyntaxError: the source is not Python.
    """
    with _parsing:
        tree = ast.parse(source)
    return SourceCode(repr(_form(tree)), tuple(_imports(tree, package)))


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module is not None else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _form(value: Any) -> Any:
    """Return a node as nested tuples. Empty fields are omitted: newer Pythons add some, and the same source must give the same form."""
    if isinstance(value, list):
        return tuple(_form(item) for item in value if not _is_for_types(item))
    if not isinstance(value, ast.AST):
        return value
    names = [name for name in value._fields if name not in ANNOTATION_FIELDS or _has_default(getattr(value, name, None))]
    counted = {name: _form(_body(value) if name == "body" else getattr(value, name, None)) for name in names}
    kind = "Assign" if isinstance(value, ast.AnnAssign) and value.value is not None else type(value).__name__
    if isinstance(value, ast.AnnAssign):
        counted = {"targets": (counted.pop("target"),)} | {name: counted[name] for name in ("value", "annotation") if name in counted}
    return (kind, *((name, field) for name, field in counted.items() if field not in (None, ())))


def _has_default(annotation: Any) -> bool:
    """Return whether an annotation gives a default: as an option of a call, or as the first argument of `Field`."""
    nodes = ast.walk(annotation) if isinstance(annotation, ast.Subscript) else ()
    return any(
        (isinstance(node, ast.keyword) and node.arg in DEFAULTS)
        or (isinstance(node, ast.Call) and bool(node.args) and ast.unparse(node.func).rpartition(".")[2] == "Field")
        for node in nodes
    )


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
