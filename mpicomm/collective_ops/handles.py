"""Operations in steps, run to their end at once or in the background.

A collective operation is a generator. It starts calls of torch.distributed, yields their works, and continues when they
have completed; its return value is the result. With `async_op=True`, the steps after the first run as callbacks of the
previous step where the group uses this backend: their position among the operations is then the same on all ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch

from mpicomm import arguments, mpi
from mpicomm.arguments import FLAG
from mpicomm.backend import torch_internals
from mpicomm.backend.callbacks import all_of
from mpicomm.collective_ops import autograd
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.durations import Deadline, in_seconds
from mpicomm.watchdog import flight_recorder

Works = list[Any]
"""What operations gave back; None of one that had ended within the call."""

Steps = Generator[Works, None, Any]
_LONGEST_PAUSE = 1e-3  # seconds between two looks at what has no future
_DEFAULT_WAIT = "no limit but the group's timeout"


def run(steps: Steps) -> Any:
    """Run an operation to its end, and return its result."""
    try:
        while True:
            for work in next(steps):
                if work is not None:
                    work.wait()
    except StopIteration as end:
        return end.value


class Handle:
    """An operation that runs in the background. Its result comes from `wait()`, or from `await`."""

    def __init__(self, steps: Steps, what: str, *, in_callbacks: bool, in_order: bool) -> None:
        """Start the first step.

        Args:
            in_callbacks: Later steps run as callbacks of the one before, as well as by whoever waits.
            in_order: They run as callbacks only, since their place among the operations matters.
        """
        self._steps = steps
        self._what = what
        self._where = flight_recorder.line_of_caller()
        self._has_grad = torch.is_grad_enabled()
        self._place = torch_internals.next_node() if self._has_grad else None
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._in_callbacks = in_callbacks
        self._in_order = in_order
        self._lock = threading.RLock()
        self._state: tuple[int, Works] = (0, [])  # how many steps were run, and what the last one started
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._waiter: threading.Thread | None = None
        self._was_asked = True
        self._advance(0)
        if self._error is not None:
            raise self._error  # in the call: nothing has begun
        self._was_asked = False

    def wait(self, timeout: float | datetime.timedelta | None = None) -> Any:
        """Wait until the operation has ended, and return its result.

        Args:
            timeout: Seconds, or a timedelta; for ever if left out, or until the group's own timeout.

        Raises:
            TimeoutError: If it has not ended by then. It is still on its way, and can be waited for again.
            ValueError: If the timeout is negative or not a number.
            TypeError: If the timeout is neither seconds nor a timedelta.
        """
        return self._wait(_deadline(timeout))

    def _wait(self, deadline: Deadline | None) -> Any:
        self._was_asked = True
        if deadline is None and self._waiter is not None:
            self._waiter.join()
        elif deadline is None:
            self._finish()
        elif not mpi.poll(self.done, deadline):
            raise TimeoutError(
                f"{self._what} from {self._where} has not ended within {deadline.seconds:g} s.\n"
                f"Wait longer (the operation continues), or see what other ranks do: mpicomm.dump_flight_recorder()."
            )
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._result

    def done(self) -> bool:
        """Tell whether the operation has ended, well or not; looking drives it on."""
        if not self._in_callbacks:
            self._finish_elsewhere()
        while not self._ended.is_set():
            step, works = self._state
            if self._in_order or not self._in_callbacks or not all(work.is_completed() for work in works):
                return False
            self._go_on(step, works)
        self._was_asked = True
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait within an event loop, which goes on meanwhile."""
        self._was_asked = True
        while not self.done():
            yield from asyncio.sleep(_LONGEST_PAUSE).__await__()
        return self.wait()

    def __del__(self) -> None:
        if not getattr(self, "_was_asked", True):
            warnings.warn(
                f"the handle of {self._what} from {self._where} was dropped before anybody waited for it. Call wait().",
                RuntimeWarning,
                stacklevel=2,
            )

    def _finish_elsewhere(self) -> None:
        """Wait on a thread, once: other back ends' works say that they have ended only to who waits for them."""
        if self._waiter is None and not self._ended.is_set():
            self._waiter = threading.Thread(target=self._finish, name="mpicomm-handle", daemon=True)
            self._waiter.start()

    def _finish(self) -> None:
        while not self._ended.is_set():
            self._go_on(*self._state)
            if self._in_order:
                self._ended.wait()

    def _go_on(self, step: int, works: Works) -> None:
        """Wait for the works of a step, and run the next one, if that is not a callback's."""
        try:
            with torch.cuda.stream(self._stream):  # which NCCL's works are to be waited for
                for work in works:
                    work.wait()
        except TimeoutError:
            raise  # it is still on its way
        except Exception as error:  # noqa: BLE001  raised by wait()
            self._end(None, error)
        if not self._in_order:
            self._advance(step)

    @contextlib.contextmanager
    def _as_in_the_call(self) -> Iterator[None]:
        """Let a step find what the thread that called had: its mode, its stream, its place in the backward pass."""
        with torch.set_grad_enabled(self._has_grad), torch.cuda.stream(self._stream), autograd.at(self._place):
            yield

    def _advance(self, step: int) -> None:
        """Run the step after `step` of them, if nobody has."""
        with self._lock:
            if self._state[0] != step or self._ended.is_set():
                return
            try:
                with self._as_in_the_call():
                    works = [work for work in next(self._steps) if work is not None]
            except StopIteration as end:
                self._end(end.value, None)
            except BaseException as error:  # noqa: BLE001  raised by wait(), on the thread that asks
                self._end(None, error)
            else:
                self._state = (step + 1, works)
                self._go_on_when_done(step + 1, works)

    def _go_on_when_done(self, step: int, works: Works) -> None:
        if not works:
            self._advance(step)
        elif self._in_callbacks:
            joint = all_of([work.get_future() for work in works])
            joint.add_done_callback(lambda done: self._called_back(done, step))

    def _called_back(self, future: torch.futures.Future[Any], step: int) -> None:
        try:
            future.value()
        except BaseException as error:  # noqa: BLE001  as above
            self._end(None, error)
        else:
            self._advance(step)

    def _end(self, result: Any, error: BaseException | None) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._result, self._error, self._state = result, error, (-1, [])
                self._ended.set()


