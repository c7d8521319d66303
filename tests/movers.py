"""A simulated GPU in host memory that delays its copies, so code that does not wait for a copy reads invalid data."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpicomm import agreement
from mpicomm.backend import plain_calls
from mpicomm.backend.gpu.staging import Mover, StagingTransport
from mpicomm.backend.gpu.transport import DeviceEvent, Use

Copy = Callable[[], None]

CHUNK_BYTES = 24
"""Small enough that small tensors have several chunks; three elements of most dtypes."""
_MOST_CHUNKS = 20


class FewChunks(StagingTransport):
    """Splits small tensors into chunks of a few elements, and large tensors into a few chunks."""

    def __init__(self, size: int, all_ranks: Callable[[bool], bool], *, is_on_gpu: bool = True) -> None:
        """Treat this rank's tensors as GPU tensors, or as host tensors if `is_on_gpu` is false."""
        super().__init__(size, CHUNK_BYTES, all_ranks, lambda _: LateMover() if is_on_gpu else Mover())
        if is_on_gpu:
            self.whole_bytes = 0

    def _cut(self, tensor: torch.Tensor, use: Use, num_blocks: int) -> list[slice]:
        chunks = super()._cut(tensor, use, num_blocks)
        starts = [chunk.start for chunk in chunks[:: len(chunks) // _MOST_CHUNKS + 1]]
        return [slice(start, end) for start, end in itertools.pairwise([*starts, chunks[-1].stop])]


def stage(handle: Any, *, is_on_gpu: bool = True) -> None:
    """Let a new group treat this rank's tensors as GPU tensors, or as host tensors beside others' GPU tensors."""
    executor = handle._executor
    all_ranks = functools.partial(agreement.all_true, executor.comm)
    executor.transport = FewChunks(handle.size(), all_ranks, is_on_gpu=is_on_gpu)
    executor.messages.transport = executor.transport
    handle._plain = plain_calls.create(executor)


class Stream:
    """Copies that complete in the order in which they were started, when a thread waits for one, or immediately."""

    def __init__(self, is_late: Callable[[], bool]) -> None:
        self._is_late = is_late
        self._lock = threading.RLock()  # messages start and end on several threads
        self._waiting: collections.deque[tuple[int, Copy]] = collections.deque()
        self._count = 0

    def start(self, copy: Copy) -> DeviceEvent:
        with self._lock:
            self._count += 1
            self._waiting.append((self._count, copy))
            event = _End(self, self._count)
            if not self._is_late():
                event.synchronize()
            return event

    def run_to(self, number: int) -> None:
        with self._lock:
            while self._waiting and self._waiting[0][0] <= number:
                self._waiting.popleft()[1]()

    @property
    def is_empty(self) -> bool:
        return not self._waiting


class _End:
    def __init__(self, stream: Stream, number: int) -> None:
        self._stream, self._number = stream, number
        self._num_queries = 0

    def query(self) -> bool:
        """Return False at first, although nobody waits for the device; then the device has reached it."""
        self._num_queries += 1
        if self._num_queries > 2:
            self.synchronize()
        return self._num_queries > 2

    def synchronize(self) -> None:
        self._stream.run_to(self._number)


class LateMover:
    """Simulates a GPU with tensors in host memory."""

    is_host = False

    def __init__(self, seed: int = 0) -> None:
        """Choose the delayed copies at random, reproducibly by the seed."""
        draws = random.Random(seed)
        self._fetching, self._putting = (Stream(lambda: draws.random() < 0.8) for _ in range(2))
        self._here = (
            threading.local()
        )  # `has_followed`: whether this thread has followed a mark since its own last mark
        self.allocations = 0

    def mark(self) -> object:
        self._here.has_followed = False
        return object()

    def follow(self, mark: object) -> None:
        assert mark is not None
        self._here.has_followed = True

    def copy_to_host(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> DeviceEvent:
        return self._start(self._fetching, pairs)

    def copy_to_device(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> DeviceEvent:
        return self._start(self._putting, pairs)

    def memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.allocations += 1
        return torch.full((count * dtype.itemsize,), 0xAB, dtype=torch.uint8, device="cpu").view(dtype)

    @property
    def is_quiet(self) -> bool:
        """Whether no copy is pending."""
        return self._fetching.is_empty and self._putting.is_empty

    def _start(self, stream: Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> DeviceEvent:
        assert getattr(self._here, "has_followed", False), "a copy is not ordered after the caller's queued work"
        pairs = list(pairs)

        def copy() -> None:
            for to, source in pairs:
                to.copy_(source)

        return stream.start(copy)
