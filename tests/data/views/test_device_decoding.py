"""Decoding on the device: on the CPU its batches are those of decoding in the loader, bit for bit; errors name the image."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from dml_core.config import parse
from dml_core.data.prepare import pack
from dml_core.data.store.packed import PackedDataset
from dml_core.data.store.rows import Manifest, Row
from dml_core.data.views import batches, device_decoding
from dml_core.data.views.batches import Loader, TrainView, View
from dml_core.data.views.device_decoding import check_decoder, decode_batch, read_encoded
from dml_core.data.views.transform_config import TransformConfig
from dml_core.errors import ConfigError, DataError
from dml_core.training.loop import fit
from tasks.workers.embedding import extract
from tests.conftest import small_training
from tests.data.store.test_decode import BOMBS, photograph

CPU = torch.device("cpu")
SMOOTH = np.add.outer(np.arange(24) * 4, np.arange(40) * 3)[..., None] + np.array([0, 20, 40])


def cmyk() -> bytes:
    file = io.BytesIO()
    Image.fromarray(SMOOTH.astype(np.uint8)).convert("CMYK").save(file, "JPEG")
    return file.getvalue()


FILES = {
    "upright.jpg": photograph("JPEG", None),
    "turned.jpg": photograph("JPEG", 6),
    "mirrored.jpg": photograph("JPEG", 2),
    "progressive.jpg": photograph("JPEG", 8, progressive=True),
    "smooth.jpg": photograph("JPEG", 1, SMOOTH.astype(np.uint8), subsampling=2),
    "small.jpg": photograph("JPEG", 5, SMOOTH[:9, :12].astype(np.uint8)),
    "grey.jpg": photograph("JPEG", 6, SMOOTH[..., 0].astype(np.uint8)),
    "cmyk.jpg": cmyk(),
    "turned.png": photograph("PNG", 6),
    "turned.webp": photograph("WEBP", 3),
}
ON_CPU = {"cmyk.jpg", "turned.png", "turned.webp"}
READERS = {"own": "folder", "published": "cub200"}
BATCHES = [np.array([7, 1, 9, 1]), np.array([], dtype=np.int64), np.arange(len(FILES))]
COPIES = [np.array([0, 0, 0, 1]), np.array([], dtype=np.int64), np.array([1, 2, 0, 0, 0, 0, 0, 1, 0, 1])]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the same images as the user's own, rotated by their EXIF orientation, and as a published dataset's."""
    folders = {}
    for kind, reader in READERS.items():
        folders[kind] = tmp_path_factory.mktemp("packed") / kind
        rows = [Row(name, number % 2, f"class {number % 2}", "train", (2.5, 1.0, 8.2, 30.0)) for number, name in enumerate(FILES)]
        pack(reader, {}, Manifest(rows, lambda row: FILES[row.path]), folders[kind])
    return folders


def config(decoder: str, **options: Any) -> TransformConfig:
    return parse(TransformConfig, {"decoder": decoder, **options}, "transform")


def loaded(dataset: PackedDataset, view: View, num_loader_workers: int = 0, device: torch.device = CPU) -> list[Tensor] | str:
    """Return the batches, or the message of the error that ends them."""
    try:
        return [images for images, _ in Loader(dataset, num_loader_workers, device).batches(BATCHES, view, COPIES)]
    except ConfigError as error:
        return str(error)


sizes = st.sampled_from([None, 18, [20, 27]])
SETTINGS = st.fixed_dictionaries(
    {
        "crop_to_box": st.booleans(),
        "train_resize": sizes,
        "test_resize": sizes,
        "interpolation": st.sampled_from(["bilinear", "bicubic"]),
        "flip": st.booleans(),
        "jitter": st.sampled_from([{}, {"brightness": 0.3, "contrast": 0.4, "saturation": 0.3, "hue": 0.2}]),
        "jitter_first": st.booleans(),
        "scaling": st.sampled_from(["rgb-imagenet", "bgr-caffe", "zero-one"]),
    }
)
CROPS = st.sampled_from(
    [
        {},
        {"crop": "random", "crop_size": 16},
        {"crop": "random_exclusive", "crop_size": 9},
        {"crop": "padded", "crop_size": 16, "padding": 3},
        {"crop": "random_resized", "crop_size": 16, "crop_area": [0.1, 1.0]},
    ]
)


