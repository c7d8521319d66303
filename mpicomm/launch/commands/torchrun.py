"""Launch commands for torchrun's agent, without MPI: by hand, with one command on each node, or by srun."""

from __future__ import annotations

from collections.abc import Mapping

from mpicomm.errors import LaunchError
from mpicomm.launch import environment
from mpicomm.launch.allocation import Slurm
from mpicomm.launch.request import Machine, Node, Request, Start

_TAG = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]: "}


# Slurm sets the rank of each agent's node. The rendezvous is on the first node of the step.
_AGENT = (
    'PET_NODE_RANK=$SLURM_NODEID PET_MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1) '
    'exec "$@"'
)


def start(request: Request, node: Node, machine: Machine, environ: Mapping[str, str]) -> Start:
    """Return the launch of the ranks of one node; the rendezvous of all nodes is at `node.master_addr`."""
    ranks = request.ranks or machine.capacity
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


def start_by_srun(request: Request, job: Slurm, port: int, machine: Machine, environ: Mapping[str, str]) -> Start:
    """Return the launch of ranks on all nodes of a Slurm allocation, or on one node per rank if there are fewer ranks.

    Raises:
        LaunchError: If the nodes cannot have equal numbers of ranks.
    """
    ranks = request.ranks or job.ranks
    nodes = min(job.nodes, ranks)
    if ranks % nodes:
        raise LaunchError(
            f"torchrun needs the same number of ranks on every node, got {ranks} ranks and {nodes} nodes.\n"
            f"Pass a multiple of {nodes} as the number of ranks."
        )
    cpus = min(job.cpus, default=1)
    srun = ("srun", "--mpi=none", f"--nodes={nodes}", f"--ntasks={nodes}", f"--cpus-per-task={cpus}")
    agent = (machine.python, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks // nodes}")
    command = (*srun, "bash", "-c", _AGENT, "bash", *agent, f"--master-port={port}", "--no-python")
    child = environment.of_ranks(environ, threads=cpus * nodes // ranks)
    return Start((*command, *request.of_rank(machine.python)), child)
