"""mpicomm: MPI-first collective communications for PyTorch.

    import mpicomm
    world = mpicomm.bootstrap()

Importing this package imports neither torch nor MPI: the public names are resolved on first use. It lets torch know
the back end, under the name `mpicomm`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpicomm.backend import plugin as _plugin

if TYPE_CHECKING:
    from mpicomm.errors import DeviceError, LaunchError, MismatchError, MpicommError, MPINotFoundError, RendezvousError
    from mpicomm.runtime import World, bootstrap, dump, shutdown
    from mpicomm.training.hooks import bf16_compression_hook
    from mpicomm.verbs.collectives import barrier

__version__ = "0.1.0"

_HOMES = {
    "bootstrap": "mpicomm.runtime",
    "shutdown": "mpicomm.runtime",
    "World": "mpicomm.runtime",
    "barrier": "mpicomm.verbs.collectives",
    "dump": "mpicomm.runtime",
    "bf16_compression_hook": "mpicomm.training.hooks",
    "MpicommError": "mpicomm.errors",
    "MismatchError": "mpicomm.errors",
    "LaunchError": "mpicomm.errors",
    "MPINotFoundError": "mpicomm.errors",
    "DeviceError": "mpicomm.errors",
    "RendezvousError": "mpicomm.errors",
}

__all__ = [
    "DeviceError",
    "LaunchError",
    "MPINotFoundError",
    "MismatchError",
    "MpicommError",
    "RendezvousError",
    "World",
    "__version__",
    "barrier",
    "bf16_compression_hook",
    "bootstrap",
    "dump",
    "shutdown",
]


def __getattr__(name: str) -> Any:
    """Resolve a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mpicomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_plugin.register_when_torch_comes()
