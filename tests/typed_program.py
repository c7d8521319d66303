"""A program of a user: `make lint` checks it with `mypy --strict`, so that results keep the types of the data."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import assert_type

import mpicomm


def main() -> None:
    """Call the public functions as users do."""
    world = mpicomm.bootstrap("mpi", timeout=60)
    assert_type(mpicomm.current_world(), mpicomm.World)
    tensor = torch.ones(2, device=world.device)

    assert_type(mpicomm.all_reduce(tensor), torch.Tensor)
    assert_type(mpicomm.all_reduce({"loss": 1.0}, "mean"), dict[str, float])
    assert_type(mpicomm.all_reduce(tensor, async_op=True), mpicomm.Handle[torch.Tensor])
    assert_type(mpicomm.all_reduce(tensor, async_op=True).wait(timeout=5), torch.Tensor)
    assert_type(mpicomm.reduce(1.5, dst=0), float | None)
    assert_type(mpicomm.reduce_scatter(tensor, "max"), torch.Tensor)
    assert_type(mpicomm.broadcast(tensor, src=0), torch.Tensor)
    assert_type(mpicomm.broadcast(out=tensor), torch.Tensor)
    assert_type(mpicomm.broadcast(), Any)
    assert_type(mpicomm.gather(tensor), list[torch.Tensor] | None)
    assert_type(mpicomm.all_gather(world.rank), list[int])
    assert_type(mpicomm.all_to_all([tensor] * world.size), list[torch.Tensor])
    assert_type(mpicomm.scatter([tensor] * world.size if world.rank == 0 else None), torch.Tensor | Any)
    assert_type(mpicomm.all_gather_object("text"), list[str])
    assert_type(mpicomm.barrier(), None)

    handles = [mpicomm.isend(tensor, 0), mpicomm.irecv(0)]
    mpicomm.wait_all(handles, timeout=5.0)
    assert_type(mpicomm.recv(0, out=tensor), torch.Tensor)
    for done in mpicomm.as_completed([mpicomm.all_gather(tensor, async_op=True)]):
        assert_type(done.wait(), list[torch.Tensor])
    mpicomm.shutdown()


if __name__ == "__main__":
    main()
