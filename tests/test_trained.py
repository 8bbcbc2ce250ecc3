"""Inputs of `embed`: any form gives the right rows, or an error of one line."""

import io
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dml_core.config import parse
from dml_core.data.store.decode import ORIENTATION_TAG
from dml_core.errors import ConfigError, DataError, StoreError
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.config import ModelConfig
from dml_core.models.embedder import Embedder
from dml_core.network_description import NetworkDescription, read_description, write_description
from dml_core.trained import TrainedModel, load_model, load_network, save_network
from tests.forked import forked_on_small_disk

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 24, 24, 3), dtype=np.uint8)
DESCRIPTION = {"model": {"backbone": {"name": "small_cnn"}}, "transform": {"crop_to_box": True}, "num_classes": 3, "embedding_dim": 3}


def means(pixels: Tensor) -> NDArray[np.float32]:
    """A network with known outputs: the mean of each channel's top left quarter."""
    rows: NDArray[np.float32] = pixels[:, :, : pixels.shape[2] // 2, : pixels.shape[3] // 2].float().mean(dim=(2, 3)).numpy()
    return rows


MODEL = TrainedModel(parse(NetworkDescription, DESCRIPTION, "test"), "x", means)
EXPECTED = PIXELS[:, :12, :12].astype(np.float32).mean(axis=(1, 2))


def png(pixels: NDArray[np.uint8], turn: int = 1) -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[ORIENTATION_TAG] = turn
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    return file.getvalue()


def forms(number: int, folder: Path) -> dict[str, Any]:
    path = folder / f"{number}.png"
    path.write_bytes(png(PIXELS[number]))
    tensor = torch.from_numpy(PIXELS[number]).permute(2, 0, 1)
    sideways = np.rot90(PIXELS[number]).copy()  # as from a camera held sideways
    return {
        "path": path,
        "text": str(path),
        "bytes": path.read_bytes(),
        "bytearray": bytearray(path.read_bytes()),
        "pillow": Image.open(io.BytesIO(path.read_bytes())),
        "array": PIXELS[number],
        "array that may not be written": np.broadcast_to(PIXELS[number], PIXELS[number].shape),
        "mirrored view of an array": PIXELS[number][:, ::-1][:, ::-1],
        "tensor": tensor,
        "contiguous tensor": tensor.contiguous(),
        "turned file": png(sideways, 6),
        "turned pillow": Image.open(io.BytesIO(png(sideways, 6))),
    }


def test_one_image_in_every_form_is_one_row(tmp_path: Path) -> None:
    for name, image in forms(0, tmp_path).items():
        found = MODEL.embed(image)
        assert (found.shape, found.dtype) == ((1, 3), np.float32), name
        np.testing.assert_allclose(found, EXPECTED[:1], rtol=1e-6, err_msg=name)


def test_several_images_in_every_form_are_their_rows_in_order(tmp_path: Path) -> None:
    every = [forms(number, tmp_path) for number in range(4)]
    listed = [[form[name] for form in every] for name in every[0]]
    several = [*listed, PIXELS, torch.from_numpy(PIXELS).permute(0, 3, 1, 2), (image for image in PIXELS), tuple(PIXELS), iter(PIXELS)]
    objects = np.empty(4, object)
    objects[:] = [png(pixels) for pixels in PIXELS]
    paths = np.array([form["text"] for form in every])
    for images in [*several, objects, paths, {form["text"]: None for form in every}]:
        np.testing.assert_allclose(MODEL.embed(images, batch_size=3), EXPECTED, rtol=1e-6)
    for nothing in ([], (), np.empty((0, 24, 24, 3), np.uint8), iter([])):
        assert MODEL.embed(nothing).shape == (0, 3)


def test_boxes_are_those_of_their_images() -> None:
    boxes = [(12.0, 12.0, 24.0, 24.0), None, (0, 0, 24, 24), (-5.0, -5.0, 12.0, 12.0)]
    found = MODEL.embed(iter(PIXELS), boxes=iter(boxes))
    np.testing.assert_allclose(found[0], PIXELS[0, 12:18, 12:18].mean(axis=(0, 1)), rtol=1e-6)
    np.testing.assert_allclose(found[1:3], EXPECTED[1:3], rtol=1e-6)
    np.testing.assert_allclose(found[3], PIXELS[3, :6, :6].mean(axis=(0, 1)), rtol=1e-6)


def test_embeddings_are_made_in_full_float32_and_the_process_s_setting_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Embedder(parse(ModelConfig, {"backbone": {"name": "lenet"}}, "test"), 2)
    state = {f"model.{name}": value for name, value in network.state_dict().items()}
    save_network(tmp_path / "network", {"model": {"backbone": {"name": "lenet"}}, "transform": {}}, 2, state)
    during: list[tuple[str, str]] = []

    def precisions() -> tuple[str, str]:
        return torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]

    before = precisions()
    embed = Embedder.embed
    monkeypatch.setattr(Embedder, "embed", lambda self, images: during.append(precisions()) or embed(self, images))
    load_model(tmp_path / "network", "cpu").embed(PIXELS[0])
    assert during == [("ieee", "ieee")]
    assert precisions() == before != ("ieee", "ieee")


