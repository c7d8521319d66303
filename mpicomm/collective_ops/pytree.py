"""Containers of data: taken apart into leaves, told to others, and put together again.

A container is a dict, OrderedDict, list, tuple, namedtuple or dataclass of containers; what else it holds are leaves,
which `leaves.py` knows, and None. What is around the leaves is told as plain nested tuples.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpicomm.errors import MpicommError

Structure = tuple[Any, ...]
"""(kind,), (kind, children), (kind, keys, children) or (kind, class, keys, children)."""

LEAF: Structure = ("leaf",)
_NONE: Structure = ("none",)
_DEEPEST = 100
_KEYS = frozenset({str, int, type(None)})  # not what is equal to another: 1, 1.0, True
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": collections.OrderedDict}

TENSOR, ARRAY, SCALAR, CUPY, NUMBER, OBJECT = "tensor", "array", "scalar", "cupy", "number", "object"
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = _PLAIN_TENSORS | {np.ndarray, bool, int, float, complex}
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@dataclasses.dataclass(frozen=True)
class Data:
    """What an operation was given, taken apart."""

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
        """Whether each leaf takes part in automatic differentiation, where the operation was called."""
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
    structure = take_apart(data, found, _PLAIN)
    if _are_plain_tensors(found):
        return Data(structure, (TENSOR,) * len(found), found)
    pairs = [_as_tensor(leaf, what) for leaf in found]
    is_read_only = any(isinstance(leaf, np.ndarray) and not leaf.flags.writeable for leaf in found)
    return Data(structure, tuple([kind for kind, _ in pairs]), [tensor for _, tensor in pairs], is_read_only)


def rebuild(structure: Structure, kinds: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
    """Return data of a structure, from the tensors of its leaves."""
    if set(kinds) == {TENSOR}:
        return put_together(structure, iter(tensors))
    return put_together(structure, map(_restored, kinds, tensors))


def pickled(thing: Any) -> Data:
    """Return an object as data of one leaf."""
    try:
        memory = bytearray(pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:  # whatever the object's own methods raise
        raise TypeError(f"a {type(thing).__name__} cannot be pickled: {error}\nSend what it is made of.") from error
    return Data(LEAF, (OBJECT,), [torch.frombuffer(memory, dtype=torch.uint8)])


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
        f"For other objects there is the operation's `_object` form."
    )


def _of_number(number: Any, dtype: torch.dtype, what: str) -> torch.Tensor:
    try:
        return torch.tensor(number, dtype=dtype, device="cpu")
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(f"{what}: {number} does not fit into 64 bits.\nUse the operation's `_object` form.") from error


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
            f"Convert it (np.ascontiguousarray, astype), or use the operation's `_object` form."
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
    for kind, tensor, path in zip(data.kinds, data.tensors, paths(data.structure), strict=True):
        if kind not in (TENSOR, ARRAY, CUPY):
            raise ValueError(f"{path} is a {kind}, which cannot be written into.\nTake the result that is returned.")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{path} has a gradient, and cannot be written into.\nTake the result, or use torch.no_grad()."
            )


# -- containers -----------------------------------------------------------------------------------------------------


def take_apart(data: Any, leaves: list[Any], plain: frozenset[type], depth: int = 0) -> Structure:
    """Put each leaf into `leaves`, in order, and return the structure around them.

    Args:
        plain: Types that are leaves; others may be too, and are looked at more closely.

    Raises:
        TypeError: If a container cannot be put together again elsewhere.
        ValueError: If it is too deep, or holds itself.
    """
    kind: Any = type(data)
    if kind in plain:
        leaves.append(data)
        return LEAF
    if kind is dict or kind is collections.OrderedDict:
        name = "dict" if kind is dict else "ordered"
        keys = tuple(data)
        _check_keys(keys)
        children: Any = data.values()
        head: tuple[Any, ...] = (name, keys)
    elif kind is list or kind is tuple:
        children, head = data, (kind.__name__,)
    elif data is None:
        return _NONE
    elif isinstance(data, tuple) and hasattr(data, "_fields"):
        children, head = data, ("namedtuple", _name_of(kind))
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        keys = tuple(field.name for field in dataclasses.fields(data))
        children, head = [getattr(data, key) for key in keys], ("dataclass", _name_of(kind), keys)
    elif isinstance(data, (Mapping, list, tuple, set, frozenset)):
        raise TypeError(
            f"a {kind.__name__} cannot be sent leaf by leaf.\n"
            f"Use a dict, OrderedDict, list, tuple, namedtuple or dataclass, or the operation's `_object` form."
        )
    else:
        leaves.append(data)
        return LEAF
    if depth >= _DEEPEST:
        raise ValueError(f"the container is more than {_DEEPEST} deep.\nDoes it hold itself? Flatten it.")
    if plain.issuperset(map(type, children)):  # at once: there may be thousands
        leaves.extend(children)
        return (*head, (LEAF,) * len(children))
    return (*head, tuple([take_apart(child, leaves, plain, depth + 1) for child in children]))


def put_together(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Return the container of a structure around some leaves.

    Raises:
        MpicommError: If a class of the sender's is not known here.
    """
    kind = structure[0]
    if kind == "leaf":
        return next(leaves)
    if kind == "none":
        return None
    inner = structure[-1]
    if inner.count(LEAF) == len(inner):
        children = list(itertools.islice(leaves, len(inner)))
    else:
        children = [put_together(child, leaves) for child in inner]
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind in _DICTS:
        return _DICTS[kind](zip(structure[1], children, strict=True))
    known = _class_of(structure[1])
    if kind == "namedtuple":
        return known(*children)
    return _dataclass(known, dict(zip(structure[2], children, strict=True)))


