"""Detects the operations for which this rank waits long, and reports them to rank 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpicomm.watchdog import flight_recorder, hang_report, local_processes, protocol
from mpicomm.watchdog.flight_recorder import Operation
from mpicomm.watchdog.nvml import GPUReader
from mpicomm.watchdog.protocol import Message, RankStatus, Usage

WAIT_LIMIT = 5.0
"""Seconds that a rank waits for another rank that has exited normally, before the watchdog aborts the job."""

_MAX_RUNNING = 8  # the most running operations in a status


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
        flight_recorder.refresh_streams()
        for operation in self.running():
            self._check_operation(operation, now)

    def running(self) -> list[Operation]:
        """Return the operations for which this rank waits; report to rank 0 which reported operations have ended."""
        running = flight_recorder.running()
        for number in self._reported.keys() - {each.number for each in running}:
            del self._reported[number]
            self._report(protocol.WaitEnded(self._rank, number))
        return running

    def status(self, now: float, *, with_usage: bool = False) -> RankStatus:
        """Return the status of this rank: its operations, and where its main thread is."""
        last = flight_recorder.last()
        running = sorted(self.running(), key=lambda each: each.number)
        return RankStatus(
            [each.describe(now) for each in running[:_MAX_RUNNING]],
            None if last is None else last.describe(now),
            flight_recorder.line_of_main_thread(),
            flight_recorder.sequences(),
            self._usage(now) if with_usage else None,
        )

    def _usage(self, now: float) -> Usage:
        gpu = self._gpu.read()
        return Usage(
            round(flight_recorder.bytes_per_second(now), 1),
            local_processes.resident_memory(),
            gpu.memory,
            gpu.memory_total,
            gpu.utilization,
        )

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
            needs = hang_report.ranges(operation.needs)
            self._report(kind(self._rank, operation.describe(now), needs, *arguments))
