"""Adapters with which other libraries run on the job that `bootstrap()` forms; each is an extra of the package."""

from __future__ import annotations

import sys


def lightning_callbacks() -> list[object]:
    """Check the use of WorldEnvironment, if the program has imported it; return no callbacks.

    Lightning loads this entry point in each Trainer and Fabric, also in programs that do not use this package: it
    imports nothing.
    """
    adapter = sys.modules.get("mpicomm.integrations.lightning")
    return [] if adapter is None else adapter.check_use()
