"""Types of arguments that several subcommands take."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path


def count(text: str) -> int:
    """Return a number from 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Return several, which stand between commas."""
    return tuple(count(each) for each in text.split(","))


def png(text: str) -> Path:
    """Return the path of a picture that is to be written."""
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"expected a file *.png, got {text}; name it {path.with_suffix('.png')}")
    return path


def among(what: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the type of several words between commas, which are known; "all" is all of them.

    Args:
        what: What such a word stands for.
    """

    def words(text: str) -> list[str]:
        found = list(known) if text == "all" else text.split(",")
        if unknown := [word for word in found if word not in known]:
            raise argparse.ArgumentTypeError(f"there is no {what} {unknown[0]}; there are {', '.join(known)}")
        return found

    return words


def check_writable(path: Path) -> None:
    """Refuse early a file that could not be written in the end.

    Raises:
        OSError: If it could not.
    """
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OSError(f"cannot write {path}; name a file in a directory that you may write to.")
