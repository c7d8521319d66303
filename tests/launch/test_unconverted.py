"""Programs that do not use mpicomm, under `mpicomm run`: they form one job, as under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launching import Outcome, run_command

RANKS = 3
REDUCE = """
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():.0f}", flush=True)
dist.destroy_process_group()
"""
RANK_WITH_A_FALLBACK = """
import os
import torch
import torch.distributed as dist
if int(os.environ.get("RANK", -1)) == -1:
    raise SystemExit("trains alone")
dist.init_process_group("gloo")
"""
LOCAL_RANK_FIRST = """
import os
LOCAL_RANK, WORLD_SIZE = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="env://", rank=int(os.environ["RANK"]), world_size=WORLD_SIZE)
assert LOCAL_RANK == dist.get_rank()
"""
A_MESH = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
"""
OWN_ADDRESS = """
import os, sys
import torch
import torch.distributed as dist
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
dist.init_process_group("gloo")
"""
TWICE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("gloo")
"""
CONVERTED_AFTER_A_READ = """
import os
RANK = int(os.environ["RANK"])
import torch
import torch.distributed as dist
import mpicomm
world = mpicomm.bootstrap()
assert RANK == world.rank
assert os.environ["MASTER_PORT"] == str(world.master_port)
"""


def run(*words: str) -> Outcome:
    return run_command([sys.executable, "-m", "mpicomm", "run", "-n", str(RANKS), *words])


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    "code",
    [RANK_WITH_A_FALLBACK, LOCAL_RANK_FIRST, A_MESH, TWICE, CONVERTED_AFTER_A_READ],
    ids=["RANK with a fallback", "LOCAL_RANK first", "mesh", "twice", "bootstrap"],
)
def test_an_unchanged_program_is_one_job(code: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(code + REDUCE)
    outcome = run(str(program))
    assert outcome.status == 0, outcome
    total = RANKS * (RANKS + 1) // 2
    lines = {f"rank {rank} of {RANKS}: {total}" for rank in range(RANKS)}
    assert lines <= set(outcome.stdout.splitlines()), outcome
    assert "has run alone" not in outcome.stderr, outcome


def test_a_program_that_connects_nothing_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('trained')\n")
    outcome = run(str(program))
    assert outcome.status == 0, outcome
    assert "connected by torch.distributed's init_process_group()" in outcome.stderr, outcome
