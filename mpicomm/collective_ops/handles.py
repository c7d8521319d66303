"""Runs the steps of an operation, synchronously or in the background.

A collective operation is a generator. It starts calls of torch.distributed, yields their works, and continues when they
have completed; its return value is the result. With `async_op=True`, the steps after the first run as callbacks of the
previous step where the group uses this backend: their position among the operations is then the same on all ranks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from mpicomm import arguments, mpi, torch_internals
from mpicomm.arguments import FLAG, Deadline, Timeout, in_seconds
from mpicomm.backend.execution.future_callbacks import all_of
from mpicomm.collective_ops import autograd, pytree
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.devices import accelerator
from mpicomm.recorder import flight_recorder

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Works = list[Any]
"""The works of started operations; None for an operation that completed within the call."""

Steps = Generator[Works, None, Any]
_LONGEST_PAUSE = 1e-3  # seconds between two polls of a handle that is awaited
_DEFAULT_WAIT = "the group's timeout"


@dataclasses.dataclass(frozen=True)
class Mode:
    """Which calls of torch.distributed within an operation are asynchronous."""

    early: bool
    """The calls that other calls follow."""

    last: bool
    """The last calls, which only local work of this rank follows."""


IN_THE_CALL = Mode(early=False, last=False)
# Later calls run in a callback, on the worker thread: a synchronous call there keeps the order of the operations.
_IN_CALLBACKS = Mode(early=True, last=False)
# Callbacks of other backends run at no defined position among the operations: the early calls run synchronously.
_WITHOUT_CALLBACKS = Mode(early=False, last=True)


def run(steps: Steps) -> Any:
    """Run all steps of an operation on the calling thread, and return its result."""
    try:
        while True:
            wait_for_all(next(steps))
    except StopIteration as end:
        return end.value


def wait_for_all(works: Works) -> None:
    """Wait for the operations of a step."""
    for work in works:
        if work is not None:
            work.wait()


class Handle(Generic[T_co]):
    """An operation that runs in the background; `wait()` or `await` returns its result."""

    def __init__(self, steps: Steps, operation: str, *, in_callbacks: bool, in_order: bool) -> None:
        """Start the first step.

        Args:
            steps: The operation.
            operation: The name of the operation, for messages.
            in_callbacks: Later steps run as callbacks of the previous step, and also on a thread that waits.
            in_order: Later steps run as callbacks only, since their position among the operations matters.
        """
        self._steps = steps
        self._operation = operation
        self._caller = flight_recorder.line_of_caller()
        self._has_grad = torch.is_grad_enabled()
        self._sequence_number = torch_internals.reserve_sequence_number() if self._has_grad else None
        device = accelerator.current_device() if accelerator.is_initialized() else None  # None: no GPU is in use
        self._stream = None if device is None else accelerator.current_stream(device)
        self._in_callbacks = in_callbacks
        self._in_order = in_order
        self._lock = threading.RLock()
        self._state: tuple[int, Works] = (0, [])  # the number of steps that have run, and the works of the last one
        self._ended = threading.Event()
        self._result: T_co
        self._error: BaseException | None = None
        self._waiter: threading.Thread | None = None
        self._was_asked = True
        self._step(0)
        if self._error is not None:
            raise self._error  # raised by the call itself: no operation has started
        self._was_asked = False

    def wait(self, timeout: Timeout = None) -> T_co:
        """Block until the operation has completed, and return its result. Not collective.

        Args:
            timeout: The longest wait, in seconds or as a timedelta; by default only the group's timeout limits it.

        Returns:
            The result of the operation. For GPU tensors, the current stream waits for the operation's stream.

        Raises:
            TimeoutError: If the operation has not completed within the timeout. It continues, and `wait()` can be
                called again.
            ValueError: If the timeout is not between 0 and 1e9 seconds.
            TypeError: If the timeout is neither seconds nor a timedelta.
            Exception: Any error of the operation itself.
        """
        return self._wait(_deadline(timeout))

    def _wait(self, deadline: Deadline | None) -> T_co:
        self._was_asked = True
        if deadline is None and self._waiter is not None:
            self._waiter.join()
        elif deadline is None:
            self._run_remaining_steps()
        elif not mpi.poll(self.done, deadline):
            raise TimeoutError(
                f"{self._operation} from {self._caller} timed out after {deadline.seconds:g} s.\n"
                f"Wait longer (the operation continues), or call mpicomm.dump_flight_recorder() on each rank "
                f"to see its last operations."
            )
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            _let_current_stream_wait(self._stream, self._result)
        return self._result

    def done(self) -> bool:
        """Return whether the operation has completed or failed; the call also advances it. Not collective."""
        if not self._in_callbacks and self._waiter is None and not self._ended.is_set():
            # Works of other backends report completion only to a thread that waits.
            self._waiter = threading.Thread(target=self._run_remaining_steps, name="mpicomm-handle", daemon=True)
            self._waiter.start()
        while not self._ended.is_set():
            step, works = self._state
            if self._in_order or not self._in_callbacks or not all(work.is_completed() for work in works):
                return False
            self._wait_and_step(step, works)
        self._was_asked = True
        return True

    def __await__(self) -> Generator[Any, None, T_co]:
        """Wait in an event loop without blocking it, and return the result."""
        self._was_asked = True
        while not self.done():
            yield from asyncio.sleep(_LONGEST_PAUSE).__await__()
        return self.wait()

    def __del__(self) -> None:
        if not getattr(self, "_was_asked", True):
            warnings.warn(
                f"the handle of {self._operation} from {self._caller} was dropped without wait(): its result and any "
                f"error are lost. Call wait() or await it.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _run_remaining_steps(self) -> None:
        while not self._ended.is_set():
            self._wait_and_step(*self._state)
            if self._in_order:
                self._ended.wait()

    def _wait_and_step(self, step: int, works: Works) -> None:
        """Wait for the works of a step, and run the next step unless a callback must run it."""
        try:
            with accelerator.on_stream(self._stream):  # the wait() of a vendor's library makes the current stream wait
                for work in works:
                    work.wait()
        except TimeoutError:
            raise  # the operation continues
        except Exception as error:  # noqa: BLE001  raised by wait()
            self._complete(None, error)
        if not self._in_order:
            self._step(step)

    def _step(self, step: int) -> None:
        """Run the next step after `step` steps, unless another thread has run it already."""
        with self._lock:
            if self._state[0] != step or self._ended.is_set():
                return
            try:
                with (  # as in the call of the operation
                    torch.set_grad_enabled(self._has_grad),
                    accelerator.on_stream(self._stream),
                    autograd.at_number(self._sequence_number),
                ):
                    works = [work for work in next(self._steps) if work is not None]
            except StopIteration as end:
                self._complete(end.value, None)
            except BaseException as error:  # noqa: BLE001  raised by wait(), on the thread that calls it
                self._complete(None, error)
            else:
                step += 1
                self._state = (step, works)
                if not works:
                    self._step(step)
                elif self._in_callbacks:
                    joint = all_of([work.get_future() for work in works])
                    joint.add_done_callback(lambda done: self._called_back(done, works, step))

    def _called_back(self, future: torch.futures.Future[Any], works: Works, step: int) -> None:
        try:
            future.value()
        except BaseException as error:  # noqa: BLE001  as above
            # That of the work: torch may have converted the error of a future of several works.
            self._complete(None, next((failure for work in works if work and (failure := work.exception())), error))
        else:
            self._step(step)

    def _complete(self, result: Any, error: BaseException | None) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._result, self._error, self._state = result, error, (-1, [])
                self._ended.set()


_HANDLES = arguments.instance("an iterable of handles", Iterable, remedy="Pass [handle] for a single one.")
_HANDLE = arguments.instance(
    "a Handle",
    Handle,
    remedy="Pass the handles that mpicomm's operations return with async_op=True; for torch's Work call work.wait().",
)


def wait_all(handles: Iterable[Handle[Any]], timeout: Timeout = None) -> list[Any]:
    """Wait for the operations of all handles, and return their results. Not collective.

    Args:
        handles: The handles that operations returned with `async_op=True`.
        timeout: The longest wait for all handles together, in seconds or as a timedelta; by default only the groups'
            timeouts limit it.

    Returns:
        The results, in the order of the handles.

    Raises:
        TimeoutError: If an operation has not completed within the timeout.
        ValueError: If the timeout is not between 0 and 1e9 seconds.
        TypeError: If `handles` is not an iterable of handles, or the timeout is neither seconds nor a timedelta.
        Exception: The error of the first failed operation, in the order of the handles.
    """
    handles = _checked(handles, "wait_all")
    deadline = _deadline(timeout)
    return [handle._wait(deadline) for handle in handles]


def as_completed(handles: Iterable[Handle[T]]) -> Iterator[Handle[T]]:
    """Yield the handles in the order in which their operations complete or fail. Not collective.

    Args:
        handles: The handles that operations returned with `async_op=True`.

    Raises:
        TypeError: If `handles` is not an iterable of handles.
    """
    return _as_completed(_checked(handles, "as_completed"))


def _as_completed(waiting: list[Handle[T]]) -> Iterator[Handle[T]]:
    def some_are_done() -> bool:
        return any(handle.done() for handle in waiting)

    while waiting:
        mpi.poll(some_are_done, float("inf"))
        ended = [handle for handle in waiting if handle.done()]
        waiting = [handle for handle in waiting if handle not in ended]
        yield from ended


def _let_current_stream_wait(stream: torch.Stream, result: Any) -> None:
    """Let the current stream use the result of work that is queued on another stream, in which it was allocated."""
    current = accelerator.current_stream(stream.device)
    if current == stream:
        return
    current.wait_stream(stream)
    for tensor in pytree.tensors_in(result):
        if not tensor.is_cpu:  # otherwise the other stream reuses its memory as soon as the caller drops it
            tensor.record_stream(current)


def _deadline(timeout: Timeout) -> Deadline | None:
    seconds = in_seconds(timeout, 0, _DEFAULT_WAIT)
    return None if seconds is None else Deadline(seconds)


def _checked(handles: Any, operation: str) -> list[Handle[Any]]:
    """Return the handles as a list.

    Raises:
        TypeError: If `handles` is not an iterable of handles, such as a single handle.
    """
    _HANDLES.check(handles, "handles", operation)
    handles = list(handles)
    for index, handle in enumerate(handles):
        _HANDLE.check(handle, f"handles[{index}]", operation)
    return handles


def start(
    steps: Callable[[Mode], Steps],
    operation: str,
    members: GroupArgument,
    async_op: bool,
    tensors: Sequence[torch.Tensor] | None,
    *,
    in_order: bool = True,
) -> Any:
    """Run an operation and return its result, or start it and return its handle.

    Args:
        steps: Makes the steps of the operation for a mode.
        operation: The name of the operation, for messages.
        members: The group.
        async_op: Whether to return a handle.
        tensors: The caller's data; None where only other ranks know the data.
        in_order: Whether the position among the operations must be the same on all ranks; not for messages.
    """
    if async_op is False:
        return run(steps(IN_THE_CALL))
    FLAG.check(async_op, "async_op", operation)
    on_host = tensors is not None and all(tensor.is_cpu for tensor in tensors)
    has_callbacks = members.is_ours and (on_host or members.handle.takes_gpu_tensors)
    in_callbacks = has_callbacks and (in_order or mpi.has_thread_multiple())
    mode = _IN_CALLBACKS if in_callbacks else _WITHOUT_CALLBACKS
    return Handle(steps(mode), operation, in_callbacks=in_callbacks, in_order=in_callbacks and in_order)
