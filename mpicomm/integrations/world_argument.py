"""The check of the argument `world` of the adapters."""

from __future__ import annotations

from typing import Any

from mpicomm import arguments
from mpicomm.session import World

_WORLD = arguments.instance("a World, from bootstrap()", World, remedy="Pass world, from world = mpicomm.bootstrap().")


def require_world(world: Any) -> None:
    """Check the argument `world` of an adapter.

    Raises:
        TypeError: If it is not a World, such as None.
    """
    _WORLD.check(world, "world")
