"""A trained network, outside of any run: images in, embeddings out, as the run's own evaluation gives them.

A folder holds it as `network.json` (what it is) and `network.pt` (its weights, a plain state dict): MLflow's models have such a folder,
`tasks.use` makes one of a run's checkpoint, and `dml models export` writes one whose network is a graph that needs none of this package
(`dml_core.exported`). Reading it executes nothing that is in it.

Shapes: N images, D embedding dimensions, H and W in pixels.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dml_core.config import Config, parse
from dml_core.data.store.decode import decode_rgb
from dml_core.data.store.rows import Box
from dml_core.data.views.transform_config import TransformConfig
from dml_core.data.views.transforms import scale, test_pixels
from dml_core.errors import ConfigError, DataError, StoreError
from dml_core.models.config import ModelConfig
from dml_core.models.embedder import Embedder

DESCRIPTION_FILE, WEIGHTS_FILE = "network.json", "network.pt"
Metric = Literal["cosine", "euclidean"]  # as `EvaluationConfig` has it, whose code MLflow's copy does without
Precision = Literal["fp32", "fp16", "int8"]
AnyImage = Path | str | bytes | Image.Image | NDArray[np.uint8]
Forward = Callable[[Tensor], NDArray[np.float32]]


class GraphFile(Config):
    """The file of an exported network.

    Attributes:
        format: what runs it.
        name: the file, beside the description.
        precision: of its weights and arithmetic.
    """

    format: Literal["onnx", "torch-export"]
    name: str
    precision: Precision


class NetworkDescription(Config):
    """What a trained network is: all that its rows depend on but its weights.

    Attributes:
        model: the network; its weights are in the file beside this.
        transform: the protocol's views, of which the test view is taken.
        num_classes: of the training set: some heads have a layer of that size.
        embedding_dim: D.
        identity: of the step that trained it; none in what was written before it was kept.
        metric: by which its run compares embeddings.
        title: what a person calls it.
        graph: of an exported network, where it is; None for a state dict.
    """

    model: ModelConfig
    transform: TransformConfig
    num_classes: int
    embedding_dim: int
    identity: str | None = None
    metric: Metric = "cosine"
    title: str = ""
    graph: GraphFile | None = None


class TrainedModel:
    """A trained network with the decoding and preprocessing that it was evaluated with.

    Args:
        description: what it is.
        identity: of the step that trained it, hexadecimal; what an index carries.
        forward: test views, uint8 (N, 3, H, W), to embeddings (N, D).
    """

    def __init__(self, description: NetworkDescription, identity: str, forward: Forward) -> None:
        self.description = description
        self.identity = identity
        self._forward = forward

    @property
    def num_dimensions(self) -> int:
        """D."""
        return self.description.embedding_dim

    @property
    def metric(self) -> Metric:
        """By which its run compares embeddings."""
        return self.description.metric

    @property
    def title(self) -> str:
        """What a person calls it."""
        return self.description.title

    def embed(self, images: Sequence[AnyImage], batch_size: int = 64, boxes: Sequence[Box | None] | None = None) -> NDArray[np.float32]:
        """Embeddings (N, D) in the order of the images, as the run's own evaluation gives them.

        Args:
            images: each a path, the bytes of an encoded file, a Pillow image, or RGB pixels, uint8 (H, W, 3).
            batch_size: images that go through the network at a time; memory grows with it, rows do not change but for their last bits.
            boxes: (left, top, right, bottom) of each image or None, for a network that was trained on what is in the box. An image without
                one is taken whole.

        Raises:
            DataError: one is no image; the line says which.
        """
        places = list(boxes) if boxes is not None else [None] * len(images)
        views = (self.view(image, box, f"image {number}") for number, (image, box) in enumerate(zip(images, places, strict=True)))
        rows = [self.embed_views(batch) for batch in _batches(views, batch_size)]
        return np.concatenate(rows) if rows else np.empty((0, self.num_dimensions), np.float32)

    def view(self, image: AnyImage, box: Box | None = None, name: str = "image") -> Tensor:
        """The test view of one image, uint8 (3, H, W): decoded, cut to its box, resized and cropped as in the run.

        Args:
            image: as `embed` takes it.
            box: of the image.
            name: what an error calls an image that has no path.

        Raises:
            DataError: it is none.
        """
        return test_pixels(_decoded(image, name), self.description.transform, box)

    def embed_views(self, views: Sequence[Tensor]) -> NDArray[np.float32]:
        """Embeddings (N, D) of test views; those of one size go through the network together."""
        rows = np.empty((len(views), self.num_dimensions), np.float32)
        by_size: dict[torch.Size, list[int]] = {}
        for place, view in enumerate(views):
            by_size.setdefault(view.shape, []).append(place)
        for places in by_size.values():
            rows[places] = self._forward(torch.stack([views[place] for place in places]))
        return rows


def load_model(source: str | Path, device: str | torch.device | None = None) -> TrainedModel:
    """Open a trained network.

    Args:
        source: the folder of a network, as MLflow's model has it, `tasks.use` makes it of a run, and `dml models export` writes it.
        device: where it runs; a GPU where there is one, unless something is said. Exported networks run on the CPU.

    Raises:
        ConfigError: nothing of the kind is there.
        StoreError: what is there is damaged.
    """
    folder = _network_folder(Path(source))
    description = read_description(folder)
    if description.graph is not None:
        from dml_core.exported import open_graph

        identity = description.identity or _file_identity(folder / description.graph.name)
        return TrainedModel(description, identity, open_graph(folder, description.graph))
    network = load_network(folder, description)
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network.to(chosen)

    @torch.no_grad()
    def forward(pixels: Tensor) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = network.embed(scale(pixels.to(chosen), description.transform.scaling)).float().cpu().numpy()
        return rows

    return TrainedModel(description, description.identity or _file_identity(folder / WEIGHTS_FILE), forward)


def load_network(folder: Path, description: NetworkDescription) -> Embedder:
    """The network of a folder with weights, on the CPU, ready to embed.

    Raises:
        StoreError: its weights are missing, damaged, or another network's.
    """
    network = Embedder(description.model, description.num_classes)
    try:
        network.load_state_dict(torch.load(folder / WEIGHTS_FILE, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise StoreError(f"{folder / WEIGHTS_FILE}: the network's weights are gone; make the folder again") from None
    except Exception as error:  # noqa: BLE001 - whatever torch has against the bytes
        raise StoreError(
            f"{folder / WEIGHTS_FILE}: not the network's weights ({str(error).splitlines()[0]}); make the folder again"
        ) from None
    return network.eval()


def read_description(folder: Path) -> NetworkDescription:
    """What the network of a folder is.

    Raises:
        StoreError: the description is damaged.
        ConfigError: it is of no such network.
    """
    path = folder / DESCRIPTION_FILE
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read ({error}); make the folder again") from None
    return parse(NetworkDescription, values, str(path))


def save_network(
    folder: Path,
    training: Mapping[str, Any],
    num_classes: int,
    system_state: Mapping[str, Tensor],
    identity: str | None = None,
    metric: Metric = "cosine",
    title: str = "",
) -> NetworkDescription:
    """Write a trained network as a folder, whole or not at all; returns its description.

    Args:
        folder: to be made; one that is there is left as it is where it is the same network.
        training: the run's training configuration as plain values.
        num_classes: of the training set.
        system_state: a checkpoint's state dict of model and loss; the loss's part is left behind.
        identity: of the step that trained it.
        metric: by which its run compares embeddings.
        title: what a person calls it.
    """
    model = json.loads(json.dumps(training["model"]))
    model["backbone"]["weights"] = "none"  # they are in the state
    config = parse(ModelConfig, model, "model")
    network = Embedder(config, num_classes)
    state = {name.removeprefix("model."): value for name, value in system_state.items() if name.startswith("model.")}
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
        torch.save(state, beside / WEIGHTS_FILE)
        write_description(beside, description)

    write_folder(folder, write)
    return description


def write_description(folder: Path, description: NetworkDescription) -> None:
    """Write `network.json`."""
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description.model_dump(mode="json", exclude_none=True), indent=1) + "\n")


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Have a folder written beside its place and renamed: it is there whole or not at all. One that is there already is replaced.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
            beside, aside = Path(made) / "new", Path(made) / "old"
            beside.mkdir()
            write(beside)
            if folder.exists():
                folder.rename(aside)
            beside.rename(folder)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error.strerror or error}); free or change the place") from None


def _network_folder(source: Path) -> Path:
    """The folder with the description: the one named, that of the file named, or the one in which MLflow keeps a model's artifacts."""
    places = (source, source.parent) if source.is_file() else (source, source / "artifacts" / "network", source / "network")
    for folder in places:
        if (folder / DESCRIPTION_FILE).is_file():
            return folder
    if not source.exists():
        raise ConfigError(f"{source}: no such folder or file; expected a network's folder, or a run by its name where `dml` takes it")
    raise ConfigError(
        f"{source}: no {DESCRIPTION_FILE} there, so it is no network's folder; `dml models` lists the runs and where their networks are"
    )


def _file_identity(path: Path) -> str:
    """Of a network that was written before identities were kept: that of its weights."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _batches(views: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    for view in views:
        batch.append(view)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _decoded(image: AnyImage, name: str) -> Tensor:
    """uint8 (3, H, W), RGB, by the decoder that the run's images went through.

    Raises:
        DataError: not an image.
    """
    if isinstance(image, (str, Path)):
        name = str(image)
        try:
            image = Path(image).read_bytes()
        except OSError as error:
            raise DataError(f"{name}: cannot be read ({error.strerror or error})") from None
    if isinstance(image, Image.Image):
        if image.mode.startswith(("I", "F")):
            raise DataError(f"{name}: of more than 8 bits per channel; convert it to RGB")
        image = np.asarray(image.convert("RGB"))
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise DataError(f"{name}: expected RGB pixels, uint8 of shape (height, width, 3), found {image.dtype} of shape {image.shape}")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    try:
        return decode_rgb(image)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
