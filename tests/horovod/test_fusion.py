"""The batches in which tensors are fused."""

from __future__ import annotations

import torch

from mpicomm.horovod.fusion import FusionBuffer, Pair


def batches_of(lengths: list[int], threshold: int) -> list[list[int]]:
    """Return the lengths of the tensors in each reduction; the tensors are of int8, so that these are bytes."""
    pairs = [Pair(torch.full((n,), n % 100, dtype=torch.int8), torch.empty(n, dtype=torch.int8)) for n in lengths]
    batches = []

    def run(whole: torch.Tensor, parts: list[torch.Tensor]) -> None:
        assert sum(part.numel() for part in parts) == whole.numel()
        batches.append([part.numel() for part in parts])
        whole.add_(1)

    FusionBuffer(torch.int8, torch.device("cpu")).reduce(pairs, threshold, run)
    assert all(torch.equal(pair.output, pair.source + 1) for pair in pairs)
    return batches


def test_batches_do_not_exceed_the_threshold() -> None:
    assert batches_of([4, 4, 1, 9, 2, 2], 9) == [[9], [4, 4, 1], [2, 2]]
    assert batches_of([5, 5, 5], 9) == [[5], [5], [5]]
    assert batches_of([3, 3, 3], 0) == [[3], [3], [3]]


def test_long_tensors_are_not_copied() -> None:
    assert batches_of([1, 2**20, 2], 2**27) == [[2**20], [1, 2]]


def test_the_buffer_grows_and_shrinks() -> None:
    for lengths in ([1, 2], [100, 200], [1, 2], [3] * 50):
        assert batches_of(lengths, 2**20) == [lengths]
