"""Runs a program on ranks that may share a GPU: `mpirun -n 2 python -m tests.gpu.program MPI|NCCL MODULE ARGUMENTS`.

Without a GPU, the emulated accelerator is used. NCCL and bootstrap() refuse ranks that share a GPU, but NCCL compares
the GPUs only of ranks with the same NCCL_HOSTID; it connects others by sockets. So this shows that NCCL is called
correctly, not how fast it is.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

from mpicomm.devices import assignment
from mpicomm.job import plan
from tests import accelerator as emulated


def variables_for_nccl() -> dict[str, str]:
    """Return variables with which NCCL takes this process for one on another host, from its first communicator on."""
    return {"NCCL_HOSTID": f"process {os.getpid()}", "NCCL_SOCKET_IFNAME": "lo"}


def main() -> None:
    backend = sys.argv[1]
    del sys.argv[:2]
    if not torch.accelerator.is_available():
        emulated.register()
    if backend == "NCCL":
        os.environ.update(variables_for_nccl())
        plan.has_gpu_each = lambda *_: True  # type: ignore[assignment]
        assignment.refuse_shared = lambda *_, **__: None  # type: ignore[assignment]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
