"""The generator: the same bytes every time, boxes around the creature, modes, and a task that is neither trivial nor hopeless."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dml_core.data.drawing.creatures import draw_picture, draw_pose, draw_species
from dml_core.data.drawing.layouts import Picture
from dml_core.data.readers.shared.generated import STAMP_FILE
from dml_core.data.readers.synthetic import Synthetic, draw_pictures, generate
from dml_core.data.registry import materialise, parse_dataset
from dml_core.errors import DataError
from tests.data.conftest import OPTIONS


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pixels(picture: Picture) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture.jpeg)).convert("RGB"))


@pytest.mark.parametrize("layout", ["cub200", "cars-annos", "cars-devkit", "cars-folders", "sop", "inshop", "idx"])
def test_same_options_give_the_same_tree(layout: str, tmp_path: Path) -> None:
    config = parse_dataset("synthetic", {**OPTIONS, "layout": layout})
    assert isinstance(config, Synthetic)
    generate(config, tmp_path / "a")
    generate(config, tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert not any(b"Created on" in data for data in tree(tmp_path / "a").values()), "scipy dates its files to the second"


def test_every_option_matters() -> None:
    base = {"num_classes": 2, "images_per_class": 3, "image_size": 32}
    changes = {"seed": 1, "difficulty": 0.9, "image_size": 40, "num_modes": 1, "grayscale_share": 1.0}
    first = [picture.jpeg for picture in draw_pictures(Synthetic.model_validate(base))]
    for option, value in changes.items():
        assert first != [picture.jpeg for picture in draw_pictures(Synthetic.model_validate({**base, option: value}))], option


def test_a_larger_dataset_begins_with_the_smaller_one() -> None:
    small = [picture.jpeg for picture in draw_pictures(Synthetic(num_classes=2, images_per_class=3))]
    large = {(p.class_index, p.number): p.jpeg for p in draw_pictures(Synthetic(num_classes=3, images_per_class=5))}
    assert small == [large[index, number] for index in range(2) for number in range(3)]


def test_box_holds_the_creature_and_nothing_less() -> None:
    """Two species of the same build, drawn into the same image, differ only inside the box and up to its upper or lower side."""
    size = 48
    for seed in range(20):
        one = draw_species(np.random.default_rng(seed))
        same_build = {name: getattr(one, name) for name in ("body_width", "head_size", "tail_length", "wing_length")}
        other = type(one)(**{**vars(draw_species(np.random.default_rng(seed + 100))), **same_build})
        pose = draw_pose(np.random.default_rng(seed))
        (first, box), (second, same_box) = (draw_picture(s, pose, size, 0.0, np.random.default_rng(seed)) for s in (one, other))
        assert box == same_box
        changed = (first != second).any(axis=2)
        left, top, right, bottom = box
        assert 0 <= left < right <= size
        assert 0 <= top < bottom <= size
        inside = np.zeros_like(changed)
        inside[top:bottom, left:right] = True
        assert not (changed & ~inside).any()
        touched = changed[top:bottom, left:right]
        assert touched[:2].any() or touched[-2:].any()
        assert (right - left) * (bottom - top) < size * size


def test_creatures_look_both_ways() -> None:
    """Without nuisance and with one pose, the middle of every image equals that of the first or its mirror image."""
    pictures = draw_pictures(Synthetic(num_classes=2, images_per_class=10, difficulty=0.0, num_modes=1, grayscale_share=0.0))
    first, *others = [pixels(picture)[12:36, 12:36].astype(float) for picture in pictures if picture.class_index == 0]
    is_mirrored = {bool(abs(first - other[:, ::-1]).mean() < abs(first - other).mean()) for other in others}
    assert is_mirrored == {True, False}


def test_some_pictures_are_grayscale() -> None:
    pictures = list(draw_pictures(Synthetic(num_classes=4, images_per_class=25, image_size=16, grayscale_share=0.3)))
    gray = sum(Image.open(io.BytesIO(picture.jpeg)).mode == "L" for picture in pictures)
    assert 15 <= gray <= 45


def test_modes_are_clusters_of_a_class() -> None:
    """Without nuisance a class shows exactly num_modes shapes, which the aspect ratios of its boxes reveal."""
    pictures = draw_pictures(Synthetic(num_classes=2, images_per_class=40, difficulty=0.0, num_modes=3))
    aspects = {(p.class_index, round((p.box[2] - p.box[0]) / (p.box[3] - p.box[1]), 1)) for p in pictures}
    assert 4 <= len(aspects) <= 12


def test_pixels_alone_neither_fail_nor_suffice() -> None:
    """Recall of nearest neighbours of raw pixels is above chance (1/20) and far below 1, so that there is something to learn."""
    pictures = list(draw_pictures(Synthetic(num_classes=20, images_per_class=20)))
    labels = np.array([picture.class_index for picture in pictures])
    flat = np.stack([pixels(picture)[::4, ::4].ravel() / 255.0 - 0.5 for picture in pictures])
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    similarity = flat @ flat.T
    np.fill_diagonal(similarity, -2)
    recall = (labels[similarity.argmax(axis=1)] == labels).mean()
    assert 0.05 < recall < 0.4


def test_materialise_generates_once_and_again_when_options_change(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    materialise("synthetic", OPTIONS, raw)
    image = next(raw.rglob("*.jpg"))
    image.write_bytes(b"kept")
    materialise("synthetic", {**OPTIONS, "stored_size": 8}, raw)
    assert image.read_bytes() == b"kept", "nothing that is drawn has changed, so nothing is generated"
    materialise("synthetic", {**OPTIONS, "seed": 9}, raw)
    assert image.read_bytes() != b"kept"
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize("module", ["drawing.creatures", "readers.cub200"])
def test_materialise_generates_again_when_the_generator_or_the_loader_changes(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prepare` of a drawn dataset watches only the raw tree, so a change of the layout's loader must change the tree."""
    raw = tmp_path / "raw"
    materialise("synthetic", OPTIONS, raw)
    before = (raw / STAMP_FILE).read_text()
    (tmp_path / "edited.py").write_text("# an edit")
    monkeypatch.setattr(f"dml_core.data.{module}.__file__", str(tmp_path / "edited.py"))
    materialise("synthetic", OPTIONS, raw)
    assert (raw / STAMP_FILE).read_text() != before


