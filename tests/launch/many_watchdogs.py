"""Measures the cost and latency of the watchdogs of many ranks: real threads and sockets, without MPI and torch.

`python -m tests.launch.many_watchdogs 200` starts 200 ranks on 20 simulated nodes of this machine, and prints figures.
Then it starts rank 0 of 10,000 ranks on 1,250 nodes. Its children are sockets of a single other process, which sends
their heartbeats and answers.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from mpicomm import open_files
from mpicomm.json_messages import Message
from mpicomm.native import c_library
from mpicomm.recorder import flight_recorder
from mpicomm.recorder.status import OperationInfo, RankStatus
from mpicomm.watchdog import connection as connections
from mpicomm.watchdog import protocol
from mpicomm.watchdog.agent import Watchdog, WatchdogSettings
from mpicomm.watchdog.channel import Channel, RankInfo
from mpicomm.watchdog.connection import Connection
from tests.time_limits import wait_until

HOST = "127.0.0.1"
CONNECT_SECONDS = 60.0
ASK_SECONDS = 1.0  # in an operation, after which the last rank requests a report; the others never do
NEVER = 1e9
PORT_TEXT = 6  # bytes
TARGET_RANKS, TARGET_NODES = 10_000, 1_250

_PR_SET_PDEATHSIG = 1

ChannelEvent = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """The data that all ranks have before they start; in a real job, MPI distributes it."""

    size: int
    per_node: int
    folder: Path
    token: bytes
    log: int
    """The descriptor of a file to which every rank appends its events."""

    ports: dict[int, tuple[int, int]]
    """By hub, the pipe that transfers its port, once for each of its children."""

    @property
    def nodes(self) -> list[int]:
        return [rank // self.per_node for rank in range(self.size)]

    @property
    def hosts(self) -> list[str]:
        return [f"node{node}" for node in self.nodes]

    @property
    def hubs(self) -> list[int]:
        """The hub of every rank, as `mpicomm.watchdog.channel_setup.rank_info_of` chooses it."""
        first = [node * self.per_node for node in self.nodes]
        return [0 if first[rank] == rank else first[rank] for rank in range(self.size)]

    def children(self, hub: int) -> set[int]:
        return {rank for rank, its in enumerate(self.hubs) if its == hub and rank != hub}

    def note(self, event: str, **about: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic(), **about}) + "\n"
        os.write(self.log, line.encode())  # a single write: the file is open for appending


# -- a rank ----------------------------------------------------------------------------------------------------------


class Noted(Watchdog):
    """A watchdog that logs its requests and its messages."""

    def __init__(self, job: Job, rank: int, channel: Channel) -> None:
        seconds = ASK_SECONDS if rank in (0, job.size - 1) else NEVER  # for rank 0, the pause between two reports

        def end(status: int) -> None:
            job.note("ended", rank=rank, status=status)
            os._exit(status)

        def claim() -> bool:
            with contextlib.suppress(FileExistsError):
                (job.folder / "claim").touch(exist_ok=False)
                return True
            return False

        super().__init__(
            RankInfo(rank, job.hosts, job.nodes, job.hubs), channel, WatchdogSettings(seconds, None), end, claim
        )
        self._job = job

    def print_report(self, text: str) -> None:
        self._job.note("printed", rank=self.rank_info.rank, text=text)

    def _report(self, message: Message) -> None:
        if isinstance(message, protocol.LateOperation):
            self._job.note("asked", rank=self.rank_info.rank)
        super()._report(message)


def be_a_rank(job: Job, rank: int) -> NoReturn:
    """Open the channel as `mpicomm.watchdog.channel_setup` does, start the watchdog, then only handle signals."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    group = flight_recorder.Group("0", range(job.size), NEVER, is_world=True)

    def call(number: int, frame: object) -> None:
        flight_recorder.note(group, "all_reduce", "torch.float32", 1024, None, False, True)
        job.note("called", rank=rank)

    signal.signal(signal.SIGUSR1, call)
    channel = Channel(rank, job.token)
    if children := job.children(rank):
        port = channel.listen(HOST, children)
        os.write(job.ports[rank][1], f"{port:<{PORT_TEXT}}".encode() * len(children))
    watch = Noted(job, rank, channel)
    if rank != 0:
        channel.connect(HOST, int(os.read(job.ports[job.hubs[rank]][0], PORT_TEXT)), CONNECT_SECONDS)
    watch.start()

    def establish(number: int, frame: object) -> None:
        watch.establish()
        job.note("established")

    signal.signal(signal.SIGUSR2, establish)
    job.note("connected", rank=rank)
    while True:
        signal.pause()


# -- the children of rank 0 in a large job ---------------------------------------------------------------------------


