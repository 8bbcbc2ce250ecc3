"""A trained network outside of any run: images in, embeddings out, as in the run's own evaluation.

A folder holds the description `network.json` and the weights `network.pt`, a plain state dict. MLflow's models contain such a folder,
`tasks.models` makes one from a run's checkpoint, and `dml models export` writes one whose network is a graph independent of this package
(`dml_core.exported`). Reading a folder never executes code from it, except that of a `.pt2` graph: torch may unpickle parts of that, so
open only those that you trust.

Shapes: N images, D embedding dimensions, H and W in pixels.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from itertools import islice, zip_longest
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dml_core.config import parse
from dml_core.data.store.decode import decode_upright, orientation, upright
from dml_core.data.store.rows import Box
from dml_core.data.views.transform_config import Scaling, TransformConfig
from dml_core.data.views.transforms import scale, test_pixels
from dml_core.errors import ConfigError, DataError, StoreError, first_line
from dml_core.files import file_sha256, read_regular, replace_folder, write_errors
from dml_core.float32 import full_float32
from dml_core.models.config import ModelConfig
from dml_core.models.embedder import Embedder, network_weights
from dml_core.network_description import (
    DESCRIPTION_FILE,
    REMEDY,
    WEIGHTS_FILE,
    Forward,
    Metric,
    NetworkDescription,
    check_file,
    read_description,
    write_description,
)

FINDERS = "dml_core.networks"  # group of entry points
AnyImage = Path | str | bytes | Image.Image | NDArray[np.uint8] | Tensor


class TrainedModel:
    """A trained network with the decoding and preprocessing of its evaluation.

    Args:
        description: the network's description.
        identity: identity of the training step, hexadecimal, followed by the epoch of the weights if that is not the last (`-oracle`), and
            by `-fp16` or `-int8` if the network is exported in that precision: their embeddings differ, and indexes refuse those of
            another identity.
        forward: maps test views, uint8 (N, 3, H, W), to embeddings (N, D).

    Attributes:
        num_dimensions: embedding dimension D.
        metric: metric with which the run compares embeddings.
        title: display name.
        weights_sha256: SHA-256 of the file with the weights, for an export of those that it was made from; None if that is not known.
    """

    def __init__(self, description: NetworkDescription, identity: str, forward: Forward) -> None:
        self.description = description
        self.identity = identity
        self.num_dimensions, self.metric, self.title = description.embedding_dim, description.metric, description.title
        self.weights_sha256 = description.file_sha256 if description.graph is None else description.graph.weights_sha256
        self._forward = forward

    def embed(
        self, images: AnyImage | Iterable[AnyImage], batch_size: int = 64, boxes: Iterable[Box | None] | None = None
    ) -> NDArray[np.float32]:
        """Return embeddings (N, D) in the order of the images, as in the run's own evaluation.

        Args:
            images: one or more images (a list, a generator, an array or tensor of four axes). Each is a path, the bytes of an encoded file,
                a Pillow image, or RGB pixels as an array, uint8 (H, W, 3), or a tensor, uint8 (3, H, W). Photographs are rotated by their
                EXIF orientation.
            batch_size: images per forward pass; affects memory, and embeddings only in their last bits.
            boxes: (left, top, right, bottom) in pixels of each rotated image, or None, for a network trained on the contents of boxes. An
                image without a box is used whole.

        Returns:
            float32 (N, D); N = 1 for one image.

        Raises:
            DataError: an input is not an image, or the numbers of boxes and images differ; the message names the image.
            ConfigError: the batch size is below 1.
        """
        if not isinstance(batch_size, Integral) or batch_size < 1:
            raise ConfigError(f"batch_size {batch_size!r}: expected a whole number from 1")
        views = (self.view(image, box, f"image {number}") for number, (image, box) in enumerate(_with_boxes(images, boxes)))
        rows: list[NDArray[np.float32]] = []
        while batch := list(islice(views, batch_size)):
            embedded, refused = self.try_views(batch)
            for place, reason in refused.items():
                raise DataError(f"image {len(rows) * batch_size + place}: {reason}")
            rows.append(embedded)
        return np.concatenate(rows) if rows else np.empty((0, self.num_dimensions), np.float32)

    def view(self, image: AnyImage, box: Box | None = None, name: str = "image") -> Tensor:
        """Return the test view of one image, uint8 (3, H, W): decoded, cut to its box, resized and cropped as in the run.

        Args:
            image: as in `embed`.
            box: the image's box.
            name: name used in errors for an image without a path.

        Raises:
            DataError: the image or the box is invalid.
        """
        if box is not None and not _is_box(box):
            raise DataError(
                f"{name}: box {box!r} is not (left, top, right, bottom) in pixels; boxes is a list with one box, or None, per image"
            )
        return test_pixels(_decoded(image, name), self.description.transform, box)

    def embed_views(self, views: Sequence[Tensor]) -> NDArray[np.float32]:
        """Return the embeddings (N, D) of test views, uint8 (3, H, W).

        Raises:
            DataError: a view is something else, or the network does not take its size.
        """
        for view in views:
            if not isinstance(view, Tensor) or view.dtype != torch.uint8 or view.ndim != 3 or len(view) != 3:
                raise DataError(f"expected views as `view` returns them, uint8 of shape (3, height, width), found {type(view).__name__}")
        rows, refused = self.try_views(views)
        for reason in refused.values():
            raise DataError(reason)
        return rows

    def try_views(self, views: Sequence[Tensor]) -> tuple[NDArray[np.float32], dict[int, str]]:
        """Return the embeddings (N, D) of test views, and place -> reason of those that the network does not take; their rows are not set.

        Views of the same size share a forward pass.
        """
        rows, refused = np.empty((len(views), self.num_dimensions), np.float32), dict[int, str]()
        by_size: dict[torch.Size, list[int]] = {}
        for place, view in enumerate(views):
            by_size.setdefault(view.shape, []).append(place)
        for places in by_size.values():
            for place, result in zip(places, self._embed_size([views[place] for place in places]), strict=True):
                if isinstance(result, str):
                    refused[place] = result
                else:
                    rows[place] = result
        return rows, refused

    def _embed_size(self, views: list[Tensor]) -> list[NDArray[np.float32] | str]:
        """Return each embedding of views of one size, or why the network does not take it: it is too small, or too large for the memory."""
        try:
            return [*self._forward(torch.stack(views))]
        except Exception as error:
            transform = self.description.transform
            if transform.crop_size is not None or isinstance(transform.test_resize, tuple):
                raise  # all views have one size, so the cause is another
            if len(views) > 1:
                return [result for view in views for result in self._embed_size([view])]
            height, width = views[0].shape[1:]
            return [f"the network does not take its {width} x {height} pixels ({first_line(error)})"]


def load_model(source: str | Path, device: str | torch.device | None = None) -> TrainedModel:
    """Open a trained network.

    Args:
        source: folder of a network, as in an MLflow model, or made from a run by `tasks.models`, or written by `dml models export`. Where
            dml-repro is installed, also any name of a trained network that `dml` takes, such as "synthetic/softtriple".
        device: where to run; by default the GPU if there is one. Graphs of ONNX need onnxruntime-gpu for it, those of `torch.export` run
            on the CPU.

    Raises:
        ConfigError: no network is there, no such device exists, or an export cannot run on it.
        StoreError: the network is damaged or of a newer format.
    """
    folder = _network_folder(str(source))
    description = read_description(folder)
    if description.graph is None:
        forward = _on_device(load_network(folder, description), description.transform.scaling, device)
    else:
        from dml_core.exported import open_graph

        check_file(folder, description)
        forward = open_graph(folder, description.graph, device)
    identity = description.identity or file_sha256(folder / description.file)[:32]  # of a network saved without one
    if description.graph is not None and description.graph.precision != "fp32":
        identity += f"-{description.graph.precision}"
    return TrainedModel(description, identity, forward)


def _on_device(network: Embedder, scaling: Scaling, device: str | torch.device | None) -> Forward:
    """Return a network on a device as a function of test views, computed as in the run's own evaluation."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        network.to(chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device '{device}' cannot be used ({first_line(error)}); name one that is here, as 'cpu'") from None

    def forward(pixels: Tensor) -> NDArray[np.float32]:
        with torch.no_grad(), full_float32():
            return network.embed(scale(pixels.to(chosen), scaling)).float().cpu().numpy()

    return forward


