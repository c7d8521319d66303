"""A vendor's backend inside a group receives every call as torch's own process group makes it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from mpicomm import torch_compatibility, torch_internals
from mpicomm.backend import registration
from mpicomm.devices import vendors
from mpicomm.devices.accelerator import end_of_work
from mpicomm.recorder import flight_recorder, stream_queue
from tests import accelerator
from tests.accelerator import recording
from tests.gpu.test_tensors import keep_busy

EXTRA_SECONDS = 30
"""Added to the timeout of the vendor's backend, so that the watchdog of mpicomm reports first."""


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The arguments of the operations, the same for both groups: the calls hold their addresses."""

    single: torch.Tensor
    others: list[torch.Tensor]
    blocks: list[torch.Tensor]
    flat: torch.Tensor

    @classmethod
    def make(cls, rank: int, size: int, device: torch.device) -> Tensors:
        single = torch.arange(3.0, device=device) + rank
        others = [torch.full((2,), float(rank + index), device=device) for index in range(size)]
        blocks = [torch.full((3,), float(10 * rank + index), device=device) for index in range(size)]
        return cls(single, others, blocks, torch.arange(3.0 * size, device=device) + 100 * rank)

    def copy(self) -> list[torch.Tensor]:
        return [tensor.to("cpu", copy=True) for tensor in (self.single, *self.others, *self.blocks, self.flat)]


Program = Callable[[dist.ProcessGroup, Tensors], Any]


@pytest.fixture(scope="module", autouse=True)
def backend_name(device: torch.device) -> str:
    """Return the name of the backend over MPI with a recording backend for the tensors of the device."""
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    recording.register(device.type)
    return registration.register_beside(f"{device.type}:{recording.NAME}")


@pytest.fixture(scope="module")
def pair(backend_name: str) -> Iterator[list[dist.ProcessGroup]]:
    """Return a group of torch and one of mpicomm, each with a recording backend for the tensors of the device."""
    groups = [dist.new_group(backend=name) for name in (recording.NAME, backend_name)]
    yield groups
    for group in groups:
        dist.destroy_process_group(group)


@pytest.fixture
def group(pair: list[dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group of mpicomm."""
    backend_of(pair[1]).calls.clear()
    return pair[1]


def backend_of(group: dist.ProcessGroup) -> recording.Recording:
    """Return the recording backend that has the name of a group."""
    return next(backend for backend in reversed(recording.backends) if backend.name == group.group_name)


def methods_of(group: dist.ProcessGroup) -> list[str]:
    return [call.method for call in backend_of(group).calls]


# -- programs ----------------------------------------------------------------------------------------------------------


def all_reduce(group: dist.ProcessGroup, tensors: Tensors) -> None:
    dist.all_reduce(tensors.single, dist.ReduceOp.AVG, group)
    dist.all_reduce(tensors.flat, dist.ReduceOp.MAX, group, async_op=True).wait()


def options(group: dist.ProcessGroup, tensors: Tensors) -> None:
    opts = torch_internals.AllreduceOptions()
    opts.reduceOp, opts.timeout = dist.ReduceOp.MIN, datetime.timedelta(seconds=7)
    group.allreduce([tensors.single], opts).wait()


def rooted(group: dist.ProcessGroup, tensors: Tensors) -> None:
    last, is_root = group.size() - 1, group.rank() == 0
    dist.broadcast(tensors.single, group=group, group_src=last)
    dist.reduce(tensors.flat, group=group, group_dst=last)
    dist.gather(tensors.single, tensors.blocks if is_root else None, group=group, group_dst=0)
    dist.scatter(tensors.single, tensors.blocks if is_root else None, group=group, group_src=0)


def blocks(group: dist.ProcessGroup, tensors: Tensors) -> None:
    dist.all_gather(tensors.blocks, tensors.single, group)
    dist.all_gather_into_tensor(tensors.flat, tensors.single, group)
    dist.reduce_scatter(tensors.single, tensors.blocks, group=group)
    dist.reduce_scatter_tensor(tensors.single, tensors.flat, dist.ReduceOp.AVG, group)


def all_to_all(group: dist.ProcessGroup, tensors: Tensors) -> None:
    received = tensors.others
    dist.all_to_all(received, [tensor + 1 for tensor in received], group)
    uneven = [1] * (group.size() - 1) + [3 * group.size() - group.size() + 1]
    received_sizes = [uneven[group.rank()]] * group.size()
    output = torch.zeros(sum(received_sizes), device=tensors.flat.device)
    dist.all_to_all_single(output, tensors.flat, received_sizes, uneven, group)
    tensors.flat[0] = output.sum()


