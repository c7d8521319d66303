"""The transport of GPU tensors to an MPI that is not GPU-aware: through host memory.

An operation is split into chunks: while MPI processes one, the next is copied
from the GPU and the previous one back to it. The buffers that the ranks pass to MPI must match, so all ranks split
alike if any rank's tensor is on a GPU. Before an operation of several chunks the ranks agree on this; if all tensors
are on the host, they are not split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mpicomm.backend import checks
from mpicomm.backend.gpu.transport import Call, Deliver, DeviceEvent, Make, Transport, Use
from mpicomm.backend.transfer import buffers
from mpicomm.backend.transfer.buffers import Tensors
from mpicomm.devices import accelerator, vendors

_DEPTH = 3  # chunks in flight: one is copied from the device, one is in MPI, one is copied back
_ALL = slice(None)  # the columns of a message, which is one chunk: MPI matches whole messages


class Mover:
    """Copies between a device and the host; this one within the host, synchronously, others on streams of their own."""

    is_host = True

    def mark(self) -> Any:
        """Return the current point of the caller's own stream; None on the host, which has no streams."""

    def follow(self, mark: Any) -> None:
        """Order all further copies after a mark; on the host, all earlier calls have completed."""

    def copy_to_host(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> DeviceEvent:
        """Start copying (destination, source) pairs from the device; return the event of their completion."""
        for to, source in pairs:
            to.copy_(source)
        return _DONE

    def copy_to_device(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> DeviceEvent:
        """Start copying (destination, source) pairs to the device; return the event of their completion."""
        return self.copy_to_host(pairs)

    def memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory for `count` elements that the device can access."""
        return torch.empty(count, dtype=dtype, device="cpu")


class DeviceMover(Mover):
    """Copies from and to one device through pinned memory, which torch pools."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        own_stream = vendors.vendor().own_stream
        self._fetching, self._putting = own_stream(device, self), own_stream(device, self)

    def mark(self) -> torch.Event:
        """Return the current point of the current stream."""
        return accelerator.end_of_work(self._device)

    def follow(self, mark: torch.Event) -> None:
        """Order all further copies after a mark."""
        mark.wait(self._fetching)
        mark.wait(self._putting)

    def copy_to_host(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> DeviceEvent:
        """Start copying (destination, source) pairs from the device."""
        return self._copy(list(pairs), self._fetching)

    def copy_to_device(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> DeviceEvent:
        """Start copying (destination, source) pairs to the device."""
        return self._copy(list(pairs), self._putting)

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: torch.Stream) -> DeviceEvent:
        with accelerator.on_stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        return _EndOfCopies(accelerator.record_event(stream), pairs)

    def memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned memory, without which copies would block."""
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)


class _EndOfCopies:
    """The event of the end of copies, which keeps their memory.

    torch's allocators reuse memory in the order of the stream on which it was allocated, which is not that of the
    copies.
    """

    def __init__(self, event: torch.Event, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._event, self._pairs = event, pairs

    def query(self) -> bool:
        """Return whether the copies have ended."""
        return self._event.query()

    def synchronize(self) -> None:
        """Wait until the copies have ended."""
        self._event.synchronize()


class _Done:
    """The event of copies that completed synchronously."""

    def query(self) -> bool:
        """Return True: the copies have ended."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the copies have completed."""


_DONE = _Done()


def make_mover(device: torch.device) -> Mover:
    """Return the mover between a device and the host."""
    return Mover() if device.type == "cpu" else DeviceMover(device)


class StagingTransport(Transport):
    """Stages a group's tensors for MPI if some of them are on GPUs."""

    def __init__(
        self,
        size: int,
        chunk_bytes: int,
        all_ranks: Callable[[bool], bool],
        make_mover: Callable[[torch.device], Mover] = make_mover,
    ) -> None:
        """Set how operations are split into chunks.

        Args:
            size: The number of ranks in the group.
            chunk_bytes: Bytes of a tensor that MPI processes at a time; the same on all ranks.
            all_ranks: Returns whether a flag is true on all ranks (collective).
            make_mover: Returns the mover of a device.
        """
        self._size = size
        self._chunk_bytes = self.whole_bytes = chunk_bytes
        self._all_ranks = all_ranks
        self._mover = functools.cache(make_mover)
        self._mover_of_messages = functools.cache(make_mover)  # separate: these copies may wait for other work

    def prepare(self, make: Make, tensors: Tensors, uses: Sequence[Use], *, num_blocks: int | None = 1) -> Call:
        """Return a call that runs an operation.

        Copies run after the work that the caller's stream holds now, and have completed when the operation has.
        """
        chunks = [_ALL] if num_blocks is None else self._cut(tensors[0], uses[0], num_blocks)
        are_on_host = all(self._mover(tensor.device).is_host for tensor in tensors)
        if len(chunks) == 1:
            return make(*tensors) if are_on_host else self._in_chunks(make, tensors, uses, chunks)
        # Prepared now and not in call(), because it marks the current point of the caller's GPU stream.
        in_chunks = None if are_on_host else self._in_chunks(make, tensors, uses, chunks)

        def call() -> None:
            if self._all_ranks(are_on_host):
                make(*tensors)()
            else:
                (in_chunks or self._in_chunks(make, tensors, uses, chunks))()

        return call

    def _in_chunks(self, make: Make, tensors: Tensors, uses: Sequence[Use], chunks: Sequence[slice]) -> Call:
        if len(chunks) > 1:
            tensors = self._without_hazards(tensors, uses)
        parts = [self._part(tensor, use, self._mover(tensor.device)) for tensor, use in zip(tensors, uses, strict=True)]
        return functools.partial(_run, make, parts, chunks)

    def for_sending(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent | None]:
        """Return dense host memory, and the event from which on it has the tensor's content."""
        mover = self._mover_of_messages(tensor.device)
        if mover.is_host:
            return super().for_sending(tensor)
        part = self._part(tensor, Use(reads=True, writes=False), mover)
        part.start()
        return part.memory_of_message()

    def for_receiving(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent | None, Deliver]:
        """Return dense host memory to receive a tensor's content, and the function that copies it to the tensor."""
        mover = self._mover_of_messages(tensor.device)
        if mover.is_host:
            return super().for_receiving(tensor)
        part = self._part(tensor, Use(reads=False, writes=True), mover)
        memory, _ = part.memory_of_message()
        return memory, None, part.deliver

    def _part(self, tensor: torch.Tensor, use: Use, mover: Mover) -> _Part:
        checks.require_no_graph_capture(tensor)
        return _Part(tensor, use, self._size if use.is_spread else 1, mover)

    def _without_hazards(self, tensors: Tensors, uses: Sequence[Use]) -> list[torch.Tensor]:
        """Return the tensors, with copies of the inputs that the output of an earlier chunk would overwrite."""
        outputs = [tensor for tensor, use in zip(tensors, uses, strict=True) if use.writes and not use.reads]
        result = []
        for tensor, use in zip(tensors, uses, strict=True):
            width = tensor.nbytes // (self._size if use.is_spread else 1)
            is_overwritten = not use.writes and any(_is_shifted(tensor, output, width) for output in outputs)
            result.append(tensor.detach().clone() if is_overwritten else tensor)
        return result

    def _cut(self, tensor: torch.Tensor, use: Use, num_blocks: int) -> list[slice]:
        """Return the columns of each chunk; all tensors have the same width, so all ranks compute the same chunks."""
        width = tensor.numel() // (self._size if use.is_spread else 1)
        step = max(self._chunk_bytes // (num_blocks * tensor.itemsize), 1)
        return [slice(start, min(start + step, width)) for start in range(0, max(width, 1), step)]


def _is_shifted(source: torch.Tensor, output: torch.Tensor, width: int) -> bool:
    """Return whether an output shares memory with an input, but not the same columns of `width` bytes."""
    if not (buffers.is_dense(source) and buffers.is_dense(output) and buffers.overlap(source, output)):
        return False  # a tensor that is not dense is packed before the first chunk and unpacked after the last
    return (source.data_ptr() - output.data_ptr()) % width != 0


def _run(make: Make, parts: Sequence[_Part], chunks: Sequence[slice]) -> None:
    """Run an operation chunk by chunk; copies of one chunk overlap with MPI's work on another."""
    try:
        for part in parts:
            part.start()
        for part in parts:
            part.start_to_host(0, chunks[0])
        # While MPI processes a chunk, the next one is copied to the host and the previous one back to the device.
        for number, columns in enumerate(chunks):
            if number + 1 < len(chunks):
                for part in parts:
                    part.start_to_host(number + 1, chunks[number + 1])
            make(*[part.host(number) for part in parts])()
            for part in parts:
                part.start_to_device(number, columns)
        for part in parts:
            part.start_unpacking()
    finally:
        for part in parts:
            part.wait_for_copies()


class _Part:
    """One tensor of a staged operation: rows on its device, and up to `_DEPTH` chunks of these rows on the host."""

    def __init__(self, tensor: torch.Tensor, use: Use, num_blocks: int, mover: Mover) -> None:
        self._tensor = tensor.detach()
        self._use = use
        self._mover = mover
        self._dense = buffers.pack(self._tensor) if use.reads else buffers.output_buffer(self._tensor)
        self._rows = self._dense.view(num_blocks, tensor.numel() // num_blocks)
        self._mark = mover.mark()  # on the caller's stream, after the packing
        self._hosts: list[torch.Tensor] = [self._dense] * _DEPTH
        self._memory: list[torch.Tensor | None] = [None] * _DEPTH
        self._fetched: list[DeviceEvent] = [_DONE] * _DEPTH
        self._put: list[DeviceEvent] = [_DONE] * _DEPTH
        self._last_put: DeviceEvent = _DONE

    def start(self) -> None:
        """Order the copies after the work that the caller had queued."""
        self._mover.follow(self._mark)

    def start_to_host(self, number: int, columns: slice) -> None:
        """Start copying a chunk to the host if the operation reads it; reserve host memory in any case."""
        slot = number % _DEPTH
        chunk = self._rows[:, columns]
        if self._is_there(chunk):
            self._hosts[slot] = chunk.view(-1)
            return
        self._put[slot].synchronize()  # this copy reads the memory to be reused
        host = self._memory_for(slot, chunk)
        self._hosts[slot] = host.view(-1)
        if self._use.reads:
            self._fetched[slot] = self._mover.copy_to_host(zip(host, chunk, strict=True))

    def host(self, number: int) -> torch.Tensor:
        """Return a chunk in host memory, after its copy has completed."""
        self._fetched[number % _DEPTH].synchronize()
        return self._hosts[number % _DEPTH]

    def start_to_device(self, number: int, columns: slice) -> None:
        """Start copying a chunk back if the operation writes it."""
        chunk = self._rows[:, columns]
        if self._use.writes and not self._is_there(chunk):
            host = self._hosts[number % _DEPTH].view(chunk.shape)
            self._last_put = self._put[number % _DEPTH] = self._mover.copy_to_device(zip(chunk, host, strict=True))

    def start_unpacking(self) -> None:
        """Start copying the chunks that were copied back to the tensor, if it is not dense."""
        if self._use.writes and self._dense is not self._tensor:
            self._last_put = self._mover.copy_to_device([(self._tensor, self._dense.view(self._tensor.shape))])

    def memory_of_message(self) -> tuple[torch.Tensor, DeviceEvent]:
        """Return host memory for all of the tensor, and the event from which on it has the content that is sent."""
        self.start_to_host(0, _ALL)
        return self._hosts[0], self._fetched[0]

    def deliver(self) -> DeviceEvent:
        """Start copying a received message to the tensor; return the event of the end."""
        self.start()
        self.start_to_device(0, _ALL)
        self.start_unpacking()
        return self._last_put

    def wait_for_copies(self) -> None:
        """Wait until all copies have completed."""
        for event in (*self._fetched, self._last_put):  # copies to the device end in the order in which they start
            event.synchronize()

    def _is_there(self, chunk: torch.Tensor) -> bool:
        """Return whether a chunk is already dense host memory."""
        return self._mover.is_host and len(chunk) == 1

    def _memory_for(self, slot: int, chunk: torch.Tensor) -> torch.Tensor:
        """Return memory in the shape of a chunk; the first chunk is the widest."""
        memory = self._memory[slot]
        if memory is None:
            memory = self._memory[slot] = self._mover.memory(chunk.numel(), chunk.dtype)
        return memory[: chunk.numel()].view(chunk.shape)
