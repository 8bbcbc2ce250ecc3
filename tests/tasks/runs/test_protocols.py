"""Every protocol file loads, builds its real network, and trains two steps on generated data."""

from collections import Counter
from itertools import product

import pytest
import torch

from dml_core.config import merge, parse
from dml_core.data.store.packed import PackedDataset
from dml_core.errors import ConfigError
from dml_core.losses.registry import parse_loss_options
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import build_backbone
from dml_core.training import loop
from dml_core.training.config import TrainingConfig
from dml_core.training.history import read_history
from dml_core.training.loop import fit
from tasks.runs import protocols
from tasks.runs.protocols import load_protocol, protocol_names

# tests/tasks/tables/test_project_tables.py tests the project's own protocol, a small network without trained weights.
SMALL = {"mnist", "fashion_mnist", "drawn-80", "drawn-cub200", "drawn-cars196"}  # images of figures, and drawn replacements
LOADED = {name: load_protocol(name) for name in protocol_names() if name != "project"}
CELLS = [(name, dataset, variant) for name, protocol in LOADED.items() for variant in protocol.variants for dataset in protocol.datasets]
SMALLER = {"resnet50": "resnet18"}


def checked(name):
    """Read a protocol, and parse the training of every dataset and variant with the options of its loss."""
    protocol = load_protocol(name)
    for dataset, variant in product(protocol.datasets, protocol.variants):
        loss = protocol.training_config(dataset, variant).loss
        parse_loss_options(loss.name, loss.options, f"protocol {name}: {dataset} / {variant}: loss")


@pytest.mark.parametrize("name", LOADED)
def test_every_variant_is_complete_on_every_dataset(name):
    checked(name)


def config_of(cell):
    name, dataset, variant = cell
    return LOADED[name].training_config(dataset, variant)


def tiny(config):
    """Return the protocol with 32-pixel images, two batches per epoch and no download, for 36 images of 4 classes."""
    values = config.model_dump()
    backbone = values["model"]["backbone"]
    crop = {} if config.transform.crop == "none" else {"crop_size": 32}
    changes = {
        "model": {"backbone": {"weights": "none", "name": SMALLER.get(backbone["name"], backbone["name"])}},
        "transform": {"train_resize": (36, 36) if crop else (32, 32), "test_resize": (36, 36) if crop else (32, 32), **crop},
        "sampler": {"batch_size": 18, "num_classes_per_batch": 4, "num_samples_per_class": 4},
        "num_epochs": 1,
    }
    return parse(TrainingConfig, merge(values, changes), "tiny")


def kinds(value, path=""):
    """Yield the place of every setting, with its value, but of a number only whether it is 0 and of a list its length."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from kinds(inner, f"{path}.{name}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value == 0
    else:
        yield path, len(value) if isinstance(value, tuple | list) else value


def trained():
    """Return cells with every kind of setting of all cells: the others differ in numbers, or combine what these train."""
    of_cell = {cell: set(kinds(tiny(config_of(cell)).model_dump())) for cell in CELLS}
    num_cells = Counter(kind for found in of_cell.values() for kind in found)
    for cell in CELLS[::-1]:
        if all(num_cells[kind] > 1 for kind in of_cell[cell]):
            num_cells.subtract(of_cell.pop(cell))
    return list(of_cell)


def test_all_five_papers_and_the_common_track_are_here():
    assert set(LOADED) == {"softtriple", "heated_up_softmax", "discriminative", "tuplet_margin", "sgsl", "common"}
    assert (
        len(CELLS) == (8 + 4) + (6 + 2) + (4 + 4) + 6 + (8 + 2) + 44
    )  # small images of figures and drawn replacements, besides the datasets of tables


def test_both_readings_are_here_where_code_was_released():
    for name in ("softtriple", "heated_up_softmax", "sgsl"):
        assert {"as_published", "as_released"} <= set(LOADED[name].variants)


@pytest.mark.slow
@pytest.mark.parametrize("cell", trained(), ids="-".join)
def test_two_steps_train(cell, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "save_checkpoint", lambda folder, state: None)  # would write 90 MB and more that nothing here reads
    config = tiny(config_of(cell))
    system = fit(config, PackedDataset(packed, "train"), 0, tmp_path, torch.device("cpu"))
    assert len(read_history(tmp_path)) == 2
    embeddings = system.model.embed(torch.randn(2, 3, 32, 32))
    assert embeddings.isfinite().all()
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(2))


def test_each_distinct_network_is_built_as_it_is():
    distinct = {
        config_of(cell).model.backbone.model_copy(update={"weights": "none"}).model_dump_json() for cell in CELLS if cell[1] not in SMALL
    }
    for text in distinct:
        assert build_backbone(BackboneConfig.model_validate_json(text)).num_features in (512, 1024, 2048)
    assert len(distinct) == 7  # bn_inception, googlenet, inception_v1, vgg16, resnet50 plain and with both RBRs


def test_every_network_starts_from_imagenet_with_its_pixels():
    found = {(config_of(cell).model.backbone.weights, cell[1] in SMALL) for cell in CELLS}
    assert found == {("imagenet", False), ("none", True)}  # scaling: other values are refused when built


def test_the_common_track_differs_in_loss_and_head_kind_only():
    seen = set()
    for variant in LOADED["common"].variants:
        config = LOADED["common"].training_config("cub200", variant)
        head = config.model.head.model_copy(update={"kind": "linear"})
        seen.add(config.model_copy(update={"loss": None, "model": config.model.model_copy(update={"head": head})}).model_dump_json())
    assert len(seen) == 1


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "dataset", "variant", "said"),
    [
        ("softripple", "cub200", "as_published", "did you mean 'softtriple'"),
        ("softtriple", "inshop", "as_published", "unknown dataset of protocol 'softtriple' 'inshop'"),
        ("softtriple", "cub200", "as_release", "did you mean 'as_released'"),
    ],
)
def test_what_is_not_there_is_named(name, dataset, variant, said):
    with pytest.raises(ConfigError, match=said):
        load_protocol(name).training_config(dataset, variant)


def test_a_protocol_edited_meanwhile_is_read_again(tmp_path, monkeypatch):
    """A page that is written at the end of a flow names runs of the former settings as such."""
    text = (protocols.TABLES / "sgsl" / "protocol.yaml").read_text()
    (tmp_path / "sgsl").mkdir()
    path = tmp_path / "sgsl" / "protocol.yaml"
    monkeypatch.setattr(protocols, "TABLES", tmp_path)
    for epochs in (100, 7):
        path.write_text(text.replace("num_epochs: 100", f"num_epochs: {epochs}", 1))
        assert load_protocol("sgsl").training["num_epochs"] == epochs
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"protocol.yaml: not a file; write a YAML file there"):
        load_protocol("sgsl")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("paper: sgsl", "paper: other", "use the name of the folder"),
        ("gamma: 30", "gama: 30", "did you mean 'gamma'"),
        ("num_epochs: 100", "num_epoch: 100", "did you mean 'num_epochs'"),
        ("    datasets:\n      cub200", "    datasets:\n      cub201", "did you mean 'cub200'"),
    ],
)
def test_a_slip_in_a_file_is_one_line(old, new, said, tmp_path, monkeypatch):
    text = (protocols.TABLES / "sgsl" / "protocol.yaml").read_text()
    assert old in text
    (tmp_path / "sgsl").mkdir()
    (tmp_path / "sgsl" / "protocol.yaml").write_text(text.replace(old, new, 1))
    monkeypatch.setattr(protocols, "TABLES", tmp_path)
    with pytest.raises(ConfigError, match=said):
        checked("sgsl")
