"""Identities of steps: one hash of everything that a step's result depends on, and of nothing else.

It covers the part of the run's specification that the step reads, the identity of its input (dataset digest, earlier step), what its source
files do (`tasks.runs.source`: edited comments do not count), and the step's version. It excludes worker count, device, logging and file
locations. It is Prefect's cache key.

A step has a second hash, its *settings*: the same without the source files. Steps that differ only in code share it, so that `--code keep`
finds what older code made (`tasks.runs.finished`).

The source files of a step are found from its entry modules by following imports inside `dml_core` and `tasks`. Registries (tables of names)
are not followed or counted: a run depends on the file of its entry, not on the other choices. An entry module in another package is an
error, since an edit of it would go unnoticed.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from dml_core.errors import ConfigError
from dml_core.losses.registry import loss_modules
from dml_core.measurements.registry import measurement_module
from dml_core.models.backbones.registry import backbone_module, unnamed_weights
from dml_core.training.config import TrainingConfig
from tasks.runs.records import DatasetRecord
from tasks.runs.source import SourceCode, read_source
from tasks.runs.specs import RunSpec

PACKAGES = ("dml_core", "tasks")
STEP_VERSION = {"train": 1, "embed": 1, "evaluate": 1}
DRAWING_MODULES = ("tasks.scores.drawing",)
STEP_MODULES = {
    "train": ("dml_core.training.loop", "dml_core.data.store.splits"),
    "embed": ("tasks.workers.embedding",),
    "evaluate": ("tasks.scores.evaluation", *DRAWING_MODULES),
}
CHOOSING_MODULES = ("dml_core.training.validation",)  # finds the best epoch, if the run keeps one


@dataclass(frozen=True)
class StepIdentity:
    """Hashes of a step.

    Attributes:
        identity: hash with the code that it uses.
        settings: hash without its own code; the identity of its input includes the code that made that.
        modules: entry modules of its code.
        reads: identity of the previous step; None for training.
    """

    identity: str
    settings: str
    modules: tuple[str, ...]
    reads: str | None = None

    def sources(self) -> dict[str, str]:
        """Return source file -> hash of what it does now, for every file that the step uses."""
        return source_digests(self.modules)


def train_step(spec: RunSpec, dataset: DatasetRecord) -> StepIdentity:
    """Return the step of a trained system. The files of its loss and backbone count, others' do not, nor does the epoch that is scored."""
    backbone = spec.training.model.backbone
    losses = loss_modules(spec.training.loss.name, spec.training.loss.options)
    # Unset settings are omitted: a setting that a later version adds, and that has no effect unless set, changes no identity.
    unset = {name for name in TrainingConfig.model_fields if getattr(spec.training, name) is None}
    training = spec.training.model_dump(mode="json", exclude=unset) | {"checkpoint_every_epochs": 1}  # 1, the default: it has no effect
    if not spec.training.keep_epochs:
        training["keep_every_epochs"] = 1
    reads: dict[str, object] = {"training": training, "seed": spec.seed}
    if (sha256 := unnamed_weights(backbone)) is not None:
        reads["weights"] = sha256
    choosing = CHOOSING_MODULES if spec.training.keep_epochs else ()
    return _step("train", reads, dataset.digest, (*STEP_MODULES["train"], backbone_module(backbone.name), *sorted(losses), *choosing))


def embed_step(spec: RunSpec, trained: str) -> StepIdentity:
    """Return the step of a run's embeddings, by the system with identity `trained`."""
    reads: dict[str, object] = {"role": spec.evaluation.role}
    if spec.evaluation.epoch != "last":
        reads["epoch"] = spec.evaluation.epoch
    return _step("embed", reads, trained, STEP_MODULES["embed"])


def evaluate_step(spec: RunSpec, embedded: str) -> StepIdentity:
    """Return the step of a run's scores and figures, from the embeddings with identity `embedded`."""
    # The identity of the embeddings includes the epoch.
    reads: dict[str, object] = {"evaluation": spec.evaluation.model_dump(mode="json", exclude={"epoch"}), "seed": spec.seed}
    if spec.measurements:
        reads["measurements"] = spec.measurements
    return _step("evaluate", reads, embedded, evaluate_modules(spec.measurements))


def evaluate_modules(measurements: Collection[str]) -> tuple[str, ...]:
    """Return the entry modules of the code that scores runs with these measurements."""
    modules = STEP_MODULES["evaluate"]
    return tuple(sorted({*modules, "tasks.scores.measuring", *map(measurement_module, measurements)})) if measurements else modules


