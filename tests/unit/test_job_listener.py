"""The end of `mpicomm run` in its connection with rank 0: authentication, and the record of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import selectors
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from mpicomm.cli.job_listener import Job, JobListener
from mpicomm.json_messages import Message
from mpicomm.recorder.status import Crash
from mpicomm.watchdog import parent_link
from mpicomm.watchdog.agent import Watchdog, WatchdogSettings
from mpicomm.watchdog.channel import Channel, RankInfo
from mpicomm.watchdog.connection import Connection
from mpicomm.watchdog.parent_link import Parent
from mpicomm.watchdog.protocol import JobFailed, JobStarted, RankFinished, StopAnswered
from tests.time_limits import wait_until

HOST_TIMEOUT = 7  # seconds
HOSTS = {"node1": "0, 1", "node2": "2, 3"}


@pytest.fixture(name="listener")
def _listener() -> Iterator[tuple[JobListener, selectors.BaseSelector]]:
    with selectors.DefaultSelector() as selector:
        listener = JobListener(selector, is_local=True, host_timeout=HOST_TIMEOUT)
        yield listener, selector
        listener.close()


def connect(ends: tuple[JobListener, selectors.BaseSelector], parent: Parent) -> Connection:
    """Connect like rank 0, while the listener handles its events."""
    found: list[Connection | OSError] = []

    def run() -> None:
        try:
            found.append(parent_link.connect(parent, seconds=5.0))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        handle(ends)
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def handle(ends: tuple[JobListener, selectors.BaseSelector]) -> None:
    for key, mask in ends[1].select(0.05):
        key.data(mask)


def report(ends: tuple[JobListener, selectors.BaseSelector], connection: Connection, *messages: Message) -> None:
    for message in messages:
        connection.send(message)
    handle(ends)


def test_a_job_is_finished_when_every_rank_is(listener: tuple[JobListener, selectors.BaseSelector]) -> None:
    connection = connect(listener, Parent.parse(str(listener[0].parent)))
    report(listener, connection, JobStarted(HOSTS), *[RankFinished(rank) for rank in (0, 1, 3)])
    (job,) = listener[0].jobs
    assert (job.is_finished, job.has_failed) == (False, False)
    assert job.describe_end() == "rank 2 of 4 on node2 did not reach the end of the program"
    report(listener, connection, RankFinished(2))
    connection.close()
    handle(listener)
    assert (job.is_finished, job.is_connected, job.has_failed) == (True, False, False)


@pytest.mark.parametrize("cause", ["", "rank 3 of 4 on node2 died"])
def test_a_job_has_failed_when_rank_0_is_lost_or_reports_it(
    cause: str, listener: tuple[JobListener, selectors.BaseSelector]
) -> None:
    connection = connect(listener, listener[0].parent)
    report(listener, connection, JobStarted(HOSTS), *([JobFailed(cause)] if cause else []))
    if not cause:
        connection.close()
        handle(listener)
    (job,) = listener[0].jobs
    assert (job.has_failed, job.cause) == (True, cause)
    connection.close()


def test_a_job_that_continues_after_failures_names_the_failed_ranks() -> None:
    job = Job(HOSTS, recovers=True)
    for message in (RankFinished(0), RankFinished(2, has_failed=True)):
        job.receive(message)
    job.lose_rank_0("closed")
    assert (job.is_connected, job.has_failed, job.may_have_lost_host) == (False, False, True)
    what = "rank 2 of 4 on node2 failed, and ranks 1, 3 of 4 on node1, node2 did not reach the end of the program"
    assert job.describe_end() == what
    job.receive(JobFailed("rank 1 of 4 on node1 failed"))
    assert not job.may_have_lost_host


@pytest.mark.parametrize("recovers", [False, True])
def test_a_crash_of_rank_0_is_the_cause_unless_the_job_continues(recovers: bool) -> None:
    job = Job(HOSTS, recovers=recovers)
    job.receive(Crash("SIGSEGV", ""))
    assert job.cause == ("" if recovers else "rank 0 of 4 on node1 died: SIGSEGV ended its process")


@pytest.mark.parametrize(
    ("messages", "hosts"),
    [
        ([JobFailed("rank 3 of 4 on node2 died", "3"), JobFailed("rank 0 of 4 on node1 failed", "0")], ["node2"]),
        ([JobFailed("ranks 1, 2, 3 do not respond", "1-3")], ["node1", "node2"]),
        ([JobFailed("rank 2 of 4 on node2 has exited, but other ranks wait for it")], []),
        ([Crash("SIGBUS", "")], ["node1"]),
        ([JobFailed("rank 3 of 4 on node2 died", "3"), Crash("SIGBUS", "")], ["node2"]),
    ],
    ids=["first", "several", "no rank at fault", "rank 0", "rank 0 later"],
)
def test_the_hosts_of_the_first_failure_are_known(messages: list[Message], hosts: list[str]) -> None:
    job = Job(HOSTS)
    for message in messages:
        job.receive(message)
    job.lose_rank_0("closed")
    assert job.failed_hosts == hosts


def test_the_end_of_rank_0_alone_names_no_host() -> None:
    """The launcher may have killed rank 0 after another rank had failed."""
    job = Job(HOSTS)
    job.lose_rank_0("closed")
    assert job.has_failed
    assert job.failed_hosts == []


def test_a_job_that_continues_after_failures_ends_with_the_host_of_rank_0() -> None:
    job = Job(HOSTS, recovers=True)
    job.lose_rank_0(os.strerror(errno.ETIMEDOUT))
    assert job.cause == "rank 0 of 4 on node1 died: its host is unreachable (Connection timed out)"
    assert job.has_failed
    assert job.may_have_lost_host


def test_a_process_without_the_token_is_refused(listener: tuple[JobListener, selectors.BaseSelector]) -> None:
    stranger = dataclasses.replace(listener[0].parent, token=bytes(16))
    with pytest.raises(OSError, match="closed"), contextlib.suppress(ValueError):
        connect(listener, stranger)
    assert listener[0].jobs == []


def test_an_answer_belongs_to_the_last_question_about_its_signal(
    listener: tuple[JobListener, selectors.BaseSelector],
) -> None:
    connection = connect(listener, listener[0].parent)
    report(listener, connection, JobStarted(HOSTS))
    (job,) = listener[0].jobs
    listener[0].ask_to_stop(signal.SIGUSR1)
    listener[0].ask_to_stop(signal.SIGTERM)
    report(listener, connection, StopAnswered(signal.SIGUSR1, False))
    assert job.answers == {signal.SIGUSR1: False}
    report(listener, connection, StopAnswered(signal.SIGTERM, True))
    assert job.answers == {signal.SIGUSR1: False, signal.SIGTERM: True}
    listener[0].ask_to_stop(signal.SIGUSR1)
    assert job.answers == {signal.SIGTERM: True}
    connection.close()


def test_the_host_timeout_is_set(listener: tuple[JobListener, selectors.BaseSelector]) -> None:
    connection = connect(listener, listener[0].parent)
    (end,) = [key.fileobj for key in listener[1].get_map().values() if isinstance(key.fileobj, Connection)]
    assert end.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * HOST_TIMEOUT
    connection.close()


def test_the_end_of_a_rank_before_rank_0_is_connected_is_reported(
    listener: tuple[JobListener, selectors.BaseSelector],
) -> None:
    watch = Watchdog(
        RankInfo(0, ["a"], [0], [0]), Channel(0, bytes(32)), WatchdogSettings(600, None), os._exit, lambda: True
    )
    connection = connect(listener, listener[0].parent)
    watch.start()
    watch.leave(0, is_stuck=False)
    wait_until(watch.has_seen_all_exit, "rank 0 has reported its exit")
    watch.attach_parent(connection)
    wait_until(lambda: handle(listener) or [job.is_finished for job in listener[0].jobs] == [True], "it is reported")
    watch.stop()


def test_only_the_first_reader_finds_the_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent_link, "_address", None)
    environ = {"MPICOMM_PARENT": "127.0.0.1/1/00", "HOME": "/"}
    assert [parent_link.take_address(environ) for _ in range(2)] == ["127.0.0.1/1/00"] * 2
    assert environ == {"HOME": "/"}
