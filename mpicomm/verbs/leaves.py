"""What verbs can take: tensors, arrays of NumPy and CuPy, numbers. As tensors on the way, as themselves at the end."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpicomm.verbs import containers
from mpicomm.verbs.containers import Structure

TENSOR, ARRAY, SCALAR, CUPY, NUMBER, OBJECT = "tensor", "array", "scalar", "cupy", "number", "object"
_PLAIN = {torch.Tensor, torch.nn.Parameter, np.ndarray, bool, int, float, complex}
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@dataclasses.dataclass(frozen=True)
class Data:
    """What a verb was given, taken apart."""

    structure: Structure
    kinds: tuple[str, ...]
    tensors: list[torch.Tensor]
    """One for each leaf; arrays and tensors share the caller's memory."""

    @property
    def is_container(self) -> bool:
        """Whether it is more than one leaf by itself."""
        return self.structure is not containers.LEAF

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the same kind of data with other content."""
        return rebuild(self.structure, self.kinds, tensors)


def take(data: Any, what: str) -> Data:
    """Take data apart into leaves.

    Raises:
        TypeError: If a leaf is of a kind that cannot be sent.
    """
    kinds: list[str] = []
    tensors: list[torch.Tensor] = []

    def add(leaf: Any) -> None:
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_quantized:
            kinds.append(TENSOR)
            tensors.append(leaf)
        else:
            kind, tensor = _as_tensor(leaf, what)
            kinds.append(kind)
            tensors.append(tensor)

    structure = containers.take_apart(data, add, _PLAIN)
    return Data(structure, tuple(kinds), tensors)


def rebuild(structure: Structure, kinds: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
    """Return data of a structure, from the tensors of its leaves."""
    if set(kinds) == {TENSOR}:
        return containers.put_together(structure, iter(tensors))
    return containers.put_together(structure, map(_restored, kinds, tensors))


def pickled(thing: Any) -> Data:
    """Return an object as data of one leaf."""
    memory = bytearray(pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL))
    return Data(containers.LEAF, (OBJECT,), [torch.frombuffer(memory, dtype=torch.uint8)])


def _as_tensor(leaf: Any, what: str) -> tuple[str, torch.Tensor]:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided or leaf.is_quantized:
            raise TypeError(f"{what}: a tensor of layout {leaf.layout} cannot be sent.\nConvert it with to_dense().")
        return TENSOR, leaf
    if (dtype := _NUMBERS.get(type(leaf))) is not None:
        return NUMBER, _of_number(leaf, dtype, what)
    if isinstance(leaf, np.ndarray):
        return ARRAY, _of_array(leaf, what)
    if isinstance(leaf, np.generic):
        return SCALAR, _of_array(np.array(leaf), what)
    if type(leaf).__module__.partition(".")[0] == "cupy":
        return CUPY, torch.from_dlpack(leaf)
    raise TypeError(
        f"{what}: expected tensors, arrays, numbers or containers of them, got a {type(leaf).__name__}.\n"
        f"For other objects there is the verb's `_object` form."
    )


def _of_number(number: Any, dtype: torch.dtype, what: str) -> torch.Tensor:
    try:
        return torch.tensor(number, dtype=dtype, device="cpu")
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(f"{what}: {number} does not fit into 64 bits.\nUse the verb's `_object` form.") from error


def _of_array(array: np.ndarray, what: str) -> torch.Tensor:
    try:
        # torch warns of memory that must not be written; nobody writes to it.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what}: an array of {array.dtype} with strides {array.strides} has no tensor: {error}\n"
            f"Convert it (np.ascontiguousarray, astype), or use the verb's `_object` form."
        ) from error


def _restored(kind: str, tensor: torch.Tensor) -> Any:
    if kind == TENSOR:
        return tensor
    if kind == NUMBER:
        return tensor.item()
    if kind == ARRAY:
        return tensor.cpu().numpy()
    if kind == SCALAR:
        return tensor.cpu().numpy()[()]
    if kind == OBJECT:
        return pickle.loads(tensor.cpu().numpy().tobytes())
    import cupy

    return cupy.from_dlpack(tensor)


def check_writable(data: Data) -> None:
    """Refuse data that results cannot be written into.

    Raises:
        ValueError: If a leaf is a number or a scalar, or is part of automatic differentiation.
    """
    for kind, tensor, path in zip(data.kinds, data.tensors, containers.paths(data.structure), strict=True):
        if kind not in (TENSOR, ARRAY, CUPY):
            raise ValueError(f"{path} is a {kind}, which cannot be written into.\nTake the result that is returned.")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{path} has a gradient, and cannot be written into.\nTake the result, or use torch.no_grad()."
            )