def step_identities(spec: RunSpec, dataset: DatasetRecord) -> dict[str, str]:
    """Return train, embed, evaluate -> identity of the run's step, with the present code in every step."""
    trained = train_step(spec, dataset).identity
    embedded = embed_step(spec, trained).identity
    return {"train": trained, "embed": embedded, "evaluate": evaluate_step(spec, embedded).identity}


NETWORK_IDENTITY = re.compile(r"([0-9a-f]{32})(?:-(best_validation|oracle))?")


def network_identity(trained: str, epoch: str) -> str:
    """Return the identity of a network: that of its training, followed by `-EPOCH` if its weights are not those of the last epoch."""
    return trained if epoch == "last" else f"{trained}-{epoch}"


def published_identity(spec: RunSpec, evaluate_identity: str) -> str:
    """Return the identity of a published run: one in the standing comparison, and one in each other comparison or table that has it."""
    if not spec.overrides and spec.table is None:
        return evaluate_identity
    return identity_in(spec.comparison, evaluate_identity)


def identity_in(comparison: str, evaluate_identity: str) -> str:
    """Return the identity of a published run in a comparison other than the standing one."""
    return _hash([comparison, evaluate_identity])


def _step(step: str, reads: dict[str, object], input_identity: str, modules: tuple[str, ...]) -> StepIdentity:
    parts = [step, STEP_VERSION[step], json.dumps(reads, sort_keys=True), input_identity]
    return StepIdentity(_hash([*parts, source_digest(modules)]), _hash(parts), modules, None if step == "train" else input_identity)


def _hash(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@cache
def source_digest(modules: tuple[str, ...]) -> str:
    """Return a hash of the names of all source files that `modules` use, and of what each does."""
    digest = hashlib.sha256()
    for name, path in sorted(source_files(modules).items()):
        digest.update(f"{name}\0{_read(name, path).normal_form}\0".encode())
    return digest.hexdigest()


@cache
def source_digests(modules: tuple[str, ...]) -> dict[str, str]:
    """Return file (as `dml_core/losses/softtriple.py`) -> hash of what it does, for all source files that `modules` use."""
    files = sorted(source_files(modules).items())
    return {_file_name(name, path): _digest(name, path) for name, path in files}


def differing_files(sources: Mapping[str, str]) -> list[str]:
    """Return the files of `sources`, the `source_digests` of another process, that are missing here or do something else.

    A file counts as it was when this process first read it.
    """
    modules = {file: file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in sources}
    paths = {file: _module_file(module) for file, module in modules.items()}
    return [file for file, path in paths.items() if path is None or _digest(modules[file], path) != sources[file]]


def _digest(name: str, path: Path) -> str:
    return hashlib.sha256(_read(name, path).normal_form.encode()).hexdigest()


def _file_name(module: str, path: Path) -> str:
    return f"{module.replace('.', '/')}{'/__init__' if path.stem == '__init__' else ''}.py"


@cache  # most files belong to many steps
def _read(name: str, path: Path) -> SourceCode:
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    return read_source(path.read_text(encoding="utf-8"), package)


def source_files(modules: Iterable[str]) -> dict[str, Path]:
    """Return name -> file of the project's modules that `modules` import, directly or not, themselves included.

    Raises:
        ConfigError: one of `modules`, as of a registry's line, has no file in the project's packages.
    """
    files: dict[str, Path] = {}
    to_visit = list(modules)
    for name in to_visit:
        if _module_file(name) is None:
            raise ConfigError(
                f"{name}: no such module in {' or '.join(PACKAGES)}; only their files are part of a run's identity: move it there"
            )
    while to_visit:
        name = to_visit.pop()
        if name in files or name.rpartition(".")[2] == "registry":
            continue
        path = _module_file(name)
        if path is not None:
            files[name] = path
            to_visit.extend(module for module in _read(name, path).imports if module.partition(".")[0] in PACKAGES)
    return files


@cache
def _module_file(name: str) -> Path | None:
    """Return the file of one of the project's modules; None for a name inside a module or another package. Imports nothing."""
    package, *parts = name.split(".")
    if package not in PACKAGES:
        return None
    origin = find_spec(package).origin  # type: ignore[union-attr]
    path = Path(str(origin)).parent.joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py") if parts else (path / "__init__.py",)
    return next((candidate for candidate in candidates if candidate.is_file()), None)
