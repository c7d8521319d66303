"""The reports of a rank to rank 0: operations that run long, its exit, and the ranks that do not answer their hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.json_messages import Message
from mpicomm.recorder import flight_recorder, stream_queue
from mpicomm.recorder.status import NotResponding, OperationInfo
from mpicomm.watchdog import local_processes, protocol
from mpicomm.watchdog.channel import RankInfo
from mpicomm.watchdog.connected_ranks import ANSWER_SECONDS, ConnectedRanks
from mpicomm.watchdog.protocol import LocalProcess, PossibleHang, StatusReport, TimedOut, WaitEnded, WaitStarted
from mpicomm.watchdog.rank_reports import WAIT_LIMIT, OperationMonitor, RankExit

STARTED, HANG_SECONDS, TIMEOUT = 1000.0, 60.0, 100.0
INFO = OperationInfo(7, "all_reduce", "0", "", 42, False, "float32", 4, None, "train.py:8", 0.0, 0.0, False)


class Operation(SimpleNamespace):
    """An operation of the flight recorder."""

    def describe(self, now: float) -> OperationInfo:
        return INFO


@pytest.fixture(name="running")
def _running(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of the operations that run."""
    operations: list[Any] = []
    monkeypatch.setattr(flight_recorder, "running", lambda: list(operations))
    monkeypatch.setattr(stream_queue, "refresh_all", lambda: None)
    return operations


def operation(limit: float | None) -> Operation:
    group = SimpleNamespace(timeout=TIMEOUT)
    return Operation(number=7, start=STARTED, limit=limit, group=group, needs=[0, 2])


def monitor() -> tuple[OperationMonitor, list[Message]]:
    reports: list[Message] = []
    return OperationMonitor(1, HANG_SECONDS, Path("dumps"), reports.append), reports


def test_each_stage_of_an_operation_is_reported_once(running: list[Any]) -> None:
    watched, reports = monitor()
    running.append(operation(TIMEOUT))
    for second in range(round(TIMEOUT) + 5):
        watched.check(STARTED + second)
    files = "  flight recorder and stacks of every rank: dumps"
    assert reports == [
        WaitStarted(1, INFO, "0, 2"),
        PossibleHang(1, INFO, "0, 2", TIMEOUT, False, files),
        TimedOut(1, INFO, "0, 2", TIMEOUT, False, files),
    ]


def test_a_hang_is_reported_at_half_of_its_timeout(running: list[Any]) -> None:
    watched, reports = monitor()
    running.append(operation(20.0))
    watched.check(STARTED + 10.5)
    assert [type(report) for report in reports] == [WaitStarted, PossibleHang]
    watched.check(STARTED + 20.5)
    assert [type(report) for report in reports[2:]] == [TimedOut]


def test_an_operation_that_raises_at_its_timeout_does_not_end_the_job(running: list[Any]) -> None:
    watched, reports = monitor()
    running.append(operation(None))
    watched.check(STARTED + TIMEOUT + 1)
    assert [type(report) for report in reports] == [WaitStarted, PossibleHang]


def test_the_end_of_an_operation_that_was_reported(running: list[Any]) -> None:
    watched, reports = monitor()
    running.append(operation(TIMEOUT))
    watched.check(STARTED + WAIT_LIMIT / 2)  # not reported
    assert reports == []
    watched.check(STARTED + WAIT_LIMIT + 1)
    running.clear()
    for second in (WAIT_LIMIT + 2, WAIT_LIMIT + 3):
        watched.check(STARTED + second)
    assert reports == [WaitStarted(1, INFO, "0, 2"), WaitEnded(1, 7)]


def test_an_exit_is_reported_with_its_first_status() -> None:
    reports: list[protocol.RankExited] = []
    exiting = RankExit(3, reports.append)
    exiting.report(2, is_stuck=False, waits=False, sends=True)
    exiting.report(0, is_stuck=False, waits=False, sends=True)
    assert [(report.rank, report.status) for report in reports] == [(3, 2)]
    assert exiting.is_reported


class Hub:
    """Rank 0 as the hub of ranks 1 and 2, of which rank 2 is on another host."""

    def __init__(self) -> None:
        self.children = {1: SimpleNamespace(received_at=0.0), 2: SimpleNamespace(received_at=0.0)}
        self.processes = {rank: LocalProcess(100 + rank, "since today") for rank in (1, 2)}
        self.reports: list[StatusReport] = []
        rank_info = RankInfo(0, ["node0", "node0", "node1"], [0, 0, 1], [0, 0, 0])
        self.ranks = ConnectedRanks(rank_info, self, self.reports.append)  # type: ignore[arg-type]


def test_a_hub_answers_for_ranks_that_do_not() -> None:
    hub = Hub()
    hub.ranks.start_collection(5, 10.0)
    hub.ranks.record_status(StatusReport(1, 5, NotResponding(0.0, "")))
    hub.ranks.close_collections(10.0 + ANSWER_SECONDS / 2)
    assert (hub.reports, hub.ranks.is_collecting) == ([], True)
    hub.ranks.close_collections(10.0 + ANSWER_SECONDS)
    assert hub.reports == [StatusReport(2, 5, NotResponding(10.0 + ANSWER_SECONDS, ""))]
    assert not hub.ranks.is_collecting


def test_a_rank_that_exits_during_a_collection_is_not_reported() -> None:
    hub = Hub()
    hub.ranks.start_collection(5, 10.0)
    del hub.children[2]
    hub.ranks.close_collections(10.0 + ANSWER_SECONDS)
    assert [report.rank for report in hub.reports] == [1]


def test_processes_on_another_host_are_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, killed = Hub(), []
    monkeypatch.setattr(local_processes, "kill", killed.append)
    monkeypatch.setattr(local_processes, "is_stopped", lambda pid: False)
    hub.ranks.kill_unresponsive(with_hub=False)
    assert killed == [hub.processes[1]]
