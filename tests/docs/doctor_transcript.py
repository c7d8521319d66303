"""The output of `mpicomm doctor` on a machine with three planted faults, for the documents.

`python -m tests.docs.doctor_transcript` writes docs/results/doctor.txt; then `python -m tests.docs.figures` writes the
text in docs/tools.md. The planted faults: the launchers of the other MPI are first in PATH, OMP_NUM_THREADS is larger
than the number of cores, and a process may open 64 files only.
"""

from __future__ import annotations

import re
import socket
import sys

from tests.launching import OTHER_MPI_ENV, ROOT, Outcome, run_command

TRANSCRIPT = ROOT / "docs" / "results" / "doctor.txt"
FAULTS = ("mpiexec", "open files", "threads")
"""The checks that must find a problem."""

_HOST, _HOME = "host", "~/mpicomm"  # in place of the name of this machine and the path of this checkout


def commands() -> list[str]:
    """Return the commands that plant the faults, and the examination."""
    assert OTHER_MPI_ENV is not None
    other = ROOT / OTHER_MPI_ENV / "bin"
    return ["ulimit -n 64", f"export OMP_NUM_THREADS=64 PATH={other}:$PATH", "mpicomm doctor"]


def run() -> Outcome:
    """Run the commands in a shell."""
    lines = [*commands()[:-1], f"{sys.executable} -m {commands()[-1]}"]  # PATH has another mpicomm first
    return run_command(["bash", "-c", "\n".join(lines)])


def transcript(outcome: Outcome) -> str:
    """Return the commands and their output, with other names for this machine and this checkout."""
    shown = "".join(f"$ {line}\n" for line in commands()) + outcome.stdout + f"$ echo $?\n{outcome.status}\n"
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", _HOST, shown.replace(str(ROOT), _HOME))


if __name__ == "__main__":
    TRANSCRIPT.write_text(transcript(run()))
