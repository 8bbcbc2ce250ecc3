"""Identity of a step: changes that must alter it, and changes that must not."""

from pathlib import Path

import pytest

from dml_core.config import merge, parse
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError
from dml_core.evaluation.config import EvaluationConfig
from dml_core.losses.registry import LOSSES, class_names
from dml_core.models.backbones.published import PUBLISHED
from dml_core.models.backbones.registry import TRAINED_WITH
from dml_core.training.loop import _derived_identity
from tasks.runs import identity
from tasks.runs.records import DatasetRecord
from tasks.runs.source import read_source
from tasks.runs.specs import RunSpec
from tests.conftest import ROOT, small_training

DATASET = DatasetRecord(name="d", folder="/somewhere", digest="0123", counts={"train": 1}, source="s")
SPEC = RunSpec(dataset="d", variant="v", seed=0, training=small_training("softtriple"), evaluation=EvaluationConfig())
GOLDEN = ["469cf53608c04786f84409269b797d7f", "1e53b4907518c3c427d1a82006ec4738", "95f5cd9e744c14a2f82dcb18759d9164"]


def changed(**values: object) -> RunSpec:
    return parse(RunSpec, merge(SPEC.model_dump(), values), "test")


def identities(spec: RunSpec = SPEC, dataset: DatasetRecord = DATASET) -> list[str]:
    return list(identity.step_identities(spec, dataset).values())


@pytest.mark.parametrize(
    "spec",
    [
        changed(seed=1),
        changed(training={"num_epochs": 4}),
        changed(training={"loss": {"options": {"scale": 5.0}}}),
        changed(training={"optimiser": {"learning_rate": 0.1}}),
        changed(training={"model": {"head": {"embedding_dim": 16}}}),
        changed(training={"validation": {"share": 0.2}}),
        changed(training={"keep_epochs": ("oracle",)}),
        changed(training={"transform": {"decoder": "nvjpeg"}}),
    ],
)
def test_training_settings_change_every_step(spec: RunSpec) -> None:
    assert all(one != other for one, other in zip(identities(), identities(spec), strict=True))


def test_evaluation_settings_change_the_evaluation_only() -> None:
    before, after = identities(), identities(changed(evaluation={"recall_at": (1, 10)}))
    assert before[:2] == after[:2]
    assert before[2] != after[2]


def test_scoring_validation_classes_embeds_them_and_trains_nothing() -> None:
    before, after = identities(), identities(changed(evaluation={"role": "validation"}))
    assert before[0] == after[0]
    assert before[1] != after[1]
    assert before[2] != after[2]


@pytest.mark.parametrize("epoch", ["best_validation", "oracle"])
def test_another_epoch_of_a_run_is_embedded_and_trains_nothing(epoch: str) -> None:
    before, after = identities(), identities(changed(evaluation={"epoch": epoch}))
    assert before[0] == after[0]
    assert before[1] != after[1]
    assert before[2] != after[2]


def test_what_finds_the_best_epoch_counts_where_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[set[str]] = []
    monkeypatch.setattr(identity, "source_digest", lambda modules: counted.append(set(modules)) or "code")
    for keeping in ((), ("oracle",)):
        identity.train_step(changed(training={"keep_epochs": keeping}), DATASET)
    assert counted[1] - counted[0] == {"dml_core.training.validation"}


def test_the_dataset_s_content_changes_every_step_and_its_place_and_name_none() -> None:
    assert all(a != b for a, b in zip(identities(), identities(dataset=DATASET.model_copy(update={"digest": "4567"})), strict=True))
    assert identities() == identities(dataset=DATASET.model_copy(update={"folder": "/elsewhere"}))


def test_each_step_is_another_and_the_order_of_options_is_none() -> None:
    assert len(set(identities())) == 3
    one, other = (
        changed(training={"loss": {"options": options}}) for options in ({"scale": 5.0, "margin": 0.1}, {"margin": 0.1, "scale": 5.0})
    )
    assert identities(one) == identities(other) != identities()


def test_the_variant_s_name_changes_nothing() -> None:
    assert identities() == identities(changed(variant="another name"))


