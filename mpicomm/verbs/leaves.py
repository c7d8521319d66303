"""What verbs can take: tensors, arrays of NumPy and CuPy, numbers. As tensors on the way, as themselves at the end."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpicomm.verbs import containers
from mpicomm.verbs.containers import Structure

TENSOR, ARRAY, SCALAR, CUPY, NUMBER, OBJECT = "tensor", "array", "scalar", "cupy", "number", "object"
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = _PLAIN_TENSORS | {np.ndarray, bool, int, float, complex}
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@dataclasses.dataclass(frozen=True)
class Data:
    """What a verb was given, taken apart."""

    structure: Structure
    kinds: tuple[str, ...]
    tensors: list[torch.Tensor]
    """One for each leaf; arrays and tensors share the caller's memory."""

    is_read_only: bool = False
    """Whether there is an array that must not be written; its tensor is a copy."""

    @functools.cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each leaf."""
        return tuple([tensor.dtype for tensor in self.tensors])

    @functools.cached_property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The shape of each leaf."""
        return tuple([tensor.shape for tensor in self.tensors])

    @functools.cached_property
    def devices(self) -> tuple[str, ...]:
        """The type of the device on which each leaf is."""
        if all([tensor.is_cpu for tensor in self.tensors]):  # noqa: C419  a list is made faster than a generator
            return ("cpu",) * len(self.tensors)
        return tuple([tensor.device.type for tensor in self.tensors])

    @functools.cached_property
    def gradients(self) -> tuple[bool, ...]:
        """Whether each leaf takes part in automatic differentiation, where the verb was called."""
        if not torch.is_grad_enabled():
            return (False,) * len(self.tensors)
        return tuple([tensor.requires_grad for tensor in self.tensors])

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the same kind of data with other content."""
        return rebuild(self.structure, self.kinds, tensors)


def take(data: Any, what: str) -> Data:
    """Take data apart into leaves.

    Raises:
        TypeError: If a leaf is of a kind that cannot be sent.
    """
    found: list[Any] = []
    structure = containers.take_apart(data, found, _PLAIN)
    if _are_plain_tensors(found):
        return Data(structure, (TENSOR,) * len(found), found)
    pairs = [_as_tensor(leaf, what) for leaf in found]
    is_read_only = any(isinstance(leaf, np.ndarray) and not leaf.flags.writeable for leaf in found)
    return Data(structure, tuple([kind for kind, _ in pairs]), [tensor for _, tensor in pairs], is_read_only)


def rebuild(structure: Structure, kinds: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
    """Return data of a structure, from the tensors of its leaves."""
    if set(kinds) == {TENSOR}:
        return containers.put_together(structure, iter(tensors))
    return containers.put_together(structure, map(_restored, kinds, tensors))


def pickled(thing: Any) -> Data:
    """Return an object as data of one leaf."""
    try:
        memory = bytearray(pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:  # whatever the object's own methods raise
        raise TypeError(f"a {type(thing).__name__} cannot be pickled: {error}\nSend what it is made of.") from error
    return Data(containers.LEAF, (OBJECT,), [torch.frombuffer(memory, dtype=torch.uint8)])


def _are_plain_tensors(found: list[Any]) -> bool:
    """Tell whether nothing but tensors is there that can be sent as they are."""
    return (
        _PLAIN_TENSORS.issuperset(map(type, found))
        and {tensor.layout for tensor in found} <= {torch.strided}
        and not any([tensor.is_quantized for tensor in found])  # noqa: C419  as above
    )


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
    if type(array) is not np.ndarray:
        raise TypeError(
            f"{what}: a {type(array).__name__} is more than its numbers.\nPass np.asarray of it, if they are all."
        )
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
    if data.is_read_only:
        raise ValueError("an array is read-only, and cannot be written into.\nPass a copy of it.")
    for kind, tensor, path in zip(data.kinds, data.tensors, containers.paths(data.structure), strict=True):
        if kind not in (TENSOR, ARRAY, CUPY):
            raise ValueError(f"{path} is a {kind}, which cannot be written into.\nTake the result that is returned.")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{path} has a gradient, and cannot be written into.\nTake the result, or use torch.no_grad()."
            )
