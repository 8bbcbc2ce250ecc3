"""A replica of the service: it decodes images, embeds them in batches and searches, in the server's process or on Ray (`ray_replicas`).

Threads decode each image as it arrives (the decoders release Python's lock), so that the network never waits for another request's large
file, and a damaged file never reaches a batch. Images of different requests share a forward pass: during one pass the next batch gathers,
and if no others wait an image is processed alone and at once.

Shapes: N images, D embedding dimensions, k neighbours.
"""

import asyncio
import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from dml_core.errors import DataError
from dml_core.index.index import Index
from dml_core.trained import TrainedModel

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Hit:
    """An item of the index, as a neighbour of an image."""

    position: Annotated[int, Field(description="Position in the index, from 0; /v1/neighbours takes it.")]
    score: Annotated[float, Field(description="The cosine, or the negative Euclidean distance; larger is nearer.")]
    name: str
    class_name: str | None
    thumbnail: Annotated[str | None, Field(description="A data: URL, if requested and available.")]


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
class _Query:
    """One image of a batch; k is 0 if only its embedding is requested."""

    view: Tensor
    k: int


@dataclass
class _Result:
    row: NDArray[np.float32]
    refused: str | None
    nearest: tuple[NDArray[np.float32], NDArray[np.int64]] | None = None  # scores and positions of k neighbours
    batch_size: int | None = None  # set for the first image of a batch


class Replica:
    """One copy of the network, with the index mapped into memory, which is known to be of this network.

    Args:
        num_threads: decoder threads; network and search use OMP_NUM_THREADS.
        max_batch: maximum number of images per forward pass.
    """

    def __init__(self, model: TrainedModel, index: Index | None, num_threads: int, max_batch: int) -> None:
        self._model = model
        self._index = index
        self._decoders = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        self._computer = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._max_batch = max_batch
        self._waiting: list[tuple[_Query, asyncio.Future[_Result]]] = []
        self._working: asyncio.Task[None] | None = None
        self._has_failed = False  # the last computation
        self._trial = [_Query(self._model.view(np.zeros((64, 64, 3), np.uint8)), 1)]
        self._compute(self._trial)  # warm-up

    async def check(self) -> bool:
        """Return whether the replica can compute: after one that failed, as on a GPU with an error that stays, another one is tried."""
        if self._has_failed:
            with suppress(Exception):
                await self._computed(self._compute, self._trial)
        return not self._has_failed

    async def answer(self, images: Sequence[bytes], k: int, with_thumbnails: bool) -> Answer:
        """Embed a request's encoded images, which are checked against the limits, or with k > 0 find each one's k nearest neighbours."""
        loop = asyncio.get_running_loop()
        decoding = [
            loop.run_in_executor(self._decoders, self._model.view, data, None, f"image {number}") for number, data in enumerate(images, 1)
        ]
        try:
            views = await asyncio.gather(*decoding)
        except DataError as error:
            return Answer(refused=str(error))
        results = await asyncio.gather(*(self._in_a_batch(_Query(view, k)) for view in views))
        for number, result in enumerate(results, 1):
            if result.refused is not None:
                return Answer(refused=f"image {number}: {result.refused}")
        batch_sizes = tuple(result.batch_size for result in results if result.batch_size is not None)
        if k == 0:
            return Answer(embeddings=np.stack([result.row for result in results]), batch_sizes=batch_sizes)
        hits = []
        for result in results:
            assert result.nearest is not None
            hits.append(self._hits(*result.nearest, with_thumbnails))
        return Answer(hits=tuple(hits), batch_sizes=batch_sizes)

    async def neighbours(self, position: int, k: int, with_thumbnails: bool) -> Answer:
        """Find the k neighbours (fewer in a smaller index) of the index's item at a position, without the item, by its stored vector."""
        assert self._index is not None
        vectors_1D = self._index.vectors_ND[position : position + 1]
        scores_1K, positions_1K = await self._computed(self._index.search, vectors_1D, k + 1)
        scores_K, positions_K = scores_1K[0], positions_1K[0]
        others = np.flatnonzero(positions_K != position)[:k]
        return Answer(hits=(self._hits(scores_K[others], positions_K[others], with_thumbnails),))

    async def _in_a_batch(self, query: _Query) -> _Result:
        """Compute one image with all others waiting. Serve's own `batch` closes a batch on arrival, before the network is free."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_Result] = loop.create_future()
        self._waiting.append((query, result))
        if self._working is None:
            self._working = loop.create_task(self._work())
        return await result

    async def _work(self) -> None:
        """Compute batches until no image waits."""
        while waiting := [entry for entry in self._waiting if not entry[1].done()]:  # without those of abandoned requests
            batch, self._waiting = waiting[: self._max_batch], waiting[self._max_batch :]
            try:
                results = await self._computed(self._compute, [query for query, _ in batch])
            except Exception as error:  # noqa: BLE001 - the waiting requests get the error; the next batch has other images
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
        self._waiting, self._working = [], None

    async def _computed(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Return what a function of network or index gives in the thread of computations, one at a time."""
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._computer, function, *arguments)
        except Exception:
            self._has_failed = True
            raise
        self._has_failed = False
        return result

    def _compute(self, queries: list[_Query]) -> list[_Result]:
        """Embed a whole batch at once, and search for those images that want neighbours."""
        rows_ND, not_taken = self._model.try_views([query.view for query in queries])
        has_angles = self._index is not None and self._index.metric == "cosine"
        results = [
            _Result(row_D, not_taken.get(place) or _why_not(row_D, has_angles and query.k > 0))
            for place, (query, row_D) in enumerate(zip(queries, rows_ND, strict=True))
        ]
        results[0].batch_size = len(queries)
        searching = [number for number, query in enumerate(queries) if query.k > 0 and results[number].refused is None]
        if self._index is not None and searching:
            scores, positions = self._index.search(rows_ND[searching], max(queries[number].k for number in searching))
            for row, number in enumerate(searching):
                results[number].nearest = scores[row, : queries[number].k], positions[row, : queries[number].k]
        return results

    def _hits(self, scores_K: NDArray[np.float32], positions_K: NDArray[np.int64], with_thumbnails: bool) -> tuple[Hit, ...]:
        assert self._index is not None
        hits = []
        for score, position in zip(scores_K.tolist(), positions_K.tolist(), strict=True):
            item = self._index.item(position)
            picture = None
            if with_thumbnails and item.thumbnail is not None:
                picture = "data:image/webp;base64," + base64.b64encode(item.thumbnail).decode()
            hits.append(Hit(position, score, item.name, item.class_name, picture))
        return tuple(hits)


def _why_not(row_D: NDArray[np.float32], needs_direction: bool) -> str | None:
    """Return why an embedding is unusable, or None: one such image must not fail the others of its batch."""
    square = float(np.dot(row_D, row_D))
    if not np.isfinite(square):
        return "its embedding is not finite"
    return "its embedding is zero and has no cosine similarity" if needs_direction and square == 0 else None
