"""Random numbers derived from (seed, purpose, epoch, step), independent of earlier draws: a resumed run draws the same."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derived_seed(seed: int, purpose: str, epoch: int = 0, step: int = 0) -> int:
    """Return a 63-bit seed, a hash of the arguments."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{epoch}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(number: int, device: torch.device) -> Iterator[None]:
    """Start torch's global streams, used by dropout and stochastic depth, at `number`, and restore them afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # without a GPU `torch.manual_seed` formats the call stack three times, for devices that may be initialised later
        (torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed)(number)
        yield
