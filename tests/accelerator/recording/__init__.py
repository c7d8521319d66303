"""A vendor's backend for tests: it runs every operation on a device, and records the calls as torch makes them.

It stages tensors through host memory and communicates by a Gloo backend of its own, in the order of the calls, on its
own stream and thread: a call returns before the device has finished, as with NCCL. As NCCL and XCCL, it returns no work
for a collective with `async_op=False`, which is in the order of the caller's stream. `backend.cpp` makes it a
`c10d::Backend`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import importlib.util
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import accelerator
from tests.accelerator import build

NAME = "recording"
_OPTIONS = ("reduceOp", "rootRank", "asyncOp", "timeout", "device_ids", "sparseIndices")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a method of the backend."""

    method: str
    arguments: tuple[Any, ...]
    """Tensors as (address, shape, dtype), options as a dictionary."""

    stream: int | None
    """The current stream of the caller; None on the CPU."""


class Recording:
    """The methods of the backend, which `backend.cpp` calls; `calls` has every call since its creation."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, options: Any) -> None:
        self.rank, self.size, self.timeout, self.options = rank, size, timeout, options
        self.calls: list[Call] = []
        self.name = ""
        self.delay_seconds = 0.0  # before every operation
        self.device: torch.device | None = None  # of the last operation
        self._is_connected = False
        self._number = 0
        self._batch: list[Callable[[], None]] | None = None
        self._batch_is_async = True  # as the last operation in it
        self._tensors: list[torch.Tensor] = []
        self._host = dist.ProcessGroupGloo(dist.PrefixStore("recording/", store), rank, size, timeout=timeout)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=NAME)
        self._thread.submit(int).result()  # starts the thread now, not in the first operation

    # -- state ---------------------------------------------------------------------------------------------------

    def set_name(self, name: str) -> None:
        self.name = name

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.timeout = timeout
        self._note("set_timeout", timeout)

    def sequence_number(self) -> int:
        return self._number

    def connect(self, device: str) -> None:
        self._note("connect", device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run no operation in a block."""
        is_over = threading.Event()
        self._thread.submit(is_over.wait)
        try:
            yield
        finally:
            is_over.set()

    def abort(self) -> None:
        self._note("abort")
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._host.abort()

    def shutdown(self) -> None:
        self._note("shutdown")
        self._thread.shutdown()
        self._host.shutdown()

    def split(self, store: dist.Store, ranks: Sequence[int], options: Any) -> dist.distributed_c10d.Backend | None:
        self._note("split", tuple(ranks), options.group_name, options._timeout)
        if not self._is_connected:
            raise RuntimeError("recording: split before the first collective; NCCL crashes")
        if self.rank not in ranks:
            return None
        own_store = dist.PrefixStore(options.group_name, store)
        return make(own_store, ranks.index(self.rank), len(ranks), options._timeout, options)

    # -- collectives ---------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        def run(host: torch.Tensor) -> None:
            host.copy_(self._gather(host)[opts.rootRank])

        return self._operation("broadcast", (tensors, opts), tensors, run)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self._operation("allreduce", (tensors, opts), tensors, functools.partial(self._reduce, opts.reduceOp))

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        def run(*hosts: torch.Tensor) -> None:
            for host in hosts:
                self._reduce(opts.reduceOp, host)

        return self._operation("allreduce_coalesced", (tensors, opts), tensors, run)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        def run(host: torch.Tensor) -> None:
            total = host.clone()
            self._reduce(opts.reduceOp, total)
            if self.rank == opts.rootRank:
                host.copy_(total)

        return self._operation("reduce", (tensors, opts), tensors, run)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def run(*hosts: torch.Tensor) -> None:
            for output, part in zip(hosts[:-1], self._gather(hosts[-1]), strict=True):
                output.copy_(part)

        return self._operation("allgather", (outputs, inputs, opts), [*outputs[0], inputs[0]], run)

    def _allgather_base(self, output: Any, source: Any, opts: Any) -> Any:
        def run(gathered: torch.Tensor, host: torch.Tensor) -> None:
            gathered.view(-1).copy_(torch.cat([part.view(-1) for part in self._gather(host)]))

        return self._operation("_allgather_base", (output, source, opts), [output, source], run)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def run(*hosts: torch.Tensor) -> None:
            for output, host in zip(hosts[: len(outputs)], hosts[len(outputs) :], strict=True):
                output.view(-1).copy_(torch.cat([part.view(-1) for part in self._gather(host)]))

        return self._operation("allgather_into_tensor_coalesced", (outputs, inputs, opts), [*outputs, *inputs], run)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def run(host: torch.Tensor, *gathered: torch.Tensor) -> None:
            parts = self._gather(host)
            for output, part in zip(gathered, parts, strict=False):
                output.copy_(part)

        targets = outputs[0] if self.rank == opts.rootRank else []
        return self._operation("gather", (outputs, inputs, opts), [inputs[0], *targets], run)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def run(output: torch.Tensor, *sources: torch.Tensor) -> None:
            parts = torch.stack(sources) if sources else output.new_empty([self.size, *output.shape])
            output.copy_(self._gather(parts)[opts.rootRank][self.rank])

        sources = inputs[0] if self.rank == opts.rootRank else []
        return self._operation("scatter", (outputs, inputs, opts), [outputs[0], *sources], run)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def run(output: torch.Tensor, *sources: torch.Tensor) -> None:
            total = torch.stack(sources)
            self._reduce(opts.reduceOp, total)
            output.copy_(total[self.rank])

        return self._operation("reduce_scatter", (outputs, inputs, opts), [outputs[0], *inputs[0]], run)

    def _reduce_scatter_base(self, output: Any, source: Any, opts: Any) -> Any:
        def run(block: torch.Tensor, host: torch.Tensor) -> None:
            self._reduce_blocks(opts.reduceOp, block, host)

        return self._operation("_reduce_scatter_base", (output, source, opts), [output, source], run)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def run(*hosts: torch.Tensor) -> None:
            for block, host in zip(hosts[: len(outputs)], hosts[len(outputs) :], strict=True):
                self._reduce_blocks(opts.reduceOp, block, host)

        return self._operation("reduce_scatter_tensor_coalesced", (outputs, inputs, opts), [*outputs, *inputs], run)

    def alltoall_base(self, output: Any, source: Any, output_sizes: Any, input_sizes: Any, opts: Any) -> Any:
        def run(received: torch.Tensor, host: torch.Tensor) -> None:
            self._host.alltoall_base(received, host, output_sizes, input_sizes, opts).wait()

        arguments = (output, source, tuple(output_sizes), tuple(input_sizes), opts)
        return self._operation("alltoall_base", arguments, [output, source], run)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def run(*hosts: torch.Tensor) -> None:
            received, sources = hosts[: self.size], hosts[self.size :]
            joined = torch.cat([output.view(-1) for output in received])
            sizes = [[tensor.numel() for tensor in tensors] for tensors in (received, sources)]
            self._host.alltoall_base(joined, torch.cat([source.view(-1) for source in sources]), *sizes, opts).wait()
            for output, part in zip(received, joined.split(sizes[0]), strict=True):
                output.view(-1).copy_(part)

        return self._operation("alltoall", (outputs, inputs, opts), [*outputs, *inputs], run)

    def barrier(self, opts: Any) -> Any:
        return self._operation("barrier", (opts,), [], lambda: self._host.barrier().wait())

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        return self._operation("send", (tensors, rank, tag), tensors, lambda host: self._host.send([host], rank, tag))

    def recv(self, tensors: Any, rank: int, tag: int) -> Any:
        return self._operation("recv", (tensors, rank, tag), tensors, lambda host: self._host.recv([host], rank, tag))

    def recvAnysource(self, tensors: Any, tag: int) -> Any:  # noqa: N802  torch's name
        return self._operation(
            "recvAnysource", (tensors, tag), tensors, lambda host: self._host.recv_anysource([host], tag)
        )

    # -- coalescing ----------------------------------------------------------------------------------------------

    def start_coalescing(self) -> None:
        self._note("start_coalescing")
        self._batch, self._tensors = [], []

    def end_coalescing(self) -> Any:
        self._note("end_coalescing")
        runs, self._batch = self._batch, None
        assert runs is not None
        if not runs:
            return None  # as NCCL

        def run() -> None:  # all operations start before one is waited for, as those of a group of NCCL
            waits = [run() for run in runs]
            for wait in waits:
                wait()

        return self._submit(run, self._tensors, is_async=self._batch_is_async)

    # -- execution -----------------------------------------------------------------------------------------------

    def _note(self, method: str, *arguments: Any) -> None:
        stream = None
        if self.device is not None and self.device.type != "cpu":
            stream = torch.accelerator.current_stream(self.device).stream_id
        self.calls.append(Call(method, tuple(map(_describe, arguments)), stream))

    def _operation(
        self, method: str, arguments: Sequence[Any], tensors: Sequence[torch.Tensor], run: Callable[..., Any]
    ) -> Any:
        """Record a call, and run it now or with the coalesced batch, on host copies of the tensors."""
        if tensors:
            self.device = tensors[0].device
        self._note(method, *arguments)
        self._number += 1

        def start() -> Callable[[], None]:
            hosts = [tensor if tensor.is_cpu else tensor.to("cpu") for tensor in tensors]
            work = run(*hosts)

            def finish() -> None:
                if work is not None:
                    work.wait()
                for tensor, host in zip(tensors, hosts, strict=True):
                    if not tensor.is_cpu and method != "send":
                        tensor.copy_(host)

            return finish

        is_collective = hasattr(arguments[-1], "asyncOp")
        is_async = getattr(arguments[-1], "asyncOp", True)
        self._is_connected |= is_collective  # messages have communicators of two ranks
        if self._batch is not None:
            self._batch.append(start)
            self._batch_is_async = is_async
            self._tensors += tensors
            return _completed_work() if is_collective and is_async else None

        def run_alone() -> None:
            start()()

        return self._submit(run_alone, tensors, is_async=is_async)

    def _submit(self, run: Callable[[], None], tensors: Sequence[torch.Tensor], *, is_async: bool) -> Any:
        """Run a function on the thread and stream of the backend, after the caller's stream.

        Returns:
            A `Work`; or None if the operation is synchronous: the caller's stream waits for it.
        """
        device = self.device
        on_device = device is not None and device.type != "cpu"
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device] if on_device else [])
        ready = torch.accelerator.current_stream(device).record_event() if on_device else None

        def complete() -> None:
            time.sleep(self.delay_seconds)
            try:
                with self._own_stream(device) if on_device else contextlib.nullcontext() as stream:
                    if ready is not None:
                        stream.wait_event(ready)
                    run()
                    future.set_result(list(tensors))
                    if stream is not None and not is_async:
                        stream.synchronize()
            except BaseException as error:  # noqa: BLE001  the waiting thread gets it
                future.set_exception(error)  # type: ignore[arg-type]

        release = accelerator.block_stream() if on_device and device.type == accelerator.NAME and not is_async else None
        try:
            task = self._thread.submit(complete)
        except RuntimeError:  # the backend has been aborted
            if release is not None:
                release()
            raise
        if release is not None:  # also if the backend is aborted
            task.add_done_callback(lambda _task: release())
        elif not is_async:  # a real device's stream cannot be blocked by the host
            future.wait()
        return torch._C._distributed_c10d._create_work_from_future(future) if is_async else None

    @functools.cache  # noqa: B019  lives as long as the process
    def _own_stream(self, device: torch.device) -> torch.Stream:
        return torch.Stream(device)

    def _gather(self, host: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks."""
        parts = [torch.empty_like(host) for _ in range(self.size)]
        self._host.allgather([parts], [host]).wait()
        return parts

    def _reduce(self, op: Any, host: torch.Tensor) -> None:
        """All-reduce a tensor in place, in the order of the ranks."""
        kind, parts = dist.ReduceOp.RedOpType, torch.stack(self._gather(host))
        match op.op if hasattr(op, "op") else op:
            case kind.SUM:
                host.copy_(parts.sum(0, dtype=host.dtype))
            case kind.AVG:
                host.copy_(parts.sum(0, dtype=host.dtype) / self.size)
            case kind.MAX:
                host.copy_(parts.amax(0))
            case kind.MIN:
                host.copy_(parts.amin(0))
            case kind.PRODUCT:
                host.copy_(parts.prod(0, dtype=host.dtype))
            case _:
                raise NotImplementedError(f"recording: unsupported reduction {op}")

    def _reduce_blocks(self, op: Any, block: torch.Tensor, host: torch.Tensor) -> None:
        """Reduce a tensor, and copy the block of this rank."""
        self._reduce(op, host)
        block.view(-1).copy_(host.view(-1).chunk(self.size)[self.rank])


def _completed_work() -> Any:
    """Return a work like that of a collective in a batch of NCCL: the batch has another work, which it waits for."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([])
    return torch._C._distributed_c10d._create_work_from_future(future)


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_describe, value))
    if type(value).__name__.endswith("Options"):
        return {name: _describe(getattr(value, name)) for name in _OPTIONS if hasattr(value, name)}
    return value.op if isinstance(value, dist.ReduceOp) else value


