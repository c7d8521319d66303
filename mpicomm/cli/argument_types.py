"""The parser of every subcommand, the types of arguments that they share, and a check of output files."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_VALUE_MISSING = re.compile(r"argument (--directive|--launcher-arg): expected one argument")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose subcommands report unknown arguments; argparse leaves that to the top-level parser."""

    line: tuple[str, ...] = ()
    """The arguments to parse."""

    translate: Callable[[Sequence[str]], Sequence[str]] = staticmethod(tuple)
    """Replaces arguments before they are parsed."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the arguments; exit with status 2 if one of them is unknown."""
        self.line = tuple(self.translate(sys.argv[1:] if args is None else args))
        parsed, unknown = super().parse_known_args(self.line, namespace)
        if unknown:
            self.error(self.unknown_arguments(unknown))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message, which tells how to pass a value that looks like an option."""
        if match := _VALUE_MISSING.fullmatch(message):
            message += f"; write {match[1]}=VALUE, with =, for a value that begins with -"
        self.fail(message)

    def fail(self, message: str) -> NoReturn:
        """Exit with status 2 and the message."""
        super().error(message)

    def unknown_arguments(self, words: Sequence[str]) -> str:
        """Return the error message for unknown arguments."""
        return f"unrecognized arguments: {' '.join(words)}"


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return int(text)


def png(text: str) -> Path:
    """Parse the path of a PNG file to write."""
    return _path(text, (".png",))


def html(text: str) -> Path:
    """Parse the path of an HTML page to write."""
    return _path(text, (".html", ".htm"))


def _path(text: str, suffixes: Sequence[str]) -> Path:
    path = Path(text)
    if path.suffix.lower() not in suffixes:
        raise argparse.ArgumentTypeError(
            f"expected a {suffixes[0]} file, got {text}; use {path.with_suffix(suffixes[0])}"
        )
    return path


def among(noun: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of known words separated by commas; "all" stands for all of them.

    Args:
        noun: What a word names, for messages.
    """

    def words(text: str) -> list[str]:
        chosen = list(known) if text == "all" else text.split(",")
        if unknown := [word for word in chosen if word not in known]:
            raise argparse.ArgumentTypeError(f"unknown {noun} {unknown[0]}; expected one of {', '.join(known)}")
        return chosen

    return words


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """Check before the work that the output files of a command can be written, and replace no other file of it.

    Args:
        outputs: The files by option; None without the option.
        inputs: The files that the command reads.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If two of the files are the same.
    """
    uses = {path.resolve(): "which the command reads" for path in inputs}
    for option, path in outputs.items():
        if path is None:
            continue
        if use := uses.get(path.resolve()):
            raise ValueError(f"{option} {path} would replace the file {use}.\nPass another path to {option}.")
        uses[path.resolve()] = f"of {option}"
        check_writable(path)


def check_writable(path: Path) -> None:
    """Check before a measurement that its result file can be written.

    Raises:
        OSError: If the file cannot be written.
    """
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OSError(f"cannot write {path}; use a file in a writable directory.")
