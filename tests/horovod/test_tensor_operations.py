"""The results of the operations, as formulas of rank and size."""

from __future__ import annotations

import itertools
import math
import types
from typing import Any

import numpy as np
import pytest
import torch

import mpicomm.horovod as hvd
from mpicomm import torch_internals
from mpicomm.devices import vendors

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("started")]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_reductions(dtype: torch.dtype) -> None:
    rank, size = hvd.rank(), hvd.size()
    values = [other + 2 for other in range(size)]
    tensor = torch.full((2, 3), rank + 2, dtype=dtype)
    product = 1
    for each in values:
        product *= each
    expected = {
        hvd.Sum: sum(values),
        hvd.Average: sum(values) / size if dtype.is_floating_point else sum(values) // size,
        hvd.Min: min(values),
        hvd.Max: max(values),
        hvd.Product: product,
    }
    for op, value in expected.items():
        result = hvd.allreduce(tensor, op=op)
        assert result.dtype == dtype
        assert torch.equal(result, torch.full((2, 3), value, dtype=dtype)), op
    assert torch.equal(tensor, torch.full((2, 3), rank + 2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32], ids=str)
def test_factors(dtype: torch.dtype) -> None:
    size = hvd.size()
    tensor = torch.full((5,), 6, dtype=dtype)
    scaled = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)
    assert scaled.tolist() == [int(3 * size * 1.5) if dtype == torch.int32 else 3 * size * 1.5] * 5
    scattered = hvd.reducescatter(tensor.repeat(size), op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)
    assert scattered.tolist() == scaled.tolist()
    assert tensor.tolist() == [6] * 5
    factors = {"prescale_factor": np.float32(0.5), "postscale_factor": torch.tensor(1.5)}
    assert hvd.allreduce(tensor, op=np.int64(hvd.Sum), **factors).tolist() == scaled.tolist()
    assert hvd.reducescatter(tensor.repeat(size), op=np.int64(hvd.Sum), **factors).tolist() == scaled.tolist()


@pytest.mark.parametrize("factor", ["2", math.nan, torch.ones(2), None], ids=str)
def test_a_factor_that_is_no_number_is_an_error_of_this_rank_alone(factor: Any) -> None:
    with pytest.raises(ValueError, match=r"^allreduce_: postscale_factor must be a number, got "):
        hvd.allreduce_(torch.ones(1), postscale_factor=factor)
    with pytest.raises(ValueError, match=r"^reducescatter: prescale_factor must be a number, got "):
        hvd.reducescatter(torch.ones(1), prescale_factor=factor)
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


def test_in_place_and_grouped() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensors = [torch.full((n, 2), float(rank + n)) for n in range(1, 6)]
    tensors.append(torch.full((2,), rank, dtype=torch.int64))
    sums = [[sum(r + n for r in range(size))] * 2 for n in range(1, 6)]
    copies = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert [each[0].tolist() for each in copies[:5]] == sums
    assert hvd.grouped_allreduce_(tensors, op=hvd.Sum)[0] is tensors[0]
    assert [each[0].tolist() for each in tensors[:5]] == sums
    assert tensors[5].tolist() == [sum(range(size))] * 2
    column = torch.full((4, 3), float(rank))[:, 1]
    assert hvd.allreduce_(column, op=hvd.Max) is column
    assert column.tolist() == [size - 1] * 4


def test_fusion() -> None:
    """Small and long tensors, of several dtypes and operations, in one cycle."""
    rank, size = hvd.rank(), hvd.size()
    handles = []
    lengths = (1, 10, 30, 400_000, 0, 7)
    for length, dtype in itertools.product(lengths, (torch.float32, torch.int64)):
        for op in (hvd.Sum, hvd.Max):
            tensor = torch.full((length,), rank + length, dtype=dtype)
            name = f"fused {length} {dtype} {op}"
            value = size - 1 + length if op == hvd.Max else sum(range(size)) + size * length
            handles.append((hvd.allreduce_async(tensor, name=name, op=op), torch.full((length,), value, dtype=dtype)))
    for handle, expected in handles:
        assert torch.equal(hvd.synchronize(handle), expected)


