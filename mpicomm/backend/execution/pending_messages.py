"""The point-to-point messages of a group: MPI requests, which the thread that waits for one progresses, or a poller.

A message advances only during MPI calls of its rank. While messages are in flight and nobody waits for them, the
group's poller thread makes such calls.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpicomm import mpi, torch_internals
from mpicomm.arguments import Deadline
from mpicomm.backend.execution import future_callbacks
from mpicomm.backend.execution.group_state import GroupState
from mpicomm.backend.execution.posting_queue import PostingQueue
from mpicomm.backend.execution.work import BackendWork, CompletedWork, WaitTimeout, WorkBatch, deadline_of
from mpicomm.backend.execution.worker_thread import require_threads
from mpicomm.backend.gpu.thread_device import ThreadDevice
from mpicomm.backend.gpu.transport import DeviceEvent, Transport
from mpicomm.backend.transfer import buffers, dtypes, mpi_calls
from mpicomm.devices import vendors
from mpicomm.errors import MpicommError
from mpicomm.recorder import flight_recorder
from mpicomm.recorder.flight_recorder import Operation
from mpicomm.watchdog import rank_failures

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

_BUFFERED_BYTES = 2**12  # MPI may copy messages of this size, and completes them at once
_REAP_ABOVE = 32  # messages in flight above which the group looks for completed ones
_LAST_MESSAGES_SECONDS = 1.0  # for messages in flight to complete when the group is destroyed
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two rounds of the poller
_MAX_POLLING_SHARE = 0.05  # of a core: the poller pauses in proportion to the time of the round before
# seconds: a round is also long if its thread was suspended or waited for the GIL, and `stop` waits for the pause
_LONGEST_PROPORTIONAL_PAUSE = 0.25
_QUIET_SECONDS = 0.1  # without messages, before the poller sleeps until the next one; waking it costs the caller time

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
        self.unposted = PostingQueue()
        """The messages that MPI has not received."""

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
        dense, ready = self.transport.for_sending(tensor)
        if ready is not None or self.unposted.waiting:
            work = MessageWork([tensor], None, dense, operation, self)
            return self._post_later("send", work, ready, functools.partial(mpi_calls.send, self._comm, dense, dst, tag))
        request = mpi_calls.send(self._comm, dense, dst, tag)
        if tensor.nbytes > _BUFFERED_BYTES or torch_internals.is_profiling() or not request.Test():
            return self._track("send", MessageWork([tensor], request, dense, operation, self))
        operation.finish()
        return CompletedWork.of([tensor])

    def receive(self, tensor: torch.Tensor, src: int | None, tag: int) -> MessageWork:
        """Start receiving from `src`, or from the first rank that sends if it is None."""
        operation = self._note("recv", tensor, src, tag)
        dense, ready, deliver = self.transport.for_receiving(tensor)

        def arrived(status: Any) -> DeviceEvent | None:
            if src is None:
                operation.peer = status.source
                operation.number_message(status.tag)
            _check_count(status, dense)
            with buffers.mode_of(tensor):
                return deliver()

        source = mpi.api().ANY_SOURCE if src is None else src
        name = "recvAnySource" if src is None else "recv"  # torch's names
        if ready is not None or self.unposted.waiting:
            work = MessageWork([tensor], None, dense, operation, self, arrived)
            post = functools.partial(mpi_calls.receive, self._comm, dense, source, tag)
            return self._post_later(name, work, ready, post)
        request = mpi_calls.receive(self._comm, dense, source, tag)
        return self._track(name, MessageWork([tensor], request, dense, operation, self, arrived))

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
        self, name: str, work: MessageWork, ready: DeviceEvent | None, post: Callable[[], Request]
    ) -> MessageWork:
        """Pass a message to MPI when the device has reached an event, and the messages before it are with MPI."""
        self._track(name, work)
        self.unposted.add(ready, post, work)
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

    def _track(self, name: str, work: MessageWork) -> MessageWork:
        """Keep a message and its buffers alive until it completes, even if the caller drops the work."""
        if len(self._in_flight) >= self._reap_at:
            self.advance()
            self._reap_at = max(_REAP_ABOVE, 2 * len(self._in_flight))
        if torch_internals.is_profiling():
            self._spans[work] = torch_internals.start_event(f"{self.backend_name}:{name}", work.result())
        self._in_flight.add(work)
        self._wake_poller(work)
        self._batch.add(work)
        return work

    def _wake_poller(self, work: MessageWork) -> None:
        """Wake the poller thread, so that the message progresses while its rank computes."""
        poller = self._poller
        if (poller is not None and not poller.is_idle) or work.is_completed() or not mpi.has_thread_multiple():
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
        return any(work.is_send for work in list(self._in_flight))

    # -- shutdown ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the poller thread; the futures of messages in flight complete with an error."""
        if self._poller is not None:
            self._poller.stop()

    def wait_for_all(self) -> bool:
        """Wait for the messages in flight, for a second; return whether all have completed, and warn if not.

        The second begins when MPI has all messages: until then they wait for the device, and not for other ranks.
        """
        self.unposted.post_all()
        if mpi.poll(lambda: not self._test_in_flight(), _LAST_MESSAGES_SECONDS, longest_pause=1e-4):
            return True
        warnings.warn(
            f"group {self._record.name} is destroyed with {len(self._in_flight)} messages in flight. "
            f"Call wait() on the works of isend and irecv first.",
            stacklevel=3,
        )
        _abandoned.extend(self._in_flight)
        return False

    def give_up(self, error: Exception, *, is_revoked: bool = False) -> None:
        """Complete the messages in flight with an error.

        Args:
            is_revoked: Whether their communicator has been revoked: MPI then completes them with an error.
        """
        if is_revoked:
            self.advance()
        elif self._in_flight:
            mpi.abandon()
        for message in list(self._in_flight):
            message.give_up(error)
        _abandoned.extend(self._in_flight)  # MPI may still read and write their memory

    def _get_poller(self) -> Poller:
        with self._starting:
            if self._poller is None:
                require_threads()
                self._poller = Poller(f"mpicomm-poller-{self._record.name}", self._test_in_flight)
            return self._poller

    def _test_in_flight(self) -> bool:
        """Test every message in flight once; return whether any remains in flight."""
        self.advance()
        return bool(self._in_flight)