@pytest.mark.parametrize("is_there", [True, False])
def test_the_raw_folder_may_be_a_link(is_there: bool, tmp_path: Path) -> None:
    """To another disk, whose folder may not exist yet."""
    raw, target = tmp_path / "raw", tmp_path / "disk"
    raw.symlink_to(target)
    if is_there:
        target.mkdir()
    for seed in (0, 1):
        materialise("synthetic", {**OPTIONS, "seed": seed}, raw)
        assert raw.is_symlink()
        assert f'"seed": {seed}' in (target / STAMP_FILE).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "raw"]


def test_materialise_never_overwrites_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "mine.jpg").write_bytes(b"mine")
    with pytest.raises(DataError, match="did not write"):
        materialise("synthetic", OPTIONS, tmp_path)
    assert tree(tmp_path) == {"mine.jpg": b"mine"}


@pytest.mark.parametrize("lists_files", [True, False])
def test_files_of_the_user_in_a_generated_folder_survive_another_generation(lists_files: bool, tmp_path: Path) -> None:
    """The stamp files of earlier versions do not list the generated files."""
    raw = tmp_path / "raw"
    materialise("synthetic", {**OPTIONS, "seed": 7}, raw)
    if not lists_files:
        stamp = raw / STAMP_FILE
        stamp.write_text("".join(line for line in stamp.read_text().splitlines(keepends=True) if "  CUB" not in line))
    mine = next(raw.rglob("*.jpg")).with_name("mine.jpg")
    mine.write_bytes(b"mine")
    with pytest.raises(
        DataError, match=r"raw: the generator did not write, .* 1 of its files, the first is .*mine\.jpg; remove the folder"
    ):
        materialise("synthetic", OPTIONS, raw)
    assert mine.read_bytes() == b"mine"
    mine.unlink()
    materialise("synthetic", OPTIONS, raw)
    assert not list(raw.rglob("mine.jpg"))


def test_a_folder_of_an_earlier_version_is_generated_again_with_a_list_of_its_files(tmp_path: Path) -> None:
    """Otherwise DVC would see other raw files in an old checkout than in a new one."""
    raw = tmp_path / "raw"
    materialise("synthetic", OPTIONS, raw)
    new = tree(raw)
    lines = (raw / STAMP_FILE).read_text().splitlines(keepends=True)
    (raw / STAMP_FILE).write_text("".join(line for line in lines if line[64:66] != "  "))  # without hashes and names
    assert tree(raw) != new
    materialise("synthetic", OPTIONS, raw)
    assert tree(raw) == new


def test_a_smaller_dataset_replaces_a_larger_one(tmp_path: Path) -> None:
    for number in (6, 4):
        materialise("synthetic", {**OPTIONS, "num_classes": number}, tmp_path / "raw")
    materialise("synthetic", {**OPTIONS, "num_classes": 4}, tmp_path / "other")
    assert tree(tmp_path / "raw") == tree(tmp_path / "other")
