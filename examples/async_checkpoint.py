"""Checkpoints that are written beside training, with `torch.distributed.checkpoint.async_save` over MPI.

`async_save` copies the state (stage), and a thread of its own writes the copy (drain), so that training may change the
parameters as soon as it returns. The thread calls collectives, and two threads have no common order of operations on
all ranks: the saves have a process group of their own, which uses MPI also where training uses NCCL. This takes the
thread level MPI_THREAD_MULTIPLE (`mpicomm doctor`); elsewhere use backend="gloo". `start` waits for the previous save,
so that there is one copy at a time, and a save that fails raises its error in the training loop, on every rank.

A directory without `.metadata` is incomplete. A complete one is not replaced: remove runs/async to start again.
The figures are of a virtual machine with 2 cores and its disk.

    $ mpirun -n 2 python -m mpicomm.examples.async_checkpoint
    step-4: 100.7 MB, stage 0.08 s, drain 0.42 s
    step-8: 100.7 MB, stage 0.06 s, drain 0.48 s
    the checkpoint of step 8, read after step 12, has the parameters of step 8
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel

import mpicomm

WIDTH, LAYERS = 2048, 6  # 100.7 MB in float32


class AsyncSaves:
    """The saves of a run, one at a time. All methods are collective."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="mpicomm")
        self._running: tuple[Path, Future[Any]] | None = None

    def start(self, state: dict[str, Any], path: Path) -> None:
        """Wait for the previous save, then copy the state and start to write it."""
        self.wait()
        begun, writer = time.perf_counter(), dcp.FileSystemWriter(path, overwrite=False)
        running = dcp.async_save(state, storage_writer=writer, process_group=self._group)
        staged = time.perf_counter()
        assert isinstance(running, Future)  # torch returns another type for a stager of your own
        running.add_done_callback(lambda save: None if save.exception() else report(path, begun, staged))
        self._running = path, running

    def wait(self) -> None:
        """Wait for the save in progress, if any, and raise its error."""
        if self._running is not None:
            (path, running), self._running = self._running, None
            try:
                running.result()
            except CheckpointException as error:  # a BaseException, which `except Exception` does not catch
                rank, (reason, _) = min(error.failures.items())
                raise RuntimeError(f"cannot write the checkpoint {path}: rank {rank}: {reason}") from error


def report(path: Path, begun: float, staged: float) -> None:
    if dist.get_rank() == 0:
        megabytes, drain = sum(file.stat().st_size for file in path.iterdir()) / 1e6, time.perf_counter() - staged
        print(f"{path.name}: {megabytes:.1f} MB, stage {staged - begun:.2f} s, drain {drain:.2f} s", flush=True)


def main() -> None:
    world, saves = mpicomm.bootstrap(), AsyncSaves()
    network = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(world.device)
    model, optimizer = DistributedDataParallel(network), torch.optim.SGD(network.parameters(), lr=0.01)
    for step in range(1, 13):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, device=world.device)).square().mean().backward()
        optimizer.step()
        if step in (4, 8):
            saves.start({"model": network.state_dict()}, Path(f"runs/async/step-{step}"))
            expected = next(network.parameters()).detach().clone()
    saves.wait()  # before the program ends
    dcp.load({"model": network.state_dict()}, checkpoint_id=Path("runs/async/step-8"))
    assert torch.equal(next(network.parameters()), expected)
    if world.rank == 0:
        print("the checkpoint of step 8, read after step 12, has the parameters of step 8", flush=True)


if __name__ == "__main__":
    main()
