"""The observers of a job over real sockets: what they get, and that they cannot disturb it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpicomm.arguments import Deadline
from mpicomm.cli.job_observer import JobObserver
from mpicomm.recorder.status import NotResponding
from mpicomm.watchdog import connection, job_files, observers
from mpicomm.watchdog.job_files import ListedJob
from mpicomm.watchdog.observers import MAX_OBSERVERS, Observers
from mpicomm.watchdog.protocol import StatusComplete, StatusRefused, StatusReport, StatusRequest
from tests.time_limits import scaled

NAME = "20261121-102043-33575"
SIZE = 4
SECONDS = scaled(20.0)  # time limit of each wait in these tests
LARGE = 1 << 19  # bytes of a report; eight do not fit into a socket's buffers


@pytest.fixture(name="folder", autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a new directory, whose path is short enough for a socket, for the files of jobs."""
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above, "jobs")
        monkeypatch.setattr(job_files, "folders", lambda: [folder])
        yield folder


class Host:
    """The process that listens for observers: rank 0 or `mpicomm run`."""

    def __init__(self, name: str = NAME) -> None:
        self.selector = selectors.DefaultSelector()
        self.observers = Observers(self.selector, job_files.new(name, SIZE, "train.py", 0.0), self.answer)
        self.requests = 0
        self.answers = True
        self.size = 1  # bytes of the text in a report

    def poll(self, seconds: float = 0.01) -> None:
        for key, mask in self.selector.select(seconds):
            key.data(mask)
        self.observers.close_expired()

    def answer(self) -> None:
        self.requests += 1
        if self.answers:
            status = NotResponding(float(self.requests), "x" * self.size)
            reports = [StatusReport(rank, self.requests, status) for rank in range(SIZE)]
            self.observers.answer([*reports, StatusComplete({"node0": "0-3"})])

    @property
    def connected(self) -> int:
        """The number of observers."""
        return len(self.observers._observers)

    def poll_until(self, condition: Callable[[], Any]) -> None:
        deadline = Deadline(SECONDS)
        while not condition():
            assert deadline.count_down() > 0
            self.poll()

    def serve(self, function: Callable[[], Any]) -> Any:
        """Run a function of an observer on another thread, while this host handles its events."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(function)
            self.poll_until(running.done)
            return running.result()

    def observer(self) -> JobObserver:
        found: JobObserver = self.serve(lambda: JobObserver(only()))
        return found


@pytest.fixture(name="host")
def _host() -> Iterator[Host]:
    host = Host()
    yield host
    host.observers.close()
    host.selector.close()


def only() -> ListedJob:
    (found,) = job_files.listed()
    return found


def test_an_observer_gets_the_status_each_time_that_it_asks(host: Host) -> None:
    with contextlib.closing(host.observer()) as observer:
        for number in (1, 2):
            status = host.serve(observer.ask)
            assert status.hosts == ["node0"] * SIZE
            assert status.statuses == [NotResponding(float(number), "x")] * SIZE


def test_only_this_user_can_read_the_files(host: Host, folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / f"{NAME}.json").stat().st_mode & 0o777 == 0o600
    assert only().is_running
    host.observers.close()
    assert list(folder.iterdir()) == []


def test_a_directory_that_others_can_open_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match=f"{folder} is not a directory that only user {os.getuid()} can open"):
        Host()
    assert observers.open_for(selectors.DefaultSelector(), job_files.new(NAME, SIZE, "train.py", 0.0), print) is None
    (folder / f"{NAME}.json").write_text("{}")
    assert job_files.listed() == []


def test_the_next_directory_is_used_if_the_first_cannot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folder.with_name("others")
    other.mkdir(mode=0o777)
    monkeypatch.setattr(job_files, "folders", lambda: [other, folder])
    path, listener = job_files.publish(job_files.new(NAME, SIZE, "train.py", 0.0))
    listener.close()
    assert path.parent == folder


def test_a_wrong_token_is_refused(host: Host) -> None:
    found = only()
    forged = dataclasses.replace(found, job=dataclasses.replace(found.job, token="00" * 16))
    with pytest.raises(ConnectionError, match=f"job {NAME} has ended, or refuses the token of "):
        host.serve(lambda: JobObserver(forged))
    assert (host.connected, host.requests) == (0, 0)


def test_a_rank_is_no_observer(host: Host) -> None:
    found = only()
    token = bytes.fromhex(found.job.token)
    with pytest.raises(ConnectionError):
        host.serve(lambda: connection.connect_over(found.connect(SECONDS), token, 0, SECONDS))


def test_one_observer_too_many_is_refused_until_another_ends(host: Host) -> None:
    first, *others = [host.observer() for _ in range(MAX_OBSERVERS)]
    late = host.observer()
    with pytest.raises(
        OSError, match=f"refuses the request: the job has {MAX_OBSERVERS} observers, which is the limit"
    ):
        host.serve(late.ask)
    first.close()
    host.poll_until(lambda: host.connected == MAX_OBSERVERS - 1)
    with contextlib.closing(host.observer()) as next_one:
        assert len(host.serve(next_one.ask).statuses) == SIZE
    for each in (late, *others):
        each.close()


def test_an_observer_that_vanishes_is_forgotten(host: Host) -> None:
    vanished, other = host.observer(), host.observer()
    host.answers = False
    vanished._connection.send(StatusRequest())
    host.poll_until(lambda: host.requests == 1)
    vanished.close()
    host.observers.answer([StatusComplete({})])  # to a socket that is closed at the other end
    host.poll_until(lambda: host.connected == 1)
    host.answers = True
    assert len(host.serve(other.ask).statuses) == SIZE
    other.close()


def test_an_observer_that_does_not_read_is_dropped_at_its_next_request(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers, "IDLE_SECONDS", 2 * SECONDS)  # not dropped because it is idle
    host.size = LARGE
    silent, other = host.observer(), host.observer()
    silent._connection.send(StatusRequest())
    host.poll_until(lambda: host.requests == 1)
    start = time.monotonic()
    assert len(host.serve(other.ask).statuses) == SIZE  # nobody waits for the silent one
    assert time.monotonic() - start < SECONDS / 2
    assert host.connected == 2
    silent._connection.send(StatusRequest())
    host.poll_until(lambda: host.connected == 1)
    silent.close()
    other.close()


def test_a_second_request_before_the_answer_ends_the_connection(host: Host) -> None:
    host.answers = False
    with contextlib.closing(host.observer()) as hasty:
        for _ in range(2):
            hasty._connection.send(StatusRequest())
        host.poll_until(lambda: not host.connected)
    assert host.requests <= 1


@pytest.mark.parametrize("text", [b"\0\0\0\2{}", b"\x7f\0\0\0", b"\0\0\0\4nope"], ids=["unknown", "long", "no JSON"])
def test_another_message_ends_the_connection(host: Host, text: bytes) -> None:
    with contextlib.closing(host.observer()) as odd:
        odd._connection.socket.send(text)
        host.poll_until(lambda: not host.connected)
    assert host.requests == 0


def test_an_idle_observer_is_dropped(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "IDLE_SECONDS", 0.0)
    with contextlib.closing(host.observer()) as idle:
        host.poll_until(lambda: not host.connected)
        with pytest.raises(ConnectionError, match=f"job {NAME} has ended"):
            host.serve(idle.ask)


def test_a_refusal_is_an_error_of_the_observer(host: Host) -> None:
    host.answers = False
    with contextlib.closing(host.observer()) as observer, concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(observer.ask)
        host.poll_until(lambda: host.requests)
        host.observers.answer([StatusRefused("the job is being aborted")])
        with pytest.raises(OSError, match="the job is being aborted"):
            asking.result(SECONDS)


def test_a_job_that_does_not_answer_is_an_error(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpicomm.cli.job_observer._CONNECT_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match=f"job {NAME} has not answered for 0 s: process {os.getpid()} "):
        JobObserver(only())  # the host does not handle its events


def test_a_job_that_was_killed_is_recognised_and_its_files_are_removed(folder: Path) -> None:
    for name in ("1", "2"):
        _, listener = job_files.publish(job_files.new(name, SIZE, "train.py", 0.0))
        listener.close()  # as the kernel does at SIGKILL
        assert [(each.job.name, each.is_running) for each in job_files.listed()] == [
            (name, False)
        ]  # without older ones
    job_files.listed()[0].remove()
    assert list(folder.iterdir()) == []


def test_a_job_that_another_process_continues_keeps_its_file(host: Host) -> None:
    following = Host()  # after recover(), with the same name
    host.observers.close()
    assert only().job.token == following.observers._job.token
    assert only().is_running
    following.observers.close()


def test_a_forked_child_leaves_the_file_to_its_parent(host: Host) -> None:
    with contextlib.closing(host.observer()) as observer:
        if (pid := os.fork()) == 0:
            host.observers.close_after_fork()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(host.serve(observer.ask).statuses) == SIZE


def test_a_full_backlog_is_that_of_a_running_job() -> None:
    _, listener = job_files.publish(job_files.new(NAME, SIZE, "train.py", 0.0))
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        listener.listen(0)
        while True:
            sock = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
            sock.setblocking(False)
            try:
                sock.connect(str(only().path.with_suffix(".sock")))
            except BlockingIOError:
                break
        assert only().is_running
