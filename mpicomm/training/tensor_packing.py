"""Objects that contain tensors, as bytes and a list of the tensors: the bytes are small, the tensors are not copied."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch


def pack(content: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return an object without its tensors as bytes, and the tensors, which share memory with the object."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(content)
    return file.getvalue(), pickler.tensors


def unpack(packed: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the object that `pack` took apart, with these tensors."""
    return _Unpickler(io.BytesIO(packed), tensors).load()


class _Pickler(pickle.Pickler):
    """Pickles the position of a tensor in `tensors` in place of the tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, thing: Any) -> int | None:
        """Return the position of a tensor; None for other objects."""
        if not isinstance(thing, torch.Tensor):
            return None
        self.tensors.append(thing.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, position: int) -> torch.Tensor:
        """Return the tensor at a position."""
        return self._tensors[position]
