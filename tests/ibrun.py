"""A stand-in for ibrun, the launcher of TACC, as its user guide of Stampede3 describes it."""

from __future__ import annotations

from pathlib import Path

_TEXT = """#!/bin/sh
# [-n TASKS -o OFFSET] PROGRAM; without options all tasks of the job.
tasks=$SLURM_NTASKS
case $1 in
    -n) [ "$3 $4" = "-o 0" ] || exit 64; tasks=$2; shift 4 ;;
    -*) exit 64 ;;
esac
echo "TACC:  Starting up job $SLURM_JOB_ID"
exec {mpiexec} -n "$tasks" "$@"
"""


def install(directory: Path, mpiexec: str) -> None:
    """Install it in a directory of PATH.

    Args:
        mpiexec: The launcher that takes its place, with the option -n.
    """
    launcher = directory / "ibrun"
    launcher.write_text(_TEXT.replace("{mpiexec}", mpiexec))
    launcher.chmod(0o755)
