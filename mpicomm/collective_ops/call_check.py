"""Compares the calls of a group's ranks before an operation starts.

A mismatch raises MismatchError on every rank of the group; the message names the ranks that differ.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import agreement
from mpicomm.backend import dtypes
from mpicomm.collective_ops import pytree
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.collective_ops.handles import Mode, Works
from mpicomm.collective_ops.pytree import Data
from mpicomm.errors import MismatchError, raised_on_all_ranks
from mpicomm.watchdog import hang_report

Signature = tuple[Any, ...]
"""The values that must be equal on all ranks: the operation with its arguments, the structure, the leaves' metadata."""


def of(data: Data, operation: str, *, any_length: bool = False) -> Signature:
    """Return the signature of a call, which must be equal on all ranks.

    Args:
        data: The data of this rank.
        operation: The operation and its arguments.
        any_length: Leaves may differ in the length of their first dimension.
    """
    shapes = tuple([shape[1:] for shape in data.shapes]) if any_length else data.shapes
    dims = tuple([len(shape) for shape in data.shapes]) if any_length else ()
    leaves = (data.kinds, data.dtypes, shapes, dims, data.devices, data.gradients)
    return (operation, data.structure, leaves, any_length)


@functools.lru_cache(maxsize=256)
def words(signature: Signature) -> tuple[int, int]:
    """Return a digest of a signature, as integers of 63 bits."""
    return agreement.digest(repr(signature).encode())


def reached(members: GroupArgument, signature: Signature, mode: Mode) -> Generator[Works, None, None]:
    """Compare the signatures of all ranks of the group, with one all_reduce (collective).

    Raises:
        MismatchError: On every rank of the group, if the signatures differ.
    """
    if members.size == 1:
        return
    least = torch.tensor(agreement.extremes(words(signature)), dtype=torch.int64, device=members.control)
    yield [dist.all_reduce(least, dist.ReduceOp.MIN, group=members.handle, async_op=mode.early)]
    if not agreement.all_equal(least.tolist()):
        refuse(members, signature)


def refuse(members: GroupArgument, signature: Signature) -> None:
    """Gather the signatures and raise an error that shows the first difference (collective).

    Raises:
        MismatchError: Always, on every rank of the group.
    """
    gathered: list[Any] = [None] * members.size
    dist.all_gather_object(gathered, _shown(signature), group=members.handle)
    raise raised_on_all_ranks(MismatchError(_explain(members, gathered)))


def _shown(signature: Signature) -> tuple[str, list[tuple[str, str]]]:
    """Return the operation, and the path and the description of each leaf, as readable text."""
    operation, structure, (kinds, dtypes_, shapes, dims, devices, gradients), any_length = signature
    rows = zip(kinds, dtypes_, shapes, dims or [0] * len(kinds), devices, gradients, strict=True)
    shown = [_shown_leaf(*row, any_length=any_length) for row in rows]
    return operation, list(zip(pytree.paths(structure), shown, strict=True))


def _shown_leaf(
    kind: str, dtype: torch.dtype, shape: Sequence[int], dims: int, device: str, has_gradient: bool, *, any_length: bool
) -> str:
    size = ", ".join([*["*"] * bool(any_length and dims), *map(str, shape)])
    return f"{kind} {dtypes.short(dtype)}[{size}] on {device}{', with gradient' if has_gradient else ''}"


def _explain(members: GroupArgument, gathered: Sequence[tuple[str, list[tuple[str, str]]]]) -> str:
    operations = [operation for operation, _ in gathered]
    if len(set(operations)) > 1:
        return (
            f"ranks called different operations, or one operation with different arguments:\n"
            f"{_table(members, operations)}\n"
            f"Call the same operations in the same order on all ranks."
        )
    for number, leaves in enumerate(itertools.zip_longest(*[leaves for _, leaves in gathered])):
        if len(set(leaves)) > 1:
            shown = ["missing" if leaf is None else f"{leaf[0]} = {leaf[1]}" for leaf in leaves]
            return (
                f"{operations[0]}: the ranks' data differ, first at leaf {number}:\n"
                f"{_table(members, shown)}\nPass data of matching structure, dtypes and shapes on all ranks."
            )
    return (
        f"{operations[0]}: the ranks' data have the same leaves in different containers.\n"
        f"Pass data in the same containers on all ranks."
    )


def _table(members: GroupArgument, signature: Sequence[str]) -> str:
    rows = sorted(agreement.ranks_by_value(signature, members.ranks).items(), key=lambda item: -len(item[1]))
    return "\n".join(f"  {hang_report.called(of_these)}: {each}" for each, of_these in rows)
