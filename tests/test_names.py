"""A name from a user that could lead out of the project is refused in one line, and no file outside data/ and state/ changes."""

import contextlib
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dml_core.config import merge, parse, read_yaml
from dml_core.errors import ConfigError, DmlError
from flows.cli.app import VERBS as ROOT_VERBS
from flows.cli.app import app, load_verb
from tasks.data import prepare_dataset
from tasks.environment import Project
from tasks.own_images.add import add_images
from tasks.runs import protocols
from tasks.runs.params.comparison import row_name
from tasks.runs.params.file import load_params
from tasks.runs.protocols import Protocol
from tasks.runs.tuned import tuned_path
from tasks.tables.file import TableFile, load_table
from tests.conftest import ROOT
from tests.tasks.test_own_images import draw_classes

NASTY = (
    *("", ".", "..", "/", "a/b", "../x", "../../benchmarks", "/tmp", "~", "a/../../x", "-d", "--help", "a b", "a\nb", "a.b", ".git"),
    *("été", "a@b", "a:b", "${x}", "a%2Fb", "a\\b", "*", "\udcff", "а", "a\u202eb", "con/", "synthetic/../x", "tuned", "data", "x" * 300),
)
PARTS = st.sampled_from([*"./\\~aB_-0 @%#?é\n\0", "..", "birds", "benchmarks"])
UNICODE = st.characters(exclude_categories=["Cs"])  # what UTF-8 can encode; without categories hypothesis encodes each of a million
NAMES = st.one_of(st.sampled_from(NASTY), st.lists(PARTS, max_size=6).map("".join), st.text(UNICODE, max_size=12))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with the repository's parameters, next to the user's folders."""
    outside = tmp_path_factory.mktemp("outside")
    draw_classes(outside / "birds")
    root = outside / "home" / "project"
    for folder in ("benchmarks", "results", "data/raw", "data/packed"):
        (root / folder).mkdir(parents=True)
        (root / folder / "mine.txt").write_text("mine")
    shutil.copy(ROOT / "params.yaml", root)
    return Project(root, root / "state", str(root / "state/store"), f"sqlite:///{root}/state/mlflow.db")


def tree(project: Project) -> dict[str, Any]:
    """Return path -> content of everything around the project except data/packed/<name> and the state folder."""
    return {
        str(path): path.read_bytes() if path.is_file() and not path.is_symlink() else "folder"
        for path in project.root.parents[1].rglob("*")
        if not path.is_relative_to(project.state) and (project.root / "data/packed" not in path.parents or path.name == "mine.txt")
    }


@cache
def few_params() -> dict[str, Any]:
    """Return the repository's parameters with one dataset and one variant."""
    values = read_yaml(ROOT / "params.yaml")
    comparison = values["comparison"]
    datasets, variants = {"synthetic": values["datasets"]["synthetic"]}, {"softmax": comparison["variants"]["softmax"]}
    return values | {"datasets": datasets, "comparison": comparison | {"datasets": {"synthetic": {}}, "variants": variants}}


def params_with(project: Project, datasets: tuple[str, ...] = (), variants: tuple[str, ...] = ()) -> None:
    birds = {"reader": "folder", "raw": str(project.root.parents[1] / "birds")}
    loss = {"loss": {"name": "softmax"}}
    changes = {
        "datasets": dict.fromkeys(datasets, birds),
        "comparison": {"datasets": {name: {"num_epochs": 1} for name in datasets}, "variants": dict.fromkeys(variants, loss)},
    }
    project.params_file.write_text(yaml.safe_dump(merge(few_params(), changes), sort_keys=False, allow_unicode=False))


def loaded(project: Project) -> Any:
    """Return the parameters, or None if they are refused."""
    try:
        return load_params(project.params_file)
    except ConfigError:
        return None


@given(NAMES)
@example("birds")
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_dataset_of_any_name_is_packed_below_data_packed_or_refused(project: Project, name: str) -> None:
    params_with(project, datasets=(name,))
    before = tree(project)
    params = loaded(project)
    if params is not None and name != "synthetic":
        prepare_dataset(project, name, params.datasets[name])
        assert (project.root / "data/packed" / name / "images.arrow").is_file()
        for place in (project.packed(name), project.results(name), tuned_path("project/standing", "row", name)):
            assert place.parent == Path(os.path.normpath(place)).parent, "a name is one part of a path"
    assert tree(project) == before


