"""The delivery of SIGTERM to the watchdog, and of other signals to their previous receivers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpicomm.watchdog import agent, signals
from mpicomm.watchdog.agent import Watchdog, WatchdogSettings
from mpicomm.watchdog.channel import Channel, RankInfo
from tests.launching import run_alone
from tests.time_limits import wait_until

TERM = bytes([signal.SIGTERM])
USR1 = bytes([signal.SIGUSR1])


@pytest.fixture(autouse=True)
def untouched_signals(ear: Ear, other_ear: Ear) -> Iterator[None]:
    """Start with the signals of a new process, and restore the previous state before each `Ear` is closed."""
    wakeup = signal.set_wakeup_fd(-1)
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    signals.unwatch()
    signal.set_wakeup_fd(wakeup)
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Ear:
    """A wake-up descriptor, and the bytes that it receives."""

    def __init__(self) -> None:
        self.fd, self._received = socket.socketpair()
        for end in (self.fd, self._received):
            end.setblocking(False)

    def fileno(self) -> int:
        return self.fd.fileno()

    def received(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return self._received.recv(100)
        return b""

    def close(self) -> None:
        self.fd.close()
        self._received.close()


@pytest.fixture
def ear() -> Iterator[Ear]:
    with contextlib.closing(Ear()) as mine:
        yield mine


@pytest.fixture
def other_ear() -> Iterator[Ear]:
    with contextlib.closing(Ear()) as others:
        yield others


def wakeup_fd() -> int:
    current = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(current)
    return current


def ignore(number: int, frame: types.FrameType | None) -> None:
    pass


# -- watching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_previous", [True, False])
def test_unwatch_restores_the_previous_state(ear: Ear, other_ear: Ear, has_previous: bool) -> None:
    previous = other_ear.fileno() if has_previous else -1
    signal.set_wakeup_fd(previous)
    signals.watch(ear.fileno())
    assert wakeup_fd() not in (-1, previous)
    assert signal.getsignal(signal.SIGTERM) is signals._on_sigterm
    signals.unwatch()
    assert wakeup_fd() == previous
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signals.unwatch()  # a second call has no effect
    assert wakeup_fd() == previous


@pytest.mark.parametrize(("handler", "expected"), [(ignore, TERM), (signal.SIG_IGN, b"")])
def test_a_foreign_handler_is_not_changed(ear: Ear, handler: signal.Handlers, expected: bytes) -> None:
    signal.signal(signal.SIGTERM, handler)
    signals.watch(ear.fileno())
    assert signal.getsignal(signal.SIGTERM) is handler
    os.kill(os.getpid(), signal.SIGTERM)
    assert ear.received() == expected
    assert not signals.deliver(TERM)
    signals.unwatch()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_handler_that_was_installed_later_stays(ear: Ear) -> None:
    signals.watch(ear.fileno())
    signal.signal(signal.SIGTERM, ignore)
    assert not signals.deliver(TERM)
    signals.unwatch()
    assert signal.getsignal(signal.SIGTERM) is ignore


def test_a_wakeup_descriptor_that_was_set_later_stays(ear: Ear, other_ear: Ear) -> None:
    signal.signal(signal.SIGUSR1, ignore)
    signals.watch(ear.fileno())
    watched = signal.set_wakeup_fd(other_ear.fileno())
    os.kill(os.getpid(), signal.SIGTERM)
    assert (ear.received(), other_ear.received()) == (TERM, TERM)
    assert wakeup_fd() == other_ear.fileno()
    signals.unwatch()
    assert wakeup_fd() == other_ear.fileno()
    signal.set_wakeup_fd(watched)  # as the code that replaced the descriptor does at its end
    os.kill(os.getpid(), signal.SIGUSR1)
    assert ear.received() == b""


def test_other_threads_do_not_touch_signals(ear: Ear) -> None:
    thread = threading.Thread(target=signals.watch, args=(ear.fileno(),))
    thread.start()
    thread.join()
    assert (wakeup_fd(), signal.getsignal(signal.SIGTERM)) == (-1, signal.SIG_DFL)


@contextlib.contextmanager
def opened_as(number: int, path: Path) -> Iterator[None]:
    """Open a file with a descriptor, as the next file gets it unless a lower one is free."""
    with path.open("wb") as file:
        os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            if file.fileno() != number:
                os.close(number)


@pytest.mark.parametrize("has_previous", [True, False])
def test_after_unwatch_on_another_thread_no_file_gets_signals(
    ear: Ear, other_ear: Ear, tmp_path: Path, has_previous: bool
) -> None:
    signal.set_wakeup_fd(other_ear.fileno() if has_previous else -1)
    signal.signal(signal.SIGUSR1, ignore)
    watched = Ear()
    number = watched.fileno()
    signals.watch(number)
    unwatch_on_another_thread()
    watched.close()
    with opened_as(number, tmp_path / "weights"):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (tmp_path / "weights").read_bytes() == b""
    assert other_ear.received() == (USR1 if has_previous else b"")
    signals.watch(ear.fileno())
    os.kill(os.getpid(), signal.SIGUSR1)
    assert ear.received() == USR1
    assert other_ear.received() == b""
    signals.unwatch()
    assert wakeup_fd() == (other_ear.fileno() if has_previous else -1)


def test_unwatch_on_another_thread_keeps_one_descriptor(ear: Ear) -> None:
    counts = []
    for _ in range(3):
        signals.watch(ear.fileno())
        unwatch_on_another_thread()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert len(set(counts)) == 1


def unwatch_on_another_thread() -> None:
    thread = threading.Thread(target=signals.unwatch)
    thread.start()
    thread.join()


def test_a_full_descriptor_does_not_block(ear: Ear) -> None:
    signals.watch(ear.fileno())
    with contextlib.suppress(BlockingIOError):
        while True:
            ear.fd.send(bytes(1 << 16))
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_former_descriptor_may_be_closed(ear: Ear) -> None:
    former = Ear()
    signal.set_wakeup_fd(former.fileno())
    signals.watch(ear.fileno())
    former.close()
    signals.unwatch()
    assert (wakeup_fd(), signal.getsignal(signal.SIGTERM)) == (-1, signal.SIG_DFL)


def test_the_former_descriptor_may_be_reused_for_another_file(ear: Ear) -> None:
    former = Ear()
    number = former.fileno()
    signal.set_wakeup_fd(number)
    signals.watch(ear.fileno())
    former.close()
    with opened_as(number, Path(os.devnull)):
        os.set_blocking(number, False)  # required of a wake-up descriptor
        signals.unwatch()
        assert wakeup_fd() == -1


def test_a_process_that_unwatched_on_another_thread_still_ends_by_sigterm() -> None:
    outcome = run_alone(
        "import os, signal, socket, threading, time\n"
        "from mpicomm.watchdog import signals\n"
        "end, _ = socket.socketpair()\n"
        "end.setblocking(False)\n"
        "signals.watch(end.fileno())\n"
        "thread = threading.Thread(target=signals.unwatch)\n"
        "thread.start()\nthread.join()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(3600)"
    )
    assert outcome.status == -signal.SIGTERM


# -- forwarding ------------------------------------------------------------------------------------------------------


def test_the_previous_watcher_receives_all_signals(ear: Ear, other_ear: Ear) -> None:
    signal.set_wakeup_fd(other_ear.fileno())
    signal.signal(signal.SIGUSR1, ignore)
    signals.watch(ear.fileno())
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    numbers = ear.received()
    assert sorted(numbers) == sorted(USR1 + TERM)
    signals.deliver(b"\0" + numbers + b"\0\0")
    assert sorted(other_ear.received()) == sorted(USR1 + TERM)


@pytest.mark.parametrize("numbers", [b"", b"\0", b"\0\0\0", USR1, USR1 + b"\0"])
def test_other_signals_do_not_end_the_process(ear: Ear, numbers: bytes) -> None:
    signals.watch(ear.fileno())
    assert not signals.deliver(numbers)


def test_a_process_without_a_handler_ends_by_sigterm(ear: Ear) -> None:
    signals.watch(ear.fileno())
    assert signals.deliver(TERM)
    assert signals.deliver(b"\0" + USR1 + TERM)


@pytest.mark.parametrize("thread", [True, False])
def test_a_process_is_ended_as_sigterm_does(thread: bool) -> None:
    call = "threading.Thread(target=signals.end_by_sigterm).start()" if thread else "signals.end_by_sigterm()"
    outcome = run_alone(
        "import signal, threading, time\n"
        "from mpicomm.watchdog import signals\n"
        f"signal.signal(signal.SIGTERM, lambda *_: None)\n{call}\ntime.sleep(3600)"
    )
    assert outcome.status == -signal.SIGTERM


# -- forked children -------------------------------------------------------------------------------------------------


def status_of_a_child_that_gets_sigterm() -> int:
    """Fork a child that sends SIGTERM to itself, and return its exit code."""
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_signals_of_a_forked_child_reach_the_parent_unless_its_watchdog_stops(ear: Ear) -> None:
    signals.watch(ear.fileno())
    assert status_of_a_child_that_gets_sigterm() == 77
    # torch has a handler for SIGCHLD once a DataLoader has had workers.
    assert ear.received().replace(bytes([signal.SIGCHLD]), b"") == TERM


@pytest.mark.parametrize("forks_on_a_thread", [True, False])
def test_a_forked_childs_signals_do_not_reach_the_parent(
    forks_on_a_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bytes] = []
    monkeypatch.setattr(
        signals, "deliver", lambda numbers: calls.append(numbers) if signal.SIGTERM in numbers else None
    )
    watch = Watchdog(
        RankInfo(0, ["a"], [0], [0]), Channel(0, bytes(32)), WatchdogSettings(600, None), os._exit, lambda: True
    )
    watch.start()
    agent.set_current(watch)
    try:
        statuses: list[int] = []
        if forks_on_a_thread:
            thread = threading.Thread(target=lambda: statuses.append(status_of_a_child_that_gets_sigterm()))
            thread.start()
            thread.join()
        else:
            statuses.append(status_of_a_child_that_gets_sigterm())
        assert statuses == [-signal.SIGTERM]
        watch._thread.join(0.3)
        assert calls == []
        os.kill(os.getpid(), signal.SIGTERM)  # a signal of the parent's own reaches it
        wait_until(lambda: calls, "the signal is delivered")
        assert len(calls) == 1
    finally:
        watch.stop()
        agent.set_current(None)
