"""Random number generators of a rank: seeding, saving to and restoring from checkpoints, deterministic algorithms."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_SEED_DISTANCE = 1_000_003  # distance between the seeds of consecutive ranks


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed the generators of Python, NumPy and torch with a different seed on each rank."""
    own = (seed + _SEED_DISTANCE * rank) % 2**63
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)  # seeds all devices


def seed_at(where: str, seed: int, number: int, rank: int) -> None:
    """Seed the generators for a point of the run, such as step 7, so that repeating it draws the same numbers."""
    raw = hashlib.blake2b(f"{where} {number} {seed}".encode(), digest_size=6).digest()
    seed_all(int.from_bytes(raw, "big"), rank)


def states(device: torch.device) -> dict[str, Any]:
    """Return the states of this rank's generators, including the one of its GPU."""
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: dict[str, Any], device: torch.device) -> None:
    """Restore the generators to the states that `states` returned."""
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)


@contextlib.contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Restore the generators to their present states at the end of a block."""
    before = states(device)
    try:
        yield
    finally:
        restore(before, device)


def make_repeatable() -> None:
    """Make torch use deterministic algorithms, also on GPUs, where they are somewhat slower.

    Call it before cuBLAS is first used: cuBLAS reads CUBLAS_WORKSPACE_CONFIG at that time.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.backends.cudnn.benchmark = False
