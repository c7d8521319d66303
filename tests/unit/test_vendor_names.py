"""Names of one vendor's accelerator occur in the code of `devices/vendors.py` only; all other code is generic."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # from Python 3.12 on
VENDORS = "mpicomm/devices/vendors.py"
NAMES = re.compile(r"cuda|nvidia|nvml|nccl_available|ProcessGroupNCCL|cudnn|torch\.version\.(hip|xpu)", re.IGNORECASE)
"""Of code that works with the accelerator of one vendor. NCCL as the name of a backend is a word that users type."""

EXCEPTIONS = {
    "mpicomm/horovod/__init__.py": "Horovod's API has the function cuda_built()",
    "mpicomm/horovod/context.py": "Horovod's API has the functions cuda_built() and rocm_built()",
    "mpicomm/training/randomness.py": "a flag of torch for cuDNN, without effect on the libraries of other vendors",
    "mpicomm/training/foreign_arguments.py": "the message about an argument of Lightning names the flag of torch",
    "mpicomm/watchdog/agent.py": "reads the GPU by NVML, which other vendors do not have",
    "mpicomm/watchdog/nvml.py": "NVML is the library of NVIDIA's driver",
    "mpicomm/watchdog/rank_reports.py": "reads the GPU by NVML, which other vendors do not have",
    "mpicomm/doctor/gpu_check.py": "runs the tools of the drivers, which need no torch, by their names",
    "mpicomm/doctor/fabric_check.py": "looks for the network plugins of the vendors' libraries by their names",
    "mpicomm/doctor/network_check.py": "the variable of a library that only GPUs of two vendors have",
    "mpicomm/doctor/fabric_rules.py": "the settings that pages of centres demand for the library of each vendor",
    "mpicomm/cli/bench.py": "examples of the types of devices that --device accepts",
    "mpicomm/launch/containers.py": "the options and variables with which container runtimes pass GPUs of each vendor",
    "mpicomm/launch/environment.py": "the variables that mpiexec passes on are those of all vendors",
    "mpicomm/launch/mpi_operator.py": "variables that the images of NVIDIA set",
    "mpicomm/launch/jobscript/kubernetes.py": "the resource of GPUs in Kubernetes, which --gpus-per-node documents",
    "mpicomm/launch/mpi_library.py": "the parameters of MPI libraries that concern the GPUs of each vendor",
    "mpicomm/launch/visible_devices.py": "the variables of all vendors that restrict devices, a table without torch",
    "mpicomm/devices/counting.py": "counts the devices of each vendor in the files of its driver, without torch",
}
"""Modules that need such names, and why."""


def names_in(path: Path) -> list[str]:
    """Return the lines of code with such a name; comments and docstrings are text."""
    lines = path.read_text().splitlines()
    found = []
    previous = tokenize.INDENT
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        is_text = token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and previous in {tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE}
        )
        if not is_text and token.type in {tokenize.NAME, *TEXT}:
            first, last = token.start[0] - 1, token.end[0]
            whole = "\n".join(lines[first:last]) if token.string in {"hip", "xpu"} else token.string
            if NAMES.search(whole):
                found.append(f"{token.start[0]}: {lines[first].strip()}")
        if token.type not in {tokenize.NL, tokenize.COMMENT}:
            previous = token.type
    return sorted(set(found))


PATHS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("mpicomm", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if not path.relative_to(ROOT).is_relative_to("mpicomm/examples")  # a link to examples
)


@pytest.mark.parametrize("path", PATHS)
def test_code_is_generic_over_the_vendors_of_accelerators(path: str) -> None:
    if path == VENDORS:
        return
    names = names_in(ROOT / path)
    if path in EXCEPTIONS:
        assert names, "the exception is not needed any more"
    else:
        assert names == []


def test_the_reader_of_names_reads_code_and_not_text(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""About CUDA."""\n\nX = 1  # cuda\n"""CUDA, too."""\n\n\ndef f(tensor):\n    """CUDA."""\n'
        '    if tensor.is_cuda:\n        return torch.version.hip\n    return f"cuda:{X}", "nccl"\n'
    )
    assert [line.partition(":")[0] for line in names_in(path)] == ["10", "11", "9"]
