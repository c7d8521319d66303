"""What a started operation gives its caller to wait on: torch's `Work`, complete."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import dtypes, torch_internals
from mpicomm.backend.callbacks import OrderedFuture, Queue, all_of
from mpicomm.durations import Deadline, seconds_of
from mpicomm.errors import MpicommError
from mpicomm.watchdog import flight_recorder
from mpicomm.watchdog.flight_recorder import Operation

if TYPE_CHECKING:
    from mpi4py.MPI import Request

Timeout = datetime.timedelta | Deadline | None
"""What `wait` takes: torch's timeout, or a deadline that several works share."""

_LEAST_SECONDS = 1e-3  # a timeout of zero would mean none


class Keeper(Queue, Protocol):
    """The group's operations, as far as its works need it."""

    @property
    def timeout_of_messages(self) -> float | None:
        """Seconds after which waiting for a message raises TimeoutError; None if the watchdog ends the job instead."""

    def run_what_is_before(self, work: QueuedWork) -> None:
        """On the worker's own thread, run what is queued until `work` is done."""

    def time_out(self, operation: Operation, seconds: float) -> TimeoutError:
        """Return the error of a collective that did not end in time; the group cannot be used any more."""

    def watch(self, work: MessageWork) -> None:
        """Finish `work`, whose future somebody holds, when its message is through."""

    def forget(self, work: MessageWork) -> None:
        """Let go of `work`, whose message is through."""


class _Work(dist.Work):
    """The part that all kinds of work share."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation writes."""
        return self.tensors

    def is_success(self) -> bool:
        """Tell whether the operation ended without an error."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """Wait; the results of this back end are in memory then, so no stream has anything left to wait for."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank in the group that sent what was received."""
        raise MpicommError("source_rank() is known for receives only.\nAsk the work of a recv or irecv.")

    def _source_rank(self) -> int:
        return self.source_rank()


class CompletedWork(_Work):
    """An operation that was finished before its call returned."""

    __init__ = dist.Work.__init__  # most operations come here, and set the tensors

    def wait(self, timeout: Timeout = None) -> bool:  # noqa: ARG002  torch's signature
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Tell that the operation is finished."""
        return True

    def exception(self) -> None:
        """Return None: a synchronous operation raises its error in the call."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done."""
        return torch_internals.completed_future(self.tensors)


class QueuedWork(_Work):
    """An operation that the group's worker thread runs in its turn."""

    def __init__(self, tensors: list[torch.Tensor], operation: Operation, keeper: Keeper) -> None:
        super().__init__(tensors)
        self._operation = operation
        self._keeper = keeper
        self._future = OrderedFuture(keeper, torch_internals.gpus_of(tensors))
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Complete the future, on the worker thread."""
        self._error = error
        if error is None:
            self._future.set_result(self.tensors)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: Timeout = None) -> bool:
        """Wait until the operation has ended.

        Raises:
            TimeoutError: If it has not after `timeout`; the group cannot be used any more then.
        """
        self._keeper.run_what_is_before(self)
        deadline = _deadline(timeout)
        if deadline is not None and not mpi.poll(self._future.done, deadline):
            raise self._keeper.time_out(self._operation, deadline.seconds)
        # torch's future waits without the GIL, which the worker needs to come to its end.
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Tell whether the operation has ended."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Return the error with which the operation ended, if it did."""
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future that completes when the operation does; its callbacks run in the group's queue."""
        return self._future


