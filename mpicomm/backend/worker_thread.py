"""The threads of a group, started by the first operation that needs them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mpicomm.backend import callbacks
from mpicomm.backend.callbacks import Callback
from mpicomm.backend.gpus import ThreadDevice
from mpicomm.backend.work import MessageWork

_STOP = None
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two rounds of the poller
_SHARE = 19  # its pauses are so many times as long as its rounds
_QUIET_SECONDS = 0.1  # without a message, after which it sleeps until there is one: to be woken costs the caller


class Finishable(Protocol):
    """What waits in the queue: an operation's work, or a callback."""

    def finish(self, error: BaseException | None) -> None:
        """Take note that its turn is over."""


Job = tuple[Callable[[], None], Finishable, Sequence[Callback]]


class Worker:
    """Runs a group's asynchronous operations one after the other, each as a blocking MPI call."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._count = threading.Condition()
        self._pending = 0
        self._open: dict[Finishable, None] = {}  # in the order of the queue
        self.submitted = 0
        self._begun = 0
        self._awaited: Sequence[Callback] = ()  # what the next job waits for
        self._gpu = ThreadDevice()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing is queued or running."""
        return self._pending == 0

    @property
    def is_current_thread(self) -> bool:
        """Tell whether the caller is this worker: a callback of one of its operations."""
        return threading.get_ident() == self._thread.ident  # current_thread() makes up threads that C++ has started

    def submit(self, call: Callable[[], None], work: Finishable, after: Sequence[Callback] = ()) -> None:
        """Queue a call, which waits for callbacks of other groups; `work` is finished after it."""
        self._gpu.note()
        with self._count:
            self._pending += 1
            self.submitted += 1
            self._open[work] = None
            self._jobs.put((call, work, after))

    def wait_for_place_of(self, callback: Callback) -> None:
        """For a callback of another group: wait for what was queued before it, but not for what waits for it."""
        with self._count:
            self._count.wait_for(lambda: self.is_idle or callback in self._awaited)

    def wait_until_idle(self) -> None:
        """Wait until nothing is queued or running."""
        with self._count:
            self._count.wait_for(lambda: self.is_idle)

    def stop(self) -> None:
        """Run what is queued, then end the thread."""
        if self.is_current_thread:  # a callback that destroys the group
            self.run_until(lambda: self._begun == self.submitted)
        self._jobs.put(_STOP)
        if not self.is_current_thread:
            self._thread.join()

    def give_up(self, error: Exception) -> None:
        """End the works of all that has not ended with an error; a call that does not come back is left behind."""
        with self._count:
            works, self._open = list(self._open), {}
        for work in works:
            work.finish(error)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run what is queued until `done`; for a callback, on this thread, that waits for what is queued behind it."""
        while not done():
            job = self._jobs.get()
            if job is _STOP:
                self._jobs.put(_STOP)
                return
            self._run_job(*job)

    def _run(self) -> None:
        callbacks.enter_queue_thread()
        while (job := self._jobs.get()) is not _STOP:
            self._gpu.enter()
            self._run_job(*job)
            del job  # or the last operation's tensors would live until the next

    def _run_job(self, call: Callable[[], None], work: Finishable, after: Sequence[Callback]) -> None:
        error: BaseException | None = None
        self._begun += 1
        self._wait_for(after)
        try:
            if work in self._open:
                call()
        except Exception as caught:  # noqa: BLE001  raised by wait(), on the thread that asks
            error = caught
        with self._count:
            is_given_up = work not in self._open
            self._open.pop(work, None)
        try:
            if not is_given_up:
                work.finish(error)
        finally:
            # Only now: what the callbacks call comes before what another thread calls next.
            with self._count:
                self._pending -= 1
                self._count.notify_all()

    def _wait_for(self, after: Sequence[Callback]) -> None:
        if not after:
            return
        with self._count:
            self._awaited = after
            self._count.notify_all()
        for callback in after:
            callback.has_ended.wait()
        with self._count:
            self._awaited = ()


class Poller:
    """Drives a group's messages on, since only calls into MPI let them advance, and finishes their futures.

    It costs a core no more than a twentieth of its time, however many messages are open.
    """

    def __init__(self, name: str, advance: Callable[[], bool]) -> None:
        """Start the thread.

        Args:
            advance: Looks at every message in flight once, and tells whether any is left.
        """
        self._advance = advance
        self._changed = threading.Condition()
        self._watched: list[MessageWork] = []
        self._stopping = False
        self.is_idle = False
        self._gpu = ThreadDevice()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, work: MessageWork) -> None:
        """Finish `work`, whose future somebody holds, when its message is through."""
        self._gpu.note()
        with self._changed:
            if not self._stopping:
                self._watched.append(work)
                self._changed.notify()
                return
        work.finish()

    def rouse(self) -> None:
        """Look at what is in flight again."""
        self._gpu.note()
        with self._changed:
            self._changed.notify()

    def stop(self) -> None:
        """End the thread; messages that are not through end with an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if threading.get_ident() != self._thread.ident:
            self._thread.join()
        for work in self._watched:
            work.finish()

    def _run(self) -> None:
        pause, quiet_since = _SHORTEST_PAUSE, time.monotonic()
        while not self._stopping:
            start = time.monotonic()
            if self._look():
                quiet_since = start
            is_moving = self._finish_watched()
            pause = _SHORTEST_PAUSE if is_moving else min(2 * pause, _LONGEST_PAUSE)
            now = time.monotonic()
            if not self._watched and now - quiet_since > _QUIET_SECONDS:
                self._wait_for_more()
                pause, quiet_since = _LONGEST_PAUSE, time.monotonic()
            time.sleep(max(pause if self._watched else _LONGEST_PAUSE, _SHARE * (now - start)))

    def _look(self) -> bool:
        self._gpu.enter()
        return self._advance()

    def _finish_watched(self) -> bool:
        """Finish the futures of messages that are through; tell whether there were any."""
        with self._changed:
            watched = list(self._watched)
        through = {work for work in watched if work.is_completed()}
        with self._changed:
            self._watched = [work for work in self._watched if work not in through]
        if through:
            with callbacks.of_messages():
                for work in through:
                    work.finish()
        return bool(through)

    def _wait_for_more(self) -> None:
        """Sleep until there may be something in flight again."""
        with self._changed:
            self.is_idle = True  # before the last look: who adds a message looks at this after it
            while not (self._watched or self._stopping or self._look()):
                self._changed.wait()
            self.is_idle = False
