"""The hierarchical all-reduce of large tensors: through the node's memory within each node, by MPI between nodes."""

from __future__ import annotations

import json

import pytest

from tests.cluster.running import Cluster, Flavour

NODES = ["-N2", "--ntasks-per-node=2", "--nodelist=node3,node4"]

PROGRAM = """
import torch
import torch.distributed as dist
import mpicomm
from tests import reduction_guarantees

world = mpicomm.bootstrap()
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    tensor = torch.arange(2**22).remainder_(7).to(dtype).mul_(world.rank + 1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(2**22).remainder_(7).mul_(sum(range(1, world.size + 1))).to(dtype)), dtype
path = dist.group.WORLD._executor.node
reduction_guarantees.check([3, 2**22 + 5])  # the second is large enough for two levels, also in bf16
print(world.rank, path.hierarchical is not None, flush=True)
"""
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
    outcome = cluster.run("srun", *options, f"--mpi={flavour.srun_type}", variables, flavour.python, "-c", PROGRAM)
    assert outcome.status == 0, outcome
    ranks = range(3 if case == "unequal" else 4)
    assert sorted(outcome.stdout.splitlines()) == [f"{rank} {is_hierarchical}" for rank in ranks], outcome


def test_nothing_is_wrong(cluster: Cluster, flavour: Flavour) -> None:
    found = cluster.folder() / "found.json"
    what = ["--op=all", "--backend=mpi", "--size=4,8Mi", "--dtype=float32,bfloat16", "--rounds=1"]
    bench = [flavour.python, "-m", "mpicomm", "bench", *what, f"--json={found}"]
    outcome = cluster.run("srun", *NODES, f"--mpi={flavour.srun_type}", *bench, timeout=900)
    assert outcome.status == 0, outcome
    rows = json.loads(found.read_text())["rows"]
    assert {row["operation"] for row in rows} >= {"all_reduce", "reduce_scatter", "all_gather"}
    assert [row for row in rows if row["wrong"]] == []
