"""The parser of every subcommand: it reports unknown arguments with the name of the subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose subcommands report unknown arguments; argparse leaves that to the top-level parser."""

    line: tuple[str, ...] = ()
    """The arguments to parse."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the arguments; exit with status 2 if one of them is unknown."""
        self.line = tuple(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(self.line, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown
