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
from functools import cache
from pathlib import Path, PurePosixPath
from shutil import copytree, ignore_patterns
from typing import Any

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


@cache
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
# Imports every module of the library, first without its extras and then, where that failed, with them.
BARE = """
import gc, importlib, json, os, pkgutil, sys

gc.disable()  # with the end below, which unloads nothing: half of the time

class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, *others):
        missing = next((missing for missing in MISSING if f"{name}.".startswith(f"{missing}.")), None)
        if missing is None:
            return self.finder.find_spec(name, *others)
        requested.add(missing)

class Environment(dict):
    def __getitem__(self, name): read.add(name); return super().__getitem__(name)
    def get(self, name, default=None): read.add(name); return super().get(name, default)
    def __contains__(self, name): read.add(name); return super().__contains__(name)

requested, read, opened, started = set(), set(), set(), set()
sys.meta_path[:] = map(Without, sys.meta_path)

def note(event, values):
    if event == "open":
        opened.add(str(values[0]))
    elif event in ("subprocess.Popen", "os.system"):
        started.add(str(values[0]))

def errors_of(statements):
    errors = {}
    for name, statement in statements.items():
        try:
            exec(statement)
        except ImportError as error:
            errors[name] = [type(error).__name__, str(error)]
    return errors

sys.addaudithook(note)
os.environ = Environment(os.environ)
MISSING = [*SERVICES, *EXTRAS]
import dml_core
uses = errors_of(USES)
names = ["dml_core", *(found.name for found in pkgutil.walk_packages(dml_core.__path__, "dml_core.", onerror=lambda name: None))]
imports = {name: f"import {name}" for name in names if not name.endswith(("read_slim_checkpoint", "__main__"))}
need_extras = errors_of(imports)
MISSING = SERVICES
failed = errors_of({name: imports[name] for name in need_extras})
sets = {"opened": opened, "started": started, "read": read, "requested": requested}
errors = {"uses": uses, "need_extras": need_extras, "failed": failed}
found = {"names": [*imports], "file": dml_core.__file__, **errors, **{name: sorted(found) for name, found in sets.items()}}
print(json.dumps(found), flush=True)
os._exit(0)
"""


def services() -> set[str]:
    """Return the modules of the project's own requirements, which the library must not need."""
    optional = PROJECT["project"]["optional-dependencies"]
    named = [*PROJECT["project"]["dependencies"], *optional["pipeline"], *optional["serve"]]
    of_library = {"faiss-gpu", "dml-core", "packaging"}  # the last one is faiss's and matplotlib's
    return modules_of(named) - BASE - OPTIONAL.keys() - of_library | {"tasks", "flows", "pandas"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of the sources by the environment's own setuptools."""
    folder = tmp_path_factory.mktemp("built")
    copytree(CORE, folder / "source", ignore=ignore_patterns("__pycache__", "*.egg-info", "build"))
    earlier = folder / "build/dml-core/lib/dml_core/removed_since.py"
    earlier.parent.mkdir(parents=True)
    earlier.touch()
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
        settings = next(name for name in sdist.getnames() if name.count("/") == 1 and name.endswith("/setup.cfg"))
        assert b"build_base" not in sdist.extractfile(settings).read(), "outside of the unpacked sources"  # type: ignore[union-attr]
    assert sources | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.fixture(scope="module")
def imported(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Import every module of the wheel in a new process, without the checkout, the services and, at first, the extras."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(next(built.glob("dml_core-*.whl"))) as wheel:
        wheel.extractall(folder)
    for name in ("params.yaml", "dvc.yaml"):
        (folder / name).write_text("not: [settings")
    code = f"SERVICES, EXTRAS, USES = {sorted(services())!r}, {sorted(OPTIONAL)!r}, {USES!r}\n{BARE}"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert result["file"].startswith(str(folder))
    return result


@pytest.mark.slow
def test_without_extras_every_other_module_is_imported_and_the_first_use_names_the_extra(imported: dict[str, Any]) -> None:
    failed, names = imported["need_extras"], imported["names"]
    assert set(USES) == set(OPTIONAL.values())
    for extra in USES:
        kind, message = imported["uses"][extra]
        assert kind == "MissingPackageError", f"{extra}: {message}"
        assert re.fullmatch(rf"[\w.]+ is not installed; install it: pip install 'dml-core\[{extra}\]'", message)
    assert {name: error for name, error in failed.items() if error[0] != "MissingPackageError"}.keys() <= {"dml_core.losses.pml"}
    assert len(names) - len(failed) > 60
    for name in ("losses.metric_loss", "losses.sgsl", "trained", "training.loop", "data.prepare"):
        assert f"dml_core.{name}" in set(names) - failed.keys()


@pytest.mark.slow
def test_with_its_own_requirements_every_module_is_imported_and_reads_nothing_of_a_project(imported: dict[str, Any]) -> None:
    assert imported["failed"] == {}
    assert imported["started"] in ([], ["/sbin/ldconfig"]), "which finds CUDA's libraries for torch"
    assert not {"ray", "prefect", "mlflow", "dvc", "boto3", "botocore"} & {*imported["requested"]}, "not even to work without it"
    assert any(path.endswith((".pyc", ".py")) for path in imported["opened"]), "so that an empty list proves nothing"
    assert [
        path for path in imported["opened"] if PurePosixPath(path).name in ("params.yaml", "dvc.yaml", "HEAD") or "/.git/" in path
    ] == []
    assert [name for name in imported["read"] if name.startswith("DML_")] == []


def test_a_notebook_completes_public_names_before_they_are_loaded() -> None:
    names = subprocess.run([sys.executable, "-c", "import dml_core; print(*dir(dml_core))"], capture_output=True, text=True, check=True)
    assert {"evaluate", "load_model", "ClassBalancedSampler"} <= set(names.stdout.split())
