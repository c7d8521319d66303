"""Invalid local arguments raise an error immediately, on the rank that passed them, with the problem and the remedy.

A single rank makes each of these calls: it must fail before it communicates.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import mpicomm
from tests.torches import all_gather_single, reduce_scatter_single
from tests.worlds import Group

ones = torch.ones
ONES = ones(2)


def whole() -> dist.ProcessGroup:
    """Return the group of all ranks, whose methods accept more than functions of torch.distributed."""
    return dist.group.WORLD


# The call, with the number of ranks, and the error. tests/mpi/test_matrix.py has the reductions that are not defined.
MISUSES: dict[str, tuple[Callable[[int], object], str]] = {
    "dtype without arithmetic": (
        lambda n: dist.all_reduce(ones(2).to(torch.float8_e8m0fnu)),
        "float8_e8m0fnu tensors can be moved but not reduced",
    ),
    "sparse": (
        lambda n: dist.broadcast(torch.eye(3).to_sparse(), 0),
        r"dense tensor, got layout torch.sparse_coo.*\n.*to_dense",
    ),
    "meta device": (lambda n: dist.broadcast(ones(2, device="meta"), 0), "on the CPU or a GPU, got one on meta"),
    "quantized": (lambda n: dist.broadcast(torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8), 0), "quantized"),
    "list too short": (
        lambda n: dist.all_gather([ones(2)] * (n + 1), ONES),
        r"tensor_list has \d+ tensors, but the group has \d+ ranks",
    ),
    "entry of another size": (
        lambda n: dist.all_gather([ones(3) for _ in range(n)], ONES),
        r"tensor_list\[\d\] has 3 elements",
    ),
    "entry of another dtype": (
        lambda n: whole().allgather([[ones(2).int() for _ in range(n)]], [ONES]),
        "holds int32, but the tensor is float32",
    ),
    "output of another size": (
        lambda n: all_gather_single(ones(2 * n + 1), ONES),
        r"output has \d+ elements, but input has 2",
    ),
    "input of another size": (
        lambda n: reduce_scatter_single(ones(2), ones(2 * n + 1)),
        r"input has \d+ elements, but output has 2",
    ),
    "output of another dtype": (
        lambda n: reduce_scatter_single(ones(2), ones(2 * n).double()),
        "input holds float64, but the tensor is float32",
    ),
    "list of another size": (lambda n: dist.reduce_scatter(ones(2), [ones(3)] * n), r"input_list\[\d\] has 3 elements"),
    "rank too high": (
        lambda n: whole().send([ONES], n, 0),
        r"dst=\d+ is out of range for this group.*\n.*from 0 to \d+",
    ),
    "root too high": (lambda n: whole().broadcast([ones(2)], root=n), r"src=\d+ is out of range"),
    "tag too high": (lambda n: whole().recv([ones(2)], 0, 2**32 - 1), r"tag=\d+ is out of range"),
    "several tensors": (lambda n: whole().allreduce([ones(2), ones(2)]), "expected one tensor"),
    "expanded output": (lambda n: dist.broadcast(ones(1).expand(4), 0), "expanded"),
    "order of sparse": (
        lambda n: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX),
        "MAX is not defined for sparse tensors",
    ),
    "sparse by columns": (
        lambda n: dist.all_reduce(torch.eye(3).to_sparse_csc()),
        "dense tensor, got layout torch.sparse_csc",
    ),
    "rows that cannot be shared": (
        lambda n: dist.all_to_all_single(ones(2 * n + 1, 3), ones(2 * n + 1, 3)),
        r"\d+ rows, which are not divisible by the group size \d+.*\n.*output_split_sizes",
    ),
    "sizes that do not add up": (
        lambda n: dist.all_to_all_single(ones(n + 1, 2), ones(n, 2), [1] * n, [1] * n),
        r"output_split_sizes=.* does not split \d+ rows",
    ),
    "too few sizes": (
        lambda n: dist.all_to_all_single(ones(n, 2), ones(n, 2), None, [n] + [0] * n),
        r"input_split_sizes=.* does not split \d+ rows",
    ),
    "negative sizes": (
        lambda n: dist.all_to_all_single(ones(n), ones(n), None, [n + 1, -1, *[0] * (n - 2)]),
        r"input_split_sizes=.* does not split \d+ rows",
    ),
    "all_to_all of other dtypes": (
        lambda n: whole().alltoall([ones(1).int()] * n, [ones(1)] * n),
        "a list holds int32, but the tensor is float32",
    ),
    "own share of another size": (
        lambda n: dist.all_to_all([ones(2) for _ in range(n)], [ones(1)] * n),
        "sends itself 1 elements, but expects 2",
    ),
    "outputs without inputs": (
        lambda n: whole().all_gather_single_coalesced([ones(n)], []),
        "expected at least one tensor",
    ),
    "more outputs than inputs": (
        lambda n: whole().all_gather_single_coalesced([ones(n)] * 2, [ones(1)]),
        "got 2 outputs for 1 inputs",
    ),
    "lists of another length": (
        lambda n: dist.all_gather_coalesced([[ones(1)] * 2] * n, [ones(1)]),
        r"lists of \[2.*\] tensors",
    ),
    "storage that was freed": (
        lambda n: dist.all_reduce(_freed(2)),
        r"all_reduce: expected a tensor with elements in memory, got a Tensor of shape \[2\] without storage",
    ),
    "one tensor twice": (
        lambda n: dist.all_reduce_coalesced([ONES, ones(2), ONES]),
        r"tensors\[0\] and tensors\[2\] share memory.*\nPass tensors with separate storage",
    ),
    "outputs that overlap": (
        lambda n: whole().all_gather_single_coalesced([(all_ := ones(2 * n + 1))[1:], all_[:-1]], [ONES, ONES]),
        r"output\[0\] and output\[1\] share memory",
    ),
    "output in the input of another pair": (
        lambda n: whole().reduce_scatter_single_coalesced([(both := ones(2 * n))[:2], ones(2)], [ones(2 * n), both]),
        r"output 0 and input 1 share memory",
    ),
}


def _freed(count: int) -> torch.Tensor:
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(world: mpicomm.World, name: str) -> None:
    call, message = MISUSES[name]
    if world.rank == world.size - 1:
        with pytest.raises(ValueError, match=message):
            call(world.size)


def test_a_number_is_no_tensor(world: mpicomm.World) -> None:
    with pytest.raises(TypeError, match="expected a tensor, got float"):
        dist.group.WORLD.allreduce([3.0])


def test_an_expanded_entry_of_a_list(groups: dict[str, Group]) -> None:
    """In a group of one rank, where the call would not wait for other ranks."""
    with pytest.raises(ValueError, match="is expanded: several elements"):
        dist.all_gather([torch.ones(1).expand(4)], torch.ones(4), group=groups["alone"].handle)


@pytest.mark.mpi(min_size=2)
def test_one_tensor_as_several_outputs(world: mpicomm.World) -> None:
    same = [torch.zeros(2)] * world.size
    calls = {
        "all_gather": lambda: dist.all_gather(same, ONES),
        "gather": lambda: dist.gather(ONES, same, dst=world.rank),
        "all_to_all": lambda: dist.all_to_all(same, [torch.ones(2)] * world.size),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([[same[0]] for _ in range(world.size)], [ONES]),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}: .*share memory"):
            call()


def test_the_group_is_usable_after_misuse(world: mpicomm.World) -> None:
    """Only rank 0 makes the invalid calls; the other ranks do not take part in them."""
    if world.rank == 0:
        with pytest.raises(ValueError, match="elements in memory"):
            dist.all_reduce(_freed(2))
        with pytest.raises(ValueError, match="elements in memory"):
            dist.isend(_freed(2), world.size - 1)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world.size] * 2
