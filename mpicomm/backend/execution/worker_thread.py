"""The thread that runs a group's asynchronous operations, started by the first of them, and its timer."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence

import torch

from mpicomm import mpi
from mpicomm.backend.execution import future_callbacks
from mpicomm.backend.execution.future_callbacks import FutureCallback
from mpicomm.backend.execution.work import QueuedWork
from mpicomm.backend.gpu.thread_device import ThreadDevice
from mpicomm.errors import MpicommError

# Delays of the worker's timer. A program that waits for an operation does so within the longer one, and then runs the
# operation itself: the worker's thread would only compete for the core and the GIL.
_WAKE_NOW_NS = 1  # zero would disarm the timer
_WAKE_SOON_NS = 200_000
_START_SECONDS = 1e-3  # the longest time that `submit` waits for the worker's thread to start a long job


Finishable = QueuedWork | FutureCallback
"""An entry of the queue: an operation's work, or a callback. `finish` completes it after its call has ended."""


@dataclasses.dataclass(eq=False)
class QueuedJob:
    """A call that stays in the queue until its work is complete.

    On the main thread, an exception of a signal handler may end the code that runs a job at any call. The worker's
    thread, which runs no signal handlers, then continues the job.
    """

    call: Callable[[], None]
    work: Finishable
    after: Sequence[FutureCallback]
    flushes_denormals: bool
    error: BaseException | None = None
    is_finishing: bool = False
    is_given_up: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether the call, or the completion of its work, has begun."""
        return self.is_finishing or self.work.has_begun


Jobs = collections.deque[QueuedJob]

_DENORMAL = struct.unpack("d", bytes([1, *[0] * 7]))[0]  # from its bits: this thread may treat denormals as zero


class Worker:
    """Runs a group's asynchronous operations in order, each as a blocking MPI call.

    A thread of its own runs them; a thread that waits for one of them runs them instead if they have not begun. Since
    most programs wait soon, the worker's thread wakes up only after a short delay, unless nobody else runs the job.
    """

    def __init__(self, name: str, jobs: Jobs) -> None:
        """Start the thread.

        Args:
            jobs: The queue: the queued jobs, and those in progress; empty.
        """
        self._timer = WakeTimer()
        self._is_stopping = False
        self._running = threading.Lock()  # held by the thread that runs jobs
        self._runner = 0  # the ident of that thread
        self._lock = threading.RLock()  # guards the following
        self._changed = threading.Condition(self._lock)
        self.jobs = jobs
        self._awaited_callbacks: Sequence[FutureCallback] = ()  # the callbacks that the next job waits for
        self._gpu = ThreadDevice()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether the queue is empty and nothing is running."""
        return not self.jobs

    @property
    def is_running_here(self) -> bool:
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
        job = self.make_job(call, work, after)
        with self._lock:
            starts_now = is_long and self.is_idle
            # The timer first: an exception of a signal handler then leaves no job without a thread that will run it.
            if starts_now or not self._can_run_on_waiting_thread(job):
                self._timer.set(_WAKE_NOW_NS)
            elif self.is_idle:
                self._timer.set(_WAKE_SOON_NS)
            self.jobs.append(job)
            if starts_now:  # a caller that continues in pure Python would keep the GIL from the thread for milliseconds
                self._changed.wait_for(lambda: self._runner != 0 or self.is_idle, _START_SECONDS)

    def make_job(self, call: Callable[[], None], work: Finishable, after: Sequence[FutureCallback] = ()) -> QueuedJob:
        """Return a job that is not queued; see `submit`."""
        self._gpu.note()
        return QueuedJob(call, work, after, _flushes_denormals())

    def wake_for(self, job: QueuedJob) -> None:
        """Wake the thread for a queued job; soon, if a thread that waits for the job may run it."""
        self._timer.set(_WAKE_SOON_NS if self._can_run_on_waiting_thread(job) else _WAKE_NOW_NS)

    def wake_now(self) -> None:
        """Wake the thread for the queued jobs now: a thread waits for one of them that does not run it."""
        if self.jobs:
            self._timer.set(_WAKE_NOW_NS)

    def wait_until_next(self, callback: FutureCallback) -> None:
        """For a callback of another group: wait for the jobs queued before it, but not for those that wait for it."""
        self.wake_now()
        with self._lock:
            self._changed.wait_for(lambda: self.is_idle or callback in self._awaited_callbacks)

    def wait_until_idle(self) -> None:
        """Wait until the queue is empty and nothing is running."""
        self.wake_now()
        with self._lock:
            self._changed.wait_for(lambda: self.is_idle)

    def stop(self) -> None:
        """Run the queued jobs, then stop the thread."""
        is_here = self.is_running_here  # in a callback that destroys the group
        if is_here:
            self.run_until(lambda: False)
        self._is_stopping = True
        self._timer.set(_WAKE_NOW_NS)
        if not is_here:
            self._thread.join()

    def give_up(self, error: Exception) -> None:
        """Finish all unfinished works with an error, and stop the thread; a call that does not return is abandoned."""
        with self._lock:
            jobs = [job for job in self.jobs if not job.is_finishing]
            for job in jobs:
                job.is_given_up = True
        for job in jobs:
            job.work.finish(error)
        self._is_stopping = True
        self._timer.set(_WAKE_NOW_NS)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run queued jobs until `done`, for a callback on this thread that waits for a job queued behind it."""
        while not done() and (job := self._next_job(is_nested=True)):
            self._run_here(job)

    def run_until_done(self, work: QueuedWork) -> None:
        """Run the queued jobs on the calling thread until `work` is done, unless another thread is running them.

        Callbacks, and jobs that wait for callbacks of other groups, are left to the worker thread. So is everything if
        the program uses a GPU, since the worker has a stream of its own.
        """
        if self.is_running_here:
            self.run_until(work.is_completed)
            return
        thread = future_callbacks.this_thread
        runs_queue = thread.runs_queue
        is_held: list[bool] = []
        try:
            # A signal handler runs before or after a call of C, here when the list has the result. No calls precede the
            # release below: a handler's exception there would keep the lock.
            is_held.extend(map(self._running.acquire, (False,)))
            if True in is_held:
                thread.runs_queue = True
                self._runner = threading.get_ident()
                while not work.is_completed() and (job := self._next_job()) and self._can_run_on_waiting_thread(job):
                    self._run_here(job)
        finally:
            if True in is_held:
                thread.runs_queue = runs_queue
                self._runner = 0
                self._running.release()

    def _can_run_on_waiting_thread(self, job: QueuedJob) -> bool:
        """Return whether a thread that waits for a job, or for one behind it, may run it."""
        return isinstance(job.work, QueuedWork) and not job.after and self._gpu.device is None

    def _run(self) -> None:
        future_callbacks.this_thread.runs_queue = True
        is_last = False
        while not is_last:
            self._timer.wait()
            is_last = self._is_stopping  # read before the last jobs are taken, which were queued before it was set
            with self._running:
                self._runner = threading.get_ident()
                try:
                    while job := self._next_job():
                        self._gpu.enter()  # before each job: the program may begin to use a GPU at any time
                        try:
                            self._run_job(job)
                        finally:
                            self._remove(job)
                finally:
                    self._runner = 0
        self._timer.close()

    def _next_job(self, *, is_nested: bool = False) -> QueuedJob | None:
        """Return the first job that is not in progress on this thread.

        Args:
            is_nested: Whether a job is in progress; otherwise a job that has begun was interrupted, and continues.
        """
        with self._lock:  # not while a job is added, whose timer may have expired
            self._changed.notify_all()  # also after a removal that was interrupted; `submit` may wait for this
            for job in tuple(self.jobs):  # the extension module may add one meanwhile
                if not (is_nested and job.has_begun):
                    return job
            return None

    def _remove(self, job: QueuedJob) -> None:
        """Remove a job whose work is complete.

        Only then: operations that its callbacks call precede those that another thread calls next.
        """
        with self._lock:
            self.jobs.remove(job)
            self._changed.notify_all()

    def _run_here(self, job: QueuedJob) -> None:
        """Run a job on a thread of the program."""
        self._run_job(job)
        self._remove(job)
        if job.error is not None and not isinstance(job.error, Exception):
            raise job.error  # a signal handler's

    def _run_job(self, job: QueuedJob) -> None:
        """Run a job, or the rest of it if it was interrupted."""
        flushes_denormals = _flushes_denormals()
        try:
            if job.flushes_denormals != flushes_denormals:
                torch.set_flush_denormal(job.flushes_denormals)
            if not job.has_begun:
                self._call(job)
            with self._lock:
                job.is_finishing = not job.is_given_up
            if job.is_finishing:
                job.work.finish(job.error)
        finally:
            if job.flushes_denormals != flushes_denormals:
                torch.set_flush_denormal(flushes_denormals)

    def _call(self, job: QueuedJob) -> None:
        self._wait_for(job.after)
        if job.is_given_up:
            return
        try:
            job.error = None
            job.call()
        except BaseException as caught:  # wait() raises it, on its caller's thread
            job.error = caught
            if not job.has_begun:  # a signal handler's, before the call: the job can still run
                raise

    def _wait_for(self, after: Sequence[FutureCallback]) -> None:
        if not after:
            return
        with self._lock:
            self._awaited_callbacks = after
            self._changed.notify_all()
        for callback in after:
            callback.has_ended.wait()
        with self._lock:
            self._awaited_callbacks = ()


def _flushes_denormals() -> bool:
    """Return whether this thread computes with denormal numbers as zero; torch cannot tell."""
    return _DENORMAL * 2 == 0


def require_threads() -> None:
    """Check that threads may call MPI.

    Raises:
        MpicommError: If MPI provides a lower thread level.
    """
    if not mpi.has_thread_multiple():
        raise MpicommError(
            "asynchronous operations require the MPI thread level MPI_THREAD_MULTIPLE, "
            "but MPI provides a lower level.\nUse async_op=False, or let mpicomm.bootstrap() initialise MPI."
        )


# -- the timer of a thread ---------------------------------------------------------------------------------------------


class _Setting(ctypes.Structure):
    """The `struct itimerspec` of Linux with 64-bit times."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class WakeTimer:
    """Wakes one thread, now or after a delay (timerfd of Linux).

    To wake a thread at once costs its waker tens of microseconds if both share a core: the thread then competes for the
    core and for the GIL. Setting the timer again before it expires postpones that: one system call, which on a virtual
    machine took 1 to 14 us.
    """

    def __init__(self) -> None:
        self._fd = _libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), f"timerfd_create failed: {os.strerror(ctypes.get_errno())}")
        self._set = _libc().timerfd_settime

    def set(self, nanoseconds: int) -> None:
        """Let `wait` return after at least one nanosecond.

        An earlier setting is replaced, also one that has expired if `wait` has not returned since.
        """
        if self._fd >= 0:
            self._set(self._fd, 0, _setting(nanoseconds), None)

    def wait(self) -> None:
        """Sleep until the timer has expired."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Release the timer; later settings have no effect."""
        fd, self._fd = self._fd, -1
        os.close(fd)


@functools.cache
def _setting(nanoseconds: int) -> object:
    seconds, rest = divmod(nanoseconds, 10**9)
    return ctypes.byref(_Setting(value_s=seconds, value_ns=rest))


@functools.cache
def _libc() -> ctypes.PyDLL:
    return ctypes.PyDLL(None, use_errno=True)  # these calls do not block: it keeps the GIL, which CDLL would release