def messages(group: dist.ProcessGroup, tensors: Tensors) -> None:
    if group.rank() == 0:
        dist.send(tensors.single, group=group, group_dst=1, tag=5)
    elif group.rank() == 1:
        dist.recv(tensors.single, group=group, group_src=0, tag=5)


def batch_of_messages(group: dist.ProcessGroup, tensors: Tensors) -> None:
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensors.single, group=group, group_peer=after),
            dist.P2POp(dist.irecv, tensors.blocks[0], group=group, group_peer=before),
        ]
    )
    for work in works:
        work.wait()


def coalesced(group: dist.ProcessGroup, tensors: Tensors) -> None:
    with dist.distributed_c10d._coalescing_manager(group, tensors.single.device):
        pass
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in tensors.others:
            dist.all_reduce(tensor, group=group)
    with dist.distributed_c10d._coalescing_manager(group, tensors.single.device, async_ops=True) as joint:
        dist.broadcast(tensors.single, group=group, group_src=0, async_op=True)
        dist.reduce_scatter(tensors.single, tensors.blocks, group=group, async_op=True)
    joint.wait()


def several_tensors(group: dist.ProcessGroup, tensors: Tensors) -> None:
    functional.wait_tensor(functional.all_reduce(tensors.single, "sum", group))
    gathered = functional.all_gather_into_tensor_coalesced(tensors.others, group)
    sums = functional.reduce_scatter_tensor_coalesced(
        [functional.wait_tensor(tensor) for tensor in gathered], "sum", [0] * len(gathered), group
    )
    for tensor, total in zip(tensors.others, sums, strict=True):
        tensor.copy_(functional.wait_tensor(total))


PROGRAMS = (all_reduce, options, rooted, blocks, all_to_all, messages, batch_of_messages, coalesced, several_tensors)


