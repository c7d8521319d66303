"""DeepSpeed's shared-memory all-reduce for inference on CPUs (csrc/cpu/comm/shm.cpp there), for comparison.

DeepSpeed compiles it on first use, which takes about a minute and needs a C++ compiler and ninja.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from mpicomm.session import World

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The kernel returns without an error, and without a sum, for other dtypes."""

_LEVEL = 2  # of vector instructions, as the kernel numbers them: AVX-512 on x86
_SEGMENT = "/dev/shm/deepspeed_allreduce_buffer"
_SIZE = "LOCAL_SIZE"  # the kernel reads the number of ranks of the node from this variable


def why_unavailable(kind: str, world: World) -> str:
    """Return the reason why the kernel cannot run in this job, or "".

    Args:
        kind: The type of the tensors' device: "cpu" or "cuda".
        world: The ranks.
    """
    if kind != "cpu" or world.num_nodes > 1:
        return "DeepSpeed's shared-memory all_reduce needs CPU tensors, and all ranks on one node"
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    return ""


def load(world: World) -> Callable[[torch.Tensor], object]:
    """Compile and load the kernel, and return its in-place all_reduce (collective).

    Raises:
        RuntimeError: If the kernel cannot be compiled, or not run on this CPU.
    """
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # type: ignore[import-not-found]

    library = ShareMemCommBuilder().load(verbose=False)
    if (level := library.vector_kernel_level()) < _LEVEL:
        raise RuntimeError(f"DeepSpeed's all_reduce needs vector instructions of level {_LEVEL}, got {level}.")
    before = os.environ.get(_SIZE)
    os.environ[_SIZE] = str(world.size)
    try:
        library.initialize(world.size, world.rank)
    finally:
        os.environ.pop(_SIZE)
        if before is not None:
            os.environ[_SIZE] = before
    dist.barrier()  # every rank has opened the segments of all others
    name = f"{_SEGMENT}_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_{world.rank}"
    Path(name).unlink(missing_ok=True)  # the kernel leaves it behind
    return torch.ops.deepspeed.inference_all_reduce_
