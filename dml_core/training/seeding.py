"""Every random number derives from (seed, purpose, epoch, step), never from how many were drawn before: a resumed run draws the same."""

import hashlib

import torch


def derived_seed(seed: int, purpose: str, epoch: int = 0, step: int = 0) -> int:
    """A 63-bit seed, a hash of its arguments."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{epoch}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def step_generator(seed: int, epoch: int, step: int) -> torch.Generator:
    """The CPU generator of one training step, the same on every worker."""
    return torch.Generator().manual_seed(derived_seed(seed, "step", epoch, step))
