"""The threads of a group, started by the first operation that needs them."""

from __future__ import annotations

import collections
import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from mpicomm import mpi
from mpicomm.backend import future_callbacks
from mpicomm.backend.future_callbacks import FutureCallback
from mpicomm.backend.gpus import ThreadDevice
from mpicomm.backend.wake_timer import WakeTimer
from mpicomm.backend.work import MessageWork, QueuedWork
from mpicomm.errors import MpicommError

_NOW_NS, _SOON_NS = 1, 200_000  # delays of the worker's timer: a program that waits does so within the longer one
_START_SECONDS = 1e-3  # the longest time that `submit` waits for the worker's thread to start a long job
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two rounds of the poller
_SHARE = 19  # a pause is at least this many times as long as the round before it, up to the following limit
# A round is also long if its thread was suspended or waited for the GIL, and `stop` waits for the pause.
_LONGEST_PROPORTIONAL_PAUSE = 0.25
_QUIET_SECONDS = 0.1  # without messages, before the poller sleeps until the next one; waking it costs the caller time


class Finishable(Protocol):
    """An entry of the queue: an operation's work, or a callback."""

    def finish(self, error: BaseException | None) -> None:
        """Complete the entry, after its call has returned or raised `error`."""


Job = tuple[Callable[[], None], Finishable, Sequence[FutureCallback], bool]
_DENORMAL = struct.unpack("d", bytes([1, *[0] * 7]))[0]  # from its bits: this thread may treat denormals as zero


