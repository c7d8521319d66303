"""The start of jobs on the emulated accelerator: the device of each rank, and the backend that it determines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import accelerator
from tests.launching import Outcome, command_line, run_command, run_ranks

pytestmark = pytest.mark.skipif(bool(accelerator.reason_to_skip()), reason=accelerator.reason_to_skip() or "available")

# Gloo takes the place of a vendor's library: it is created, but gets no tensors.
SETUP = """
import json, os, sys

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ["RANK"])
if len(sys.argv) > 1:
    os.environ["EMULATED_VISIBLE_DEVICES"] = sys.argv[1 + rank]

import torch
import torch.distributed as dist

import mpicomm
from mpicomm import job_info
from mpicomm.devices import vendors
from tests import accelerator

accelerator.register()


def add_library():
    def create(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("fancyccl", create, devices=["emulated"])


def start(*args, **kwargs):
    try:
        world = mpicomm.bootstrap(*args, **kwargs)
    except mpicomm.DeviceError as error:
        return str(error)
    current = torch.accelerator.current_device_index()
    total = torch.ones(1)
    dist.all_reduce(total)
    info = job_info.collect(world)
    transport = info.software.get("GPU tensors")
    started = [str(world.device), current, world.backend, dist.get_backend_config(), int(total), transport]
    if world.device.type != "cpu":
        properties = torch.emulated.get_device_properties(world.device)
        assert (info.device_name, info.uuid) == (properties.name, properties.uuid), info
    mpicomm.shutdown()
    return started


def report(*results):
    print(f"{json.dumps([rank, *results])}\\n", end="", flush=True)  # one write: torchrun starts ranks with -u
"""
MPICOMM = "cpu:mpicomm,emulated:mpicomm"
STAGED = "staged through host memory"


def reports(outcome: Outcome) -> list[list[Any]]:
    """Return the results of each rank."""
    assert outcome.status == 0, outcome
    lines = [json.loads(line) for line in outcome.stdout.splitlines() if line.startswith("[")]
    return [results for _, *results in sorted(lines)]


@pytest.mark.each_mpi
def test_the_device_of_each_rank_and_the_backend_of_its_vendor() -> None:
    program = """
results = [start(), start(device="emulated:1"), start("mpi", device=0), start(device="cpu")]
if rank == 0:
    add_library()
results.append(start())
if rank == 1:
    add_library()
results += [start(), start("cpu:gloo,emulated:fancyccl"), start(device="emulated:1")]
mpicomm.bootstrap(None)
dist.init_process_group("mpicomm")
report(*results, dist.get_backend_config())
"""
    for rank, results in enumerate(reports(run_ranks(2, SETUP + program))):
        own = [f"emulated:{rank}", rank]
        assert results == [
            [*own, "mpi", MPICOMM, 2, STAGED],
            ["emulated:1", 1, "mpi", MPICOMM, 2, STAGED],
            ["emulated:0", 0, "mpi", MPICOMM, 2, STAGED],
            ["cpu", 0, "mpi", MPICOMM, 2, None],
            [*own, "mpi", MPICOMM, 2, STAGED],  # one rank lacks the library
            [*own, "cpu:mpi,emulated:fancyccl", "cpu:mpicomm_fancyccl,emulated:mpicomm_fancyccl", 2, "FANCYCCL"],
            [*own, "cpu:gloo,emulated:fancyccl", "cpu:gloo,emulated:fancyccl", 2, "FANCYCCL"],
            ["emulated:1", 1, "mpi", MPICOMM, 2, STAGED],
            MPICOMM,
        ]


@pytest.mark.each_mpi
def test_after_a_world_with_the_vendors_library_mpi_gets_no_gpu_addresses() -> None:
    """MPI_Init of the first world has disabled MPI's support for GPU memory for the rest of the process."""
    program = """
from mpicomm.backend.gpu import probe

tests = []
probe.failures = lambda comm, device: tests.append(device) or []
probe.answers_yes = lambda query: True
vendors.Vendor.mpi_queries = ("MPIX_Query_fancy_support",)
os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # this host appears to have a GPU
add_library()
results = [start(backend)[2:] for backend in ("auto", "mpi")]
os.environ["MPICOMM_GPU_AWARE"] = "1"  # too late
report(*results, start("mpi")[-1], len(tests))
"""
    beside = ["cpu:mpi,emulated:fancyccl", "cpu:mpicomm_fancyccl,emulated:mpicomm_fancyccl", 2, "FANCYCCL"]
    outcome = run_ranks(2, SETUP + program)
    assert reports(outcome) == [[beside, ["mpi", MPICOMM, 2, STAGED], STAGED, 0]] * 2
    assert outcome.stderr.count("an earlier bootstrap() of this process has disabled MPI's support") == 1, outcome
    # without an earlier world: the addresses go to MPI
    outcome = run_ranks(2, SETUP + program.replace('("auto", "mpi")', '("mpi", "auto")'))
    direct = "accelerator-aware MPI"
    assert reports(outcome) == [[["mpi", MPICOMM, 2, direct], beside, direct, 1]] * 2
    assert "an earlier bootstrap()" not in outcome.stderr


def test_a_shared_device_is_refused_before_the_vendors_library_starts() -> None:
    program = """
add_library()
report(start(), start("fancyccl"), start(device="emulated:1"), start(device="cuda:0"))
"""
    for results in reports(run_ranks(2, SETUP + program, env={"EMULATED_DEVICES": "1"})):
        assert results[0] == ["emulated:0", 0, "mpi", MPICOMM, 2, STAGED]
        assert results[1].startswith("ranks 0, 1 on ")
        assert ", which FANCYCCL does not allow.\nStart one rank per GPU, or use backend='mpi'." in results[1]
        assert "device='emulated:1' does not exist: this process sees 1 GPU.\nPass one of emulated:0" in results[2]
        assert "device must be on cpu or emulated, got 'cuda:0'." in results[3]


def test_devices_of_one_gpu_are_shared_for_the_vendors_library() -> None:
    """MIG devices, for example: NCCL refuses two ranks on one GPU."""
    program = """
add_library()
vendors.Vendor.gpu_uuid = lambda vendor, index: "GPU-7"
vendors.Vendor.sharing_variable = "FANCYCCL_SHARES"
results = [start(), start("fancyccl")]
os.environ["FANCYCCL_SHARES"] = "1"
report(*results, start(), start("cpu:mpi,emulated:fancyccl"))
"""
    for rank, results in enumerate(reports(run_ranks(2, SETUP + program))):
        assert results[0] == [f"emulated:{rank}", rank, "mpi", MPICOMM, 2, STAGED]
        assert results[1].startswith("ranks 0, 1 on ")
        assert "share one GPU (GPU-7), which FANCYCCL does not allow." in results[1]
        assert results[2] == results[0]
        assert results[3][2] == "cpu:mpi,emulated:fancyccl"


@pytest.mark.parametrize(
    ("visible", "devices"), [(["1", "0"], [0, 0]), (["0,1", "0"], [1, 0]), (["0,1", "1,0"], [0, 0])]
)
def test_ranks_that_see_different_devices_have_one_each(visible: list[str], devices: list[int], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{SETUP}\nadd_library()\nreport(start())\n")
    for (started,), device in zip(reports(run_ranks(2, [str(script), *visible])), devices, strict=True):
        assert started[:3] == [f"emulated:{device}", device, "cpu:mpi,emulated:fancyccl"]


def test_under_torchrun_the_local_rank_decides(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{SETUP}\nreport(start())\n")
    command = command_line("torchrun --nproc-per-node 3")
    for rank, (started,) in enumerate(reports(run_command([*command, str(script)]))):
        assert (*started[:3], *started[4:]) == (f"emulated:{rank % 2}", rank % 2, "gloo", 3, None)