class MessageWork(_Work):
    """A message on its way: an MPI request that whoever waits, or the poller, drives to its end."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        request: Request,
        memory: torch.Tensor,
        operation: Operation,
        keeper: Keeper,
        arrived: Callable[[Any], None] | None = None,
    ) -> None:
        """Take charge of a request.

        Args:
            memory: The memory that MPI reads or writes; kept alive until the message is through.
            keeper: Keeps this work alive until the message is through, and completes the future if one is asked for.
            arrived: Called with the MPI status of a message that has come in.
        """
        super().__init__(tensors)
        self._request = request
        self._memory: torch.Tensor | None = memory
        self._operation = operation
        self._keeper = keeper
        self._arrived = arrived
        self.is_sent = arrived is None
        self._status = mpi.api().Status()
        self._lock = threading.Lock()  # MPI forbids two threads to complete one request
        self._asking = threading.Lock()  # for the future
        self._done = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: Timeout = None) -> bool:
        """Wait until the message is sent or received.

        Raises:
            TimeoutError: If it is not after `timeout`.
            RuntimeError: If what came in does not fit the tensor.
        """
        if not self._done:
            flight_recorder.refuse_children()
            self._operation.begin()
            try:
                self._wait(_deadline(timeout) or _deadline(self._keeper.timeout_of_messages))
            finally:
                self._operation.pause()
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, deadline: Deadline | None) -> None:
        if deadline is not None:
            if not mpi.poll(self.is_completed, deadline):
                raise self._late(deadline.seconds)
        elif self._future is not None:
            self._future.wait()
        else:
            with self._lock:
                if not self._done:
                    self._settle(lambda: self._request.Wait(self._status))

    def is_completed(self) -> bool:
        """Tell whether the message is through; looking drives it on."""
        if not self._done:
            flight_recorder.refuse_children()
        if self._done or not self._lock.acquire(blocking=False):
            return self._done
        try:
            if not self._done:
                self._settle(lambda: self._request.Test(self._status))
            return self._done
        finally:
            self._lock.release()

    def give_up(self, error: Exception) -> None:
        """End with an error what may never be through; not if somebody is inside MPI with it."""
        if self._lock.acquire(blocking=False):
            if not self._done:
                self._error, self._done = error, True
            self._lock.release()

    def exception(self) -> BaseException | None:
        """Return the error with which the operation ended, if it did."""
        return self._error

    def source_rank(self) -> int:
        """Return the rank in the group that sent what was received."""
        if self._arrived is None or not self._done:
            return super().source_rank()
        return self._status.source

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with the message, driven by the group's poller thread."""
        with self._asking:  # not the lock, which whoever waits holds until the message is through
            if self._future is None:
                self._future = torch_internals.future_of(self.tensors)
                if self._done:
                    self.finish()
                else:
                    self._keeper.watch(self)
            return self._future

    def finish(self) -> None:
        """Settle the future; its callbacks run here, on the poller thread."""
        assert self._future is not None
        if not self._done:
            self._future.set_exception(
                MpicommError(f"the group was destroyed before {self._what()} ended.\nWait for it before.")
            )
        elif self._error is None:
            self._future.set_result(self.tensors)
        else:
            self._future.set_exception(self._error)

    def _late(self, seconds: float) -> TimeoutError:
        partners = [rank for rank in self._operation.needs if rank != dist.get_rank()]
        partner = f"rank {partners[0]}" if len(partners) == 1 else "any other rank"
        return TimeoutError(
            f"{self._what()} has not ended within {seconds:g} s: {partner} has not joined it.\n"
            f"Wait longer (the message stays on its way), or find out what that rank does."
        )

    def _what(self) -> str:
        tensor = self.tensors[0]
        verb = "send" if self._arrived is None else "recv"
        return f"{verb} of {dtypes.short(tensor.dtype)}{list(tensor.shape)}"

    def _settle(self, complete: Callable[[], bool]) -> None:
        """Complete the request if it is through, under the lock."""
        try:
            if not complete():
                return
            if self._arrived is not None:
                self._arrived(self._status)
        except mpi.api().Exception as error:
            self._error = RuntimeError(f"{self._what()} failed: {error}.\nDo sender and receiver agree on the size?")
        except Exception as error:  # noqa: BLE001  raised by wait(), on the thread that asks
            self._error = error
        self._memory = None
        self._done = True
        self._operation.finish()
        self._keeper.forget(self)


class JointWork(_Work):
    """Several works as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__([])
        self._works = works

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operations write."""
        return [tensor for work in self._works for tensor in work.result()]

    def wait(self, timeout: Timeout = None) -> bool:
        """Wait until all have ended.

        Raises:
            TimeoutError: If one has not after `timeout`.
        """
        deadline = _deadline(timeout)
        return all(_wait(work, deadline) for work in self._works)

    def is_completed(self) -> bool:
        """Tell whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the error of the first that ended with one."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes when all have."""

        def result(ended: torch.futures.Future[Any]) -> list[torch.Tensor]:
            ended.value()  # raises the error of the first that failed
            return self.result()

        return all_of([work.get_future() for work in self._works]).then(result)


def _wait(work: dist.Work, deadline: Deadline | None) -> bool:
    """Wait for a work, which may be an inner backend's, and knows timeouts only."""
    if deadline is None:
        return work.wait()
    if isinstance(work, _Work):  # takes a deadline too
        return work.wait(deadline)  # type: ignore[arg-type]
    return work.wait(datetime.timedelta(seconds=max(deadline.left(), _LEAST_SECONDS)))


def _deadline(timeout: Timeout | float) -> Deadline | None:
    """Return when a wait with a timeout ends; torch says "none" by zero or less."""
    if timeout is None or isinstance(timeout, Deadline):
        return timeout
    seconds = seconds_of(timeout)
    return Deadline(seconds) if seconds > 0 else None
