"""Programs that do not call `bootstrap()`, unchanged: under `mpicomm run` they form one job, as under torchrun."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from mpicomm import torch_compatibility
from tests.launching import Outcome, run_command, run_ranks

RANKS = 3
SUM = RANKS * (RANKS + 1) // 2
START = """
import datetime, os, sys
sys.modules["tensorflow"] = None
LOCAL_RANK, WORLD_SIZE = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
if int(os.environ.get("RANK", -1)) == -1:
    raise SystemExit("trains alone")
import torch
import torch.distributed as dist
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh

def check(start):
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    print(f"{start}: {dist.get_backend()} of {dist.get_world_size()}: {total.item():.0f}", flush=True)
"""
SCHEMES = """
dist.init_process_group("gloo")
check("environment")
dist.destroy_process_group()
os.environ["MASTER_ADDR"] = "localhost"
init_process_group("gloo", "env://", None, WORLD_SIZE, int(os.environ["RANK"]))
check("arguments")
assert dist.distributed_c10d._get_default_store().timeout == datetime.timedelta(minutes=30)
assert LOCAL_RANK == dist.get_rank()
dist.destroy_process_group()
"""
A_MESH = """
size = init_device_mesh("cpu", (WORLD_SIZE,)).size()
check("mesh")
assert size == WORLD_SIZE
dist.destroy_process_group()
"""
OWN_ADDRESS = """
PORT = os.environ["MASTER_PORT"]
os.environ["MASTER_PORT"] = sys.argv[1]
dist.init_process_group("gloo")
check("own port")
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=LOCAL_RANK, world_size=WORLD_SIZE)
check("own method")
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"tcp://localhost:{PORT}?rank={LOCAL_RANK}&world_size={WORLD_SIZE}")
check("the same port")
dist.destroy_process_group()
"""
A_CHILD = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank):
    dist.init_process_group("gloo")
    dist.barrier()
    print(f"child of {os.environ['RANK']}: {dist.get_rank()} of {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
"""
SPAWN = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)

if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
"""
CONVERTED_AFTER_A_READ = """
import os
RANK = int(os.environ["RANK"])
import torch.distributed as dist
import mpicomm
world = mpicomm.bootstrap()
assert RANK == world.rank
assert os.environ["MASTER_PORT"] == str(world.master_port)
dist.init_process_group("gloo")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


def run(*words: str | Path) -> Outcome:
    return run_command([sys.executable, "-m", "mpicomm", "run", "-n", str(RANKS), *map(str, words)])


@pytest.mark.each_mpi
def test_an_unchanged_program_is_one_job(program: Path) -> None:
    program.write_text(START + SCHEMES + A_MESH)
    outcome = run(program)
    assert outcome.status == 0, outcome
    expected = [f"{start}: gloo of {RANKS}: {SUM}" for start in ("environment", "arguments")]
    expected.append(f"mesh: undefined of {RANKS}: {SUM}")
    assert sorted(outcome.stdout.splitlines()) == sorted(expected * RANKS), outcome
    assert "ignoring" not in outcome.stderr, "rank 0 has tried to start the store"
    assert "has run alone" not in outcome.stderr, outcome


@pytest.mark.each_mpi
def test_another_backend_replaces_that_of_the_program(program: Path) -> None:
    program.write_text(START + SCHEMES + A_MESH)
    outcome = run("--backend", "mpi", program)
    assert outcome.status == 0, outcome
    expected = [f"{start}: mpicomm of {RANKS}: {SUM}" for start in ("environment", "arguments", "mesh")]
    assert sorted(outcome.stdout.splitlines()) == sorted(expected * RANKS), outcome


def test_an_address_of_the_program(program: Path) -> None:
    program.write_text(START + OWN_ADDRESS)
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = [str(listener.getsockname()[1]) for listener in (first, second)]
    outcome = run(program, *ports)
    assert outcome.status == 0, outcome
    expected = [f"{start}: gloo of {RANKS}: {SUM}" for start in ("own port", "own method", "the same port")]
    assert sorted(outcome.stdout.splitlines()) == sorted(expected * RANKS), outcome


def test_a_child_takes_the_place_of_its_rank(program: Path) -> None:
    program.write_text(A_CHILD)
    outcome = run(program)
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.splitlines()) == [f"child of {rank}: {rank} of {RANKS}" for rank in range(RANKS)]


def test_ranks_that_the_program_spawns_are_refused(program: Path) -> None:
    program.write_text(SPAWN)
    outcome = run(program)
    assert outcome.status != 0, outcome
    assert "has started by multiprocessing. Each rank would start such processes" in outcome.stderr, outcome


def test_the_group_of_a_converted_program_is_left_in(program: Path) -> None:
    program.write_text(CONVERTED_AFTER_A_READ)
    outcome = run(program)
    assert outcome.status != 0, outcome
    assert "failed; aborting the job:\nTraceback" in outcome.stderr, outcome
    assert "use mpicomm.bootstrap(backend=None)" in outcome.stderr, outcome


def test_a_program_that_connects_nothing_is_reported(program: Path) -> None:
    """Its output is not a terminal, also where Open MPI gives the ranks one: they are told to print no colours."""
    program.write_text("import os, sys\nprint('colours', sys.stdout.isatty() and 'NO_COLOR' not in os.environ)\n")
    outcome = run(program)
    assert outcome.status == 0, outcome
    assert outcome.stdout.splitlines() == ["colours False"] * RANKS, outcome
    assert "or init_process_group() with the address that `mpicomm run` sets" in outcome.stderr, outcome


@pytest.mark.each_mpi
def test_mpirun_sets_no_variables(program: Path) -> None:
    program.write_text("import torch\n" + START)
    outcome = run_ranks(RANKS, [str(program)])
    assert outcome.status != 0, outcome
    assert "does not set LOCAL_RANK" in outcome.stderr, outcome
    assert f"mpicomm run -n {RANKS} {program}" in outcome.stderr, outcome


def test_the_backend_named_mpi(program: Path) -> None:
    program.write_text('import torch\nimport torch.distributed as dist\ndist.init_process_group("mpi")\n')
    outcome = run(program)
    if torch_compatibility.torch_version() >= (2, 14):
        assert outcome.status == 0, outcome
    else:
        assert outcome.status != 0, outcome
        assert 'init_process_group("mpicomm")' in outcome.stderr, outcome
