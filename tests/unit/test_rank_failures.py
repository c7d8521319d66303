"""The failed ranks that a rank knows, and the threads and sockets after an interrupted recovery."""

from __future__ import annotations

import queue
import threading
import types
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch.distributed as dist

from mpicomm import mpi, topology
from mpicomm.backend.execution import group_state
from mpicomm.errors import MpicommError, RankFailedError
from mpicomm.job.session import Session
from mpicomm.recorder import flight_recorder
from mpicomm.watchdog import agent, channel_setup, rank_failures
from mpicomm.watchdog.agent import WatchdogSettings
from mpicomm.watchdog.channel import Channel
from mpicomm.watchdog.rank_failures import RankFailures


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankFailures]:
    monkeypatch.setattr(mpi, "record_lost_processes", lambda: None)
    monkeypatch.setattr(mpi, "revoke_all", lambda: None)
    found = RankFailures(None, ["alpha", "alpha", "beta"], 3)
    rank_failures.set_current(found)
    yield found
    rank_failures.set_current(None)


def test_an_operation_that_a_failure_interrupts_raises_its_error_at_once(
    failures: RankFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = flight_recorder.Group("interrupted", [0, 1, 2], 60.0, is_world=False)
    errors: list[Exception] = []

    def interrupt() -> None:  # as another thread, whose MPI call returns or which finds the group broken
        try:
            group_state.check_unbroken(record)
        except MpicommError as error:
            errors.append(error)

    monkeypatch.setattr(mpi, "revoke_all", interrupt)
    failures.record({1: "it was killed"})
    record.is_closed = True
    assert [(type(each), getattr(each, "ranks", None)) for each in errors] == [(RankFailedError, (1,))]


def test_an_error_of_nccl_waits_for_the_report_of_the_failure(failures: RankFailures) -> None:
    """NCCL notices the end of a rank's connection, perhaps before the watchdog does."""
    assert rank_failures.error_after(RuntimeError("of the program")) is None
    timer = threading.Timer(0.2, failures.record, [{1: "it was killed"}])
    timer.start()
    error = rank_failures.error_after(dist.DistBackendError("ncclRemoteError"))
    timer.join()
    assert isinstance(error, RankFailedError)


def test_the_groups_of_vendors_are_aborted_once(failures: RankFailures) -> None:
    class Inner:
        def __init__(self) -> None:
            self.aborts: queue.Queue[str] = queue.Queue()

        def abort(self) -> None:
            self.aborts.put(threading.current_thread().name)
            raise RuntimeError("recover() raises it again")

    early, ended, late = Inner(), Inner(), Inner()
    for inner in (early, ended):
        rank_failures.abort_on_failure(cast("Any", inner))
    rank_failures.keep_on_failure(cast("Any", ended))
    failures.record({1: "it was killed"})
    assert early.aborts.get(timeout=30) == "mpicomm-abort"
    rank_failures.abort_on_failure(cast("Any", late))
    failures.record({2: "it was killed"})
    assert late.aborts.get(timeout=30) == "mpicomm-abort"
    assert [inner.aborts.qsize() for inner in (early, ended, late)] == [0, 0, 0]


def test_the_loss_of_a_spare_is_not_a_failure(failures: RankFailures) -> None:
    failures.record({3: "it was killed"})
    assert not failures.has_any.is_set()


def test_ranks_that_end_while_the_job_is_being_aborted_are_not_recovered_from(failures: RankFailures) -> None:
    failures.record({1: "it was killed"})
    with pytest.raises(RankFailedError):
        rank_failures.raise_if_failed(None)
    failures.is_aborting = True
    rank_failures.raise_if_failed(None)
    assert rank_failures.error_after(ProcessLookupError()) is None


def test_operations_raise_the_error_of_a_world_until_the_next_world_is_open(failures: RankFailures) -> None:
    parts = dict.fromkeys(("request", "launch", "settings", "job", "world", "shutdown", "claim"), cast("Any", None))
    ended = Session(name="job", failures=failures, **parts)
    ended.close(recovers=True)
    assert rank_failures.current() is failures
    ended.close()
    assert rank_failures.current() is None


@pytest.mark.parametrize("is_revoked", [True, False])
def test_a_communicator_that_another_rank_has_revoked_shows_a_failure(
    is_revoked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "failed_ranks", lambda _: [])
    monkeypatch.setattr(rank_failures, "_EVIDENCE_SECONDS", 0.01)
    monkeypatch.setattr(rank_failures, "_NAME_SECONDS", 0.01)
    comm: Any = types.SimpleNamespace(Is_revoked=lambda: is_revoked)
    failures = RankFailures(comm, ["alpha", "beta"], 2)
    assert failures.wait_until_known() == is_revoked
    assert (failures.error().ranks, failures.ranks) == ((), [])


def test_a_busy_watchdog_may_name_the_rank_later(failures: RankFailures, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []  # whether the communicator is revoked, after the first wait
    monkeypatch.setattr(mpi, "failed_ranks", lambda _: [1] * len(asked))
    monkeypatch.setattr(rank_failures, "_EVIDENCE_SECONDS", 0.01)
    monkeypatch.setattr(failures, "_comm", types.SimpleNamespace(Is_revoked=lambda: not asked.append(None)))
    assert failures.wait_until_known()
    assert failures.error().ranks == (1,)


def test_a_watchdog_whose_start_is_interrupted_leaves_no_thread() -> None:
    has_begun = threading.Event()

    def allgather(value: Any) -> list[Any]:
        if has_begun.is_set():
            raise ConnectionError("another rank has failed")
        has_begun.set()
        return [value]

    comm: Any = types.SimpleNamespace(rank=0, size=1, allgather=allgather, Abort=None)
    before = set(threading.enumerate())
    where, channel = topology.from_nodes(0, [0], ["alpha"]), Channel(0, b"token", 30)
    with pytest.raises(ConnectionError):
        channel_setup.start_watchdog(
            comm, where, "127.0.0.1", channel, WatchdogSettings(60.0, None), lambda: True, None
        )
    assert set(threading.enumerate()) == before
    assert agent.current() is None
