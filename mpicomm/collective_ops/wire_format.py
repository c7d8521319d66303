"""Data on the wire: a description of a few bytes, and the content of all leaves of a device as one run of bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from mpicomm.backend import dtypes
from mpicomm.collective_ops import pytree
from mpicomm.collective_ops.pytree import ARRAY, CUPY, NUMBER, OBJECT, SCALAR, TENSOR, Data, Structure, rebuild
from mpicomm.errors import MpicommError

ALIGNED = 16  # bytes; the width of the widest dtype
_KINDS = (TENSOR, ARRAY, SCALAR, CUPY, NUMBER, OBJECT)
HOST, GPU = DEVICES = ("cpu", "cuda")
_FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a leaf is, without its content."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    """Its type: cpu or cuda."""

    has_gradient: bool

    @property
    def nbytes(self) -> int:
        """How many bytes the content has."""
        return math.prod(self.shape) * self.dtype.itemsize

    def with_length(self, length: int) -> Leaf:
        """Return the same leaf of another length in its first dimension; a scalar has none."""
        return dataclasses.replace(self, shape=(length, *self.shape[1:])) if self.shape else self


@dataclasses.dataclass(frozen=True)
class Description:
    """What data are, without their content."""

    structure: Structure
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, data: Data) -> Description:
        """Describe data."""
        grads = torch.is_grad_enabled()
        leaves = [
            Leaf(kind, each.dtype, tuple(each.shape), each.device.type, grads and each.requires_grad)
            for kind, each in zip(data.kinds, data.tensors, strict=True)
        ]
        return cls(data.structure, tuple(leaves))

    @property
    def devices(self) -> list[str]:
        """The types of devices on which there are leaves, in a fixed order."""
        return sorted({leaf.device for leaf in self.leaves})

    @property
    def has_gradient(self) -> bool:
        """Whether a leaf takes part in automatic differentiation."""
        return any(leaf.has_gradient for leaf in self.leaves)

    def nbytes(self, device: str) -> int:
        """Return how many bytes the content on a device has, as it travels."""
        return _layout(self.leaves, device)[-1]

    def encoded(self) -> bytes:
        """Return the description as bytes."""
        leaves = [
            [leaf.kind, dtypes.short(leaf.dtype), leaf.shape, leaf.device, leaf.has_gradient] for leaf in self.leaves
        ]
        return json.dumps([self.structure, leaves], separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, raw: bytes) -> Description:
        """Read a description.

        Raises:
            MpicommError: If it is none, or says that the sender failed.
        """
        try:
            structure, leaves = json.loads(raw)
            if structure == _FAILED and isinstance(leaves, str):
                raise MpicommError(f"the sender had nothing to send: {leaves}")
            found = cls(pytree.from_plain(structure), tuple(map(_leaf, leaves)))
            if len(list(pytree.paths(found.structure))) != len(leaves):
                raise ValueError("leaves are missing")
        except (ValueError, TypeError, AttributeError, RecursionError, KeyError) as error:
            raise not_ours(f"its description cannot be read ({error})") from None
        return found

    def output_buffer(self, device: str) -> torch.Tensor:
        """Return memory for the content on a device.

        Raises:
            MpicommError: If this rank has no such device.
        """
        if device != HOST and not torch.cuda.is_available():
            raise MpicommError(
                "the sender's data are on a GPU, and this rank has none.\n"
                "Send them from the host (tensor.cpu()), or start every rank with a GPU."
            )
        return torch.empty(self.nbytes(device), dtype=torch.uint8, device=device)

    def unpacked(self, output_buffers: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves, in the memory that their content came in."""
        tensors: list[torch.Tensor | None] = [None] * len(self.leaves)
        for device, output_buffer in output_buffers.items():
            offsets = _layout(self.leaves, device)
            mine = [index for index, leaf in enumerate(self.leaves) if leaf.device == device]
            for index, offset in zip(mine, offsets, strict=False):
                leaf = self.leaves[index]
                tensors[index] = output_buffer[offset : offset + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
        return [tensor for tensor in tensors if tensor is not None]

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return data as they were at the sender, around some content."""
        return rebuild(self.structure, [leaf.kind for leaf in self.leaves], tensors)


def failure(error: Exception) -> bytes:
    """Return what takes the place of a description when there is nothing to describe."""
    return json.dumps([_FAILED, str(error)]).encode()


def pack(tensors: Sequence[torch.Tensor], description: Description, device: str) -> torch.Tensor:
    """Return the content of all leaves on a device as one run of bytes; of one dense leaf, its own memory."""
    mine = [each.detach() for each in tensors if each.device.type == device]
    if len(mine) == 1:
        return _bytes_of(mine[0])
    flat = torch.empty(description.nbytes(device), dtype=torch.uint8, device=mine[0].device)
    for tensor, offset in zip(mine, _layout(description.leaves, device), strict=False):
        flat[offset : offset + tensor.nbytes].copy_(_bytes_of(tensor))
    return flat


def to_tensor(raw: bytes, device: torch.device) -> torch.Tensor:
    """Return bytes as a tensor, so that they can be sent."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)


def to_bytes(content: torch.Tensor) -> bytes:
    """Return the bytes that `to_tensor` was given."""
    return content.cpu().numpy().tobytes()


def not_ours(why: str) -> MpicommError:
    """Return the error of something that came in and no operation has sent."""
    return MpicommError(
        f"what came in was not sent by an operation of mpicomm's: {why}.\n"
        f"Operations pair with operations: receive with torch.distributed what torch.distributed sends."
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    if not dense.numel():
        return torch.empty(0, dtype=torch.uint8, device=dense.device)
    return dense.view(-1).view(torch.uint8)


@functools.lru_cache(maxsize=256)
def _layout(leaves: tuple[Leaf, ...], device: str) -> list[int]:
    """Return where the content of each leaf on a device begins, and the length of all."""
    sizes = [leaf.nbytes for leaf in leaves if leaf.device == device]
    if len(sizes) == 1:
        return [0, *sizes]
    return [0, *itertools.accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]


def _leaf(raw: Any) -> Leaf:
    kind, name, shape, device, has_gradient = raw
    dtype = getattr(torch, name, None)
    is_shape = isinstance(shape, list) and all(type(length) is int and 0 <= length < 2**62 for length in shape)
    if kind not in _KINDS or not isinstance(dtype, torch.dtype) or not is_shape or device not in (HOST, GPU):
        raise ValueError("no leaf")
    if math.prod(shape) * dtype.itemsize >= 2**62:
        raise ValueError("no size")
    return Leaf(kind, dtype, tuple(shape), device, bool(has_gradient))
