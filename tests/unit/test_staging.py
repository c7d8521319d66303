"""GPU tensors staged through the host: chunks, order, memory, failures. The device is simulated and copies late."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.backend.gpu.staging import StagingTransport
from mpicomm.backend.gpu.transport import Call, Use
from tests.movers import LateMover

READ, WRITTEN, IN_PLACE = Use(reads=True, writes=False), Use(reads=False, writes=True), Use(reads=True, writes=True)
SPREAD_READ = Use(reads=True, writes=False, is_spread=True)
SPREAD_WRITTEN = Use(reads=False, writes=True, is_spread=True)
DTYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


def staged(size: int, chunk_bytes: int, seed: int = 0) -> tuple[StagingTransport, LateMover]:
    mover = LateMover(seed)
    return StagingTransport(size, chunk_bytes, lambda _: False, lambda _: mover), mover


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()


def of_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    raw = torch.randint(limit, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def inverted(tensor: torch.Tensor) -> Call:
    """Return the call that replaces MPI in these tests: it inverts a tensor in place."""

    def call() -> None:
        raw = tensor.view(-1).view(torch.uint8)
        raw.copy_(1 - raw if tensor.dtype == torch.bool else 255 - raw)

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33])
def test_every_dtype_and_size_in_place(dtype: torch.dtype, count: int) -> None:
    transport, mover = staged(size=3, chunk_bytes=4 * dtype.itemsize)
    tensor = of_bits(count, dtype, seed=count)
    before = bits(tensor)
    transport.prepare(inverted, [tensor], [IN_PLACE])()
    assert bits(tensor) == [(1 if dtype == torch.bool else 255) - each for each in before]
    assert mover.is_quiet


@given(
    size=st.integers(1, 5),
    width=st.integers(0, 40),
    chunk=st.integers(1, 64),
    seed=st.integers(0, 2**16),
    is_dense=st.booleans(),
)
def test_a_gather_of_any_width_in_chunks_of_any_length(
    size: int, width: int, chunk: int, seed: int, is_dense: bool
) -> None:
    transport, mover = staged(size, chunk, seed)
    source = of_bits(width, torch.float32, seed)
    output = torch.zeros(size * width) if is_dense else torch.zeros(size * width, 2)[:, 0]
    lengths = []

    def make(output: torch.Tensor, source: torch.Tensor) -> Call:
        lengths.append(len(source))
        return lambda: output.view(size, -1).copy_(source)

    transport.prepare(make, [output, source], [SPREAD_WRITTEN, READ], num_blocks=size)()
    assert bits(output) == size * bits(source)
    assert mover.is_quiet
    assert sum(lengths) == width
    assert max(lengths) <= max(chunk // (4 * size), 1)


@given(size=st.integers(1, 5), width=st.integers(0, 40), chunk=st.integers(1, 64), seed=st.integers(0, 2**16))
def test_an_exchange_within_one_tensor(size: int, width: int, chunk: int, seed: int) -> None:
    transport, mover = staged(size, chunk, seed)
    tensor = of_bits(size * width, torch.float32, seed)
    before = tensor.clone()

    def make(output: torch.Tensor, source: torch.Tensor) -> Call:
        return lambda: output.view(size, -1).copy_(source.clone().view(size, -1).flip(0))

    transport.prepare(make, [tensor, tensor], [SPREAD_WRITTEN, SPREAD_READ], num_blocks=size)()
    assert bits(tensor) == bits(before.view(size, width).flip(0))
    assert mover.is_quiet


def test_parts_of_uneven_sizes_are_one_chunk() -> None:
    transport, mover = staged(size=3, chunk_bytes=4)
    outputs = [torch.zeros(count) for count in (3, 0, 2)]
    source = torch.arange(5.0)
    calls = []

    def make(source: torch.Tensor, *outputs: torch.Tensor) -> Call:
        calls.append(source)
        return lambda: [part.copy_(of) for part, of in zip(outputs, source.split([3, 0, 2]), strict=True)]  # type: ignore[return-value]

    transport.prepare(make, [source, *outputs], [READ, *[WRITTEN] * 3], num_blocks=None)()
    assert [each.tolist() for each in outputs] == [[0, 1, 2], [], [3, 4]]
    assert len(calls) == 1
    assert mover.is_quiet


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 100])
def test_three_chunks_of_memory_are_enough(chunks: int) -> None:
    transport, mover = staged(size=1, chunk_bytes=64)
    tensor = torch.zeros(16 * chunks)
    transport.prepare(inverted, [tensor], [IN_PLACE])()
    assert mover.allocations == min(chunks, 3)


def test_outputs_are_not_copied_to_the_host() -> None:
    transport, _ = staged(size=1, chunk_bytes=64)
    seen = []

    def make(host: torch.Tensor) -> Call:
        seen.append(bits(host))
        return host.zero_  # type: ignore[return-value]

    transport.prepare(make, [torch.ones(16)], [WRITTEN])()
    assert seen == [[0xAB] * 64]


def test_inputs_are_not_copied_back() -> None:
    transport, _ = staged(size=1, chunk_bytes=8)
    tensor = torch.ones(16)
    transport.prepare(inverted, [tensor], [READ])()
    assert tensor.tolist() == [1.0] * 16


def test_the_next_chunk_is_on_its_way_while_mpi_has_one() -> None:
    started, transport = [], StagingTransport(1, 8, lambda _: False, lambda _: Watched(started))

    def make(host: torch.Tensor) -> Call:
        return lambda: started.append("mpi")

    transport.prepare(make, [torch.ones(8)], [IN_PLACE])()
    assert started == [
        "mark", "follow", "fetch", "fetch", "mpi", "put", "fetch", "mpi", "put", "fetch", "mpi", "put", "mpi", "put"
    ]  # fmt: skip


class Watched(LateMover):
    """Records the steps that it starts."""

    def __init__(self, started: list[str]) -> None:
        super().__init__()
        self._started = started

    def mark(self) -> object:
        self._started.append("mark")
        return super().mark()

    def follow(self, mark: object) -> None:
        self._started.append("follow")
        super().follow(mark)

    def copy_to_host(self, pairs):  # type: ignore[no-untyped-def]
        self._started.append("fetch")
        return super().copy_to_host(pairs)

    def copy_to_device(self, pairs):  # type: ignore[no-untyped-def]
        self._started.append("put")
        return super().copy_to_device(pairs)


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_in_the_middle_leaves_no_copy_on_its_way(failing: int) -> None:
    transport, mover = staged(size=1, chunk_bytes=8)
    tensor, chunks = torch.zeros(8), []

    def make(host: torch.Tensor) -> Call:
        chunks.append(host)
        if len(chunks) > failing:
            raise OSError("the wire is cut")
        return inverted(host)

    with pytest.raises(OSError, match="the wire is cut"):
        transport.prepare(make, [tensor], [IN_PLACE])()
    assert mover.is_quiet
    assert torch.equal(tensor.isnan(), torch.arange(8) < 2 * failing)
    transport.prepare(inverted, [tensor], [IN_PLACE])()
    assert torch.equal(tensor.isnan(), torch.arange(8) >= 2 * failing)


@pytest.mark.parametrize("seed", range(10))  # selects the copies that are late
@pytest.mark.parametrize("is_dense", [True, False])
def test_a_message_is_sent_and_received(is_dense: bool, seed: int) -> None:
    transport, mover = staged(2, 8, seed)
    tensor = torch.arange(5.0) if is_dense else torch.arange(10.0)[::2] / 2
    memory, ready = transport.for_sending(tensor)
    ready.synchronize()  # type: ignore[union-attr]
    assert memory.tolist() == [0, 1, 2, 3, 4]
    target = torch.zeros(5) if is_dense else torch.zeros(10)[::2]
    output_buffer, ready, deliver = transport.for_receiving(target)
    assert ready is None
    output_buffer.copy_(torch.arange(5.0))
    deliver().synchronize()  # type: ignore[union-attr]
    assert target.tolist() == [0, 1, 2, 3, 4]
    assert mover.is_quiet


def test_tensors_that_are_on_the_host_on_all_ranks_are_not_cut() -> None:
    lengths: list[int] = []
    asked: list[bool] = []

    def make(host: torch.Tensor) -> Call:
        lengths.append(len(host))
        return lambda: None

    def all_ranks(flag: bool) -> bool:
        asked.append(flag)
        return flag

    StagingTransport(4, 32, all_ranks).prepare(make, [torch.ones(20)], [IN_PLACE])()
    assert (lengths, asked) == ([20], [True])
    StagingTransport(4, 32, all_ranks, lambda _: LateMover()).prepare(make, [torch.ones(20)], [IN_PLACE])()
    assert lengths == [20, 8, 8, 4]
    assert asked == [True, False]