@given(NAMES, NAMES)
@example("A_B", "a-b")
@example("Softmax", "x")
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_variants_of_any_names_have_rows_of_their_own_or_are_refused(project: Project, one: str, other: str) -> None:
    params_with(project, variants=(one, other))
    before = tree(project)
    params = loaded(project)
    if params is not None:
        variants = list(params.comparison.variants)
        assert len({row_name(variant) for variant in variants}) == len(variants)
        assert all(tuned_path("project/standing", row_name(variant), "d").parent.name == "standing" for variant in variants)
    assert tree(project) == before


@given(NAMES)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_tables_and_protocols_take_no_other_names(name: str) -> None:
    table = read_yaml(protocols.TABLES / "softtriple/table1.yaml")
    protocol = read_yaml(protocols.TABLES / "softtriple/protocol.yaml")
    row = next(iter(table["rows"].values()))
    for kind, values in {
        TableFile: merge(table, {"rows": {name: row}}),
        Protocol: merge(protocol, {"variants": {name: {}}, "datasets": {name: {}}}),
    }.items():
        with contextlib.suppress(ConfigError):
            parse(kind, values, "x.yaml")
            assert tuned_path("softtriple/table1", name, name).parent.name == "table1"
    with pytest.raises(ConfigError):
        load_table(name)


@given(NAMES)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_data_add_takes_the_names_that_the_file_does(project: Project, name: str) -> None:
    params_with(project)
    before = tree(project)
    with pytest.raises(DmlError) as refused:
        add_images(project, name, project.root / "nowhere")
    assert tree(project) == before
    if "no such folder" in str(refused.value):
        params_with(project, datasets=(name,))
        assert loaded(project) is not None


def test_an_error_is_one_line_that_every_terminal_prints() -> None:
    assert str(ConfigError("a\nb\0\udcff\x1b[31m  c")) == "a b\\x00\\udcff\\x1b[31m  c"


# ---------------------------------------------------------------- the command line


def verbs() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every verb with its function."""
    for verb in ROOT_VERBS:
        load_verb(verb)
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    for prefix, group in groups:
        assert isinstance(group, typer.Typer)
        for command in group.registered_commands:
            assert command.callback is not None
            yield prefix + (command.name or command.callback.__name__.replace("_", "-")), command.callback


def texts(callback: Callable[..., Any]) -> dict[str, bool]:
    """Return name -> whether it is a list, of a verb's parameters that are texts or lists of texts."""
    hints = get_type_hints(callback)
    kinds = {name: {hint, *get_args(hint)} for name, hint in hints.items()}
    return {name: list[str] in kind for name, kind in kinds.items() if {str, list[str]} & kind}


VERBS = dict(verbs())
WITH_NAMES = {verb: callback for verb, callback in VERBS.items() if texts(callback)}
HARMLESS = {"int": 1, "Path": Path("out"), "str": "synthetic"}


def required(callback: Callable[..., Any]) -> dict[str, Any]:
    """Return harmless values for a verb's required parameters."""
    hints = get_type_hints(callback)
    empty = inspect.Parameter.empty
    needed = [name for name, parameter in inspect.signature(callback).parameters.items() if parameter.default is empty]
    return {
        name: ["synthetic"] if list in (getattr(hints[name], "__origin__", None),) else HARMLESS[hints[name].__name__] for name in needed
    }


ASKED = (
    "",
    "..",
    "../../birds",
    "/tmp/birds",
    "a\nb",
    "synthetic/..",
    "synthetic/²",
    "models:/../../birds@..",
    "models:/..",
    "x" * 200,
    "\udcff",
)
STARTS = {"stack up"}  # starts servers, whatever the bucket's address


class BeganError(DmlError):
    """Raised when a flow would start."""


@pytest.mark.slow
@pytest.mark.parametrize("verb", sorted(WITH_NAMES.keys() - STARTS))
def test_no_verb_touches_anything_outside_for_any_name(verb: str, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.flows import Flow

    def began(*_: object, **__: object) -> None:
        raise BeganError("began")

    shutil.copy(ROOT / "params.yaml", project.params_file)
    monkeypatch.chdir(project.root)
    monkeypatch.setattr(Flow, "__call__", began)
    monkeypatch.setattr("flows.cli.session.PrefectStart.begin", lambda _: None)
    monkeypatch.setattr("tasks.own_images.add.guess_reader", began)
    kept, before = dict(os.environ), tree(project)
    try:
        for name, is_list in texts(WITH_NAMES[verb]).items():
            for value in ASKED:
                asked = required(WITH_NAMES[verb]) | {name: [value] if is_list else value}
                with contextlib.suppress(DmlError, typer.BadParameter, typer.Exit, SystemExit):
                    WITH_NAMES[verb](**asked)
                assert tree(project) == before, (name, value)
    finally:
        os.environ.clear()
        os.environ.update(kept)
