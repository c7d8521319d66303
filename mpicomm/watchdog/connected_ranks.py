"""The ranks to which a hub is connected: it answers for those that do not, and kills those that cannot end."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpicomm.recorder.status import NotResponding
from mpicomm.watchdog import local_processes
from mpicomm.watchdog.channel import Channel, RankInfo
from mpicomm.watchdog.protocol import COLLECT_SECONDS, LocalProcess, StatusReport

ANSWER_SECONDS = 2.0
"""Time limit for the ranks of a hub to answer it; shorter than that of rank 0, `protocol.COLLECT_SECONDS`."""


class ConnectedRanks:
    """The children of this rank, which it answers for if they do not respond, and its hub."""

    def __init__(self, rank_info: RankInfo, channel: Channel, report: Callable[[StatusReport], None]) -> None:
        """Create the record.

        Args:
            report: Sends a message to rank 0.
        """
        self._rank_info = rank_info
        self._channel = channel
        self._report = report
        self._collections: dict[int, tuple[float, set[int]]] = {}  # deadline, and ranks yet to answer

    @property
    def is_collecting(self) -> bool:
        """Whether a child has yet to report its status."""
        return bool(self._collections)

    def start_collection(self, number: int, now: float) -> None:
        """Start the deadline for the status reports of the children."""
        if self._channel.children:
            self._collections[number] = (now + ANSWER_SECONDS, set(self._channel.children))

    def record_status(self, report: StatusReport) -> None:
        """Record that a rank has answered a collection."""
        if report.number in self._collections:
            self._collections[report.number][1].discard(report.rank)

    def close_collections(self, now: float) -> None:
        """Answer for the children that have not answered in time."""
        for number, (deadline, silent) in list(self._collections.items()):
            if silent and now < deadline:
                continue
            del self._collections[number]
            for rank in silent & self._channel.children.keys():
                seconds = now - self._channel.children[rank].received_at
                self._report(StatusReport(rank, number, NotResponding(seconds, self.state_of(rank))))

    def state_of(self, rank: int) -> str:
        """Return the state of a rank's process according to /proc; empty for a process on another host."""
        process = self._local_processes().get(rank)
        return "" if process is None else local_processes.state_of(process.pid)

    def kill_unresponsive(self, *, with_hub: bool) -> None:
        """Kill the ranks of this host that cannot end themselves.

        Args:
            with_hub: Whether the hub does not respond either.
        """
        latest = time.monotonic() - COLLECT_SECONDS
        silent = {rank for rank, child in self._channel.children.items() if child.received_at < latest}
        if with_hub:
            silent.add(self._rank_info.hub)
        for rank, process in self._local_processes().items():
            if rank in silent or local_processes.is_stopped(process.pid):
                local_processes.kill(process)

    def _local_processes(self) -> dict[int, LocalProcess]:
        """Return the processes of this host whose pid is known, by rank."""
        here = self._rank_info.nodes[self._rank_info.rank]
        processes = self._channel.processes.items()
        return {rank: process for rank, process in processes if self._rank_info.nodes[rank] == here}
