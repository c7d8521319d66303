"""The error for an adapter whose library is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def installed_by(extra: str) -> Iterator[None]:
    """Import the library of an adapter during the block.

    Args:
        extra: The extra of this package that installs the library, with the name of the adapter's module.

    Raises:
        ModuleNotFoundError: If the library, or a package that it needs, is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"mpicomm.integrations.{extra} requires the package {error.name}, which is not installed.\n"
            f'Install it: pip install "mpicomm[{extra}]"',
            name=error.name,
        ) from error
