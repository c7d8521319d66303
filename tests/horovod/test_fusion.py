"""The batches in which tensors are fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpicomm.devices import accelerator
from mpicomm.horovod.data_operations import DataOperations
from mpicomm.horovod.negotiation import Ready
from mpicomm.horovod.submission import ALLREDUCE, BARRIER, BROADCAST, Signature, Submission


class Calls:
    """In place of the calls of a group: adds one to each tensor that is reduced, and records its length."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        self.lengths.append(tensor.numel())
        tensor.add_(1)


def reduced(operations: DataOperations, calls: Calls, lengths: list[int]) -> list[int]:
    """Return the length of each reduction of tensors; they are of int8, so that this is the number of bytes."""
    calls.lengths.clear()
    sources = [torch.full((length,), length % 100, dtype=torch.int8) for length in lengths]
    outputs = [torch.empty_like(source) for source in sources]
    submission = Submission("a", Signature(ALLREDUCE), sources, outputs)
    operations.run([Ready("a", submission.signature, submission)])
    assert submission.error is None
    assert all(torch.equal(output, source + 1) for output, source in zip(outputs, sources, strict=True))
    return list(calls.lengths)


def batches_of(lengths: list[int], threshold: int) -> list[int]:
    calls: Any = Calls()
    return reduced(DataOperations(calls, threshold), calls, lengths)


def test_batches_do_not_exceed_the_threshold() -> None:
    assert batches_of([4, 4, 1, 9, 2, 2], 9) == [9, 4 + 4 + 1, 2 + 2]
    assert batches_of([5, 5, 5], 9) == [5, 5, 5]
    assert batches_of([3, 3, 3], 0) == [3, 3, 3]


def test_long_tensors_are_not_copied() -> None:
    assert batches_of([1, 2**20, 2], 2**27) == [2**20, 1 + 2]


class FailedEvent:
    """Of a GPU that has failed."""

    def wait(self, _stream: object) -> None:
        raise RuntimeError("the GPU has failed")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


@pytest.mark.parametrize("kind", [ALLREDUCE, BARRIER])
def test_an_operation_whose_input_failed_is_complete(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the thread that waits for it would wait forever."""
    monkeypatch.setattr(accelerator, "current_stream", lambda _device: None)
    submission = Submission("a", Signature(kind), [torch.ones(1)], [torch.ones(1)])
    submission.events = [FailedEvent()]
    calls: Any = Calls()
    DataOperations(calls, 2**20).run([Ready("a", submission.signature, submission)])
    assert submission.is_done
    assert str(submission.error) == "the GPU has failed"


def test_an_error_leaves_the_results_of_other_operations() -> None:
    class Broadcasts:
        rank = 0

        def broadcast(self, tensor: torch.Tensor, _root: int) -> None:
            if not tensor.numel():
                raise RuntimeError("empty")

    submissions = [
        Submission(name, Signature(BROADCAST, root=0), [tensor], [tensor])
        for name, tensor in (("a", torch.ones(1)), ("b", torch.ones(0)))
    ]
    calls: Any = Broadcasts()
    DataOperations(calls, 2**20).run([Ready(each.name, each.signature, each) for each in submissions])
    assert [str(submission.error or "") for submission in submissions] == ["", "empty"]
    assert submissions[0].result == submissions[0].outputs


def test_the_buffer_grows_and_shrinks() -> None:
    calls: Any = Calls()
    operations = DataOperations(calls, 2**20)
    for lengths in ([1, 2], [100, 200], [1, 2], [3] * 50):
        assert reduced(operations, calls, lengths) == [sum(lengths)]
