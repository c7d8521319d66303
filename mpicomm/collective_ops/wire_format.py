"""The wire format of data: a description in JSON, and the content of all leaves of a device as one buffer of bytes."""

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

ALIGNED = 16  # bytes, the size of the widest dtype; each leaf's content starts at a multiple of it
_KINDS = (TENSOR, ARRAY, SCALAR, CUPY, NUMBER, OBJECT)
HOST, GPU = DEVICES = ("cpu", "cuda")
_FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The metadata of a leaf, without its content."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    """The device type: cpu or cuda."""

    has_gradient: bool

    @property
    def nbytes(self) -> int:
        """The size of the content in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def with_length(self, length: int) -> Leaf:
        """Return the leaf with another length of its first dimension; a scalar is returned unchanged."""
        return dataclasses.replace(self, shape=(length, *self.shape[1:])) if self.shape else self


@dataclasses.dataclass(frozen=True)
class Description:
    """The structure and the leaves' metadata of data, without the content."""

    structure: Structure
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, data: Data) -> Description:
        """Return the description of data; no leaf has a gradient where grad mode is off."""
        grads = torch.is_grad_enabled()
        leaves = [
            Leaf(kind, each.dtype, tuple(each.shape), each.device.type, grads and each.requires_grad)
            for kind, each in zip(data.kinds, data.tensors, strict=True)
        ]
        return cls(data.structure, tuple(leaves))

    @property
    def devices(self) -> list[str]:
        """The device types that hold leaves, sorted."""
        return sorted({leaf.device for leaf in self.leaves})

    @property
    def has_gradient(self) -> bool:
        """Whether a leaf requires a gradient."""
        return any(leaf.has_gradient for leaf in self.leaves)

    def nbytes(self, device: str) -> int:
        """Return the size in bytes of the packed content on a device."""
        return _layout(self.leaves, device)[-1]

    def encoded(self) -> bytes:
        """Return the description as JSON."""
        leaves = [
            [leaf.kind, dtypes.short(leaf.dtype), leaf.shape, leaf.device, leaf.has_gradient] for leaf in self.leaves
        ]
        return json.dumps([self.structure, leaves], separators=(",", ":")).encode()

    @classmethod
    def decoded(cls, raw: bytes) -> Description:
        """Parse and validate a description.

        Raises:
            MpicommError: If it is not a description, or reports that the sender failed.
        """
        try:
            structure, leaves = json.loads(raw)
            if structure == _FAILED and isinstance(leaves, str):
                raise MpicommError(f"the sender could not send its data: {leaves}")
            found = cls(pytree.from_plain(structure), tuple(map(_leaf, leaves)))
            if len(list(pytree.paths(found.structure))) != len(leaves):
                raise ValueError("leaves are missing")
        except (ValueError, TypeError, AttributeError, RecursionError, KeyError) as error:
            raise not_ours(f"its description cannot be read ({error})") from None
        return found

    def output_buffer(self, device: str) -> torch.Tensor:
        """Return uninitialised memory for the content on a device.

        Raises:
            MpicommError: If the content is for a GPU and this rank has none.
        """
        if device != HOST and not torch.cuda.is_available():
            raise MpicommError(
                "the sender's data are on a GPU, but this rank has no GPU.\n"
                "Send CPU tensors (tensor.cpu()), or start every rank with a GPU."
            )
        return torch.empty(self.nbytes(device), dtype=torch.uint8, device=device)

    def unpacked(self, output_buffers: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves as views of the buffers."""
        tensors: list[torch.Tensor | None] = [None] * len(self.leaves)
        for device, output_buffer in output_buffers.items():
            offsets = _layout(self.leaves, device)
            mine = [index for index, leaf in enumerate(self.leaves) if leaf.device == device]
            for index, offset in zip(mine, offsets, strict=False):
                leaf = self.leaves[index]
                tensors[index] = output_buffer[offset : offset + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
        return [tensor for tensor in tensors if tensor is not None]

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return data with the sender's structure and kinds, around some content."""
        return rebuild(self.structure, [leaf.kind for leaf in self.leaves], tensors)


def failure(error: Exception) -> bytes:
    """Return the bytes that report an error to the receiver in place of a description."""
    return json.dumps([_FAILED, str(error)]).encode()


def pack(tensors: Sequence[torch.Tensor], description: Description, device: str) -> torch.Tensor:
    """Return the content of all leaves on a device as one tensor of bytes; for one dense leaf, a view of it."""
    mine = [each.detach() for each in tensors if each.device.type == device]
    if len(mine) == 1:
        return _bytes_of(mine[0])
    flat = torch.empty(description.nbytes(device), dtype=torch.uint8, device=mine[0].device)
    for tensor, offset in zip(mine, _layout(description.leaves, device), strict=False):
        flat[offset : offset + tensor.nbytes].copy_(_bytes_of(tensor))
    return flat


def to_tensor(raw: bytes, device: torch.device) -> torch.Tensor:
    """Return bytes as a tensor that can be sent."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)


def to_bytes(content: torch.Tensor) -> bytes:
    """Return the bytes of a tensor that `to_tensor` made."""
    return content.cpu().numpy().tobytes()


def not_ours(why: str) -> MpicommError:
    """Return the error for a message that no operation of mpicomm sent."""
    return MpicommError(
        f"the received message was not sent by an operation of mpicomm: {why}.\n"
        f"Receive messages of torch.distributed.send with torch.distributed.recv; mpicomm.recv pairs with mpicomm.send."
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    if not dense.numel():
        return torch.empty(0, dtype=torch.uint8, device=dense.device)
    return dense.view(-1).view(torch.uint8)


@functools.lru_cache(maxsize=256)
def _layout(leaves: tuple[Leaf, ...], device: str) -> list[int]:
    """Return the offset in bytes of each leaf's content on a device, and finally the total size."""
    sizes = [leaf.nbytes for leaf in leaves if leaf.device == device]
    if len(sizes) == 1:
        return [0, *sizes]
    return [0, *itertools.accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]


def _leaf(raw: Any) -> Leaf:
    kind, name, shape, device, has_gradient = raw
    dtype = getattr(torch, name, None)
    is_shape = isinstance(shape, list) and all(type(length) is int and 0 <= length < 2**62 for length in shape)
    if kind not in _KINDS or not isinstance(dtype, torch.dtype) or not is_shape or device not in (HOST, GPU):
        raise ValueError("invalid leaf")
    if math.prod(shape) * dtype.itemsize >= 2**62:
        raise ValueError("leaf of 2**62 bytes or more")
    return Leaf(kind, dtype, tuple(shape), device, bool(has_gradient))
