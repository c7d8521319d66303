"""The start on a host with GPUs: MPI_Init comes before the driver, and alone reads whether to support GPU buffers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpicomm import mpi
from tests import accelerator
from tests.launching import run_alone

pytestmark = pytest.mark.each_mpi

# `calls` are the functions that call the driver of a GPU, and MPI_Init. `torch.accelerator.current_accelerator` does
# not: it returns the accelerator for which torch was built.
RECORDER = """
import inspect, json, os

import torch

import mpicomm
from mpicomm import mpi

NAMES = ("MPIR_CVAR_ENABLE_GPU", "OMPI_MCA_accelerator")
calls, variables = [], {}


def record(module, name):
    function = getattr(module, name)

    def recorded(*args, **kwargs):
        calls.append(name)
        if name == "Init_thread":
            variables.update(set_variables())
        return function(*args, **kwargs)

    setattr(module, name, recorded)


def set_variables():
    return {name: os.environ[name] for name in NAMES if name in os.environ}


modules = [torch.accelerator, torch.cuda]
if "EMULATED_DEVICES" in os.environ:
    from tests import accelerator

    accelerator.register()
    modules.append(torch.emulated)
for module in modules:
    for name in module.__all__:
        if inspect.isfunction(getattr(module, name, None)) and name != "current_accelerator":
            record(module, name)
record(mpi.api(), "Init_thread")


def report():
    print(json.dumps({"calls": calls, "variables": variables, "left": set_variables()}), flush=True)
"""
WITH_BOOTSTRAP = """
try:
    mpicomm.bootstrap({arguments})
except mpicomm.DeviceError:
    report()
    os._exit(0)
report()
"""
WITHOUT = """
torch.distributed.init_process_group("mpicomm", store=torch.distributed.HashStore(), rank=0, world_size=1)
report()
"""
WITHOUT_BESIDE_NCCL = """
try:
    torch.distributed.init_process_group("mpicomm_nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
except RuntimeError as error:
    assert "built without NCCL" in str(error), error
report()
"""
ENABLED = {"Open MPI": {}, "MPICH": {"MPIR_CVAR_ENABLE_GPU": "1"}}
DISABLED = {
    "Open MPI": {"OMPI_MCA_accelerator": "null"},
    "MPICH": {"MPIR_CVAR_ENABLE_GPU": "0"},
}
TWO_DEVICES = {"EMULATED_DEVICES": "2"}
EMULATED = pytest.mark.skipif(bool(accelerator.reason_to_skip()), reason=accelerator.reason_to_skip() or "available")


def with_bootstrap(arguments: str = "") -> str:
    return WITH_BOOTSTRAP.format(arguments=arguments)


def start(program: str, **variables: str) -> dict[str, Any]:
    """Run a program on a host that appears to have a GPU, and return its report."""
    outcome = run_alone(RECORDER + program, env={"CUDA_VISIBLE_DEVICES": "0", **variables})
    assert outcome.status == 0, outcome
    return json.loads(outcome.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("program", "variables", "expected"),
    [
        (with_bootstrap(), {}, ENABLED),
        (with_bootstrap("'cpu:mpi,cuda:nccl', device=0"), {}, DISABLED),
        (with_bootstrap(), {"MPICOMM_GPU_AWARE": "0"}, DISABLED),
        (WITHOUT, {}, ENABLED),
        (WITHOUT_BESIDE_NCCL, {}, DISABLED),
        pytest.param(with_bootstrap("device=1"), TWO_DEVICES, ENABLED, marks=EMULATED),
        pytest.param(WITHOUT, TWO_DEVICES, ENABLED, marks=EMULATED),
    ],
    ids=["auto", "vendor", "staged", "without", "without, vendor", "emulated", "emulated, without"],
)
def test_mpi_starts_before_the_driver_and_as_the_backend_needs_it(
    program: str, variables: dict[str, str], expected: dict[str, dict[str, str]]
) -> None:
    report = start(program, **variables)
    assert report["calls"][0] == "Init_thread"
    assert report["left"] == {}  # a job that this program starts decides for itself
    assert "is_available" in report["calls"]
    if variables == TWO_DEVICES and program != WITHOUT:
        assert {"device_count", "get_device_properties", "set_device_index"} <= set(report["calls"])
    vendor = mpi.library().vendor
    if vendor in expected:
        assert report["variables"] == expected[vendor]


def test_the_variable_of_the_user_is_kept() -> None:
    variables = {"MPIR_CVAR_ENABLE_GPU": "1", "OMPI_MCA_accelerator": "^rocm"}
    report = start(with_bootstrap("'nccl'"), **variables)
    assert variables.items() <= report["variables"].items()
    assert report["left"] == variables
