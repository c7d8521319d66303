"""A parameter server with remote procedure calls: the workers call methods of an object on rank 0.

The same asynchronous SGD as in `parameter_server`, with `torch.distributed.rpc` in place of messages. Rank 0 creates
the server and starts `work` on the other ranks, which receive a reference to it. A call of `server.rpc_sync().push()`
runs the method on rank 0. torch runs the calls of several workers in threads, so the method needs a lock.

    $ mpirun -n 4 python -m mpicomm.examples.rpc_parameter_server
    loss 312.4008 at the start
    rank 1 pushed 52.0% of 600 gradients
    rank 2 pushed 28.3% of 600 gradients
    rank 3 pushed 19.7% of 600 gradients
    loss 0.0113 at the end: good
    $ torchrun --nproc-per-node 2 examples/rpc_parameter_server.py
    loss 312.4008 at the start
    rank 1 pushed 100.0% of 600 gradients
    loss 0.0107 at the end: good
"""

from __future__ import annotations

import threading
import time

import torch
from torch.distributed import rpc

import mpicomm
from mpicomm.examples.parameter_server import GOAL, LEARNING_RATE, PUSHES, WEIGHTS, loss, samples
from mpicomm.integrations.rpc import workers


class Server:
    """The parameters, and how many gradients each rank has pushed."""

    def __init__(self) -> None:
        self.parameters = torch.zeros(WEIGHTS)
        self.pushes: dict[int, int] = {}
        self._lock = threading.Lock()

    def pull(self) -> torch.Tensor:
        """Return a copy of the parameters."""
        return self.parameters.clone()

    def push(self, rank: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Take a step, and return the new parameters, or None if no more gradients are needed."""
        with self._lock:
            if sum(self.pushes.values()) == PUSHES:
                return None
            self.parameters -= LEARNING_RATE * gradient
            self.pushes[rank] = self.pushes.get(rank, 0) + 1
            return self.parameters.clone()


def main() -> None:
    world = mpicomm.bootstrap()
    if world.size == 1:
        print("needs 2 ranks or more, got 1; start with `mpirun -n 4 python -m mpicomm.examples.rpc_parameter_server`")
        return
    with workers(world) as names:
        if world.rank == 0:  # the other ranks serve calls until rank 0 leaves the block
            serve(names)


def serve(names: list[str]) -> None:
    """Start the workers, wait until they have finished, and print the result."""
    server = Server()
    print(f"loss {loss(server.parameters):.4f} at the start", flush=True)
    reference = rpc.RRef(server)
    calls = [rpc.rpc_async(name, work, (reference, rank), timeout=0) for rank, name in enumerate(names) if rank > 0]
    torch.futures.wait_all(calls)
    for rank, count in sorted(server.pushes.items()):
        print(f"rank {rank} pushed {count / PUSHES:.1%} of {PUSHES} gradients")
    last = loss(server.parameters)
    print(f"loss {last:.4f} at the end: {'good' if last < GOAL else 'NOT good'}", flush=True)
    assert last < GOAL


def work(server: rpc.RRef[Server], rank: int) -> None:
    """Compute gradients on this rank's samples and push them, until the server needs no more."""
    generator = torch.Generator().manual_seed(rank)
    parameters = server.rpc_sync().pull()
    while parameters is not None:
        x, y = samples(generator)
        error = ((x @ parameters.requires_grad_() - y) ** 2).mean()
        (gradient,) = torch.autograd.grad(error, parameters)
        time.sleep(0.003 * rank)
        parameters = server.rpc_sync().push(rank, gradient)


if __name__ == "__main__":
    main()
