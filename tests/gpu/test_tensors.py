"""Operations over MPI on GPU tensors: values, streams, and lifetimes of tensors. Ranks may share a GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpicomm.backend.gpu.transport import DIRECT
from mpicomm.devices import accelerator
from mpicomm.errors import MpicommError
from tests.gpu.conftest import CHUNK_BYTES
from tests.worlds import Group

LONG = 200_000_000  # clock cycles of a GPU: a tenth of a second
CHUNK = 2**20  # elements, several chunks of staging
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]
COUNTS = [0, 1, 100, 3 * CHUNK_BYTES // 4 + 5]


def keep_busy(device: torch.device) -> None:
    """Delay the execution of all work that is queued on the current stream from now on; emulated streams are late."""
    if device.type == "cuda":
        torch.cuda._sleep(LONG)


def of_rank(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers that depend on the rank and the index, small enough for exact sums."""
    return ((torch.arange(count, device=device) % 5) + rank).to(dtype)


def summed(size: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return sum((of_rank(rank, count, dtype, device) for rank in range(size)), torch.zeros(count, device=device)).to(
        dtype
    )


def done(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


WHEN = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
SIZES = pytest.mark.parametrize("count", COUNTS)


def test_tensors_do_not_go_as_they_are(group: Group) -> None:
    assert group.handle._executor.transport is not DIRECT


@WHEN
@SIZES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(group: Group, device: torch.device, dtype: torch.dtype, count: int, is_async: bool) -> None:
    expected = summed(group.size, count, dtype, device)
    mine = of_rank(group.rank, count, dtype, device)
    for_all, for_last = mine.clone(), mine.clone()
    done(dist.all_reduce(for_all, group=group.handle, async_op=is_async))
    done(dist.reduce(for_last, group.ranks[-1], group=group.handle, async_op=is_async))
    assert torch.equal(for_all, expected)
    assert torch.equal(for_last, expected if group.rank == group.size - 1 else mine)
    share = torch.empty_like(mine)
    done(dist.reduce_scatter_tensor(share, mine.repeat(group.size), group=group.handle, async_op=is_async))
    assert torch.equal(share, expected)


@WHEN
@SIZES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_movement(group: Group, device: torch.device, dtype: torch.dtype, count: int, is_async: bool) -> None:
    handle, size = group.handle, group.size
    of_all = [of_rank(rank, count, dtype, device) for rank in range(size)]
    mine = of_all[group.rank]
    sent = mine.clone()
    done(dist.broadcast(sent, group.ranks[-1], group=handle, async_op=is_async))
    assert torch.equal(sent, of_all[-1])
    for outputs in ([torch.empty_like(mine) for _ in range(size)], list(torch.empty(size, count).to(mine))):
        done(dist.all_gather(outputs, mine, group=handle, async_op=is_async))
        assert all(torch.equal(got, right) for got, right in zip(outputs, of_all, strict=True))
    flat = torch.empty(size * count, dtype=dtype, device=device)
    done(dist.all_gather_into_tensor(flat, mine, group=handle, async_op=is_async))
    assert torch.equal(flat, torch.cat(of_all))
    done(dist.all_to_all_single(flat, mine.repeat(size), group=handle, async_op=is_async))
    assert torch.equal(flat, torch.cat(of_all))
    got = [torch.empty_like(mine) for _ in range(size)] if group.rank == 0 else None
    done(dist.gather(mine, got, group.ranks[0], group=handle, async_op=is_async))
    assert got is None or all(torch.equal(one, right) for one, right in zip(got, of_all, strict=True))
    part = torch.empty_like(mine)
    done(dist.scatter(part, of_all if group.rank == 0 else None, group.ranks[0], group=handle, async_op=is_async))
    assert torch.equal(part, mine)


@SIZES
def test_messages(group: Group, device: torch.device, count: int) -> None:
    before, after = group.ranks[group.rank - 1], group.ranks[(group.rank + 1) % group.size]
    mine, got = of_rank(group.rank, count, torch.float32, device), torch.empty(count, device=device)
    works = [dist.irecv(got, before, group=group.handle), dist.isend(mine, after, group=group.handle)]
    for work in works:
        done(work)
    assert torch.equal(got, of_rank((group.rank - 1) % group.size, count, torch.float32, device))


def test_tensors_that_are_not_dense(group: Group, device: torch.device) -> None:
    strided = torch.zeros(1000, 2, device=device)[:, 0]
    strided += group.rank
    dist.all_reduce(strided, group=group.handle)
    assert torch.equal(strided, torch.full_like(strided, sum(range(group.size))))
    turned = torch.full((30, 70), float(group.rank), device=device).t()
    dist.broadcast(turned, group.ranks[-1], group=group.handle)
    assert torch.equal(turned, torch.full_like(turned, group.size - 1))


@WHEN
def test_an_operation_waits_for_the_callers_stream(group: Group, device: torch.device, is_async: bool) -> None:
    """The tensor receives its content late, on a separate stream of the caller."""
    tensor = torch.zeros(CHUNK, device=device)
    with stream_of(device):
        keep_busy(device)
        tensor.fill_(group.rank + 1)
        work = dist.all_reduce(tensor, group=group.handle, async_op=is_async)
    done(work)
    assert torch.equal(tensor.cpu(), torch.full((CHUNK,), float(sum(range(1, group.size + 1)))))


def test_tensors_that_are_read_late_are_not_overwritten(group: Group, device: torch.device) -> None:
    """A message arrives before a kernel that reads the old content has started."""
    before, after = group.ranks[group.rank - 1], group.ranks[(group.rank + 1) % group.size]
    tensor = torch.full((CHUNK,), -1.0, device=device)
    with stream_of(device):
        keep_busy(device)
        old = tensor.clone()
        work = dist.irecv(tensor, before, group=group.handle)
        done(dist.isend(torch.full((CHUNK,), float(group.rank), device=device), after, group=group.handle))
        done(work)
        total = old.sum().item()
    assert total == -CHUNK
    assert tensor[-1].item() == (group.rank - 1) % group.size


def test_tensors_that_are_dropped_in_flight(group: Group, device: torch.device) -> None:
    kept = [torch.full((CHUNK // 8,), float(index), device=device) for index in range(8)]
    works = []
    for tensor in kept:
        keep_busy(device)
        works.append(dist.all_reduce(tensor + 0, group=group.handle, async_op=True))
        torch.empty(CHUNK // 8, device=device).fill_(-1)  # in the memory of the temporary tensor, if it is free
    for index, work in enumerate(works):
        done(work)
        assert torch.equal(work.result()[0], kept[index] * group.size)


def test_starting_does_not_wait_for_the_gpu(group: Group, device: torch.device, alone: None) -> None:
    tensor = torch.ones(CHUNK, device=device)
    torch.accelerator.synchronize()
    start = time.perf_counter()
    keep_busy(device)
    work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    started = time.perf_counter() - start
    done(work)
    assert started < 0.5 * (time.perf_counter() - start)


def test_futures_hold_tensors_of_gpus(group: Group, device: torch.device) -> None:
    tensor = torch.full((1000,), 1.0, device=device)
    future = dist.all_reduce(tensor, group=group.handle, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    assert torch.equal(doubled, torch.full_like(tensor, 2.0 * group.size))


def test_a_graph_is_refused(group: Group, device: torch.device, alone: None) -> None:
    if device.type != "cuda":
        pytest.skip("needs CUDA graphs")
    tensor = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(MpicommError, match="a CUDA graph is being captured"), torch.cuda.graph(graph):
        dist.all_reduce(tensor, group=group.handle)
    dist.all_reduce(tensor, group=group.handle)
    assert tensor.tolist() == [group.size] * 4


def test_the_current_device_stays_the_current_one(group: Group, device: torch.device, alone: None) -> None:
    if accelerator.count() == 1:
        pytest.skip("needs two GPUs")
    other = accelerator.device_at((device.index + 1) % accelerator.count())
    tensor = torch.full((CHUNK,), group.rank + 1.0, device=other)
    dist.all_reduce(tensor, group=group.handle)
    assert accelerator.current_device() == device
    assert tensor[-1].item() == sum(range(1, group.size + 1))


def test_objects_and_barrier(group: Group) -> None:
    gathered: list[object] = [None] * group.size
    dist.all_gather_object(gathered, {"rank": group.rank}, group=group.handle)
    assert gathered == [{"rank": rank} for rank in range(group.size)]
    dist.barrier(group.handle)


def test_ddp_is_equal_to_one_process(group: Group, device: torch.device) -> None:
    samples = torch.randn(4 * group.size, 16, generator=torch.Generator().manual_seed(3)).double().to(device)

    def model() -> torch.nn.Module:
        torch.manual_seed(5)
        layers = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
        return layers.double().to(device)

    one, many = model(), DistributedDataParallel(model(), process_group=group.handle, bucket_cap_mb=1e-3)  # type: ignore[arg-type]
    for each, batch in ((one, samples), (many, samples.chunk(group.size)[group.rank])):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(batch).square().mean().backward()
            optimizer.step()
    for mine, right in zip(many.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, right)


@contextlib.contextmanager
def stream_of(device: torch.device) -> Iterator[None]:
    """Run a block on a stream of the GPU other than the default stream."""
    if device.type == "cpu":
        yield
        return
    stream = torch.Stream(device)
    stream.wait_stream(accelerator.current_stream(device))
    with accelerator.on_stream(stream):
        yield
