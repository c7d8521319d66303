"""Sums in rank order by torch's kernels, as a reference for those of the C library."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpicomm.backend.transfer.dtypes import NARROW_FLOATS


def ordered_sum(terms: Sequence[torch.Tensor], divisor: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Add terms in their order, narrow floats in float32; divide the sum, and round it once to a dtype (theirs)."""
    if terms[0].is_complex():  # torch multiplies complex terms by 1+0j: infinity becomes not a number
        return torch.view_as_complex(ordered_sum([torch.view_as_real(term) for term in terms], divisor))
    own = terms[0].dtype
    total = terms[0].to(torch.float32 if own in NARROW_FLOATS else own, copy=True)
    for term in terms[1:]:
        total += term
    if divisor != 1:
        total /= torch.tensor(divisor, dtype=total.dtype)
    return total.to(dtype or own)
