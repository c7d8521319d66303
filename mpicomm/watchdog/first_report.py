"""Selects the rank that reports the cause of a failure: the first one that claims it in the job's store."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

from mpicomm.watchdog import rank_0_monitor

_ANSWER_SECONDS = 2.0  # the longest wait for the answer of rank 0's store


def claim_in(store: Any, rank: int) -> Callable[[], bool]:
    """Return a function that returns whether this rank is the first to report the cause.

    Args:
        store: The store of the job, a `torch.distributed.Store`.
    """

    def ask(answers: list[bool]) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 and its store have exited
            # A separate connection, since another thread may be waiting on the store. It is opened only now, since each
            # connection is an open file of rank 0, which may have thousands of ranks.
            private = store.clone()
            private.set_timeout(datetime.timedelta(seconds=_ANSWER_SECONDS))
            answers.append(private.add("mpicomm/failures", 1) == 1)

    def is_first() -> bool:
        answers: list[bool] = []
        # If rank 0 is stopped (SIGSTOP), the store never answers and ignores its timeout: hence a thread.
        asking = threading.Thread(target=ask, args=(answers,), daemon=True)
        asking.start()
        asking.join(_ANSWER_SECONDS)
        if not answers:
            time.sleep(rank_0_monitor.turn_of(rank))  # meanwhile a lower rank may report the cause and abort the job
        return answers[0] if answers else True  # two reports are better than none

    return is_first
