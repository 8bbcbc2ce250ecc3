"""When two steps are the same: one hash of everything that their result depends on, and of nothing else.

In it: the part of the run's specification that the step reads, the identity of what it reads (dataset digest, earlier step), what the
source files that it uses do (`tasks.runs.source`: an edited comment counts for nothing), and the step's version. Not in it: worker count,
device, logging, where files lie. It is Prefect's cache key.

A step has a second hash, its *settings*: the same without the source files. Steps that differ in nothing but code have it in common, by
which `--code keep` finds what older code made (`tasks.runs.made`).

The source files of a step are found from its entry modules by following imports inside `dml_core` and `tasks`. Registries (tables of names)
are not followed or counted: a run depends on its own entry's file, not on what else can be chosen.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from dml_core.losses.registry import loss_modules
from dml_core.measurements.registry import measurement_module
from dml_core.models.backbones.registry import backbone_module
from dml_core.training.config import TrainingConfig
from tasks.runs.records import DatasetRecord
from tasks.runs.source import imported_modules, normal_form
from tasks.runs.specs import RunSpec

PACKAGES = ("dml_core", "tasks")
STEP_VERSION = {"train": 1, "embed": 1, "evaluate": 1}
STEP_MODULES = {
    "train": ("dml_core.training.loop", "dml_core.data.store.splits"),
    "embed": ("tasks.workers.embedding",),
    "evaluate": ("tasks.scores.evaluation",),
}
CHOOSING_MODULES = ("dml_core.training.validation",)  # what finds the best epoch, where the run keeps one


@dataclass(frozen=True)
class StepIdentity:
    """What a step is.

    Attributes:
        identity: with the code that it uses.
        settings: apart from its own code; what it reads counts with the code that made that.
        modules: where its code begins.
        reads: identity of the step before it; nothing for training.
    """

    identity: str
    settings: str
    modules: tuple[str, ...]
    reads: str | None = None

    def sources(self) -> dict[str, str]:
        """Source file -> hash of what it does, as it is now, of every file that the step uses."""
        return source_digests(self.modules)


def train_step(spec: RunSpec, dataset: DatasetRecord) -> StepIdentity:
    """A trained system; its loss's and its backbone's files count, others' do not. Which of its epochs is scored is no part of it."""
    backbone = backbone_module(spec.training.model.backbone.name)
    losses = loss_modules(spec.training.loss.name, spec.training.loss.options)
    # What is not set is left out: a setting that a later version adds, and that does nothing unless it is set, changes no identity.
    unset = {name for name in TrainingConfig.model_fields if getattr(spec.training, name) is None}
    reads = {"training": spec.training.model_dump(mode="json", exclude=unset), "seed": spec.seed}
    choosing = CHOOSING_MODULES if spec.training.keep_epochs else ()
    return _step("train", reads, dataset.digest, (*STEP_MODULES["train"], backbone, *sorted(losses), *choosing))


def embed_step(spec: RunSpec, trained: str) -> StepIdentity:
    """A run's embeddings, by the system of the identity `trained`."""
    reads: dict[str, object] = {"role": spec.evaluation.role}
    if spec.evaluation.epoch != "last":
        reads["epoch"] = spec.evaluation.epoch
    return _step("embed", reads, trained, STEP_MODULES["embed"])


def evaluate_step(spec: RunSpec, embedded: str) -> StepIdentity:
    """A run's scores and figures, of the embeddings of the identity `embedded`."""
    # The epoch is in the identity of the embeddings.
    reads: dict[str, object] = {"evaluation": spec.evaluation.model_dump(mode="json", exclude={"epoch"}), "seed": spec.seed}
    if not spec.measurements:
        return _step("evaluate", reads, embedded, STEP_MODULES["evaluate"])
    modules = {*STEP_MODULES["evaluate"], "tasks.scores.measuring", *map(measurement_module, spec.measurements)}
    return _step("evaluate", reads | {"measurements": spec.measurements}, embedded, tuple(sorted(modules)))


def train_identity(spec: RunSpec, dataset: DatasetRecord) -> str:
    """Identity of a trained system."""
    return train_step(spec, dataset).identity


def embed_identity(spec: RunSpec, dataset: DatasetRecord) -> str:
    """Identity of a run's embeddings, every step by the code as it is."""
    return embed_step(spec, train_identity(spec, dataset)).identity


def evaluate_identity(spec: RunSpec, dataset: DatasetRecord) -> str:
    """Identity of a run's scores and figures, every step by the code as it is."""
    return evaluate_step(spec, embed_identity(spec, dataset)).identity


def published_identity(spec: RunSpec, evaluate_identity: str) -> str:
    """What a run is published as: once in the standing comparison, and once in each other comparison or table that has it too."""
    if not spec.overrides and spec.table is None:
        return evaluate_identity
    return identity_in(spec.comparison, evaluate_identity)


def identity_in(comparison: str, evaluate_identity: str) -> str:
    """What a run is published as in a comparison that is not the standing one."""
    return _hash([comparison, evaluate_identity])


def _step(step: str, reads: dict[str, object], input_identity: str, modules: tuple[str, ...]) -> StepIdentity:
    parts = [step, STEP_VERSION[step], json.dumps(reads, sort_keys=True), input_identity]
    return StepIdentity(_hash([*parts, source_digest(modules)]), _hash(parts), modules, None if step == "train" else input_identity)


def _hash(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@cache
def source_digest(modules: tuple[str, ...]) -> str:
    """Hash of the names of all source files that `modules` use, and of what each does."""
    digest = hashlib.sha256()
    for name, path in sorted(source_files(modules).items()):
        digest.update(f"{name}\0{_form(path)}\0".encode())
    return digest.hexdigest()


@cache
def source_digests(modules: tuple[str, ...]) -> dict[str, str]:
    """File -> hash of what it does, of all source files that `modules` use; files as `dml_core/losses/softtriple.py`."""
    files = sorted(source_files(modules).items())
    return {_file_name(name, path): hashlib.sha256(_form(path).encode()).hexdigest() for name, path in files}


def _file_name(module: str, path: Path) -> str:
    return f"{module.replace('.', '/')}{'/__init__' if path.stem == '__init__' else ''}.py"


def _form(path: Path) -> str:
    return _form_of(path.read_text(encoding="utf-8"))


@cache
def _form_of(source: str) -> str:
    """Most files are of many steps."""
    return normal_form(source)


def source_files(modules: Iterable[str]) -> dict[str, Path]:
    """The project's modules that `modules` import, directly or not, themselves included: name -> file."""
    files: dict[str, Path] = {}
    to_visit = list(modules)
    while to_visit:
        name = to_visit.pop()
        if name in files or name.rpartition(".")[2] == "registry":
            continue
        path = _module_file(name)
        if path is not None:
            files[name] = path
            to_visit.extend(_imports(path))
    return files


def _module_file(name: str) -> Path | None:
    """The file of one of the project's own modules; None for a name inside a module or for another package. Nothing is imported."""
    package, *parts = name.split(".")
    if package not in PACKAGES:
        return None
    origin = find_spec(package).origin  # type: ignore[union-attr]
    path = Path(str(origin)).parent.joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py") if parts else (path / "__init__.py",)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """The project's modules that a file imports."""
    names = imported_modules(path.read_text(encoding="utf-8"))
    return tuple(name for name in names if name.partition(".")[0] in PACKAGES)
