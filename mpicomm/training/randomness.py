"""The random numbers of a rank: seeded, kept in checkpoints, and made repeatable."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

_APART = 1_000_003  # ranks that follow each other have seeds that do not


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed Python's, NumPy's and torch's generators; each rank gets numbers of its own."""
    own = (seed + _APART * rank) % 2**63
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)  # on all devices


def states(device: torch.device) -> dict[str, Any]:
    """Return the states of a rank's generators."""
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: dict[str, Any], device: torch.device) -> None:
    """Undo what has happened to the generators since `states`."""
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)


def make_repeatable() -> None:
    """Have torch use algorithms that give the same bits each time, also on GPUs, where that costs some speed.

    cuBLAS reads its variable when it is first used, so this must come before.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.backends.cudnn.benchmark = False
