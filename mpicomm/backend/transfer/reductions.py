"""How each reduction of each dtype is computed with MPI.

    tensor --load--> dense buffer --MPI op--> dense buffer --store--> tensor

`load` widens dtypes that are too narrow and multiplies by the factor of PREMUL_SUM; `store` divides for AVG and rounds
once. MIN and MAX of floating-point numbers are computed on integers of the same order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpicomm import mpi, torch_internals
from mpicomm.backend.transfer import buffers, dtypes
from mpicomm.native import c_library

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype, Op

_MPI_OPS = {
    "SUM": "SUM",
    "AVG": "SUM",
    "PREMUL_SUM": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
# On bool, the sum is a logical "any" and the product a logical "all", as in torch's own bool tensors.
_BOOL_OPS = {"SUM": "LOR", "PRODUCT": "LAND", "MIN": "LAND", "MAX": "LOR", "BAND": "LAND", "BOR": "LOR", "BXOR": "LXOR"}
# Averages of these are computed in int64, which holds their sums: the average of 200 and 202 is 201 in uint8 too.
_NARROW_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32}
# Sums of these wrap around, as all integer sums in torch do. Open MPI 5 saturates them instead where it uses AVX, which
# it does for 8 and 16 bits, and for part of a tensor. MPICH is known to wrap.
_NARROWEST_INTEGERS = {torch.int8, torch.int16, torch.uint8, torch.uint16}
_WRAPPING = {"MPICH"}
_PIECE = 2**24  # elements widened at a time
_SUMS = [name for name, mpi_name in _MPI_OPS.items() if mpi_name == "SUM"]
_BITWISE = {"BAND", "BOR", "BXOR"}
_EXTREMES = {"MIN": c_library.LEAST, "MAX": c_library.MOST}
_OF_SLOTS = {"SUM", "AVG", *_EXTREMES}
# The order of floats as integers. MPI does not define MIN and MAX of NaN and of 0 and -0: the results of ranks differ.
_SORT_KEYS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How to compute one reduction of one dtype."""

    name: str
    """torch's name of the operation."""

    op: Op
    datatype: Datatype
    wide: torch.dtype | None = None
    """The dtype in which the sum is computed and sent; None for the tensor's own."""

    factor: Any = None
    """Multiplies every rank's input before the reduction (PREMUL_SUM): a number or a tensor."""

    divisor: int = 1
    """Divides the result after the reduction (AVG)."""

    keys: torch.dtype | None = None
    """The integers that MPI reduces in place of the floating-point numbers (MIN and MAX); None if it reduces these."""

    uses_slots: bool = False
    """Whether the C library can compute the reduction in shared memory."""

    @property
    def extreme(self) -> int:
        """What the C library keeps in place of the sum: c_library.LEAST or c_library.MOST for MIN and MAX."""
        return _EXTREMES.get(self.name, c_library.NO_EXTREME)

    @functools.cached_property
    def is_native(self) -> bool:
        """Whether MPI's operation on the tensor itself is the whole reduction."""
        return self.wide is None and self.factor is None and self.divisor == 1 and self.keys is None

    def pieces(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return a dense tensor in pieces to reduce one by one: a wide copy of all of it would take more memory."""
        is_converted = self.wide is not None or self.keys is not None
        return tensor.detach().view(-1).split(_PIECE) if is_converted and tensor.numel() > _PIECE else (tensor,)

    def load(self, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """Return dense memory with this rank's contribution: the tensor's own memory where possible.

        Args:
            keep: Whether the tensor must keep its content, because the result goes elsewhere or to another rank.
        """
        dense = buffers.pack(tensor)
        if self.wide is not None:
            dense = dense.to(self.wide)
        if self.factor is not None:
            if keep and dense is tensor:
                dense = dense.detach().clone()
            factor = self.factor.detach().to(dense.device) if isinstance(self.factor, torch.Tensor) else self.factor
            dense.detach().mul_(factor)
        return dense if self.keys is None else self._sort_keys(dense, self.keys)

    def output_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return dense memory for the result that `store` copies to `tensor`."""
        if (dtype := self.keys or self.wide) is not None:
            return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        return buffers.output_buffer(tensor)

    def store(self, dense: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy the reduced buffer to the caller's tensor, divided and rounded."""
        if self.divisor != 1:
            raw = dense.detach()
            if raw.dtype.is_floating_point or raw.dtype.is_complex:
                _divide(raw, self.divisor)
            elif raw.dtype == torch.uint64:  # torch cannot divide it
                raw.copy_(torch.from_numpy(raw.cpu().numpy() // self.divisor))
            else:
                raw.div_(self.divisor, rounding_mode="trunc")
        if self.keys is not None:
            keys = _numbers(dense)
            dtype = self.wide or tensor.dtype
            keys -= self._nan_shift(dtype)
            _fold(keys, self.keys)
            dense = dense.view(dtype)
            # One NaN: the bits of others after a conversion to a narrow dtype depend on the processor's instructions.
            dense.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
        buffers.unpack(dense, tensor)

    def _sort_keys(self, dense: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return integers in the order of floats, -0 before 0, and NaN at the end that wins."""
        result = dense.detach().clone().view(dtype)
        keys = _numbers(result)
        _fold(keys, dtype)
        keys += self._nan_shift(dense.dtype)
        return result

    def _nan_shift(self, dtype: torch.dtype) -> int:
        """Return the number that moves NaNs of one sign across the end of the integers, to those of the other sign."""
        count = round(1 / torch.finfo(dtype).eps) - 1  # NaNs of each sign: one for each mantissa but that of infinity
        return count if self.name == "MIN" else -count


def _divide(total: torch.Tensor, divisor: int) -> None:
    """Divide floating point or complex numbers in place; torch's own division of complex numbers is inexact."""
    real = torch.view_as_real(total) if total.is_complex() else total
    real.div_(_scalar(divisor, real.dtype))


@functools.cache
def _scalar(value: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor, by which torch divides three times as fast as by a Python number."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def _numbers(tensor: torch.Tensor) -> Any:
    """Return a tensor on the host as a NumPy array, which computes small ones twice as fast as torch."""
    return tensor.detach().numpy() if tensor.is_cpu else tensor.detach()


def _fold(bits: Any, dtype: torch.dtype) -> None:
    """Convert the bits of floats to integers of their order in place, or back: reverse the negative ones."""
    bits ^= (bits >> (8 * dtype.itemsize - 1)) & torch.iinfo(dtype).max


def reduction_for(op: Any, dtype: torch.dtype, size: int, operation: str, *, is_sparse: bool = False) -> Reduction:
    """Return how to reduce tensors of `dtype` with `op` over `size` ranks.

    Integer averages are the sum divided by the size, rounded toward zero; for dtypes of less than 64 bits the sum
    cannot overflow. MIN and MAX of floating-point numbers are NaN if any number is, and take -0 for less than 0; all
    ranks get the same bits. MIN and MAX of complex numbers, bitwise operations on floats, PREMUL_SUM of integers and
    AVG of bool are not defined.

    Args:
        op: A `torch.distributed.ReduceOp`.
        operation: The operation's name, for error messages.
        is_sparse: Whether the tensors are sparse; these support sums only.

    Raises:
        ValueError: If the operation is not defined for the dtype.
    """
    name = torch_internals.reduce_op_name(op)
    if is_sparse and name not in _SUMS:
        raise ValueError(f"{operation}: {name} is not defined for sparse tensors.\nUse one of {', '.join(_SUMS)}.")
    base = _reduction_for(name, dtype, size, operation)
    return dataclasses.replace(base, factor=_factor(op)) if name == "PREMUL_SUM" else base


def _factor(op: Any) -> Any:
    """Return the current factor of a PREMUL_SUM; a tensor on a GPU is read on the caller's stream."""
    factor = torch_internals.premul_factor(op)
    return factor.detach().to("cpu", copy=True) if isinstance(factor, torch.Tensor) else factor


@functools.cache
def _reduction_for(name: str, dtype: torch.dtype, size: int, operation: str) -> Reduction:
    wide = None if name in _EXTREMES and dtype in _SORT_KEYS else _wide(name, dtype)
    keys = _SORT_KEYS.get(wide or dtype) if name in _EXTREMES else None
    datatype = dtypes.arithmetic(keys or wide or dtype)
    mpi_name = (_BOOL_OPS if dtype == torch.bool else _MPI_OPS).get(name)
    if datatype is None:
        raise ValueError(
            f"{operation}: {dtypes.short(dtype)} tensors can be moved but not reduced.\n"
            f"Convert them to a dtype that MPI can reduce, such as float32."
        )
    if mpi_name is None or _is_meaningless(name, dtype):
        meaningful = [known for known in _MPI_OPS if not _is_meaningless(known, dtype)]
        raise ValueError(
            f"{operation}: {name} is not defined for {dtypes.short(dtype)} tensors.\n"
            f"For {dtypes.short(dtype)}, use one of {', '.join(meaningful)}."
        )
    divisor = size if name == "AVG" else 1
    return Reduction(
        name,
        getattr(mpi.api(), mpi_name),
        datatype,
        wide,
        divisor=divisor,
        keys=keys,
        uses_slots=name in _OF_SLOTS and dtype in (_FLOATS if name == "AVG" else (*_INTEGERS, *_FLOATS)),
    )


def _wide(name: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which to compute a reduction if the tensors' own is too narrow, otherwise None."""
    if dtype in dtypes.NARROW_FLOATS:
        return torch.float32
    if name == "AVG" and dtype in _NARROW_INTEGERS:
        return torch.int64
    if name == "SUM" and dtype in _NARROWEST_INTEGERS and mpi.library().vendor not in _WRAPPING:
        return torch.int32
    return None


def _is_meaningless(name: str, dtype: torch.dtype) -> bool:
    if dtype == torch.bool:
        return name not in _BOOL_OPS
    if name in _BITWISE:
        return dtype.is_floating_point or dtype.is_complex
    if name == "PREMUL_SUM":
        return not (dtype.is_floating_point or dtype.is_complex)
    return name in _EXTREMES and dtype.is_complex
