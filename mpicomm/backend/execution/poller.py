"""The thread that makes the messages of a group progress while nobody waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mpicomm.backend.execution import future_callbacks
from mpicomm.backend.execution.message_work import MessageWork
from mpicomm.backend.gpu.thread_device import ThreadDevice

_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two rounds of the poller
_MAX_POLLING_SHARE = 0.05  # of a core: the poller pauses in proportion to the time of the round before
# seconds: a round is also long if its thread was suspended or waited for the GIL, and `stop` waits for the pause
_LONGEST_PROPORTIONAL_PAUSE = 0.25
_QUIET_SECONDS = 0.1  # without messages, before the poller sleeps until the next one; waking it costs the caller time


class Poller:
    """Progresses a group's messages, which advance only during MPI calls, and completes their futures.

    It uses at most `_MAX_POLLING_SHARE` of a core, however many messages are in flight.
    """

    def __init__(self, name: str, advance: Callable[[], bool]) -> None:
        """Start the thread.

        Args:
            advance: Tests every message in flight once, and returns whether any is left.
        """
        self._advance = advance
        self._changed = threading.Condition()
        self._watched: list[MessageWork] = []  # those with a future that somebody has asked for
        self._stopping = False
        self.is_idle = False
        self._gpu = ThreadDevice()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, work: MessageWork) -> None:
        """Complete the future of `work` when its message has completed."""
        self._gpu.note()
        with self._changed:
            if not self._stopping:
                self._watched.append(work)
                self._changed.notify()
                return
        work.complete_future()

    def rouse(self) -> None:
        """Wake the thread, to test the messages in flight again."""
        self._gpu.note()
        with self._changed:
            self._changed.notify()

    def stop(self) -> None:
        """Stop the thread; the futures of messages in flight complete with an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if threading.get_ident() != self._thread.ident:
            self._thread.join()
        for work in self._watched:
            work.complete_future()

    def _run(self) -> None:
        pause, quiet_since = _SHORTEST_PAUSE, time.monotonic()
        while not self._stopping:
            start = time.monotonic()
            if self._test_messages():
                quiet_since = start
            is_moving = self._finish_watched()
            pause = _SHORTEST_PAUSE if is_moving else min(2 * pause, _LONGEST_PAUSE)
            now = time.monotonic()
            if not self._watched and now - quiet_since > _QUIET_SECONDS:
                self._wait_for_more()
                pause, quiet_since = _LONGEST_PAUSE, time.monotonic()
            proportional = min((1 / _MAX_POLLING_SHARE - 1) * (now - start), _LONGEST_PROPORTIONAL_PAUSE)
            time.sleep(max(pause if self._watched else _LONGEST_PAUSE, proportional))

    def _test_messages(self) -> bool:
        self._gpu.enter()
        return self._advance()

    def _finish_watched(self) -> bool:
        """Complete the futures of completed messages; return whether there were any."""
        with self._changed:
            watched = list(self._watched)
        completed = {work for work in watched if work.is_completed()}
        with self._changed:
            self._watched = [work for work in self._watched if work not in completed]
        if completed:
            with future_callbacks.running_message_callbacks():
                for work in completed:
                    work.complete_future()
        return bool(completed)

    def _wait_for_more(self) -> None:
        """Sleep until messages may be in flight again."""
        with self._changed:
            self.is_idle = True  # set before the last test: a thread reads this after it has added a message
            while not (self._watched or self._stopping or self._test_messages()):
                self._changed.wait()
            self.is_idle = False
