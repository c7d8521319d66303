"""Communication hooks for DistributedDataParallel.

This module must not use `from __future__ import annotations`: DDP compares the annotations of a hook with types.
"""

import torch
import torch.distributed as dist

from mpicomm import arguments

_STATE = arguments.instance(
    "a torch ProcessGroup", dist.ProcessGroup, remedy="Call model.register_comm_hook(None, bf16_compression_hook)."
).or_none()
_BUCKET = arguments.instance(
    "a torch.distributed.GradBucket",
    dist.GradBucket,
    remedy="Let DDP call the hook: model.register_comm_hook(None, bf16_compression_hook).",
)


def bf16_compression_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in bfloat16, which halves the bytes of float32 and keeps its range.

    For `DistributedDataParallel.register_comm_hook`, on any device (collective over the group). It replaces torch's
    `bf16_compress_hook`. It has another name, because DDP rejects every hook of that name where NCCL is not available.

    torch's hook divides before it sums, so that fp16 does not overflow, and rounds the quotients. bfloat16 cannot
    overflow where float32 does not, so this hook leaves the average to the backend. The mpicomm backend sums and
    divides in float32 and rounds once. Each gradient is therefore rounded twice: at compression and at the average.

    Args:
        state: The process group to average over; None for all ranks.
        bucket: The gradients of one DDP bucket, a 1-D buffer.

    Returns:
        A future of the bucket's buffer, which then contains the averages in the dtype of the bucket.

    Raises:
        TypeError: If an argument is of another type.
    """
    _STATE.check(state, "state", "bf16_compression_hook")
    _BUCKET.check(bucket, "bucket", "bf16_compression_hook")
    gradients = bucket.buffer()
    compressed = gradients.to(torch.bfloat16)
    work = dist.all_reduce(compressed, op=dist.ReduceOp.AVG, group=state, async_op=True)

    def decompress(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return gradients.copy_(reduced.value()[0])

    return work.get_future().then(decompress)