def test_an_error_of_any_type_ends_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would end the wait of its caller."""

    def fail(*_: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(torch_internals, "copy_all", fail)
    with pytest.raises(KeyError, match="a defect"):
        hvd.grouped_allreduce([torch.ones(3), torch.ones(3)], name="fails")
    monkeypatch.undo()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_adasum() -> None:
    """Parallel gradients are averaged, orthogonal ones are added, in between the formula of the paper."""
    rank, size = hvd.rank(), hvd.size()
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match="Adasum needs a power of two of ranks"):
            hvd.allreduce(torch.ones(4), op=hvd.Adasum)
        return

    def reference(vectors: list[torch.Tensor]) -> torch.Tensor:
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [
                a * (1 - a @ b / (2 * (a @ a).clamp(min=1e-300))) + b * (1 - a @ b / (2 * (b @ b).clamp(min=1e-300)))
                for a, b in pairs
            ]
        return vectors[0]

    generators = [torch.Generator().manual_seed(each) for each in range(size)]
    drawn = [torch.randn(50, generator=generator, dtype=torch.float64) for generator in generators]
    inputs = {
        "parallel": [torch.full((3,), 2.0, dtype=torch.float64)] * size,
        "orthogonal": list(torch.eye(size, dtype=torch.float64)),
        "zero": [torch.zeros(4, dtype=torch.float64)] * size,
        "drawn": drawn,
    }
    handles = {name: hvd.allreduce_async(each[rank], name=name, op=hvd.Adasum) for name, each in inputs.items()}
    results = {name: hvd.synchronize(handle) for name, handle in handles.items()}
    assert results["parallel"].tolist() == [2.0] * 3
    assert results["orthogonal"].tolist() == [1.0] * size
    assert results["zero"].tolist() == [0.0] * 4
    torch.testing.assert_close(results["drawn"], reference(drawn))
    gathered = hvd.allgather(results["drawn"].unsqueeze(0))
    assert all(torch.equal(each, results["drawn"]) for each in gathered)
    with pytest.raises(ValueError, match="Adasum reduces floating-point tensors"):
        hvd.allreduce(torch.ones(4, dtype=torch.int64), op=hvd.Adasum)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float64], ids=str)
def test_allgather(dtype: torch.dtype) -> None:
    rank, size = hvd.rank(), hvd.size()
    for rows in ([2] * size, list(range(size)), [0] * size):
        tensor = torch.full((rows[rank], 3), rank % 2, dtype=dtype)
        result = hvd.allgather(tensor)
        expected = [torch.full((count, 3), other % 2, dtype=dtype) for other, count in enumerate(rows)]
        assert torch.equal(result, torch.cat(expected))
    one, two = hvd.grouped_allgather([torch.tensor([rank]), torch.full((rank, 2), float(rank))])
    assert one.tolist() == list(range(size))
    assert two[:, 1].tolist() == [other for other in range(size) for _ in range(other)]
    with pytest.raises(ValueError, match=r"^allgather: the tensor must have at least one dimension, got a scalar"):
        hvd.allgather(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"^grouped_allgather: "):
        hvd.grouped_allgather([torch.tensor(1.0)])


def test_allgather_of_rows_that_change_under_one_name() -> None:
    rank, size = hvd.rank(), hvd.size()
    for number in range(6):
        result = hvd.allgather(torch.full(((rank + number) % 3,), rank), name="changing rows")
        assert result.tolist() == [other for other in range(size) for _ in range((other + number) % 3)]


def test_broadcast() -> None:
    rank, size = hvd.rank(), hvd.size()
    for root in (0, size - 1):
        tensor = torch.full((2, 2), rank)
        assert hvd.broadcast(tensor, root).tolist() == [[root, root]] * 2
        assert tensor.tolist() == [[rank, rank]] * 2
        assert hvd.broadcast_(tensor, root) is tensor
        assert tensor.tolist() == [[root, root]] * 2
    scalar = torch.tensor(float(rank))
    assert hvd.broadcast(scalar, 1).item() == 1.0
    with pytest.raises(ValueError, match="root_rank must be one of the ranks"):
        hvd.broadcast(scalar, size)


def test_alltoall() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.arange(size * 2).reshape(size * 2, 1) + 100 * rank
    equal = hvd.alltoall(tensor)
    assert equal[:, 0].tolist() == [100 * other + 2 * rank + i for other in range(size) for i in range(2)]
    # rank r sends d rows to rank d, and keeps one row
    splits = list(range(size))
    rows = torch.arange(sum(splits) + 1) + 100 * rank
    received, counts = hvd.alltoall(rows, splits)
    assert counts.tolist() == [rank] * size
    assert counts.dtype == torch.int32
    start = sum(range(rank))
    assert received.tolist() == [100 * other + start + i for other in range(size) for i in range(rank)]
    # the tensor of the splits can be used again after the call
    reused = torch.ones(size, dtype=torch.int32)
    handle = hvd.alltoall_async(torch.arange(2 * size) + 100 * rank, reused)
    reused.fill_(2)
    assert hvd.synchronize(handle)[0].tolist() == [100 * other + rank for other in range(size)]
    for bad, message in ((torch.ones(size), "int32"), ([1] * (size + 1), "one for each rank"), ([9] * size, "at most")):
        with pytest.raises(ValueError, match=message):
            hvd.alltoall(torch.ones(size), bad)
    with pytest.raises(ValueError, match=f"must be a multiple of {size}"):
        hvd.alltoall(torch.ones(size + 1))


def test_reducescatter() -> None:
    rank, size = hvd.rank(), hvd.size()
    for extra in range(size):  # the first ranks receive one row more
        rows = 2 * size + extra
        tensor = torch.arange(rows).reshape(rows, 1) * (rank + 1)
        result = hvd.reducescatter(tensor, op=hvd.Sum)
        counts = [2 + (other < extra) for other in range(size)]
        start = sum(counts[:rank])
        total = sum(range(1, size + 1))
        assert result[:, 0].tolist() == [total * (start + i) for i in range(counts[rank])]
    averaged = hvd.grouped_reducescatter([torch.full((size, 2), float(rank)), torch.full((1,), float(rank))])
    assert averaged[0].tolist() == [[(size - 1) / 2] * 2]
    assert averaged[1].tolist() == [(size - 1) / 2] * (rank == 0)
    with pytest.raises(hvd.HorovodInternalError, match=r"op must be hvd.Average or hvd.Sum"):
        hvd.reducescatter(torch.ones(size), op=hvd.Adasum)


def test_sparse() -> None:
    rank, size = hvd.rank(), hvd.size()
    dense = torch.zeros(size + 1, 2)
    dense[rank] = rank + 1.0
    dense[size] = 1.0
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        result = hvd.sparse_allreduce_async(dense.to_sparse(1), f"sparse {op}", op)()
        expected = [(row + 1) / divisor for row in range(size)] + [size / divisor]
        assert result.to_dense()[:, 1].tolist() == pytest.approx(expected)


def test_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()

    def gradient(tensor: torch.Tensor, output: torch.Tensor, factor: float = 1.0) -> list[float]:
        output.backward(torch.full_like(output, factor))
        return tensor.grad.flatten().tolist()

    def leaf(*shape: int) -> torch.Tensor:
        return torch.full(shape, rank + 1.0, requires_grad=True)

    x = leaf(3)
    assert gradient(x, hvd.allreduce(x, op=hvd.Sum)) == [size] * 3
    x = leaf(3)
    assert gradient(x, hvd.allreduce(x, prescale_factor=2.0), rank) == pytest.approx([(size - 1)] * 3)
    x = leaf(rank + 1)
    assert gradient(x, hvd.allgather(x)) == [1.0] * (rank + 1)
    x = leaf(2)
    assert gradient(x, hvd.broadcast(x, 1), rank) == [(size - 1) / 2 if rank == 1 else 0.0] * 2
    x = leaf(sum(range(size)) + 1)  # the last row is sent to no rank
    output, _ = hvd.alltoall(x, list(range(size)))
    expected = [float(other) for other in range(size) for _ in range(other)] + [0.0]
    assert gradient(x, output, rank) == expected
    x = leaf(size)
    assert gradient(x, hvd.reducescatter(x, op=hvd.Sum), rank) == [size * other for other in range(size)]
    x, y = leaf(size), leaf(2 * size)
    one, two = hvd.grouped_reducescatter([x, y], postscale_factor=3.0)
    (one.sum() + two.sum()).backward()
    assert x.grad.tolist() == [3.0] * size
    assert y.grad.tolist() == [3.0] * 2 * size


def test_compression() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.full((3,), 1 + rank / 4096)  # float16 has no such number
    result = hvd.allreduce(tensor, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert result.dtype == torch.float32
    assert result.tolist() == [torch.tensor(1 + r / 4096).half().float().item() * size for r in [0]] * 3
    integers = hvd.allreduce(torch.full((3,), 70_000), compression=hvd.Compression.fp16, op=hvd.Sum)
    assert integers.tolist() == [70_000 * size] * 3


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="got both op and average"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert hvd.allreduce(torch.ones(1), average=False).item() == hvd.size()
    with pytest.raises(ValueError, match=r"op must be hvd.Average, .*, got 9"):
        hvd.allreduce(torch.ones(1), op=9)
    with pytest.raises(ValueError, match=r"use hvd.sparse_allreduce_async\(\)"):
        hvd.allreduce(torch.ones(2).to_sparse())
    with pytest.raises(ValueError, match=r"op must be hvd\.Average or hvd\.Sum"):
        hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "name", hvd.Max)
    with pytest.raises(ValueError, match=r"^sparse_allreduce_async: the process set is not registered"):
        hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "name", hvd.Sum, hvd.ProcessSet([0]))


def test_properties_of_the_job() -> None:
    import torch.distributed as dist

    assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert 0 <= hvd.local_rank() < hvd.local_size() <= hvd.size()
    assert hvd.local_rank() + hvd.local_size() * hvd.cross_rank() == hvd.rank()
    assert hvd.cross_size() * hvd.local_size() == hvd.size()
    assert hvd.mpi_enabled()
    assert hvd.mpi_threads_supported()
    assert not hvd.gloo_enabled()
    assert hvd.ccl_built() == dist.is_xccl_available()
    assert hvd.nccl_built() == 0 or torch.cuda.is_available()


def test_the_version_of_nccl_is_a_number_as_in_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    vendor = types.SimpleNamespace(versions=lambda: {"CUDA": "12.8", "NCCL": "2.27.3"})
    monkeypatch.setattr(vendors, "vendor", lambda: vendor)
    assert hvd.nccl_built() == 22703
