"""The assignment of devices to ranks, without a device: pure functions, and an accelerator that the tests simulate."""

from __future__ import annotations

import collections
import re
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.devices import accelerator, assignment, counting, vendor_backends, vendors
from mpicomm.errors import DeviceError
from mpicomm.launch.visible_devices import AMD, INTEL

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
    assert assignment.assign([NODE] * ranks) == NODE[:ranks]


def test_the_order_in_which_a_rank_sees_gpus_counts() -> None:
    visible = [NODE, NODE[::-1]]
    assert assignment.assign(visible) == [NODE[0], NODE[-1]]


@pytest.mark.parametrize("each", [2, 3])
def test_ranks_that_outnumber_gpus_share_evenly(each: int) -> None:
    users = collections.Counter(assignment.assign([NODE] * each * len(NODE)))
    assert users == dict.fromkeys(NODE, each)


@given(st.lists(subsets, max_size=5))
def test_as_many_as_possible_have_their_own(visible: list[list[str]]) -> None:
    given_out = assignment.assign(visible)
    assert len(given_out) == len(visible)
    assert len(set(given_out) - {None}) == most_seated(visible)
    for uuids, uuid in zip(visible, given_out, strict=True):
        assert uuid in uuids if uuids else uuid is None


def test_every_node_seats_its_own_ranks() -> None:
    """Each rank sees both GPUs of its node, and the ranks of the nodes alternate."""
    of_a, of_b = ["GPU-a0", "GPU-a1"], ["GPU-b0", "GPU-b1"]
    assigned = assignment.assign_on_nodes([of_a, of_b, of_b, of_a], [0, 1, 1, 0])
    assert assigned == ["GPU-a0", "GPU-b0", "GPU-b1", "GPU-a1"]


# -- the devices that a process sees -----------------------------------------------------------------------------------


class WithUUIDs(vendors.Vendor):
    """A vendor whose devices have these UUIDs."""

    name = "Simulated"
    visible_variables = ("VISIBLE", "VISIBLE_TOO")
    driver_check = "check-driver"

    def __init__(self, *uuids: str) -> None:
        self._uuids = uuids

    def uuid(self, index: int) -> str:
        return self._uuids[index]


def simulate(monkeypatch: pytest.MonkeyPatch, device_type: str | None, *uuids: str) -> None:
    """Make torch report an accelerator that has one device for each UUID; None for a torch without one."""
    monkeypatch.setattr(vendor_backends, "device_type", lambda: device_type)
    monkeypatch.setattr(accelerator, "is_available", lambda: bool(uuids))
    monkeypatch.setattr(accelerator, "count", lambda: len(uuids))
    monkeypatch.setattr(vendors, "vendor", lambda: WithUUIDs(*uuids))


@pytest.mark.parametrize(
    ("device", "usable"), [(None, {"GPU-0": 0, "GPU-1": 1}), ("xpu:1", {"GPU-1": 1}), (0, {"GPU-0": 0}), ("cpu", {})]
)
def test_the_device_that_the_user_requests_is_the_only_one(
    device: str | int | None, usable: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, "xpu", *NODE[:2])
    assert assignment.usable_devices(device) == usable


