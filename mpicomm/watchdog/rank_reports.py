"""The reports of a rank to rank 0: its long operations, its status, and its exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpicomm.arguments import Deadline
from mpicomm.json_messages import Message
from mpicomm.recorder import flight_recorder, rank_text, stream_queue
from mpicomm.recorder.flight_recorder import Operation
from mpicomm.recorder.status import RankStatus, Usage
from mpicomm.watchdog import exit_hooks, local_processes, protocol
from mpicomm.watchdog.nvml import GPUReader
from mpicomm.watchdog.protocol import LONGEST_GAP, RankExited

WAIT_LIMIT = 5.0
"""Seconds that a rank waits for another rank that has exited normally, before the watchdog aborts the job."""

_MAX_RUNNING = 8  # the most running operations in a status
_TAKE_DOWN_SECONDS = 60.0  # time limit for destroying each process group once all ranks have exited


class OperationMonitor:
    """Checks the operations of one rank."""

    def __init__(
        self,
        rank: int,
        hang_seconds: float,
        directory: Path | None,
        report: Callable[[Message], None],
        gpu: GPUReader | None = None,
    ) -> None:
        """Create the monitor.

        Args:
            hang_seconds: Seconds that an operation may run before rank 0 collects the status of all ranks.
            directory: Directory of the dump files; None if no files are written.
            report: Sends a message to rank 0.
            gpu: Reads the GPU of this rank.
        """
        self._rank = rank
        self._gpu = gpu or GPUReader("")
        self._hang_seconds = hang_seconds
        self._files = "" if directory is None else f"  flight recorder and stacks of every rank: {directory}"
        self._report = report
        self._reported: dict[int, set[Callable[..., Message]]] = {}  # by operation number: the messages sent to rank 0

    def check(self, now: float) -> None:
        """Report the operations that have become late; called once a second."""
        stream_queue.refresh_all()
        self.report_ended_waits()
        for operation in flight_recorder.running():
            self._check_operation(operation, now)

    def report_ended_waits(self) -> None:
        """Report the operations that have ended since they were reported."""
        for number in self._reported.keys() - {operation.number for operation in flight_recorder.running()}:
            del self._reported[number]
            self._report(protocol.WaitEnded(self._rank, number))

    def status(self, now: float, *, with_usage: bool = False) -> RankStatus:
        """Return the status of this rank: its operations, and where its main thread is."""
        last = flight_recorder.last()
        running = sorted(flight_recorder.running(), key=lambda operation: operation.number)
        return RankStatus(
            [operation.describe(now) for operation in running[:_MAX_RUNNING]],
            None if last is None else last.describe(now),
            flight_recorder.line_of_main_thread(),
            flight_recorder.sequences(),
            self._usage(now) if with_usage else None,
        )

    def _usage(self, now: float) -> Usage:
        rate, memory = round(flight_recorder.bytes_per_second(now), 1), local_processes.resident_memory()
        gpu = self._gpu.read()
        return Usage(rate, memory, gpu.memory, gpu.memory_total, gpu.utilization)

    def _check_operation(self, operation: Operation, now: float) -> None:
        waited = now - (operation.start or now)
        raises = operation.limit is None  # at its timeout, and the program may continue after it
        timeout = operation.limit or operation.group.timeout
        hang_seconds = self._hang_seconds if raises else min(self._hang_seconds, timeout / 2)
        if waited > WAIT_LIMIT:
            self._report_once(protocol.WaitStarted, operation, now)
        if waited > timeout and not raises:
            self._report_once(protocol.TimedOut, operation, now, timeout, raises, self._files)
        elif waited > hang_seconds:
            self._report_once(protocol.PossibleHang, operation, now, timeout, raises, self._files)

    def _report_once(self, kind: Callable[..., Message], operation: Operation, now: float, *arguments: Any) -> None:
        reported = self._reported.setdefault(operation.number, set())
        if kind not in reported:
            reported.add(kind)
            needs = rank_text.ranges(operation.needs)
            self._report(kind(self._rank, operation.describe(now), needs, *arguments))


class RankExit:
    """The reports of one rank about its exit, and rank 0's report that all ranks have exited."""

    def __init__(self, rank: int, report: Callable[[RankExited], None]) -> None:
        """Create the record.

        Args:
            report: Sends a message to rank 0.
        """
        self._rank = rank
        self._report = report
        self.is_reported = False
        self.all_exited = threading.Event()
        self.is_stuck = False
        """Once all ranks have exited: whether one of them has an operation that may never end."""

        self._deadline: Deadline | None = None  # for destroying the next process group
        self._last: Operation | None = None  # the last operation at the last check

    def report(self, status: int | None, *, is_stuck: bool, waits: bool, sends: bool) -> None:
        """Report that this rank calls no more operations, unless it has done so before."""
        if not self.is_reported:
            self.is_reported = True
            self._report(RankExited(self._rank, status, is_stuck, waits, sends, flight_recorder.sequences()))

    def start_deadline(self) -> None:
        """Start the deadline for destroying a group: all ranks destroy their groups now, so none takes long."""
        self._deadline = Deadline(_TAKE_DOWN_SECONDS, LONGEST_GAP)

    def is_late(self, seconds: float) -> bool:
        """Return whether destroying a group has taken longer than its deadline by so many seconds."""
        return self._deadline is not None and self._deadline.count_down() <= -seconds

    def check(self) -> None:
        """Restart the deadline for each group, and report the exit of a program that has ended; once a second."""
        if self._deadline is not None and flight_recorder.last() is not self._last:
            self._last = flight_recorder.last()
            self.start_deadline()
        if _has_program_ended():
            self.report(exit_hooks.exit_status(), is_stuck=False, waits=True, sends=False)


def _has_program_ended() -> bool:
    """Return whether `sys.exit` with a status other than 0 ended the program while threads keep the process alive.

    Without such a status, the threads may do the work of the program.
    """
    if threading.main_thread().is_alive() or not exit_hooks.exit_status():
        return False
    return not flight_recorder.is_used_by_a_thread() and not flight_recorder.has_open_collectives()
