"""Tensors through the memory of a node: a rank fails during an operation, or /dev/shm is small."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from mpicomm.job import mpi_job
from tests import nodes
from tests.failures import ways
from tests.launching import run_command, run_ranks

IN_SLOTS = "tensor = torch.ones(2**14)\nfor _ in range(3):\n    all_reduce()"
FOREVER = "while True:\n    all_reduce()"
NEVER = ways.Way(
    "a rank that never arrives",
    "time.sleep(600)",
    ways.DEADLINE,
    r"timed out after \d+ s in all_reduce #4[\s\S]*?\n  rank {rank} +not in an operation; at <string>",
)


@pytest.mark.each_mpi
@pytest.mark.parametrize("way", [ways.BY_NAME["SIGKILL"], NEVER], ids=lambda way: way.name)
def test_a_rank_that_does_not_arrive_in_slots(way: ways.Way) -> None:
    """Without the C library, the ranks wait in MPI."""
    nodes.require("slots")
    result = ways.run(dataclasses.replace(way, others=FOREVER), before=IN_SLOTS)
    assert not result.problems, f"{result}: {result.problems}\n{result.stderr}"


LARGE = """
import torch
import torch.distributed as dist
import mpicomm
from tests import nodes

world = mpicomm.bootstrap()
tensor = torch.ones(2**24)
dist.all_reduce(tensor)
assert bool((tensor == world.size).all())
assert (dist.group.WORLD._executor.algorithms.slots is not None) == nodes.has_library()
"""


@pytest.mark.each_mpi
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make /dev/shm small")
def test_a_dev_shm_of_64_mb_is_enough() -> None:
    launcher = Path(sys.executable).parent / "mpiexec"
    script = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(launcher), "-n", "2", sys.executable, "-c", LARGE]
    outcome = run_command(command)
    if "unshare failed" in outcome.stderr:
        pytest.skip("mounts of one's own are not allowed here")
    assert outcome.status == 0, outcome


LACKING = """
import os
from mpicomm.native import c_library

if (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")) == "1":
    c_library.load = lambda: None
import torch
import torch.distributed as dist
import mpicomm

world = mpicomm.bootstrap("mpi")
tensor = torch.ones(2**14)
dist.all_reduce(tensor)
assert bool((tensor == world.size).all())
assert dist.group.WORLD._executor.algorithms.slots is None
"""


@pytest.mark.skipif(not nodes.has_library(), reason="the C library was not built")
def test_a_library_that_is_missing_on_one_rank() -> None:
    outcome = run_ranks(2, ["-c", LACKING])
    assert outcome.status == 0, outcome
    assert outcome.stderr.count("rank 1: the C library of mpicomm was not built") == 1, outcome
    assert outcome.stderr.count("Install a C compiler") == 1, outcome
    assert "the C library" not in run_ranks(2, ["-c", LACKING], env={"MPICOMM_NATIVE": "0"}).stderr


@pytest.mark.parametrize(
    ("backend", "nodes_of_ranks", "warns"), [("mpi", [0, 0], 1), ("gloo", [0, 0], 0), ("mpi", [0, 1], 0)]
)
def test_a_missing_library_matters_to_ranks_of_one_node_that_use_mpi(
    backend: str, nodes_of_ranks: list[int], warns: int
) -> None:
    facts = [
        mpi_job._Facts("host", node, {}, {}, {}, False, "", None, lacks_gpu_buffers=False, lacks_library=True)
        for node in nodes_of_ranks
    ]
    assert len(mpi_job._warnings(facts, backend)) == warns


PROGRESS = """
import time
import torch
import torch.distributed as dist
import mpicomm
from mpicomm import mpi

world = mpicomm.bootstrap()
tensor, message, request = torch.ones(2**14), bytearray(2**22), None
dist.all_reduce(tensor)
if world.rank == 1:
    dist.send(torch.ones(2), 0)  # received after the all_reduce
dist.barrier()
if world.rank == 0:
    request = mpi.job_comm().Isend(message, 1, 5)
else:
    time.sleep(0.05)
    mpi.job_comm().Recv(message, 0, 5)
dist.all_reduce(tensor)
if request is not None:
    request.Wait()
    dist.recv(torch.ones(2), 1)
"""


@pytest.mark.skipif(not nodes.has_library(), reason="the C library was not built")
def test_mpi_progresses_while_a_rank_waits_in_slots_although_a_message_is_pending() -> None:
    """Over TCP, the sender has to send the message in parts."""
    outcome = run_ranks(2, ["-c", PROGRESS], env={"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp"})
    assert outcome.status == 0, outcome


OTHER_SIZE = """
import torch
import torch.distributed as dist
import mpicomm

world = mpicomm.bootstrap()
dist.all_reduce(torch.ones(1))  # finds that the ranks share no memory
try:
    dist.broadcast(torch.ones(2 if world.rank else 1000), 0)
except RuntimeError as error:
    print(error)
"""


def test_an_error_of_mpi_in_a_call_without_shared_memory() -> None:
    outcome = run_ranks(2, OTHER_SIZE, env={"MPICOMM_SHARED_MEMORY": "0"})
    assert "broadcast #2, root rank 0, float32[2] failed: another rank sent more data than this rank" in outcome.stdout
