"""Opens the out-of-band channel and starts the watchdog: hubs listen, MPI transfers their addresses, ranks connect."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpicomm import agreement
from mpicomm.launch import request
from mpicomm.settings import PARENT_VARIABLE
from mpicomm.topology import Topology
from mpicomm.watchdog import agent, parent_link
from mpicomm.watchdog.agent import Watchdog, WatchdogSettings
from mpicomm.watchdog.channel import Channel, RankInfo

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

CONNECT_SECONDS = 30.0  # for a hub to accept a rank, on a busy machine

Address = tuple[str, int]
"""An address and a port."""


def rank_info_of(where: Topology) -> RankInfo:
    """Choose the hub of every rank."""
    first = {node: rank for rank, node in reversed(list(enumerate(where.nodes)))}
    hubs = [0 if first[node] == rank else first[node] for rank, node in enumerate(where.nodes)]
    return RankInfo(where.rank, where.hosts, where.nodes, hubs)


def start_watchdog(
    comm: Intracomm,
    where: Topology,
    address: str,
    channel: Channel,
    limits: WatchdogSettings,
    claim: Callable[[], bool],
    parent: str | None,
) -> Watchdog | None:
    """Connect all ranks to their hubs and start their watchdogs; return None if a rank cannot connect (collective).

    Args:
        address: The address on which rank 0 listens; every node has reached it before. Other hubs listen on loopback,
            for their own node.
        channel: This rank's channel, without connections.
        limits: The settings of the watchdog.
        claim: Returns True if no other rank has reported the cause of the job's end before.
        parent: On rank 0, where `mpicomm run` listens; None if it did not start the job.
    """
    # 1. the hubs listen
    rank_info = rank_info_of(where)
    hub_addresses = comm.allgather(_listen(channel, rank_info, address if comm.rank == 0 else "127.0.0.1"))
    # 2. every rank connects to its hub, and its watchdog accepts the ranks of which it is the hub
    watch = Watchdog(rank_info, channel, limits, comm.Abort, claim)
    problem: OSError | None = None
    try:
        _connect(channel, rank_info, hub_addresses)
    except OSError as error:
        problem = error
    watch.start()
    agent.set_current(watch)

    def check() -> None:
        if problem is not None:
            raise problem

    # 3. use the channel if all ranks have connected
    try:
        failed = agreement.failures(comm.allgather, check, OSError)
    except BaseException:  # a rank has failed: a thread that is left over would report its end to the next world
        stop_watchdog(watch)
        raise
    if failed:
        if comm.rank == 0:
            rank, text = failed[0]
            warnings.warn(
                f"out-of-band channel unavailable: {len(failed)} of {comm.size} ranks cannot connect to the "
                f"watchdog of another rank (first: rank {rank} to {text}). The job continues, but cannot report dead "
                f"ranks or hangs.\n"
                f"Open the ports between the nodes, or set MPICOMM_INTERFACE to a network with open ports.",
                stacklevel=2,
            )
        stop_watchdog(watch)
        return None
    watch.establish()
    # `mpicomm run` answers the observers of its jobs, so that they need not be on the host of rank 0
    if comm.rank == 0 and not (parent and _connect_to_parent(watch, parent, channel.host_timeout)):
        watch.accept_observers(request.this_program(), time.time())
    return watch


def stop_watchdog(watch: Watchdog | None) -> None:
    """Stop a watchdog, if there is one, and close its channel."""
    if watch is not None:
        watch.stop()
        agent.set_current(None)


def _connect_to_parent(watch: Watchdog, parent: str, host_timeout: int) -> bool:
    """Connect rank 0 to `mpicomm run`, and return whether this has succeeded.

    The other ranks know nothing of it, and wait only for rank 0's next message.
    """
    try:
        watch.attach_parent(parent_link.connect(parent_link.Parent.parse(parent), host_timeout))
    except (OSError, ValueError) as error:
        warnings.warn(
            f"cannot connect to mpicomm run: {error}. The job continues, but mpicomm run cannot ask it to save a "
            f"checkpoint, and does not notice if a host is lost.\n"
            f"Open the ports between the hosts of the job; if {PARENT_VARIABLE} is left over, unset it.",
            stacklevel=2,
        )
        return False
    return True


def _listen(channel: Channel, rank_info: RankInfo, address: str) -> Address | None:
    """Listen if this rank is a hub; return where, or None if it is not or cannot."""
    children = {rank for rank, hub in enumerate(rank_info.hubs) if hub == rank_info.rank and rank != rank_info.rank}
    with contextlib.suppress(OSError):
        return (address, channel.listen(address, children)) if children else None
    return None


def _connect(channel: Channel, rank_info: RankInfo, hub_addresses: Sequence[Address | None]) -> None:
    """Connect to this rank's hub, whose watchdog thread must be running or about to start.

    Raises:
        OSError: If it cannot connect; the message names the hub.
    """
    if rank_info.rank == 0:
        return
    if (there := hub_addresses[rank_info.hub]) is None:
        raise OSError(f"rank {rank_info.hub} on {rank_info.hosts[rank_info.hub]} could not listen")
    try:
        channel.connect(*there, CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise OSError(f"rank {rank_info.hub} at {there[0]} port {there[1]}: {error}") from error
