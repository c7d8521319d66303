"""The limit of open files (RLIMIT_NOFILE), of which each connection takes one.

Rank 0 holds a connection of every rank to the job's store, and one of each rank that it is the hub of in the side
channel: of those on its own node, and of one on every other node.
"""

from __future__ import annotations

import resource
import socket
from pathlib import Path

from mpicomm.errors import LaunchError
from mpicomm.startup.topology import Topology

_SPARE = 256  # descriptors that are left to MPI and the program, where the hard limit allows
_LEAST_SPARE = 32  # the store's own, and what MPI opens in any case


def allow(connections: int) -> int:
    """Raise the soft limit of this process, as far as the hard limit allows, for so many connections and some more.

    Returns:
        How many more files this process may open now.
    """
    used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = used + connections + _SPARE
    if _is_less(soft, wanted):
        soft = min(wanted, hard) if _is_less(hard, wanted) else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections + _SPARE if soft == resource.RLIM_INFINITY else soft - used


def require_on_rank_0(size: int, where: Topology) -> None:
    """Raise rank 0's limit for the connections of a job.

    Raises:
        LaunchError: If the hard limit is too low for them; it says how many ranks fit.
    """
    needed = size + where.local_size + where.num_nodes
    # Every rank may connect once more when the job fails, to ask whether it is the first.
    left = max(0, allow(needed + size) - _LEAST_SPARE)
    if left < needed:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise LaunchError(
            f"{size} ranks need {needed} connections to rank 0 on {socket.gethostname()}, which may open {left} more "
            f"files: its hard limit is {hard}.\n"
            f"{left * size // needed} ranks fit with as many on each node. Start fewer, or raise the hard limit "
            f"(`ulimit -Hn` shows it; LimitNOFILE of the daemon that starts the ranks)."
        )


def _is_less(limit: int, number: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < number
