"""Messages as JSON: frozen dataclasses, sent as objects that name their class."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # Python has it since 3.11

    def dataclass_transform(**_arguments: bool) -> Callable[[type], type]:
        """Do nothing: only type checkers use the decorator."""
        return lambda kind: kind


_CLASS = "$class"  # the key of the class in a JSON object
_classes: dict[str, type[Message]] = {}


@dataclass_transform(frozen_default=True)
class Message:
    """The base class of all messages, and of the values in them. Each subclass becomes a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        _classes[cls.__name__] = cls


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    return json.dumps(message, default=_to_object, separators=(",", ":")).encode()


def decode(text: bytes) -> Message | None:
    """Return the message of a JSON text; None for an object that is not a message, or whose fields are not valid.

    Raises:
        ValueError: If the text is not a JSON object.
        RecursionError: If it is nested too deeply.
    """
    try:
        value = json.loads(text, object_hook=_from_object)
    except (KeyError, TypeError):  # unknown class; missing, unknown or invalid field
        return None
    if not isinstance(value, (Message, dict)):
        raise ValueError("not a JSON object")
    return value if isinstance(value, Message) else None


def _to_object(message: Message) -> dict[str, Any]:
    return {_CLASS: type(message).__name__, **vars(message)}


def _from_object(values: dict[str, Any]) -> Message | dict[str, Any]:
    if _CLASS not in values:  # the sequences by group
        return values
    name = values.pop(_CLASS)
    for field, is_valid in _validators(name).items():
        if not is_valid(values[field]):
            raise TypeError(field)
    return _classes[name](**values)


@functools.cache
def _validators(name: str) -> dict[str, Callable[[Any], bool]]:
    """Return, by field, a function that returns whether a value has the type of the field."""
    return {field: _validator(hint) for field, hint in get_type_hints(_classes[name]).items()}


def _validator(hint: Any) -> Callable[[Any], bool]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        is_valid = _validator(arguments[0])
        return lambda value: isinstance(value, list) and all(map(is_valid, value))
    if origin is dict:  # its keys are strings, as in all JSON
        is_valid = _validator(arguments[1])
        return lambda value: isinstance(value, dict) and all(map(is_valid, value.values()))
    accepted = arguments or (hint,)  # the arguments of a union
    if float in accepted:
        accepted = (*accepted, int)
    return lambda value: isinstance(value, accepted)
