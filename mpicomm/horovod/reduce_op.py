"""The reduction operations: Horovod's constants, and the corresponding operations of torch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# Horovod's own numbers: programs store them.
Average, Sum, Adasum, Min, Max, Product = range(6)

NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")

TORCH_OPS: dict[int, Any] = {
    Average: dist.ReduceOp.AVG,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


def check(op: Any, what: str) -> int:
    """Return a reduction operation.

    Raises:
        ValueError: If it is not one of Horovod's constants.
    """
    if op not in range(len(NAMES)):
        raise ValueError(f"{what}: op must be hvd.{', hvd.'.join(NAMES)}, got {op!r}.\nPass one of these constants.")
    return int(op)
