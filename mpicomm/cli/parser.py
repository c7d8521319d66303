"""The parser of every subcommand: it reports unknown arguments under the subcommand's own name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose subcommands report unknown arguments themselves; argparse leaves that to the top one."""

    line: tuple[str, ...] = ()
    """The arguments that are parsed."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the arguments; exit with status 2 if one of them is unknown."""
        self.line = tuple(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(self.line, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown
