"""A group passes the tensors of a device to a group of torch inside it; Gloo with CPU tensors replaces NCCL."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import mpicomm
from mpicomm import torch_compatibility, torch_internals
from mpicomm.backend import groups
from mpicomm.backend.composite import CompositeProcessGroup
from mpicomm.backend.execution.executor import Executor
from mpicomm.backend.execution.work import JointWork
from mpicomm.backend.gpu.transport import DIRECT
from mpicomm.backend.operations import TABLE
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.recorder import flight_recorder
from mpicomm.settings import Settings


class Witness:
    """Forwards calls to a group and records their names."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.called: list[str] = []

    def __getattr__(self, name: str) -> object:
        self.called.append(name)
        return getattr(self.group, name)


class Grouping(Witness):
    """Coalesces messages, as NCCL does: they return nothing, and `_end_coalescing` returns the work of all of them."""

    def _get_backend(self, device: torch.device) -> object:
        return SimpleNamespace(supports_coalescing=True)

    def _start_coalescing(self, device: torch.device) -> None:
        self.called.append("start")
        self.works: list[dist.Work] = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        self.called.append("end")
        return JointWork(self.works)

    def __getattr__(self, name: str) -> object:
        if name not in ("send", "recv"):
            return super().__getattr__(name)
        self.called.append(name)
        return lambda *args: self.works.append(getattr(self.group, name)(*args))


def gloo_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """Return a group of torch whose backend is Gloo."""
    group, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(store, rank, size)
    group._set_default_backend(kind)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    return group


@pytest.fixture(params=["cpu", "cuda"])
def routed(
    world: mpicomm.World, request: pytest.FixtureRequest
) -> Iterator[tuple[CompositeProcessGroup, Witness, bool]]:
    """Return a group whose inner group serves CPU tensors, or CUDA tensors, which these tests do not use."""
    store = dist.PrefixStore(f"routed-{request.node.name}", dist.distributed_c10d._get_default_store())
    gloo: Any = Witness(gloo_group(store, world.rank, world.size))
    record = flight_recorder.Group("routed", range(world.size), 60, is_world=False)
    executor = Executor(world.comm.Dup(), record, Settings(), DIRECT)
    group = CompositeProcessGroup(executor, "routed", "mpicomm_nccl", store, request.param, gloo)
    gloo.called.clear()
    yield group, gloo, request.param == "cpu"
    if request.param == "cuda":
        MPIProcessGroup.barrier(group).wait()
    group.shutdown()


@pytest.mark.skipif(not hasattr(dist.ProcessGroupGloo, "supports_tensor_alloc"), reason="torch 2.7 does not ask for it")
def test_memory_for_collectives_is_the_inner_backends(routed: tuple) -> None:
    """FSDP2 queries the backend of a device; NCCL allocates memory that its network accesses faster."""
    group, gloo, is_inner = routed
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        is_here = is_inner == (device.type == "cpu")
        gloo.called.clear()
        assert group._get_backend(device).supports_tensor_alloc(device) is False
        assert gloo.called == (["_get_backend"] if is_here else [])


def test_tensors_are_sent_by_the_backend_of_their_device(world: mpicomm.World, routed: tuple) -> None:
    group, gloo, is_inner = routed
    total = torch.full((3,), 1.0 + world.rank)
    group.allreduce([total]).wait()
    assert torch.equal(total, torch.full((3,), world.size * (world.size + 1) / 2))
    group.reduce(tensors=[total.clone()], opts=_reduction()).wait()

    copies = [torch.empty(3) for _ in range(world.size)]
    group.allgather([copies], [torch.full((3,), float(world.rank))]).wait()
    assert [int(each[0]) for each in copies] == list(range(world.size))

    flat = torch.empty(3 * world.size)
    group.all_gather_single(flat, torch.full((3,), float(world.rank))).wait()
    assert torch.equal(flat, torch.arange(world.size).repeat_interleave(3).float())

    group.broadcast([total], _root(world.size - 1)).wait()
    single = torch_internals.name_in_this_torch("all_gather_single")
    assert gloo.called == (["allreduce", "reduce", "allgather", single, "broadcast"] if is_inner else [])


def test_all_to_all_is_sent_by_the_backend_of_its_device(world: mpicomm.World, routed: tuple) -> None:
    group, gloo, is_inner = routed
    source, output = torch.arange(world.size) + 100.0 * world.rank, torch.empty(world.size)
    group.all_to_all_single(output, source, [], []).wait()
    assert torch.equal(output, 100.0 * torch.arange(world.size) + world.rank)
    single = torch_internals.name_in_this_torch("all_to_all_single")
    assert (single in gloo.called) == is_inner
    outputs = [torch.empty(1) for _ in range(world.size)]
    try:
        group.alltoall(outputs, list(source.chunk(world.size))).wait()
    except RuntimeError as error:
        if "Backend gloo does not support alltoall" not in str(error):
            raise
        pytest.skip("torch's Gloo has no alltoall")
    assert torch.equal(torch.cat(outputs), output)
    assert ("alltoall" in gloo.called) == is_inner


def test_a_batch_of_calls_inside(world: mpicomm.World, routed: tuple) -> None:
    group, _gloo, _is_inner = routed
    tensors = [torch.full((2,), float(world.rank)) for _ in range(3)]
    group._start_coalescing(torch.device("cpu"))
    for tensor in tensors:
        group.allreduce([tensor])
    group._end_coalescing(torch.device("cpu")).wait()
    for tensor in tensors:
        assert torch.equal(tensor, torch.full((2,), float(sum(range(world.size)))))


def test_a_batch_that_fails_inside_has_ended(routed: tuple) -> None:
    group, gloo, is_inner = routed
    if not is_inner:
        pytest.skip("MPI runs the operations")
    cpu = torch.device("cpu")
    gloo._get_backend = lambda _device: SimpleNamespace(supports_coalescing=True)
    gloo._start_coalescing, gloo._end_coalescing = mock.Mock(), mock.Mock(side_effect=RuntimeError("no"))
    group._start_coalescing(cpu)
    group.allreduce([torch.ones(1)]).wait()
    with pytest.raises(RuntimeError, match="no"):
        group._end_coalescing(cpu)
    operation = flight_recorder.last()
    assert operation is not None
    assert operation.end is not None
    del gloo._get_backend, gloo._start_coalescing, gloo._end_coalescing
    assert group._executor.batch.works is None
    group.allreduce([torch.ones(1)]).wait()


@pytest.mark.each_torch("dispatcher")
def test_a_mode_receives_operations_of_the_inner_backend(world: mpicomm.World, routed: tuple) -> None:
    group, gloo, is_inner = routed
    tensor = torch.full((2,), float(world.rank))
    with CommDebugMode() as mode:
        group.allreduce([tensor]).wait()
    assert torch.equal(tensor, torch.full((2,), float(sum(range(world.size)))))
    assert mode.get_comm_counts()[torch.ops.c10d.allreduce_] == 1
    assert gloo.called.count("allreduce") == is_inner


@pytest.mark.skipif(not torch_internals.CAN_SPLIT, reason="torch 2.8 splits NCCL groups only")
def test_a_part_of_it_has_an_inner_group_of_its_own(
    world: mpicomm.World, routed: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, gloo, is_inner = routed
    monkeypatch.setattr(group, "_connect", lambda: None)  # there may be no CUDA
    store = dist.PrefixStore("part", dist.distributed_c10d._get_default_store())
    part_inner = Witness(gloo_group(store, 0, 1)) if world.rank == 0 else None
    gloo.split_group = mock.Mock(return_value=part_inner)
    part = group.split_group([0], datetime.timedelta(seconds=9), "options")
    (call,) = gloo.split_group.mock_calls  # on all ranks, as NCCL requires
    assert call == mock.call([0], timeout=datetime.timedelta(seconds=39), opts="options", group_name=mock.ANY)
    assert (part is None) == (world.rank != 0)
    if part is not None:
        part.allreduce([torch.ones(1)]).wait()
        assert ("allreduce" in part._inner.called) == is_inner
        assert "allreduce" not in gloo.called
        part.shutdown()


def test_a_torch_that_cannot_split(routed: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    group, _gloo, _is_inner = routed
    monkeypatch.setattr(torch_internals, "CAN_SPLIT", False)
    with pytest.raises(NotImplementedError, match=r"expected torch 2\.9 or newer\.\n.*new_group"):
        group.split_group([0])


def test_options_that_torch_cannot_copy() -> None:
    options = dist.ProcessGroupGloo._Options()
    assert isinstance(torch_internals.copy_of_options(options, datetime.timedelta(seconds=9)), type(options))


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(not torch_internals.CAN_SPLIT, reason="torch 2.8 splits NCCL groups only")
@pytest.mark.skipif(torch_compatibility.torch_version() >= (2, 14), reason="torch keeps the order of the ranks")
def test_both_groups_have_the_same_order(world: mpicomm.World, routed: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `dist.split_group([1, 0])`, members receive the ranks in another order than ranks outside."""
    group, gloo, _is_inner = routed
    monkeypatch.setattr(group, "_connect", lambda: None)
    gloo.split_group = mock.Mock(return_value=gloo)
    part = group.split_group([0, 1] if world.rank < 2 else [1, 0])
    assert gloo.split_group.mock_calls[0].args == ([0, 1],)
    assert (part is None) == (world.rank >= 2)
    if part is not None:
        assert (part.rank(), part.size()) == (world.rank, 2)


def test_a_split_connects_the_ranks_once(routed: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    group, gloo, is_inner = routed
    if not is_inner:
        pytest.skip("there may be no CUDA")
    monkeypatch.setattr(torch_internals, "CAN_SPLIT", True)
    gloo.split_group = mock.Mock(side_effect=KeyError("split"))
    for _ in range(2):
        with pytest.raises(KeyError):
            group.split_group([0])
    assert gloo.called.count("allreduce") == 1


def test_the_backend_of_each_device(routed: tuple) -> None:
    group, gloo, is_inner = routed
    cpu = torch.device("cpu")
    assert group._get_backend(cpu) is (gloo._get_backend(cpu) if is_inner else group)
    assert cpu in group._device_types


def test_every_method_checks_the_device_of_its_tensors() -> None:
    names = [*(operation.method for operation in TABLE), *torch_internals.RENAMED.values(), "send", "recv"]
    assert [name for name in (*names, "recv_anysource") if name not in vars(CompositeProcessGroup)] == []
    for name, method in vars(MPIProcessGroup).items():
        if inspect.isfunction(method):
            first = list(inspect.signature(method).parameters)[1:2]
            assert first != ["tensors"] or name in vars(CompositeProcessGroup), name


def test_an_operation_that_fails_inside_has_ended(routed: tuple) -> None:
    """A report of a hang would name it otherwise."""
    group, gloo, is_inner = routed
    if not is_inner:
        pytest.skip("MPI runs the operation")
    gloo.allreduce = mock.Mock(side_effect=RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        group.allreduce([torch.ones(1)])
    operation = flight_recorder.last()
    assert operation is not None
    assert operation.end is not None


def _reduction() -> object:
    return torch_internals.ReduceOptions()


def _root(rank: int) -> object:
    options = torch_internals.BroadcastOptions()
    options.rootRank = rank
    return options


@pytest.fixture
def like_nccl(world: mpicomm.World) -> Iterator[tuple[CompositeProcessGroup, Grouping]]:
    """Return a group that torch created, whose inner group receives CPU tensors and coalesces messages."""

    def create(request: Any, _backend_options: object) -> CompositeProcessGroup:
        executor = groups.make_for_torch(request, takes_gpu_tensors=False)
        inner = gloo_group(request.store, executor.comm.rank, executor.comm.size)
        return CompositeProcessGroup(executor, request.group_id, "likenccl", request.store, "cpu", inner)

    if not hasattr(dist.Backend, "LIKENCCL"):
        dist.Backend.register_backend("likenccl", create, extended_api=True, devices=["cpu"])
    group: Any = dist.new_group(backend="likenccl")
    group._inner = Grouping(group._inner)
    yield group, group._inner
    dist.destroy_process_group(group)


@pytest.mark.each_torch("p2p")
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, CommDebugMode])
def test_a_batch_of_messages_is_one_operation_of_the_inner_backend(
    world: mpicomm.World, like_nccl: tuple, mode: type[contextlib.AbstractContextManager]
) -> None:
    """Otherwise, messages over NCCL would wait for each other."""
    group, inner = like_nccl
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for repetition in range(2):
        mine, received = torch.full((4,), float(world.rank + repetition)), torch.empty(4)
        messages = [dist.P2POp(dist.isend, mine, after, group), dist.P2POp(dist.irecv, received, before, group)]
        with mode():
            for work in dist.batch_isend_irecv(messages):
                work.wait()
        assert torch.equal(received, torch.full((4,), float(before + repetition)))
    assert [name for name in inner.called if name in ("start", "send", "recv", "end")] == [
        *("start", "send", "recv", "end") * 2
    ]


def test_a_batch_of_messages_is_checked_first(like_nccl: tuple) -> None:
    _group, inner = like_nccl
    with pytest.raises(ValueError, match="p2p_op_list"):
        dist.batch_isend_irecv([torch.ones(1)])
    with pytest.raises((ValueError, IndexError)):
        dist.batch_isend_irecv([])
    assert "start" not in inner.called


@pytest.mark.each_torch("groups")
def test_torchs_function_sets_both_timeouts(world: mpicomm.World, like_nccl: tuple) -> None:
    """The inner backend has the longer timeout: the watchdog names the ranks before NCCL terminates the process."""
    group, inner = like_nccl
    backend = mock.Mock()
    inner._get_backend = lambda _device: backend
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=7.5), group)
    assert group.timeout_seconds == 7.5
    assert backend.mock_calls == [mock.call.set_timeout(datetime.timedelta(seconds=37.5))]


@pytest.mark.each_torch("groups")
def test_torchs_function_sets_the_timeout_of_a_group_over_mpi(world: mpicomm.World) -> None:
    group = dist.new_group()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=7.5), group)
        before = dist.group.WORLD.timeout_seconds
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=before + 1))
    assert (group.timeout_seconds, dist.group.WORLD.timeout_seconds) == (7.5, before + 1)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=before))
    with pytest.raises(TypeError):
        dist.distributed_c10d._set_pg_timeout(7.5, group)
    dist.destroy_process_group(group)
