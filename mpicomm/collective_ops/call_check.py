"""Compares the calls of a group's ranks before an operation starts.

A mismatch raises MismatchError on every rank of the group; the message names the ranks that differ.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from mpicomm import agreement, torch_internals
from mpicomm.backend.transfer import dtypes
from mpicomm.collective_ops import pytree
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.collective_ops.handles import Mode, Works
from mpicomm.collective_ops.pytree import Data, Description
from mpicomm.errors import MismatchError, raised_on_all_ranks
from mpicomm.recorder import rank_text

Signature = tuple[str, Description]
"""The values that must be equal on all ranks: the operation with its arguments, and the description of the data."""

_NOTHING = pytree.take(None, "").description
_CANNOT = ", with data that cannot be sent: "
"""Separates the operation from the error in the signature of a rank that cannot send its data."""


@functools.lru_cache(maxsize=256)
def digest_of(signature: Signature) -> tuple[int, int]:
    """Return a digest of a signature, as integers of 63 bits."""
    return agreement.digest(repr(signature).encode())


def digest_on(device: torch.device, signature: Signature) -> torch.Tensor:
    """Return the digest of a signature on a device."""
    return torch.tensor(digest_of(signature), device=device)


def compare_signatures(members: GroupArgument, signature: Signature, mode: Mode) -> Generator[Works, None, None]:
    """Compare the signatures of all ranks of the group, with one all_gather (collective).

    Raises:
        MismatchError: On every rank of the group, if the signatures differ.
    """
    yield from compare_and_gather(members, signature, (), mode)


def compare_and_gather(
    members: GroupArgument, signature: Signature, numbers: Sequence[int], mode: Mode
) -> Generator[Works, None, list[list[int]]]:
    """Compare the signatures of all ranks, and return integers of every rank, one row per rank (collective).

    Args:
        members: The group.
        signature: The signature of this rank's call.
        numbers: The integers of this rank, equally many on all ranks.
        mode: Which calls of torch.distributed are asynchronous.

    Raises:
        MismatchError: On every rank of the group, if the signatures differ.
    """
    if members.size == 1:
        return [list(numbers)]
    own = [*digest_of(signature), *numbers]
    start = len(own) - len(numbers)
    rows = yield from gathered(members, torch.tensor(own, device=members.control), mode)
    if any(row[:start] != own[:start] for row in rows):
        refuse(members, signature)
    return [row[start:] for row in rows]


def gathered(members: GroupArgument, numbers: torch.Tensor, mode: Mode) -> Generator[Works, None, list[list[int]]]:
    """Return the integers of every rank, one row per rank (collective); all ranks have equally many."""
    table = numbers.new_empty(members.size * len(numbers))  # Gloo refuses two dimensions
    yield [torch_internals.all_gather_single(table, numbers, group=members.handle, async_op=mode.early)]
    return table.view(members.size, -1).tolist()


def compare_calls(
    members: GroupArgument, operation: str, data: Data | Exception, mode: Mode
) -> Generator[Works, None, Data]:
    """Compare the calls of all ranks of the group, as `compare_signatures`, and return the data.

    Args:
        members: The group.
        operation: The operation with its arguments.
        data: The data of this rank, or the error that prevents sending it.
        mode: Which calls of torch.distributed are asynchronous.

    Raises:
        MismatchError: On every rank of the group, if the calls differ, or other ranks cannot send their data.
        Exception: The error of this rank.
    """
    with raise_after_comparison(data):
        yield from compare_signatures(members, signature_of(operation, data), mode)
    return cast("Data", data)


@contextlib.contextmanager
def raise_after_comparison(data: Data | Exception | None) -> Iterator[None]:
    """Compare the calls of the ranks in this context, then raise the error that prevents sending this rank's data."""
    if not isinstance(data, Exception):
        yield
        return
    with contextlib.suppress(MismatchError):  # the other ranks raise it
        yield
    raise data


def signature_of(operation: str, data: Data | Exception) -> Signature:
    """Return the signature of a call; that of a rank that cannot send its data differs from all others."""
    if isinstance(data, Exception):
        return f"{operation}{_CANNOT}{data}", _NOTHING
    return operation, data.description


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
    operation, description = signature
    shown = itertools.starmap(_shown_leaf, description.leaves)
    return operation, list(zip(pytree.paths(description.structure), shown, strict=True))


def _shown_leaf(kind: str, dtype: torch.dtype, shape: Sequence[Any], device: str, has_gradient: bool) -> str:
    size = ", ".join(map(str, shape))
    return f"{kind} {dtypes.short(dtype)}[{size}] on {device}{', with gradient' if has_gradient else ''}"


def _explain(members: GroupArgument, gathered: Sequence[tuple[str, list[tuple[str, str]]]]) -> str:
    operations = [operation for operation, _ in gathered]
    for rank, operation in zip(members.ranks, operations, strict=True):
        public_name, cannot, reason = operation.partition(_CANNOT)
        if cannot:
            return f"{public_name}: rank {rank} could not send its data: {reason}"
    if len(set(operations)) > 1:
        return (
            f"ranks called different operations, or one operation with different arguments:\n"
            f"{table_of(members, operations)}\n"
            f"Call the same operations in the same order on all ranks."
        )
    for number, leaves in enumerate(itertools.zip_longest(*[leaves for _, leaves in gathered])):
        if len(set(leaves)) > 1:
            shown = ["missing" if leaf is None else f"{leaf[0]} = {leaf[1]}" for leaf in leaves]
            return (
                f"{operations[0]}: the ranks' data differ, first at leaf {number}:\n"
                f"{table_of(members, shown)}\nPass data of matching structure, dtypes and shapes on all ranks."
            )
    return (
        f"{operations[0]}: the ranks' data have the same leaves in different containers.\n"
        f"Pass data in the same containers on all ranks."
    )


def table_of(members: GroupArgument, values: Sequence[str]) -> str:
    """Return the values of all ranks as text, one line for each value, with its ranks."""
    rows = sorted(agreement.ranks_by_value(values, members.ranks).items(), key=lambda item: -len(item[1]))
    return "\n".join(f"  {rank_text.name_ranks(ranks)}: {value}" for value, ranks in rows)
