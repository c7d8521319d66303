"""The wire format of data: a header, a description in JSON, and the content as one buffer of bytes per device type."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mpicomm.backend.transfer import buffers, dtypes
from mpicomm.collective_ops import pytree
from mpicomm.collective_ops.pytree import GPU, HOST, Data, Description
from mpicomm.devices import accelerator
from mpicomm.errors import MpicommError

HEAD = 512  # bytes: magic number, number, length of the description, as much of the description as fits
MAGIC = b"mpicomm1"
_START = struct.Struct("<8sQQ")  # of the header: magic number, number, length of the description
IN_HEAD = HEAD - _START.size  # bytes of the description
_WIDEST = 16  # bytes, the size of the widest dtype; each leaf's content starts at a multiple of it
DEVICES = (HOST, GPU)
_FAILED = "failed"


# -- headers and descriptions ------------------------------------------------------------------------------------------


def head(raw: bytes, number: int = 0) -> bytes:
    """Return the header of a description, with a number for the receiver."""
    return (_START.pack(MAGIC, number, len(raw)) + raw[:IN_HEAD]).ljust(HEAD, b"\0")


def read_head(content: torch.Tensor) -> tuple[int, int, bytes]:
    """Return a header's number, the length of the description, and the start of the description.

    Raises:
        MpicommError: If it is not a header of an operation of mpicomm.
    """
    raw = to_bytes(content)
    magic, number, length = _START.unpack_from(raw)
    if magic != MAGIC:
        raise not_ours("its header has no magic number")
    return number, length, raw[_START.size :]


def encode(data: Data | Exception) -> bytes:
    """Return the description of data as JSON, or the error that prevents sending the data."""
    if isinstance(data, Exception):
        return json.dumps([_FAILED, str(data)]).encode()
    leaves = [(kind, dtypes.short(dtype), *rest) for kind, dtype, *rest in data.description.leaves]
    return json.dumps([data.description.structure, leaves], separators=(",", ":")).encode()


def decode(raw: bytes, sender: str = "the sender") -> Description:
    """Parse and validate a description.

    Args:
        raw: The description, as the sender encoded it.
        sender: The sender's name for messages, such as `rank 3`.

    Raises:
        MpicommError: If it is not a description, or reports that the sender failed.
    """
    try:
        structure, leaves = json.loads(raw)
        if structure == _FAILED and isinstance(leaves, str):
            raise MpicommError(f"{sender} could not send its data: {leaves}")
        columns: Iterable[Any] = zip(*map(_leaf, leaves), strict=True) if leaves else ((),) * 5
        description = Description(pytree.from_plain(structure), *columns)
        if len(list(pytree.paths(description.structure))) != len(leaves):
            raise ValueError("leaves are missing")
    except (ValueError, TypeError, AttributeError, RecursionError, KeyError) as error:
        raise not_ours(f"its description cannot be read ({error})") from None
    return description


def _leaf(raw: Any) -> tuple[str, torch.dtype, tuple[int, ...], str, bool]:
    kind, name, shape, device, has_gradient = raw
    dtype = getattr(torch, name, None)
    is_shape = isinstance(shape, list) and all(type(length) is int and 0 <= length < 2**62 for length in shape)
    if kind not in pytree.KINDS or not isinstance(dtype, torch.dtype) or not is_shape or device not in (HOST, GPU):
        raise ValueError("invalid leaf")
    if _nbytes(dtype, shape) >= 2**62:
        raise ValueError("leaf of 2**62 bytes or more")
    return kind, dtype, tuple(shape), device, bool(has_gradient)


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


# -- contents ----------------------------------------------------------------------------------------------------------


def aligned(size: int) -> int:
    """Return the next offset at which a leaf of any dtype may start."""
    return -(-size // _WIDEST) * _WIDEST


def nbytes(description: Description) -> dict[str, int]:
    """Return the size in bytes of the packed content on each device type that holds leaves."""
    return _layout(description)[1]


def output_buffers(description: Description, sender: str) -> dict[str, torch.Tensor]:
    """Return uninitialised memory for the content, by device type.

    Args:
        description: The description of the data.
        sender: The sender's name for messages, such as `rank 3`.

    Raises:
        MpicommError: If a part of the content is for a GPU and this rank has none.
    """
    if GPU in description.devices and not accelerator.is_available():
        raise MpicommError(
            f"the data of {sender} are on a GPU, but this rank has no GPU.\n"
            "Send CPU tensors (tensor.cpu()), or start every rank with a GPU."
        )
    sizes = nbytes(description)
    return {kind: torch.empty(size, dtype=torch.uint8, device=device_of(kind)) for kind, size in sizes.items()}


def device_of(kind: str) -> torch.device:
    """Return this rank's device for content on the host or on a GPU."""
    return torch.device("cpu") if kind == HOST else accelerator.current_device()


def pack(data: Data) -> dict[str, torch.Tensor]:
    """Return the content as one tensor of bytes for each device type; a view of a single leaf if it is dense."""
    description = data.description
    if len(data.tensors) == 1:
        return {description.devices[0]: buffers.bytes_of(data.tensors[0])}
    offsets, sizes = _layout(description)
    packed: dict[str, torch.Tensor] = {}
    for tensor, device, offset in zip(data.tensors, description.devices, offsets, strict=True):
        if device not in packed:
            packed[device] = torch.empty(sizes[device], dtype=torch.uint8, device=tensor.device)
        packed[device][offset : offset + tensor.nbytes].copy_(buffers.bytes_of(tensor))
    return {device: packed[device] for device in sizes}


def unpack(description: Description, packed: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves as views of the packed content."""
    offsets, _ = _layout(description)
    leaves = zip(description.dtypes, description.shapes, description.devices, offsets, strict=True)
    return [
        packed[device][offset : offset + _nbytes(dtype, shape)].view(dtype).view(shape)
        for dtype, shape, device, offset in leaves
    ]


@functools.lru_cache(maxsize=256)
def _layout(description: Description) -> tuple[list[int], dict[str, int]]:
    """Return the offset of each leaf in the buffer of its device type, and the sizes of the buffers, in bytes."""
    offsets = []
    sizes = dict.fromkeys(sorted(set(description.devices)), 0)
    for dtype, shape, device in zip(description.dtypes, description.shapes, description.devices, strict=True):
        offsets.append(aligned(sizes[device]))
        sizes[device] = offsets[-1] + _nbytes(dtype, shape)
    return offsets, sizes


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize
