"""all_reduce of a plain tensor on the CPU, whose calls occur again with tensors of the same dtype and shape.

What such calls have in common is kept. Each call then takes two methods of the group: one compares it with the other
ranks' calls, as `call_check` does, and one reduces. The functions of `torch.distributed` around these methods take as
long as a small operation itself.
"""

from __future__ import annotations

import dataclasses

import torch

from mpicomm.backend import checks
from mpicomm.backend.transfer import buffers
from mpicomm.collective_ops import call_check, pytree, reducing
from mpicomm.collective_ops.call_check import Signature
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.collective_ops.reducing import Op
from mpicomm.torch_internals import AllgatherOptions, AllreduceOptions, wait_for

_MOST_KEPT = 64  # kinds of calls per group


@dataclasses.dataclass(frozen=True)
class _Calls:
    """What the calls with one operation, dtype and shape have in common."""

    signature: Signature
    digest: torch.Tensor
    gathered: torch.Tensor
    """Receives the digest of every rank."""

    expected: torch.Tensor
    """What it receives if all ranks make this call."""

    gather_options: AllgatherOptions
    reduce_options: AllreduceOptions


def all_reduce(members: GroupArgument, tensor: torch.Tensor, op: object, *, inplace: bool) -> torch.Tensor | None:
    """Reduce a tensor (collective); return None, without any call, if it is not plain.

    Raises:
        MismatchError: On every rank, if the ranks' calls differ.
    """
    if not (members.is_ours and type(op) is str and _is_plain(tensor)) or (inplace and not buffers.is_dense(tensor)):
        return None
    key = op, tensor.dtype, tensor.shape
    calls = members.kept.get(key) or _keep(members, key, tensor)
    if calls is None:
        return None
    if members.size > 1:
        wait_for(members.handle.all_gather_single(calls.gathered, calls.digest, calls.gather_options))
        if not torch.equal(calls.gathered, calls.expected):
            call_check.refuse(members, calls.signature)
    result = reducing.bundled([tensor], inplace)
    wait_for(members.handle.allreduce([result], calls.reduce_options))
    return tensor if inplace else result


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is real, on the CPU and outside of autograd."""
    return (
        tensor.is_cpu
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_complex()  # of which dist.all_reduce sends the parts
    )


def _keep(members: GroupArgument, key: tuple[str, torch.dtype, torch.Size], tensor: torch.Tensor) -> _Calls | None:
    """Prepare the calls of a kind; return None if a tensor of this kind cannot be reduced, or not now."""
    try:
        op = Op.of(key[0], "all_reduce")
        data = pytree.take(tensor, "all_reduce")
        op.check(data, members.size, "all_reduce")
        signature = call_check.signature_of(op.in_all_reduce, data)
        digest = call_check.digest_on(members.control, signature)
        checks.require_storage(digest, "all_reduce")  # a mode or transform of torch may wrap new tensors
    except (TypeError, ValueError):
        return None
    expected = digest.repeat(members.size)
    calls = _Calls(signature, digest, torch.empty_like(expected), expected, AllgatherOptions(), AllreduceOptions())
    calls.gather_options.asyncOp = calls.reduce_options.asyncOp = False
    calls.reduce_options.reduceOp = op.handle
    if len(members.kept) >= _MOST_KEPT:
        members.kept.clear()
    members.kept[key] = calls
    return calls
