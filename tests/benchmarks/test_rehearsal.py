"""The rehearsal's drawn datasets: the exact published counts, in trees and archives that the readers accept as the publisher's."""

import hashlib
import io
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import rehearsal
from dml_core.data.drawing.layouts import Picture
from dml_core.data.registry import parse_dataset
from dml_core.data.store.rows import Counts, role_counts
from tests.conftest import ROOT


def drawn_counts(sizes: list[int], num_train_classes: int, has_queries: bool) -> dict[str, Counts]:
    """Return images and classes by role, by the writers' rule: the first classes train; others alternate between query and gallery."""
    images: Counter[str] = Counter()
    classes: dict[str, set[int]] = {}
    for index, size in enumerate(sizes):
        for number in range(size):
            role = "train" if index < num_train_classes else ("query", "gallery")[number % 2] if has_queries else "test"
            images[role] += 1
            classes.setdefault(role, set()).add(index)
    return {role: Counts(images[role], len(found)) for role, found in classes.items()}


@pytest.mark.parametrize("name", rehearsal.LAYOUTS)
def test_class_sizes_are_uneven_and_add_up_to_the_published_counts(name: str) -> None:
    published = rehearsal.official(name).published
    counts = rehearsal.counts_of(name, 1)
    assert counts == published
    sizes = rehearsal.class_sizes(name, counts)
    assert drawn_counts(sizes, published["train"].num_classes, "query" in published) == published
    assert len(set(sizes)) > 5
    assert min(sizes) >= (1 if name == "inshop" else 2)


@pytest.mark.parametrize("name", rehearsal.LAYOUTS)
def test_a_share_has_classes_for_a_batch_and_images_for_each_class(name: str) -> None:
    published = rehearsal.official(name).published
    for share in (0.001, 0.1, 0.9):
        counts = rehearsal.counts_of(name, share)
        sizes = rehearsal.class_sizes(name, counts)
        assert drawn_counts(sizes, counts["train"].num_classes, "query" in published) == counts
        for role, of_role in counts.items():
            assert min(32, published[role].num_classes) <= of_role.num_classes <= published[role].num_classes
            assert 3 * of_role.num_classes <= of_role.num_images <= published[role].num_images


def test_pictures_are_small_and_no_two_are_alike() -> None:
    pictures = list(rehearsal.draw_pictures([3, 2, 4], seed=0))
    assert [(picture.class_index, picture.number) for picture in pictures] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        *((2, n) for n in range(4)),
    ]
    assert len({picture.jpeg for picture in pictures}) == 9
    assert pictures == list(rehearsal.draw_pictures([3, 2, 4], seed=0))
    assert not {picture.jpeg for picture in pictures} & {picture.jpeg for picture in rehearsal.draw_pictures([9], seed=1)}
    for picture in pictures:
        image = Image.open(io.BytesIO(picture.jpeg))
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (32, 32))
        left, top, right, bottom = picture.box
        assert 0 <= left < right <= 32
        assert 0 <= top < bottom <= 32


@pytest.mark.parametrize("name", rehearsal.LAYOUTS)
def test_archives_are_called_and_read_as_the_publishers(name: str, tmp_path: Path) -> None:
    counts = rehearsal.counts_of(name, 0.001)
    rehearsal.write_archives(name, tmp_path, counts)
    source, archive = rehearsal.LAYOUTS[name].archived
    assert archive in {one.file_name for one in rehearsal.official(name).archives}
    assert (tmp_path / archive).is_file()
    assert (tmp_path / rehearsal.LAYOUTS[name].given).exists()
    assert not (tmp_path / source).exists(), "the images are in the archive alone"
    dataset = parse_dataset(name, {"published_counts": False})
    dataset.materialise(tmp_path)
    manifest = dataset.read(tmp_path)
    assert role_counts(manifest.rows) == counts
    assert len({manifest.read_bytes(row) for row in manifest.rows}) == len(manifest.rows)


@pytest.mark.parametrize("name", rehearsal.LAYOUTS)
def test_a_project_s_reader_takes_the_drawn_archives_for_the_publisher_s(name: str, tmp_path: Path) -> None:
    readers, downloads = tmp_path / "dml_core/data/readers", tmp_path / "downloads"
    readers.mkdir(parents=True)
    before = (ROOT / f"dml_core/data/readers/{name}.py").read_text()
    (readers / f"{name}.py").write_text(before)
    rehearsal.write_archives(name, downloads, rehearsal.counts_of(name, 0.001))
    rehearsal.trust_archives(tmp_path, name, downloads)
    text = (readers / f"{name}.py").read_text()
    compile(text, name, "exec")
    drawn = [one for one in rehearsal.official(name).archives if one.md5 and (downloads / one.file_name).is_file()]
    assert len(drawn) == {"cub200": 1, "cars196": 2, "sop": 1, "inshop": 0}[name], "of In-shop's no checksum is published"
    for archive in drawn:
        assert f'md5="{hashlib.md5((downloads / archive.file_name).read_bytes()).hexdigest()}"' in text
        assert f'md5="{archive.md5}"' not in text
    assert (text == before) == (not drawn)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("name", rehearsal.LAYOUTS)
def test_readers_accept_a_tree_of_the_published_counts(name: str, tmp_path: Path) -> None:
    """With `published_counts` on, as for a user; each of up to 120,000 files has one byte, because reading the lists opens none."""

    def pictures(sizes: list[int]) -> Iterator[Picture]:
        return (Picture(index, number, b"-", rehearsal.BOX) for index, size in enumerate(sizes) for number in range(size))

    counts = rehearsal.counts_of(name, 1)
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:  # pytest would keep 200,000 files
        rehearsal.write_tree(name, Path(folder), counts, pictures(rehearsal.class_sizes(name, counts)))
        assert role_counts(parse_dataset(name, {}).read(Path(folder)).rows) == counts
