"""Under torchrun, the variables of torchrun define the world, and MPI is not used."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launching import Outcome, run_command

SIZE = 2
SLURM = {  # as if srun started one torchrun per node
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}


def torchrun(script: Path, text: str, env: Mapping[str, str] | None = None) -> Outcome:
    script.write_text(text)
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {SIZE} {script}"
    return run_command(shlex.split(command), env=env)


def test_the_world_is_that_of_torchrun_also_under_srun(tmp_path: Path) -> None:
    text = """
import sys
import torch
import torch.distributed as dist
import mpicomm
world = mpicomm.bootstrap()
mine = torch.tensor([world.rank])
dist.all_reduce(mine)
mpicomm.barrier()
mpicomm.barrier(timeout=20)
loaded = sys.modules.get("mpi4py.MPI")
sys.stdout.write(f"{world.rank} of {world.size}, local {world.local_rank} of {world.local_size}, "
                 f"node {world.node_rank} of {world.num_nodes}, {world.backend}, {world.launcher}, "
                 f"{world.comm}, {mine.item()}, {loaded}\\n")
"""
    outcome = torchrun(tmp_path / "script.py", text, SLURM)
    assert outcome.status == 0, outcome
    total = SIZE * (SIZE - 1) // 2
    assert sorted(outcome.stdout.splitlines()) == [
        f"{rank} of {SIZE}, local {rank} of {SIZE}, node 0 of 1, gloo, torchrun, None, {total}, None"
        for rank in range(SIZE)
    ], outcome


@pytest.mark.parametrize(
    ("call", "argument", "launcher"),
    [
        ("bootstrap('mpi')", "backend='mpi'", "mpirun"),
        ("bootstrap(comm=MPI.COMM_WORLD)", "comm=", "mpirun"),
        ("bootstrap(on_failure='recover')", "on_failure='recover'", "mpicomm run --fault-tolerant"),
    ],
)
def test_an_argument_that_needs_mpi_is_an_error(tmp_path: Path, call: str, argument: str, launcher: str) -> None:
    setup = "from mpi4py import MPI" if "MPI." in call else ""
    outcome = torchrun(tmp_path / "script.py", f"import mpicomm\n{setup}\nmpicomm.{call}\n")
    assert outcome.status != 0, outcome
    assert outcome.stderr.count(f"mpicomm.LaunchError: {argument} needs MPI, but") == 1, outcome
    assert re.search(rf"^  {launcher} -n {SIZE} python .*{tmp_path / 'script.py'}$", outcome.stderr, re.MULTILINE), (
        outcome
    )
