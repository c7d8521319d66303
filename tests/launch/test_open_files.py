"""The limit of open files: rank 0 raises it for the connections of the job, or reports the ranks that fit."""

from __future__ import annotations

from tests.launching import run_alone, run_ranks

# A connection within this host has two entries, of which one has the store's port as its local port.
CONNECTIONS = """
import resource
from pathlib import Path
import mpicomm
from mpicomm import mpi, open_files
mpi.api()
LOW = open_files.count_open() + 50
resource.setrlimit(resource.RLIMIT_NOFILE, (LOW, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
world = mpicomm.bootstrap("mpi")
world.comm.Barrier()
rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
own = f":{world.master_port:04X}"
if world.rank == 0:
    is_raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0] > LOW
    print(sum(row[1].endswith(own) and row[3] == "01" for row in rows), is_raised, flush=True)
world.comm.Barrier()
"""


def test_each_rank_has_one_connection_to_the_store() -> None:
    """And the limit of rank 0 is raised for them."""
    outcome = run_ranks(3, CONNECTIONS)
    assert outcome.status == 0, outcome
    assert outcome.stdout == "3 True\n", outcome


TOO_MANY = """
import resource
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
