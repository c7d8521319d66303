"""The work of a message, and its transfer by MPI and by copies of a device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from mpicomm import mpi, torch_internals
from mpicomm.arguments import Deadline
from mpicomm.backend.execution.group_state import check_revoked
from mpicomm.backend.execution.posting_queue import PostingQueue
from mpicomm.backend.execution.work import BackendWork, WaitTimeout, deadline_of
from mpicomm.backend.gpu.transport import DeviceEvent
from mpicomm.backend.transfer import dtypes
from mpicomm.devices import vendors
from mpicomm.errors import MpicommError
from mpicomm.recorder import flight_recorder
from mpicomm.recorder.flight_recorder import Operation
from mpicomm.watchdog import rank_failures

if TYPE_CHECKING:
    from mpi4py.MPI import Request


class Messages(Protocol):
    """The interface of a group's messages that a work and its transfer use."""

    unposted: PostingQueue

    @property
    def timeout_of_messages(self) -> float | None:
        """Seconds until waiting for a message raises TimeoutError."""

    def post_all(self) -> None:
        """Pass all messages to MPI; waits for the device."""

    def watch(self, work: MessageWork) -> None:
        """Let the poller thread complete the future of a message when the message completes."""

    def forget(self, transfer: Transfer) -> None:
        """Drop the references to a completed message, and end its profiler span."""


class Transfer:
    """One message on its way: an MPI request, and the copy of a received message to its tensor.

    The extension module has a class with the same methods, for messages on plain tensors.
    """

    def __init__(
        self,
        request: Request | None,
        tensor: torch.Tensor,
        memory: torch.Tensor,
        operation: Operation,
        messages: Messages,
        arrived: Callable[[Any], DeviceEvent | None] | None = None,
    ) -> None:
        """Manage an MPI request.

        Args:
            request: The request; None if `start` passes it later.
            tensor: The tensor that is sent or received.
            memory: The memory that MPI reads or writes; kept alive until the message has completed.
            messages: Keeps this alive until the message has completed.
            arrived: Called with the MPI status of a received message, which it starts to copy to the tensor; returns
                the event of the end of the copy. None for a send.
        """
        self.operation = operation
        self.tensor = tensor
        self.is_send = arrived is None
        self.is_done = False
        """Whether the message has completed or failed."""

        self.error: Exception | None = None
        self._request = request
        self._memory: torch.Tensor | None = memory
        self._messages = messages
        self._arrived = arrived
        self._is_transferred = False  # whether MPI has completed the message
        self._copied: DeviceEvent | None = None
        self._status = mpi.api().Status()
        self._lock = threading.Lock()  # MPI forbids two threads to complete one request

    @property
    def source(self) -> int:
        """The group rank of the sender of a received message."""
        return self._status.source

    def start(self, post: Callable[[], Request]) -> None:
        """Pass the message to MPI, unless it was given up."""
        if self.is_done or self._request is not None:
            return
        try:
            self._request = post()
        except Exception as error:  # noqa: BLE001  wait() raises it, on its caller's thread
            self._end(error)

    def wait(self) -> None:
        """Wait until the message has completed; other threads run meanwhile."""
        with self._lock:
            if not self.is_done:
                self._advance(waits=True)

    def wait_simply(self) -> bool:
        """Return False, unless the message has completed: the caller records the wait."""
        return self.is_done and self.error is None

    def test(self) -> bool:
        """Return whether the message has completed; each call progresses it."""
        if not self.is_done:
            flight_recorder.refuse_children()
        if self._request is None:
            self._messages.unposted.post_ready()
        if self.is_done or not self._lock.acquire(blocking=False):
            return self.is_done
        try:
            if not self.is_done:
                self._advance(waits=False)
            return self.is_done
        finally:
            self._lock.release()

    def give_up(self, error: Exception) -> None:
        """Complete with an error, since the message may never complete; not while another thread is in MPI with it."""
        if self._lock.acquire(blocking=False):
            if not self.is_done:
                self.error, self.is_done = error, True
            self._lock.release()

    def _advance(self, *, waits: bool) -> None:
        """Complete if MPI and the copy to the tensor have ended, or when they have; the caller holds the lock.

        Args:
            waits: Whether to wait for them.
        """
        if not waits and vendors.is_capturing(self.tensor.device):
            return  # a copy would become a part of the graph, and a query of an event would invalidate it
        try:
            if not self._is_transferred:
                request = self._request
                if request is None or not (request.Wait(self._status) if waits else request.Test(self._status)):
                    return
                self._is_transferred = True
            if self._arrived is not None:
                self._copied = self._arrived(self._status)
                self._arrived = None  # after the call, which a signal handler may end
            if self._copied is not None:
                if waits:
                    self._copied.synchronize()
                elif not self._copied.query():
                    return
        except Exception as error:  # noqa: BLE001  wait() raises it, on its caller's thread
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if isinstance(error, mpi.api().Exception):
            error = error_of(self, error, 0)
        self.error = error
        self._memory = self._copied = None
        self.is_done = True
        self.operation.finish()
        self._messages.forget(self)