class Worker:
    """Runs a group's asynchronous operations in order, each as a blocking MPI call.

    A thread of its own runs them; a thread that waits for one of them runs them instead if they have not begun. Since
    most programs wait soon, the worker's thread wakes up only after a short delay, unless nobody else runs the job.
    """

    def __init__(self, name: str) -> None:
        self._jobs: collections.deque[Job] = collections.deque()
        self._timer = WakeTimer()
        self._is_stopping = False
        self._running = threading.Lock()  # held by the thread that runs jobs
        self._runner = 0  # the ident of that thread
        self._lock = threading.RLock()  # guards the following
        self._changed = threading.Condition(self._lock)
        self._pending = 0
        self._open: dict[Finishable, None] = {}  # entries that have not finished, in queue order
        self._awaited: Sequence[FutureCallback] = ()  # the callbacks that the next job waits for
        self._gpu = ThreadDevice()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether the queue is empty and nothing is running."""
        return self._pending == 0

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the thread that is running jobs, that is, in a callback of an operation."""
        return threading.get_ident() == self._runner  # current_thread() adds dummies for threads started by C++

    def submit(
        self, call: Callable[[], None], work: Finishable, after: Sequence[FutureCallback] = (), *, is_long: bool = False
    ) -> None:
        """Queue a call.

        Args:
            work: Finished after the call.
            after: The callbacks of other groups for which the call waits.
            is_long: Whether the call takes so long that it should start now, if the queue is empty.
        """
        self._gpu.note()
        job = call, work, after, _flushes_denormals()
        with self._lock:
            starts_now = is_long and self._pending == 0
            # The timer first: an exception of a signal handler then leaves no job without a thread that will run it.
            if starts_now or not self._may_be_taken(job):
                self._timer.set(_NOW_NS)
            elif self._pending == 0:
                self._timer.set(_SOON_NS)
            self._pending += 1
            self._open[work] = None
            self._jobs.append(job)
            if starts_now:  # a caller that continues in pure Python would keep the GIL from the thread for milliseconds
                self._changed.wait_for(lambda: not self._jobs, _START_SECONDS)

    def hurry(self) -> None:
        """Wake the thread for the queued jobs now: a thread waits for one of them that does not run it."""
        if self._jobs:
            self._timer.set(_NOW_NS)

    def wait_for_place_of(self, callback: FutureCallback) -> None:
        """For a callback of another group: wait for the jobs queued before it, but not for those that wait for it."""
        self.hurry()
        with self._lock:
            self._changed.wait_for(lambda: self.is_idle or callback in self._awaited)

    def wait_until_idle(self) -> None:
        """Wait until the queue is empty and nothing is running."""
        self.hurry()
        with self._lock:
            self._changed.wait_for(lambda: self.is_idle)

    def stop(self) -> None:
        """Run the queued jobs, then stop the thread."""
        is_here = self.is_current_thread  # in a callback that destroys the group
        if is_here:
            self.run_until(lambda: False)
        self._is_stopping = True
        self._timer.set(_NOW_NS)
        if not is_here:
            self._thread.join()

    def give_up(self, error: Exception) -> None:
        """Finish all unfinished works with an error, and stop the thread; a call that does not return is abandoned."""
        with self._lock:
            works, self._open = list(self._open), {}
        for work in works:
            work.finish(error)
        self._is_stopping = True
        self._timer.set(_NOW_NS)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run queued jobs until `done`, for a callback on this thread that waits for a job queued behind it."""
        while not done() and (job := self._next_job()):
            self._run_job(*job)

    def run_for(self, work: QueuedWork) -> None:
        """Run the queued jobs on the calling thread until `work` is done, unless another thread is running them.

        Callbacks, and jobs that wait for callbacks of other groups, are left to the worker thread. So is everything if
        the program uses a GPU, since the worker has a stream of its own.
        """
        if not self._running.acquire(blocking=False):
            return
        try:  # an exception of a signal handler, at any call, must not keep the lock
            runs_queue = future_callbacks.set_queue_thread(True)
            try:
                self._runner = threading.get_ident()
                while self._jobs and self._may_be_taken(self._jobs[0]) and not work.is_completed():
                    self._run_job(*self._jobs.popleft())
            finally:
                future_callbacks.set_queue_thread(runs_queue)
        finally:
            self._runner = 0
            self._running.release()

    def _may_be_taken(self, job: Job) -> bool:
        """Return whether a thread that waits for a job, or for one behind it, may run it."""
        _call, work, after, _flushes = job
        return isinstance(work, QueuedWork) and not after and not self._gpu.is_known

    def _run(self) -> None:
        future_callbacks.set_queue_thread(True)
        is_last = False
        while not is_last:
            self._timer.wait()
            is_last = self._is_stopping  # read before the last jobs are taken, which were queued before it was set
            with self._running:
                self._runner = threading.get_ident()
                try:
                    while job := self._next_job():
                        self._gpu.enter()  # before each job: the program may begin to use a GPU at any time
                        self._run_job(*job)
                finally:
                    self._runner = 0
        self._timer.close()

    def _next_job(self) -> Job | None:
        with self._lock:  # not while a job is added, whose timer may have expired
            if not self._jobs:
                return None
            self._changed.notify_all()  # `submit` may wait for this
            return self._jobs.popleft()

    def _run_job(
        self, call: Callable[[], None], work: Finishable, after: Sequence[FutureCallback], flushes_denormals: bool
    ) -> None:
        if flushes_denormals != _flushes_denormals():
            with _flushing_denormals(flushes_denormals):
                self._run_job(call, work, after, flushes_denormals)
            return
        error: BaseException | None = None
        try:
            self._wait_for(after)
            if work in self._open:
                call()
        except BaseException as caught:  # noqa: BLE001  wait() raises it, on its caller's thread
            error = caught
        with self._lock:
            is_given_up = work not in self._open
            self._open.pop(work, None)
        try:
            if not is_given_up:
                work.finish(error)
        finally:
            # Only now: operations that the callbacks call precede those that another thread calls next.
            with self._lock:
                self._pending -= 1
                self._changed.notify_all()
        if error is not None and not isinstance(error, Exception):
            raise error  # a signal handler's, on the thread that waits

    def _wait_for(self, after: Sequence[FutureCallback]) -> None:
        if not after:
            return
        with self._lock:
            self._awaited = after
            self._changed.notify_all()
        for callback in after:
            callback.has_ended.wait()
        with self._lock:
            self._awaited = ()


class Poller:
    """Progresses a group's messages, which advance only during MPI calls, and completes their futures.

    It uses at most a twentieth of a core's time, however many messages are in flight.
    """

    def __init__(self, name: str, advance: Callable[[], bool]) -> None:
        """Start the thread.

        Args:
            advance: Tests every message in flight once, and returns whether any is left.
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
        """Complete the future of `work` when its message has completed."""
        self._gpu.note()
        with self._changed:
            if not self._stopping:
                self._watched.append(work)
                self._changed.notify()
                return
        work.finish()

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
            least = min(_SHARE * (now - start), _LONGEST_PROPORTIONAL_PAUSE)
            time.sleep(max(pause if self._watched else _LONGEST_PAUSE, least))

    def _look(self) -> bool:
        self._gpu.enter()
        return self._advance()

    def _finish_watched(self) -> bool:
        """Complete the futures of completed messages; return whether there were any."""
        with self._changed:
            watched = list(self._watched)
        through = {work for work in watched if work.is_completed()}
        with self._changed:
            self._watched = [work for work in self._watched if work not in through]
        if through:
            with future_callbacks.of_messages():
                for work in through:
                    work.finish()
        return bool(through)

    def _wait_for_more(self) -> None:
        """Sleep until messages may be in flight again."""
        with self._changed:
            self.is_idle = True  # set before the last test: a thread reads this after it has added a message
            while not (self._watched or self._stopping or self._look()):
                self._changed.wait()
            self.is_idle = False


def _flushes_denormals() -> bool:
    """Return whether this thread computes with denormal numbers as zero; torch cannot tell."""
    return _DENORMAL * 2 == 0


@contextlib.contextmanager
def _flushing_denormals(mode: bool) -> Iterator[None]:
    """Let this thread compute with denormal numbers as another one does."""
    torch.set_flush_denormal(mode)
    try:
        yield
    finally:
        torch.set_flush_denormal(not mode)


def require_threads() -> None:
    """Check that threads may call MPI.

    Raises:
        MpicommError: If MPI provides a lower thread level.
    """
    if not mpi.serves_threads():
        raise MpicommError(
            "asynchronous operations require the MPI thread level MPI_THREAD_MULTIPLE, "
            "but MPI provides a lower level.\nUse async_op=False, or let mpicomm.bootstrap() initialise MPI."
        )
