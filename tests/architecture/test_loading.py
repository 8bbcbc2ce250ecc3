"""Product code never executes loaded data: torch.load only with weights_only, no pickles, no object arrays, YAML only with safe loaders.

The exception is the file of a `torch.export` graph, which cannot be opened otherwise; docs/reference/security.md lists it as a trusted
input.
"""

import ast
import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from dml_core import config
from tests.conftest import ROOT

PACKAGES = ("dml_core", "tasks", "flows", "benchmarks", "infra")
EXECUTING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
TRUSTED = {"dml_core/exported.py": ["torch.export.load"]}  # file -> its calls that may execute what they load


def calls(tree: ast.AST) -> Iterator[tuple[str, dict[str, ast.expr], ast.Call]]:
    """Yield the dotted name, the keywords and the node of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: word.value for word in node.keywords if word.arg}, node


def unsafe(tree: ast.AST) -> list[str]:
    """Return the calls and imports of a file that may execute loaded data."""
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"line {node.lineno}: imports {name}" for name in names if name.partition(".")[0] in EXECUTING]
    for name, keywords, node in calls(tree):
        true = {word for word, value in keywords.items() if isinstance(value, ast.Constant) and value.value is True}
        if name in ("torch.load", "torch.hub.load_state_dict_from_url") and "weights_only" not in true:
            found.append(f"line {node.lineno}: {name} without weights_only=True")
        if "allow_pickle" in keywords and "allow_pickle" in true:
            found.append(f"line {node.lineno}: {name} with allow_pickle=True")
        loader = ast.unparse(keywords["Loader"]) if "Loader" in keywords else ""
        if name in ("yaml.load", "yaml.load_all") and loader not in ("_StrictLoader", "yaml.SafeLoader", "yaml.CSafeLoader"):
            found.append(f"line {node.lineno}: {name} by {loader or 'no safe loader'}")
        if name.rpartition(".")[2] == "load" and name.startswith(("torch.export.", "torch.jit.", "torch.package.")):
            found.append(f"line {node.lineno}: {name}")
        if name in ("yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "eval", "exec", "os.system"):
            found.append(f"line {node.lineno}: {name}")
        if name.startswith("subprocess.") and "shell" in true:
            found.append(f"line {node.lineno}: {name} through a shell")
    return found


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_nothing_that_is_loaded_is_executed() -> None:
    assert len(sources()) > 150
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sources()}
    found = {name: unsafe(ast.parse(text)) for name, text in texts.items()}
    assert {name: [line.partition(": ")[2] for line in lines] for name, lines in found.items() if lines} == TRUSTED
    loads = [name for text in texts.values() if "torch.load" in text for name, _, _ in calls(ast.parse(text))]
    assert loads.count("torch.load") >= 3, "so that an empty list proves nothing"


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "import pickle",
        "from joblib import load",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text)",
        "subprocess.run(words, shell=True)",
        "eval(text)",
        "torch.export.load(path)",
        "torch.export.pt2_archive.load(path)",
        "torch.jit.load(path)",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert unsafe(ast.parse(line))


def test_the_strict_loader_is_a_safe_one() -> None:
    assert issubclass(config._StrictLoader, yaml.SafeLoader | yaml.CSafeLoader)


class Planted:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (self.path,))


def test_a_library_that_asks_for_whole_pickles_is_given_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchvision does for cached weights; without the variable, the planted call is executed."""
    data = io.BytesIO()
    torch.save({"weight": Planted(tmp_path / "planted")}, data)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(data.getvalue()), weights_only=False)
    assert not (tmp_path / "planted").exists()
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    torch.load(io.BytesIO(data.getvalue()), weights_only=False)
    assert (tmp_path / "planted").exists()
