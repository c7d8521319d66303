"""Colours and width of the ranks' output: those of the terminal to which the launcher writes, if any."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launching import run_command

COLUMNS = 123
PROGRAM = """
import os, sys
from mpicomm import terminal
shown = terminal.columns(sys.stdout), terminal.columns(sys.stderr), terminal.columns(open(os.devnull, "w"))
terminal.console(width=1000).print(f"[bold]columns[/] {shown}", highlight=False)
"""
# Runs a command with a terminal as its standard output.
ON_A_TERMINAL = f"""
import fcntl, os, pty, struct, subprocess, sys, termios
ours, theirs = pty.openpty()
fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, {COLUMNS}, 0, 0))
job = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=theirs)
os.close(theirs)
while True:
    try:
        os.write(1, os.read(ours, 1 << 16))
    except OSError:  # all have closed it
        sys.exit(job.wait())
"""
MPIRUN = [str(Path(sys.executable).parent / "mpiexec"), "-n", "1"]
PYTHON = [sys.executable, "-c", PROGRAM]
BOLD, PLAIN = "\x1b[1mcolumns\x1b[0m", "columns"


def printed(command: list[str], *, on_a_terminal: bool, env: Mapping[str, str] | None = None) -> str:
    where = [sys.executable, "-c", ON_A_TERMINAL] if on_a_terminal else []
    outcome = run_command([*where, *command], env={"TERM": "xterm", **(env or {})})
    assert outcome.status == 0, outcome
    return outcome.stdout.strip()


@pytest.mark.each_mpi
@pytest.mark.parametrize("launcher", [[], MPIRUN], ids=["alone", "a rank"])
def test_output_is_coloured_and_folded_on_a_terminal_alone(launcher: list[str]) -> None:
    command = [*launcher, *PYTHON]
    assert printed(command, on_a_terminal=False) == f"{PLAIN} (None, None, None)"
    assert printed(command, on_a_terminal=True) == f"{BOLD} ({COLUMNS}, None, None)"
    assert printed(command, on_a_terminal=True, env={"NO_COLOR": "1"}).startswith(f"{PLAIN} ({COLUMNS}")


def test_a_rank_that_writes_to_a_file_is_on_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = [*MPIRUN, "sh", "-c", 'exec "$@" > file', "sh", *PYTHON]
    assert printed(command, on_a_terminal=True) == ""
    assert Path("file").read_text() == f"{PLAIN} (None, None, None)\n"


def test_a_log_has_no_colours(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mpicomm.rank_log", str(tmp_path), "all", *PYTHON]
    assert PLAIN in printed([*MPIRUN, *command], on_a_terminal=True)
    assert (tmp_path / "rank_000.log").read_text() == f"{PLAIN} ({COLUMNS}, None, None)\n"