def paths(structure: Structure, here: str = "") -> Iterator[str]:
    """Return where each leaf is, as one would write it in Python."""
    kind = structure[0]
    if kind == "leaf":
        yield here or "the data"
    elif kind != "none":
        for place, child in zip(_places(structure), structure[-1], strict=True):
            yield from paths(child, here + place)


def from_plain(plain: Any, depth: int = 0) -> Structure:
    """Return a structure that came as lists of lists, checked.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(plain, list) or not plain or depth > _DEEPEST:
        raise ValueError("no structure")
    kind, *rest = plain
    if kind in ("leaf", "none") and not rest:
        return LEAF if kind == "leaf" else _NONE
    forms = {"list": 1, "tuple": 1, "dict": 2, "ordered": 2, "namedtuple": 2, "dataclass": 3}
    if forms.get(kind) != len(rest) or not isinstance(rest[-1], list):
        raise ValueError("no structure")
    children = tuple([from_plain(child, depth + 1) for child in rest[-1]])
    if kind in ("namedtuple", "dataclass") and not isinstance(rest[0], str):
        raise ValueError("no structure")
    if kind in ("dict", "ordered", "dataclass"):
        keys = rest[-2]
        if not isinstance(keys, list) or len(keys) != len(children) or any(type(key) not in _KEYS for key in keys):
            raise ValueError("no structure")
        return (kind, *rest[:-2], tuple(keys), children)
    return (kind, *rest[:-1], children)


def _places(structure: Structure) -> Sequence[str]:
    kind = structure[0]
    if kind in _DICTS:
        return [f"[{key!r}]" for key in structure[1]]
    if kind == "dataclass":
        return [f".{key}" for key in structure[2]]
    return [f"[{index}]" for index in range(len(structure[-1]))]


def _check_keys(keys: Sequence[Any]) -> None:
    if _KEYS.issuperset(map(type, keys)):
        return
    for key in keys:
        if type(key) not in _KEYS:
            raise TypeError(
                f"a dict has the key {key!r}, a {type(key).__name__}.\n"
                f"Use keys that are text or whole numbers, or the operation's `_object` form."
            )


@functools.cache
def _name_of(kind: Any) -> str:
    """Return the name by which other ranks find a class.

    Raises:
        TypeError: If they cannot.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _found(name) is not kind:
        raise TypeError(
            f"{kind.__qualname__} is not found in {kind.__module__} under that name, so other ranks cannot find it.\n"
            f"Define it at the top of a module, not within a function."
        )
    return name


def _class_of(name: str) -> Any:
    """Return the class that a sender named.

    Raises:
        MpicommError: If there is no such namedtuple or dataclass here.
    """
    found = _found(name)
    if isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields")):
        return found
    raise MpicommError(
        f"the data hold a {name}, which is no namedtuple or dataclass here.\nDefine it where all ranks import it."
    )


def _found(name: str) -> Any:
    """Return what a module has under a name; None if it has nothing."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found


def _dataclass(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass with these fields, as it was: its constructor has run once."""
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