# -- registration ------------------------------------------------------------------------------------------------------

backends: list[Recording] = []
"""The backends of this process, in the order of their creation."""


@functools.cache
def _extension() -> Any:
    path = build.library([Path(__file__).with_name("backend.cpp")], NAME)
    spec = importlib.util.spec_from_file_location("recording_backend", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def new_options() -> Any:
    """Return options of the backend, to be passed as `pg_options`."""
    return _extension().Options()


def make(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, options: Any) -> Any:
    """Return a `Backend`, and append the object that records its calls to `backends`."""
    recording = Recording(store, rank, size, timeout, options)
    backends.append(recording)
    return _extension().RecordingBackend(recording, rank, size, options)


def register(device_type: str) -> None:
    """Register the backend with torch for a type of devices; further calls do nothing."""

    def create(opts: Any, given: Any) -> Any:
        options = given or new_options()
        if given and options._timeout != opts.timeout:
            warnings.warn("backend_options._timeout was specified", stacklevel=2)  # as torch for NCCL
        options._timeout, options.group_name = opts.timeout, opts.group_id
        options.global_ranks_in_group = list(opts.global_ranks_in_group) or list(range(opts.group_size))
        return make(opts.store, opts.group_rank, opts.group_size, opts.timeout, options)

    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=[device_type])
