"""Point-to-point messages with `torch.distributed` and with `mpicomm`, in the world that `bootstrap()` creates.

First in pairs (0 and 1, 2 and 3, ...): a blocking send and recv, then both directions at once with isend and irecv.
Then around the ring: every rank sends to the next rank and receives from the previous one. Each runs with a few bytes
and with 8 MiB, and the result is checked. The last one is the ring with `mpicomm.sendrecv`, which needs no receive
buffer and no order of sends. The tensors are on the GPU if the ranks have GPUs. The order of the lines may differ.

    $ mpirun -n 4 python -m mpicomm.examples.p2p
    -- blocking send and recv in pairs, 16 B
    rank 0: sent 0 to rank 1
    rank 2: sent 2 to rank 3
    rank 1: had 1, received 0 from rank 0
    rank 3: had 3, received 2 from rank 2
    -- isend and irecv in pairs, 16 B
    rank 1: had 1, received 0 from rank 0
    rank 3: had 3, received 2 from rank 2
    rank 0: had 0, received 1 from rank 1
    rank 2: had 2, received 3 from rank 3
    -- isend and irecv around the ring, 16 B
    rank 1: had 1, received 0 from rank 0
    rank 3: had 3, received 2 from rank 2
    rank 0: had 0, received 3 from rank 3
    rank 2: had 2, received 1 from rank 1
    -- blocking send and recv in pairs, 8 MiB
    rank 2: sent 2 to rank 3
    rank 0: sent 0 to rank 1
    rank 3: had 3, received 2 from rank 2
    rank 1: had 1, received 0 from rank 0
    -- isend and irecv in pairs, 8 MiB
    rank 3: had 3, received 2 from rank 2
    rank 0: had 0, received 1 from rank 1
    rank 2: had 2, received 3 from rank 3
    rank 1: had 1, received 0 from rank 0
    -- isend and irecv around the ring, 8 MiB
    rank 3: had 3, received 2 from rank 2
    rank 1: had 1, received 0 from rank 0
    rank 2: had 2, received 1 from rank 1
    rank 0: had 0, received 3 from rank 3
    -- a dict around the ring with mpicomm.sendrecv, 8 MiB
    rank 1: had 1, received 0 from rank 0
    rank 3: had 3, received 2 from rank 2
    rank 0: had 0, received 3 from rank 3
    rank 2: had 2, received 1 from rank 1
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import mpicomm

FEW = 4  # elements of float32, 16 B
MANY = 2 * 1024 * 1024  # 8 MiB, which MPI and NCCL do not buffer: a send completes when the peer receives


def main() -> None:
    world = mpicomm.bootstrap(device=parse_arguments().device)
    if world.size == 1:
        print_line(world, "needs 2 ranks or more, got 1; start with `mpirun -n 4 python -m mpicomm.examples.p2p`")
        return
    for count in (FEW, MANY):
        heading(world, "blocking send and recv in pairs", count)
        send_to_the_right(world, count)
        heading(world, "isend and irecv in pairs", count)
        swap_in_pairs(world, count)
        heading(world, "isend and irecv around the ring", count)
        pass_around_the_ring(world, count)
    heading(world, "a dict around the ring with mpicomm.sendrecv", MANY)
    pass_a_dict_around_the_ring(world, MANY)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="device of each rank, such as cpu or xpu:1 (default: chosen by bootstrap())")
    return parser.parse_args()


def send_to_the_right(world: mpicomm.World, count: int) -> None:
    """Send from the even rank of each pair to the odd one."""
    peer = partner(world)
    tensor = fill(world, count)
    if peer is None:
        print_line(world, "idle, the number of ranks is odd")
    elif world.rank < peer:
        dist.send(tensor, peer)
        print_line(world, f"sent {world.rank} to rank {peer}")
    else:
        dist.recv(tensor, peer)
        check(tensor, peer)
        print_line(world, f"had {world.rank}, received {tensor[0]:.0f} from rank {peer}")


def swap_in_pairs(world: mpicomm.World, count: int) -> None:
    """Exchange tensors within each pair, in both directions at once."""
    peer = partner(world)
    if peer is None:
        print_line(world, "idle, the number of ranks is odd")
    else:
        exchange(world, count, dst=peer, src=peer)


def pass_around_the_ring(world: mpicomm.World, count: int) -> None:
    """Send to the next rank and receive from the previous one."""
    exchange(world, count, dst=(world.rank + 1) % world.size, src=(world.rank - 1) % world.size)


def pass_a_dict_around_the_ring(world: mpicomm.World, count: int) -> None:
    """Do the same in one call: the receiver need not know the shape, and no order of send and receive can be wrong."""
    dst, src = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    got = mpicomm.sendrecv({"sender": world.rank, "tensor": fill(world, count)}, dst, src)
    check(got["tensor"], got["sender"])
    print_line(world, f"had {world.rank}, received {got['sender']} from rank {src}")


def exchange(world: mpicomm.World, count: int, dst: int, src: int) -> None:
    """Send to `dst` while receiving from `src`.

    With blocking sends every rank could wait for the next one to receive, forever.
    """
    outgoing = fill(world, count)
    incoming = torch.empty_like(outgoing)
    # MPI accepts any order. NCCL executes messages in the order of the calls, so not all ranks may send first.
    if world.rank < dst:
        works = [dist.isend(outgoing, dst), dist.irecv(incoming, src)]
    else:
        works = [dist.irecv(incoming, src), dist.isend(outgoing, dst)]
    for work in works:
        assert work is not None  # it is None only on a rank outside the group
        work.wait()
    check(incoming, src)
    print_line(world, f"had {world.rank}, received {incoming[0]:.0f} from rank {src}")


def partner(world: mpicomm.World) -> int | None:
    """Return the other rank of this rank's pair; None for the last rank of an odd number."""
    peer = world.rank ^ 1
    return peer if peer < world.size else None


def fill(world: mpicomm.World, count: int) -> torch.Tensor:
    """Return this rank's tensor: its rank, `count` times."""
    return torch.full((count,), float(world.rank), device=world.device)


def check(tensor: torch.Tensor, sender: int) -> None:
    assert (tensor == sender).all(), f"expected {sender} everywhere, got {tensor}"


def heading(world: mpicomm.World, title: str, count: int) -> None:
    dist.barrier()
    if world.rank == 0:
        size = f"{4 * count} B" if count == FEW else f"{4 * count // 2**20} MiB"
        print(f"-- {title}, {size}\n", end="", flush=True)
    dist.barrier()


def print_line(world: mpicomm.World, what: str) -> None:
    # One write, newline included, so that the lines of several ranks do not mix.
    print(f"rank {world.rank}: {what}\n", end="", flush=True)


if __name__ == "__main__":
    main()
