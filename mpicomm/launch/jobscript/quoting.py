"""Words of bash and texts of YAML, quoted so that no value can break a script or a manifest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

_PLAIN_YAML = re.compile(r"[A-Za-z/][\w./-]*", re.ASCII)
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
"""Words that YAML 1.1 does not read as text; Kubernetes still uses it."""


def quoted(word: str, variable: str | None = None) -> str:
    """Quote a word for bash, always on one line: a newline would end a comment, and PBS does not accept CR.

    Args:
        variable: The name of a variable that bash expands in the word, as $NAME or ${NAME}.
    """
    if variable is not None:
        texts = re.split(rf"\$(?:{variable}\b|{{{variable}}})", word)
        if len(texts) > 1:
            return f'"${variable}"'.join(quoted(text) if text else "" for text in texts)
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escaped_for_bash, word)) + "'"


def joined(words: Iterable[str], variable: str | None = None) -> str:
    """Quote words for bash and join them into one command."""
    return " ".join(quoted(word, variable) for word in words)


def yaml(value: str | int) -> str:
    """Write a value as a text of YAML on one line, in quotes if it could be read as something else."""
    text = str(value)
    if _PLAIN_YAML.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return '"' + "".join(map(_escaped_for_yaml, text)) + '"'


def _escaped_for_bash(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))


def _escaped_for_yaml(character: str) -> str:
    if character in '\\"':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"
