"""Hierarchical operations on large tensors: through the node's memory within each node, by MPI between nodes."""

from __future__ import annotations

import json

from tests.cluster.running import Cluster, Flavour

NODES = ["-N2", "--ntasks-per-node=2", "--nodelist=node3,node4"]

PROGRAM = """
import torch
import torch.distributed as dist
import mpicomm

world = mpicomm.bootstrap()
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    tensor = torch.arange(2**22).remainder_(7).to(dtype).mul_(world.rank + 1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(2**22).remainder_(7).mul_(10).to(dtype)), dtype
path = dist.group.WORLD._operations.node
print(world.rank, path._hierarchical is not None, flush=True)
"""


def test_two_levels(cluster: Cluster, flavour: Flavour) -> None:
    outcome = cluster.run("srun", *NODES, f"--mpi={flavour.srun_type}", flavour.python, "-c", PROGRAM)
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.splitlines()) == [f"{rank} True" for rank in range(4)], outcome


def test_nothing_is_wrong(cluster: Cluster, flavour: Flavour) -> None:
    found = cluster.folder() / "found.json"
    what = ["--op=all", "--backend=mpi", "--size=4,8Mi", "--dtype=float32,bfloat16", "--rounds=1"]
    bench = [flavour.python, "-m", "mpicomm", "bench", *what, f"--json={found}"]
    outcome = cluster.run("srun", *NODES, f"--mpi={flavour.srun_type}", *bench, timeout=900)
    assert outcome.status == 0, outcome
    rows = json.loads(found.read_text())["rows"]
    assert {row["operation"] for row in rows} >= {"all_reduce", "reduce_scatter", "all_gather"}
    assert [row for row in rows if row["wrong"]] == []
