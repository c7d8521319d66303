"""Opens the out-of-band channel: hubs bind, MPI transfers their addresses and a token, then every rank connects."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from typing import TYPE_CHECKING

from mpicomm.startup.topology import Topology
from mpicomm.watchdog.channel import TOKEN_BYTES, Channel, RankInfo

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

CONNECT_SECONDS = 30.0


def rank_info_of(comm: Intracomm, where: Topology) -> RankInfo:
    """Choose the hub of every rank (collective)."""
    nodes = comm.allgather(where.node_rank)
    first: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
    hubs = [0 if first[node] == rank else first[node] for rank, node in enumerate(nodes)]
    return RankInfo(comm.rank, where.hosts, nodes, hubs)


class ChannelSetup:
    """Opens the channel in two steps; the watchdog of each hub starts between them."""

    def __init__(self, comm: Intracomm, place: RankInfo, address: str, host_timeout: int) -> None:
        """Bind the hubs' sockets and distribute their addresses (collective).

        Args:
            address: The address on which rank 0 listens; every node has reached it before. Other hubs listen on
                loopback, for their own node.
            host_timeout: Seconds after which the ranks of a host that does not answer count as dead.
        """
        token = comm.bcast(secrets.token_bytes(TOKEN_BYTES))
        self.channel = Channel(comm.rank, token, host_timeout)
        self._comm = comm
        self._place = place
        own = address if comm.rank == 0 else "127.0.0.1"
        children = {rank for rank, hub in enumerate(place.hubs) if hub == comm.rank and rank != comm.rank}
        listening: tuple[str, int] | None = None
        with contextlib.suppress(OSError):
            listening = (own, self.channel.listen(own)) if children else None
            self.channel.expect(children)
        self._places: list[tuple[str, int] | None] = comm.allgather(listening)

    def connect(self) -> str:
        """Connect to this rank's hub, whose watchdog thread must be running or about to start.

        Returns:
            The reason for a failure; empty on success.
        """
        if self._comm.rank == 0:
            return ""
        hub = self._place.hub
        if (there := self._places[hub]) is None:
            return f"rank {hub} on {self._place.hosts[hub]} could not listen"
        try:
            self.channel.connect(*there, CONNECT_SECONDS)
        except (OSError, ValueError) as error:
            return f"rank {hub} at {there[0]} port {there[1]}: {error}"
        return ""

    def is_open_on_all_ranks(self, problem: str) -> bool:
        """Return whether every rank has connected; warn if not (collective)."""
        problems = [(rank, text) for rank, text in enumerate(self._comm.allgather(problem)) if text]
        if problems and self._comm.rank == 0:
            rank, text = problems[0]
            warnings.warn(
                f"out-of-band channel unavailable: {len(problems)} of {self._comm.size} ranks cannot connect to their "
                f"hub (first: rank {rank} to {text}). The job continues, but cannot report dead ranks or hangs.\n"
                f"Open the ports between the nodes, or set MPICOMM_INTERFACE to a network with open ports.",
                stacklevel=2,
            )
        return not problems
