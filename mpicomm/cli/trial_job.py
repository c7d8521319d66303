"""A job of two ranks, started as `mpicomm run` starts it, which shows whether launcher and MPI library fit.

As a program, it is a rank of this job: it initialises MPI, without torch, and rank 0 prints a line of JSON.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping

from mpicomm import mpi
from mpicomm.doctor.launcher_check import TrialJob
from mpicomm.launch.request import Request

_RANKS = 2
_INIT_SECONDS = 60.0  # as long as the job may take
_MARK = "mpicomm-trial-job: "


def run(environ: Mapping[str, str]) -> TrialJob:
    """Run the job, and return its result.

    Raises:
        LaunchError: If the ranks cannot be started.
        MPINotFoundError: If there is no MPI library.
    """
    from mpicomm.cli import launching

    start = launching.build(Request((sys.executable, "-m", "mpicomm.cli.trial_job"), _RANKS), environ)
    command = shlex.join(start.command)
    status, output = launching.run_briefly(start)
    if status is None:
        return TrialJob(command, None, 0)
    line = next((line.partition(_MARK)[2] for line in output.splitlines() if _MARK in line), "{}")
    reported = json.loads(line)
    return TrialJob(command, status, reported.get("size", 0), reported.get("has_threads", False), output)


def _be_rank() -> None:
    world = mpi.initialize(_RANKS, _INIT_SECONDS)
    if world.rank == 0:
        print(_MARK + json.dumps({"size": world.size, "has_threads": mpi.has_thread_multiple()}), flush=True)
    world.Barrier()


if __name__ == "__main__":
    _be_rank()
