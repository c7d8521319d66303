"""The accelerators of machines, counted in the kernel's files and in variables, without a driver.

The trees of files follow the documentation and sources of kernels, drivers and computing centres. For each machine the
ranks that `mpicomm run` starts, their cores, the device of each rank, and the backend.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from mpicomm import mpi
from mpicomm.cli import launching
from mpicomm.devices import assignment, counting, vendors
from mpicomm.devices.counting import Accelerators
from mpicomm.job import plan
from mpicomm.launch import commands, queries, visible_devices
from mpicomm.launch.allocation import Host, HostAllocation, SlurmAllocation
from mpicomm.launch.mpi_library import Library
from mpicomm.launch.request import Machine, Request, Start
from mpicomm.launch.visible_devices import AMD, ASCEND, GAUDI, INTEL, NVIDIA
from tests.machine_files import Files, accel, amd, ascend, intel, kfd_node, nvidia, write


@pytest.fixture
def root(tmp_path: Path, files: Files) -> Path:
    """Return the root of a tree with these files."""
    return write(files, tmp_path)


# -- machines ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class UsedMachine:
    """A machine, a job on it, and how mpicomm uses it."""

    files: Files
    cores: int
    vendor: str | None
    ranks: int
    cores_per_rank: int
    """Number of cores to which each rank is bound."""
    devices: tuple[str, ...]
    """The device of every rank, as the rank sees it."""
    backend: str
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The environment of the job script."""
    pbs: HostAllocation | None = None
    of_rank: str | None = None
    """The variable by which the scheduler gives every rank its own device; None if every rank sees all of them."""
    prefix: str = ""
    """Of the names of these devices in the variable; without one they are numbers."""


