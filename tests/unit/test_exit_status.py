"""The end of a process: the status that its rank reports to the other ranks, and the exceptions that abort the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import ROOT, run_alone

WATCH = """
import atexit, contextlib, pickle, sys, threading
from mpicomm.watchdog import exit_hooks
exit_hooks.watch_exits(lambda _status: None)
atexit.register(lambda: print("status", exit_hooks.exit_status(), flush=True))
def leave(status=None):
    try:
        sys.exit(status)
    finally:
        sys.stdout.flush()
"""

CAUGHT = """
try:
    leave(3)
except SystemExit as error:
    kept = error
assert (kept.code, kept.args, type(kept).__name__) == (3, (3,), "SystemExit")
assert type(pickle.loads(pickle.dumps(kept))) is SystemExit
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("leave(3)", 3),
        ("leave()", 0),
        ("leave('out of data')", 1),
        (CAUGHT, None),
        (f"{CAUGHT}leave(4)", 4),
        ("with contextlib.suppress(SystemExit): leave(3)", None),
        ("thread = threading.Thread(target=leave, args=(3,)); thread.start(); thread.join()", None),
        ("1 / 0", 1),
    ],
)
def test_the_status_is_that_of_the_process(ending: str, status: int | None) -> None:
    outcome = run_alone(WATCH + ending)
    assert outcome.stdout == f"status {status}\n", outcome
    assert outcome.status == (status or 0), outcome
    assert "Exit" not in outcome.stderr, outcome


def test_an_exit_on_its_way_counts() -> None:
    program = "try:\n    leave(3)\nfinally:\n    print('here', exit_hooks.exit_status())"
    outcome = run_alone(WATCH + program)
    assert outcome.stdout == "here 3\nstatus 3\n", outcome


PROMPT = """
import code, os
def type_in(*lines):
    left = iter(lines)
    def read(_prompt):
        for line in left:
            return line
        raise EOFError
    code.interact(banner="", readfunc=read, exitmsg="")
exit_hooks.arm(0, 2, "here", lambda _status: print("aborts", flush=True))
"""

HOOK_ON_TOP = """
def report(*error, below=sys.excepthook):
    print("mine")
    below(*error)
sys.excepthook = report
1 / 0
"""


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("type_in('undefined', '(')", "status None"),
        ("type_in('undefined'); leave(3)", "status 3"),
        ("type_in('undefined'); 1 / 0", "aborts, status 1"),
        (
            "thread = threading.Thread(target=type_in, args=('undefined',)); thread.start(); thread.join()",
            "status None",
        ),
        ("thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()", "aborts, status None"),
        (HOOK_ON_TOP, "mine, aborts, status 1"),
    ],
)
@pytest.mark.parametrize("as_module", [False, True])
def test_an_error_at_a_prompt_ends_nothing(program: str, shown: str, as_module: bool, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WATCH + PROMPT + program)
    start = ["-m", "program"] if as_module else [str(tmp_path / "program.py")]
    outcome = run_alone(start, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert outcome.stdout.splitlines() == shown.split(", "), outcome
    assert outcome.stderr.count("NameError: name 'undefined' is not defined") == program.count("'undefined'"), outcome


@pytest.mark.parametrize("rank", [1, 9])
@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no PMI.\nUse the launcher of this MPI:\n  mpirun -n 10 python a.py", "Start with: mpirun -n 10 python a.py"),
        ("no PMI.\nUnset PMI_RANK.", "Unset PMI_RANK."),
        ("no PMI.", ""),
    ],
    ids=["command", "next step", "problem alone"],
)
def test_a_launch_error_of_another_rank_than_0_is_one_line(rank: int, message: str, line: str) -> None:
    """The launcher may write the output of rank 0 to another file, and only this rank may have the error."""
    program = f"""
from mpicomm import LaunchError
exit_hooks._LATER_FAILURE_WAIT, exit_hooks._OTHER_RANKS_WAIT = 0, 0.1
exit_hooks.arm({rank}, 10, "n1", abort=print)
raise LaunchError({message!r})
"""
    outcome = run_alone(WATCH + program)
    assert outcome.stderr == f"[mpicomm] rank {rank}: LaunchError: {f'no PMI. {line}'.strip()}\n", outcome
