"""The assignment of GPUs to ranks, without a GPU: it is a pure function, and the tests replace torch's results."""

from __future__ import annotations

import collections

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.errors import DeviceError
from mpicomm.job import devices

NODE = [f"GPU-{index}" for index in range(4)]
subsets = st.lists(st.sampled_from(NODE), unique=True)


def most_seated(visible: list[list[str]], taken: frozenset[str] = frozenset()) -> int:
    """Return the largest number of ranks that can have a GPU of their own, by exhaustive search."""
    if not visible:
        return 0
    without = most_seated(visible[1:], taken)
    return max([without, *(1 + most_seated(visible[1:], taken | {uuid}) for uuid in visible[0] if uuid not in taken)])


@pytest.mark.parametrize("ranks", range(len(NODE) + 1))
def test_ranks_that_see_the_whole_node_get_one_gpu_each(ranks: int) -> None:
    assert devices.assign([NODE] * ranks) == NODE[:ranks]


def test_the_order_in_which_a_rank_sees_gpus_counts() -> None:
    visible = [NODE, NODE[::-1]]
    assert devices.assign(visible) == [NODE[0], NODE[-1]]


@pytest.mark.parametrize("each", [2, 3])
def test_ranks_that_outnumber_gpus_share_evenly(each: int) -> None:
    users = collections.Counter(devices.assign([NODE] * each * len(NODE)))
    assert users == dict.fromkeys(NODE, each)


@given(st.lists(subsets, max_size=5))
def test_as_many_as_possible_have_their_own(visible: list[list[str]]) -> None:
    given_out = devices.assign(visible)
    assert len(given_out) == len(visible)
    assert len(set(given_out) - {None}) == most_seated(visible)
    for uuids, uuid in zip(visible, given_out, strict=True):
        assert uuid in uuids if uuids else uuid is None


def test_every_node_seats_its_own_ranks() -> None:
    """Each rank sees both GPUs of its node, and the ranks of the nodes alternate."""
    of_a, of_b = ["GPU-a0", "GPU-a1"], ["GPU-b0", "GPU-b1"]
    assert devices.assign_on_nodes([of_a, of_b, of_b, of_a], [0, 1, 1, 0]) == ["GPU-a0", "GPU-b0", "GPU-b1", "GPU-a1"]


@pytest.mark.parametrize("index", [None, 0, 1])
def test_the_gpu_of_a_rank_becomes_the_current_one(index: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    device = devices.select(index)
    assert device == (torch.device("cpu") if index is None else torch.device("cuda", index))
    assert current == [device] * (index is not None)


@pytest.mark.parametrize(
    ("device", "usable"), [(None, {"GPU-0": 0, "GPU-1": 1}), ("cuda:1", {"GPU-1": 1}), (0, {"GPU-0": 0}), ("cpu", {})]
)
def test_the_device_that_the_user_requests_is_the_only_one(
    device: str | int | None, usable: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "visible_gpus", lambda: NODE[:2])
    assert devices.usable_gpus(device) == usable


# -- the device that the user requests -------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Make torch report as many GPUs as the parameter gives."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize("gpus", [0, 2], indirect=True)
def test_the_cpu_is_always_there(gpus: int) -> None:
    assert devices.parse("cpu") == torch.device("cpu")


@pytest.mark.parametrize("gpus", [3], indirect=True)
def test_a_gpu_has_several_names(gpus: int) -> None:
    for index in range(gpus):
        names = [index, f"cuda:{index}", torch.device("cuda", index)]
        assert {devices.parse(name) for name in names} == {torch.device("cuda", index)}
    assert devices.parse("cuda") == torch.device("cuda", 0)


@pytest.mark.parametrize("gpus", [1, 3], indirect=True)
def test_a_gpu_that_is_not_there(gpus: int) -> None:
    with pytest.raises(DeviceError, match="does not exist") as caught:
        devices.parse(gpus)
    assert f"sees {gpus} GPU" in str(caught.value)
    assert f"cuda:{gpus - 1}" in str(caught.value)


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_a_machine_without_gpus(gpus: int, device: str | int) -> None:
    with pytest.raises(DeviceError, match="sees no GPU"):
        devices.parse(device)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", -1, ""])
def test_an_invalid_device(device: str | int) -> None:
    with pytest.raises(DeviceError, match="device must name a torch device, got "):
        devices.parse(device)


@pytest.mark.parametrize("gpus", [0], indirect=True)
def test_no_gpus_are_visible_where_there_are_none(gpus: int) -> None:
    assert devices.visible_gpus() == []


# -- checks before NCCL starts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_with_a_gpu_each_are_accepted(size: int) -> None:
    devices.refuse_shared([f"GPU-{rank}" for rank in range(size)], ["x"] * size)
    devices.refuse_shared(["GPU-0"] * size, [f"host-{rank}" for rank in range(size)])


def test_the_host_on_which_a_gpu_is_shared_is_named() -> None:
    with pytest.raises(DeviceError, match=r"^ranks 2, 3 on y share one GPU \(GPU-0\)") as caught:
        devices.refuse_shared(["GPU-0", "GPU-1", "GPU-0", "GPU-0"], ["x", "x", "y", "y"])
    assert "backend='mpi'" in str(caught.value)


@pytest.mark.parametrize(("cuda", "reason"), [(None, "was built without CUDA. Install"), ("13.0", "Run `nvidia-smi`")])
def test_why_an_assigned_gpu_cannot_be_used(cuda: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    why = devices.why_unusable("SLURM_GPUS_PER_TASK=1")
    assert why.startswith("SLURM_GPUS_PER_TASK=1 assigns GPUs, but torch ")
    assert reason in why
    with pytest.raises(DeviceError, match=reason):
        devices.refuse_shared(["GPU-0", None], ["x", "y"], [None, why])
    assert devices.why_unusable(None) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.why_unusable("SLURM_GPUS_PER_TASK=1") is None


def test_a_rank_without_a_gpu_is_named() -> None:
    with pytest.raises(DeviceError, match=r"2 of \d ranks have no GPU \(first: rank 1 on x\)") as caught:
        devices.refuse_shared(["GPU-0", None, None], ["x", "x", "y"])
    assert "backend='mpi'" in str(caught.value)
