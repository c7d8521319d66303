"""The module `horovod` for scripts that import Horovod, which `python -m mpicomm.horovod` makes importable.

`horovod.py` in this directory is that module. It is found by `sys.path`, not by an import hook, because the processes
that `multiprocessing` starts, such as those of a DataLoader, inherit `sys.path` only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

DIRECTORY = str(Path(__file__).parent)


def install() -> str | None:
    """Let `import horovod` import this package's module from now on.

    Returns:
        A sentence if Horovod itself is installed, too; None otherwise.
    """
    installed = importlib.util.find_spec("horovod")
    if DIRECTORY not in sys.path:
        sys.path.insert(0, DIRECTORY)  # first: the working directory may contain Horovod's sources
    importlib.import_module("horovod")
    if installed is None or installed.origin is None or Path(installed.origin).parent == Path(DIRECTORY):
        return None
    return (
        f"Horovod {_version()} is installed in {Path(installed.origin).parent}. This program uses mpicomm.horovod in "
        f"its place.\nTo use Horovod itself, start the program without --horovod and without -m mpicomm.horovod."
    )


def _version() -> str:
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"
