"""Combinations of groups and dtypes: all dtypes on the world, and a few dtypes on other groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mpicomm.backend.transfer import dtypes as names
from tests.worlds import KINDS

FEW = (torch.float32, torch.bfloat16, torch.int64)
"""A dtype that MPI reduces on the fast path, a dtype that is widened, and a dtype whose sums wrap around."""


def sweep(
    dtypes: Sequence[torch.dtype], few: Sequence[torch.dtype] = FEW, kinds: Sequence[str] = KINDS
) -> pytest.MarkDecorator:
    """Parametrize a test's `group` and `dtype`.

    Args:
        dtypes: The dtypes on the first kind of group.
        few: The dtypes on the other kinds of groups; those not in `dtypes` are omitted.
        kinds: The kinds of groups.
    """
    first, *others = kinds
    pairs = [(first, dtype) for dtype in dtypes] + [
        (kind, dtype) for kind in others for dtype in few if dtype in dtypes
    ]
    return pytest.mark.parametrize(("group", "dtype"), pairs, indirect=["group"], ids=_named)


def _named(value: object) -> str:
    return names.short(value) if isinstance(value, torch.dtype) else str(value)
