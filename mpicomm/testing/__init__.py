"""Support for tests of programs that use mpicomm: a pytest plugin, and an assertion on all ranks.

pytest imports this package in every session where mpicomm is installed, so that it imports neither torch nor NumPy:
the public name is resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicomm.testing.equality import assert_equal_on_all_ranks as assert_equal_on_all_ranks

__all__ = ["assert_equal_on_all_ranks"]


def __getattr__(name: str) -> Any:
    """Resolve the public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'mpicomm.testing' has no attribute {name!r}")
    from mpicomm.testing import equality

    return getattr(equality, name)
