"""The Adasum reduction: adds gradients that are orthogonal, and averages gradients that are parallel.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. Pairs of ranks at the distances 1, 2,
4, ... exchange their partial results (recursive doubling), so that the number of ranks must be a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def reduce(parts: Sequence[torch.Tensor], whole: torch.Tensor, group: Any) -> None:
    """Reduce tensors in place (collective).

    Args:
        parts: The tensors; each is reduced with coefficients of its own.
        whole: The memory of all parts, which one message exchanges.
        group: The group, with a power of two of ranks.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    other = whole.new_empty(whole.shape)
    distance = 1
    while distance < size:
        partner = rank ^ distance
        sent = dist.isend(whole, group=group, group_dst=partner)
        dist.recv(other, group=group, group_src=partner)
        if sent is not None:
            sent.wait()
        start = 0
        for part in parts:
            theirs = other.view(-1)[start : start + part.numel()].view(part.shape)
            start += part.numel()
            part.copy_(_combined(part, theirs))
        distance *= 2


def _combined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Symmetric in both arguments, also in its roundings, so that both ranks compute the same bits.
    a, b = one.double(), other.double()
    dot = (a * b).sum()
    return _coefficient(dot, a) * a + _coefficient(dot, b) * b


def _coefficient(dot: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    norm = (vector * vector).sum()
    return torch.where(norm > 0, 1 - dot / (2 * norm), torch.ones_like(norm))
