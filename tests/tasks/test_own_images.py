"""`dml data add`: its settings fit the images, the rest of params.yaml is unchanged, and bad input changes nothing."""

import csv
import re
import shutil
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dml_core.config import merge, parse, read_yaml
from dml_core.data.check import CheckReport
from dml_core.data.prepare import prepare
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Counts
from dml_core.data.views.samplers import SamplerConfig, epoch_batches
from dml_core.errors import ConfigError, DataError, DmlError
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import build_backbone
from dml_core.overrides import parse_overridden
from dml_core.training.config import TrainingConfig
from dml_core.training.loop import fit
from flows.cli import main
from tasks.checks import check_parts
from tasks.data import prepare_dataset, read_dataset
from tasks.environment import Project
from tasks.own_images import add as add_module
from tasks.own_images.add import add_images
from tasks.own_images.params_text import with_entry
from tasks.own_images.published import add_published
from tasks.own_images.settings import fine_tuning_settings, fitted_settings, pretrained_backbone
from tasks.runs.params.comparison import comparison_runs
from tasks.runs.params.file import load_params
from tasks.runs.specs import Params
from tests.conftest import ROOT


def draw(path: Path, width: int = 20, height: int = 20, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (seed % 256, seed // 256 % 256, 99)).save(path)


def draw_classes(folder: Path, names: str = "abcd", num_images: int = 3, width: int = 20, height: int = 20) -> Path:
    for name in names:
        for number in range(num_images):
            draw(folder / name / f"{number}.png", width, height + number, seed=ord(name) * 100 + number)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root = tmp_path / "project"
    root.mkdir()
    shutil.copy(ROOT / "params.yaml", root)
    return Project(root, root / "state", "", "")


def inserted(before: str, after: str) -> list[str]:
    """Return the lines that `after` has in addition to `before`; check that all others are the same bytes in the same order."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    added = []
    for line in new:
        if old and line == old[0]:
            old.pop(0)
        else:
            added.append(line)
    assert old == []
    return added


def test_blocks_are_put_in_and_every_other_byte_stays(project: Project, tmp_path: Path) -> None:
    before = project.params_file.read_text()
    added = add_images(project, "birds", draw_classes(tmp_path / "my bírds"))
    assert inserted(before, project.params_file.read_text()) == [
        "  birds:\n",
        "    reader: folder\n",
        f"    raw: {tmp_path}/my bírds\n",
        "    birds:\n",
        "      transform: {crop_size: 20, padding: 2}\n",
        "      sampler: {batch_size: 6, num_classes_per_batch: 2, num_samples_per_class: 3}\n",
        "      num_epochs: 60\n",
    ]
    assert [line[1:] for line in added.diff.splitlines() if re.match(r"\+ ", line)] == [
        line.rstrip("\n") for line in inserted(before, project.params_file.read_text())
    ]
    add_images(project, "more", draw_classes(project.root / "images"))
    assert load_params(project.params_file).datasets["more"].raw == "images"
    assert list(load_params(project.params_file).comparison.datasets) == ["synthetic", "fashion-mnist", "birds", "more"]


@pytest.mark.parametrize(
    "folder",
    ["1e5", "12e03", "08", "0o17", "0x1f", ".5", "+.5", "1.5e3", ".inf", "1_000", "1:30", "on", "null", "~", "2026-12-01", "#x", "a: b"],
)
def test_a_folder_named_as_a_yaml_value_is_one(folder: str, project: Project) -> None:
    """`1e5` was written without quotes, and the parameters were refused with the name of a temporary file."""
    add_images(project, "birds", draw_classes(project.root / folder, num_images=2))
    assert load_params(project.params_file).datasets["birds"].raw == folder
    assert yaml.safe_load(project.params_file.read_text())["datasets"]["birds"]["raw"] == folder, "for other programs"


def test_a_file_that_is_a_link_stays_one(project: Project, tmp_path: Path) -> None:
    """Several projects may share their parameters."""
    shared = project.params_file.rename(tmp_path / "shared.yaml")
    project.params_file.symlink_to(shared)
    add_images(project, "birds", draw_classes(tmp_path / "my birds"))
    assert project.params_file.is_symlink()
    assert "birds" in load_params(shared).datasets


@pytest.mark.parametrize(
    ("options", "initial", "num_variants"), [([], "untrained", 8), (["--backbone", "resnet18", "--weights", "resnet18.pth"], "frozen", 9)]
)
def test_the_whole_command(
    options: list[str],
    initial: str,
    num_variants: int,
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw_classes(tmp_path / "birds")
    for number in range(3):  # another file of the same pixels
        Image.open(tmp_path / f"birds/c/{number}.png").save(tmp_path / f"birds/d/{number}.png", compress_level=1)
    torch.save(build_backbone(BackboneConfig(name="resnet18")).state_dict(), project.root / "resnet18.pth")
    monkeypatch.chdir(project.root)
    monkeypatch.setattr(sys, "argv", ["dml", "data", "add", "birds", "../birds", *options])
    monkeypatch.setenv("DML_STATE", str(tmp_path / "state"))
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "+    raw: " in printed
    assert "birds: 6 train images of 2 classes, 6 test images of 2 classes; added to params.yaml" in printed
    assert "note: a test image is compared with 5, fewer than 8, the largest of evaluation.recall_at" in printed
    assert re.search(r"^note: same pixels in two classes: 6 files \([^\n]*[cd]/0\.png", printed, re.MULTILINE)
    commands = re.findall(r"^next: (.*), about .* on this machine:\n  dml reproduce (.*)$", printed, re.MULTILINE)
    assert commands == [
        ("a first look, 2 variants with 1 seed", f"--dataset birds --variant {initial} --variant softtriple --seed 0"),
        (f"the comparison, {num_variants} variants with 5 seeds", "--dataset birds"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights", "w.pth"], "needs --backbone"),
        (["--backbone", "resnet19"], "--backbone resnet19: unknown backbone 'resnet19'; did you mean 'resnet18'"),
        (["--backbone", "timm:resnet19"], "--backbone timm:resnet19: unknown timm model 'resnet19'"),
        (["--backbone", "small_cnn"], "--backbone small_cnn: backbone 'small_cnn' has no ImageNet weights"),
        (["--backbone", "resnet18", "--weights", "gone.pth"], "--weights gone.pth: no such file"),
        (["--backbone", "resnet18", "--weights", "lenet.pth"], "do not fit the backbone"),
        (["--backbone", "resnet18", "--weights", "params.yaml"], "not a state dict saved by torch"),
        (["--backbone", "lenet", "--weights", "lenet.pth"], "the images that it was trained on are not known; write its settings by hand"),
    ],
)
def test_a_backbone_that_cannot_be_fine_tuned_changes_nothing(
    words: list[str], message: str, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_classes(tmp_path / "birds")
    torch.save(build_backbone(BackboneConfig(name="lenet")).state_dict(), project.root / "lenet.pth")
    before = project.params_file.read_text()
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("DML_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "argv", ["dml", "data", "add", "birds", "../birds", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert project.params_file.read_text() == before


# ---------------------------------------------------------------- settings that fit


def report(num_images: int, num_classes: int, side: int = 100) -> CheckReport:
    counts = {"train": Counts(num_images, num_classes), "test": Counts(4, 2)}
    return CheckReport(counts, {}, {}, [], [], (side, side, side), 0)


@settings(max_examples=40)
@given(st.integers(2, 300), st.integers(2, 60), st.integers(0, 40))
def test_batches_fit_any_number_of_classes_and_images(num_classes: int, per_class: int, more: int) -> None:
    """No more classes than exist, no repeated image in a class of average size, no BatchNorm over one image, about the planned size."""
    protocol = read_yaml(ROOT / "params.yaml")["comparison"]["protocol"]
    labels = np.concatenate([np.repeat(np.arange(num_classes), per_class), np.zeros(more, dtype=int)])
    fitted = merge(protocol, fitted_settings(protocol, report(len(labels), num_classes)))
    sampler = fitted["sampler"]
    for kind in ("shuffled", "k_by_n"):
        batches = epoch_batches(parse(SamplerConfig, sampler | {"kind": kind}, "test"), labels, seed=0, epoch=0)
        assert all(2 <= len(batch) <= protocol["sampler"]["batch_size"] for batch in batches)
    assert sampler["num_samples_per_class"] <= max(2, len(labels) // num_classes)
    assert 6 <= fitted["num_epochs"] <= 60


def test_the_protocols_own_values_are_kept_where_they_fit() -> None:
    protocol = read_yaml(ROOT / "params.yaml")["comparison"]["protocol"]
    assert fitted_settings(protocol, report(1000, 20, side=48)) == {"transform": {"crop_size": 48, "padding": 4}}
    large = fitted_settings(protocol, report(5000, 20, side=900))
    assert large == {"transform": {"train_resize": 48, "test_resize": 48, "crop_size": 48, "padding": 4}}
    random_resized = merge(protocol, {"transform": {"crop": "random_resized", "padding": 0}})
    assert fitted_settings(random_resized, report(5000, 20)) == {}
    held_out = merge(protocol, {"validation": {"share": 0.5}})
    assert fitted_settings(held_out, report(5000, 8))["sampler"]["num_classes_per_batch"] == 4


@pytest.mark.parametrize("share", [None, 0.2, 0.5])
def test_a_batch_repeats_no_image_if_the_protocol_holds_out_classes(share: float | None) -> None:
    protocol = read_yaml(ROOT / "params.yaml")["comparison"]["protocol"]
    held_out = protocol | {"validation": share and {"share": share}}
    fitted = merge(held_out, fitted_settings(held_out, report(40, 10)))
    assert fitted["sampler"]["num_samples_per_class"] == 4, "of the four images of each class"
    assert fitted["sampler"]["batch_size"] <= 40 * (1 - (share or 0))


@pytest.mark.parametrize(
    ("name", "side", "expected"),
    [
        ("timm:tf_efficientnet_lite0", 900, {"crop_size": 224, "test_resize": 256, "interpolation": "bicubic", "scaling": "minus-one-one"}),
        ("timm:tf_efficientnet_lite0", 72, {"crop_size": 72, "test_resize": 82, "interpolation": "bicubic", "scaling": "minus-one-one"}),
        ("timm:vit_tiny_patch16_224", 72, {"crop_size": 224, "test_resize": 249, "scaling": "minus-one-one"}),
        ("resnet18", 300, {"crop_size": 224, "test_resize": 256, "interpolation": "bilinear", "scaling": "rgb-imagenet"}),
        ("bn_inception", 300, {"crop_size": 224, "scaling": "bgr-caffe"}),
    ],
)
def test_a_fine_tuned_backbone_sees_images_as_it_was_trained(name: str, side: int, expected: dict[str, Any]) -> None:
    values = read_yaml(ROOT / "params.yaml")["comparison"]["protocol"] | {"loss": {"name": "softmax"}}
    block = fine_tuning_settings(values, report(1000, 20, side), BackboneConfig(name=name, weights="imagenet"))
    training = parse_overridden(TrainingConfig, "test", values, block)
    assert {key: getattr(training.transform, key) for key in expected} == expected
    assert (training.model.freeze_batchnorm, training.transform.crop) == ("statistics", "random_resized")
    rates = training.optimiser.groups
    assert training.optimiser.learning_rate * 10 == rates["head"].learning_rate
    assert training.num_epochs < values["num_epochs"]


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        (None, {"stored_size": 256}),
        ("resnet50", {"stored_size": 256, "stored_interpolation": "bilinear"}),
        ("timm:tf_efficientnet_lite0", {"stored_size": 256, "stored_interpolation": "bicubic"}),
        ("timm:vit_base_patch16_384", {"stored_size": 384, "stored_interpolation": "bicubic"}),
    ],
)
def test_photographs_are_stored_by_the_resize_of_the_backbone(
    name: str | None, stored: dict[str, Any], project: Project, tmp_path: Path
) -> None:
    raw = draw_classes(tmp_path / "raw", num_images=2, width=600, height=600)
    backbone = None if name is None else BackboneConfig(name=name, weights="imagenet")
    assert add_images(project, "photographs", raw, backbone=backbone).spec.options == stored


@pytest.mark.slow
def test_every_variant_fine_tunes_a_pretrained_backbone(project: Project, tmp_path: Path) -> None:
    """With the smallest dataset; BatchNorm's statistics stay those of the file."""
    raw = draw_classes(tmp_path / "raw", num_images=2, width=40, height=36)
    torch.save(build_backbone(BackboneConfig(name="timm:mobilenetv3_small_050")).model.state_dict(), tmp_path / "w.pth")
    backbone = pretrained_backbone("timm:mobilenetv3_small_050", tmp_path / "w.pth")
    add_images(project, "tiny", raw, backbone=backbone)
    prepare("folder", raw, tmp_path / "packed", {})
    runs = comparison_runs(load_params(project.params_file), "tiny", seeds=(0,))
    assert len(runs) >= 12
    statistics = {name: value for name, value in torch.load(tmp_path / "w.pth").items() if "running" in name}
    for run in runs:
        check_parts([run], tmp_path / "packed")
        short = parse(TrainingConfig, merge(run.training.model_dump(), {"num_epochs": min(1, run.training.num_epochs)}), run.variant)
        state = fit(short, PackedDataset(tmp_path / "packed", "train"), 0, tmp_path / run.variant, torch.device("cpu")).state_dict()
        assert all(torch.equal(state[f"model.backbone.model.{name}"], value) for name, value in statistics.items()), run.variant


@pytest.mark.slow
def test_every_variant_of_the_comparison_trains_on_the_smallest_dataset(project: Project, tmp_path: Path) -> None:
    """Two training classes of two images, smaller than the protocol's crop, none square."""
    raw = draw_classes(tmp_path / "raw", num_images=2, width=11, height=9)
    add_images(project, "tiny", raw)
    prepare("folder", raw, tmp_path / "packed", {})
    runs = comparison_runs(load_params(project.params_file), "tiny", seeds=(0,))
    assert len(runs) >= 12
    for run in runs:
        short = parse(TrainingConfig, merge(run.training.model_dump(), {"num_epochs": min(1, run.training.num_epochs)}), run.variant)
        state = fit(short, PackedDataset(tmp_path / "packed", "train"), 0, tmp_path / run.variant, torch.device("cpu")).state_dict()
        assert all(bool(value.isfinite().all()) for value in state.values() if value.is_floating_point()), run.variant


def test_photographs_are_packed_smaller_and_boxes_are_used(project: Project, tmp_path: Path) -> None:
    assert add_images(project, "photos", draw_classes(tmp_path / "photos", num_images=2, width=700, height=600)).spec.options == {
        "stored_size": 256
    }
    boxed = draw_classes(tmp_path / "boxed", num_images=2, width=700, height=600)
    rows = [f"{path.relative_to(boxed)},{path.parent.name},0,0,300,400" for path in sorted(boxed.rglob("*.png"))]
    (boxed / "list.csv").write_text("\n".join(["path,label,left,top,right,bottom", *rows]))
    added = add_images(project, "boxed", boxed / "list.csv")
    assert (added.spec.reader, added.spec.options) == ("manifest", {"file": "list.csv"})
    assert load_params(project.params_file).comparison.datasets["boxed"]["transform"]["crop_to_box"]


def test_a_list_that_is_a_link_names_images_beside_the_link(project: Project, tmp_path: Path) -> None:
    raw = draw_classes(tmp_path / "birds")
    (tmp_path / "lists").mkdir()
    rows = [f"{path.relative_to(raw)},{path.parent.name}" for path in sorted(raw.rglob("*.png"))]
    (tmp_path / "lists/v3.csv").write_text("\n".join(["path,label", *rows]))
    (raw / "list.csv").symlink_to(tmp_path / "lists/v3.csv")
    spec = add_images(project, "birds", raw / "list.csv").spec
    assert (spec.raw, spec.options) == (str(raw), {"file": "list.csv"})


def test_a_folder_that_is_a_link_stays_one(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads to the next delivery later."""
    draw_classes(tmp_path / "january")
    for link in (tmp_path / "birds", project.root / "own"):
        link.symlink_to(tmp_path / "january")
    assert add_images(project, "birds", tmp_path / "birds").spec.raw == str(tmp_path / "birds")
    refused(project, "overlaps the raw files of 'birds'", "own", project.root / "own")
    (project.root / "own").unlink()
    (project.root / "own").symlink_to(draw_classes(tmp_path / "february"))
    assert add_images(project, "own", project.root / "own").spec.raw == "own"
    (tmp_path / "home").symlink_to(draw_classes(tmp_path / "march"))
    monkeypatch.setenv("HOME", str(tmp_path / "march"))
    refused(project, "is or contains your home folder", "all", tmp_path / "home")


def _add_slowly(project: Project, name: str, raw: Path, barrier: Any) -> None:
    """Add in a process whose reads of params.yaml are slow, so that three of them overlap."""

    def slow(path: Path) -> Params:
        params = load_params(path)
        time.sleep(0.3)
        return params

    add_module.load_params = slow
    barrier.wait()
    add_images(project, name, raw)


def test_three_additions_at_once_are_all_there(project: Project, tmp_path: Path) -> None:
    before = project.params_file.read_text()
    context = get_context("fork")
    names = ("one", "two", "three")
    barrier = context.Barrier(len(names))
    processes = [
        context.Process(target=_add_slowly, args=(project, name, draw_classes(tmp_path / name, num_images=2), barrier)) for name in names
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        load_params(project.params_file)  # as a run started meanwhile: the file is complete at any time
        time.sleep(0.1)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert set(names) < set(load_params(project.params_file).comparison.datasets)
    inserted(before, project.params_file.read_text())
    assert [path.name for path in project.root.iterdir() if path.is_file()] == ["params.yaml"]


# ---------------------------------------------------------------- bad input


def twice(raw: Path) -> None:
    shutil.copytree(raw, raw.parent / "copy")
    shutil.move(raw.parent / "copy", raw / "test")
    (raw / "train").mkdir()
    for name in "abcd":
        shutil.move(raw / name, raw / "train")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "images: no such folder or file; name the folder"),
    "no images": (lambda raw: [shutil.rmtree(path) for path in raw.iterdir()], "the dataset has no images"),
    "one class": (lambda raw: [shutil.rmtree(raw / name) for name in "bcd"], "0 classes to train on and 1 others"),
    "three classes": (lambda raw: shutil.rmtree(raw / "d"), "1 classes to train on and 2 others to test on, at least 2 of each"),
    "a class with one image": (lambda raw: [path.unlink() for path in (raw / "b").glob("[12].png")], "class 'b' has one image in train"),
    "a damaged image": (
        lambda raw: (raw / "c/1.png").write_bytes(b"x"),
        r"1 image: unreadable, the first is c/1\.png \(not an image, or damaged\); fix or remove",
    ),
    "a long image": (
        lambda raw: draw(raw / "c/1.png", 2002, 2),
        r"first is c/1\.png \(of 2002 x 2 pixels, one side more than 1000 times the other\)",
    ),
    "a list of what is not there": (
        lambda raw: (raw / "manifest.csv").write_text(
            "path,label\na/0.png,a\na\\1.png,a\n" + "".join(f"{label}/{number}.png,{label}\n" for label in "bcd" for number in (0, 1))
        ),
        r"first is a\\1\.png \(listed, but there is no such file; restore it or correct the list\)",
    ),
    "the same image twice": (lambda raw: shutil.copy(raw / "a/0.png", raw / "d/0.png"), "2 images: same bytes in train and in another"),
    "images outside classes": (lambda raw: draw(raw / "x.png"), r"x\.png: an image outside the folders of the classes"),
    "something else": (lambda raw: (raw / "a/Thumbs.db").write_bytes(b""), r"Thumbs\.db: not the name of an image"),
    "folders one too deep": (
        lambda raw: draw(raw / "a/inner/x.png"),
        "a/inner: a folder in a class's folder; name a folder of the classes' folders, or one that has only train/ and test/ of such",
    ),
    "one class in train and test": (twice, "class 'a' is in train and in test; classes must be disjoint"),
    "two lists": (lambda raw: [(raw / f"manifest.{kind}").touch() for kind in ("csv", "parquet")], r"2 lists \(manifest.csv, manif"),
    "a list that is none": (lambda raw: (raw / "manifest.csv").write_text("file,class\n"), "unknown column 'file'"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_images(fault: str, project: Project, tmp_path: Path) -> None:
    raw = draw_classes(tmp_path / "images")
    damage, message = BAD[fault]
    damage(raw)
    refused(project, message, "mine", raw)


LATER: dict[str, tuple[Callable[[Path], object], str]] = {
    "an image of train again in test": (
        lambda raw: shutil.copy(raw / "a/0.png", raw / "d/0.png"),
        r"images: 2 images: same bytes in train and in another role, the first is a/0\.png; fix or .*; `dml data check` lists all$",
    ),
    "a class less": (
        lambda raw: shutil.rmtree(raw / "b"),
        "images: only class 'a' to train on, at least two classes are needed; add classes, or",
    ),
    "an image that is gone": (lambda raw: (raw / "d/0.png").write_bytes(b""), r"d/0\.png: the file is empty; restore it"),
}


@pytest.mark.parametrize("fault", LATER)
def test_what_adding_refuses_is_refused_when_the_images_are_packed_again(fault: str, project: Project, tmp_path: Path) -> None:
    raw = draw_classes(tmp_path / "images")
    spec = add_images(project, "mine", raw).spec
    packed = prepare_dataset(project, "mine", spec)
    change, message = LATER[fault]
    change(raw)
    with pytest.raises(DataError, match=message):
        prepare_dataset(project, "mine", spec)
    assert read_dataset(project, "mine") == packed, "the former images stay"


def test_a_file_lists_all_bad_images_and_the_message_names_it(project: Project, tmp_path: Path) -> None:
    raw = draw_classes(tmp_path / "images")
    for name in ("a/1.png", "c/2.png"):
        (raw / name).write_bytes(b"x")
    shutil.copy(raw / "a/0.png", raw / "d/0.png")
    listed = project.state / "checks/mine.csv"
    refused(project, rf"2 images: unreadable, the first is a/1\.png .*; fix or remove them; {listed} lists all$", "mine", raw)
    assert list(csv.reader(listed.read_text().splitlines())) == [
        ["finding", "where"],
        ["unreadable", "a/1.png (not an image, or damaged)"],
        ["unreadable", "c/2.png (not an image, or damaged)"],
        ["same bytes in train and in another role", "a/0.png"],
        ["same bytes in train and in another role", "d/0.png"],
    ]


@pytest.mark.parametrize("name", ["", "1e5", "3_000", "a" * 101, "a\n", "a b", "a.b", "a@b", "été", "on", "null", "a/b", "-a", "${x}"])
def test_bad_names(name: str, project: Project, tmp_path: Path) -> None:
    refused(project, "not a name for a dataset", name, tmp_path)


def test_names_and_places_that_are_taken(project: Project, tmp_path: Path) -> None:
    refused(project, "has a dataset 'synthetic' already", "synthetic", tmp_path)
    refused(project, "contains the project", "mine", tmp_path)
    refused(project, "contains the project", "mine", project.root)
    for place, whose in (
        ("data/raw/synthetic/x", "the raw files of 'synthetic'"),
        ("data", "the raw files of"),
        ("state/x", "the state of runs"),
    ):
        draw_classes(project.root / place)
        refused(project, f"overlaps {whose}", "mine", project.root / place)
    draw_classes(project.root / "shared/birds")
    for tracked in ("shared/birds", "shared"):  # by `dvc add`
        (project.root / f"{tracked}.dvc").write_text("")
        refused(
            project, rf"/shared/birds/: tracked by \S+/{tracked}\.dvc, and DVC allows one owner: run", "mine", project.root / "shared/birds"
        )
        (project.root / f"{tracked}.dvc").unlink()


@pytest.mark.parametrize("place", ["home", "home/list.csv", "."])
def test_a_home_folder_is_no_dataset(place: str, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC would hash all of it."""
    home = draw_classes(tmp_path / "home")
    (home / "list.csv").write_text("path,label\n" + "".join(f"{name}/{number}.png,{name}\n" for name in "abcd" for number in range(3)))
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(ConfigError, match="is or contains your home folder, all of which DVC would read; put images and list into a"):
        add_images(project, "birds", tmp_path / place)
    with pytest.raises(ConfigError, match="is or contains your home folder"):
        add_published(project, "cub200", home)


def test_files_beside_a_list_are_noted(project: Project, tmp_path: Path) -> None:
    raw = draw_classes(tmp_path / "birds")
    (raw / "manifest.csv").write_text("path,label\n" + "".join(f"./{name}/{number}.png,{name}\n" for name in "abcd" for number in (0, 1)))
    (raw / ".hidden").touch()
    (note,) = (note for note in add_images(project, "birds", raw).notes if "DVC" in note.what)
    assert (note.num_found, note.examples) == (5, (".hidden", "a/2.png", "b/2.png", "c/2.png", "d/2.png"))


def test_long_images_of_which_a_test_view_shows_little_are_noted(project: Project, tmp_path: Path) -> None:
    added = add_images(project, "mine", draw_classes(tmp_path / "images", width=20, height=100))
    assert [(note.what, note.num_found) for note in added.notes] == [("images of which a test view shows less than a quarter", 12)]


def test_a_list_for_the_folder_reader_and_a_file_that_is_no_list(project: Project, tmp_path: Path) -> None:
    draw(tmp_path / "x.png")
    refused(project, "neither a folder nor a list", "mine", tmp_path / "x.png")
    refused(project, "0 lists", "mine", draw_classes(tmp_path / "images"), "manifest")


@pytest.mark.parametrize("name", ["Manifest.csv", "manifest.CSV", "MANIFEST.parquet"])
def test_a_list_in_other_letters_is_named_and_not_left_out(name: str, project: Project, tmp_path: Path) -> None:
    (draw_classes(tmp_path / "images") / name).touch()
    refused(project, f"images/{name}: a list of images is named manifest.csv or manifest.parquet; rename it", "mine", tmp_path / "images")
    assert add_images(project, "mine", tmp_path / "images", "folder").spec.reader == "folder"


def refused(project: Project, message: str, name: str, raw: Path, reader: str | None = None) -> None:
    before = {path: path.read_bytes() for path in project.root.glob("*") if path.is_file()}
    with pytest.raises(DmlError, match=message) as raised:
        add_images(project, name, raw, reader)
    assert "\n" not in str(raised.value)
    assert {path: path.read_bytes() for path in project.root.glob("*") if path.is_file()} == before


def test_a_params_file_that_cannot_be_written(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    raw = draw_classes(tmp_path / "images")
    monkeypatch.setattr("os.fsync", full)
    refused(project, r"params\.yaml: cannot be written \(No space left on device\); nothing was changed", "mine", raw)


# ---------------------------------------------------------------- text


def add(text: str, *keys: str) -> str:
    return with_entry(text, keys, ["new:", "  x: 1"])


def test_an_entry_goes_behind_the_last_one_whatever_the_layout() -> None:
    assert add("a:\n  b: {c: 1}  # of b\n\n# of d\nd: 1\n", "a") == "a:\n  b: {c: 1}  # of b\n  new:\n    x: 1\n\n# of d\nd: 1\n"
    assert add("a:\n    b:\n        c:\n        - 1\n        # of c\nd: 1\n", "a") == (
        "a:\n    b:\n        c:\n        - 1\n        # of c\n    new:\n      x: 1\nd: 1\n"
    )
    assert add("a:\n  b:\nd: 1\n", "a") == "a:\n  b:\n  new:\n    x: 1\nd: 1\n"
    assert add("a:\n  b: |\n    text\nd: 1\n", "a") == "a:\n  b: |\n    text\n  new:\n    x: 1\nd: 1\n"
    assert add("a:\n  b: 1", "a") == "a:\n  b: 1\n  new:\n    x: 1\n"
    assert add("a:\r\n  b: 1\r\nd: 2\r\n", "a") == "a:\r\n  b: 1\r\n  new:\r\n    x: 1\r\nd: 2\r\n"
    with pytest.raises(ConfigError, match="'a' is written in braces"):
        add("a: {b: 1}\n", "a")
