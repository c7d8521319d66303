"""Dispatch modes and tensor subclasses receive the operations of torch.distributed, as with torch's own backends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import mpicomm
from tests import torches
from tests.features.together import numbers
from tests.worlds import Group, on_groups

pytestmark = pytest.mark.each_torch("dispatcher")

needs_registered_backend = pytest.mark.skipif(
    not torches.has_python_backends, reason="this torch does not let Python create a backend"
)


class Witness(TorchDispatchMode):
    """Records the names of torch's operators of collectives, and runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


def outputs(group: Group) -> list[torch.Tensor]:
    return [torch.zeros(2, dtype=torch.float64) for _ in range(group.size)]


def to_root(group: Group) -> list[torch.Tensor] | None:
    return outputs(group) if group.rank == 0 else None


def ring(group: Group, mine: torch.Tensor, sender: int | None) -> Any:
    """Send to the next rank, and receive from the rank before, given as such or from any rank."""
    received = torch.zeros_like(mine)
    sent = dist.isend(mine, group=group.handle, group_dst=(group.rank + 1) % group.size)
    source = dist.recv(received, group=group.handle, group_src=sender)
    sent.wait()
    return [received, source]


def coalesced(group: Group, call: Callable[..., Any], *tensors: torch.Tensor) -> torch.Tensor:
    """Return the first tensor, which the call writes."""
    with dist._coalescing_manager(group.handle):
        call(*tensors, group=group.handle)
    return tensors[0]


def gathered_lists(group: Group, mine: torch.Tensor) -> list[list[torch.Tensor]]:
    lists = [[*outputs(group)[:1], torch.zeros_like(mine)] for _ in range(group.size)]
    group.handle.allgather_coalesced(lists, [mine[:2], mine]).wait()
    return lists


# Each call returns the tensor or the tensors that it has written. `x` has two elements for each rank of the group `g`.
CALLS: dict[str, tuple[Callable[[Group, torch.Tensor], Any], list[str]]] = {
    "all_reduce": (lambda g, x: [dist.all_reduce(x, group=g.handle), x], ["allreduce_"]),
    "all_reduce of the maximum": (
        lambda g, x: [dist.all_reduce(x, dist.ReduceOp.MAX, group=g.handle), x],
        ["allreduce_"],
    ),
    "all_reduce of bf16": (lambda g, x: [dist.all_reduce(y := x.bfloat16(), group=g.handle), y], ["allreduce_"]),
    "all_reduce of a sparse tensor": (
        lambda g, x: [dist.all_reduce(y := x.to_sparse(), group=g.handle), y.to_dense()],
        ["allreduce_"],
    ),
    "all_reduce_coalesced": (lambda g, x: coalesced(g, dist.all_reduce, x), ["allreduce_coalesced_"]),
    "reduce": (lambda g, x: [dist.reduce(x, group=g.handle, group_dst=0), g.rank or x], ["reduce_"]),
    "broadcast": (lambda g, x: [dist.broadcast(x, group=g.handle, group_src=0), x], ["broadcast_"]),
    "all_gather": (lambda g, x: [dist.all_gather(y := outputs(g), x[:2], group=g.handle), y], ["allgather_"]),
    "all_gather_single": (
        lambda g, x: [torches.all_gather_single(y := torch.zeros_like(x), x[:2], group=g.handle), y],
        ["_allgather_base_"],
    ),
    "all_gather_single_coalesced": (
        lambda g, x: coalesced(g, torches.all_gather_single, torch.zeros_like(x), x[:2]),
        ["allgather_into_tensor_coalesced_"],
    ),
    "allgather_coalesced": (gathered_lists, ["allgather_coalesced_"]),
    "gather": (lambda g, x: [dist.gather(x[:2], y := to_root(g), group=g.handle, group_dst=0), y], ["gather_"]),
    "scatter": (
        lambda g, x: [
            dist.scatter(y := torch.zeros_like(x[:2]), to_root(g) and [*x.split(2)], group=g.handle, group_src=0),
            y,
        ],
        ["scatter_"],
    ),
    "reduce_scatter": (
        lambda g, x: [dist.reduce_scatter(y := torch.zeros_like(x[:2]), [*x.split(2)], group=g.handle), y],
        ["reduce_scatter_"],
    ),
    "reduce_scatter_single": (
        lambda g, x: [torches.reduce_scatter_single(y := torch.zeros_like(x[:2]), x, group=g.handle), y],
        ["_reduce_scatter_base_"],
    ),
    "reduce_scatter_single_coalesced": (
        lambda g, x: coalesced(g, torches.reduce_scatter_single, torch.zeros_like(x[:2]), x),
        ["reduce_scatter_tensor_coalesced_"],
    ),
    "all_to_all": (lambda g, x: [dist.all_to_all(y := outputs(g), [*x.split(2)], group=g.handle), y], ["alltoall_"]),
    "all_to_all_single": (
        lambda g, x: [dist.all_to_all_single(y := torch.zeros_like(x), x, group=g.handle), y],
        ["alltoall_base_"],
    ),
    "all_to_all_single without split sizes": (
        lambda g, x: [g.handle.alltoall_base(y := torch.zeros_like(x), x).wait(), y],
        ["alltoall_base_"],
    ),
    "barrier": (lambda g, _: dist.barrier(g.handle), ["barrier"]),
    "messages": (lambda g, x: ring(g, x, (g.rank - 1) % g.size), ["send", "recv_"]),
    "messages from any rank": (lambda g, x: ring(g, x, None), ["send", "recv_any_source_"]),
}


