"""The topology of the job: determined by MPI's shared-memory split, never computed from rank counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpicomm import mpi

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Topology:
    """The position of this rank among the ranks and the nodes of the job."""

    rank: int
    """The rank of this process, from 0 to size - 1."""

    size: int
    """The number of ranks."""

    local_rank: int
    """The rank of this process among the ranks of its node."""

    local_size: int
    """The number of ranks on this node."""

    node_rank: int
    """The index of this node among the nodes of the job."""

    num_nodes: int
    """The number of nodes; the ranks of a node share memory."""

    hostname: str
    """The name of this rank's host."""

    hosts: tuple[str, ...]
    """The host name of every rank, by rank."""

    nodes: tuple[int, ...]
    """The node index of every rank, by rank."""


def first_rank_of_node(comm: Intracomm) -> int:
    """Return the lowest rank of those that share this rank's node (collective)."""
    node = comm.Split_type(mpi.api().COMM_TYPE_SHARED, key=comm.rank)
    try:
        return node.bcast(comm.rank)
    finally:
        node.Free()


def from_nodes(rank: int, nodes: Sequence[Hashable], hosts: Sequence[str]) -> Topology:
    """Return the topology of `rank` from the node of every rank.

    Args:
        nodes: For every rank, a value that is the same for the ranks of one node, and different between nodes.
        hosts: For every rank, its host.
    """
    local_ranks = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    order = node_order(nodes)
    return Topology(
        rank=rank,
        size=len(nodes),
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
