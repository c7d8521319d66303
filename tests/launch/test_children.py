"""Child processes of a rank: DataLoader workers live and fail as they do without MPI, and cannot bootstrap."""

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


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index * index


class Broken(Squares):
    def __getitem__(self, index):
        raise ValueError(f"no item {index}")


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
    context = multiprocessing.get_context(how)
    queue = context.Queue()
    child = context.Process(target=try_bootstrap, args=(queue,))
    child.start()
    say("child", queue.get(timeout=30).splitlines()[0])
    child.join()
    torch.distributed.barrier()
    say("end", world.size)


def fail_in_a_fork():
    child = os.fork()
    if child == 0:
        raise KeyError("of the child alone")
    say("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
"""
SIZE = 2
SQUARES = sum(index * index for index in range(8))


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_children_of_a_rank(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    outcome = run_ranks(SIZE, [str(script), how], timeout=90)
    assert outcome.status == 0, outcome
    said = outcome.stdout.split("\n")[:-1]
    assert said.count(f"sum {SQUARES}") == SIZE, outcome
    assert said.count("caught True") == SIZE, outcome
    assert said.count(f"end {SIZE}") == SIZE, outcome
    refused = [line for line in said if line.startswith("child refused: bootstrap() was called in a child process")]
    assert len(refused) == SIZE, outcome
    if how == "fork":
        assert said.count("status 1") == SIZE, outcome
        assert outcome.stderr.count("KeyError: 'of the child alone'") == SIZE, outcome
        assert "ends the job" not in outcome.stderr, outcome
    else:
        assert outcome.stderr == "", outcome
