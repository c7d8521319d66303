"""Which tests run on which groups with which dtypes: all dtypes on the world, and a few dtypes on other groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mpicomm.backend import dtypes as names
from tests.worlds import KINDS

FEW = (torch.float32, torch.bfloat16, torch.int64)
"""One that MPI reduces and that has a short path, one that is widened, one whose sum wraps around."""


def sweep(
    dtypes: Sequence[torch.dtype], few: Sequence[torch.dtype] = FEW, kinds: Sequence[str] = KINDS
) -> pytest.MarkDecorator:
    """Parametrize a test's `group` and `dtype`.

    Args:
        dtypes: Those on the first kind of group.
        few: Those on the other kinds, as far as they are among `dtypes`.
        kinds: The kinds of groups.
    """
    first, *others = kinds
    pairs = [(first, dtype) for dtype in dtypes] + [
        (kind, dtype) for kind in others for dtype in few if dtype in dtypes
    ]
    return pytest.mark.parametrize(("group", "dtype"), pairs, indirect=["group"], ids=_named)


def _named(value: object) -> str:
    return names.short(value) if isinstance(value, torch.dtype) else str(value)