@pytest.mark.parametrize("uuids", [("", ""), ("GPU-0", ""), ("GPU-0", "GPU-0")])
def test_devices_without_uuids_of_their_own_are_numbered(
    uuids: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual machines and the parts of one GPU may have equal UUIDs."""
    simulate(monkeypatch, "xpu", *uuids)
    for name in WithUUIDs.visible_variables:
        monkeypatch.delenv(name, raising=False)
    assert assignment.visible_devices() == ["device 0", "device 1"]
    monkeypatch.setenv("VISIBLE", "3,5")
    assert assignment.visible_devices() == ["VISIBLE=3", "VISIBLE=5"]


@pytest.mark.parametrize(
    ("environ", "identities"),
    [
        ({}, ["device 0", "device 1"]),
        ({"A": ""}, ["device 0", "device 1"]),
        ({"A": "0, 2"}, ["A=0", "A=2"]),
        ({"B": "0.0,0.1"}, ["B=0.0", "B=0.1"]),
        ({"A": "1"}, ["device 0 of A=1", "device 1 of A=1"]),  # a GPU of two tiles
        ({"A": "2,3", "B": "0,1"}, ["device 0 of A=2,3 B=0,1", "device 1 of A=2,3 B=0,1"]),  # B is relative to A
    ],
)
def test_the_identities_of_devices_without_uuids(environ: dict[str, str], identities: list[str]) -> None:
    assert assignment.identities(2, ("A", "B"), environ) == identities


@pytest.mark.parametrize(
    ("module", "uuid"),
    [
        (types.SimpleNamespace(), ""),
        (types.SimpleNamespace(get_device_properties=lambda _index: types.SimpleNamespace(name="x")), ""),
        (
            types.SimpleNamespace(get_device_properties=lambda index: types.SimpleNamespace(uuid=f"GPU-{index}")),
            "GPU-1",
        ),
    ],
)
def test_the_uuid_of_an_extensions_device(
    module: types.SimpleNamespace, uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor_backends, "device_type", lambda: "npu")
    monkeypatch.setattr(torch, "get_device_module", {"npu": module}.get)
    assert vendors.Vendor().uuid(1) == uuid
    assert accelerator.device_name("npu") == ""


def test_ranks_whose_visible_devices_differ_have_a_device_each() -> None:
    visible = [assignment.identities(1, ("A",), {"A": str(rank)}) for rank in range(3)]
    assert len(set(assignment.assign(visible))) == 3
    shared = [assignment.identities(1, ("A",), {})] * 3
    assert assignment.assign(shared) == ["device 0"] * 3


# -- the device that the user requests ---------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Make torch report as many devices as the parameter gives, on `xpu`."""
    simulate(monkeypatch, "xpu", *(f"GPU-{index}" for index in range(request.param)))
    return request.param


@pytest.mark.parametrize("gpus", [0, 2], indirect=True)
@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu", 0)])
def test_the_cpu_is_always_there(gpus: int, device: str | torch.device) -> None:
    assert assignment.parse(device) == torch.device("cpu")


@pytest.mark.parametrize("gpus", [3], indirect=True)
def test_a_gpu_has_several_names(gpus: int) -> None:
    for index in range(gpus):
        names = [index, f"xpu:{index}", torch.device("xpu", index)]
        assert {assignment.parse(name) for name in names} == {torch.device("xpu", index)}
    assert assignment.parse("xpu") == torch.device("xpu", 0)


@pytest.mark.parametrize("gpus", [1, 3], indirect=True)
def test_a_gpu_that_is_not_there(gpus: int) -> None:
    with pytest.raises(DeviceError, match="does not exist") as caught:
        assignment.parse(gpus)
    assert f"sees {gpus} GPU" in str(caught.value)
    assert f"xpu:{gpus - 1}" in str(caught.value)


@pytest.mark.parametrize("built_for", ["cuda", None])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_a_machine_without_gpus(device: str | int, built_for: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, built_for)
    with pytest.raises(DeviceError, match=r"this process sees no GPU\.\nPass 'cpu', or omit"):
        assignment.parse(device)
    assert assignment.visible_devices() == []
    assert assignment.usable_devices(None) == {}


@pytest.mark.parametrize("device", ["gpu", "cuda:x", -1, ""])
def test_an_invalid_device(device: str | int) -> None:
    with pytest.raises(DeviceError, match="device must name a torch device, got "):
        assignment.parse(device)


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.parametrize("device", ["cuda:0", "meta"])
def test_the_device_of_another_accelerator(gpus: int, device: str) -> None:
    with pytest.raises(DeviceError, match=r"^device must be on cpu or xpu, got '.*'\.\nPass 'cpu', 'xpu' or 'xpu:N'"):
        assignment.parse(device)


def test_a_type_that_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, None)
    with pytest.raises(
        DeviceError, match=r"^device must be on cpu or an accelerator, got 'meta'\.\nPass 'cpu', or omit"
    ):
        assignment.parse("meta")