class MessageWork(BackendWork):
    """A point-to-point message in flight, which the waiting thread or the poller progresses."""

    __init__ = dist.Work.__init__  # for speed: the extension module sets the attributes of most works
    _transfer: Transfer
    _messages: Messages
    _future: torch.futures.Future[Any] | None = None
    _asking = threading.RLock()  # guards the creation of a future, also in a signal handler during another one

    @classmethod
    def of(cls, tensor: torch.Tensor, transfer: Transfer, messages: Messages) -> MessageWork:
        """Return the work of a message.

        Args:
            messages: Completes a requested future.
        """
        work = cls()
        work.tensors, work._transfer, work._messages = [tensor], transfer, messages
        return work

    def wait(self, timeout: WaitTimeout = None) -> bool:
        """Wait until the message is sent or received.

        Raises:
            TimeoutError: If it has not completed after `timeout`; it remains in flight.
            RuntimeError: If the received message does not fit the tensor.
        """
        transfer = self._transfer
        if timeout is None and self._future is None and transfer.wait_simply():
            return True
        if not transfer.is_done:
            flight_recorder.refuse_children()
            transfer.operation.begin()
            try:
                self._wait(deadline_of(timeout) or deadline_of(self._messages.timeout_of_messages))
            finally:
                transfer.operation.pause()
        if transfer.error is not None:
            raise transfer.error
        return True

    def _wait(self, deadline: Deadline | None) -> None:
        if deadline is not None:
            if not mpi.poll(self.is_completed, deadline):
                raise self._timeout_error(deadline.seconds)
        elif self._future is not None:
            self._future.wait()
        else:
            if self._messages.unposted.waiting:  # a thread that waits in MPI cannot post them later
                self._messages.post_all()
            self._transfer.wait()

    def is_completed(self) -> bool:
        """Return whether the message has completed; each call progresses it."""
        return self._transfer.test()

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None if it has not failed."""
        return self._transfer.error

    def source_rank(self) -> int:
        """Return the group rank of the sender of a received message.

        Raises:
            MpicommError: If the operation is not a receive, or has not completed.
        """
        if self._transfer.is_send or not self._transfer.is_done:
            return super().source_rank()
        return self._transfer.source

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future that completes with the message; the group's poller thread progresses it."""
        with MessageWork._asking:  # not the transfer's lock, which a thread holds until the message has completed
            made = torch_internals.future_of(self.tensors) if self._future is None else self._future
            if self._future is None:  # still
                self._future = made
                self._complete_or_watch()
            return self._future

    def _complete_or_watch(self) -> None:
        if self._transfer.is_done:
            self.complete_future()
            return
        try:
            self._messages.watch(self)
        except Exception:
            self._future = None  # nobody would complete it
            raise

    def complete_future(self) -> None:
        """Complete the future; its callbacks run on the calling thread, that of the poller."""
        assert self._future is not None
        error = self._transfer.error
        if not self._transfer.is_done:
            error = MpicommError(
                f"the group was destroyed before {_describe(self._transfer)} completed.\n"
                f"Call wait() on its work before you destroy the group."
            )
        if error is None:
            self._future.set_result(self.tensors)
        else:
            self._future.set_exception(error)

    def _timeout_error(self, seconds: float) -> TimeoutError:
        partners = [rank for rank in self._transfer.operation.needs if rank != dist.get_rank()]
        partner = f"rank {partners[0]}" if len(partners) == 1 else "any other rank"
        return TimeoutError(
            f"{_describe(self._transfer)} timed out after {seconds:g} s, waiting for {partner}.\n"
            f"Wait longer (the message remains in flight), or call mpicomm.dump_flight_recorder() on "
            f"{partner} to see its last operations."
        )


def error_of(transfer: Transfer, cause: Exception | None, count: int) -> Exception:
    """Return the error of a message.

    Args:
        cause: That of MPI; None if MPI has received a message of another size.
        count: The number of received elements.
    """
    tensor, operation = transfer.tensor, transfer.operation
    if cause is not None:
        try:
            rank_failures.raise_if_failed(cause)
            check_revoked(cause, operation.group)
        except MpicommError as error:
            return error
        remedy = "Check that both ranks pass the same size."
        if mpi.is_truncation(cause) and mpi.overruns_buffers():
            remedy += " End the job: Open MPI may have written beyond the end of the tensor, unless MPICOMM_DEBUG=1."
        return RuntimeError(f"{_describe(transfer)} failed: {cause}.\n{remedy}")
    return RuntimeError(
        f"recv: expected {tensor.numel()} elements of {dtypes.short(tensor.dtype)} from rank {operation.peer} "
        f"(tag {operation.tag}), got {count}.\nSend and receive tensors of the same size."
    )


def _describe(transfer: Transfer) -> str:
    direction = "send" if transfer.is_send else "recv"
    return f"{direction} of {dtypes.short(transfer.tensor.dtype)}{list(transfer.tensor.shape)}"


torch_internals.hide_from_compiler(MessageWork)  # a wait() in compiled code may run operations
