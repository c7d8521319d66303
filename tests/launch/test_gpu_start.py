"""The start on a host with GPUs: MPI_Init comes before the driver, and reads whether to support GPU buffers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpicomm import mpi
from tests.launching import run_alone

pytestmark = pytest.mark.each_mpi

# `calls` are the functions that call the driver of a GPU, and MPI_Init. `torch.accelerator.current_accelerator` does
# not: it returns the accelerator for which torch was built.
RECORDER = """
import inspect, json, os

import torch

import mpicomm
from mpicomm import mpi

calls = []


def record(module, name):
    function = getattr(module, name)

    def recorded(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    setattr(module, name, recorded)


for module in (torch.accelerator, torch.cuda):
    for name in module.__all__:
        if inspect.isfunction(getattr(module, name, None)) and name != "current_accelerator":
            record(module, name)
record(mpi.api(), "Init_thread")


def report():
    names = ("MPIR_CVAR_ENABLE_GPU", "OMPI_MCA_accelerator")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    print(json.dumps({"calls": calls, "variables": variables}), flush=True)
"""
WITH_BOOTSTRAP = """
try:
    mpicomm.bootstrap(backend, device=device)
except mpicomm.DeviceError:
    report()
    os._exit(0)
report()
"""
WITHOUT = """
torch.distributed.init_process_group("mpicomm", store=torch.distributed.HashStore(), rank=0, world_size=1)
report()
"""
ENABLED = {"Open MPI": {}, "MPICH": {"MPIR_CVAR_ENABLE_GPU": "1"}}
DISABLED = {"Open MPI": {"OMPI_MCA_accelerator": "null"}, "MPICH": {"MPIR_CVAR_ENABLE_GPU": "0"}}


def start(program: str, **variables: str) -> dict[str, Any]:
    """Run a program on a host that appears to have a GPU, and return its report."""
    outcome = run_alone(RECORDER + program, env={"CUDA_VISIBLE_DEVICES": "0", **variables})
    assert outcome.status == 0, outcome
    return json.loads(outcome.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("program", "variables", "expected"),
    [
        (f"backend, device = 'auto', None{WITH_BOOTSTRAP}", {}, ENABLED),
        (f"backend, device = 'cpu:mpi,cuda:nccl', 0{WITH_BOOTSTRAP}", {}, DISABLED),
        (f"backend, device = 'auto', None{WITH_BOOTSTRAP}", {"MPICOMM_GPU_AWARE": "0"}, DISABLED),
        (WITHOUT, {}, ENABLED),
    ],
    ids=["auto", "vendor", "staged", "without bootstrap"],
)
def test_mpi_starts_before_the_driver_and_as_the_backend_needs_it(
    program: str, variables: dict[str, str], expected: dict[str, dict[str, str]]
) -> None:
    report = start(program, **variables)
    assert report["calls"][0] == "Init_thread"
    assert "is_available" in report["calls"]
    vendor = mpi.library().vendor
    if vendor in expected:
        assert report["variables"] == expected[vendor]


def test_the_variable_of_the_user_is_kept() -> None:
    variables = {"MPIR_CVAR_ENABLE_GPU": "1", "OMPI_MCA_accelerator": "^rocm"}
    assert start(f"backend, device = 'nccl', None{WITH_BOOTSTRAP}", **variables)["variables"] == variables
