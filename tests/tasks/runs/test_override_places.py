"""Wherever settings override others (params.yaml, `--set`, protocols, tables' rows, tuned files), the same rule holds."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dml_core.config import flatten, read_yaml
from dml_core.errors import ConfigError
from dml_core.training.config import TrainingConfig
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.protocols import Variant, load_protocol
from tasks.runs.tuned import TunedFile
from tasks.tables.file import load_table
from tasks.tables.runs import row_training
from tasks.tuning.space import lay_over
from tests.conftest import ROOT

PARAMS, DATASET, VARIANT = read_yaml(ROOT / "params.yaml"), "fashion-mnist", "softtriple"
TABLE, ROW, OURS = "project/fashion_mnist", "softtriple", "ours"
Changes = dict[str, Any]


def standing(tmp_path: Path, block: tuple[str, ...] = (), changes: Changes | None = None, settings: tuple[str, ...] = ()) -> TrainingConfig:
    """Return the settings of a run of the standing comparison after its file's `block` was overridden by changes, and by `--set`."""
    values = deepcopy(PARAMS)
    at = values["comparison"]
    for key in block:
        at = at[key]
    for key, value in (changes or {}).items():
        at[key] = {**at.get(key, {}), **value} if isinstance(value, dict) else value
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(values))
    (run,) = comparison_runs(load_params(path, settings), DATASET, [VARIANT], [0])
    return run.training


def of_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Changes) -> TrainingConfig:
    return standing(tmp_path, ("datasets", DATASET), changes)


def of_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Changes) -> TrainingConfig:
    return standing(tmp_path, ("variants", VARIANT), changes)


def by_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Changes) -> TrainingConfig:
    """`--set` of the dataset's block, a setting at a time."""
    settings = [f"comparison.datasets.{DATASET}.{path}={json.dumps(value)}" for path, value in flatten(changes).items()]
    return standing(tmp_path, settings=tuple(settings))


def by_set_of_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Changes) -> TrainingConfig:
    """`--set` of the protocol, a block at a time."""
    return standing(tmp_path, settings=tuple(f"comparison.protocol.{key}={json.dumps(value)}" for key, value in changes.items()))


def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Changes) -> TrainingConfig:
    monkeypatch.setattr("tasks.runs.params.comparison.read_tuned", lambda *_: SimpleNamespace(training=changes))
    return standing(tmp_path, ("variants", VARIANT), {"tuned": True})


def of_row(changed: str) -> Callable[..., TrainingConfig]:
    def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Changes) -> TrainingConfig:
        values: dict[str, Any] = {
            "training": {"training": changes},
            "datasets": {"datasets": {DATASET: changes}},
            "by_variant": {"by_variant": {OURS: Variant(training=changes)}},
            "by_variant.datasets": {"by_variant": {OURS: Variant(datasets={DATASET: changes})}},
            "tuned": {},
        }[changed]
        row = load_table(TABLE).rows[ROW].model_copy(update=values)
        if changed == "tuned":
            return row_training(TABLE, row, DATASET, "tuned", TunedFile.model_construct(training=changes))
        return row_training(TABLE, row, DATASET, OURS)

    return place


def of_protocol(changed: str) -> Callable[..., TrainingConfig]:
    def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Changes) -> TrainingConfig:
        protocol = load_protocol("project")
        variants = {"variant": Variant(training=changes), "variant of a dataset": Variant(datasets={DATASET: changes})}
        datasets = {DATASET: changes} if changed == "dataset" else {DATASET: {}}
        loss = {"loss": {"name": "softtriple", "options": {"num_centres": 4}}}
        return protocol.model_copy(
            update={"training": {**protocol.training, **loss}, "datasets": datasets, "variants": {OURS: variants.get(changed, Variant())}}
        ).training_config(DATASET, OURS)

    return place


def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Changes) -> TrainingConfig:
    return lay_over(standing(tmp_path), flatten(changes))


PLACES: dict[str, Callable[..., TrainingConfig]] = {
    "dataset of the comparison": of_dataset,
    "variant of the comparison": of_variant,
    "--set of a dataset": by_set,
    "--set of the protocol": by_set_of_protocol,
    "tuned file of the comparison": tuned,
    "trial of a search": trial,
    **{f"row: {part}": of_row(part) for part in ("training", "datasets", "by_variant", "by_variant.datasets", "tuned")},
    **{f"protocol: {part}": of_protocol(part) for part in ("dataset", "variant", "variant of a dataset")},
}


@pytest.fixture(params=PLACES, ids=str)
def resolve(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Changes], TrainingConfig]:
    """Return a function that resolves a run's settings with changes in one place."""
    return lambda changes: PLACES[request.param](tmp_path, monkeypatch, changes)


def test_another_backbone_drops_the_width_of_the_first(resolve: Callable[[Changes], TrainingConfig]) -> None:
    assert resolve({}).model.backbone.width == 16
    changed = resolve({"model": {"backbone": {"name": "resnet18"}}})
    assert changed.model.backbone.model_dump(exclude_defaults=True) == {"name": "resnet18"}
    assert changed.model.pooling == resolve({}).model.pooling


def test_an_option_of_the_same_backbone_is_changed_alone(resolve: Callable[[Changes], TrainingConfig]) -> None:
    changed = resolve({"model": {"backbone": {"name": "small_cnn", "width": 8}}})
    assert changed.model.backbone.model_dump(exclude_defaults=True) == {"name": "small_cnn", "width": 8}


def test_null_gives_the_default(resolve: Callable[[Changes], TrainingConfig]) -> None:
    before, changed = resolve({}), resolve({"model": {"backbone": {"width": None}}, "average": None, "optimiser": {"weight_decay": None}})
    assert changed.model.backbone.width == 32
    assert (changed.average, changed.optimiser.weight_decay) == (None, 0.0)
    assert changed.optimiser.learning_rate == before.optimiser.learning_rate


def test_null_of_what_a_run_needs_is_one_line(resolve: Callable[[Changes], TrainingConfig]) -> None:
    with pytest.raises(ConfigError, match="key 'num_epochs' is missing") as caught:
        resolve({"num_epochs": None})
    assert "\n" not in str(caught.value)


def test_another_optimiser_drops_the_rates_of_the_first(resolve: Callable[[Changes], TrainingConfig]) -> None:
    changed = resolve({"optimiser": {"name": "sgd"}})
    assert changed.optimiser.model_dump(exclude_defaults=True) == {"name": "sgd"}


@pytest.mark.parametrize("place", [name for name in PLACES if name.startswith(("row", "protocol")) or "tuned" in name])
def test_another_loss_drops_the_options_of_the_first(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the variant's own loss holds."""
    assert "num_centres" in PLACES[place](tmp_path, monkeypatch, {}).loss.options
    assert PLACES[place](tmp_path, monkeypatch, {"loss": {"name": "softmax"}}).loss.model_dump() == {"name": "softmax", "options": {}}
