"""Child processes of a rank: DataLoader workers run and fail as without MPI, and cannot call `bootstrap()`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_ranks

SCRIPT = """
import multiprocessing
import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset

import mpicomm
from tests.time_limits import scaled


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index * index


class Broken(Squares):
    def __getitem__(self, index):
        raise ValueError(f"no item {index}")


class Reducing(Squares):
    def __getitem__(self, index):
        torch.distributed.all_reduce(torch.full((1,), 1000.0))
        return index


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()


def try_bootstrap(queue):
    try:
        queue.put(f"got {mpicomm.bootstrap()}")
    except mpicomm.MpicommError as error:
        queue.put(f"refused: {error}")


def main(how):
    world = mpicomm.bootstrap()
    if how == "fork":
        fail_in_a_fork()
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=how)
    say("sum", sum(int(batch.sum()) for batch in loader))
    try:
        list(DataLoader(Broken(), num_workers=1, multiprocessing_context=how))
    except ValueError as error:
        say("caught", "no item 0" in str(error))
    try:
        list(DataLoader(Reducing(), num_workers=1, multiprocessing_context=how))
    except (RuntimeError, ValueError) as error:  # torch knows no process group in a child that is spawned
        say("refused", "a forked child cannot call operations" in str(error) or how == "spawn")
    context = multiprocessing.get_context(how)
    queue = context.Queue()
    child = context.Process(target=try_bootstrap, args=(queue,))
    child.start()
    say("child", queue.get(timeout=scaled(60)).splitlines()[0])
    child.join()
    tensor = torch.ones(1)
    torch.distributed.all_reduce(tensor)
    say("reduced", int(tensor))
    say("end", world.size)


def fail_in_a_fork():
    child = os.fork()
    if child == 0:
        raise KeyError("of the child alone")
    refused = []
    queued = torch.distributed.all_reduce(torch.ones(1), async_op=True)
    message = torch.distributed.irecv(torch.ones(1), tag=5)
    plain = torch.distributed.irecv(torch.ones(1), 1 - torch.distributed.get_rank(), tag=6)
    reading, writing = os.pipe()
    if os.fork() == 0:
        for call in (
            queued.wait,
            message.wait,
            message.is_completed,
            plain.wait,
            plain.is_completed,
            torch.distributed.new_group,
            lambda: torch.distributed.all_reduce(torch.ones(1), async_op=True),
            lambda: torch.distributed.isend(torch.ones(1), 0),
            lambda: mpicomm.all_reduce(1),
            mpicomm.barrier,
        ):
            try:
                call()
            except mpicomm.MpicommError as error:
                refused.append(str(error).split(", ")[0])
        os.write(writing, str(len(refused)).encode())
        os._exit(0)
    say("refused in a fork", os.read(reading, 10).decode())
    queued.wait()
    torch.distributed.send(torch.ones(1), 1 - torch.distributed.get_rank(), tag=5)
    torch.distributed.send(torch.ones(1), 1 - torch.distributed.get_rank(), tag=6)
    message.wait()
    plain.wait()
    say("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
"""
STARTING = """
import itertools, os, subprocess, sys
import mpicomm
world = mpicomm.bootstrap()
programs = [
    "import mpicomm; print('size', mpicomm.bootstrap().size)",
    "from mpi4py import MPI; print('size', MPI.COMM_WORLD.size)",
]
if world.rank == 0:
    # Without close_fds, a child has the descriptors of its parent, as with os.system().
    for launcher, program, closes in itertools.product(({}, {"MPICOMM_LAUNCHER": "single"}), programs, (True, False)):
        environ = {**os.environ, **launcher}
        child = subprocess.run([sys.executable, "-c", program], env=environ, close_fds=closes, capture_output=True)
        sys.stdout.write(f"status {child.returncode}: {child.stdout.decode() + child.stderr.decode()}")
mpicomm.barrier()
"""
SIZE = 2
SQUARES = sum(index * index for index in range(8))


@pytest.mark.parametrize("how", [pytest.param("fork", marks=pytest.mark.each_mpi), "spawn"])
def test_children_of_a_rank(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    outcome = run_ranks(SIZE, [str(script), how])
    assert outcome.status == 0, outcome
    printed = outcome.stdout.split("\n")[:-1]
    assert printed.count(f"sum {SQUARES}") == SIZE, outcome
    assert printed.count("caught True") == SIZE, outcome
    assert printed.count(f"end {SIZE}") == SIZE, outcome
    refused = [line for line in printed if line.startswith("child refused: MPI cannot be used in a child process")]
    assert len(refused) == SIZE, outcome
    assert printed.count(f"reduced {SIZE}") == SIZE, outcome
    assert printed.count("refused True") == SIZE, outcome
    if how == "fork":
        assert printed.count("refused in a fork 10") == SIZE, outcome
        assert printed.count("status 1") == SIZE, outcome
        assert outcome.stderr.count("KeyError: 'of the child alone'") == SIZE, outcome
        assert "aborting the job" not in outcome.stderr, outcome
    else:
        assert outcome.stderr == "", outcome


@pytest.mark.each_mpi
def test_a_program_that_a_rank_starts() -> None:
    """It would wait for the other ranks, or with MPICH for the launcher."""
    outcome = run_ranks(SIZE, STARTING)
    ends = outcome.stdout.split("status ")[1:]
    for message in ends[:2]:
        assert message.startswith("1: mpicomm.LaunchError: a rank has started this process: PMI"), outcome
        assert message.splitlines()[-1].endswith("set MPICOMM_LAUNCHER=single in its environment."), outcome
    assert [each.strip() for each in ends[2:]] == ["0: size 1"] * 6, outcome
