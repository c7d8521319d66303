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
from typing import Any

from mpicomm.backend.gpus import ThreadDevice
from mpicomm.backend.wake_timer import WakeTimer
from mpicomm.horovod.data_operations import DataOperations
from mpicomm.horovod.exceptions import SHUT_DOWN, HorovodInternalError
from mpicomm.horovod.group_calls import GroupCalls
from mpicomm.horovod.group_exchange import GroupExchange
from mpicomm.horovod.negotiation import Negotiation, Ready
from mpicomm.horovod.stalls import StallCheck
from mpicomm.horovod.submission import BARRIER, JOIN, Signature, Submission
from mpicomm.horovod.timeline_file import HorovodTimeline
from mpicomm.horovod.variables import Variables

_NOW_NS = 1
_MS = 10**6  # nanoseconds


class ProcessSetEngine:
    """Matches and runs the submissions of one process set."""

    def __init__(
        self, name: str, group: Any, rank: int, ranks: Sequence[int], variables: Variables, timeline: HorovodTimeline
    ) -> None:
        """Start the engine's thread.

        Args:
            group: A group of the set's ranks that only this engine uses.
            rank: This rank in the set.
            ranks: The ranks of the set in the job.
        """
        self.ranks = ranks
        self._cycle_seconds, self._heartbeat_seconds = variables.cycle_seconds, variables.heartbeat_seconds
        self._cycle_ns = max(_NOW_NS, int(1e9 * variables.cycle_seconds))
        self._timeline = timeline
        calls = GroupCalls(group)
        exchange = GroupExchange(calls)
        self._negotiation = Negotiation(
            exchange, rank, ranks, variables.cache_capacity, variables.stall_check_seconds / 2
        )
        self._stall_check = StallCheck(self._negotiation, variables, is_reporter=rank == 0)
        self._operations = DataOperations(calls, exchange, variables.fusion_threshold)
        self._driver = threading.Lock()  # held by the thread that runs a cycle
        self._lock = threading.Lock()  # guards the following
        self._pending: dict[str, Submission] = {}
        self._new: list[Submission] = []
        self._num_waiting = 0
        self._counts: dict[str, int] = {}  # of operations without a name, by kind, since the last join
        self._num_joins = 0
        self._is_closing = False
        self._reason = SHUT_DOWN
        self._closed: BaseException | None = None  # why operations can no longer complete
        self._gpu = ThreadDevice()
        self._timer = WakeTimer()
        self._sleep()
        self._thread = threading.Thread(target=self._run, name=f"mpicomm-horovod-{name}", daemon=True)
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
        self._gpu.note()
        with self._lock:
            if self._closed is not None:
                raise HorovodInternalError(SHUT_DOWN) from self._closed
            if name in self._pending:
                raise ValueError(
                    f"{name} was submitted while an operation of this name is pending.\n"
                    f"Call hvd.synchronize() on the first one before, or use another name."
                )
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
                with self._driver:
                    has_progress = submission.is_done or self._cycle()
                if not has_progress:
                    time.sleep(self._cycle_seconds)
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._sleep()

    def run_barrier(self, name: str) -> None:
        """Wait until all ranks of the process set have called this with the same name (collective)."""
        self.wait(self.submit(Submission(name, Signature(BARRIER), is_cacheable=False)))

    def close(self) -> None:
        """Shut the process set down on all its ranks: pending operations fail (collective)."""
        self._is_closing = True
        while self._closed is None:
            with self._driver:
                if self._closed is None:
                    self._cycle()
        self._timer.set(_NOW_NS)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._timer.close()

    # -- cycles ----------------------------------------------------------------------------------------------------

    def _cycle(self) -> bool:
        """Run one cycle (collective); the caller holds `_driver`. Returns whether an operation has completed."""
        with self._lock:
            new, self._new = self._new, []
        try:
            self._timeline.mark_cycle()
            ready, is_closing = self._negotiation.run_round(new, is_closing=self._is_closing)
            if ready:
                self._complete(ready)
            if reason := self._stall_check.run():
                self._is_closing, self._reason = True, reason
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            return True
        if is_closing:
            self._fail(HorovodInternalError(self._reason))
        return bool(ready) or self._closed is not None

    def _complete(self, ready: list[Ready]) -> None:
        self._timeline.end_negotiation(ready)
        with self._lock:
            for each in ready:
                self._pending.pop(each.name, None)
                if each.signature.kind == JOIN:
                    self._num_joins += 1
                    self._counts.clear()
        self._operations.run(ready)
        self._timeline.end_operations(ready)

    def _fail(self, error: BaseException) -> None:
        """Fail all operations, now and in future."""
        with self._lock:
            self._closed = error
            pending = list(self._pending.values())
            self._pending.clear()
        for each in pending:
            failure = HorovodInternalError(f"{each.name}: {error}")
            failure.__cause__ = error
            each.finish(error=failure)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._closed is None:
            self._timer.wait()
            self._gpu.enter()
            self._drive()

    def _drive(self) -> None:
        """Run cycles until nothing is pending, at least one; leave them to threads that wait."""
        while self._closed is None:
            with self._lock:
                if self._num_waiting:
                    return
            with self._driver:
                has_progress = self._closed is not None or self._cycle()
            with self._lock:
                if not self._pending:
                    self._sleep()
                    return
            if not has_progress:
                time.sleep(self._cycle_seconds)

    def _sleep(self) -> None:
        """Set the timer to a cycle time if operations are pending, otherwise to the next heartbeat."""
        if self._pending:
            self._timer.set(self._cycle_ns)
            return
        seconds = self._heartbeat_seconds - time.time() % self._heartbeat_seconds  # at the same times on all ranks
        self._timer.set((int(1e9 * seconds) // _MS + 1) * _MS)
