"""Text of Kubernetes manifests: the part of YAML that mappings, lists, texts, numbers and booleans need."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

Value = Mapping[str, "Value"] | Sequence["Value"] | str | int | bool

_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.ASCII)
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
"""Words that YAML 1.1 does not read as text; Kubernetes still uses it."""


def text(documents: Sequence[Mapping[str, Value]]) -> str:
    """Return the documents as one file."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(each)) for each in documents)


def _lines(value: Value) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, each in value.items() for line in _entry(key, each)]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for each in value for line in _indented(_lines(each), "- ", "  ")]
    return [_scalar(value)]


def _entry(key: str, value: Value) -> list[str]:
    lines = _lines(value)
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, str) and value:
        return [f"{key}:", *_indented(lines, "  ", "  ")]
    return [f"{key}: {lines[0]}"]


def _indented(lines: Sequence[str], first: str, others: str) -> list[str]:
    return [f"{others if index else first}{line}" for index, line in enumerate(lines)]


def _scalar(value: Value) -> str:
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT):
        return '"' + "".join(map(_escaped, value)) + '"'
    return value if isinstance(value, str) else json.dumps(value)


def _escaped(character: str) -> str:
    if character in '\\"':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"
