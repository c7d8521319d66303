"""Communication hooks for DistributedDataParallel.

No `from __future__ import annotations` here: DDP compares the annotations of a hook with the types themselves.
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
    """Average the gradients in bfloat16: half the bytes of float32, with its range.

    For `DistributedDataParallel.register_comm_hook`, on any device. It stands in for torch's `bf16_compress_hook`, and
    has another name because DDP refuses every hook of that one where there is no NCCL.

    torch's hook divides before it sums, so that fp16 does not overflow, and rounds the quotients. bfloat16 cannot
    overflow where float32 does not; here the average is left to the back end. That of mpicomm sums and divides in
    float32 and rounds once, so each gradient is rounded twice in all: when it is compressed, and when it is averaged.

    Args:
        state: The group to average over; all ranks if None.
        bucket: The gradients.

    Returns:
        A future of the bucket's buffer, which holds the averages in its own dtype.
    """
    _STATE.check(state, "state", "bf16_compression_hook")
    _BUCKET.check(bucket, "bucket", "bf16_compression_hook")
    gradients = bucket.buffer()
    compressed = gradients.to(torch.bfloat16)
    work = dist.all_reduce(compressed, op=dist.ReduceOp.AVG, group=state, async_op=True)

    def decompress(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return gradients.copy_(reduced.value()[0])

    return work.get_future().then(decompress)
