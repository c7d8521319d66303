"""Output of one rank for the whole job: a `print` of rank 0, and a filter for the records of `logging`."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Any

from mpicomm.job import session
from mpicomm.launch import detect


def print_rank_0(*values: object, **options: Any) -> None:
    """Call `print` on rank 0 only. Does not communicate: ranks may call it alone, also before `bootstrap`.

    Before `bootstrap`, the variables of the launcher decide. A process that is no rank of a job prints.

    Args:
        values: What to print.
        options: The arguments of `print`: sep, end, file and flush.

    Raises:
        TypeError: On rank 0, if `print` does not have an argument of this name.
    """
    if _rank() == 0:
        print(*values, **options)


class RankFilter(logging.Filter):
    """Passes the log records of some ranks, by default of rank 0, and gives records the attribute `rank`.

    Add it to handlers or loggers: a filter of a handler also filters the records of other libraries. It does not
    communicate, and works also before `bootstrap`, as `print_rank_0`. Records of at least `other_level` pass on every
    rank. A record that has an attribute `rank`, from `extra`, keeps it.
    """

    def __init__(self, ranks: Collection[int] | None = (0,), *, other_level: int = logging.ERROR) -> None:
        """Create the filter.

        Args:
            ranks: The ranks whose records pass; None for all ranks.
            other_level: The level from which the records of the other ranks pass, too.

        Raises:
            TypeError: If the ranks are no collection.
        """
        super().__init__()
        self._ranks = None if ranks is None else frozenset(ranks)
        self._other_level = other_level

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes, and set its attribute `rank`."""
        rank = _rank()
        vars(record).setdefault("rank", rank)
        return self._ranks is None or rank in self._ranks or record.levelno >= self._other_level


def _rank() -> int:
    """Return the rank of this process in the job, or the likely one before `bootstrap`."""
    current = session.current()
    return detect.guess_rank(os.environ) if current is None else current.world.rank