def wait_all(handles: Iterable[Handle], timeout: float | datetime.timedelta | None = None) -> list[Any]:
    """Wait for all handles, and return their results in the order of the handles.

    Args:
        handles: What operations gave back.
        timeout: Seconds, or a timedelta, for all of them together.

    Raises:
        TimeoutError: If one has not ended by then.
    """
    handles = _checked(handles, "wait_all")
    deadline = _deadline(timeout)
    return [handle._wait(deadline) for handle in handles]


def as_completed(handles: Iterable[Handle]) -> Iterator[Handle]:
    """Give each handle when its operation has ended; the first first.

    Args:
        handles: What operations gave back.
    """
    return _as_completed(_checked(handles, "as_completed"))


def _as_completed(waiting: list[Handle]) -> Iterator[Handle]:
    def some_are_done() -> bool:
        return any(handle.done() for handle in waiting)

    while waiting:
        mpi.poll(some_are_done, float("inf"))
        ended = [handle for handle in waiting if handle.done()]
        waiting = [handle for handle in waiting if handle not in ended]
        yield from ended


def _deadline(timeout: float | datetime.timedelta | None) -> Deadline | None:
    seconds = in_seconds(timeout, 0, _DEFAULT_WAIT)
    return None if seconds is None else Deadline(seconds)


def _checked(handles: Any, what: str) -> list[Handle]:
    """Return handles in a list.

    Raises:
        TypeError: If they are not handles, or only one.
    """
    _HANDLES.check(handles, "handles", what)
    handles = list(handles)
    for index, each in enumerate(handles):
        _HANDLE.check(each, f"handles[{index}]", what)
    return handles


_HANDLES = arguments.instance("an iterable of handles", Iterable, remedy="Pass [handle] for a single one.")
_HANDLE = arguments.instance(
    "a Handle",
    Handle,
    remedy="Pass what mpicomm's functions return with async_op=True; torch's Work has work.wait().",
)


@dataclasses.dataclass(frozen=True)
class Mode:
    """Which operations of an operation are asynchronous."""

    early: bool
    """Those that others follow."""

    last: bool
    """Those that nothing follows but what this rank does by itself."""


IN_THE_CALL = Mode(early=False, last=False)
# What follows runs in a callback, on the thread that runs operations: at once is in its turn.
_IN_CALLBACKS = Mode(early=True, last=False)
# Other back ends' callbacks run in no certain place among the operations: what comes first is done in the call.
_ELSEWHERE = Mode(early=False, last=True)


def start(
    steps: Callable[[Mode], Steps],
    what: str,
    members: GroupArgument,
    async_op: bool,
    tensors: Sequence[torch.Tensor] | None,
) -> Any:
    """Run a collective operation to its end and return its result, or return its handle.

    Args:
        tensors: The caller's data; None where only others know them.
    """
    if async_op is False:
        return run(steps(IN_THE_CALL))
    FLAG.check(async_op, "async_op", what)
    on_host = tensors is not None and all(tensor.is_cpu for tensor in tensors)
    in_callbacks = members.is_ours and (on_host or not members.has_nccl)
    mode = _IN_CALLBACKS if in_callbacks else _ELSEWHERE
    return Handle(steps(mode), what, in_callbacks=in_callbacks, in_order=in_callbacks)
