"""The output of a rank that reports why the job ends: written in one piece, and by one rank of the job only."""

from __future__ import annotations

import contextlib
import datetime
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_CLAIM_SECONDS = 2.0  # the longest wait for the answer of rank 0's store
_TURN_SECONDS = 2.0  # a rank that reports in place of rank 0 waits so much longer than the rank before it

MAX_REPORTERS = 8
"""How many ranks may report in place of rank 0."""


def claim_in(store: Any, rank: int) -> Callable[[], bool]:
    """Return a function that claims the report of the cause: it returns whether this rank is the first.

    Args:
        store: The store of the job, a `torch.distributed.Store`.
    """

    def ask(answers: list[bool]) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 and its store have exited
            # A separate connection, since another thread may be waiting on the store. It is opened only now, since each
            # connection is an open file of rank 0, which may have thousands of ranks.
            private = store.clone()
            private.set_timeout(datetime.timedelta(seconds=_CLAIM_SECONDS))
            answers.append(private.add("mpicomm/failures", 1) == 1)

    def is_first() -> bool:
        answers: list[bool] = []
        # If rank 0 is stopped (SIGSTOP), the store never answers and ignores its timeout: hence a thread.
        asking = threading.Thread(target=ask, args=(answers,), daemon=True)
        asking.start()
        asking.join(_CLAIM_SECONDS)
        if not answers:
            time.sleep(turn_of(rank))  # meanwhile a lower rank may report the cause and abort the job
        return answers[0] if answers else True  # two reports are better than none

    return is_first


def turn_of(rank: int) -> float:
    """Return how many seconds a rank waits for lower ranks to report, when rank 0 does not respond."""
    return _TURN_SECONDS * min(max(rank - 1, 0), MAX_REPORTERS)


def print_stderr(text: str) -> None:
    """Write to stderr in one piece, so that the lines of several ranks do not interleave."""
    with contextlib.suppress(Exception):  # a failing stream must not keep the rank from aborting the job
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.stderr: torch's hook replaces it by a buffer that it prints only after the job has been aborted, and
        # pytest by a file. In a job, mpicomm.testing.pytest_plugin lets sys.__stderr__ bypass that file.
        stream = sys.__stderr__ or sys.stderr
        stream.write(text)
        stream.flush()
