"""Mapping of torch dtypes to MPI datatypes: one table for data movement, one for reductions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from mpicomm import mpi

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype

# Sums of these dtypes are computed in float32 and rounded once: MPI has no arithmetic for them, or rounds every step.
NARROW_FLOATS = (
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)

# Dtypes that MPI reductions support, and the names of their MPI datatypes.
_ARITHMETIC = {
    torch.bool: "C_BOOL",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}

# Data movement depends only on the item size in bytes; wider units keep the counts small.
_BY_WIDTH = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}


@functools.cache
def carrier(dtype: torch.dtype) -> Datatype:
    """Return the MPI datatype that moves one element of `dtype` unchanged."""
    return getattr(mpi.api(), _BY_WIDTH[dtype.itemsize])


@functools.cache
def arithmetic(dtype: torch.dtype) -> Datatype | None:
    """Return the MPI datatype for reductions of `dtype`, or None if MPI has none."""
    name = _ARITHMETIC.get(dtype)
    return getattr(mpi.api(), name) if name else None


def short(dtype: torch.dtype) -> str:
    """Return the name of the dtype without the `torch.` prefix, such as `float32`."""
    return str(dtype).removeprefix("torch.")
