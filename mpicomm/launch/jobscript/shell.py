"""Words and commands for bash, quoted so that no value can break the script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence


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
    return "$'" + "".join(map(_escaped, word)) + "'"


def joined(words: Iterable[str], variable: str | None = None) -> str:
    """Quote words and join them into one command."""
    return " ".join(quoted(word, variable) for word in words)


def broken(*rows: Sequence[str], indent: str = "") -> str:
    """Return a command on several lines; its words are shell code, quoted where necessary."""
    return f" \\\n{indent}    ".join(" ".join(row) for row in rows if row)


def _escaped(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))
