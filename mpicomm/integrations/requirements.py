"""The requirements of an adapter: its library, and the argument `world`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mpicomm import arguments, host_info
from mpicomm.job.session import World

_WORLD = arguments.instance("a World, from bootstrap()", World, remedy="Pass world, from world = mpicomm.bootstrap().")


@contextlib.contextmanager
def installed_by(extra: str, requirement: str = "") -> Iterator[None]:
    """Import the library of an adapter during the block.

    Args:
        extra: The extra of this package that installs the library, with the name of the adapter's module.
        requirement: The oldest version that the adapter can use, as in the extra, such as `ray>=2.52`.

    Raises:
        ModuleNotFoundError: If the library, or a package that it needs, is not installed.
        ImportError: If the library is too old.
    """
    # By its metadata: the import of an old library may fail, since it lacks the names that the adapter imports.
    package, _, oldest = requirement.partition(">=")
    version = host_info.version_of(package) if package else host_info.NOT_INSTALLED
    if version != host_info.NOT_INSTALLED and host_info.is_older(version, oldest):
        raise ImportError(
            f"mpicomm.integrations.{extra} requires {requirement}, got {package} {version}.\n"
            f'Upgrade it: pip install "mpicomm[{extra}]"',
            name=package,
        )
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"mpicomm.integrations.{extra} requires the package {error.name}, which is not installed.\n"
            f'Install it: pip install "mpicomm[{extra}]"',
            name=error.name,
        ) from error


def require_world(world: Any) -> None:
    """Check the argument `world` of an adapter.

    Raises:
        TypeError: If it is not a World, such as None.
    """
    _WORLD.check(world, "world")
