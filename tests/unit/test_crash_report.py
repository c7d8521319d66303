"""The signal that ends a process, and its last line of Python, reach the ranks that are connected to it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import select
import signal
import socket
import sys
from collections.abc import Callable

import pytest

from mpicomm.native import c_library
from mpicomm.recorder.status import Crash
from mpicomm.watchdog import signals
from mpicomm.watchdog.connection import Connection
from tests.time_limits import scaled

pytestmark = pytest.mark.skipif(c_library.load() is None, reason="the C library was not built")


def read_address_0() -> None:
    ctypes.string_at(0)


def crash(
    code: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
    *,
    is_forked: bool = False,
    is_output_blocked: bool = False,
) -> tuple[int, list[object], str]:
    """Run code in a forked process that reports its crash.

    Returns:
        How the process ended, as waitpid returns it; the messages that it has sent; its output on stderr.
    """
    ours, theirs = socket.socketpair()
    out, stderr = os.pipe()
    if (pid := os.fork()) == 0:
        os.dup2(stderr, 2)
        os.close(stderr)
        sys.__stderr__ = os.fdopen(2, "w", closefd=False)
        faulthandler.disable()  # pytest's
        prepare()
        signals.catch_crashes()
        Connection(theirs).report_crashes()
        if is_forked and (child := os.fork()):
            os.waitpid(child, 0)
            os._exit(0)
        code()
        os._exit(4)
    for fd in (stderr, theirs.detach()):
        os.close(fd)
    if is_output_blocked:
        select.select([ours], [], [], scaled(20))
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    receiver = Connection(ours)
    receiver.is_trusted = True
    messages: list[object] = []
    lost = ""
    while not lost:
        arrived, lost = receiver.receive()
        messages += arrived
    receiver.close()
    assert lost == "closed"
    with os.fdopen(out) as text:
        return status, messages, text.read()


@pytest.mark.parametrize(
    ("code", "number"),
    [
        (read_address_0, signal.SIGSEGV),
        (os.abort, signal.SIGABRT),
        *(
            (functools.partial(signal.raise_signal, number), number)
            for number in (signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
        ),
    ],
)
def test_a_signal_and_the_last_line_of_python_are_reported(code: Callable[[], object], number: signal.Signals) -> None:
    status, messages, stderr = crash(code)
    assert os.WTERMSIG(status) == number
    (message,) = messages
    assert isinstance(message, Crash)
    assert message.signal == number.name
    assert message.line.startswith('File "')
    assert message.line in stderr
    assert stderr.startswith("Fatal Python error: ")
    assert stderr.count("Current thread ") == stderr.count("test_a_signal_and_the_last_line") == 1


def test_the_line_is_escaped() -> None:
    code = compile("raise_signal(11)", 'a "b" \\ \x07 é.py', "exec")
    _, messages, _ = crash(lambda: exec(code, {"raise_signal": signal.raise_signal}))
    assert messages == [Crash("SIGSEGV", r'File "a "b" \ \x07 \xe9.py", line 1 in <module>')]


def fill_stderr() -> None:
    os.set_blocking(2, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(2, b"x")
    os.set_blocking(2, True)


def test_a_crash_is_reported_before_its_stacks_are_printed() -> None:
    status, messages, _ = crash(read_address_0, fill_stderr, is_output_blocked=True)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [type(message) for message in messages] == [Crash]


def test_a_report_is_not_sent_between_the_parts_of_another_message() -> None:
    ours, theirs = socket.socketpair()
    with contextlib.closing(Connection(theirs)) as sender, contextlib.closing(Connection(ours)) as receiver:
        receiver.is_trusted = True
        sender.report_crashes()
        message = Crash("SIGSEGV", "x" * 900_000)
        sender.send(message)
        assert sender.has_outgoing
        assert receiver.receive() == ([], "")  # the socket accepts more now
        crash(read_address_0)
        received: list[object] = []
        while not received:
            sender.flush()
            messages, lost = receiver.receive()
            assert lost == ""
            received += messages
        sender.unwatch()
    assert received == [message]


def test_a_faulthandler_of_the_program_is_left_alone() -> None:
    status, messages, stderr = crash(read_address_0, lambda: faulthandler.enable(2))
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert messages == [Crash("SIGSEGV", "")]
    assert stderr.startswith("Fatal Python error: ")
    assert stderr.count("Current thread ") == 1


def test_a_handler_of_the_program_is_left_alone() -> None:
    status, messages, _ = crash(
        lambda: signal.raise_signal(signal.SIGILL), lambda: signal.signal(signal.SIGILL, lambda *_: os._exit(3))
    )
    assert (os.waitstatus_to_exitcode(status), messages) == (3, [])


def test_a_crash_of_a_forked_child_is_only_printed() -> None:
    status, messages, stderr = crash(read_address_0, is_forked=True)
    assert (status, messages) == (0, [])
    assert stderr.startswith("Fatal Python error: Segmentation fault")


def test_a_lost_connection_gets_no_message() -> None:
    """Its descriptor may belong to a file of the program by then."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(Connection(theirs)) as lost, contextlib.closing(Connection(ours)) as receiver:
        lost.report_crashes()
        lost.unwatch()
        _, messages, _ = crash(read_address_0)
        assert messages
        assert receiver.receive() == ([], "")
