"""Random number generators of a rank: seeding, saving to and restoring from checkpoints, deterministic algorithms."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

# Between the seeds of consecutive ranks. It is larger than the differences between seeds that users choose: with seeds
# 0 and 1, rank 1 of the first run must not draw the numbers of rank 0 of the second one.
_SEED_DISTANCE = 1_000_003


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed the generators of Python, NumPy and torch with a different seed on each rank."""
    own = (seed + _SEED_DISTANCE * rank) % 2**63
    _seed_host(own)
    torch.manual_seed(own)  # seeds all devices


def _seed_host(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_at(point: str, seed: int, number: int, rank: int) -> None:
    """Seed the generators for a point of the run, such as step 7, so that repeating it draws the same numbers."""
    raw = hashlib.blake2b(f"{point} {number} {seed}".encode(), digest_size=6).digest()
    seed_all(int.from_bytes(raw, "big"), rank)


def drawn(make: Callable[[], Iterator[T]], seed: int) -> Iterator[T]:
    """Yield the items of an iterator that draws from generators of its own, which start at `seed`.

    The generators of the program on the CPU are unchanged between the items.

    Args:
        make: Returns the iterator.
        seed: The seed.
    """
    host = torch.device("cpu")
    with preserved(host):
        _seed_host(seed)
        items, own = make(), states(host)
    while True:
        with preserved(host):
            restore(own, host)
            try:
                item = next(items)
            except StopIteration:
                return
            own = states(host)
        yield item


def states(device: torch.device) -> dict[str, Any]:
    """Return the states of this rank's generators, including the one of its GPU."""
    generators = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        generators[device.type] = torch.get_device_module(device).get_rng_state(device)
    return generators


def restore(generators: dict[str, Any], device: torch.device) -> None:
    """Restore the generators to the states that `states` returned.

    If that was on another type of device, the generator of this device gets a seed that depends on these states.
    """
    random.setstate(generators["python"])
    np.random.set_state(generators["numpy"])
    torch.set_rng_state(generators["torch"])
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    if device.type in generators:
        module.set_rng_state(generators[device.type], device)
    else:  # a checkpoint: without a new seed, the device would draw the numbers of the first steps again
        module.manual_seed_all(_seed_of(generators["torch"]))


@contextlib.contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Restore the generators to their present states at the end of a block."""
    before = states(device)
    try:
        yield
    finally:
        restore(before, device)


def _seed_of(state: torch.Tensor) -> int:
    """Return a seed that depends on the state of a generator."""
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=6).digest(), "big")


def make_repeatable() -> None:
    """Make torch use deterministic algorithms, also on GPUs, where they are somewhat slower.

    Call it before cuBLAS is first used: cuBLAS reads CUBLAS_WORKSPACE_CONFIG at that time.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without effect on the libraries of other vendors
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.backends.cudnn.benchmark = False