def load_network(folder: Path, description: NetworkDescription) -> Embedder:
    """Load the network of a folder with weights, on the CPU, ready to embed.

    Raises:
        StoreError: the weights are missing, damaged or of another network.
    """
    check_file(folder, description)
    backbone = description.model.backbone.model_copy(update={"weights": "none", "weights_sha256": None})  # a stranger's would be downloaded
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn
        network = Embedder(description.model.model_copy(update={"backbone": backbone}), description.num_classes).float()
    try:
        network.load_state_dict(torch.load(folder / WEIGHTS_FILE, map_location="cpu", weights_only=True))
    except Exception as error:  # noqa: BLE001 - torch may raise anything for bad bytes
        raise StoreError(f"{folder / WEIGHTS_FILE}: not the network's weights ({first_line(error)}); {REMEDY}") from None
    return network.eval()


def save_network(
    folder: Path,
    training: Mapping[str, Any],
    num_classes: int,
    system_state: Mapping[str, Tensor],
    identity: str | None = None,
    metric: Metric = "cosine",
    title: str = "",
) -> NetworkDescription:
    """Write a trained network as a folder, atomically, and return its description.

    Args:
        folder: to be created; an existing one is replaced.
        training: the run's training configuration as plain values.
        num_classes: number of training classes.
        system_state: a checkpoint's state dict of model and loss; the loss's part is not saved.
        identity: identity of the training step.
        metric: metric with which the run compares embeddings.
        title: display name.
    """
    model = json.loads(json.dumps(training["model"]))
    model["backbone"] |= {"weights": "none", "weights_sha256": None}  # the state contains them
    config = parse(ModelConfig, model, "model")
    network = Embedder(config, num_classes)
    state = network_weights(system_state)
    network.load_state_dict(state)
    description = NetworkDescription(
        model=config,
        transform=parse(TransformConfig, training["transform"], "transform"),
        num_classes=num_classes,
        embedding_dim=int(network.head.embedding_dim),
        identity=identity,
        metric=metric,
        title=title,
    )

    def write(beside: Path) -> None:
        try:
            torch.save(state, beside / WEIGHTS_FILE)
        except RuntimeError as error:  # as on a full disk
            raise OSError(first_line(error)) from None
        write_description(beside, description)

    write_folder(folder, write)
    return read_description(folder)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder next to its destination and rename it, so that it appears whole or not at all. An existing folder is replaced.

    A link stays one; the folder that it leads to is written.

    Raises:
        StoreError: the folder cannot be written.
    """
    with write_errors(f"{folder}:", "free or change the place"):
        folder = Path(os.path.realpath(folder))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
            beside = Path(made) / "new"
            beside.mkdir()
            write(beside)
            replace_folder(beside, folder)


def _network_folder(text: str) -> Path:
    """Return the folder with the description: `text`, that of the file `text`, or the one where MLflow keeps a model's artifacts.

    Otherwise packages that register a function under `FINDERS` are asked; it returns the folder, or None for a text that it does not know.
    """
    source = Path(text)
    places = (source, source.parent) if source.is_file() else (source, source / "artifacts" / "network", source / "network")
    for folder in places:
        if (folder / DESCRIPTION_FILE).is_file():
            return folder
    for finder in entry_points(group=FINDERS):
        folder_by_name: Path | None = finder.load()(text)
        if folder_by_name is not None:
            return folder_by_name
    if not source.exists():
        raise ConfigError(f"{source}: no such folder or file; expected a network's folder, or a run by its name where `dml` takes it")
    raise ConfigError(
        f"{source}: no {DESCRIPTION_FILE} there, so it is no network's folder; `dml models` lists the runs and where their networks are"
    )


def _with_boxes(images: AnyImage | Iterable[AnyImage], boxes: Iterable[Box | None] | None) -> Iterator[tuple[AnyImage, Box | None]]:
    """Yield each image with its box.

    Raises:
        DataError: `images` is not an image or several, `boxes` not a list, or their numbers differ.
    """
    if _is_one_image(images):
        images = [images]  # type: ignore[list-item]
    elif not isinstance(images, Iterable):
        raise DataError(f"expected an image or a list of images, found {type(images).__name__}")
    if boxes is None:
        yield from ((image, None) for image in images)  # type: ignore[misc]
        return
    if not isinstance(boxes, Iterable):
        raise DataError(f"expected a list of boxes, one or None per image, found {type(boxes).__name__}")
    nothing: Any = object()
    for image, box in zip_longest(images, boxes, fillvalue=nothing):
        if image is nothing or box is nothing:
            raise DataError(f"{'more' if image is nothing else 'fewer'} boxes than images; give each image a box or None")
        yield image, box


def _is_box(box: Any) -> bool:
    try:
        return len(box) == 4 and all(map(math.isfinite, box))
    except TypeError:  # no sequence of numbers
        return False


def _is_one_image(images: Any) -> bool:
    """Return whether this is a single image; arrays of four axes, of objects and of paths hold several."""
    if not isinstance(images, np.ndarray | Tensor):
        return isinstance(images, Path | str | bytes | bytearray | Image.Image)
    has_paths = isinstance(images, np.ndarray) and images.dtype.kind == "U" and images.ndim == 1
    return images.dtype != object and images.ndim != 4 and not has_paths


def _decoded(image: AnyImage, name: str) -> Tensor:
    """Decode an image to uint8 (3, H, W), RGB, upright, with the decoder of the run's images.

    Raises:
        DataError: the input is not an image.
    """
    if isinstance(image, str | Path):
        name = str(image)
        try:
            image = read_regular(Path(image))
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            raise DataError(f"{name}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if isinstance(image, bytes | bytearray):
        try:
            return decode_upright(bytes(image))
        except ValueError as error:
            raise DataError(f"{name}: {error}") from None
    if isinstance(image, Image.Image):
        return _of_pillow(image, name)
    if not isinstance(image, np.ndarray | Tensor):
        raise DataError(f"{name}: expected a path, bytes, a Pillow image, an array or a tensor, found {type(image).__name__}")
    pixels = torch.from_numpy(np.array(image)) if isinstance(image, np.ndarray) and image.dtype == np.uint8 else image
    layout, channels = ("(3, height, width)", 0) if isinstance(image, Tensor) else ("(height, width, 3)", 2)
    if pixels.dtype != torch.uint8 or pixels.ndim != 3 or pixels.shape[channels] != 3 or 0 in pixels.shape:
        raise DataError(f"{name}: expected RGB pixels, uint8 of shape {layout}, found {image.dtype} of shape {tuple(image.shape)}")
    assert isinstance(pixels, Tensor)
    return pixels.movedim(channels, 0).cpu().contiguous()


def _of_pillow(image: Image.Image, name: str) -> Tensor:
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{name}: of more than 8 bits per channel; convert it to RGB")
    try:
        return upright(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1), orientation(image)).contiguous()
    except Exception as error:  # noqa: BLE001 - Pillow raises errors of a dozen kinds where a file is damaged
        raise DataError(f"{name}: cannot be decoded ({first_line(error)})") from None