# -- checks before the vendor's library starts -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_with_a_gpu_each_are_accepted(size: int) -> None:
    assignment.refuse_shared([f"GPU-{rank}" for rank in range(size)], ["x"] * size, "NCCL")
    assignment.refuse_shared(["GPU-0"] * size, [f"host-{rank}" for rank in range(size)], "NCCL")


def test_the_host_on_which_a_gpu_is_shared_is_named() -> None:
    with pytest.raises(DeviceError, match=r"^ranks 2, 3 on y share one GPU \(GPU-0\), which XCCL does not") as caught:
        assignment.refuse_shared(["GPU-0", "GPU-1", "GPU-0", "GPU-0"], ["x", "x", "y", "y"], "XCCL")
    assert str(caught.value).endswith("backend='mpi'.")


def test_the_variable_with_which_nccl_shares_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendors, "vendor", vendors.CUDA)
    with pytest.raises(DeviceError, match=r"\(NCCL 2\.30 or newer\), set NCCL_MULTI_RANK_GPU_ENABLE=1\.$"):
        assignment.refuse_shared(["GPU-0", "GPU-0"], ["x", "x"], "NCCL")


@pytest.mark.parametrize(
    ("built_for", "assigned", "reason"),
    [
        (None, "SLURM_GPUS_PER_TASK=1", r"was built without CUDA\. Install a torch with CUDA\.$"),
        (None, "ROCR_VISIBLE_DEVICES=1", r"was built without ROCm\. Install a torch with ROCm\.$"),
        (None, "ZE_AFFINITY_MASK=0,1", r"was built without XPU\. Install a torch with XPU\.$"),
        ("xpu", "SLURM_GPUS_PER_TASK=1", r"finds no working driver\. Run `check-driver` in the job\.$"),
    ],
)
def test_why_an_assigned_gpu_cannot_be_used(
    built_for: str | None, assigned: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, built_for)
    why = assignment.why_unusable(assigned)
    assert why.startswith(f"{assigned} assigns GPUs, but torch {torch.__version__} ")
    assert re.search(reason, why)
    with pytest.raises(DeviceError, match=r"^NCCL needs one GPU per rank") as caught:
        assignment.refuse_shared(["GPU-0", None], ["x", "y"], "NCCL", [None, why])
    assert f"{why} Or use backend='mpi'." in str(caught.value)
    assert assignment.why_unusable(None) is None
    if built_for:
        monkeypatch.setenv("VISIBLE", "-1")  # the variable of torch's vendor
        assert assignment.why_unusable(assigned) is None
    simulate(monkeypatch, "xpu", "GPU-0")
    assert assignment.why_unusable(assigned) is None


def test_the_vendor_of_the_host_counts_where_slurm_sets_all_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, None)
    for vendor, title in ((AMD, "ROCm"), (INTEL, "XPU"), (None, "CUDA")):
        monkeypatch.setattr(counting, "count", lambda _environ, vendor=vendor: counting.Accelerators(vendor, 1))
        assert f"Install a torch with {title}." in assignment.why_unusable("CUDA_VISIBLE_DEVICES=0")


def test_the_command_that_checks_the_driver_of_each_vendor() -> None:
    kinds = (vendors.CUDA, vendors.ROCm, vendors.XPU, vendors.Vendor)
    assert [kind().driver_check for kind in kinds] == ["nvidia-smi", "rocm-smi", "xpu-smi discovery", "mpicomm doctor"]


def test_a_rank_without_a_gpu_is_named() -> None:
    with pytest.raises(DeviceError, match=r"2 of \d ranks have no GPU \(first: rank 1 on x\)") as caught:
        assignment.refuse_shared(["GPU-0", None, None], ["x", "x", "y"], "NCCL")
    assert "Ask the scheduler for one GPU per task. Or use backend='mpi'." in str(caught.value)