@pytest.mark.parametrize("caller", ["autocast", "float64 by default"])
def test_the_state_of_the_caller_s_process_changes_no_embedding_and_loading_draws_no_random_number(caller: str, tmp_path: Path) -> None:
    network = Embedder(parse(ModelConfig, {"backbone": {"name": "lenet"}}, "test"), 2)
    state = {f"model.{name}": value for name, value in network.state_dict().items()}
    save_network(tmp_path / "network", {"model": {"backbone": {"name": "lenet"}}, "transform": {}}, 2, state)
    expected, drawn = load_model(tmp_path / "network", "cpu").embed(PIXELS), torch.get_rng_state()
    if caller == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = load_model(tmp_path / "network", "cpu").embed(PIXELS)
    else:
        torch.set_default_dtype(torch.float64)
        try:
            found = load_model(tmp_path / "network", "cpu").embed(PIXELS)
        finally:
            torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(found, expected)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("images", "options", "said"),
    [
        ("bird.jpg", {}, r"^bird\.jpg: cannot be read \(No such file or directory\)$"),
        ("a\0b", {}, "embedded null byte"),
        (Path("/dev/zero"), {}, "not a regular file"),
        (Path("/"), {}, "a folder"),
        (b"", {}, "image 0: empty"),
        (None, {}, "^expected an image or a list of images, found NoneType$"),
        (5, {}, "found int"),
        ([PIXELS[0], 5], {}, "^image 1: expected a path, bytes, a Pillow image, an array or a tensor, found int$"),
        (PIXELS[0].astype(float), {}, "found float64 of shape"),
        (PIXELS[0, :, :, 0], {}, r"found uint8 of shape \(24, 24\)"),
        (PIXELS[..., :1], {}, r"image 0: .* found uint8 of shape \(24, 24, 1\)"),
        (np.empty((0, 4, 3), np.uint8), {}, r"found uint8 of shape \(0, 4, 3\)"),
        (torch.from_numpy(PIXELS[0]), {}, r"uint8 of shape \(3, height, width\), found torch.uint8 of shape \(24, 24, 3\)"),
        (torch.zeros(3, 4, 4), {}, "found torch.float32"),
        (PIXELS, {"boxes": [None] * 3}, "^fewer boxes than images"),
        (PIXELS, {"boxes": [None] * 5}, "^more boxes than images"),
        (PIXELS, {"boxes": [(0, 0, 3)] * 4}, r"image 0: box \(0, 0, 3\) is not"),
        (PIXELS, {"boxes": [(0, 0, float("nan"), 4)] * 4}, "image 0: box .* is not"),
        (PIXELS[0], {"boxes": (0, 0, 3, 4)}, r"^image 0: box 0 is not \(left, top, right, bottom\) in pixels; boxes is a list"),
        (PIXELS, {"boxes": [("a", 0, 3, 4)] * 4}, "^image 0: box .* is not"),
        (PIXELS, {"boxes": 4}, "^expected a list of boxes, one or None per image, found int$"),
        (PIXELS, {"batch_size": 0}, "batch_size 0: expected a whole number from 1"),
    ],
)
def test_anything_else_is_one_line(images: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises((DataError, ConfigError), match=said) as raised:
        MODEL.embed(images, **options)
    assert "\n" not in str(raised.value)


def test_an_image_of_a_size_that_the_network_does_not_take_is_one_line() -> None:
    """Without a crop or a resize, views have the size of their image."""

    def normalised(pixels: Tensor) -> NDArray[np.float32]:
        return torch.nn.functional.instance_norm(pixels.float()).mean(dim=(2, 3)).numpy()  # one pixel is too few

    model = TrainedModel(MODEL.description, "x", normalised)
    tiny = PIXELS[0, :1, :1]
    with pytest.raises(DataError, match=r"^image 3: the network does not take its 1 x 1 pixels \(Expected more than 1 spatial element"):
        model.embed([PIXELS[0], PIXELS[1], PIXELS[2], tiny], batch_size=2)
    views = [model.view(image) for image in (tiny, PIXELS[1], tiny)]
    rows, refused = model.try_views(views)
    assert [*refused] == [0, 2]
    np.testing.assert_array_equal(rows[1], model.embed(PIXELS[1])[0])
    with pytest.raises(DataError, match=r"^the network does not take its 1 x 1 pixels"):
        model.embed_views(views)


def test_a_failure_of_views_that_all_have_one_size_is_not_the_image_s() -> None:
    def broken(pixels: Tensor) -> NDArray[np.float32]:
        raise RuntimeError("the GPU has gone")

    description = parse(NetworkDescription, DESCRIPTION | {"transform": {"crop_size": 12}}, "test")
    with pytest.raises(RuntimeError, match="the GPU has gone"):
        TrainedModel(description, "x", broken).embed(PIXELS)


def fill_the_disk(folder: Path) -> None:
    network = Embedder(parse(ModelConfig, {"backbone": {"name": "lenet"}}, "test"), 2)
    state = {f"model.{name}": value for name, value in network.state_dict().items()}
    with pytest.raises(StoreError, match=r"network: cannot be written \(.+\); free or change the place$"):
        save_network(folder / "network", {"model": {"backbone": {"name": "lenet"}}, "transform": {}}, 2, state)


def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    assert forked_on_small_disk(20_000, fill_the_disk, tmp_path) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["a disk/networks", "a disk/not there yet"])
def test_a_link_to_a_folder_stays_one(tmp_path: Path, target: str) -> None:
    """It was refused as no folder."""
    (tmp_path / "a disk/networks").mkdir(parents=True)
    (tmp_path / "link").symlink_to(target)
    network = Embedder(parse(ModelConfig, {"backbone": {"name": "lenet"}}, "test"), 2)
    state = {f"model.{name}": value for name, value in network.state_dict().items()}
    for _ in range(2):
        save_network(tmp_path / "link", {"model": {"backbone": {"name": "lenet"}}, "transform": {}}, 2, state)
        assert (tmp_path / "link").is_symlink()
        assert load_model(tmp_path / target, "cpu").embed(PIXELS).shape[0] == len(PIXELS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a disk", "link"]
    assert {path.name for path in (tmp_path / "a disk").iterdir()} == {"networks", Path(target).name}


def test_an_empty_weights_file_is_one_line(tmp_path: Path) -> None:
    network = Embedder(parse(ModelConfig, {"backbone": {"name": "lenet"}}, "test"), 2)
    state = {f"model.{name}": value for name, value in network.state_dict().items()}
    folder = tmp_path / "network"
    description = save_network(folder, {"model": {"backbone": {"name": "lenet"}}, "transform": {}}, 2, state)
    (folder / "network.pt").write_bytes(b"")
    with pytest.raises(StoreError, match=r"damaged \(SHA-256 differs\); make the folder again$"):
        load_network(folder, description)
    write_description(folder, description)
    with pytest.raises(StoreError, match=r"not the network's weights \(EOFError\); make the folder again$"):
        load_network(folder, read_description(folder))


def test_a_network_that_began_with_a_file_of_weights_is_saved_without_it(tmp_path: Path) -> None:
    """The file may be gone, and its hash is not that of the trained weights."""
    began = {"name": "lenet", "weights": str(tmp_path / "gone.pth"), "weights_sha256": "a" * 64}
    network = Embedder(parse(ModelConfig, {"backbone": {"name": "lenet"}}, "test"), 2)
    state = {f"model.{name}": value for name, value in network.state_dict().items()}
    description = save_network(tmp_path / "network", {"model": {"backbone": began}, "transform": {}}, 2, state)
    saved = load_network(tmp_path / "network", description).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in network.state_dict().items())


@pytest.mark.parametrize("weights", ["http://127.0.0.1:9/x", "s3://bucket/x", "/nowhere/x.pth", "imagenet"])
def test_a_description_that_names_weights_starts_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    """A description may come from a stranger, as in a folder that was sent, and the folder has the trained weights."""
    network = Embedder(parse(ModelConfig, {"backbone": {"name": "lenet"}}, "test"), 2)
    state = {f"model.{name}": value for name, value in network.state_dict().items()}
    description = save_network(tmp_path / "network", {"model": {"backbone": {"name": "lenet"}}, "transform": {}}, 2, state)
    named = BackboneConfig(name="lenet", weights=weights, weights_sha256=None if weights == "imagenet" else "a" * 64)
    model = description.model.model_copy(update={"backbone": named})
    write_description(tmp_path / "network", description.model_copy(update={"model": model}))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    assert load_model(tmp_path / "network", "cpu").embed(PIXELS).shape == (4, description.embedding_dim)
