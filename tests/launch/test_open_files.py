"""The number of ranks that the limit of open files allows: a thousand on one node with the usual limit."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import resource
import signal
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.launching import run_alone, run_ranks

SIZE, USUAL_LIMIT = 1000, 1024
HOST = "127.0.0.1"
LIMIT = datetime.timedelta(seconds=30)
_PR_SET_PDEATHSIG = 1


class Alone:
    """The communicator of rank 0, with simulated other ranks."""

    rank, size = 0, SIZE

    def bcast(self, given: object) -> object:
        return given


def be_rank_0() -> None:
    """Open the store and the out-of-band channel of a thousand ranks, and print how many have connected to each."""
    from mpicomm import topology
    from mpicomm.job import rendezvous
    from mpicomm.watchdog.channel import Channel
    from tests.launch.many_watchdogs import Job

    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    job = Job(SIZE, SIZE, Path(), bytes(32), 2, {})
    ports, writing = os.pipe()
    if os.fork() == 0:
        be_the_others(job, ports)
    alone: Any = Alone()
    where = topology.from_nodes(0, ["node"] * SIZE, ["host"] * SIZE)
    listeners = rendezvous.listen(where, {}, None)
    places = [listener.getsockname()[:2] for listener in listeners]
    store, _, port_of_store = rendezvous.open_store(alone, where, listeners, places, b"", LIMIT)
    channel = Channel(0, job.token)
    port = channel.listen(HOST, job.children(0))
    os.write(writing, f"{port_of_store} {port}".encode())
    while not store.add("connected", 0):
        channel.poll(0.1)
    print(json.dumps([store.add("connected", 0), len(channel.children)]), flush=True)
    os._exit(0)


def be_the_others(job: Any, ports: int) -> NoReturn:
    """Connect to rank 0 in place of all other ranks."""
    import torch.distributed as dist

    from tests.launch.many_watchdogs import Children

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    port_of_store, port = map(int, os.read(ports, 100).split())
    others = Children(job)
    others.connect(port)
    # torch's TCPStore makes a DNS query for each connection, too many for one process: only the last connection is a
    # TCPStore. The server answers it after it has accepted the previous connections.
    sockets = [socket.create_connection((HOST, port_of_store)) for _ in range(2, SIZE)]
    store = dist.TCPStore(HOST, port_of_store, wait_for_workers=False, timeout=LIMIT)
    store.add("connected", len(sockets) + 1)
    others.run()


def test_a_thousand_ranks_connect_under_the_usual_limit() -> None:
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4 * SIZE:
        pytest.skip(f"the hard limit of open files is below {4 * SIZE}")
    outcome = run_alone("from tests.launch import test_open_files as files; files.be_rank_0()")
    assert outcome.status == 0, outcome
    assert json.loads(outcome.stdout) == [SIZE - 1, SIZE - 1], outcome


# A connection within this host has two entries, of which one has the store's port as its local port.
CONNECTIONS = """
from pathlib import Path
import mpicomm
world = mpicomm.bootstrap("mpi")
world.comm.Barrier()
rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
own = f":{world.master_port:04X}"
if world.rank == 0:
    print(sum(row[1].endswith(own) and row[3] == "01" for row in rows), flush=True)
world.comm.Barrier()
"""


def test_each_rank_has_one_connection_to_the_store() -> None:
    outcome = run_ranks(3, CONNECTIONS)
    assert outcome.status == 0, outcome
    assert outcome.stdout == "3\n", outcome


TOO_MANY = """
import os, resource
from pathlib import Path
from mpicomm.errors import LaunchError
from mpicomm import open_files, topology
nodes = [str(rank // 50) for rank in range(200)]
where = topology.from_nodes(0, nodes, nodes)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
try:
    open_files.require_on_rank_0(where)
except LaunchError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_a_limit_that_is_too_low_is_an_error_that_names_the_ranks_that_fit() -> None:
    outcome = run_alone(TOO_MANY)
    first, second, soft = outcome.stdout.splitlines()
    assert first.startswith("200 ranks need 254 connections to rank 0 on "), outcome
    assert first.endswith("more files: its hard limit is 128."), outcome
    fit = int(second.partition(" ranks fit")[0].split()[-1])
    assert second.startswith(
        f"With this number of ranks per node, {fit} ranks fit. Start fewer, or raise the hard limit"
    ), outcome
    assert 40 < fit < 80, outcome
    assert soft == "128", outcome
