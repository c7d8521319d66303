"""The C library of the inner loops and of crash reports, called by ctypes; its calls release the GIL.

It is built where a C compiler is available. Without it, all tensors use MPI.
"""

from __future__ import annotations

import ctypes
import functools
import zlib

import torch

from mpicomm.native import extension

# As in slots.h. Sums of unsigned and signed integers have the same bits; complex numbers are two floats each.
_FLOAT32, _FLOAT64, _BFLOAT16, _FLOAT16, _INT8, _INT16, _INT32, _INT64, _UINT8 = range(9)
BYTES = _INT8
KINDS = {
    torch.float32: (_FLOAT32, 1),
    torch.float64: (_FLOAT64, 1),
    torch.bfloat16: (_BFLOAT16, 1),
    torch.float16: (_FLOAT16, 1),
    torch.complex64: (_FLOAT32, 2),
    torch.complex128: (_FLOAT64, 2),
    torch.int8: (_INT8, 1),
    torch.uint8: (_INT8, 1),
    torch.int16: (_INT16, 1),
    torch.int32: (_INT32, 1),
    torch.int64: (_INT64, 1),
}
"""For each dtype, the kind of number that the library reduces, and how many of them an element has."""

ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, GATHER, SCATTER, BARRIER = range(9)
_NAMES = (
    "all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "gather", "scatter", "barrier",
)  # fmt: skip
_REDUCTIONS = {ALL_REDUCE, REDUCE, REDUCE_SCATTER}
_ROOTED = {REDUCE: "to", BROADCAST: "from", GATHER: "to", SCATTER: "from"}
DONE, WAITING, DIFFERENT, UNAVAILABLE = range(4)
LINE_BYTES = 128
"""The size of the record of an operation that each rank publishes in the shared memory."""

HEADER = 64
"""The number of bytes before a block of scatter."""

IS_WIDE = 1 << 15
"""Added to a call of reduce_scatter if the sums of bfloat16 or float16 numbers stay in float32."""

IS_LIST = 1 << 63
"""Added to a call if the blocks of the ranks are a list: an array of addresses and sizes in bytes."""

NO_EXTREME, LEAST, MOST = range(3)
"""What a reduction keeps: the sum, or the least or largest number of all ranks."""


_KIND, _EXTREME, _ROOT, _DIVISOR, _DTYPE = 8, 12, 16, 32, 48
"""The first bits of the fields of a call, as in slots.c; the first one is the operation."""


def call(
    operation: int, kind: int, dtype: torch.dtype, root: int = 0, divisor: int = 1, extreme: int = NO_EXTREME
) -> int:
    """Return the call that all ranks must make, as the library's number."""
    with_kind = operation | kind << _KIND | extreme << _EXTREME
    return with_kind | root << _ROOT | divisor << _DIVISOR | dtype_code(dtype) << _DTYPE


BARRIER_CALL = BARRIER | BYTES << _KIND | 1 << _DIVISOR
"""The call of a barrier, which has no dtype."""


@functools.cache
def reducing(operation: int, dtype: torch.dtype, root: int = 0, divisor: int = 1, extreme: int = NO_EXTREME) -> int:
    """Return the call of an operation that adds or compares numbers."""
    kind = kind_to_compare(dtype) if extreme else KINDS[dtype][0]
    return call(operation, kind, dtype, root, divisor, extreme)


def kind_to_compare(dtype: torch.dtype) -> int:
    """Return the kind of number of a dtype of real numbers, whose order depends on the sign of integers."""
    return _UINT8 if dtype == torch.uint8 else KINDS[dtype][0]


@functools.cache
def moving(operation: int, dtype: torch.dtype, root: int = 0) -> int:
    """Return the call of an operation that moves bytes."""
    return call(operation, BYTES, dtype, root)


@functools.cache
def dtype_code(dtype: torch.dtype) -> int:
    """Return a number of 15 bits for a dtype, also where its bytes are only moved."""
    return zlib.crc32(str(dtype).encode()) & 0x7FFF


def describe(call: int) -> str:
    """Return a call as text, such as `reduce MAX to rank 1 of float32`."""
    operation, extreme = call & 0xFF, call >> _EXTREME & 3
    root, divisor = call >> _ROOT & 0xFFFF, call >> _DIVISOR & 0xFFFF
    reduction = ("AVG" if divisor > 1 else "SUM", "MIN", "MAX")[extreme] if operation in _REDUCTIONS else ""
    at_root = f"{_ROOTED[operation]} rank {root}" if operation in _ROOTED else ""
    dtypes = {dtype_code(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    dtype = dtypes.get(call >> _DTYPE & 0x7FFF) if operation != BARRIER else None
    of_dtype = f"of {str(dtype).removeprefix('torch.')}" if dtype is not None else ""
    return " ".join(filter(None, (_NAMES[operation], reduction, at_root, of_dtype)))


class SlotState(ctypes.Structure):
    """One rank's view of the slots of a group, and its current operation."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("lines", "slots")),
        *((name, ctypes.c_uint64) for name in ("slot_bytes", "split_bytes")),
        ("pause_ns", ctypes.c_int64),
        ("soon_ns", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rank", "size", "spins", "operation", "kind", "root", "divisor")),
        *((name, ctypes.c_int32) for name in ("stage", "extreme", "is_wide", "is_list", "has_next", "has_waited")),
        *((name, ctypes.c_uint64) for name in ("signature", "number", "count", "most", "start")),
        *((name, ctypes.c_void_p) for name in ("source", "out")),
    )


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library with its functions' types; None if it cannot be used."""
    library = extension.library()
    if library is None:
        return None
    library.mpicomm_sum.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int
    )  # fmt: skip
    library.mpicomm_sum.restype = None
    library.mpicomm_start.argtypes = (
        ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64
    )  # fmt: skip
    library.mpicomm_continue.argtypes = (ctypes.c_void_p,)
    return library
