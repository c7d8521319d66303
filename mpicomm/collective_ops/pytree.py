"""Pytrees: flattens containers of data into leaves and a structure, and rebuilds them.

A container is a dict, OrderedDict, list, tuple, namedtuple or dataclass of containers, leaves and None. A leaf is a
tensor, array, scalar or number, or a pickled object.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import pickle
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from mpicomm.errors import MpicommError

T = TypeVar("T")
Structure = Any
"""The containers around the leaves, which JSON can encode: LEAF, NONE, or (kind, name of the class, keys, children)."""

LEAF, NONE = "leaf", "none"
HOST, GPU = "cpu", "GPU"  # where a leaf is; the ranks' GPUs may have different indices
_DEEPEST = 100  # levels of nesting
_KEYS = frozenset({str, int, type(None)})  # no float or bool: 1, 1.0 and True are equal as keys
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple}
_DICTS: dict[str, Any] = {"dict": dict, "ordered": collections.OrderedDict}
_KEYED = (*_DICTS, "dataclass")
_CONTAINERS = (*_KEYED, *_SEQUENCES, "namedtuple")

TENSOR, ARRAY, SCALAR, CUPY, NUMBER, OBJECT = "tensor", "array", "scalar", "cupy", "number", "object"
TERM, FACTOR = "term", "factor"  # Python integers in a sum and in a product, which may leave 64 bits
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = _PLAIN_TENSORS | {np.ndarray, bool, int, float, complex}
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class Description(NamedTuple):
    """The structure of data and the properties of its leaves, without their content."""

    structure: Structure
    kinds: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Sequence[Any], ...]
    devices: tuple[str, ...]
    """The kind of device of each leaf: HOST or GPU."""

    gradients: tuple[bool, ...]
    """Whether each leaf requires a gradient; all False where grad mode is off."""

    @property
    def leaves(self) -> Iterator[tuple[str, torch.dtype, Sequence[Any], str, bool]]:
        """The kind, dtype, shape, device type and gradient of each leaf."""
        return zip(self.kinds, self.dtypes, self.shapes, self.devices, self.gradients, strict=True)

    @property
    def has_gradient(self) -> bool:
        """Whether a leaf requires a gradient."""
        return any(self.gradients)

    def with_lengths(self, lengths: Iterable[Any]) -> Description:
        """Return the description with other lengths of the leaves' first dimensions; scalars are unchanged."""
        shapes = [(length, *shape[1:]) if shape else shape for length, shape in zip(lengths, self.shapes, strict=True)]
        return self._replace(shapes=tuple(shapes))

    def rebuilt(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return data of this structure and these kinds, from the tensors of its leaves."""
        if set(self.kinds) == {TENSOR}:
            return unflatten(self.structure, iter(tensors))
        leaves = [_RESTORED[kind](tensor) for kind, tensor in zip(self.kinds, tensors, strict=True)]
        return unflatten(self.structure, iter(leaves))


class Data(NamedTuple):
    """The flattened data of an operation."""

    description: Description
    tensors: Sequence[torch.Tensor]
    """One for each leaf; arrays and tensors share the caller's memory."""

    @classmethod
    def of(cls, structure: Structure, kinds: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> Data:
        """Return data with a description of its tensors."""
        has_grad_mode = torch.is_grad_enabled()
        description = Description(
            structure,
            kinds,
            dtypes=tuple([tensor.dtype for tensor in tensors]),
            shapes=tuple([tensor.shape for tensor in tensors]),
            devices=tuple([HOST if tensor.is_cpu else GPU for tensor in tensors]),
            gradients=tuple([has_grad_mode and tensor.requires_grad for tensor in tensors]),
        )
        return cls(description, tensors)


def take(data: Any, operation: str, *, is_output: bool = False) -> Data:
    """Flatten data into leaves.

    Args:
        data: The data.
        operation: The name of the operation, for messages.
        is_output: Check that results can be written into the leaves.

    Raises:
        TypeError: If a leaf or a container is of an unsupported type.
        ValueError: If a number does not fit into 64 bits, the containers are nested too deeply, or results cannot be
            written into a leaf.
    """
    leaves: list[Any] = []
    structure = flatten(data, leaves, _PLAIN)
    if _are_plain_tensors(leaves):
        taken = Data.of(structure, (TENSOR,) * len(leaves), leaves)
    else:
        pairs = [_as_tensor(leaf, operation) for leaf in leaves]
        taken = Data.of(structure, tuple([kind for kind, _ in pairs]), [tensor for _, tensor in pairs])
    if is_output:
        _check_writable(leaves, taken.description, operation)
    return taken


def tensors_in(data: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of data; none if its containers are of other kinds, as in an object."""
    leaves: list[Any] = []
    with contextlib.suppress(TypeError, ValueError):
        flatten(data, leaves, _PLAIN)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def or_error(taken: Callable[[], T]) -> T | Exception:
    """Return the data to send, or the error that prevents it: the sender must report it to the waiting ranks."""
    try:
        return taken()
    except Exception as error:  # noqa: BLE001  raised after the other ranks know of it
        return error


def pickled(thing: Any, operation: str) -> Data:
    """Return an object as data of one leaf, which holds its pickle.

    Args:
        thing: The object.
        operation: The name of the operation, for messages.

    Raises:
        TypeError: If the object cannot be pickled.
    """
    try:
        memory = bytearray(pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:  # the object's own methods may raise anything
        raise TypeError(
            f"{operation}: expected an object that can be pickled, got a {type(thing).__name__}: {error}\n"
            f"Pass the picklable parts of it."
        ) from error
    return Data.of(LEAF, (OBJECT,), [torch.frombuffer(memory, dtype=torch.uint8)])


def term(value: int) -> torch.Tensor:
    """Return the upper and the lower 32 bits of an integer of 64 bits: the sums of both over 2^31 ranks are exact."""
    return torch.tensor([value >> 32, value & 0xFFFFFFFF], dtype=torch.int64, device="cpu")


def _of_term(tensor: torch.Tensor) -> int:
    upper, lower = tensor.tolist()
    return (upper << 32) + lower


def factor(value: int, rank: int, size: int) -> torch.Tensor:
    """Return an integer at this rank's place among ones: the product over the ranks has all of their integers."""
    factors = torch.ones(size, dtype=torch.int64, device="cpu")
    factors[rank] = value
    return factors


def unpickled(tensor: torch.Tensor) -> Any:
    """Return the object whose pickle a tensor holds."""
    return pickle.loads(tensor.cpu().numpy().tobytes())


def _are_plain_tensors(leaves: list[Any]) -> bool:
    """Return whether all leaves are tensors that can be sent without conversion."""
    return (
        _PLAIN_TENSORS.issuperset(map(type, leaves))
        and {tensor.layout for tensor in leaves} <= {torch.strided}
        and not any([tensor.is_quantized or tensor.is_nested for tensor in leaves])  # noqa: C419  faster
    )


def _as_tensor(leaf: Any, operation: str) -> tuple[str, torch.Tensor]:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
            got = "a nested one" if leaf.is_nested else f"one of layout {leaf.layout}"
            raise TypeError(
                f"{operation}: expected a dense tensor that is not quantized, got {got}.\n"
                f"Convert it with to_dense(), dequantize() or to_padded_tensor()."
            )
        return TENSOR, leaf
    if (dtype := _NUMBERS.get(type(leaf))) is not None:
        return NUMBER, _of_number(leaf, dtype, operation)
    if isinstance(leaf, np.ndarray):
        return ARRAY, _of_array(leaf, operation)
    if isinstance(leaf, np.generic):
        return SCALAR, _of_array(np.array(leaf), operation)
    if type(leaf).__module__.partition(".")[0] == "cupy":
        return CUPY, torch.from_dlpack(leaf)
    raise TypeError(
        f"{operation}: expected tensors, arrays, numbers or containers of them, got a {type(leaf).__name__}.\n"
        f"Use an `_object` operation, such as all_gather_object, for other objects."
    )


def _of_number(number: Any, dtype: torch.dtype, operation: str) -> torch.Tensor:
    try:
        return torch.tensor(number, dtype=dtype, device="cpu")
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{operation}: {number} does not fit into 64 bits.\nUse an `_object` operation, such as all_gather_object."
        ) from error


def _of_array(array: np.ndarray, operation: str) -> torch.Tensor:
    if type(array) is not np.ndarray:
        raise TypeError(
            f"{operation}: expected a plain numpy.ndarray, got its subclass {type(array).__name__}.\n"
            f"Pass np.asarray(array) if only its values matter."
        )
    try:
        # torch warns about read-only memory, so it is copied; results are never written into the copy.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{operation}: an array of {array.dtype} with strides {array.strides} cannot be converted to a tensor: "
            f"{error}\n"
            f"Convert it (np.ascontiguousarray, astype), or use an `_object` operation, such as all_gather_object."
        ) from error


def _cupy_array(tensor: torch.Tensor) -> Any:
    import cupy

    return cupy.from_dlpack(tensor)


_RESTORED: dict[str, Callable[[torch.Tensor], Any]] = {
    TENSOR: lambda tensor: tensor,
    ARRAY: lambda tensor: tensor.cpu().numpy(),
    SCALAR: lambda tensor: tensor.cpu().numpy()[()],
    CUPY: _cupy_array,
    NUMBER: torch.Tensor.item,
    TERM: _of_term,
    FACTOR: lambda tensor: math.prod(tensor.tolist()),
    OBJECT: unpickled,
}
KINDS = tuple(_RESTORED)


def _check_writable(leaves: Sequence[Any], description: Description, operation: str) -> None:
    """Check that results can be written into the leaves.

    Raises:
        ValueError: If a leaf is a number, a scalar or a read-only array, is expanded, or requires a gradient.
    """
    rows = zip(leaves, description.kinds, description.gradients, paths(description.structure), strict=True)
    for leaf, kind, has_gradient, path in rows:
        if kind not in (TENSOR, ARRAY, CUPY):
            raise ValueError(
                f"{operation}: {path} is a {kind}, which cannot be modified in place.\n"
                f"Pass a tensor or an array, or use the result that the operation returns."
            )
        if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
            raise ValueError(
                f"{operation}: {path} is read-only: the result cannot be written into it.\nPass a writable copy of it."
            )
        if isinstance(leaf, torch.Tensor) and _is_expanded(leaf):
            raise ValueError(
                f"{operation}: {path} is expanded: several of its elements share memory.\n"
                f"Pass a copy of it (tensor.contiguous()), or use the result that the operation returns."
            )
        if has_gradient:
            raise ValueError(
                f"{operation}: {path} requires a gradient and cannot be modified in place.\n"
                f"Use the result that the operation returns, or call it under torch.no_grad()."
            )


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))


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
    cls: Any = type(data)
    if cls in plain:
        leaves.append(data)
        return LEAF
    name, children = "", data
    keys: tuple[Any, ...] = ()
    if cls is dict or cls is collections.OrderedDict:
        kind = "dict" if cls is dict else "ordered"
        keys = tuple(data)
        _check_keys(keys)
        children = data.values()
    elif cls is list or cls is tuple:
        kind = cls.__name__
    elif data is None:
        return NONE
    elif isinstance(data, tuple) and hasattr(data, "_fields"):
        kind, name = "namedtuple", _name_of(cls)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        kind, name = "dataclass", _name_of(cls)
        keys = tuple([field.name for field in dataclasses.fields(data)])
        children = [getattr(data, key) for key in keys]
    elif isinstance(data, (Mapping, list, tuple, set, frozenset)):
        raise TypeError(
            f"expected a dict, OrderedDict, list, tuple, namedtuple or dataclass as container, got a {cls.__name__}.\n"
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
        return (kind, name, keys, (LEAF,) * len(children))
    return (kind, name, keys, tuple([flatten(child, leaves, plain, depth + 1) for child in children]))


def unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Return the container of a structure around some leaves.

    Raises:
        MpicommError: If this rank cannot import a class of the sender.
    """
    if structure == LEAF:
        return next(leaves)
    if structure == NONE:
        return None
    kind, name, keys, inner = structure
    if inner.count(LEAF) == len(inner):
        children = list(itertools.islice(leaves, len(inner)))
    else:
        children = [unflatten(child, leaves) for child in inner]
    if kind in _DICTS:
        return _DICTS[kind](zip(keys, children, strict=True))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](children)
    if kind == "namedtuple":
        return _class_of(name)(*children)
    return _dataclass(_class_of(name), dict(zip(keys, children, strict=True)))


def paths(structure: Structure, here: str = "") -> Iterator[str]:
    """Yield the path of each leaf as a Python expression, such as `['b'][1]`."""
    if structure == LEAF:
        yield here or "the data"
    elif structure != NONE:
        kind, _, keys, children = structure
        places = keys if kind in _KEYED else range(len(children))
        for place, child in zip(places, children, strict=True):
            yield from paths(child, f"{here}.{place}" if kind == "dataclass" else f"{here}[{place!r}]")


def from_plain(plain: Any, depth: int = 0) -> Structure:
    """Return the structure that was received as nested lists, after validation.

    Raises:
        ValueError: If the lists do not form a valid structure.
    """
    if plain in (LEAF, NONE):
        return plain
    if not isinstance(plain, list) or len(plain) != 4 or depth > _DEEPEST:
        raise ValueError("invalid structure")
    kind, name, keys, children = plain
    is_valid = (
        kind in _CONTAINERS
        and isinstance(name, str)
        and isinstance(keys, list)
        and isinstance(children, list)
        and len(keys) == (len(children) if kind in _KEYED else 0)
        and all(type(key) in _KEYS for key in keys)
    )
    if not is_valid:
        raise ValueError("invalid structure")
    return (kind, name, tuple(keys), tuple([from_plain(child, depth + 1) for child in children]))


def _check_keys(keys: Sequence[Any]) -> None:
    if not _KEYS.issuperset(map(type, keys)):
        wrong = next(key for key in keys if type(key) not in _KEYS)
        raise TypeError(
            f"dict keys must be str, int or None, got {wrong!r} ({type(wrong).__name__}).\n"
            f"Convert the keys, or use an `_object` operation, such as all_gather_object."
        )


@functools.cache
def _name_of(kind: Any) -> str:
    """Return the name by which other ranks import a class.

    Raises:
        TypeError: If the class cannot be imported under its name.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _resolved(name) is not kind:
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
    resolved = _resolved(name)
    if isinstance(resolved, type) and (dataclasses.is_dataclass(resolved) or hasattr(resolved, "_fields")):
        return resolved
    raise MpicommError(
        f"the received data contain a {name}, which is not a namedtuple or dataclass on this rank.\n"
        f"Define the class in a module that all ranks can import."
    )


def _resolved(name: str) -> Any:
    """Return the object with a name, `module:qualified.name`; None if it does not exist."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None


def _dataclass(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass with these fields, without calling its constructor, which has run on the sender."""
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
