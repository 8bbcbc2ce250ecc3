"""A replica of the service: it decodes images, embeds them in batches and searches.

Threads decode each image as it arrives (the decoders release Python's lock), so that the network never waits for another request's large
file, and a damaged file never reaches a batch. Images of different requests share a forward pass: during one pass the next batch gathers,
and if no others wait an image is processed alone and at once.

Shapes: N images, D embedding dimensions, k neighbours.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dml_core.errors import DataError
from dml_core.index.index import Index
from dml_core.trained import load_model


@dataclass(frozen=True)
class Hit:
    """An item that was found; a larger `score` is nearer."""

    position: int
    score: float
    name: str
    class_name: str | None
    thumbnail: bytes | None


@dataclass(frozen=True)
class Answer:
    """The result for a request's images.

    Attributes:
        embeddings: float32 (N, D); None for a search.
        hits: neighbours of each image, nearest first; empty for embeddings.
        refused: why one of the images could not be decoded or embedded; the other fields are then empty.
        batch_sizes: sizes of the batches that began with an image of this request.
    """

    embeddings: NDArray[np.float32] | None = None
    hits: tuple[tuple[Hit, ...], ...] = ()
    refused: str | None = None
    batch_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Asked:
    """One image in a batch; k is 0 if only its embedding is requested."""

    view: Tensor
    k: int


@dataclass(frozen=True)
class _Found:
    row: NDArray[np.float32]
    scores: NDArray[np.float32] | None = None
    positions: NDArray[np.int64] | None = None
    refused: str | None = None
    batch_size: int | None = None  # set for the first image of a batch


class Replica:
    """One copy of the network, with the index mapped into memory.

    Args:
        model: folder of the network.
        index: folder of the index, or None.
        num_threads: decoder threads; network and search use OMP_NUM_THREADS.
        max_batch: maximum number of images per forward pass.
        on_loopback: whether Ray runs only on this machine and must not be reachable from others.
    """

    def __init__(self, model: str, index: str | None, num_threads: int, max_batch: int, on_loopback: bool = False) -> None:
        if on_loopback:
            _keep_to_loopback()
        self._model = load_model(model)
        self._index = Index.open(Path(index)) if index is not None else None
        if self._index is not None:
            self._index.check_model(self._model.identity)
        self._decoders = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        self._computer = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._max_batch = max_batch
        self._waiting: list[tuple[_Asked, asyncio.Future[_Found]]] = []
        self._working: asyncio.Task[None] | None = None
        self._compute([_Asked(self._model.view(np.zeros((64, 64, 3), np.uint8)), 1)])  # warm-up

    async def check(self) -> bool:
        """Return True, as a sign of life."""
        return True

    async def answer(self, images: Sequence[bytes], k: int, with_thumbnails: bool) -> Answer:
        """Embed a request's images, or find each one's neighbours.

        Args:
            images: encoded files, checked against the limits.
            k: neighbours of each; 0 for the embeddings.
            with_thumbnails: whether hits include their pictures.
        """
        loop = asyncio.get_running_loop()
        decoding = [
            loop.run_in_executor(self._decoders, self._model.view, data, None, f"image {number}") for number, data in enumerate(images, 1)
        ]
        views = await asyncio.gather(*decoding, return_exceptions=True)
        asked = []
        for view in views:
            if isinstance(view, DataError):
                return Answer(refused=str(view))
            if isinstance(view, BaseException):
                raise view
            asked.append(_Asked(view, k))
        found: list[_Found] = await asyncio.gather(*(self._in_a_batch(one) for one in asked))
        for number, one in enumerate(found, 1):
            if one.refused is not None:
                return Answer(refused=f"image {number}: {one.refused}")
        batch_sizes = tuple(one.batch_size for one in found if one.batch_size is not None)
        if k == 0:
            return Answer(embeddings=np.stack([one.row for one in found]), batch_sizes=batch_sizes)
        return Answer(hits=tuple(self._hits(one, with_thumbnails) for one in found), batch_sizes=batch_sizes)

    async def _in_a_batch(self, asked: _Asked) -> _Found:
        """Compute one image with all others waiting. Serve's own `batch` closes a batch on arrival, before the network is free."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[_Found] = loop.create_future()
        self._waiting.append((asked, found))
        if self._working is None:
            self._working = loop.create_task(self._work())
        return await found

    async def _work(self) -> None:
        """Compute batches until no image waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            try:
                results = await loop.run_in_executor(self._computer, self._compute, [asked for asked, _ in batch])
            except Exception as error:  # noqa: BLE001 - the waiting requests get the error; the next batch has other images
                for _, found in batch:
                    if not found.done():
                        found.set_exception(error)
                continue
            for (_, found), result in zip(batch, results, strict=True):
                if not found.done():  # its request may have been abandoned
                    found.set_result(result)
        self._working = None

    def _compute(self, asked: list[_Asked]) -> list[_Found]:
        """Embed a whole batch at once, and search for those images that want neighbours."""
        rows_ND = self._model.embed_views([one.view for one in asked])
        has_angles = self._model.metric == "cosine"
        found = [_Found(row_D, refused=_why_not(row_D, has_angles and one.k > 0)) for one, row_D in zip(asked, rows_ND, strict=True)]
        found[0] = replace(found[0], batch_size=len(asked))
        searching = [place for place, one in enumerate(asked) if one.k > 0 and found[place].refused is None]
        if self._index is not None and searching:
            scores, positions = self._index.search(rows_ND[searching], max(asked[place].k for place in searching))
            for row, place in enumerate(searching):
                k = asked[place].k
                found[place] = replace(found[place], scores=scores[row, :k], positions=positions[row, :k])
        return found

    def _hits(self, found: _Found, with_thumbnails: bool) -> tuple[Hit, ...]:
        assert self._index is not None
        assert found.scores is not None
        assert found.positions is not None
        hits = []
        for score, position in zip(found.scores.tolist(), found.positions.tolist(), strict=True):
            item = self._index.item(position)
            hits.append(Hit(position, score, item.name, item.class_name, item.thumbnail if with_thumbnails else None))
        return tuple(hits)


def _keep_to_loopback() -> None:
    """Restrict the port that Serve opens in each replica, for deployments that call each other, to loopback.

    Serve opens it on every interface, after the replica is created, used or not, without a setting for it and without Ray's token. This is
    private to Ray 2.60: check it when Ray is upgraded; a test checks every listening port.
    """
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", "127.0.0.1"))


def _why_not(row_D: NDArray[np.float32], needs_direction: bool) -> str | None:
    """Return why an embedding is unusable, or None: one such image must not fail the others of its batch."""
    square = float(np.dot(row_D, row_D))
    if not np.isfinite(square):
        return "its embedding is not finite"
    return "its embedding is zero and has no cosine similarity" if needs_direction and square == 0 else None
