"""Rules of the repository: imports, registries against files, the files that DVC watches, the README's claims."""

import ast
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from dml_core.config import read_yaml
from dml_core.data.registry import DATASETS
from dml_core.errors import ConfigError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.losses.registry import LOSSES
from dml_core.measurements.registry import MEASUREMENTS, measurement, parse_measurement
from dml_core.models.backbones.registry import BACKBONES
from flows.cli.app import VERBS
from tasks.runs.identity import STEP_MODULES, source_files
from tasks.runs.params.file import load_params
from tasks.runs.specs import ComparisonSpec, Params
from tests.architecture.readme_results import PAGE, readme_with
from tests.conftest import ROOT

SOURCES = sorted(path for folder in ("dml_core", "tasks", "flows") for path in (ROOT / folder).rglob("*.py"))


def modules_loaded_by(statement: str) -> set[str]:
    """Return the top-level packages loaded by a statement in a new process; garbage collection and unloading would double its time."""
    loaded = "json.dumps(sorted({name.partition('.')[0] for name in sys.modules}))"
    code = f"import gc, json, os, sys\ngc.disable()\n{statement}\nprint({loaded}, flush=True)\nos._exit(0)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(ran.stdout))


def test_import_rules() -> None:
    ran = subprocess.run([Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", ran.stdout)


def all_imports(path: Path) -> set[str]:
    """Return the names of the modules in all import statements of a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions and for type checkers count too."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
    imports = {name: all_imports(path) & files.keys() - {name} for name, path in files.items()}
    assert sum(map(len, imports.values())) > 1000
    order = TopologicalSorter(imports)
    order.prepare()  # a CycleError names the cycle


def test_a_flow_that_reuses_everything_loads_no_trainer() -> None:
    loaded = modules_loaded_by("import flows.reproduce")
    assert "prefect" in loaded
    assert not loaded & {"torchvision", "timm", "ray", "sklearn", "faiss"}


def test_the_command_loads_nothing_heavy_before_it_knows_what_to_do() -> None:
    loaded = modules_loaded_by("import flows.cli.exits")
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "ray", "prefect", "mlflow", "dvc", "pandas", "pydantic", "rich", "psutil"}


def test_the_help_of_every_verb_loads_nothing_heavy() -> None:
    loaded = modules_loaded_by(f"import {', '.join(f'flows.cli.{module}' for module, _ in VERBS.values())}")
    assert "rich" in loaded
    assert not loaded & {"torch", "ray", "prefect", "mlflow", "dvc", "optuna", "pandas", "matplotlib", "boto3"}


@pytest.mark.parametrize(
    ("registry", "folder"),
    [(LOSSES, "losses"), (DATASETS, "data/readers"), (BACKBONES, "models/backbones")],
)
def test_every_entry_of_a_registry_leads_to_a_class_of_its_own_file(registry: dict[str, str], folder: str) -> None:
    assert registry
    for name, target in registry.items():
        module, _, class_name = target.partition(":")
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert path.parent == ROOT / "dml_core" / folder, name
        defined = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        assert class_name in defined, name


def test_every_measurement_is_a_file_with_options_and_metrics_that_no_other_has() -> None:
    files = {path.stem for path in (ROOT / "dml_core" / "measurements").glob("*.py")} - {
        "__init__",
        "contract",
        "registry",
        "classifier",
        "sample_curves",
    }
    assert files == set(MEASUREMENTS)
    metrics = [metric for name in MEASUREMENTS for metric in measurement(name).METRICS]
    assert len(metrics) == len(set(metrics)) >= len(MEASUREMENTS)
    for name in MEASUREMENTS:
        assert callable(measurement(name).measure)
        with pytest.raises(ConfigError, match="no_such_option"):
            parse_measurement(name, {"no_such_option": 1})


def test_every_source_file_says_what_it_is() -> None:
    assert len(SOURCES) > 50
    assert [str(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_dvc_watches_every_file_that_a_step_uses() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    watched = [ROOT / dep for dep in stages["comparison"]["do"]["deps"] if "$" not in dep]
    modules = [module for modules in STEP_MODULES.values() for module in modules] + [target.partition(":")[0] for target in LOSSES.values()]
    used = source_files(modules)
    assert len(used) > 30
    assert [name for name, path in used.items() if not any(path.is_relative_to(dep) for dep in watched)] == []


def test_dvc_names_only_parameters_that_exist() -> None:
    params = read_yaml(ROOT / "params.yaml")
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    named = [name for stage in stages.values() for name in stage["do"]["params"]]
    assert named
    for name in named:
        found = params
        for part in name.replace("${key}", "synthetic").split("."):
            found = found[part]
    assert "evaluation" in named
    assert set(params["evaluation"]) <= set(EvaluationConfig.model_fields)


def test_settings_that_only_dvc_needs_are_documented_and_may_be_null(tmp_path: Path) -> None:
    """DVC fails if a key in dvc.yaml is absent from params.yaml."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    values = read_yaml(ROOT / "params.yaml")
    page = (ROOT / "docs/reference/settings.md").read_text()
    (sentence,) = (line for line in page.splitlines() if line.startswith("DVC refuses absent keys"))
    for name in (name for name in stages["comparison"]["do"]["params"] if "$" not in name):
        *above, key = name.split(".")
        block = values["comparison"] if above else values
        config = ComparisonSpec if above else Params
        if not config.model_fields[key].is_required():
            assert f"`{name}`" in sentence
            block[key] = None
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    params = load_params(tmp_path / "params.yaml")
    assert (params.comparison.reference, params.evaluation) == (None, EvaluationConfig())


def test_the_standing_comparison_is_a_valid_one() -> None:
    params = load_params(ROOT / "params.yaml")
    assert set(params.comparison.default_datasets) <= set(params.comparison.datasets)


def test_the_lock_file_has_hashes_and_no_addresses() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert text.count("--hash=sha256:") > 500
    assert "://" not in text


def test_the_readme_shows_the_commands_and_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make reproduce" in text
    assert "make test" in text
    named = re.findall(r"`((?:dml_core|tasks|flows|infra|docs|benchmarks|tests)/[\w./-]+)`", text)
    assert len(named) >= 6
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_continuous_integration_calls_the_readmes_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "make test" in lines
    assert "make check" in lines


def test_the_readme_s_table_is_the_page_s() -> None:
    page = json.loads(PAGE.read_text())
    assert (ROOT / "README.md").read_text() == readme_with(page)
    assert f"| {page['rows'][0]['label']} " in readme_with(page)


def test_pip_audit_takes_the_command_of_make_audit_and_the_whole_lock() -> None:
    """A dry run collects the packages without a request to pip-audit's service."""
    makefile = (ROOT / "Makefile").read_text()
    words = re.findall(r"^\t@pip-audit (.*)", makefile, re.MULTILINE)[0].split()
    assert "--strict" in words, "without it, packages that cannot be audited are skipped and the exit code is 0"
    ran = subprocess.run([sys.executable, "-m", "pip_audit", *words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    num_pins = len(re.findall(r"^\S+==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    num_audited = int(re.findall(r"would have audited (\d+) packages", ran.stderr.lower())[0])
    assert num_audited > 0.8 * num_pins, "pins for other platforms are left out"
