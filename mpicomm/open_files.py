"""Raises the limit of open files (RLIMIT_NOFILE) for the connections of a job; each connection is one open file.

Rank 0 holds one connection of every rank to the job's store. As a hub of the out-of-band channel it also holds one
connection of each rank on its own node, and of one rank on every other node.
"""

from __future__ import annotations

import resource
import socket
from pathlib import Path

from mpicomm.errors import LaunchError
from mpicomm.topology import Topology

_SPARE = 256  # descriptors reserved for MPI and the program, if the hard limit allows
_LEAST_SPARE = 32  # the minimum: descriptors of the store itself and of MPI


def allow(connections: int) -> int:
    """Raise the soft limit of this process for so many connections plus a reserve, up to the hard limit.

    Returns:
        The number of further files that this process may open.
    """
    used = count_open()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = used + connections + _SPARE
    if _is_less(soft, wanted):
        soft = min(wanted, hard) if _is_less(hard, wanted) else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections + _SPARE if soft == resource.RLIM_INFINITY else soft - used


def count_open() -> int:
    """Return the number of files that this process has opened."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def ranks_on_one_node(files: int) -> int:
    """Return the largest job on one node whose rank 0 may open so many further files."""
    left = files - _LEAST_SPARE - 1  # with one node, `require_on_rank_0` needs two connections for each rank, and one
    return max(0, left // 2)


def require_on_rank_0(topology: Topology) -> None:
    """Raise rank 0's limit for the connections of a job.

    Raises:
        LaunchError: If the hard limit is too low; the message gives the number of ranks that fit.
    """
    size = topology.size
    needed = size + topology.local_size + topology.num_nodes
    # When the job fails, every rank may open one more connection, to find out whether it failed first.
    left = max(0, allow(needed + size) - _LEAST_SPARE)
    if left < needed:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise LaunchError(
            f"{size} ranks need {needed} connections to rank 0 on {socket.gethostname()}, which may open {left} more "
            f"files: its hard limit is {hard}.\n"
            f"With this number of ranks per node, {left * size // needed} ranks fit. Start fewer, or "
            f"raise the hard limit (`ulimit -Hn` shows it; LimitNOFILE of the daemon that starts the ranks)."
        )


def _is_less(limit: int, number: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < number
