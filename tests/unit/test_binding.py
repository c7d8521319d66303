"""The cores of each rank: on recorded machines, on hosts with few cores, and in the commands of launchers."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mpicomm import host_info, rank_binding, rank_log
from mpicomm.cli import launching
from mpicomm.devices import locality
from mpicomm.errors import LaunchError
from mpicomm.launch import binding, commands, queries
from mpicomm.launch.allocation import FluxAllocation, Host, HostAllocation, SlurmAllocation
from mpicomm.launch.binding import Processors
from mpicomm.launch.mpi_library import Library
from mpicomm.launch.request import Machine, Node, Request, Start
from mpicomm.recorder import rank_text
from tests.machine_files import Files, amd, intel, nvidia, processors, write

# -- recorded machines -------------------------------------------------------------------------------------------------

# OLCF, and LUMI, whose nodes are alike: two GCDs share a NUMA node of two L3 caches.
_GCDS = [*["3: 48-63,112-127"] * 2, *["1: 16-31,80-95"] * 2, *["0: 0-15,64-79"] * 2, *["2: 32-47,96-111"] * 2]
FRONTIER = amd(8, sockets=4, near=_GCDS) | processors(
    "0-15,64-79", "16-31,80-95", "32-47,96-111", "48-63,112-127", cores=64
)
# ALCF: GPU 0 is at the last NUMA node.
POLARIS = nvidia(4, near=["3: 24-31,56-63", "2: 16-23,48-55", "1: 8-15,40-47", "0: 0-7,32-39"]) | processors(
    "0-7,32-39", "8-15,40-47", "16-23,48-55", "24-31,56-63", cores=32
)
# ALCF: two sockets with three GPUs of two tiles each; the NUMA nodes 2 and 3 are the high-bandwidth memory.
_SOCKETS = ("0-51,104-155", "52-103,156-207")
AURORA = intel(6, tiles=2, near=[f"{gpu // 3}: {_SOCKETS[gpu // 3]}" for gpu in range(6)]) | processors(
    *_SOCKETS, "", "", cores=104
)
TWO_SOCKETS = processors("0-63,128-191", "64-127,192-255", cores=128)
ALTERNATING = processors("0,2,4,6", "1,3,5,7", cores=8, threads=1)

LOW_NOISE = ",".join(f"{first + 1}-{first + 7}" for first in range(0, 64, 8))
"""The CPUs of LUMI's jobs: the first core of each L3 cache is the system's."""

HALVES_OF_GCDS = " ".join(
    f"{first + half}-{first + half + 3}" for half in (0, 4) for first in (48, 56, 16, 24, 0, 8, 32, 40)
)


def read(files: Files, root: Path, allowed: str = "", environ: Mapping[str, str] | None = None) -> Processors:
    cpus = host_info.cpu_list(allowed) if allowed else range(sum(name.endswith("siblings_list") for name in files))
    return locality.processors(environ or {}, cpus, write(files, root))


def shown(share: binding.Share) -> str:
    return rank_text.ranges(binding.cpus(share)).replace(" ", "")


@pytest.mark.parametrize(
    ("files", "allowed", "environ", "mode", "ranks", "expected"),
    [
        (
            FRONTIER, "", {}, "auto", 8,
            "48-55,112-119 56-63,120-127 16-23,80-87 24-31,88-95 0-7,64-71 8-15,72-79 32-39,96-103 40-47,104-111",
        ),
        (FRONTIER, LOW_NOISE, {}, "gpu", 8, "49-55 57-63 17-23 25-31 1-7 9-15 33-39 41-47"),
        (FRONTIER, LOW_NOISE, {"ROCR_VISIBLE_DEVICES": "4,0"}, "auto", 2, "1-7,9-15 49-55,57-63"),
        (FRONTIER, LOW_NOISE, {}, "cores", 8, "1-7 9-15 17-23 25-31 33-39 41-47 49-55 57-63"),
        (FRONTIER, "0-63", {}, "gpu", 16, HALVES_OF_GCDS),
        (POLARIS, "", {}, "auto", 4, "24-31,56-63 16-23,48-55 8-15,40-47 0-7,32-39"),
        (POLARIS, "", {"CUDA_VISIBLE_DEVICES": "2"}, "auto", 2, "8-11,40-43 12-15,44-47"),
        (POLARIS, "", {"CUDA_VISIBLE_DEVICES": ""}, "auto", 2, "0-15,32-47 16-31,48-63"),
        (POLARIS, "0-7,32-39", {}, "auto", 4, "0,1,32,33 2,3,34,35 4,5,36,37 6,7,38,39"),  # no cores near three GPUs
        (
            AURORA, "", {}, "auto", 12,
            " ".join(f"{core}-{core + 7},{core + 104}-{core + 111}" for core in (*range(0, 48, 8), *range(52, 100, 8))),
        ),
        (
            AURORA, "1-51,53-103", {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, "auto", 6,
            "1-17 18-34 35-51 53-69 70-86 87-103",
        ),
        (AURORA, "", {}, "numa", 2, "0-51,104-155 52-103,156-207"),
        (TWO_SOCKETS, "", {}, "auto", 1, "0-255"),
        (TWO_SOCKETS, "", {}, "auto", 3, "0-63,128-191 64-95,192-223 96-127,224-255"),
        (TWO_SOCKETS, "60-67,188-195", {}, "numa", 4, "60,61,188,189 62,63,190,191 64,65,192,193 66,67,194,195"),
        (TWO_SOCKETS, "0-9,64,65", {}, "numa", 4, "0-2 3-5 6-8 64,65"),
        (TWO_SOCKETS, "5,133", {}, "cores", 1, "5,133"),
        (ALTERNATING, "", {}, "cores", 4, "0,2 4,6 1,3 5,7"),
        (ALTERNATING, "0-3", {}, "numa", 8, "0,2 0,2 0,2 0,2 1,3 1,3 1,3 1,3"),  # more ranks than cores
        ({}, "0-3", {}, "auto", 2, "0,1 2,3"),  # a kernel that reports nothing
        (nvidia(2), "0-3", {}, "gpu", 2, "0,1 2,3"),  # neither GPUs nor the CPUs near them
    ],
)  # fmt: skip
def test_the_cores_of_the_ranks_of_a_machine(
    files: Files, allowed: str, environ: dict[str, str], mode: str, ranks: int, expected: str, tmp_path: Path
) -> None:
    host = read(files, tmp_path, allowed, environ)
    assert [shown(share) for share in binding.shares(mode, host, ranks)] == expected.split()


def test_the_masks_on_frontier_are_those_of_lumis_page(tmp_path: Path) -> None:
    """https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/distribution-binding, for all seven cores of a GCD."""
    page = "fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000"
    masks = binding.masks(binding.shares("gpu", read(FRONTIER, tmp_path, LOW_NOISE), 8))
    assert masks.replace("0x", "") == page


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        (FRONTIER, {}, [3, 3, 1, 1, 0, 0, 2, 2]),
        (FRONTIER, {"ROCR_VISIBLE_DEVICES": "7"}, [2, None]),
        (POLARIS, {"CUDA_VISIBLE_DEVICES": "GPU-5,1"}, [None, 2]),
        (AURORA, {"ZE_AFFINITY_MASK": "5,6"}, [0, 1]),
        (amd(1, near=["-1: 0-3"]), {}, [None]),  # a virtual machine
        (nvidia(1), {}, [None]),
    ],
)
def test_the_numa_node_of_a_gpu(
    files: Files, environ: dict[str, str], expected: list[int | None], tmp_path: Path
) -> None:
    root = write(files, tmp_path)
    assert [locality.numa_node(environ, index, root) for index in range(len(expected))] == expected


@pytest.mark.parametrize(("files", "variable"), [(FRONTIER, "ROCR_VISIBLE_DEVICES"), (POLARIS, "CUDA_VISIBLE_DEVICES")])
def test_a_rank_that_sees_only_its_own_gpu_gets_the_part_of_that_gpu(
    files: Files, variable: str, tmp_path: Path
) -> None:
    together = binding.shares("auto", read(files, tmp_path), ranks := len(read(files, tmp_path).gpus))
    for rank in range(ranks):
        own = read(files, tmp_path, environ={variable: str(rank)})
        assert binding.share_of("auto", own, rank, ranks, has_own_gpu=True) == together[rank]
        # Without the scheduler's word, the GPU may be that of all ranks: each gets another part near it.
        part = binding.share_of("gpu", own, rank, ranks, has_own_gpu=False)
        assert set(binding.cpus(part)) < set(own.gpus[rank])
    hidden = read(files, tmp_path, environ={variable: "GPU-5"})  # a UUID, which only the driver knows
    assert binding.share_of("gpu", hidden, 1, ranks, has_own_gpu=True) == binding.shares("cores", hidden, ranks)[1]


def test_ranks_from_which_the_other_gpus_are_hidden_share_no_core() -> None:
    """Eight GPUs near two NUMA nodes of 32 cores; the container of each rank has one."""
    cores = tuple((number,) for number in range(64))
    shares = []
    for rank in range(8):
        near = tuple(range(32 * (rank // 4), 32 * (rank // 4) + 32))
        own = Processors(cores, (tuple(range(32)), tuple(range(32, 64))), (near,), (0,))
        shares.append(binding.share_of("gpu", own, rank, 8, has_own_gpu=True))
    assert [(share[0], len(share)) for share in shares] == [((8 * rank,), 8) for rank in range(8)]


@pytest.mark.parametrize("files", [FRONTIER, POLARIS, AURORA, TWO_SOCKETS, ALTERNATING, {}])
@pytest.mark.parametrize("allowed", ["0-7", "0-3,64-67", "1,2,3", ""])
def test_no_core_is_that_of_two_ranks(files: Files, allowed: str, tmp_path: Path) -> None:
    host = read(files, tmp_path, allowed or "0-7")
    for mode, ranks in itertools.product(("auto", "cores", "numa"), range(1, len(host.cores) + 1)):
        shares = binding.shares(mode, host, ranks)
        cores = [core for share in shares for core in share]
        assert len(shares) == ranks
        assert all(shares), (mode, ranks)
        assert len(cores) == len(set(cores)), (mode, ranks)
        assert set(cores) <= set(host.cores), (mode, ranks)


OVERLAPPING = Processors(cores=tuple((cpu,) for cpu in range(8)), gpus=((0, 1), tuple(range(8)), ()), visible=(0, 1, 2))


def test_the_gpu_with_the_fewest_cores_near_it_is_served_before_others() -> None:
    assert list(map(shown, binding.shares("gpu", OVERLAPPING, 3))) == ["0,1", "2-4", "5-7"]


@pytest.mark.parametrize(
    ("host", "mode", "ranks", "message"),
    [
        (Processors(((0,), (1,))), "cores", 3, "3 ranks need as many cores, but a host has 2 for them"),
        (Processors(((0, 4),)), "cores", 2, "2 ranks need as many cores, but a host has 1 for them"),
        (Processors(((0,), (1,))), "gpu", 1, "this host has no GPU that the ranks see"),
        (
            Processors(((0,), (1,)), gpus=((0,), (4,)), visible=(0, 1)),
            "gpu",
            2,
            "1 of the 2 ranks of a host need a core each near their GPUs, but this job may use 0",
        ),
        (
            Processors(((0,), (1,)), gpus=((0,),), visible=(0,)),
            "gpu",
            2,
            "2 of the 2 ranks of a host need a core each near their GPUs, but this job may use 1",
        ),
    ],
)
def test_a_binding_that_does_not_fit_is_an_error(host: Processors, mode: str, ranks: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message) as caught:
        binding.shares(mode, host, ranks)
    assert "--bind" in str(caught.value).splitlines()[-1]


@pytest.mark.parametrize(
    ("cores", "ranks", "quota", "expected"), [(4, 2, None, 4), (4, 2, 3, 1), (4, 2, 16, 4), (4, 9, None, 1)]
)
def test_a_rank_has_a_thread_for_each_of_its_cores(cores: int, ranks: int, quota: int | None, expected: int) -> None:
    host = Processors(tuple((cpu, cpu + 8) for cpu in range(8)))
    assert binding.threads(host.cores[:cores], host, ranks, quota) == expected


# -- the commands of launchers -----------------------------------------------------------------------------------------

OPEN_MPI, MPICH, INTEL_MPI = Library("Open MPI", "5.0.11"), Library("MPICH", "5.0.2"), Library("Intel MPI", "2021.13")
FOUR_CORES = Processors(
    tuple((cpu, cpu + 4) for cpu in range(4)), ((0, 1, 4, 5), (2, 3, 6, 7)), ((2, 3), (0, 1)), (0, 1)
)
HOST = Machine(4, is_whole=True, is_root=False, python="python", gpus=2, processors=FOUR_CORES)
LOGIN_NODE = Machine(4, is_whole=True, is_root=False, python="python")
PART = Machine(4, is_whole=False, is_root=False, python="python", processors=FOUR_CORES)
TWO_HOSTS = HostAllocation("PBS", (Host("a", 2), Host("b", 2)), "/aux/1")
TWO_NODES = SlurmAllocation(nodes=2, ranks=4, cpus=(8, 8))


def options(start: Start) -> str:
    return shlex.join(start.command[1:]).removesuffix(" train").replace("python -m mpicomm.rank_binding", "BIND")


def mpiexec(
    library: Library, mode: str, machine: Machine = HOST, job: HostAllocation | None = None, ranks: int = 2
) -> Start:
    ranks *= 1 if job is None else len(job.hosts)
    return commands.mpiexec(Request(("train",), ranks, bind=mode), machine, library, "mpiexec", {}, job=job)


@pytest.mark.parametrize(
    ("start", "expected", "threads"),
    [
        (mpiexec(OPEN_MPI, "cores"), "-n 2 --map-by ppr:2:node:PE=2 --bind-to core", "2"),
        (mpiexec(OPEN_MPI, "cores", PART), "-n 2 --map-by :OVERSUBSCRIBE --bind-to none BIND cores 2", None),
        (mpiexec(OPEN_MPI, "auto"), "-n 2 --map-by :OVERSUBSCRIBE --bind-to none BIND auto 2", None),
        (mpiexec(OPEN_MPI, "none"), "-n 2 --map-by :OVERSUBSCRIBE --bind-to none", "2"),
        (mpiexec(MPICH, "gpu"), "-n 2 -bind-to user:2+3+6+7,0+1+4+5", "2"),
        (mpiexec(MPICH, "numa"), "-n 2 -bind-to user:0+1+4+5,2+3+6+7", "2"),
        (mpiexec(MPICH, "cores", PART), "-n 2 -bind-to user:0+1+4+5,2+3+6+7", "2"),
        (mpiexec(MPICH, "none"), "-n 2", "2"),
        (mpiexec(MPICH, "numa", ranks=6), "-n 6 -bind-to user:" + ",".join(["0+1+4+5"] * 3 + ["2+3+6+7"] * 3), "1"),
        (mpiexec(INTEL_MPI, "cores"), "-n 2 BIND cores 2", None),
        (mpiexec(MPICH, "gpu", job=TWO_HOSTS), "-n 4 -f /aux/1 BIND gpu 2", None),  # whose other host may differ
    ],
)
def test_mpiexec_binds_the_ranks_or_they_bind_themselves(start: Start, expected: str, threads: str | None) -> None:
    assert options(start) == expected
    assert start.environ.get("OMP_NUM_THREADS") == threads


def test_intel_mpi_must_not_bind_ranks_that_bind_themselves() -> None:
    assert mpiexec(INTEL_MPI, "auto").environ["I_MPI_PIN"] == "0"


def srun(
    mode: str, machine: Machine = HOST, job: SlurmAllocation = TWO_NODES, *, can_bind: bool = True, **environ: str
) -> Start:
    return commands.srun(Request(("train",), bind=mode), machine, job, "pmix", environ, can_bind=can_bind)


PREFIX = "--mpi=pmix --kill-on-bad-exit=0"


@pytest.mark.parametrize(
    ("start", "expected", "threads"),
    [
        (srun("gpu"), "--cpu-bind=mask_cpu:0xcc,0x33 --ntasks=4", "2"),
        (srun("numa"), "--cpu-bind=mask_cpu:0x33,0xcc --ntasks=4", "2"),
        (srun("cores"), "--cpu-bind=cores --ntasks=4 --cpus-per-task=4", "4"),
        (srun("none"), "--cpu-bind=none --ntasks=4 --cpus-per-task=4", "4"),
        # a login node, a part of a node, nodes that differ, tasks with a GPU each, and the user's number of CPUs
        (
            srun("numa", job=SlurmAllocation(2, 4, (8, 8), cpus_per_task=3)),
            "--cpu-bind=none --ntasks=4 --cpus-per-task=3 BIND numa 2", None,
        ),
        (srun("auto", LOGIN_NODE), "--cpu-bind=none --ntasks=4 --cpus-per-task=4 BIND auto 2", None),
        (srun("auto", PART), "--cpu-bind=none --ntasks=4 --cpus-per-task=4 BIND auto 2", None),
        (
            srun("auto", job=SlurmAllocation(2, 4, (8, 16))),
            "--cpu-bind=none --ntasks=4 --cpus-per-task=4 BIND auto 2", None,
        ),
        (
            srun("gpu", SLURM_GPUS_PER_TASK="1"),
            "--cpu-bind=none --ntasks=4 --cpus-per-task=4 BIND gpu 2", None,
        ),
        *(
            (srun(mode, can_bind=False), f"--ntasks=4 --cpus-per-task=4 BIND {mode} 2", None)
            for mode in ("auto", "cores", "gpu", "numa")
        ),
        (srun("none", can_bind=False), "--ntasks=4 --cpus-per-task=4", "4"),
        (srun("cores", job=SlurmAllocation(1, 3, groups=2)), "--cpu-bind=none --het-group=0-1 BIND cores 0", None),
    ],
)  # fmt: skip
def test_srun_binds_the_tasks_of_whole_nodes(start: Start, expected: str, threads: str | None) -> None:
    assert options(start) == f"{PREFIX} {expected}"
    assert start.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("TaskPlugin              = task/cgroup,task/affinity\nTaskPluginParam         = (null type)\n", True),
        ("TaskPlugin              = affinity,cgroup\n", True),
        ("TaskPlugin              = task/none\nTaskPluginParam         = none,affinity\n", False),
        ("", False),
    ],
)
def test_whether_slurm_binds_tasks(config: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "constant_output", lambda *_command: config)
    assert queries.slurm_binds() == expected


def flux(mode: str) -> Start:
    return commands.flux_run(Request(("train",), 2, bind=mode), HOST, FluxAllocation(1, 4, 0), MPICH, (), {})


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", "-o cpu-affinity=off"),
        ("cores", "-o cpu-affinity=per-task"),
        ("auto", "BIND auto 2"),  # within the cores that Flux's shell gives them
    ],
)
def test_flux_binds_tasks_to_equal_shares(mode: str, expected: str) -> None:
    assert options(flux(mode)).partition("exit-timeout=none ")[2] == expected


def test_ranks_of_torchrun_bind_themselves() -> None:
    node = Node(0, 1, "a", 1)
    start = commands.torchrun(Request(("train",), 2, node=node, bind="gpu"), node, HOST, {})
    assert options(start).endswith("--nproc-per-node=2 --no-python BIND gpu 2")
    assert start.environ["OMP_NUM_THREADS"] == "2"  # which torchrun would set to 1
    unbound = commands.torchrun(Request(("train",), 2, node=node, bind="none"), node, HOST, {})
    assert options(unbound).endswith("--no-python")


def test_the_log_of_a_rank_is_written_by_a_process_that_is_not_bound() -> None:
    request = Request(("train",), bind="auto", log_dir="logs")
    command = shlex.join(request.rank_command("python", binds_in=2))
    assert command == "python -m mpicomm.rank_log logs 0 python -m mpicomm.rank_binding auto 2 train"


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda: commands.mpiexec(Request(("t",), 5, bind="cores"), HOST, MPICH, "mpiexec", {}), "5 ranks need"),
        (lambda: srun("cores", job=SlurmAllocation(2, 12, (4, 4))), "6 ranks need as many cores, but a host has 4"),
        (lambda: commands.flux_run(Request(("t",), 9, bind="cores"), HOST, FluxAllocation(1, 4, 0), MPICH, (), {}),
         "9 ranks need as many cores, but this Flux instance has 4"),
    ],
)  # fmt: skip
def test_more_ranks_than_cores_are_refused_before_the_start(start: object, message: str) -> None:
    with pytest.raises(LaunchError, match=f"--bind cores: {message}"):
        start()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"HYDRA_BIND_TO": "core"}, "HYDRA_BIND_TO=core"),
        ({"PRTE_MCA_hwloc_default_binding_policy": "core"}, "PRTE_MCA_hwloc_default_binding_policy=core"),
        ({"GOMP_CPU_AFFINITY": "0-3"}, "GOMP_CPU_AFFINITY=0-3"),
    ],
)
@pytest.mark.parametrize("mode", binding.MODES)
def test_a_binding_variable_of_the_user_is_refused(environ: dict[str, str], name: str, mode: str) -> None:
    with pytest.raises(LaunchError, match=f"--bind {mode} and {name} both bind the ranks") as caught:
        commands.mpiexec(Request(("train",), 2, bind=mode), HOST, MPICH, "mpiexec", environ)
    assert f"unset {name.partition('=')[0]}" in str(caught.value)


def test_slurms_own_variable_is_not_the_users() -> None:
    with pytest.raises(LaunchError, match="--bind auto and SLURM_CPU_BIND=cores both bind"):
        srun("auto", SLURM_CPU_BIND="cores")
    of_a_step = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    assert "mask_cpu:0xcc,0x33" in options(srun("auto", **of_a_step))


# -- this machine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "environ", "expected"),
    [
        (None, {}, True),
        (TWO_HOSTS, {}, True),
        (TWO_NODES, {"SLURMD_NODENAME": "n1"}, True),
        (TWO_NODES, {}, False),
        (FluxAllocation(1, 4, 0), {}, False),
    ],
)
def test_whether_this_machine_is_a_host_of_the_job(job: object, environ: dict[str, str], expected: bool) -> None:
    assert launching._is_host_of(job, environ) == expected  # type: ignore[arg-type]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """Record the CPUs to which this process would be bound, on a host of four cores."""
    monkeypatch.setattr(locality, "processors", lambda _environ, _cpus: FOUR_CORES)
    monkeypatch.setattr(host_info, "cpu_quota", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    recorded: list[Sequence[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cpus: recorded.append(cpus))
    return recorded


@pytest.mark.parametrize(
    ("mode", "local_rank", "local_size", "environ", "expected"),
    [
        ("auto", 0, 2, {}, [2, 3, 6, 7]),
        ("numa", 0, 2, {}, [0, 1, 4, 5]),
        ("cores", 3, 4, {}, [3, 7]),
        ("auto", 1, 2, {"SLURM_GPU_BIND": "single:1"}, [2, 3, 6, 7]),  # of the first GPU that it sees
    ],
)
def test_a_rank_binds_itself(
    mode: str,
    local_rank: int,
    local_size: int,
    environ: dict[str, str],
    expected: list[int],
    bound: list[Sequence[int]],
) -> None:
    rank_binding._bind(mode, local_rank, local_size, environ)
    assert bound == [expected]
    assert os.environ["OMP_NUM_THREADS"] == str(len(expected) // 2)


@pytest.mark.parametrize(
    ("environ", "ranks", "expected"),
    [
        ("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2", "9", [0, 1, 4, 5]),
        ("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", "9", [2, 3, 6, 7]),
        ("PMIX_RANK=3 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_GTIDS=2,3", "0", [2, 3, 6, 7]),
        ("FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1", "2", [2, 3, 6, 7]),  # Flux does not tell the number
        ("TORCHELASTIC_RUN_ID=x RANK=3 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4", "4", [0, 4]),
    ],
)
def test_a_rank_finds_its_number_on_the_host(
    environ: str, ranks: str, expected: list[int], bound: list[Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(word.split("=", 1) for word in environ.split()))
    commands_run: list[Sequence[str]] = []
    monkeypatch.setattr(rank_log, "become", lambda command: commands_run.append(command) or 0)
    assert rank_binding.main(["cores", ranks, "python", "train.py"]) == 0
    assert (bound, commands_run) == ([expected], [["python", "train.py"]])


def test_the_users_threads_are_kept(bound: list[Sequence[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    rank_binding._bind("cores", 0, 2, {})
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("environ", "status", "shown_error"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "9"}, 2, "9 ranks need as many cores"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "9"}, 2, ""),
        ({}, 2, "the launcher does not pass to the rank"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "x"}, 2, "OMPI_COMM_WORLD_LOCAL_RANK=x is not a number"),
    ],
)
def test_an_error_of_a_rank_is_printed_once_for_each_host(
    environ: dict[str, str],
    status: int,
    shown_error: str,
    bound: list[Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "9"} if environ else {}
    monkeypatch.setattr(os, "environ", {**world, **environ})
    ended: list[bool] = []  # on other hosts, which would wait for these ranks
    monkeypatch.setattr(rank_binding, "_end_job", lambda: ended.append(True))
    assert rank_binding.main(["cores", "9", "true"]) == status
    assert len(ended) == ("OMPI_COMM_WORLD_LOCAL_SIZE" in environ)
    errors = capsys.readouterr().err
    assert (shown_error in errors) if shown_error else errors == ""
    assert bound == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpuset.cpus.effective": "0-3,8\n"}, [0, 1, 2, 3, 8]),
        ({"proc/self/cgroup": "9:name=x:/\n3:cpuset:/job\n0::/\n",
          "sys/fs/cgroup/cpuset/job/cpuset.effective_cpus": "1\n"}, [1]),
        (
            {
                "proc/self/cgroup": "0::/user.slice/session\n",
                "sys/fs/cgroup/user.slice/cpuset.cpus.effective": "0,1\n",
            },
            [0, 1],
        ),
        ({"proc/self/cgroup": "0::/\n"}, []),
        ({}, []),
    ],
)  # fmt: skip
def test_the_cpus_of_the_control_group(files: Files, expected: list[int], tmp_path: Path) -> None:
    assert host_info.cgroup_cpus(write(files, tmp_path)) == expected
