"""The collectives of one process group, called with as little overhead as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import torch_internals
from mpicomm.horovod.submission import Average, Max, Min, Product, Sum
from mpicomm.torch_internals import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    wait_for,
)

_TORCH_OPS: dict[int, Any] = {
    Average: dist.ReduceOp.AVG,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}
_WORD_BYTES = 8  # of the integers in which bits are exchanged


class GroupCalls:
    """Calls the methods of a group directly. Every method is collective, and returns when it is complete.

    The functions of `torch.distributed` find the group's rank and options anew in each call, which takes as long as a
    small operation itself.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._reductions = {op: _options(AllreduceOptions, reduceOp=torch_op) for op, torch_op in _TORCH_OPS.items()}
        self._and = _options(AllreduceOptions, reduceOp=dist.ReduceOp.BAND)
        self._scatters = {op: _options(ReduceScatterOptions, reduceOp=torch_op) for op, torch_op in _TORCH_OPS.items()}
        self._gather, self._to_all = _options(AllgatherOptions), _options(AllToAllOptions)
        self._broadcasts = [_options(BroadcastOptions, rootRank=root) for root in range(self.size)]
        own_name = torch_internals.name_in_this_torch
        self._all_gather_single = getattr(group, own_name("all_gather_single"))
        self._all_to_all_single = getattr(group, own_name("all_to_all_single"))
        self._memory = bytearray()
        self._words = torch.empty(0, dtype=torch.int64)

    # -- tensors ---------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        """Reduce a tensor in place; `op` is one of Horovod's constants."""
        wait_for(self.group.allreduce([tensor], self._reductions[op]))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to all ranks, in place."""
        wait_for(self.group.broadcast([tensor], self._broadcasts[root]))

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Concatenate tensors of equal size."""
        wait_for(self._all_gather_single(output, source, self._gather))

    def all_gather_list(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """Gather tensors, whose sizes may differ."""
        wait_for(self.group.allgather([list(outputs)], [source], self._gather))

    def reduce_scatter(self, output: torch.Tensor, sources: Sequence[torch.Tensor], op: int) -> None:
        """Reduce a list with one tensor for each rank, whose sizes may differ; each rank receives its own."""
        wait_for(self.group.reduce_scatter([output], [list(sources)], self._scatters[op]))

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] = (),
        source_splits: Sequence[int] = (),
    ) -> None:
        """Send each rank its rows of a tensor, and receive rows from all ranks; by default in equal parts."""
        wait_for(self._all_to_all_single(output, source, list(output_splits), list(source_splits), self._to_all))

    # -- numbers and text ------------------------------------------------------------------------------------------

    def bitwise_and(self, value: int, num_words: int) -> int:
        """Return the AND of the values, of 64 * num_words bits, of all ranks."""
        num_bytes = _WORD_BYTES * num_words
        if len(self._memory) != num_bytes:
            self._memory = bytearray(num_bytes)
            self._words = torch.frombuffer(self._memory, dtype=torch.int64)
        self._memory[:] = value.to_bytes(num_bytes, "little")
        wait_for(self.group.allreduce([self._words], self._and))
        return int.from_bytes(self._memory, "little")

    def all_gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        data = bytearray(text.encode())
        sizes = self.all_gather_numbers([len(data)])
        longest = max(size for (size,) in sizes)
        data.extend(bytes(longest - len(data)))
        received = torch.empty(len(sizes) * longest, dtype=torch.uint8)
        self.all_gather(received, torch.frombuffer(data, dtype=torch.uint8))
        whole = received.numpy().tobytes()
        return [whole[rank * longest :][:size].decode() for rank, (size,) in enumerate(sizes)]

    def all_gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of all ranks, which are equally many."""
        received = torch.empty(self.size, len(numbers), dtype=torch.int64)
        self.all_gather(received.view(-1), torch.tensor(numbers, dtype=torch.int64))
        return received.tolist()

    def all_to_all_numbers(self, numbers: list[list[int]]) -> list[list[int]]:
        """Send each rank a list of numbers and return the lists of all ranks, which are equally long."""
        sent = torch.tensor(numbers, dtype=torch.int64)
        received = torch.empty_like(sent)
        self.all_to_all(received, sent)
        return received.tolist()


def _options(kind: type, **fields: Any) -> Any:
    options = kind()
    for name, value in {**fields, "asyncOp": False}.items():
        setattr(options, name, value)
    return options
