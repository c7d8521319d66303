"""Becomes one rank of the stand-in for PALS: `rank.py RANKS_PER_NODE BINDING DEPTH PROGRAM...`, started by hydra."""

from __future__ import annotations

import os
import sys

_OF_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "STAND_IN_HYDRA", "STAND_IN_PMI")  # PALS does not set them


def main() -> None:
    per_node, kind, depth, program = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    node, local_rank = divmod(rank, per_node)
    local_size = min(per_node, size - per_node * node)
    environ = {name: value for name, value in os.environ.items() if name not in _OF_HYDRA}
    environ |= {
        "PALS_APID": "00000000-0000-4000-8000-000000000000",
        "PALS_APINFO": "/var/run/palsd/apinfo",
        "PALS_SPOOL_DIR": "/var/run/palsd",
        "PALS_RANKID": str(rank),
        "PALS_NODEID": str(node),
        "PALS_LOCAL_RANKID": str(local_rank),
        "PALS_LOCAL_SIZE": str(local_size),
        "PMI_LOCAL_RANK": str(local_rank),
        "PMI_LOCAL_SIZE": str(local_size),
        "PMI_UNIVERSE_SIZE": str(size),
    }
    if os.environ["STAND_IN_PMI"] != "cray":  # a wire-up that this MPI does not have: it would be a world of size 1
        environ = {name: value for name, value in environ.items() if not name.startswith("PMI_")}
    if kind in ("depth", "thread"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[(local_rank * depth + cpu) % len(cpus)] for cpu in range(depth)})
    os.execvpe(program[0], program, environ)


if __name__ == "__main__":
    main()
