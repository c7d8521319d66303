"""The collectives of one process group, called with as little overhead as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.backend import torch_internals
from mpicomm.backend.torch_internals import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)
from mpicomm.horovod.reduce_op import TORCH_OPS


class GroupCalls:
    """Calls the methods of a group directly. Every method is collective, and returns when it is complete.

    The functions of `torch.distributed` find the group's rank and options anew in each call, which takes as long as a
    small operation itself.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._reductions = {op: _options(AllreduceOptions, reduceOp=torch_op) for op, torch_op in TORCH_OPS.items()}
        self._and = _options(AllreduceOptions, reduceOp=dist.ReduceOp.BAND)
        self._scatters = {op: _options(ReduceScatterOptions, reduceOp=torch_op) for op, torch_op in TORCH_OPS.items()}
        self._gather, self._to_all = _options(AllgatherOptions), _options(AllToAllOptions)
        self._broadcasts = [_options(BroadcastOptions, rootRank=root) for root in range(self.size)]
        own_name = torch_internals.own_name
        self._all_gather_single = getattr(group, own_name("all_gather_single"))
        self._all_to_all_single = getattr(group, own_name("all_to_all_single"))

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        """Reduce a tensor in place; `op` is one of Horovod's constants."""
        self.group.allreduce([tensor], self._reductions[op]).wait()

    def bitwise_and(self, tensor: torch.Tensor) -> None:
        """Reduce a tensor of integers in place, with a bitwise AND."""
        self.group.allreduce([tensor], self._and).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to all ranks, in place."""
        self.group.broadcast([tensor], self._broadcasts[root]).wait()

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Concatenate tensors of equal size."""
        self._all_gather_single(output, source, self._gather).wait()

    def all_gather_list(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Gather tensors, whose sizes may differ."""
        self.group.allgather([list(outputs)], [source], self._gather).wait()

    def reduce_scatter(self, output: torch.Tensor, sources: Sequence[torch.Tensor], op: int) -> None:
        """Reduce a list with one tensor for each rank, whose sizes may differ; each rank receives its own."""
        self.group.reduce_scatter([output], [list(sources)], self._scatters[op]).wait()

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] = (),
        source_splits: Sequence[int] = (),
    ) -> None:
        """Send each rank its rows of a tensor, and receive rows from all ranks; by default in equal parts."""
        self._all_to_all_single(output, source, list(output_splits), list(source_splits), self._to_all).wait()


def _options(kind: type, **fields: Any) -> Any:
    options = kind()
    for name, value in {**fields, "asyncOp": False}.items():
        setattr(options, name, value)
    return options
