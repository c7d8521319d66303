"""The filter of the messages that launchers print about a failed rank, on their recorded output."""

from __future__ import annotations

import pytest

from mpicomm.launch import failure_messages
from mpicomm.launch.failure_messages import FailureMessageFilter, FailureMessages

DASHES = "-" * 74
# Of Open MPI 5.0.11: a rank calls MPI_Abort, is killed by SIGKILL, or exits with status 3.
ABORT = f"""\
{DASHES}
MPI_ABORT was invoked on rank 1 in communicator MPI COMM 3 DUP FROM 0
  Proc: [[44599,1],1]
  Errorcode: 1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
{DASHES}
""".encode()
AFTER_ABORT = f"""\
{DASHES}
prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{DASHES}
""".encode()
KILLED = f"""\
{DASHES}
prterun noticed that process rank 1 with PID 13964 on node vm exited on
signal 9 (Killed).
{DASHES}
""".encode()
STATUS = f"""\
{DASHES}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-2281@1,0]
   Exit code:    3
{DASHES}
""".encode()
OPEN_MPI = [ABORT, AFTER_ABORT, KILLED, STATUS]
# Of MPICH 5.0.2: a rank is killed by SIGKILL.
BAD_TERMINATION = b"""
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 14009 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
"""
EXIT_STRING = b"""\
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
MPICH = [BAD_TERMINATION, EXIT_STRING]

CASES = [
    *[pytest.param(failure_messages.OPEN_MPI, text, id=f"Open MPI {n}") for n, text in enumerate(OPEN_MPI)],
    *[pytest.param(failure_messages.MPICH, text, id=f"MPICH {n}") for n, text in enumerate(MPICH)],
]


@pytest.mark.parametrize(("messages", "text"), CASES)
def test_a_message_is_held_back_wherever_the_reads_divide_it(messages: FailureMessages, text: bytes) -> None:
    before, after = b"loss 0.5 ------", b"a last line\n"
    stream = before + text + after
    for end in range(len(stream) + 1):
        shown = FailureMessageFilter(messages)
        printed = shown.add(stream[:end]) + shown.add(stream[end:])
        assert printed + shown.release(also_held=False) == before + after
        assert shown.release(also_held=True) == text, "it is printed if mpicomm run does not report the failure"


@pytest.mark.parametrize(("messages", "text"), CASES)
def test_similar_lines_of_a_program_are_printed(messages: FailureMessages, text: bytes) -> None:
    lines = text.splitlines(keepends=True)
    for removed in range(len(lines)):
        similar = b"".join(lines[:removed] + lines[removed + 1 :])
        if removed == 0 and lines[0] == b"\n":
            continue  # of MPICH's message, without the newline that ends a program's last line
        shown = FailureMessageFilter(messages)
        assert shown.add(similar + b"x" * 3000) + shown.release(also_held=True) == similar + b"x" * 3000
        assert not shown.is_undecided


def test_only_the_last_message_of_a_kind_is_that_of_the_launcher() -> None:
    shown = FailureMessageFilter(failure_messages.OPEN_MPI)
    of_a_program = KILLED.replace(b"rank 1", b"rank 7")
    assert shown.add(of_a_program) == b""
    assert shown.add(b"the program continues\n" + ABORT) == b"the program continues\n"
    assert shown.add(KILLED) == of_a_program
    assert shown.held == ABORT + KILLED


def test_the_nul_byte_after_a_message_is_removed() -> None:
    shown = FailureMessageFilter(failure_messages.OPEN_MPI)
    assert shown.add(ABORT + AFTER_ABORT) + shown.add(b"\0") == b""
    assert shown.add(b"a\0b") == b"a\0b", "that of a program is printed"
    assert shown.release(also_held=True) == ABORT + AFTER_ABORT
