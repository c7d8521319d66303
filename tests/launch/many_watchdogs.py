"""Measures rank 0's watchdog in large jobs: `python -m tests.launch.many_watchdogs 200`, without MPI and torch.

The argument is the number of ranks of the first job, with ten on each node; the second has 10,000 ranks on 1,250 nodes.
Rank 0 is a process with a real watchdog. This process has the sockets of its children, and sends their heartbeats and
answers.
"""

from __future__ import annotations

import argparse
import collections
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from mpicomm import open_files
from mpicomm.native import c_library
from mpicomm.recorder.status import OperationInfo, RankStatus
from mpicomm.watchdog import connection as connections
from mpicomm.watchdog import protocol
from mpicomm.watchdog.agent import Watchdog, WatchdogSettings
from mpicomm.watchdog.channel import Channel, RankInfo
from mpicomm.watchdog.connection import Connection
from tests.time_limits import EVENT_SECONDS, scaled

HOST = "127.0.0.1"
PER_NODE = 10
LARGE_SIZE, LARGE_PER_NODE = 10_000, 8
REPORT_PAUSE = 1.0  # seconds between two reports
SETTLING_SECONDS = 1.5  # until the start is complete
WAITS_SECONDS = 5.0  # in which rank 0 processes the messages of all ranks that wait

OPERATION = OperationInfo(
    number=41,
    name="all_reduce",
    group="0",
    members="",
    sequence=42,
    is_message=False,
    dtype="float32",
    count=1024,
    peer=None,
    where="train.py:88 (step)",
    called=61.0,
    seconds=61.0,
    is_over=False,
)


class Rank0(Watchdog):
    """The watchdog of rank 0, which sends its reports to the measuring process."""

    def __init__(self, size: int, per_node: int, channel: Channel, reports: socket.socket) -> None:
        nodes = [rank // per_node for rank in range(size)]
        hubs = [0 if rank % per_node == 0 else node * per_node for rank, node in enumerate(nodes)]
        info = RankInfo(0, [f"node{node}" for node in nodes], nodes, hubs)
        super().__init__(info, channel, WatchdogSettings(REPORT_PAUSE, None), os._exit, lambda: True)
        self._reports = reports

    def print_report(self, text: str) -> None:
        self._reports.sendall(text.encode())


class Children:
    """All children of rank 0: each sends a heartbeat per second, and answers for the ranks behind it."""

    def __init__(self, size: int, per_node: int) -> None:
        self.size = size
        self.connections: dict[int, Connection] = {}
        self.behind = collections.defaultdict(list)
        for rank in range(1, size):
            node = rank // per_node
            self.behind[node * per_node if node else rank].append(rank)
        self._selector = selectors.DefaultSelector()

    def connect(self, port: int, token: bytes) -> None:
        open_files.allow(len(self.behind))
        for rank in self.behind:
            connection = connections.connect(HOST, port, token, rank, scaled(EVENT_SECONDS))
            self._selector.register(connection, selectors.EVENT_READ, rank)
            self.connections[rank] = connection
        self._beats = collections.deque(enumerate(self.connections.values()))
        self._start = time.monotonic()

    def serve(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Send heartbeats and answers for some seconds, or until a condition is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            for key, _ in self._selector.select(0.002):
                assert isinstance(key.fileobj, Connection)
                for message in key.fileobj.receive()[0]:
                    if isinstance(message, protocol.CollectStatus):
                        self._answer(key.data, message.number)
            for connection in self.connections.values():
                connection.flush()
            while self._start + self._beats[0][0] / len(self._beats) <= time.monotonic():
                number, connection = self._beats.popleft()
                connection.send(protocol.Heartbeat())
                self._beats.append((number + len(self.connections), connection))

    def _answer(self, child: int, number: int) -> None:
        for rank in self.behind[child]:
            status = RankStatus([OPERATION], OPERATION, "train.py:88 (step)", {"0": 42})
            self.connections[child].send(protocol.StatusReport(rank, number, status))

    def ask(self) -> None:
        """Request a report, as a rank that waits for long."""
        self.connections[1].send(protocol.PossibleHang(1, OPERATION, "1", 1800.0, False, ""))

    def wait(self) -> None:
        """Report that all ranks wait in the same operation."""
        for child, ranks in self.behind.items():
            for rank in ranks:
                self.connections[child].send(protocol.WaitStarted(rank, OPERATION, f"0-{self.size - 1}"))


def be_rank_0(size: int, per_node: int, children: set[int], token: bytes, parent: socket.socket) -> NoReturn:
    """Open the channel as `mpicomm.watchdog.channel_setup` does, and run the watchdog."""
    channel = Channel(0, token)
    parent.sendall(str(channel.listen(HOST, children)).encode())
    watch = Rank0(size, per_node, channel, parent)
    watch.start()
    parent.recv(1)
    watch.establish()
    while True:
        signal.pause()


@contextmanager
def rank_0(size: int, per_node: int, children: set[int], token: bytes) -> Iterator[tuple[int, socket.socket]]:
    """Start rank 0, and yield its pid and a socket to it; it sends the port of its channel, and later its reports."""
    ours, theirs = socket.socketpair()
    c_library.load()  # a connection loads it to report crashes
    if (pid := os.fork()) == 0:
        try:
            be_rank_0(size, per_node, children, token, theirs)
        finally:
            os._exit(1)
    try:
        yield pid, ours
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, from the kernel's nanosecond counters."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measure(size: int, per_node: int, idle_seconds: float) -> str:
    """Measure rank 0 of a job, and return the results as lines of a table."""
    children, token = Children(size, per_node), os.urandom(32)
    with rank_0(size, per_node, set(children.behind), token) as (pid, parent):
        start = time.monotonic()
        children.connect(int(parent.recv(100)), token)
        connected = time.monotonic() - start
        parent.sendall(b"!")
        children.serve(SETTLING_SECONDS)
        before, start = cpu_seconds(pid), time.monotonic()
        children.serve(idle_seconds)
        idle = (cpu_seconds(pid) - before) / (time.monotonic() - start)

        before, start = cpu_seconds(pid), time.monotonic()
        children.ask()
        with selectors.DefaultSelector() as selector:
            selector.register(parent, selectors.EVENT_READ)
            children.serve(scaled(EVENT_SECONDS), lambda: bool(selector.select(0)))
        report, report_cpu = time.monotonic() - start, cpu_seconds(pid) - before
        text = parent.recv(1 << 20).decode()
        assert f"ranks 1-{size - 1} " in text, text

        before, start = cpu_seconds(pid), time.monotonic()
        children.wait()
        children.serve(WAITS_SECONDS)
        waits_cpu = cpu_seconds(pid) - before - idle * (time.monotonic() - start)
    return f"""\
{size:,} ranks on {size // per_node:,} nodes: rank 0 has {len(children.behind)} children, connected in {connected:.2f} s
  idle                {1e3 * idle:.1f} ms of CPU per second
  a report            {report:.2f} s; {report_cpu:.2f} s of CPU
  all start to wait   {waits_cpu:.2f} s of CPU
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.launch.many_watchdogs", description=__doc__.splitlines()[0])
    parser.add_argument("size", type=int, help=f"number of ranks of the first job, {PER_NODE} on each node")
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS", help="%(default)s, without messages")
    arguments = parser.parse_args()
    for size, per_node in ((arguments.size, PER_NODE), (LARGE_SIZE, LARGE_PER_NODE)):
        sys.stdout.write(measure(size, per_node, arguments.idle))


if __name__ == "__main__":
    main()