@pytest.mark.parametrize("name", CALLS)
@on_groups("world", "parity")
def test_a_mode_receives_each_operation_once(group: Group, name: str) -> None:
    """The ranks with a mode and those without one take part in the same operation."""
    if group.size == 1 and name.startswith("messages"):
        pytest.skip("a rank does not send to itself")
    call, operators = CALLS[name]
    expected = call(group, numbers(group.rank, 2 * group.size))
    mine = numbers(group.rank, 2 * group.size)
    if group.rank == 0:
        with Witness() as outer, Witness() as inner:
            result = call(group, mine)
        assert outer.seen == inner.seen == operators
    else:
        result = call(group, mine)
    torch.testing.assert_close(result, expected)


def test_an_operation_in_progress(world: mpicomm.World) -> None:
    mine = torch.full((1000,), float(world.rank))
    with Witness() as witness:
        work = dist.all_reduce(mine, async_op=True)
    after = work.get_future().then(lambda future: future.value()[0].sum().item())
    assert work.wait()
    assert work.is_completed()
    total = sum(range(world.size))
    assert torch.equal(mine, torch.full((1000,), float(total)))
    assert after.wait() == 1000.0 * total
    assert witness.seen == ["allreduce_"]


def test_errors_keep_their_type(world: mpicomm.World) -> None:
    with Witness(), pytest.raises(ValueError, match="all_gather_into_tensor: output has"):
        torches.all_gather_single(torch.zeros(world.size + 1), torch.ones(1))


def test_the_mode_that_counts_collectives(world: mpicomm.World) -> None:
    """CommDebugMode."""
    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(2), 0)
        torches.all_gather_single(torch.empty(world.size), torch.ones(1))
    counts = mode.get_comm_counts()
    operators = torch.ops.c10d
    assert mode.get_total_counts() == 3
    assert [counts[each] for each in (operators.allreduce_, operators.broadcast_, operators._allgather_base_)] == [
        1
    ] * 3


def test_no_mode_where_dispatch_is_disabled(world: mpicomm.World) -> None:
    mine = torch.ones(2)
    with Witness() as witness, torch._C._DisableTorchDispatch():
        dist.all_reduce(mine)
    assert witness.seen == []
    assert mine.tolist() == [world.size] * 2


def test_fake_tensors(world: mpicomm.World) -> None:
    """They do not communicate: rank 0 runs alone what all ranks would run."""
    if world.rank == 0:
        with FakeTensorMode():
            mine = torch.ones(3)
            dist.all_reduce(mine)
            dist.all_reduce(mine, async_op=True).wait()
            everything = torch.empty(3 * world.size)
            torches.all_gather_single(everything, mine)
        dist.broadcast(mine, 0)  # also after the mode
        assert (mine.shape, everything.shape) == ((3,), (3 * world.size,))
    dist.barrier()


