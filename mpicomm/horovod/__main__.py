"""`python -m mpicomm.horovod SCRIPT.py [ARGUMENT ...]`: runs a script that imports Horovod, unchanged."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from mpicomm.horovod import alias
from mpicomm.launch import detect

_USAGE = """\
usage: python -m mpicomm.horovod SCRIPT.py|-m MODULE [ARGUMENT ...]

Run a program that imports horovod.torch, with mpicomm.horovod in its place. Start the ranks with
  mpicomm run --horovod -n 4 SCRIPT.py
or with any MPI launcher: mpirun -n 4 python -m mpicomm.horovod SCRIPT.py"""


def main(arguments: list[str]) -> int:
    """Run the program as `__main__`, with its own arguments and its own entry of `sys.path`."""
    is_module = arguments[:1] == ["-m"]
    program = arguments[1:] if is_module else arguments
    if not program or program[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 0 if program[:1] in (["-h"], ["--help"]) else 2
    if not is_module:  # Python has put the working directory there
        sys.path[0] = str(Path(program[0]).resolve().parent)
    note = alias.install()
    if note is not None and detect.guess_rank(os.environ) == 0:
        print(f"[mpicomm] {note}", file=sys.stderr)
    sys.argv[:] = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