def _describe(calls: Sequence[recording.Call], kept: Tensors) -> list[Any]:
    """Return the calls, with the addresses of temporary tensors removed."""
    known = {tensor.data_ptr() for tensor in (kept.single, *kept.others, *kept.blocks, kept.flat)}

    def value(argument: Any) -> Any:
        if isinstance(argument, tuple):
            if len(argument) == 3 and isinstance(argument[2], torch.dtype):
                return argument if argument[0] in known else argument[1:]
            return tuple(map(value, argument))
        return argument

    return [(call.method, value(call.arguments), call.stream) for call in calls]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_call_is_that_of_torchs_own_group(
    pair: list[dist.ProcessGroup], device: torch.device, program: Program
) -> None:
    tensors = Tensors.make(pair[0].rank(), pair[0].size(), device)
    before, results, calls = tensors.copy(), [], []
    stream = None if device.type == "cpu" else torch.Stream(device)
    for group in pair:
        for tensor, initial in zip(
            (tensors.single, *tensors.others, *tensors.blocks, tensors.flat), before, strict=True
        ):
            tensor.copy_(initial)
        backend_of(group).calls.clear()
        with on_stream(stream):
            program(group, tensors)
            results.append(tensors.copy())
        calls.append(_describe(backend_of(group).calls, tensors))
    assert calls[0] == calls[1]
    assert calls[1] or program is messages
    assert all(map(torch.equal, *results))


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one in a block, in order with the stream that was current before."""
    if stream is None:
        yield
        return
    outer = torch.accelerator.current_stream(stream.device)
    stream.wait_stream(outer)
    with stream:
        yield
    outer.wait_stream(stream)


def test_ddp_calls_it_as_torchs_own_group(pair: list[dist.ProcessGroup], device: torch.device) -> None:
    gradients, calls = [], []
    for group in pair:
        backend_of(group).calls.clear()
        torch.manual_seed(7)
        model = DistributedDataParallel(torch.nn.Linear(4, 2).to(device), process_group=group)
        for step in range(2):
            model(torch.ones(3, 4, device=device) * (group.rank() + step)).sum().backward()
        gradients.append([parameter.grad.to("cpu") for parameter in model.parameters()])
        calls.append([call.method for call in backend_of(group).calls])
    assert calls[0] == calls[1]
    assert calls[1].count("allreduce") >= 2
    assert all(map(torch.equal, *gradients))


def test_fsdp_calls_it_as_torchs_own_group(pair: list[dist.ProcessGroup], device: torch.device) -> None:
    calls, gradients = [], []
    for group in pair:
        backend_of(group).calls.clear()
        torch.manual_seed(7)
        layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).to(device)
        model = fully_shard(layers, mesh=DeviceMesh.from_group(group, device.type))
        model(torch.ones(3, 4, device=device) * (group.rank() + 1)).sum().backward()
        gradients.append([parameter.grad.to_local().to("cpu") for parameter in layers.parameters()])
        calls.append([(call.method, call.arguments[-1]) for call in backend_of(group).calls])
    assert calls[0] == calls[1]
    assert {"_allgather_base", "_reduce_scatter_base"} <= {method for method, _options in calls[1]}
    assert all(map(torch.equal, *gradients))


def one_call(group: dist.ProcessGroup, tensors: Tensors) -> list[dist.Work]:
    dist.all_reduce(tensors.single, group=group)
    return []


def one_asynchronous_call(group: dist.ProcessGroup, tensors: Tensors) -> list[dist.Work]:
    return [dist.all_reduce(tensors.single, group=group, async_op=True)]


def a_batch(group: dist.ProcessGroup, tensors: Tensors) -> list[dist.Work]:
    with dist.distributed_c10d._coalescing_manager(group, tensors.single.device):
        dist.all_reduce(tensors.single, group=group)
        dist.broadcast(tensors.flat, group=group, group_src=0)
    return []


def an_asynchronous_batch(group: dist.ProcessGroup, tensors: Tensors) -> list[dist.Work]:
    with dist.distributed_c10d._coalescing_manager(group, tensors.single.device, async_ops=True) as joint:
        dist.all_reduce(tensors.single, group=group, async_op=True)
        dist.broadcast(tensors.flat, group=group, group_src=0, async_op=True)
    return joint.works


def a_batch_of_messages(group: dist.ProcessGroup, tensors: Tensors) -> list[dist.Work]:
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    sent = dist.P2POp(dist.isend, tensors.single, group=group, group_peer=after)
    received = dist.P2POp(dist.irecv, tensors.blocks[0], group=group, group_peer=before)
    return dist.batch_isend_irecv([sent, received])


CALLS = (one_call, one_asynchronous_call, a_batch, an_asynchronous_batch, a_batch_of_messages)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_an_operation_is_recorded_until_the_device_has_run_it(
    group: dist.ProcessGroup, device: torch.device, call: Any, is_capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the vendor's backend returns no work for it. A captured operation has ended: it runs later, or never."""
    if device.type != accelerator.NAME:
        pytest.skip("the host cannot block a stream of a real GPU")
    tensors = Tensors.make(group.rank(), group.size(), device)
    torch.accelerator.synchronize()
    number = flight_recorder.last().number
    with backend_of(group).paused():
        monkeypatch.setattr(vendors.Vendor, "is_capturing", lambda _vendor: is_capturing)
        works = call(group, tensors)
        monkeypatch.undo()
        stream_queue.refresh_all()
        operations = [operation for operation in flight_recorder.recorded() if operation.number > number]
        assert [operation.end is not None for operation in operations] == [is_capturing] * len(operations)
        assert [operation in flight_recorder.running() for operation in operations[:1]] == [not is_capturing]
    for work in works:
        work.wait()
    torch.accelerator.synchronize()
    stream_queue.refresh_all()
    assert all(operation.end is not None for operation in operations)
    if not is_capturing:
        assert all(operation.is_message or operation.sequence for operation in operations)


def test_modes_see_the_operation_once(group: dist.ProcessGroup, device: torch.device) -> None:
    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(2, device=device), group=group)
    assert mode.get_comm_counts()[torch.ops.c10d.allreduce_] == 1
    assert methods_of(group) == ["allreduce"]


def test_tensors_of_the_host_take_mpi(group: dist.ProcessGroup, device: torch.device) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [group.size()] * 3
    assert methods_of(group) == []


def test_a_barrier_waits_for_the_current_stream(group: dist.ProcessGroup, device: torch.device) -> None:
    content = torch.zeros(1, device=device)
    torch.accelerator.synchronize()
    with contextlib.ExitStack() as stack:
        if device.type == accelerator.NAME:
            accelerator.configure(kernel_seconds=0.5)
            stack.callback(accelerator.configure)
        keep_busy(device)
        content.add_(1)
        end = end_of_work(device)
        dist.barrier(group)
        assert end.query()


