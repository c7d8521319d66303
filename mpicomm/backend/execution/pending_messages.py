"""The point-to-point messages of a group: MPI requests, which the thread that waits for one progresses, or a poller.

A message advances only during MPI calls of its rank. While messages are in flight and nobody waits for them, the
group's poller thread makes such calls.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mpicomm import mpi, torch_internals
from mpicomm.backend.execution.group_state import GroupState
from mpicomm.backend.execution.message_work import MessageWork, Transfer, error_of
from mpicomm.backend.execution.poller import Poller
from mpicomm.backend.execution.posting_queue import PostingQueue
from mpicomm.backend.execution.work import CompletedWork, WorkBatch
from mpicomm.backend.execution.worker_thread import require_threads
from mpicomm.backend.gpu.transport import DeviceEvent, Transport
from mpicomm.backend.transfer import buffers, mpi_calls
from mpicomm.devices import vendors
from mpicomm.recorder import flight_recorder
from mpicomm.recorder.flight_recorder import Operation

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

BUFFERED_BYTES = 2**12  # MPI may copy messages of this size, and completes them at once
REAP_ABOVE = 32
"""The number of messages in flight above which the group looks for completed ones."""

_LAST_MESSAGES_SECONDS = 1.0  # for messages in flight to complete when the group is destroyed

_abandoned: list[Transfer] = []
"""In-flight messages of destroyed groups, kept alive: MPI may still read and write their memory."""


class PendingMessages:
    """The messages of one group that have not completed."""

    def __init__(self, comm: Intracomm, transport: Transport, state: GroupState, batch: WorkBatch) -> None:
        self._comm = comm
        self.transport = transport
        self._state = state
        self._record = state.record
        self._batch = batch
        self.backend_name = "mpicomm"
        """The prefix of spans in torch's profiler; the process group sets it."""

        self._starting = threading.Lock()
        self.poller: Poller | None = None
        self.unposted = PostingQueue()
        """The messages that MPI has not received."""

        self._in_flight: set[Transfer] = set()
        self._reap_at = REAP_ABOVE
        self._spans: dict[Transfer, Any] = {}  # of the profiler

    @property
    def timeout_of_messages(self) -> float | None:
        """Seconds until waiting for a message raises TimeoutError; None if the watchdog aborts the job instead."""
        return self._record.timeout if self._state.raises_timeouts else None

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> MessageWork | CompletedWork:
        """Start sending; the work completes when the tensor may be modified again."""
        operation = self._note("send", tensor, dst, tag)
        dense, ready = self.transport.for_sending(tensor)
        if ready is not None or self.unposted.waiting:
            transfer = Transfer(None, tensor, dense, operation, self)
            post = functools.partial(mpi_calls.send, self._comm, dense, dst, tag)
            return self._post_later("send", transfer, ready, post)
        request = mpi_calls.send(self._comm, dense, dst, tag)
        if tensor.nbytes > BUFFERED_BYTES or torch_internals.is_profiling() or not request.Test():
            return self._track("send", Transfer(request, tensor, dense, operation, self))
        operation.finish()
        return CompletedWork.of([tensor])

    def receive(self, tensor: torch.Tensor, src: int | None, tag: int) -> MessageWork:
        """Start receiving from `src`, or from the first rank that sends if it is None."""
        operation = self._note("recv", tensor, src, tag)
        dense, ready, deliver = self.transport.for_receiving(tensor)

        def arrived(status: Any) -> DeviceEvent | None:
            if operation.peer is None:
                operation.peer = status.source
                operation.number_message(status.tag)
            count = mpi_calls.received_count(status, dense.dtype)
            if count != dense.numel():
                raise error_of(transfer, None, count)
            with buffers.mode_of(tensor):
                return deliver()

        source = mpi.api().ANY_SOURCE if src is None else src
        name = "recvAnySource" if src is None else "recv"  # torch's names
        if ready is not None or self.unposted.waiting:
            transfer = Transfer(None, tensor, dense, operation, self, arrived)
            post = functools.partial(mpi_calls.receive, self._comm, dense, source, tag)
            return self._post_later(name, transfer, ready, post)
        request = mpi_calls.receive(self._comm, dense, source, tag)
        transfer = Transfer(request, tensor, dense, operation, self, arrived)
        return self._track(name, transfer)

    def _note(self, name: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Operation:
        """Record a message in the flight recorder."""
        self._state.check_open()
        operation = flight_recorder.note(
            self._record, name, tensor.dtype, tensor.numel(), peer, is_message=True, is_running=False
        )
        if peer is not None:
            operation.number_message(tag)
        if self._state.raises_timeouts:
            operation.exempt_from_watchdog()
        return operation

    def _post_later(
        self, name: str, transfer: Transfer, ready: DeviceEvent | None, post: Callable[[], Request]
    ) -> MessageWork:
        """Pass a message to MPI when the device has reached an event, and the messages before it are with MPI."""
        work = self._track(name, transfer)
        self.unposted.add(ready, post, transfer)
        if not mpi.has_thread_multiple():  # no other thread may post it while this one waits in MPI
            self.post_all()
        return work

    def post_all(self) -> None:
        """Pass all messages to MPI; waits for the device."""
        if mpi.has_thread_multiple() and vendors.vendor().is_capturing():  # waiting would invalidate the capture
            mpi.poll(self._have_been_posted, math.inf)
        else:
            self.unposted.post_all()

    def _have_been_posted(self) -> bool:
        """Return whether the poller thread, which it wakes, has passed all messages to MPI."""
        if not self.unposted.waiting:
            return True
        self._get_poller().rouse()
        return False

    def _track(self, name: str, transfer: Transfer) -> MessageWork:
        """Keep a message and its buffers alive until it completes, even if the caller drops the work."""
        self._in_flight.add(transfer)
        self.reap()
        work = MessageWork.of(transfer.tensor, transfer, self)
        if torch_internals.is_profiling():
            self._spans[transfer] = torch_internals.start_event(f"{self.backend_name}:{name}", work.result())
        if self.poller is None or self.poller.is_idle:
            self.wake_poller(transfer)
        self._batch.add(work)
        return work

    def reap(self) -> None:
        """Look for completed messages if many are in flight."""
        if len(self._in_flight) > self._reap_at:
            self.advance()
            self._reap_at = max(REAP_ABOVE, 2 * len(self._in_flight))

    def wake_poller(self, transfer: Transfer) -> None:
        """Wake the poller thread, so that the message progresses while its rank computes."""
        if not transfer.test() and mpi.has_thread_multiple():
            self._get_poller().rouse()

    def watch(self, work: MessageWork) -> None:
        """Let the poller thread complete the future of a message when the message completes."""
        self._get_poller().watch(work)

    def forget(self, transfer: Transfer) -> None:
        """Drop the references to a completed message, and end its profiler span."""
        self._in_flight.discard(transfer)
        if self._spans:
            torch_internals.end_event(self._spans.pop(transfer, None))

    def advance(self) -> None:
        """Test every message in flight, which drives its progress."""
        for transfer in list(self._in_flight):
            transfer.test()  # a completed message calls `forget`

    def is_sending(self) -> bool:
        """Return whether sent messages are still in flight."""
        return any(transfer.is_send for transfer in list(self._in_flight))

    def parts_of_plain_messages(self) -> dict[str, Any]:
        """Return the objects with which the extension module runs messages on plain tensors."""
        return {
            "messages": self,
            "group": self._record,
            "state": self._state,
            "message_numbers": self._record.message_numbers,
            "in_flight": self._in_flight,
            "unposted": self.unposted.waiting,
            "batch": self._batch,
            "reap": self.reap,
            "wake": self.wake_poller,
            "error_of": error_of,
        }

    # -- shutdown ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the poller thread; the futures of messages in flight complete with an error."""
        if self.poller is not None:
            self.poller.stop()

    def wait_for_all(self) -> bool:
        """Wait for the messages in flight, for a second; return whether all have completed.

        The second begins when MPI has all messages: until then they wait for the device, and not for other ranks.
        """
        self.unposted.post_all()
        return mpi.poll(lambda: not self._test_in_flight(), _LAST_MESSAGES_SECONDS, longest_pause=1e-4)

    def abandon(self) -> None:
        """Warn of the messages in flight, and keep them alive: the group is destroyed."""
        warnings.warn(
            f"group {self._record.name} is destroyed with {len(self._in_flight)} messages in flight. "
            f"Call wait() on the works of isend and irecv first.",
            stacklevel=3,
        )
        _abandoned.extend(self._in_flight)

    def give_up(self, error: Exception, *, is_revoked: bool = False) -> None:
        """Complete the messages in flight with an error.

        Args:
            is_revoked: Whether their communicator has been revoked: MPI then completes them with an error.
        """
        if is_revoked:
            self.advance()
        elif self._in_flight:
            mpi.abandon()
        for transfer in list(self._in_flight):
            transfer.give_up(error)
        _abandoned.extend(self._in_flight)  # MPI may still read and write their memory

    def _get_poller(self) -> Poller:
        with self._starting:
            if self.poller is None:
                require_threads()
                self.poller = Poller(f"mpicomm-poller-{self._record.name}", self._test_in_flight)
            return self.poller

    def _test_in_flight(self) -> bool:
        """Test every message in flight once; return whether any remains in flight."""
        self.advance()
        return bool(self._in_flight)