class Children:
    """All children of rank 0 in one process: each sends a heartbeat per second, and answers for its subtree."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.connections: dict[int, Connection] = {}
        self.behind = collections.defaultdict(list)
        for rank in range(1, job.size):
            node = rank // job.per_node
            self.behind[node * job.per_node if node else rank].append(rank)
        self._selector = selectors.DefaultSelector()

    def connect(self, port: int) -> None:
        for rank in self.behind:
            connection = connections.connect(HOST, port, self.job.token, rank, CONNECT_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ, rank)
            self.connections[rank] = connection

    def run(self) -> NoReturn:
        beats = collections.deque(enumerate(self.connections.values()))
        start, pause = time.monotonic(), 1.0 / len(beats)
        while True:
            for key, _ in self._selector.select(0.002):
                assert isinstance(key.fileobj, Connection)
                for message in key.fileobj.receive()[0]:
                    if isinstance(message, protocol.CollectStatus):
                        self._answer(key.data, message.number)
            for connection in list(self.connections.values()):
                connection.flush()
            while start + beats[0][0] * pause <= time.monotonic():
                number, connection = beats.popleft()
                connection.send(protocol.Heartbeat())
                beats.append((number + len(self.connections), connection))

    def _answer(self, child: int, number: int) -> None:
        for rank in self.behind[child]:
            status = RankStatus([OPERATION], OPERATION, "train.py:88 (step)", {"0": 42})
            self.connections[child].send(protocol.StatusReport(rank, number, status))

    def ask(self, number: int, frame: object) -> None:
        self.job.note("asked", rank=1)
        self.connections[1].send(protocol.PossibleHang(1, OPERATION, "1", 1800.0, False, ""))

    def wait(self, number: int, frame: object) -> None:
        """Report that all ranks wait in the same operation."""
        needs = f"0-{self.job.size - 1}"
        for child, ranks in self.behind.items():
            for rank in ranks:
                self.connections[child].send(protocol.WaitStarted(rank, OPERATION, needs))
        self.job.note("notified")


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


def be_the_children(job: Job) -> NoReturn:
    """Act as all children of rank 0; `Crowd` treats this process as rank 1."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    children = Children(job)
    open_files.allow(len(children.behind))
    signal.signal(signal.SIGUSR1, children.ask)
    signal.signal(signal.SIGUSR2, children.wait)
    children.connect(int(os.read(job.ports[0][0], PORT_TEXT)))
    job.note("connected", rank=1)
    children.run()


# -- all ranks -------------------------------------------------------------------------------------------------------


