"""The replicas as the HTTP server calls them: one in the server's own process here, several on Ray in `ray_replicas`."""

import asyncio
from typing import Any

from starlette.exceptions import HTTPException

from dml_core.errors import DmlError
from tasks.serving import limits, metrics
from tasks.serving.replica import Answer

CHECK_SECONDS = 5.0


class ServiceError(DmlError):
    """The service cannot be started."""


class Replicas:
    """The replicas of one network and index: this class has a single one, in the server's process, which computes in its own threads."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    async def answer(self, images: list[bytes], k: int = 0, with_thumbnails: bool = False) -> Answer:
        """Return the embeddings of images or, with k > 0, the k nearest neighbours of each.

        Raises:
            HTTPException: an image cannot be decoded (422), or no replica answers in time (503).
        """
        answer = await self._in_time("answer", images, k, with_thumbnails)
        if answer.refused is not None:
            raise HTTPException(422, answer.refused)
        metrics.IMAGES.inc(len(images))
        for size in answer.batch_sizes:
            metrics.BATCH_IMAGES.observe(size)
        return answer

    async def neighbours(self, position: int, k: int, with_thumbnails: bool) -> Answer:
        """Return the k nearest neighbours of the index's item at a position, without the item.

        Raises:
            HTTPException: no replica answers in time (503).
        """
        return await self._in_time("neighbours", position, k, with_thumbnails)

    async def check(self) -> bool:
        """Return whether a replica answers and can compute."""
        try:
            return bool(await asyncio.wait_for(self._replica.check(), CHECK_SECONDS))
        except TimeoutError:
            return False

    async def _call(self, method: str, *arguments: Any) -> Answer:
        """Call a method of one of the replicas."""
        answer: Answer = await getattr(self._replica, method)(*arguments)
        return answer

    async def _in_time(self, method: str, *arguments: Any) -> Answer:
        try:
            async with asyncio.timeout(limits.ANSWER_SECONDS):
                return await self._call(method, *arguments)
        except TimeoutError:
            raise HTTPException(503, f"no answer within {limits.ANSWER_SECONDS:g} s; retry later") from None