@settings(max_examples=60)
@given(SETTINGS, CROPS, st.sampled_from(sorted(READERS)), st.integers(0, 3))
def test_batches_are_those_of_decoding_in_the_loader(
    datasets: dict[str, Path], options: dict[str, Any], crop: dict[str, Any], kind: str, epoch: int
) -> None:
    """The same draws give the same crops, also of images that come again; refused views have the same message."""
    for view in (lambda views: TrainView(views, 1, epoch), batches.TestView):
        expected, found = (
            loaded(PackedDataset(datasets[kind], "train"), view(config(decoder, **options, **crop))) for decoder in ("cpu", "nvjpeg")
        )
        assert type(found) is type(expected)
        if isinstance(expected, str):
            assert found == expected
        else:
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", READERS)
def test_loader_processes_only_read_what_is_decoded_on_the_device(datasets: dict[str, Path], kind: str) -> None:
    dataset = PackedDataset(datasets[kind], "train")
    order = list(range(len(FILES)))
    for index in order:
        dataset.image(index)  # cached pixels must not take the place of the bytes
    batch = read_encoded(dataset, order, order)
    parts = torch.split(batch.data, [int(np.prod(shape)) for shape in batch.shapes])
    for name, part, shape in zip(dataset.paths, parts, batch.shapes, strict=True):
        assert (len(shape) == 3) == (name in ON_CPU)
        if name not in ON_CPU:
            assert part.numpy().tobytes() == FILES[name]
    views = {decoder: TrainView(config(decoder, crop="random", crop_size=8), 0, 0) for decoder in ("cpu", "nvjpeg")}
    expected, found = loaded(dataset, views["cpu"]), loaded(PackedDataset(datasets[kind], "train"), views["nvjpeg"], 2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_batch_is_decoded_in_one_call_and_nothing_of_it_is_cached(datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    decode, counts = device_decoding.decode_jpeg, []
    monkeypatch.setattr(device_decoding, "decode_jpeg", lambda jpegs, **more: counts.append(len(jpegs)) or decode(jpegs, **more))
    dataset = PackedDataset(datasets["own"], "train")
    loaded(dataset, batches.TestView(config("nvjpeg", crop_size=8)))
    assert counts == [2, 1, len(FILES) - len(ON_CPU)]
    assert {dataset.paths[index] for index in dataset._decoded} == ON_CPU


class Damaged(PackedDataset):
    """A dataset whose fourth image is changed after it was packed."""

    change: Callable[[bytes], bytes] = staticmethod(lambda data: data[: len(data) // 2])

    def raw_bytes(self, index: int) -> bytes:
        data = super().raw_bytes(index)
        return type(self).change(data) if index == 3 else data


@pytest.mark.parametrize("change", ["cut", "of too many pixels", "no image"])
def test_a_damaged_image_is_named_as_by_the_cpu(datasets: dict[str, Path], change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"of too many pixels": lambda data: BOMBS["progressive jpeg"], "no image": lambda data: b"nothing"}
    monkeypatch.setattr(Damaged, "change", staticmethod(changes.get(change, Damaged.change)))
    messages = []
    for decoder in ("cpu", "nvjpeg"):
        with pytest.raises(DataError, match=r"image 3 of train is [^\n]*; run `dml data prepare` again$") as found:
            loaded(Damaged(datasets["published"], "train"), batches.TestView(config(decoder, crop_size=8)))
        messages.append(str(found.value))
    assert messages[0] == messages[1]


def test_what_only_nvjpeg_refuses_is_named_and_another_fault_is_raised(datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    decode, dataset = device_decoding.decode_jpeg, PackedDataset(datasets["published"], "train")
    batch = read_encoded(dataset, range(len(FILES)), [0] * len(FILES))

    def refuse(jpegs: list[Tensor], **more: Any) -> list[Tensor]:
        if any(jpeg.numpy().tobytes() == FILES["smooth.jpg"] for jpeg in jpegs):
            raise RuntimeError("Error while decoding JPEG images: 7\nat a place")
        return decode(jpegs, **more)

    monkeypatch.setattr(device_decoding, "decode_jpeg", refuse)
    with pytest.raises(DataError, match=r"^image 4 is not damaged, but nvJPEG does not decode it \(Error[^\n]*: 7\); set decoder to cpu$"):
        decode_batch(batch, dataset, CPU)

    def fail(jpegs: list[Tensor], **more: Any) -> list[Tensor]:
        if len(jpegs) > 1:
            raise RuntimeError("CUDA error")
        return decode(jpegs, **more)

    monkeypatch.setattr(device_decoding, "decode_jpeg", fail)
    with pytest.raises(RuntimeError, match=r"^CUDA error$"):
        decode_batch(batch, dataset, CPU)


def test_nvjpeg_starts_when_its_caller_s_stream_is_idle(datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it overwrites memory that is still read. The order of calls, without a GPU."""
    calls: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    decoded = [torch.zeros(3, 2, 2, dtype=torch.uint8)] * 2
    monkeypatch.setattr(device_decoding, "decode_jpeg", lambda jpegs, mode, device: calls.append(f"decode on {device}") or decoded)
    dataset = PackedDataset(datasets["published"], "train")
    decode_batch(read_encoded(dataset, [0, 1], [0, 0]), dataset, torch.device("cuda:1"))
    assert calls == ["wait", "decode on cuda:1"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", READERS)
def test_nvjpeg_gives_nearly_the_cpu_s_views(datasets: dict[str, Path], kind: str) -> None:
    options = {"crop": "random", "crop_size": 16, "flip": True, "scaling": "zero-one"}
    expected = loaded(PackedDataset(datasets[kind], "train"), TrainView(config("cpu", **options), 1, 2))
    found = loaded(PackedDataset(datasets[kind], "train"), TrainView(config("nvjpeg", **options), 1, 2), 2, torch.device("cuda"))
    for one, other in zip(found, expected, strict=True):
        assert one.is_cuda
        assert torch.allclose(one.cpu().mean((2, 3)), other.mean((2, 3)), atol=2 / 255)  # noise of subsampled colours differs most


def test_lanczos_is_refused_when_configured() -> None:
    with pytest.raises(ConfigError, match=r"^transform: interpolation 'lanczos' is computed by Pillow [^\n]*; with decoder 'nvjpeg'"):
        config("nvjpeg", interpolation="lanczos")


def test_the_cpu_s_decoder_is_serialised_as_before_there_was_another() -> None:
    assert "decoder" not in config("cpu").model_dump() | config("cpu").model_dump(mode="json")
    assert config("nvjpeg").model_dump(mode="json")["decoder"] == "nvjpeg"
    for decoder in ("cpu", "nvjpeg"):
        assert TransformConfig.model_validate(config(decoder).model_dump()) == config(decoder)


def test_training_and_embedding_without_a_gpu_are_refused_before_anything_is_written(packed: Path, tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"^transform\.decoder is 'nvjpeg', which needs a GPU[^\n]* is cpu; set [^\n]*$")
    training = small_training(transform={"decoder": "nvjpeg"})
    with refused:
        fit(training, PackedDataset(packed, "train"), 0, tmp_path / "run", CPU)
    with refused:
        extract(torch.nn.Identity(), training.transform, {"test": PackedDataset(packed, "test")}, tmp_path / "rows", CPU)
    assert not list(tmp_path.iterdir())
    check_decoder(training.transform, torch.device("cuda"))
