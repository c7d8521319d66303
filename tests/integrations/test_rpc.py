"""torch.distributed.rpc on our ranks; tests/examples runs the parameter server with it."""

from __future__ import annotations

import re

import pytest

from mpicomm.integrations.rpc import workers
from tests.launching import run_ranks

PACKAGES = ("torch",)

# Each rank asks every rank for its RANK, and leaves a tensor on the last one.
CALLS = """
import os, torch, mpicomm
from torch.distributed import rpc
from mpicomm.integrations.rpc import workers
world = mpicomm.bootstrap()
with workers(world, options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=4)) as names:
    assert names == [f"rank{rank}" for rank in range(world.size)]
    ranks = [rpc.rpc_sync(name, os.getenv, ("RANK",)) for name in names]
    assert ranks == [str(rank) for rank in range(world.size)]
    reference = rpc.remote(names[-1], torch.full, ((3,), world.rank))
    assert reference.owner_name() == names[-1]
    assert reference.to_here().sum() == 3 * world.rank
assert "TP_SOCKET_IFNAME" not in os.environ
assert mpicomm.all_reduce(1) == world.size  # the job's own group is not affected
if world.rank == 0:
    print("passed")
"""

# Calls work in every block; a nested block is an error that leaves the outer one intact; the reference of the third
# block is not deleted.
BLOCKS = """
import os, torch, mpicomm
from torch.distributed import rpc
from mpicomm.integrations.rpc import workers
world = mpicomm.bootstrap()
options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=5)  # shutdown() waits as long
neighbour = (world.rank + 1) % world.size
for block in range(2):
    with workers(world, options=options) as names:
        try:
            with workers(world):
                raise AssertionError("a nested block has begun")
        except mpicomm.MpicommError as error:
            assert f"got one with the agent 'rank{world.rank}'" in str(error), error
        assert rpc.rpc_sync(names[neighbour], os.getenv, ("RANK",)) == str(neighbour)
print("called", flush=True)
with workers(world, options=options) as names:
    if world.rank == 0:
        rpc.remote(names[1], torch.full, ((3,), 1.0)).to_here()
"""

RAISES = """
import mpicomm
from mpicomm.integrations.rpc import workers
world = mpicomm.bootstrap()
with workers(world):
    if world.rank == 1:
        raise ValueError("in the block")
"""


def test_the_argument_must_be_a_world() -> None:
    with pytest.raises(TypeError, match=r"world must be a World, from bootstrap\(\), got None"), workers(None):
        pass


def test_every_rank_calls_every_rank_without_a_warning() -> None:
    outcome = run_ranks(4, CALLS)
    assert outcome.status == 0, outcome
    assert outcome.stdout == "passed\n", outcome
    assert "Warning" not in outcome.stderr, outcome


def test_an_exception_in_the_block_ends_the_job() -> None:
    outcome = run_ranks(2, RAISES)
    assert outcome.status != 0, outcome
    assert outcome.stderr.count("ValueError: in the block") == 1, outcome


def test_blocks_after_the_first_and_within_it() -> None:
    outcome = run_ranks(2, BLOCKS)
    assert outcome.status != 0, outcome
    assert outcome.stdout == "called\n" * 2, outcome
    assert re.search(r"MpicommError: rpc\.shutdown\(\) timed out at the end of block 3 of rpc", outcome.stderr), outcome
    assert "create remote references only in the first block" in outcome.stderr, outcome
