"""Starts by hand, one command on each node: torchrun's agent, without MPI."""

from __future__ import annotations

from collections.abc import Mapping

from mpicomm.startcommand import environment
from mpicomm.startcommand.request import Machine, Node, Request, Start

_TAG = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]: "}


def start(request: Request, node: Node, machine: Machine, environ: Mapping[str, str]) -> Start:
    """Return the start of one node's ranks; the ranks of all nodes meet at the master's address."""
    ranks = request.ranks or machine.room
    options = [
        f"--nnodes={node.nodes}",
        f"--node-rank={node.rank}",
        f"--master-addr={node.master_addr}",
        f"--master-port={node.master_port}",
        f"--nproc-per-node={ranks}",
    ]
    if request.tag_output:
        options.append("--tee=3")
    child = environment.of_ranks(environ, threads=machine.cores // ranks)
    command = (machine.python, "-m", "torch.distributed.run", *options, "--no-python")
    return Start((*command, *request.of_rank(machine.python)), child | (_TAG if request.tag_output else {}))
