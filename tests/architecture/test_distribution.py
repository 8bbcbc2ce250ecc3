"""The distribution `dml-core`: what it declares is what it imports, and it works without its extras and without this project."""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import defaultdict
from pathlib import Path, PurePosixPath
from shutil import copytree, ignore_patterns

import pytest

from dml_core.extras import EXTRAS
from tests.conftest import ROOT

CORE = ROOT / "dml_core"
LIBRARY = tomllib.loads((CORE / "pyproject.toml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = {  # distribution -> its module, where their names differ
    "scikit-learn": "sklearn",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "faiss-cpu": "faiss",
    "pytorch-metric-learning": "pytorch_metric_learning",
    "protobuf": "google.protobuf",
    "fonttools": "fontTools",
    "resvg-py": "resvg_py",
}
# torch.onnx imports these two.
WITHOUT_AN_IMPORT = {"onnx", "onnxscript"}
# Module or package -> the extra that all of it needs. Elsewhere an optional package may be imported within a function only.
WHOLE = {
    "dml_core.evaluation.retrieval": "index",
    "dml_core.index": "index",
    "dml_core.figures": "figures",
    "dml_core.losses.pml": "pml",
    "dml_core.models.conversion": "caffe",
}
# A script for a separate environment, with TensorFlow.
SEPARATE_SCRIPT = CORE / "models/conversion/read_slim_checkpoint.py"
SOURCES = sorted(path for path in CORE.rglob("*.py") if path != SEPARATE_SCRIPT)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules_of(requirements: list[str]) -> set[str]:
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]  # type: ignore[index]
    return {MODULES.get(name, name) for name in names}


BASE = modules_of(LIBRARY["project"]["dependencies"])
OPTIONAL = {module: extra for extra, named in LIBRARY["project"]["optional-dependencies"].items() for module in modules_of(named)}


def imports(path: Path) -> dict[str, bool]:
    """Return third-party module -> whether it is imported with the file, not only within a function or for type checkers."""
    tree = ast.parse(path.read_text())
    inner = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.Lambda) or (isinstance(scope, ast.If) and ast.unparse(scope.test) == "TYPE_CHECKING")
        for node in ast.walk(scope)
    }
    found: dict[str, bool] = defaultdict(bool)
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = "google.protobuf" if name.startswith("google.protobuf") else name.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "dml_core":
                found[top] |= id(node) not in inner
    return found


def extra_of(module: str) -> str | None:
    return next((extra for whole, extra in WHOLE.items() if f"{module}.".startswith(f"{whole}.")), None)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_file_imports_only_what_is_declared(path: Path) -> None:
    extra = extra_of(module_name(path))
    for module, at_import in imports(path).items():
        assert module in BASE or module in OPTIONAL, f"{module} is no dependency of dml-core"
        if module in OPTIONAL and at_import:
            assert OPTIONAL[module] == extra, f"{module} is of the extra '{OPTIONAL[module]}'"


def test_every_dependency_is_imported() -> None:
    used = {module for path in SOURCES for module in imports(path)} | WITHOUT_AN_IMPORT
    assert (BASE | OPTIONAL.keys()) - used == set()
    assert EXTRAS == OPTIONAL
    assert set(WHOLE.values()) <= set(OPTIONAL.values())


def test_every_package_is_in_the_distribution() -> None:
    assert LIBRARY["tool"]["setuptools"]["packages"] == sorted(module_name(path) for path in CORE.rglob("__init__.py"))


