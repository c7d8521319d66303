"""Groups whose tensors use the shared memory of a node regardless of their size."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

KINDS = ("direct", "segment", "two nodes", "slots", "torch slots")
"""Cross-memory attach (CMA), a shared segment, simulated nodes of two ranks each, slots with and without C library."""

# A child process runs this. The kernel treats it like another rank: neither is an ancestor of this process.
_READER = """
import ctypes, sys
class Vector(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))
value = ctypes.c_int64()
here, there = Vector(ctypes.addressof(value), 8), Vector(int(sys.argv[2]), 8)
read = ctypes.CDLL(None).process_vm_readv
read.argtypes = (ctypes.c_int, *2 * (ctypes.POINTER(Vector), ctypes.c_ulong), ctypes.c_ulong)
read(int(sys.argv[1]), here, 1, there, 1, 0)
print(value.value)
"""


@functools.cache
def may_read() -> bool:
    """Check, without using this package, whether the kernel allows other processes to read this one's memory."""
    value = ctypes.c_int64(1 + secrets.randbits(62))
    command = [sys.executable, "-ISc", _READER, str(os.getpid()), str(ctypes.addressof(value))]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip() == str(value.value)


def require(kind: str) -> None:
    """Skip the test if the kernel does not allow this kind of group."""
    import pytest

    if kind == "direct" and not may_read():
        pytest.skip("processes may not read each other's memory here")
    if kind == "slots" and not has_library():
        pytest.skip("the C library was not built")


def lead_by(kind: str, handle: dist.ProcessGroup) -> None:
    """Force the tensors of a new group to use one transport; operations fail if it is not available."""
    path: Any = handle._operations.node  # type: ignore[attr-defined]
    path._choices = _all_sizes(handle.size())
    path._uses_native = kind == "slots"
    if "slots" not in kind:
        without_slots(handle)
    if kind == "direct":
        path.connect = directly
    elif kind == "segment":
        path.connect = by_segment
    elif kind == "two nodes":
        path.split_by_node = lambda comm: comm.Split(comm.rank // 2, comm.rank)


def _all_sizes(size: int) -> Any:
    """Return algorithms that are used for tensors of every size, by the operations that have them."""
    from mpicomm.backend.algorithms import Choices

    class AllSizes(Choices):
        def add(self, algorithm: Any, table: Any, most: float = math.inf) -> None:
            super().add(algorithm, dict.fromkeys(table, (0, 0)), most)

    return AllSizes(size)


def without_slots(handle: dist.ProcessGroup) -> None:
    """Let a group's ranks use each other's memory, but no slots."""
    handle._operations.node.connect_slots = lambda _node_comm: None  # type: ignore[attr-defined]


def has_library() -> bool:
    from mpicomm.shm import native

    return native.library() is not None


def directly(node_comm: Any) -> Any:
    from mpicomm.shm import cma

    return cma.CMACollectives(node_comm)


def by_segment(node_comm: Any) -> Any:
    from mpicomm.shm import segment

    return segment.SegmentCollectives(node_comm, segment.make(node_comm, segment.segment_bytes(node_comm.size)))
