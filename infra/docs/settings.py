"""Write the reference of `params.yaml` and of environment variables as Markdown, from the models that read them."""

import collections.abc
import os
import re
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest.mock import patch

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dml_core.training.config import TrainingConfig
from infra.docs import environment_variables
from infra.docs.command_line import escaped
from tasks.environment import Project, set_environment
from tasks.runs.specs import DatasetSpec, Params

INTRODUCTION = """# Settings and environment

For everyone who edits `params.yaml` or sets up servers: each key with its type and default, then each environment variable.
`make docs` writes this page from the code that reads them.

`params.yaml` is YAML. Unknown keys are errors, and the error suggests the nearest known key. `dml run` and `dml reproduce` override any
key but those of `datasets` with `--set`, for example `--set comparison.protocol.num_epochs=3`; see
[dml reproduce](command-line.md#dml-reproduce). A run's training settings are `comparison.protocol`, overridden by the entry of its dataset
in `comparison.datasets`, then by the entry of its variant in `comparison.variants`. Overrides replace single keys and keep the others.
A `--set` of the protocol that other entries override in all requested runs of a dataset is refused.
DVC refuses absent keys: for `dvc repro`, write the optional `comparison.reference` and `evaluation` too; `null` gives the default.
Options of losses are in [Losses](losses.md), options of dataset readers and backbones in
[Backbones and datasets](backbones-and-datasets.md).
"""
NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "any value", type(None): "null", dict: "mapping"}
BOUNDS = {  # kind of limit -> its sign, and its attribute with the value
    annotated_types.Ge: ("≥", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("≤", "le"),
    annotated_types.Lt: ("<", "lt"),
}
PROTOCOL = "comparison.protocol"
PARTS: dict[str, type[BaseModel]] = {"datasets.NAME": DatasetSpec, PROTOCOL: TrainingConfig}  # reached through mappings


def page() -> str:
    """Return the page."""
    parts = [INTRODUCTION, "## params.yaml\n"]
    parts += _model("", Params, {Params: ""})
    parts += ["\n## Environment variables\n", environment_variables.INTRODUCTION, *_variables()]
    return "\n".join(parts) + "\n"


def _model(path: str, model: type[BaseModel], places: dict[type[BaseModel], str]) -> Iterator[str]:
    """Yield a model's section and those of the models in its fields, each once; `places` has the models so far with their paths."""
    meanings = _meanings(model)
    if path:
        yield f"\n### {path} {{#{_anchor(path)}}}\n"
        yield f"{_text(_summary(model))}\n" if _summary(model) != "Options." else ""
    rows: list[list[str]] = []
    before = len(places)
    for name, field in model.model_fields.items():
        below = f"{path}.{name}".removeprefix(".")
        for part in _models(field.annotation):
            places.setdefault(part, f"{below}.NAME" if _is_mapping(field.annotation) else below)
        if below in PARTS:
            places.setdefault(PARTS[below], below)
        kind = f"[section](#{_anchor(below)})" if below in PARTS else _type(field.annotation, field.metadata, places)
        meaning = meanings.get(name) or next(map(_summary, [PARTS[below]] if below in PARTS else _models(field.annotation)), "")
        rows.append([f"`{name}`", kind, _default(field), _text(meaning)])
    width = 4 if meanings or not path else 3
    for row in (["key", "type", "default", "meaning"], ["---"] * 4, *rows):
        yield f"| {' | '.join(row[:width])} |"
    for part, place in list(places.items())[before:]:
        yield from _model(place, part, places)


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return field -> text in the "Attributes" section of a model's docstring; one text may describe several fields."""
    section = re.search(r"^\s*Attributes:\n(.*)", model.__doc__ or "", re.DOTALL | re.MULTILINE)
    if section is None:
        return {}
    lines = section[1].splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    entries: list[list[str]] = []
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            break
        if re.match(rf"\s{{{indent}}}\w[\w, ]*: ", line):
            entries.append([line.strip()])
        elif line.strip():
            entries[-1].append(line.strip())
    meanings: dict[str, str] = {}
    for entry in entries:
        for part in re.split(r"; (?=`\w+`: )", " ".join(entry)):
            names, _, text = part.partition(": ")
            meanings |= dict.fromkeys((name.strip(" `") for name in names.split(",")), text)
    return meanings


def _summary(model: type[BaseModel]) -> str:
    """Return the text of a model's docstring before its fields."""
    return " ".join(re.split(r"^\s*Attributes:$", model.__doc__ or "", maxsplit=1, flags=re.MULTILINE)[0].split())


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that have a section in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) in (dict, collections.abc.Mapping)


