"""The engine of a process set: runs the negotiation and the operations, on its own thread or on a thread that waits.

A submission returns immediately. A cycle is one round of the negotiation, followed by the operations that are ready on
all ranks. A thread that waits for an operation runs the cycles itself, because waking another thread takes longer than
a small operation; otherwise the engine's thread runs them, one cycle time after the first submission, while the program
computes. Without pending submissions the thread sleeps, except for a heartbeat: at the same times on all ranks it takes
part in a round, so that ranks that wait for this one can report it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from mpicomm import torch_internals
from mpicomm.backend.execution.worker_thread import WakeTimer
from mpicomm.backend.gpu.thread_device import ThreadDevice
from mpicomm.collective_ops.group_argument import timeout_of_job
from mpicomm.devices import accelerator
from mpicomm.errors import RankFailedError
from mpicomm.horovod.data_operations import DataOperations
from mpicomm.horovod.group_calls import GroupCalls
from mpicomm.horovod.negotiation import Negotiation, Ready, StallCheck
from mpicomm.horovod.submission import BARRIER, JOIN, HorovodInternalError, Signature, Submission
from mpicomm.horovod.timeline_file import HorovodTimeline
from mpicomm.horovod.variables import Variables

_NOW_NS = 1
_MS = 10**6  # nanoseconds
_SHUT_DOWN = (
    "Horovod has been shut down on this rank or another one, before the operation completed.\n"
    "Complete all operations on all ranks before hvd.shutdown(); hvd.init() starts Horovod again."
)


class ProcessSetEngine:
    """Matches and runs the submissions of one process set."""

    def __init__(self, name: str, ranks: Sequence[int], variables: Variables, timeline: HorovodTimeline) -> None:
        """Create a group that only this engine uses, and start the engine's thread (collective over the ranks).

        Args:
            name: The name of the group, which no other group has had in this world.
            ranks: The ranks of the set in the job.
        """
        self.ranks = ranks
        self._group = torch_internals.make_group(ranks, name, timeout_of_job())
        self._cycle_seconds, self._heartbeat_seconds = variables.cycle_seconds, variables.heartbeat_seconds
        self._cycle_ns = max(_NOW_NS, int(1e9 * variables.cycle_seconds))
        self._timeline = timeline
        calls = GroupCalls(self._group)
        self._negotiation = Negotiation(
            calls, calls.rank, ranks, variables.cache_capacity, variables.stall_check_seconds / 2
        )
        self._stall_check = StallCheck(self._negotiation, variables, is_reporter=calls.rank == 0)
        self._operations = DataOperations(calls, variables.fusion_threshold)
        self._cycle_lock = threading.Lock()  # held by the thread that runs a cycle
        self._lock = threading.Lock()  # guards the following
        self._pending: dict[str, Submission] = {}
        self._new: list[Submission] = []
        self._num_waiting = 0
        self._counts: dict[str, int] = {}  # of operations without a name, by kind, since the last join
        self._num_joins = 0
        self._is_closing = False
        self._reason = _SHUT_DOWN
        self._closed: BaseException | None = None  # why operations can no longer complete
        self._gpu = ThreadDevice()
        self._timer = WakeTimer()
        self._arm_timer()
        self._thread = threading.Thread(target=self._run, name=f"mpicomm-{name}", daemon=True)
        self._thread.start()

    def next_name(self, kind: str) -> str:
        """Return the name of an operation without a name: the ranks number these in the order of their calls.

        The numbers start again after each join, before which a rank without data makes fewer calls.
        """
        with self._lock:
            number = self._counts[kind] = self._counts.get(kind, -1) + 1
            return f"{kind}.noname.{self._num_joins}.{number}"

    def submit(self, submission: Submission) -> Submission:
        """Submit an operation; does not wait for other ranks.

        Raises:
            ValueError: If an operation of the same name is pending.
            HorovodInternalError: If the process set has been shut down.
        """
        name = submission.name
        submission.engine = self
        if submission.events or submission.signature.kind == JOIN:  # a rank that has joined allocates zeros
            self._gpu.note()
        with self._lock:
            if self._closed is not None:
                raise HorovodInternalError(_SHUT_DOWN) from self._closed
            if name in self._pending:
                raise ValueError(
                    f"{name} was submitted while an operation of this name is pending.\n"
                    f"Call hvd.synchronize() on the first one before, or use another name."
                )
            if self._timeline.is_open:
                self._timeline.start_negotiation(submission)
            if not self._pending and not self._num_waiting:
                self._timer.set(self._cycle_ns)
            self._pending[name] = submission
            self._new.append(submission)
        return submission

    def wait(self, submission: Submission) -> None:
        """Return when an operation is complete; this thread runs cycles meanwhile.

        Raises:
            HorovodInternalError: If the operation has failed.
        """
        if not submission.is_done:
            self._cycle_until_done(submission)
        if submission.error is not None:
            raise submission.error

    def _cycle_until_done(self, submission: Submission) -> None:
        with self._lock:
            self._num_waiting += 1
        try:
            while not submission.is_done:
                with self._cycle_lock:
                    has_progress = submission.is_done or self._cycle()
                if not has_progress:
                    time.sleep(self._cycle_seconds)
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._arm_timer()

    def run_barrier(self, name: str) -> None:
        """Wait until all ranks of the process set have called this with a name that is used once (collective)."""
        self.wait(self.submit(Submission(name, Signature(BARRIER), is_cacheable=False)))

    def close(self) -> None:
        """Shut the process set down on all its ranks: pending operations fail (collective)."""
        self._is_closing = True
        while self._closed is None:
            with self._cycle_lock:
                if self._closed is None:
                    self._cycle()
        self._timer.set(_NOW_NS)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._timer.close()
        if torch_internals.is_alive(self._group):
            dist.destroy_process_group(self._group)

    # -- cycles ----------------------------------------------------------------------------------------------------

    def _cycle(self) -> bool:
        """Run one cycle (collective); the caller holds `_cycle_lock`. Returns whether an operation has completed."""
        with self._lock:
            new, self._new = self._new, []
        try:
            if self._timeline.is_open:
                self._timeline.mark_cycle()
            ready, is_closing = self._negotiation.run_round(new, is_closing=self._is_closing)
            if ready:
                self._complete(ready)
            if self._negotiation.announced and (reason := self._stall_check.report_stalls()):
                self._is_closing, self._reason = True, reason
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, RankFailedError):
                self._group.abort()  # the other ranks wait for this one
            if not isinstance(error, Exception):
                raise
            return True
        if is_closing:
            self._fail(HorovodInternalError(self._reason))
        return bool(ready) or self._closed is not None

    def _complete(self, ready: list[Ready]) -> None:
        if self._timeline.is_open:
            self._timeline.end_negotiation(ready)
        with self._lock:
            for item in ready:
                self._pending.pop(item.name, None)
                if item.signature.kind == JOIN:
                    self._num_joins += 1
                    self._counts.clear()
        # On one stream, whichever thread runs the cycle: the operations use the same buffers.
        with accelerator.on_stream(self._gpu.stream):
            self._operations.run(ready)
        if self._timeline.is_open:
            self._timeline.end_operations(ready)

    def _fail(self, error: BaseException) -> None:
        """Fail all operations, now and in future."""
        with self._lock:
            self._closed = error
            pending = list(self._pending.values())
            self._pending.clear()
        for submission in pending:
            failure = HorovodInternalError(f"{submission.name}: {error}")
            failure.__cause__ = error
            submission.finish(error=failure)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._closed is None:
            self._timer.wait()
            self._gpu.enter()
            self._run_cycles()

    def _run_cycles(self) -> None:
        """Run cycles until nothing is pending, at least one; leave them to threads that wait."""
        while self._closed is None:
            with self._lock:
                if self._num_waiting:
                    return
            with self._cycle_lock:
                has_progress = self._closed is not None or self._cycle()
            with self._lock:
                if not self._pending:
                    self._arm_timer()
                    return
            if not has_progress:
                time.sleep(self._cycle_seconds)

    def _arm_timer(self) -> None:
        """Set the timer to a cycle time if operations are pending, otherwise to the next heartbeat."""
        if self._pending:
            self._timer.set(self._cycle_ns)
            return
        seconds = self._heartbeat_seconds - time.time() % self._heartbeat_seconds  # at the same times on all ranks
        self._timer.set((int(1e9 * seconds) // _MS + 1) * _MS)
