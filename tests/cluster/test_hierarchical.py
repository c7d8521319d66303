"""The hierarchical all-reduce of large tensors: through the node's memory within each node, by MPI between nodes."""

from __future__ import annotations

import json

import pytest

from tests.cluster.running import Cluster, Flavour

NODES = ["-N2", "--ntasks-per-node=2", "--nodelist=node3,node4"]

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import mpicomm
from tests import reduction_guarantees

world, count = mpicomm.bootstrap(), int(sys.argv[1])
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    tensor = torch.arange(count).remainder_(7).to(dtype).mul_(world.rank + 1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(count).remainder_(7).mul_(sum(range(1, world.size + 1))).to(dtype)), dtype
path = dist.group.WORLD._executor.algorithms
reduction_guarantees.check([3, count + 5])
print(world.rank, path.hierarchical is not None, flush=True)
"""
LARGE, SMALL = 2**22, 2**14  # elements: enough for two levels, also in bf16; enough to open shared memory
CASES = {  # the options of srun, MPICOMM_NATIVE, whether the all-reduce is hierarchical
    "consecutive": ([*NODES, "--distribution=block"], "1", True),
    "cyclic": ([*NODES, "--distribution=cyclic"], "1", True),
    "unequal": (["-N2", "-n3", "--nodelist=node3,node4"], "1", False),
    "without the library": (NODES, "0", False),
}


@pytest.mark.parametrize("case", CASES)
def test_two_levels(cluster: Cluster, flavour: Flavour, case: str) -> None:
    options, native, is_hierarchical = CASES[case]
    variables = f"--export=ALL,MPICOMM_NATIVE={native}"
    # Open MPI alone takes seconds for each large tensor between the hosts.
    python = [flavour.python, "-c", PROGRAM, str(LARGE if is_hierarchical else SMALL)]
    outcome = cluster.run("srun", *options, f"--mpi={flavour.srun_type}", variables, *python)
    assert outcome.status == 0, outcome
    ranks = range(3 if case == "unequal" else 4)
    assert sorted(outcome.stdout.splitlines()) == [f"{rank} {is_hierarchical}" for rank in ranks], outcome


def test_nothing_is_wrong(cluster: Cluster, flavour: Flavour) -> None:
    results = cluster.folder() / "results.json"
    bench = [flavour.python, "-m", "mpicomm", "bench", "--op=all", "--backend=mpi", "--size=4,64Ki", "--rounds=1"]
    options = ["--dtype=float32,bfloat16", f"--json={results}"]
    outcome = cluster.run("srun", *NODES, f"--mpi={flavour.srun_type}", *bench, *options)
    assert outcome.status == 0, outcome
    rows = json.loads(results.read_text())["rows"]
    assert {row["operation"] for row in rows} >= {"all_reduce", "reduce_scatter", "all_gather"}
    assert [row for row in rows if row["wrong"]] == []