class Crowd:
    """The processes of a job, which this process starts, signals and measures."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.started = time.monotonic()
        self.pids: list[int] = []
        self._events: list[ChannelEvent] = []
        self._offset = 0

    def start(self, rank: int, be: Callable[[], NoReturn]) -> None:
        if (pid := os.fork()) == 0:
            try:
                be()
            except BaseException as error:
                self.job.note("failed", rank=rank, error=repr(error))
                raise
            finally:
                os._exit(1)
        self.pids.append(pid)

    def events(self, event: str) -> list[ChannelEvent]:
        with (self.job.folder / "log").open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # another process is writing it
                self._events.append(json.loads(line))
                self._offset += len(line)
        assert not (failed := [each for each in self._events if each["event"] == "failed"]), failed
        return [each for each in self._events if each["event"] == event]

    def wait(self, event: str, number: int = 1) -> ChannelEvent:
        """Wait until an event has occurred `number` times, and return the last of these events."""
        wait_until(lambda: len(self.events(event)) >= number, f"{event} has occurred {number} times")
        return self.events(event)[number - 1]

    def kill(self, number: int, *ranks: int) -> float:
        """Send a signal to ranks, and return the time just before."""
        now = time.monotonic()
        for rank in ranks:
            os.kill(self.pids[rank], number)
        return now

    def cpu(self) -> list[float]:
        """Return the CPU seconds that each rank has used."""
        return [cpu_seconds(pid) for pid in self.pids]

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)  # not reaped yet: the process exists, if only as a zombie
        for pid in self.pids:
            os.waitpid(pid, 0)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, from the kernel's nanosecond counters where available."""
    tasks = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    if tasks:
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def crowd(size: int, per_node: int, *, is_real: bool = True) -> Iterator[Crowd]:
    """Start `size` ranks and wait until all are connected; at the end, kill all of them.

    Args:
        is_real: Whether each rank is a process. If False, rank 0 is one process, and all its children are another.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        log = os.open(Path(folder, "log"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        stack.callback(os.close, log)
        job = Job(size, per_node, Path(folder), os.urandom(32), log, {})
        for hub in range(0, size, per_node) if is_real else [0]:
            job.ports[hub] = os.pipe()
            for end in job.ports[hub]:
                stack.callback(os.close, end)
        ranks = Crowd(job)
        stack.callback(ranks.end)
        c_library.load()  # a connection loads it to report crashes; it imports torch: here once, not in every rank
        for rank in range(size if is_real else 1):
            ranks.start(rank, lambda rank=rank: be_a_rank(job, rank))  # type: ignore[misc]
        if not is_real:
            ranks.start(1, lambda: be_the_children(job))
        ranks.wait("connected", len(ranks.pids))
        real = range(size if is_real else 1)
        ranks.kill(signal.SIGUSR2, *real)
        ranks.wait("established", len(real))
        yield ranks


# -- measuring -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Figures:
    """The measured values; times are in seconds."""

    size: int
    per_node: int
    connected: float = 0.0
    idle_rank_0: float = 0.0
    """CPU seconds per second, like the next three values."""

    idle_hub: float = 0.0
    idle_leaf: float = 0.0
    waiting_rank_0: float = 0.0
    report: float = 0.0
    report_cpu: float = 0.0
    """CPU seconds of rank 0 for one report."""

    report_text: str = ""
    stopped: float = 0.0
    stopped_text: str = ""
    killed_leaf: float = 0.0
    killed_hub: float = 0.0
    killed_rank_0: float = 0.0
    large: dict[str, float] = dataclasses.field(default_factory=dict)
    """The figures of rank 0 of a large job."""

    ends: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    """By scenario: the last messages with their ranks, and the exit statuses with their ranks."""


def measure(size: int, per_node: int, idle_seconds: float) -> Figures:
    """Run all measurements in which each rank is a process."""
    figures = Figures(size, per_node)
    with crowd(size, per_node) as ranks:
        figures.connected = ranks.wait("connected", size)["at"] - ranks.started
        _measure_idle(ranks, figures, idle_seconds)
        _measure_reports(ranks, figures, idle_seconds)
        leaf = size - 2
        figures.killed_leaf = _measure_end(ranks, figures, "leaf", leaf)
    with crowd(size, per_node) as ranks:
        figures.killed_hub = _measure_end(ranks, figures, "hub", size - per_node)
    with crowd(size, per_node) as ranks:
        figures.killed_rank_0 = _measure_end(ranks, figures, "rank 0", 0)
    return figures


def _measure_idle(ranks: Crowd, figures: Figures, seconds: float) -> None:
    size, per_node = figures.size, figures.per_node
    time.sleep(1.5)  # until the start is complete
    shares = _shares(ranks, seconds)
    hubs = range(per_node, size, per_node)
    leaves = [rank for rank in range(size) if rank % per_node]
    figures.idle_rank_0 = shares[0]
    figures.idle_hub = sum(shares[rank] for rank in hubs) / len(hubs)
    figures.idle_leaf = sum(shares[rank] for rank in leaves) / len(leaves)


def _shares(ranks: Crowd, seconds: float) -> list[float]:
    """Return the CPU seconds per second that each rank uses."""
    before, start = ranks.cpu(), time.monotonic()
    time.sleep(seconds)
    after, duration = ranks.cpu(), time.monotonic() - start
    return [(late - early) / duration for early, late in zip(before, after, strict=True)]


def _measure_reports(ranks: Crowd, figures: Figures, seconds: float) -> None:
    """Let all ranks but rank 0 wait, and measure the report; then measure it again with one stopped rank."""
    size = figures.size
    before = ranks.cpu()[0]
    ranks.kill(signal.SIGUSR1, *range(1, size - 1))
    ranks.wait("called", size - 2)
    ranks.kill(signal.SIGUSR1, size - 1)  # this rank requests the report
    printed = ranks.wait("printed")
    asked = ranks.wait("asked")
    figures.report, figures.report_text = printed["at"] - asked["at"], printed["text"]
    figures.report_cpu = ranks.cpu()[0] - before
    if seconds > 1:
        time.sleep(6)  # until all ranks have reported their wait
        figures.waiting_rank_0 = _shares(ranks, seconds)[0]
    stopped = size - figures.per_node + 1
    ranks.kill(signal.SIGSTOP, stopped)
    ranks.kill(signal.SIGUSR1, size - 1)
    printed = ranks.wait("printed", 2)
    figures.stopped, figures.stopped_text = printed["at"] - ranks.wait("asked", 2)["at"], printed["text"]
    ranks.kill(signal.SIGCONT, stopped)
    time.sleep(0.5)


def _measure_end(ranks: Crowd, figures: Figures, name: str, victim: int) -> float:
    """Kill a rank, and return the seconds until another rank reports it."""
    former = len(ranks.events("printed"))
    killed = ranks.kill(signal.SIGKILL, victim)
    printed = ranks.wait("printed", former + 1)
    ranks.wait("ended")
    time.sleep(0.5)
    notified = [[each["rank"], each["text"]] for each in ranks.events("printed")[former:]]
    figures.ends[name] = [notified, [[each["rank"], each["status"]] for each in ranks.events("ended")]]
    return float(printed["at"] - killed)


def measure_rank_0(size: int, per_node: int, idle_seconds: float) -> dict[str, float]:
    """Measure rank 0 of a large job, whose other ranks are simulated."""
    with crowd(size, per_node, is_real=False) as ranks:
        large = {"connected": ranks.wait("connected", 2)["at"] - ranks.started}
        time.sleep(1.5)
        large["idle"] = _shares(ranks, idle_seconds)[0]
        before = ranks.cpu()[0]
        ranks.kill(signal.SIGUSR1, 1)
        printed = ranks.wait("printed")
        large["report"] = printed["at"] - ranks.wait("asked")["at"]
        large["report_cpu"] = ranks.cpu()[0] - before
        assert f"ranks 1-{size - 1} " in printed["text"], printed["text"]
        before, start = ranks.cpu()[0], time.monotonic()
        ranks.kill(signal.SIGUSR2, 1)
        ranks.wait("notified")
        time.sleep(5)
        large["waits_cpu"] = ranks.cpu()[0] - before - large["idle"] * (time.monotonic() - start)
    return large


def show(figures: Figures) -> str:
    """Return the figures as a table, followed by the watchdogs' messages."""
    size, per_node = figures.size, figures.per_node
    nodes = size // per_node
    children = nodes - 1 + per_node - 1
    per_child = max(0.0, figures.idle_rank_0 - figures.idle_leaf) / children
    target_children = TARGET_NODES - 1 + TARGET_RANKS // TARGET_NODES - 1
    target_idle = figures.idle_leaf + per_child * target_children
    target_report = figures.report_cpu / size * TARGET_RANKS
    rows: list[tuple[str, str]] = [
        ("all connected after", f"{figures.connected:.2f} s, on {os.cpu_count()} cores"),
        ("idle, rank 0", f"{1e3 * figures.idle_rank_0:.2f} ms of CPU per second, with {children} children"),
        ("idle, a hub", f"{1e3 * figures.idle_hub:.2f} ms of CPU per second"),
        ("idle, a leaf", f"{1e3 * figures.idle_leaf:.2f} ms of CPU per second"),
        ("all wait, rank 0", f"{1e3 * figures.waiting_rank_0:.2f} ms of CPU per second"),
        (
            "a report",
            f"{figures.report:.2f} s from question to table; {1e3 * figures.report_cpu:.0f} ms of rank 0's CPU",
        ),
        ("a report, one rank stopped", f"{figures.stopped:.2f} s"),
        ("a leaf killed: named after", f"{figures.killed_leaf:.3f} s"),
        ("a hub killed: named after", f"{figures.killed_hub:.3f} s"),
        ("rank 0 killed: named after", f"{figures.killed_rank_0:.3f} s"),
        (f"{TARGET_RANKS:,} ranks on {TARGET_NODES:,} nodes", f"rank 0 has {target_children} children; extrapolated:"),
        ("  idle, rank 0", f"{1e3 * target_idle:.0f} ms of CPU per second, {1e6 * per_child:.0f} us per child"),
        ("  a report", f"{target_report:.1f} s of rank 0's CPU, {1e6 * figures.report_cpu / size:.0f} us per rank"),
    ]
    if large := figures.large:
        rows += [
            ("  the same, measured", f"rank 0 alone is real; all connected after {large['connected']:.2f} s"),
            ("  idle, rank 0", f"{1e3 * large['idle']:.0f} ms of CPU per second"),
            ("  a report", f"{large['report']:.2f} s; {large['report_cpu']:.2f} s of rank 0's CPU"),
            ("  all tell that they wait", f"{large['waits_cpu']:.2f} s of rank 0's CPU"),
        ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{size} ranks on {nodes} nodes of {per_node}", *(f"  {name:{width}}  {text}" for name, text in rows)]
    texts = [figures.report_text, figures.stopped_text]
    for name, (printed, ended) in figures.ends.items():
        statuses = collections.Counter(status for _, status in ended)
        texts.append(f"{name} killed; {dict(statuses)} by status ended, rank {ended[0][0]} first")
        texts += [f"rank {rank} prints: {text}" for rank, text in printed]
    return "\n".join([*lines, "", *texts]) + "\n"


def main(arguments: list[str], write: Callable[[str], Any]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", type=int)
    parser.add_argument("--per-node", type=int, default=10)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds to look at idle ranks")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    figures = measure(chosen.size, chosen.per_node, chosen.idle)
    if not chosen.json:
        figures.large = measure_rank_0(TARGET_RANKS, TARGET_RANKS // TARGET_NODES, chosen.idle)
    write(json.dumps(dataclasses.asdict(figures)) if chosen.json else show(figures))


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdout.write)
