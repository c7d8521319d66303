"""Pytrees: flattens containers of data into leaves and a structure, and rebuilds them.

A container is a dict, OrderedDict, list, tuple, namedtuple or dataclass of containers, leaves and None. A leaf is a
tensor, array, scalar or number, or a pickled object. The structure around the leaves is a plain nested tuple.
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
"""(kind,), (kind, children), (kind, keys or class, children) or (kind, class, keys, children)."""

LEAF: Structure = ("leaf",)
_NONE: Structure = ("none",)
_DEEPEST = 100  # levels of nesting
_KEYS = frozenset({str, int, type(None)})  # no float or bool: 1, 1.0 and True are equal as keys
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": collections.OrderedDict}

TENSOR, ARRAY, SCALAR, CUPY, NUMBER, OBJECT = "tensor", "array", "scalar", "cupy", "number", "object"
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = _PLAIN_TENSORS | {np.ndarray, bool, int, float, complex}
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@dataclasses.dataclass(frozen=True)
class Data:
    """The flattened data of an operation."""

    structure: Structure
    kinds: tuple[str, ...]
    tensors: list[torch.Tensor]
    """One for each leaf; arrays and tensors share the caller's memory."""

    is_read_only: bool = False
    """Whether an array is read-only; its tensor is then a copy."""

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
        """The device type of each leaf."""
        if all([tensor.is_cpu for tensor in self.tensors]):  # noqa: C419  a list is made faster than a generator
            return ("cpu",) * len(self.tensors)
        return tuple([tensor.device.type for tensor in self.tensors])

    @functools.cached_property
    def gradients(self) -> tuple[bool, ...]:
        """Whether each leaf requires a gradient; all False where grad mode is off."""
        if not torch.is_grad_enabled():
            return (False,) * len(self.tensors)
        return tuple([tensor.requires_grad for tensor in self.tensors])

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return data of the same structure and kinds with other content."""
        return rebuild(self.structure, self.kinds, tensors)


NOTHING = Data(_NONE, (), [])
"""Data without leaves, for calls that only their arguments describe."""


def take(data: Any, what: str) -> Data:
    """Flatten data into leaves.

    Args:
        data: The data.
        what: The name of the operation, for messages.

    Raises:
        TypeError: If a leaf or a container is of an unsupported type.
        ValueError: If a number does not fit into 64 bits, or the containers are nested too deeply.
    """
    found: list[Any] = []
    structure = flatten(data, found, _PLAIN)
    if _are_plain_tensors(found):
        return Data(structure, (TENSOR,) * len(found), found)
    pairs = [_as_tensor(leaf, what) for leaf in found]
    is_read_only = any(isinstance(leaf, np.ndarray) and not leaf.flags.writeable for leaf in found)
    return Data(structure, tuple([kind for kind, _ in pairs]), [tensor for _, tensor in pairs], is_read_only)


def rebuild(structure: Structure, kinds: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
    """Return the data of a structure, from the tensors of its leaves."""
    if set(kinds) == {TENSOR}:
        return unflatten(structure, iter(tensors))
    return unflatten(structure, map(_restored, kinds, tensors))


def pickled(thing: Any) -> Data:
    """Return an object as data of one leaf, which holds its pickle.

    Raises:
        TypeError: If the object cannot be pickled.
    """
    try:
        memory = bytearray(pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:  # the object's own methods may raise anything
        raise TypeError(
            f"a {type(thing).__name__} cannot be pickled: {error}\nPass the picklable parts of it."
        ) from error
    return Data(LEAF, (OBJECT,), [torch.frombuffer(memory, dtype=torch.uint8)])


def _are_plain_tensors(found: list[Any]) -> bool:
    """Return whether all leaves are tensors that can be sent without conversion."""
    return (
        _PLAIN_TENSORS.issuperset(map(type, found))
        and {tensor.layout for tensor in found} <= {torch.strided}
        and not any([tensor.is_quantized for tensor in found])  # noqa: C419  as above
    )


def _as_tensor(leaf: Any, what: str) -> tuple[str, torch.Tensor]:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided or leaf.is_quantized:
            raise TypeError(
                f"{what}: expected a dense tensor that is not quantized, got one of layout {leaf.layout}.\n"
                f"Convert it with to_dense() or dequantize()."
            )
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
        f"Use an `_object` operation, such as all_gather_object, for other objects."
    )


def _of_number(number: Any, dtype: torch.dtype, what: str) -> torch.Tensor:
    try:
        return torch.tensor(number, dtype=dtype, device="cpu")
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{what}: {number} does not fit into 64 bits.\nUse an `_object` operation, such as all_gather_object."
        ) from error


def _of_array(array: np.ndarray, what: str) -> torch.Tensor:
    if type(array) is not np.ndarray:
        raise TypeError(
            f"{what}: expected a plain numpy.ndarray, got its subclass {type(array).__name__}.\n"
            f"Pass np.asarray(array) if only its values matter."
        )
    try:
        # torch warns about read-only memory, so it is copied; results are never written into the copy.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what}: an array of {array.dtype} with strides {array.strides} cannot be converted to a tensor: {error}\n"
            f"Convert it (np.ascontiguousarray, astype), or use an `_object` operation, such as all_gather_object."
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
    """Check that results can be written into the leaves.

    Raises:
        ValueError: If a leaf is a number, a scalar or a read-only array, or requires a gradient.
    """
    if data.is_read_only:
        raise ValueError("an array is read-only: the result cannot be written into it.\nPass a writable copy of it.")
    for kind, tensor, path in zip(data.kinds, data.tensors, paths(data.structure), strict=True):
        if kind not in (TENSOR, ARRAY, CUPY):
            raise ValueError(
                f"{path} is a {kind}, which cannot be modified in place.\n"
                f"Pass a tensor or an array, or use the result that the operation returns."
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{path} requires a gradient and cannot be modified in place.\n"
                f"Use the result that the operation returns, or call it under torch.no_grad()."
            )


# -- containers -----------------------------------------------------------------------------------------------------


def flatten(data: Any, leaves: list[Any], plain: frozenset[type], depth: int = 0) -> Structure:
    """Append each leaf to `leaves`, in order, and return the structure around them.

    Args:
        data: The data.
        leaves: The list to append to.
        plain: Types that are always leaves; the other types are examined further.
        depth: The levels of nesting above `data`.

    Raises:
        TypeError: If another rank could not rebuild a container.
        ValueError: If the containers are nested too deeply, as in one that contains itself.
    """
    # 1. leaves, and the kind and children of a container
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
            f"expected a dict, OrderedDict, list, tuple, namedtuple or dataclass as container, got a {kind.__name__}.\n"
            f"Convert it to one of these, or use an `_object` operation, such as all_gather_object."
        )
    else:
        leaves.append(data)
        return LEAF
    if depth >= _DEEPEST:
        raise ValueError(
            f"the container is nested more than {_DEEPEST} levels deep.\n"
            f"Flatten it, and check that it does not contain itself."
        )
    # 2. the structure of the children
    if plain.issuperset(map(type, children)):  # a fast path: there may be thousands of leaves
        leaves.extend(children)
        return (*head, (LEAF,) * len(children))
    return (*head, tuple([flatten(child, leaves, plain, depth + 1) for child in children]))


def unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Return the container of a structure around some leaves.

    Raises:
        MpicommError: If this rank cannot import a class of the sender.
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
        children = [unflatten(child, leaves) for child in inner]
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
    """Yield the path of each leaf as a Python expression, such as `['b'][1]`."""
    kind = structure[0]
    if kind == "leaf":
        yield here or "the data"
    elif kind != "none":
        for place, child in zip(_places(structure), structure[-1], strict=True):
            yield from paths(child, here + place)


def from_plain(plain: Any, depth: int = 0) -> Structure:
    """Return the structure that was received as nested lists, after validation.

    Raises:
        ValueError: If the lists do not form a valid structure.
    """
    if not isinstance(plain, list) or not plain or depth > _DEEPEST:
        raise ValueError("invalid structure")
    kind, *rest = plain
    if kind in ("leaf", "none") and not rest:
        return LEAF if kind == "leaf" else _NONE
    forms = {"list": 1, "tuple": 1, "dict": 2, "ordered": 2, "namedtuple": 2, "dataclass": 3}
    if forms.get(kind) != len(rest) or not isinstance(rest[-1], list):
        raise ValueError("invalid structure")
    children = tuple([from_plain(child, depth + 1) for child in rest[-1]])
    if kind in ("namedtuple", "dataclass") and not isinstance(rest[0], str):
        raise ValueError("invalid structure")
    if kind in ("dict", "ordered", "dataclass"):
        keys = rest[-2]
        if not isinstance(keys, list) or len(keys) != len(children) or any(type(key) not in _KEYS for key in keys):
            raise ValueError("invalid structure")
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
                f"dict keys must be str, int or None, got {key!r} ({type(key).__name__}).\n"
                f"Convert the keys, or use an `_object` operation, such as all_gather_object."
            )


@functools.cache
def _name_of(kind: Any) -> str:
    """Return the name by which other ranks import a class.

    Raises:
        TypeError: If the class cannot be imported under its name.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _found(name) is not kind:
        raise TypeError(
            f"cannot import {kind.__qualname__} from {kind.__module__}: other ranks need it to rebuild the data.\n"
            f"Define it at the top level of a module, not within a function."
        )
    return name


def _class_of(name: str) -> Any:
    """Return the class that a sender named.

    Raises:
        MpicommError: If this rank cannot import it, or it is not a namedtuple or dataclass.
    """
    found = _found(name)
    if isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields")):
        return found
    raise MpicommError(
        f"the received data contain a {name}, which is not a namedtuple or dataclass on this rank.\n"
        f"Define the class in a module that all ranks can import."
    )


def _found(name: str) -> Any:
    """Return the object with a name, `module:qualified.name`; None if it does not exist."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found


def _dataclass(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass with these fields, without calling its constructor, which has run on the sender."""
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