def test_a_run_is_published_once_in_the_standing_comparison_and_once_in_each_other() -> None:
    """Other settings may give the same numbers, but the run is published separately."""
    assert identity.published_identity(SPEC, "0123") == "0123"
    others = [("training.num_epochs=4",), ("training.num_epochs=5",)]
    published = {identity.published_identity(changed(overrides=over), number) for over in others for number in ("0123", "4567")}
    assert len(published) == 4
    in_tables = {identity.published_identity(changed(table=table), "0123") for table in ("softtriple/table1", "softtriple/table2")}
    assert len(in_tables | published | {"0123"}) == 7
    assert {len(number) for number in published} == {len(number) for number in identities()} == {32}


def test_a_step_s_files_are_what_it_imports_and_no_registry() -> None:
    train = identity.source_files(identity.STEP_MODULES["train"])
    assert {"dml_core.training.loop", "dml_core.training.parallel.workers", "dml_core.models.heads", "dml_core.data.views.samplers"} <= set(
        train
    )
    assert not [name for name in train if name.endswith("registry") or name.startswith(("tasks", "dml_core.evaluation"))]
    shared = {"dml_core.losses.contract", "dml_core.losses.class_shards"}
    assert {name for name in train if name.startswith("dml_core.losses.")} == shared
    assert "dml_core.evaluation.evaluator" in identity.source_files(identity.STEP_MODULES["evaluate"])


def test_a_file_s_bytes_change_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("one", "x = 1\n"), ("same", "x = 1\n"), ("other", "x = 2\n")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(identity, "source_files", lambda modules: {"a": tmp_path / f"{modules[0]}.py"})
    assert identity.source_digest(("one",)) == identity.source_digest(("same",))
    assert identity.source_digest(("one",)) != identity.source_digest(("other",))


def test_a_loss_s_own_file_counts_for_its_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[str, set[str]] = {}
    for loss in ("softtriple", "normalised_softmax"):
        monkeypatch.setattr(
            identity, "source_digest", lambda modules, loss=loss: str(used.setdefault(loss, set(identity.source_files(modules))))
        )
        identity.train_step(SPEC.model_copy(update={"training": small_training(loss)}), DATASET)
    assert "dml_core.losses.softtriple" in used["softtriple"]
    assert "dml_core.losses.softtriple" not in used["normalised_softmax"]
    assert "dml_core.losses.normalised_softmax" not in used["softtriple"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("average", {"decay": 0.9}, {"decay": 0.9, "after": 0.5}),
        ("embed_at_once", 8, 8),
        ("shard_classes", True, True),
        ("compile", True, True),
        ("cross_batch_memory", {"size": 64}, {"size": 64, "after_epochs": 1}),
    ],
)
def test_a_setting_that_does_nothing_unless_it_is_set_is_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, told: object
) -> None:
    read: list[dict[str, dict[str, object]]] = []
    monkeypatch.setattr(identity, "_step", lambda step, reads, *rest: read.append(reads))
    for setting in (None, value):
        identity.train_step(changed(training={name: setting}), DATASET)
    assert name not in read[0]["training"]
    assert read[1]["training"].pop(name) == told
    assert read[0] == read[1]


def test_how_often_a_run_saves_or_looks_for_a_best_epoch_that_it_does_not_keep_is_no_part_of_it() -> None:
    assert identities(changed(training={"checkpoint_every_epochs": 2, "keep_every_epochs": 3})) == identities()
    keeping = {"keep_epochs": ("oracle",)}
    assert identities(changed(training=keeping)) != identities(changed(training=keeping | {"keep_every_epochs": 3}))


def test_the_cpu_s_decoder_is_no_part_of_it() -> None:
    assert identities(changed(training={"transform": {"decoder": "cpu"}})) == identities()
    assert "decoder" not in SPEC.model_dump_json()


