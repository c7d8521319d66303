"""Binds a rank to its cores, then runs its program: `python -m mpicomm.rank_binding auto RANKS COMMAND...`.

`mpicomm run --bind` wraps the ranks so if their launcher cannot bind them that way. It is done before the program
starts: threads that exist keep their affinity, and torch counts the cores when it is imported. RANKS is the number of
ranks of a host, for launchers that do not pass it to the ranks; 0 if it is not known.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from mpicomm import host_info, mpi, rank_log
from mpicomm.devices import locality
from mpicomm.errors import LaunchError
from mpicomm.launch import binding, detect

_FAILED = 2  # the exit status of errors of the command line
_ABORT_SECONDS = 30


def main(arguments: Sequence[str]) -> int:
    """Bind this process and replace it by the program; return the exit status if that fails."""
    mode, ranks, *command = arguments
    launch, local_rank = None, None
    try:
        launch = detect.detect(os.environ)
        local_rank = launch.value("local_rank")
        _bind(mode, local_rank, launch.value("local_size") or int(ranks), os.environ)
    except (LaunchError, OSError) as error:
        if not local_rank:  # once for each host
            print(f"mpicomm run: {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
        if launch is not None and local_rank is not None and launch.kind == "mpi":  # not all hosts need to fail
            _end_job()
        return _FAILED
    return rank_log.become(command)


def _bind(mode: str, local_rank: int | None, local_size: int, environ: Mapping[str, str]) -> None:
    if local_rank is None or not local_size:
        raise LaunchError(
            "--bind needs the number of the rank on its host, which the launcher does not pass to the rank.\n"
            "Omit --bind, and bind the ranks by the launcher's own options."
        )
    processors = locality.processors(environ, os.sched_getaffinity(0))
    has_own_gpu = any(environ.get(name) for name in binding.OWN_GPU_VARIABLES)
    share = binding.share_of(mode, processors, local_rank, local_size, has_own_gpu=has_own_gpu)
    os.sched_setaffinity(0, binding.cpus(share))
    number = binding.threads(share, processors, local_size, host_info.cpu_quota())
    os.environ.setdefault("OMP_NUM_THREADS", str(number))


def _end_job() -> None:
    """End the ranks of other hosts, which would wait in MPI_Init; srun and PALS do not end them."""
    signal.alarm(_ABORT_SECONDS)  # MPI_Init waits for ranks that do not use MPI
    mpi.initialize().Abort(_FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