def _type(annotation: Any, metadata: Any, places: dict[type[BaseModel], str]) -> str:
    """Return an annotation in words, with links to the sections of models."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        text = f"[section](#{_anchor(places[annotation])})"
    elif origin is Annotated:
        text = _type(arguments[0], arguments[1:], places)
    elif origin is Literal:
        text = ", ".join(f"`{_yaml(value)}`" for value in arguments)
    elif origin in (Union, types.UnionType):
        text = " or ".join(dict.fromkeys(_type(part, (), places) for part in arguments))
    elif origin in (tuple, list):
        same = len(arguments) == 1 or arguments[-1] is Ellipsis
        parts = [_type(part, (), places) for part in arguments if part is not Ellipsis]
        text = f"list: {parts[0]}" if same else f"[{', '.join(parts)}]".replace("[", "\\[", 1)
    elif _is_mapping(annotation):
        text = "mapping" if arguments[1] is Any else f"mapping of names: {_type(arguments[1], (), places)}"
    else:
        text = NAMES[annotation]
    limits = [limit for part in metadata for limit in _limits(part)]
    return f"{text}, {', '.join(limits)}" if limits else text


def _limits(part: Any) -> list[str]:
    """Return the limits that a part of an annotation sets, in words."""
    if isinstance(part, FieldInfo):
        return [limit for inner in part.metadata for limit in _limits(inner)]
    if isinstance(part, annotated_types.MinLen):
        return [f"at least {part.min_length}"]
    return [f"{sign} {getattr(part, name):g}" for kind, (sign, name) in BOUNDS.items() if isinstance(part, kind)]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "its defaults" if isinstance(value, BaseModel) else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text(text: str) -> str:
    """Return a docstring's text as Markdown, with YAML's values for Python's."""
    text = re.sub(r"\b(None|True|False)\b", lambda found: {"None": "`null`", "True": "`true`", "False": "`false`"}[found[0]], text)
    return escaped((text[:1].upper() + text[1:]).replace("|", "\\|"))


def _anchor(path: str) -> str:
    return path.lower().replace(".", "-").replace("_", "-")


def _variables() -> Iterator[str]:
    yield "### Set by you\n"
    yield "| variable | meaning |\n|---|---|"
    yield from (f"| `{name}` | {meaning} |" for name, meaning in environment_variables.OF_THE_USER.items())
    yield "\n### Set for every process\n"
    yield environment_variables.DEFAULTS + "\n"
    yield "| variable | value | reason |\n|---|---|---|"
    plain, with_server, with_ray = (process_environment(named) for named in ({}, {"PREFECT_API_URL": "http://x"}, {"RAY_ADDRESS": "x:1"}))
    if missing := plain.keys() ^ environment_variables.REASONS.keys():
        raise KeyError(f"infra/docs/environment_variables.py: REASONS does not fit tasks/environment.py: {', '.join(sorted(missing))}")
    for name, value in plain.items():
        text = f"`{value}`"
        if name not in with_ray:
            text += ", without `RAY_ADDRESS`"
        if name not in with_server:
            text += ", without `PREFECT_API_URL`"
        elif with_server[name] != value and not value.startswith("("):
            text += f"; with `PREFECT_API_URL`: `{with_server[name]}`"
        yield f"| `{name}` | {text} | {environment_variables.REASONS[name]} |"


def process_environment(named: dict[str, str]) -> dict[str, str]:
    """Return the variables that the project sets for every process if the user has set those in `named`."""
    with tempfile.TemporaryDirectory() as folder, patch.object(os, "environ", dict(named)) as now:
        root = Path(folder)
        set_environment(Project(root, root / "state", str(root / "state/store"), f"sqlite:///{root / 'state/mlflow.db'}"))
    shown = {name: value.replace(f"{folder}/", "") for name, value in now.items() if name not in named}
    return {name: "(random)" if name == "RAY_AUTH_TOKEN" else value for name, value in shown.items()}
