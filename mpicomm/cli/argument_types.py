"""Argument types that several subcommands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Parse positive integers separated by commas."""
    return tuple(count(each) for each in text.split(","))


def png(text: str) -> Path:
    """Parse the path of a PNG file to write."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"expected a .png file, got {text}; use {path.with_suffix('.png')}")
    return path


def among(what: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of known words separated by commas; "all" stands for all of them.

    Args:
        what: What a word names, for messages.
    """

    def words(text: str) -> list[str]:
        found = list(known) if text == "all" else text.split(",")
        if unknown := [word for word in found if word not in known]:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]}; expected one of {', '.join(known)}")
        return found

    return words


def check_writable(path: Path) -> None:
    """Check before a measurement that its result file can be written.

    Raises:
        OSError: If the file cannot be written.
    """
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OSError(f"cannot write {path}; use a file in a writable directory.")