def _check_count(status: Any, dense: torch.Tensor) -> None:
    count = mpi_calls.received_count(status, dense.dtype)
    if count != dense.numel():
        raise RuntimeError(
            f"recv: expected {dense.numel()} elements of {dtypes.short(dense.dtype)} from rank {status.source} "
            f"(tag {status.tag}), got {count}.\nSend and receive tensors of the same size."
        )


class MessageWork(BackendWork):
    """A point-to-point message in flight: an MPI request that the waiting thread or the poller progresses."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        request: Request | None,
        memory: torch.Tensor,
        operation: Operation,
        messages: PendingMessages,
        arrived: Callable[[Any], DeviceEvent | None] | None = None,
    ) -> None:
        """Manage an MPI request.

        Args:
            request: The request; None if `start` passes it later.
            memory: The memory that MPI reads or writes; kept alive until the message has completed.
            messages: Keeps this work alive until the message has completed, and completes a requested future.
            arrived: Called with the MPI status of a received message, which it starts to copy to the tensor; returns
                the event of the end of the copy. None for a send.
        """
        super().__init__(tensors)
        self._request = request
        self._memory: torch.Tensor | None = memory
        self._operation = operation
        self._messages = messages
        self._arrived = arrived
        self.is_send = arrived is None
        self._is_transferred = False  # whether MPI has completed the message
        self._copied: DeviceEvent | None = None
        self._status = mpi.api().Status()
        self._lock = threading.Lock()  # MPI forbids two threads to complete one request
        self._asking = threading.Lock()  # guards the creation of the future
        self._done = False
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: WaitTimeout = None) -> bool:
        """Wait until the message is sent or received.

        Raises:
            TimeoutError: If it has not completed after `timeout`; it remains in flight.
            RuntimeError: If the received message does not fit the tensor.
        """
        if not self._done:
            flight_recorder.refuse_children()
            self._operation.begin()
            try:
                self._wait(deadline_of(timeout) or deadline_of(self._messages.timeout_of_messages))
            finally:
                self._operation.pause()
        if self._error is not None:
            raise self._error
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
            with self._lock:
                if not self._done:
                    self._advance(waits=True)

    def start(self, post: Callable[[], Request]) -> None:
        """Pass the message to MPI, unless it was given up."""
        if self._done or self._request is not None:
            return
        try:
            self._request = post()
        except Exception as error:  # noqa: BLE001  wait() raises it, on its caller's thread
            self._end(error)

    def is_completed(self) -> bool:
        """Return whether the message has completed; each call progresses it."""
        if not self._done:
            flight_recorder.refuse_children()
        if self._request is None:
            self._messages.unposted.post_ready()
        if self._done or not self._lock.acquire(blocking=False):
            return self._done
        try:
            if not self._done:
                self._advance(waits=False)
            return self._done
        finally:
            self._lock.release()

    def give_up(self, error: Exception) -> None:
        """Complete with an error, since the message may never complete; not while another thread is in MPI with it."""
        if self._lock.acquire(blocking=False):
            if not self._done:
                self._error, self._done = error, True
            self._lock.release()

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None if it has not failed."""
        return self._error

    def source_rank(self) -> int:
        """Return the group rank of the sender of a received message.

        Raises:
            MpicommError: If the operation is not a receive, or has not completed.
        """
        if self._arrived is None or not self._done:
            return super().source_rank()
        return self._status.source

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with the message; the group's poller thread progresses it."""
        with self._asking:  # not self._lock, which a waiting thread holds until the message has completed
            if self._future is None:
                self._future = torch_internals.future_of(self.tensors)
                if self._done:
                    self.complete_future()
                else:
                    self._messages.watch(self)
            return self._future

    def complete_future(self) -> None:
        """Complete the future; its callbacks run on the calling thread, that of the poller."""
        assert self._future is not None
        error = self._error
        if not self._done:
            error = MpicommError(
                f"the group was destroyed before {self._description()} completed.\n"
                f"Call wait() on its work before you destroy the group."
            )
        if error is None:
            self._future.set_result(self.tensors)
        else:
            self._future.set_exception(error)

    def _timeout_error(self, seconds: float) -> TimeoutError:
        partners = [rank for rank in self._operation.needs if rank != dist.get_rank()]
        partner = f"rank {partners[0]}" if len(partners) == 1 else "any other rank"
        return TimeoutError(
            f"{self._description()} timed out after {seconds:g} s, waiting for {partner}.\n"
            f"Wait longer (the message remains in flight), or call mpicomm.dump_flight_recorder() on "
            f"{partner} to see its last operations."
        )

    def _description(self) -> str:
        tensor = self.tensors[0]
        direction = "send" if self._arrived is None else "recv"
        return f"{direction} of {dtypes.short(tensor.dtype)}{list(tensor.shape)}"

    def _advance(self, *, waits: bool) -> None:
        """Complete the work if MPI and the copy to the tensor have ended, or when they have; the caller holds the lock.

        Args:
            waits: Whether to wait for them.
        """
        if not waits and vendors.is_capturing(self.tensors[0].device):
            return  # a copy would become a part of the graph, and a query of an event would invalidate it
        try:
            if not self._is_transferred:
                request = self._request
                if request is None or not (request.Wait(self._status) if waits else request.Test(self._status)):
                    return
                self._is_transferred = True
                if self._arrived is not None:
                    self._copied = self._arrived(self._status)
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
        """Complete the work."""
        if isinstance(error, mpi.api().Exception):
            error = rank_failures.error_after(error) or RuntimeError(
                f"{self._description()} failed: {error}.\nCheck that both ranks pass the same size."
            )
        self._error = error
        self._memory = self._copied = None
        self._done = True
        self._operation.finish()
        self._messages.forget(self)


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


torch_internals.hide_from_compiler(MessageWork)  # a wait() in compiled code may run operations