def test_identities_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change here retrains everything that users have trained: it must be intended, and announced in CHANGELOG.md."""
    monkeypatch.setattr(identity, "source_digest", lambda modules: "code")
    assert identities() == GOLDEN


def test_a_combined_loss_s_runs_depend_on_the_files_of_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[set[str]] = []
    monkeypatch.setattr(identity, "source_digest", lambda modules: counted.append(set(modules)) or "code")
    terms = [{"name": "softmax"}, {"name": "combined", "options": {"terms": [{"name": "proxy_nca"}, {"name": "center_loss"}]}}]
    identity.train_step(changed(training={"loss": {"name": "combined", "options": {"terms": terms}}}), DATASET)
    losses = {f"dml_core.losses.{name}" for name in ("combined", "softmax", "proxy_nca", "center_loss")}
    assert {module for module in counted[0] if module.startswith("dml_core.losses.")} == losses


def test_a_package_is_its_own_file() -> None:
    found = identity.source_files(["dml_core", "tasks.runs"])
    assert {name: path.name for name, path in found.items()} == {"dml_core": "__init__.py", "tasks.runs": "__init__.py"}


def test_a_helper_that_a_loss_imports_relatively_is_one_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"dml_core.losses.mine": tmp_path / "mine.py", "dml_core.losses.helper": tmp_path / "helper.py"}
    files["dml_core.losses.mine"].write_text("from .helper import margin\n")
    files["dml_core.losses.helper"].write_text("margin = 0.35\n")
    monkeypatch.setattr(identity, "_module_file", files.get)
    assert identity.source_files(["dml_core.losses.mine"]) == files


@pytest.mark.parametrize("folder", ["losses", "measurements"])
def test_what_a_loss_or_a_measurement_takes_from_a_loss_it_imports_from_its_file(folder: str) -> None:
    """Registries are not followed: an edit of a class that comes from there, by its name, would leave finished results as they are."""
    by_name = {f"dml_core.losses.{name}" for name in class_names()}
    chosen_by_settings = {"__init__", "registry", "combined", "metric_loss"}
    files = [path for path in (ROOT / "dml_core" / folder).glob("*.py") if path.stem not in chosen_by_settings]
    assert len(files) > 10
    for path in files:
        imports = read_source(path.read_text(), f"dml_core.{folder}").imports
        assert not [name for name in imports if name.endswith(".registry") or name in by_name], f"{path}: import the class from its module"


def test_a_loss_outside_of_the_project_s_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "mine", "mylab.losses:Mine")
    mine = SPEC.training.model_copy(update={"loss": SPEC.training.loss.model_copy(update={"name": "mine", "options": {}})})
    with pytest.raises(ConfigError, match=r"^mylab\.losses: no such module in dml_core or tasks; [^\n]+: move it there$"):
        identity.step_identities(SPEC.model_copy(update={"training": mine}), DATASET)


def test_a_backbone_s_published_weights_stay_the_file_that_they_are() -> None:
    """A hash that is published is no part of an identity."""
    files = [f"{backbone} {file.name} {file.sha256}" for backbone, file in PUBLISHED.items() if file.sha256 is not None]
    advice = "runs from a backbone's former file would count as runs from its new one: add another file under another backbone's name"
    assert files == [
        "resnet18 resnet18-f37072fd.pth f37072fd",
        "resnet34 resnet34-b627a593.pth b627a593",
        "resnet50 resnet50-0676ba61.pth 0676ba61",
        "resnet101 resnet101-63fe2227.pth 63fe2227",
        "googlenet googlenet-1378be20.pth 1378be20",
        "vgg16 vgg16-397923af.pth 397923af",
        "bn_inception bn_inception-52deb4733.pth 52deb4733",
    ], advice


def test_another_file_of_weights_without_a_published_hash_is_another_run(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users convert these files themselves: a better conversion must not find the runs of a wrong one."""
    monkeypatch.setenv("DML_WEIGHTS", str(tmp_path))

    def identities_of(backbone: str) -> tuple[str, str]:
        model = {"backbone": {"name": backbone, "weights": "imagenet"}, "head": {"kind": "linear", "embedding_dim": 8}}
        scaling = TRAINED_WITH.get(backbone, "minus-one-one")
        training = small_training(model=model, transform={"scaling": scaling})
        spec = RunSpec(dataset="d", variant="v", seed=0, training=training, evaluation=EvaluationConfig())
        return identity.train_step(spec, DATASET).identity, _derived_identity(training, PackedDataset(packed, "train"), 0)

    for backbone, file in PUBLISHED.items():
        found = [identities_of(backbone)]
        for content in (b"one conversion", b"another"):
            file.path.write_bytes(content)
            found.append(identities_of(backbone))
        num_different = 3 if file.sha256 is None else 1  # a wrong file with a published hash is refused
        assert [len({*each}) for each in zip(*found, strict=True)] == [num_different] * 2, backbone