WITH_NCCL, WITH_ONECCL = "cpu:mpi,cuda:nccl", "cpu:mpi,xpu:xccl"
SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}
MACHINES = {
    # OLCF: a GCD of an MI250X is a GPU; of the 64 cores, 8 are reserved for the system. Jobs have whole nodes, and
    # Slurm reports their GPUs even if the job requests none.
    "Frontier": UsedMachine(
        amd(8, sockets=4), 56, AMD, 8, 7, ("cuda:0",) * 8, WITH_NCCL,
        {**SLURM, "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "56", "SLURM_TASKS_PER_NODE": "56"},
        of_rank="ROCR_VISIBLE_DEVICES",
    ),
    "LUMI": UsedMachine(
        amd(8, sockets=4), 56, AMD, 8, 7, tuple(f"cuda:{gcd}" for gcd in range(8)), WITH_NCCL,
        {**SLURM, "SLURM_GPUS_PER_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "56"},
    ),
    "MI300A": UsedMachine(amd(4, sockets=4), 96, AMD, 4, 24, tuple(f"cuda:{gpu}" for gpu in range(4)), WITH_NCCL),
    # ALCF: PBS lists a host once. By default every tile of the six GPUs is a device.
    "Aurora": UsedMachine(
        intel(6, tiles=2), 104, INTEL, 12, 8, tuple(f"xpu:{tile}" for tile in range(12)), WITH_ONECCL,
        pbs=HostAllocation("PBS", (Host("x1"),), "/aux/1", cpus=208),
    ),
    "Aurora, GPUs": UsedMachine(
        intel(6, tiles=2, driver="xe"), 104, INTEL, 6, 17, tuple(f"xpu:{gpu}" for gpu in range(6)), WITH_ONECCL,
        {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, pbs=HostAllocation("PBS", (Host("x1"),), "/aux/1", cpus=208),
    ),
    "Polaris": UsedMachine(
        nvidia(4), 32, NVIDIA, 8, 8, tuple(f"cuda:{gpu}" for gpu in range(4)) * 2, WITH_NCCL,
        pbs=HostAllocation("PBS", (Host("x1"), Host("x2")), "/aux/1", cpus=64),
    ),
    # CSCS: four GH200.
    "Alps": UsedMachine(
        nvidia(4), 288, NVIDIA, 4, 72, ("cuda:0",) * 4, WITH_NCCL,
        {**SLURM, "SLURM_GPUS": "4", "SLURM_JOB_CPUS_PER_NODE": "288"}, of_rank="CUDA_VISIBLE_DEVICES",
    ),
    # A process sees one of the seven MIG devices.
    "A100 with MIG": UsedMachine(nvidia(1, {0: 7}), 16, NVIDIA, 1, 16, ("cuda:0",), WITH_NCCL),
    # NCCL refuses two ranks on one GPU, also on different MIG devices.
    "A100 with a rank on each MIG device": UsedMachine(
        nvidia(1, {0: 7}), 14, NVIDIA, 7, 2, ("cuda:0",) * 7, "mpi",
        {**SLURM, "SLURM_GPUS": "7", "SLURM_JOB_CPUS_PER_NODE": "14"},
        of_rank="CUDA_VISIBLE_DEVICES", prefix="MIG-",
    ),
    "laptop": UsedMachine(intel(1, integrated=True), 4, None, 4, 1, ("cpu",) * 4, "mpi"),
    "laptop with an NVIDIA GPU": UsedMachine(
        intel(1, integrated=True) | nvidia(1), 8, NVIDIA, 1, 8, ("cuda:0",), WITH_NCCL
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "machine"), [(machine.files, machine) for machine in MACHINES.values()], ids=list(MACHINES)
)
def test_ranks_devices_and_backend_of_a_machine(
    root: Path, machine: UsedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerators = counting.count(machine.environ, root)
    assert accelerators.vendor == machine.vendor
    # 1. the number of ranks, and their cores
    start = launch(machine, accelerators)
    bound = re.search(r"(?:--cpus-per-task=|:PE=)(\d+)", " ".join(start.command))
    assert bound is not None
    assert (start.ranks, int(bound[1])) == (machine.ranks, machine.cores_per_rank)
    # 2. the device of every rank
    nodes = len(machine.pbs.hosts) if machine.pbs else 1
    visible = [visible_to(rank, machine, root) for rank in range(machine.ranks // nodes)]
    assigned = assignment.assign(visible) * nodes
    kind = {INTEL: "xpu", None: "cpu"}.get(machine.vendor, "cuda")
    shown = [
        "cpu" if device is None else f"{kind}:{visible[rank % len(visible)].index(device)}"
        for rank, device in enumerate(assigned)
    ]
    assert tuple(shown) == machine.devices
    # 3. the backend
    hosts = [f"host{rank // len(visible)}" for rank in range(machine.ranks)]
    monkeypatch.setattr(vendors.Vendor, "gpu_uuid", lambda _vendor, _index: "GPU-0" if machine.prefix else "")
    gpus = [
        None if device is None else assignment.gpus_of({device: visible[rank % len(visible)].index(device)})[device]
        for rank, device in enumerate(assigned)
    ]
    gpu_each = plan.has_gpu_each(gpus, hosts)
    vendor = {"cuda": "cuda:nccl", "xpu": "xpu:xccl"}.get(kind, "")
    assert plan.choose_backend("auto", has_mpi=True, gpu_each=gpu_each, vendor=vendor) == machine.backend


def launch(machine: UsedMachine, accelerators: Accelerators) -> Start:
    """Return the launch by `mpicomm run`: by srun, or by Open MPI's mpiexec."""
    host = Machine(machine.cores, True, False, "python", accelerators.count)
    request = Request(("true",))
    if "SLURM_JOB_ID" in machine.environ:
        return commands.srun(request, host, SlurmAllocation.from_environ(machine.environ), "pmix", machine.environ)
    library, job = Library("Open MPI", "5.0.11"), host.with_default_ranks(machine.pbs)
    return commands.mpiexec(request, host, library, "mpiexec", machine.environ, job=job)


def visible_to(rank: int, machine: UsedMachine, root: Path) -> list[str]:
    """Return the names of the devices that a rank sees."""
    environ = dict(machine.environ)
    if machine.of_rank:
        environ[machine.of_rank] = f"{machine.prefix}{rank}"
    count = counting.count(environ, root).count
    return [f"GPU-{rank if machine.of_rank else index}" for index in range(count)]


NO_ACCELERATOR = Accelerators(None, 0)

# -- the devices of a container ----------------------------------------------------------------------------------------

HIDDEN_NODE = "sys/class/kfd/kfd/topology/nodes/3/properties"


def without(files: Files, *names: str) -> Files:
    return {name: text for name, text in files.items() if name not in names}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, 0)),
        (without(nvidia(4), "dev/nvidia1", "dev/nvidia2"), (NVIDIA, 2)),
        ({f"proc/driver/nvidia/gpus/0000:0{gpu}:00.0/information": "" for gpu in range(3)}, (NVIDIA, 3)),
        (nvidia(2, {0: 7, 1: 7}), (NVIDIA, 1)),
        (without(amd(4), "dev/dri/renderD129"), (AMD, 3)),
        (amd(4) | {HIDDEN_NODE: ""}, (AMD, 3)),  # the kernel refuses to read it: a device of another container
        (without(intel(3), "dev/dri/renderD130"), (INTEL, 2)),
        (intel(2, tiles=2, driver="xe", integrated=True), (INTEL, 2)),
        (intel(2, driver="nouveau") | {"sys/class/drm/card1/device/vendor": "0x1a03\n"}, (INTEL, 1)),  # a BMC
        (kfd_node(0, cpu_cores_count=8, simd_count=44, drm_render_minor=128), (None, 0)),  # older APUs
        (kfd_node(1, cpu_cores_count=0, simd_count=80, drm_render_minor=128, unique_id=0), (None, 0)),  # newer APUs
        (kfd_node(1, cpu_cores_count=0, simd_count=240, drm_render_minor=128, unique_id=0), (AMD, 1)),
        (kfd_node(1, cpu_cores_count=0, simd_count=64, drm_render_minor=128), (AMD, 1)),  # kernels before 5.8
        (ascend(8), (ASCEND, 8)),
        (accel(8, "0x1da3"), (GAUDI, 8)),
        (accel(1, "0x8086"), (None, 0)),  # an NPU
        (nvidia(1) | amd(2), (NVIDIA, 1)),
        (amd(2) | intel(1), (AMD, 2)),
    ],
)
def test_the_kernels_files_show_the_devices(root: Path, expected: tuple[str | None, int]) -> None:
    assert counting.count({}, root) == Accelerators(*expected)


@pytest.mark.parametrize("files", [amd(1), nvidia(1)])
def test_a_device_that_this_user_may_not_open_is_not_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda _path, mode: mode == os.R_OK)
    assert counting.count({}, root) == NO_ACCELERATOR


# -- variables ---------------------------------------------------------------------------------------------------------

FOUR, MIG_AND_TWO = (0, 0, 0, 0), (7, 0, 0)


@pytest.mark.parametrize(
    ("vendor", "partitions", "environ", "expected"),
    [
        # CUDA: the first invalid entry ends the list
        (NVIDIA, FOUR, {"CUDA_VISIBLE_DEVICES": "3, 1,2"}, 3),
        (NVIDIA, FOUR, {"CUDA_VISIBLE_DEVICES": "0,4,1"}, 1),
        (NVIDIA, FOUR, {"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, 2),
        (NVIDIA, FOUR, {"CUDA_VISIBLE_DEVICES": "1,1"}, 0),
        (NVIDIA, FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-5,GPU-77"}, 2),
        (NVIDIA, FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-5,GPU-5"}, 0),
        *((NVIDIA, FOUR, {"CUDA_VISIBLE_DEVICES": text}, 0) for text in ("", "-1", "NoDevFiles", "none")),
        (NVIDIA, FOUR, {"ROCR_VISIBLE_DEVICES": "0", "ZE_AFFINITY_MASK": "0"}, 4),
        # MIG: one device in a process, and no undivided GPU beside it
        (NVIDIA, MIG_AND_TWO, {}, 1),
        (NVIDIA, MIG_AND_TWO, {"CUDA_VISIBLE_DEVICES": "1,2"}, 2),
        (NVIDIA, MIG_AND_TWO, {"CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        (NVIDIA, MIG_AND_TWO, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1),
        (NVIDIA, (), {"CUDA_VISIBLE_DEVICES": "MIG-a"}, 0),
        # ROCm: HIP selects among the devices that ROCr leaves
        (AMD, FOUR, {"ROCR_VISIBLE_DEVICES": "1,2,3"}, 3),
        (AMD, FOUR, {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, 1),
        (AMD, FOUR, {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "2"}, 0),
        (AMD, FOUR, {"ROCR_VISIBLE_DEVICES": "1,1,2"}, 1),
        (AMD, FOUR, {"ROCR_VISIBLE_DEVICES": "0,GPU-DEADBEEFDEADBEEF"}, 2),
        (AMD, FOUR, {"ROCR_VISIBLE_DEVICES": ""}, 0),
        (AMD, FOUR, {"HIP_VISIBLE_DEVICES": "0,0"}, 0),
        (AMD, FOUR, {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "2"}, 2),
        (AMD, FOUR, {"CUDA_VISIBLE_DEVICES": "2"}, 1),
        (AMD, FOUR, {"GPU_DEVICE_ORDINAL": "2"}, 4),
        # Level Zero: invalid entries are skipped; by default every tile is a device
        (INTEL, (2, 2, 2), {}, 6),
        (INTEL, (2, 2, 2), {"ZE_AFFINITY_MASK": ""}, 6),
        (INTEL, (2, 2, 2), {"ZE_AFFINITY_MASK": "0,5,6,x,5, 3"}, 3),
        (INTEL, (2, 2, 2), {"ZE_AFFINITY_MASK": "0.1,2"}, 1),
        (INTEL, (2, 2, 2), {"ZE_AFFINITY_MASK": "9"}, 0),
        (INTEL, (2, 2, 2), {"ZE_FLAT_DEVICE_HIERARCHY": "COMBINED"}, 6),
        (INTEL, (2, 2, 2), {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 3),
        (INTEL, (2, 2, 2), {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "0.1,2"}, 2),
        (INTEL, (2, 2, 2), {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "1.0,1.1,2.2,3"}, 1),
        (INTEL, (0, 0), {"ZE_AFFINITY_MASK": "1"}, 1),
        (ASCEND, FOUR, {"ASCEND_RT_VISIBLE_DEVICES": "1,2,4"}, 2),
        (GAUDI, FOUR, {"HABANA_VISIBLE_MODULES": "0,1"}, 2),
        (GAUDI, FOUR, {}, 4),
    ],
)
def test_a_variable_selects_devices_by_the_rules_of_its_vendor(
    vendor: str, partitions: tuple[int, ...], environ: dict[str, str], expected: int
) -> None:
    assert len(visible_devices.selected(vendor, environ, partitions)) == expected


@pytest.mark.parametrize(
    ("vendor", "partitions", "environ", "expected"),
    [
        (NVIDIA, FOUR, {}, [0, 1, 2, 3]),
        (NVIDIA, FOUR, {"CUDA_VISIBLE_DEVICES": "3,GPU-5,1"}, [3, None, 1]),
        (NVIDIA, MIG_AND_TWO, {"CUDA_VISIBLE_DEVICES": "MIG-a"}, [None]),
        (NVIDIA, (0, 7), {"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        (AMD, FOUR, {"ROCR_VISIBLE_DEVICES": "3,1,2", "HIP_VISIBLE_DEVICES": "2,0"}, [2, 3]),
        (INTEL, (2, 2, 2), {}, [0, 0, 1, 1, 2, 2]),
        (INTEL, (2, 2, 2), {"ZE_AFFINITY_MASK": "5,2"}, [1, 2]),  # Level Zero keeps the order of the devices
        (INTEL, (2, 2, 2), {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "2.1,0"}, [0, 2]),
        (GAUDI, FOUR, {"HABANA_VISIBLE_MODULES": "2"}, [2]),
    ],
)
def test_which_devices_a_variable_selects(
    vendor: str, partitions: tuple[int, ...], environ: dict[str, str], expected: list[int | None]
) -> None:
    assert visible_devices.selected(vendor, environ, partitions) == expected


@pytest.mark.parametrize("files", [{}])
def test_without_device_files_cuda_visible_devices_is_believed(root: Path) -> None:
    """Windows Subsystem for Linux has none."""
    assert counting.count({"CUDA_VISIBLE_DEVICES": "0,3,GPU-5"}, root) == Accelerators(NVIDIA, 3)


@pytest.mark.parametrize("files", [amd(2)])
def test_the_variable_of_another_vendor_adds_no_devices(root: Path) -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert counting.count(environ, root) == NO_ACCELERATOR


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        (HostAllocation("PBS", (Host("a"), Host("b")), "/aux/1", cpus=64), 8),
        (HostAllocation("PBS", (Host("a", 1), Host("b", 1)), "/aux/1", cpus=64), 8),
        (HostAllocation("PBS", (Host("a", 2), Host("b", 1)), "/aux/1", cpus=64), 3),  # mpiprocs
        (HostAllocation("PBS", (Host("a"), Host("b")), "/aux/1", cpus=16), 2),  # other jobs may use the other GPUs
        (HostAllocation("LSF", (Host("a"), Host("b"))), 2),
    ],
)
def test_a_job_that_has_whole_hosts_of_pbs_has_a_rank_per_gpu(job: HostAllocation, ranks: int) -> None:
    host = Machine(32, True, False, "python", 4)
    assert host.with_default_ranks(job).ranks == ranks
    without_gpus = dataclasses.replace(host, gpus=0)
    assert without_gpus.with_default_ranks(job) == job


# -- mpicomm run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a host with twelve tiles, and Intel MPI."""
    monkeypatch.setattr(counting, "count", lambda _environ: Accelerators(INTEL, 12))
    monkeypatch.setattr(mpi, "library", lambda: Library("Intel MPI", "2021.13.0"))
    monkeypatch.setattr(queries, "mpiexec", lambda library, *_: ("mpiexec", library.implementation))


@pytest.mark.usefixtures("tiles")
def test_mpicomm_run_starts_a_rank_per_tile() -> None:
    start = launching.build(Request(("true",)), {"PATH": "/bin"})
    assert start.command[:3] == ("mpiexec", "-n", "12")


@pytest.fixture
def hosts_of_pbs(tiles: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a PBS job with all four cores of two hosts, and one process on each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(4)))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    node_file = tmp_path / "nodes"
    node_file.write_text("x1\nx2\n")
    return {
        "PATH": "/bin",
        "PBS_JOBID": "1.pbs",
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_NODEFILE": str(node_file),
        "NCPUS": "4",
    }


def test_mpicomm_run_starts_a_rank_per_tile_on_the_hosts_of_pbs(hosts_of_pbs: dict[str, str]) -> None:
    assert launching.build(Request(("true",)), hosts_of_pbs).ranks == 24
    assert launching.hosts(Request(("true",)), hosts_of_pbs) == ((Host("x1", 12), Host("x2", 12)), False)
    shared = {**hosts_of_pbs, "NCPUS": "2"}
    assert launching.build(Request(("true",)), shared).ranks == 2


def test_a_requested_number_of_ranks_does_not_depend_on_the_tiles(
    hosts_of_pbs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of `mpicomm run -n 2` on two hosts have all cores."""
    monkeypatch.setattr(mpi, "library", lambda: Library("Open MPI", "5.0.11"))
    start = launching.build(Request(("true",), ranks=2), hosts_of_pbs)
    assert " --map-by ppr:1:node:PE=4 --bind-to core " in " ".join(start.command)
    assert start.environ["OMP_NUM_THREADS"] == "4"
    hosts = (Host("x1", 1), Host("x2", 1))
    assert launching.hosts(Request(("true",), ranks=2), hosts_of_pbs) == (hosts, False)


def test_the_variables_of_torchs_vendors_are_those_of_the_table() -> None:
    of_torch = {NVIDIA: vendors.CUDA(), AMD: vendors.ROCm(), INTEL: vendors.XPU()}
    for vendor, described in of_torch.items():
        assert described.visible_variables == visible_devices.VARIABLES[vendor]
