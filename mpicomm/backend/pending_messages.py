"""The point-to-point messages of a group in flight: MPI requests, which the thread that waits for one progresses."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from mpicomm import mpi
from mpicomm.backend import buffers, dtypes, mpi_calls, torch_internals
from mpicomm.backend.gpu_transport import Transport
from mpicomm.backend.group_state import GroupState
from mpicomm.backend.work import CompletedWork, MessageWork, WorkBatch
from mpicomm.backend.worker_thread import Poller, require_threads
from mpicomm.watchdog import flight_recorder
from mpicomm.watchdog.flight_recorder import Operation

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_BUFFERED_BYTES = 2**12  # MPI may copy messages of this size, and completes them at once
_REAP_ABOVE = 32  # messages in flight above which the group looks for completed ones
_LAST_MESSAGES_SECONDS = 1.0  # for messages in flight to complete when the group is destroyed

_abandoned: list[MessageWork] = []
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
        self._poller: Poller | None = None
        self._in_flight: set[MessageWork] = set()
        self._reap_at = _REAP_ABOVE
        self._spans: dict[MessageWork, Any] = {}  # of the profiler

    @property
    def timeout_of_messages(self) -> float | None:
        """Seconds until waiting for a message raises TimeoutError; None if the watchdog aborts the job instead."""
        return self._record.timeout if self._state.raises_timeouts else None

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> MessageWork | CompletedWork:
        """Start sending; the work completes when the tensor may be modified again."""
        operation = self._note("send", tensor, dst, tag)
        dense = self.transport.fetch(tensor)
        request = mpi_calls.send(self._comm, dense, dst, tag)
        if tensor.nbytes > _BUFFERED_BYTES or torch_internals.is_profiling() or not request.Test():
            return self._track("send", MessageWork([tensor], request, dense, operation, self))
        operation.finish()
        return CompletedWork.of([tensor])

    def receive(self, tensor: torch.Tensor, src: int | None, tag: int) -> MessageWork:
        """Start receiving from `src`, or from the first rank that sends if it is None."""
        operation = self._note("recv", tensor, src, tag)
        dense, bring = self.transport.expect(tensor)

        def arrived(status: Any) -> None:
            if src is None:
                operation.peer = status.source
                operation.number_message(status.tag)
            _check_count(status, dense)
            with buffers.mode_of(tensor):
                bring()

        source = mpi.api().ANY_SOURCE if src is None else src
        request = mpi_calls.receive(self._comm, dense, source, tag)
        work = MessageWork([tensor], request, dense, operation, self, arrived)
        return self._track("recvAnySource" if src is None else "recv", work)  # torch's names

    def _note(self, name: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Operation:
        """Record a message in the flight recorder."""
        self._state.check_open()
        operation = flight_recorder.note(self._record, name, tensor.dtype, tensor.numel(), peer, True, False)
        if peer is not None:
            operation.number_message(tag)
        if self._state.raises_timeouts:
            operation.limit = None
        return operation

    def _track(self, name: str, work: MessageWork) -> MessageWork:
        """Keep a message and its buffers alive until it completes, even if the caller drops the work."""
        if len(self._in_flight) >= self._reap_at:
            self.advance()
            self._reap_at = max(_REAP_ABOVE, 2 * len(self._in_flight))
        if torch_internals.is_profiling():
            self._spans[work] = torch_internals.start_event(f"{self.backend_name}:{name}", work.result())
        self._in_flight.add(work)
        self._let_advance(work)
        self._batch.add(work)
        return work

    def _let_advance(self, work: MessageWork) -> None:
        """Wake the poller thread, so that the message progresses while its rank computes."""
        poller = self._poller
        if (poller is not None and not poller.is_idle) or work.is_completed() or not mpi.serves_threads():
            return
        self._get_poller().rouse()

    def watch(self, work: MessageWork) -> None:
        """Let the poller thread complete the future of a message when the message completes."""
        self._get_poller().watch(work)

    def forget(self, work: MessageWork) -> None:
        """Drop the references to a completed message, and end its profiler span."""
        self._in_flight.discard(work)
        if self._spans:
            torch_internals.end_event(self._spans.pop(work, None))

    def advance(self) -> None:
        """Test every message in flight, which drives its progress."""
        for work in list(self._in_flight):
            work.is_completed()  # a completed message calls `forget`

    def is_sending(self) -> bool:
        """Return whether sent messages are still in flight."""
        return any(work.is_sent for work in list(self._in_flight))

    # -- shutdown ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the poller thread; the futures of messages in flight complete with an error."""
        if self._poller is not None:
            self._poller.stop()

    def finish(self) -> bool:
        """Wait for the messages in flight, for a second; return whether all have completed, and warn if not."""
        if mpi.poll(lambda: not self._are_left(), _LAST_MESSAGES_SECONDS, longest_pause=1e-4):
            return True
        warnings.warn(
            f"group {self._record.name} is destroyed with {len(self._in_flight)} messages in flight. "
            f"Call wait() on the works of isend and irecv first.",
            stacklevel=4,
        )
        _abandoned.extend(self._in_flight)
        return False

    def give_up(self, error: Exception) -> None:
        """Complete the messages in flight with an error."""
        if self._in_flight:
            mpi.abandon()
        for message in list(self._in_flight):
            message.give_up(error)
        _abandoned.extend(self._in_flight)  # MPI may still read and write their memory

    def end(self, error: Exception) -> None:
        """Complete the messages in flight with an error, after their communicator has been revoked."""
        self.advance()  # MPI completes them with an error
        for message in list(self._in_flight):
            message.give_up(error)
        _abandoned.extend(self._in_flight)

    def _get_poller(self) -> Poller:
        with self._starting:
            if self._poller is None:
                require_threads()
                self._poller = Poller(f"mpicomm-poller-{self._record.name}", self._are_left)
            return self._poller

    def _are_left(self) -> bool:
        """Test every message in flight once; return whether any remains in flight."""
        self.advance()
        return bool(self._in_flight)


def _check_count(status: Any, dense: torch.Tensor) -> None:
    count = mpi_calls.received(status, dense.dtype)
    if count != dense.numel():
        raise RuntimeError(
            f"recv: expected {dense.numel()} elements of {dtypes.short(dense.dtype)} from rank {status.source} "
            f"(tag {status.tag}), got {count}.\nSend and receive tensors of the same size."
        )
