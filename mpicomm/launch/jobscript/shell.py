"""Words, comments and exports of bash, such that nothing in a value can break the script around it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence


def quoted(word: str) -> str:
    """Return a word as bash reads it back, always on one line: a newline would end a comment, and PBS takes no CR."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escaped, word)) + "'"


def joined(words: Iterable[str]) -> str:
    """Return words as one command."""
    return " ".join(map(quoted, words))


def broken(*rows: Sequence[str], indent: str = "") -> str:
    """Return a command on several lines; its words are code already, quoted where they must be."""
    return f" \\\n{indent}    ".join(" ".join(row) for row in rows if row)


def prepared(modules: Sequence[str], venv: str | None) -> list[str]:
    """Return what makes the site's software and Python ready, or ends the job before it computes without them."""
    lines = [f"module load {joined(modules)} || exit"] if modules else []
    if venv is not None:
        lines.append(f"source {quoted(venv)}/bin/activate || exit")
    return lines


def exports(variables: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines that set variables for the ranks."""
    return [f"export {name}={quoted(value)}" for name, value in variables]


def about_gpus(ranks: int, gpus: int) -> list[str]:
    """Return what to know where not every rank of a node has one GPU."""
    if gpus in (0, ranks):
        return []
    if gpus < ranks:
        return [f"# {ranks // gpus} ranks share each GPU: NCCL refuses that, so their tensors go by MPI."]
    return [f"# bootstrap() gives each rank one GPU; {gpus - ranks} of {gpus} are idle unless the program uses them."]


def header(made_by: str, submit: str, *by_hand: str) -> list[str]:
    """Return the comment at the top: where the script comes from, and how to use it."""
    made = ["# Made by:", f"#     {made_by}"] if made_by else []
    return [*made, "# Submit:", f"#     {submit}", "# Interactively:", *[f"#     {line}" for line in by_hand]]


def _escaped(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))
