"""The members of a group compare what they call, before they do it: a mismatch is an error on all, with names."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.backend import dtypes
from mpicomm.collective_ops import pytree
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.collective_ops.handles import Mode, Works
from mpicomm.collective_ops.pytree import Data
from mpicomm.errors import MismatchError, raised_on_all_ranks
from mpicomm.watchdog import hang_report

Signature = tuple[Any, ...]
"""What is compared: the operation with its arguments, the structure, and what is to be equal of each leaf."""

_WORDS = 2  # of 63 bits each


def of(data: Data, operation: str, *, any_length: bool = False) -> Signature:
    """Return what all ranks must say of their call and its data.

    Args:
        any_length: Leaves may differ in their first dimension.
    """
    shapes = tuple([shape[1:] for shape in data.shapes]) if any_length else data.shapes
    dims = tuple([len(shape) for shape in data.shapes]) if any_length else ()
    leaves = (data.kinds, data.dtypes, shapes, dims, data.devices, data.gradients)
    return (operation, data.structure, leaves, any_length)


@functools.lru_cache(maxsize=256)
def words(signature: Signature) -> tuple[int, int]:
    """Return a digest of what a rank says, as integers of 63 bits."""
    raw = hashlib.blake2b(repr(signature).encode(), digest_size=16).digest()
    return int.from_bytes(raw[:8], "big") >> 1, int.from_bytes(raw[8:], "big") >> 1


def reached(members: GroupArgument, signature: Signature, mode: Mode) -> Generator[Works, None, None]:
    """Compare what the members say (collective).

    Raises:
        MismatchError: On every member, if they do not all say the same.
    """
    if members.size == 1:
        return
    digest = words(signature)
    extremes = torch.tensor([*digest, *[-word for word in digest]], dtype=torch.int64, device=members.control)
    yield [dist.all_reduce(extremes, dist.ReduceOp.MIN, group=members.handle, async_op=mode.early)]
    least = extremes.tolist()
    if least[:_WORDS] != [-word for word in least[_WORDS:]]:
        refuse(members, signature)


def refuse(members: GroupArgument, signature: Signature) -> None:
    """Tell every member where they differ (collective).

    Raises:
        MismatchError: Always.
    """
    everybodys: list[Any] = [None] * members.size
    dist.all_gather_object(everybodys, _shown(signature), group=members.handle)
    raise raised_on_all_ranks(MismatchError(_explain(members, everybodys)))


def _shown(signature: Signature) -> tuple[str, list[tuple[str, str]]]:
    """Return the operation, and of each leaf where it is and what it is, for people."""
    operation, structure, (kinds, dtypes_, shapes, dims, devices, gradients), any_length = signature
    rows = zip(kinds, dtypes_, shapes, dims or [0] * len(kinds), devices, gradients, strict=True)
    shown = [_shown_leaf(*row, any_length=any_length) for row in rows]
    return operation, list(zip(pytree.paths(structure), shown, strict=True))


def _shown_leaf(
    kind: str, dtype: torch.dtype, shape: Sequence[int], dims: int, device: str, has_gradient: bool, *, any_length: bool
) -> str:
    size = ", ".join([*["*"] * bool(any_length and dims), *map(str, shape)])
    return f"{kind} {dtypes.short(dtype)}[{size}] on {device}{', with gradient' if has_gradient else ''}"


def _explain(members: GroupArgument, everybodys: Sequence[tuple[str, list[tuple[str, str]]]]) -> str:
    operations = [operation for operation, _ in everybodys]
    if len(set(operations)) > 1:
        return (
            f"ranks call different operations, or one with different arguments:\n{_table(members, operations)}\n"
            f"Make all ranks call the same operations in the same order."
        )
    for number, leaves in enumerate(itertools.zip_longest(*[leaves for _, leaves in everybodys])):
        if len(set(leaves)) > 1:
            shown = ["nothing" if leaf is None else f"{leaf[0]} = {leaf[1]}" for leaf in leaves]
            return (
                f"{operations[0]}: the ranks' data differ. The first leaf that does is number {number}:\n"
                f"{_table(members, shown)}\nGive the operation data of one structure on all ranks."
            )
    return (
        f"{operations[0]}: the ranks' data have the same leaves in different containers.\n"
        f"Give the operation data of one structure on all ranks."
    )


def _table(members: GroupArgument, signature: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, each in zip(members.ranks, signature, strict=True):
        ranks.setdefault(each, []).append(rank)
    rows = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return "\n".join(f"  {hang_report.called(of_these)}: {each}" for each, of_these in rows)
