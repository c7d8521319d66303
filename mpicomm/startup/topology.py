"""The topology of the job: determined by MPI's shared-memory split, never computed from rank counts."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpicomm import mpi

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Topology:
    """The position of this rank among the nodes; a node is a set of ranks that share memory."""

    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    hostname: str
    hosts: tuple[str, ...]
    """The host of every rank, by rank."""

    nodes: tuple[int, ...]
    """The node of every rank, by rank."""


def discover(comm: Intracomm) -> Topology:
    """Determine which ranks share a node (collective)."""
    node = comm.Split_type(mpi.api().COMM_TYPE_SHARED, key=comm.rank)
    try:
        local_rank, local_size = node.rank, node.size
        leader = node.bcast(comm.rank)
    finally:
        node.Free()
    everyone = comm.allgather((leader, socket.gethostname()))
    where = from_nodes(comm.rank, [str(each[0]) for each in everyone], [each[1] for each in everyone])
    assert (where.local_rank, where.local_size) == (local_rank, local_size)
    return where


def from_nodes(rank: int, nodes: Sequence[str], hosts: Sequence[str]) -> Topology:
    """Return the topology of `rank` from the node name of every rank.

    Args:
        nodes: For every rank, a name that is the same for the ranks of one node, and different between nodes.
        hosts: For every rank, its host.
    """
    local_ranks = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    order = node_order(nodes)
    return Topology(
        local_rank=local_ranks.index(rank),
        local_size=len(local_ranks),
        node_rank=order[nodes[rank]],
        num_nodes=len(order),
        hostname=hosts[rank],
        hosts=tuple(hosts),
        nodes=tuple(order[node] for node in nodes),
    )


def node_order(nodes: Iterable[T]) -> dict[T, int]:
    """Number the nodes in the order of their lowest rank.

    Args:
        nodes: For every rank, the name of its node.
    """
    return {node: index for index, node in enumerate(dict.fromkeys(nodes))}