@pytest.mark.mpi(min_size=2)
def test_a_batch_on_two_devices(group: dist.ProcessGroup, device: torch.device) -> None:
    """The batch of the vendor's backend holds its messages; those over MPI are waited for, too."""
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    sent = {kind: torch.full((5,), float(group.rank()), device=kind) for kind in ("cpu", device)}
    received = {kind: torch.zeros(5, device=kind) for kind in sent}
    messages = [dist.P2POp(dist.isend, tensor, group=group, group_peer=after) for tensor in sent.values()]
    messages += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=before) for tensor in received.values()]
    if group.rank() == 0:  # one by one, the messages would not block each other
        messages.reverse()
    backend_of(group).delay_seconds = 0.3
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    backend_of(group).delay_seconds = 0.0
    assert [tensor[4].item() for tensor in received.values()] == [before] * len(received)
    if torch_compatibility.torch_version() < (2, 15):  # later, the device of the first message decides
        order = ["recv", "send"] if group.rank() == 0 else ["send", "recv"]
        assert methods_of(group) == ["start_coalescing", *order, "end_coalescing"]


def test_the_names_the_timeout_and_the_options(world: mpicomm.World, device: torch.device, backend_name: str) -> None:
    chosen = recording.new_options()
    chosen._timeout = datetime.timedelta(seconds=40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = dist.new_group(timeout=datetime.timedelta(seconds=40), backend=backend_name, pg_options=chosen)
    backend = backend_of(group)
    assert fields_of(chosen) == (datetime.timedelta(seconds=40), "", [])
    assert backend.options is not chosen
    assert backend.options._timeout == backend.timeout == datetime.timedelta(seconds=40 + EXTRA_SECONDS)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=50), group)
    assert backend.timeout == datetime.timedelta(seconds=50 + EXTRA_SECONDS)
    for get_backend in (
        group._get_backend,
        functools.partial(dist.ProcessGroup._get_backend, group),
    ):  # Python's, C++'s
        assert get_backend(device).name() == recording.NAME
    assert [dist.get_backend(group), world.backend] == [backend_name, "mpi"]
    dist.destroy_process_group(group)
    assert [call.method for call in backend.calls] == ["set_timeout", "shutdown"]


def fields_of(options: Any) -> tuple[Any, ...]:
    return options._timeout, options.group_name, list(options.global_ranks_in_group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("has_options", [False, True])
@pytest.mark.skipif(not torch_internals.CAN_SPLIT, reason="torch 2.8 splits NCCL groups only")
def test_a_split_leaves_the_options_of_its_parent_and_of_the_user(group: dist.ProcessGroup, has_options: bool) -> None:
    opts = recording.new_options() if has_options else None
    shared = [backend_of(group).options, *([opts] if opts else [])]
    before = [fields_of(options) for options in shared]
    for ranks, name in (([1], "second rank"), ([0, 1], "two ranks")):  # NCCL would look up rank 1 among one rank
        part = group.split_group(ranks, datetime.timedelta(seconds=7), opts, group_name=f"{name} {has_options}")
        assert [fields_of(options) for options in shared] == before
        if part is not None:
            assert fields_of(backend_of(part).options) == (
                datetime.timedelta(seconds=7 + EXTRA_SECONDS),
                part.group_name,
                ranks,
            )
            part.shutdown()


@pytest.mark.skipif(not torch_internals.CAN_SPLIT, reason="torch 2.8 splits NCCL groups only")
def test_a_group_is_split_by_the_vendors_backend(device: torch.device, backend_name: str) -> None:
    """Also before its first operation, in which NCCL connects, and on the device of the last one."""
    group = dist.new_group(backend=backend_name)
    part = group.split_group([0], group_name="first")
    assert methods_of(group) == ["allreduce", "split"]
    assert backend_of(group).device == device
    assert (part is None) == (group.rank() > 0)
    if part is not None:
        part.allreduce([torch.ones(1, device=device)]).wait()
        assert methods_of(part) == ["allreduce"]
        part.shutdown()
    other = torch.device(device.type, (device.index + 1) % torch.accelerator.device_count())
    dist.all_reduce(torch.ones(1, device=other), group=group)
    part = group.split_group([0], group_name="second")
    assert backend_of(group).device == other
    if part is not None:
        part.shutdown()
    dist.destroy_process_group(group)


def test_an_aborted_group_aborts_it(backend_name: str) -> None:
    group = dist.new_group(backend=backend_name)
    group.abort()
    assert methods_of(group) == ["abort"]
    dist.destroy_process_group(group)