def test_a_wrapper_subclass(world: mpicomm.World) -> None:
    """Its `__torch_dispatch__` runs the operation on each of its tensors."""
    first, second = numbers(world.rank, 5), numbers(world.rank + 100, 5)
    sums = [sum(numbers(rank + offset, 5) for rank in range(world.size)) for offset in (0, 100)]
    for is_async in (False, True):
        both = TwoTensor(first.clone(), second.clone())
        work = dist.all_reduce(both, async_op=is_async)
        assert work is None or (work.wait() and work.is_completed())
        torch.testing.assert_close([both.a, both.b], sums)

    gathered = [TwoTensor(torch.zeros(5).double(), torch.zeros(5).double()) for _ in range(world.size)]
    dist.all_gather(gathered, TwoTensor(first, second))
    torch.testing.assert_close([each.b for each in gathered], [numbers(rank + 100, 5) for rank in range(world.size)])


def test_a_wrapper_subclass_only_in_a_list_of_lists(world: mpicomm.World) -> None:
    """torch's dispatcher does not find it."""
    inputs = [TwoTensor(torch.ones(2), torch.ones(2)) for _ in range(world.size)]
    with pytest.raises(ValueError, match="elements in memory, got a TwoTensor"):
        dist.reduce_scatter(torch.zeros(2), inputs)


@pytest.mark.mpi(min_size=2)
def test_messages_to_a_wrapper_subclass(world: mpicomm.World) -> None:
    """The work waits for all of them."""
    if world.rank == 0:
        both = TwoTensor(torch.zeros(2), torch.zeros(2))
        dist.irecv(both, 1).wait()
        assert both.a.tolist() == [1, 1]
        assert both.b.tolist() == [2, 2]
    elif world.rank == 1:
        dist.send(torch.full((2,), 1.0), 0)
        time.sleep(0.3)
        dist.send(torch.full((2,), 2.0), 0)


@pytest.fixture
def over_gloo(world: mpicomm.World) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)


def test_groups_of_other_backends(world: mpicomm.World, over_gloo: dist.ProcessGroup) -> None:
    """Their operators work before and after a group of this backend has used the same operators."""
    for _ in range(2):
        mine = torch.ones(2)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=over_gloo)
        dist.all_reduce(mine, group=over_gloo)
        with Witness() as witness:
            dist.all_reduce(mine, group=over_gloo)
            dist.all_reduce(mine)
        assert mine.tolist() == [world.size**3] * 2
        assert witness.seen == ["allreduce_"] * 2


@needs_registered_backend
def test_the_operators_that_callers_use_directly(world: mpicomm.World) -> None:
    """From torch 2.14 on."""
    mine = torch.ones(2)
    box, reduction = dist.group.WORLD.boxed(), torch.classes.c10d.ReduceOp()
    tensors, work = torch.ops.c10d.allreduce_([mine], box, reduction, None, False, -1)
    dist.Work.unbox(work).wait()
    assert tensors[0].tolist() == mine.tolist() == [world.size] * 2


@needs_registered_backend
def test_functional_collectives_with_outputs(world: mpicomm.World) -> None:
    """From torch 2.14 on."""
    name, functional = dist.group.WORLD.group_name, torch.ops._c10d_functional
    gathered = torch.empty(2 * world.size)
    functional.wait_tensor(
        functional.all_gather_into_tensor_out(torch.full((2,), float(world.rank)), world.size, name, out=gathered)
    )
    assert gathered.tolist() == [rank for rank in range(world.size) for _ in range(2)]
    total = torch.empty(2)
    functional.wait_tensor(functional.reduce_scatter_tensor_out(gathered, "sum", world.size, name, out=total))
    assert total.tolist() == [world.rank * world.size] * 2


@needs_registered_backend
@pytest.mark.mpi(min_size=2)
def test_batches_of_messages_by_their_operator(world: mpicomm.World) -> None:
    """From torch 2.14 on."""
    functional = torch.ops._c10d_functional
    peers = [(world.rank + 1) % world.size, (world.rank - 1) % world.size]
    received = torch.empty(3)
    messages = [torch.full((3,), float(world.rank)), received]
    results = functional.batch_p2p_ops(["isend", "irecv"], peers, [0, 0], messages, dist.group.WORLD.group_name)
    for each in [*results, *messages]:
        functional.wait_tensor(each)
    assert received.tolist() == [peers[1]] * 3