def test_the_project_takes_this_version_of_the_library_with_every_extra_but_the_cpu_s_faiss() -> None:
    version, optional = LIBRARY["project"]["version"], PROJECT["project"]["optional-dependencies"]
    assert version == PROJECT["project"]["version"]
    requirements = [name for named in (PROJECT["project"]["dependencies"], *optional.values()) for name in named]
    of_library = [requirement for requirement in requirements if requirement.startswith("dml-core")]
    assert all(requirement.endswith(f"]=={version}") for requirement in of_library)
    extras = re.findall(r"\w+", " ".join(requirement[len("dml-core[") : requirement.index("]")] for requirement in of_library))
    assert set(extras) == set(OPTIONAL.values()) - {"index"}
    assert any(name.startswith("faiss-gpu") for name in PROJECT["project"]["dependencies"])
    assert (CORE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


# Extra -> what a user calls first that needs it.
USES = {
    "index": "from dml_core import evaluate",
    "figures": "from dml_core.figures.recalls import plot_recalls",
    "pml": "from dml_core.losses.registry import build_loss; build_loss('pml:TripletMarginLoss', {}, 2, 2)",
    "timm": "from dml_core.models.backbones.registry import build_backbone\n"
    "from dml_core.models.backbones.config import BackboneConfig; build_backbone(BackboneConfig(name='timm:resnet18', weights='none'))",
    "onnx": "from pathlib import Path; from dml_core.exported import open_graph; from dml_core.network_description import GraphFile\n"
    "open_graph(Path(), GraphFile(format='onnx', name='network.onnx', precision='fp32'))",
    "caffe": "from dml_core.models.conversion.caffe import read_caffemodel",
    "drawn": "from pathlib import Path; from dml_core.data.drawing.glyphs import code_points; code_points(Path())",
}
BARE = """
import importlib, json, os, pkgutil, sys

class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *others):
        is_missing = any(f"{name}.".startswith(f"{missing}.") for missing in MISSING)
        return None if is_missing else self.finder.find_spec(name, *others)

class Environment(dict):
    def __getitem__(self, name): read.add(name); return super().__getitem__(name)
    def get(self, name, default=None): read.add(name); return super().get(name, default)
    def __contains__(self, name): read.add(name); return super().__contains__(name)

read, opened, started, failed = set(), set(), set(), {}
sys.meta_path[:] = map(Without, sys.meta_path)

def note(event, values):
    if event == "open":
        opened.add(str(values[0]))
    elif event in ("subprocess.Popen", "os.system"):
        started.add(str(values[0]))

sys.addaudithook(note)
os.environ = Environment(os.environ)
import dml_core
uses = {}
for extra, code in USES.items():
    try:
        exec(code)
    except ImportError as error:
        uses[extra] = [type(error).__name__, str(error)]
names = ["dml_core", *(found.name for found in pkgutil.walk_packages(dml_core.__path__, "dml_core.", onerror=lambda name: None))]
for name in names:
    if not name.endswith(("read_slim_checkpoint", "__main__")):
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed[name] = [type(error).__name__, str(error)]
sets = {"opened": sorted(opened), "started": sorted(started), "read": sorted(read)}
print(json.dumps({"names": names, "uses": uses, "failed": failed, "file": dml_core.__file__, **sets}))
"""


def imported(missing: set[str], folder: Path, path: Path = ROOT) -> dict[str, object]:
    """Import every module of the library in a new process in an empty folder, without the packages `missing`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(path)}
    (folder / "empty").mkdir(exist_ok=True)
    for name in ("params.yaml", "dvc.yaml"):
        (folder / "empty" / name).write_text("not: [settings")
    uses = USES if missing >= set(OPTIONAL) else {}
    command = [sys.executable, "-c", f"MISSING = {sorted(missing)!r}\nUSES = {uses!r}\n{BARE}"]
    ran = subprocess.run(command, cwd=folder / "empty", env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    result: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return result


def services() -> set[str]:
    """Return the modules of the project's own requirements, which the library must not need."""
    optional = PROJECT["project"]["optional-dependencies"]
    named = [*PROJECT["project"]["dependencies"], *optional["pipeline"], *optional["serve"]]
    of_library = {"faiss-gpu", "dml-core", "packaging"}  # the last one is faiss's and matplotlib's
    return modules_of(named) - BASE - OPTIONAL.keys() - of_library | {"tasks", "flows", "pandas"}


@pytest.mark.slow
def test_without_extras_every_other_module_is_imported_and_the_first_use_names_the_extra(tmp_path: Path) -> None:
    result = imported(set(OPTIONAL) | services(), tmp_path)
    failed, names, uses = result["failed"], result["names"], result["uses"]
    assert isinstance(failed, dict)
    assert isinstance(names, list)
    assert isinstance(uses, dict)
    assert set(USES) == set(OPTIONAL.values())
    for extra in USES:
        kind, message = uses[extra]
        assert kind == "MissingPackageError", f"{extra}: {message}"
        assert re.fullmatch(rf"[\w.]+ is not installed; install it: pip install 'dml-core\[{extra}\]'", message)
    assert {name: error for name, error in failed.items() if error[0] != "MissingPackageError"}.keys() <= {"dml_core.losses.pml"}
    assert len(names) - len(failed) > 60
    for name in ("losses.metric_loss", "losses.sgsl", "trained", "training.loop", "data.prepare"):
        assert f"dml_core.{name}" in set(names) - failed.keys()


@pytest.mark.slow
def test_with_its_own_requirements_every_module_is_imported_and_reads_nothing_of_a_project(tmp_path: Path) -> None:
    result = imported(services(), tmp_path)
    assert result["failed"] == {}
    assert result["started"] in ([], ["/sbin/ldconfig"]), "which finds CUDA's libraries for torch"
    opened, read = result["opened"], result["read"]
    assert isinstance(opened, list)
    assert isinstance(read, list)
    assert any(path.endswith(".pyc") or path.endswith(".py") for path in opened), "so that an empty list proves nothing"
    assert [path for path in opened if PurePosixPath(path).name in ("params.yaml", "dvc.yaml", "HEAD") or "/.git/" in path] == []
    assert [name for name in read if name.startswith("DML_")] == []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of the sources by the environment's own setuptools."""
    folder = tmp_path_factory.mktemp("built")
    copytree(CORE, folder / "source", ignore=ignore_patterns("__pycache__", "*.egg-info", "build"))
    code = "from setuptools.build_meta import build_sdist, build_wheel; build_wheel('../dist'); build_sdist('../dist')"
    subprocess.run([sys.executable, "-c", code], cwd=folder / "source", capture_output=True, check=True)
    return folder / "dist"


def test_wheel_and_sdist_have_every_file_and_no_other(built: Path) -> None:
    sources = {path.relative_to(CORE).as_posix() for path in CORE.rglob("*.py")} | {"py.typed"}
    with zipfile.ZipFile(next(built.glob("dml_core-*.whl"))) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert inside == {f"dml_core/{name}" for name in sources}
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    with tarfile.open(next(built.glob("dml_core-*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert sources | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.slow
def test_the_wheel_works_without_the_checkout(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(built.glob("dml_core-*.whl"))) as wheel:
        wheel.extractall(tmp_path / "installed")
    result = imported(services(), tmp_path, tmp_path / "installed")
    assert result["failed"] == {}
    assert str(result["file"]).startswith(str(tmp_path))


def test_a_notebook_completes_public_names_before_they_are_loaded() -> None:
    names = subprocess.run([sys.executable, "-c", "import dml_core; print(*dir(dml_core))"], capture_output=True, text=True, check=True)
    assert {"evaluate", "load_model", "ClassBalancedSampler"} <= set(names.stdout.split())
