"""Cross-memory attach (CMA), by which MPI copies large messages between the memory of two processes.

Run as a program, it reads a word in the memory of its parent, and exits with the error number: the kernel permits that
between processes like ranks, of which none is an ancestor of the other, only if it permits CMA at all.
"""

from __future__ import annotations

import ctypes
import sys


class Vector(ctypes.Structure):
    """C's struct iovec."""

    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_error(pid: int, address: int, length: int) -> int:
    """Return the error number of reading another process's memory; 0 if it can be read."""
    output = ctypes.create_string_buffer(length)
    local, remote = Vector(ctypes.addressof(output), length), Vector(address, length)
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    vectors = (ctypes.POINTER(Vector), ctypes.c_ulong)
    read.argtypes, read.restype = (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong), ctypes.c_ssize_t
    done = read(pid, local, 1, remote, 1, 0)
    return 0 if done == length else ctypes.get_errno()


if __name__ == "__main__":
    sys.exit(read_error(*map(int, sys.argv[1:])))
