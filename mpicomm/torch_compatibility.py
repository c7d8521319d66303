"""The version of the installed torch, the check that it is supported, and the error messages of the check.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from mpicomm.errors import MpicommError

# torch 2.7 is not supported: the options of six operations, including all_reduce, have no `asyncOp`, so a group cannot
# distinguish synchronous from asynchronous calls, and the default server of TCPStore accepts no listening socket.
# torch 2.6 is not supported: in addition, it frees the Python part of a Work that C++ holds when Python has no more
# references to it, and DDP then waits forever for the broadcast with which it rebuilds its buckets.
OLDEST, NEWEST = (2, 8), (2, 15)
"""The range of torch versions that this version of mpicomm is tested with, inclusive."""


def torch_version() -> tuple[int, int]:
    """Return the major and minor version of torch; this also works during torch's import."""
    from torch.version import __version__

    major, minor = (int(part) for part in __version__.split(".")[:2])
    return major, minor


def require(*names: str) -> None:
    """Check that torch is recent enough, and that it has the given undocumented names.

    Args:
        names: Dotted names below `torch`.

    Raises:
        MpicommError: If torch is older than the oldest tested version, or lacks one of the names.
    """
    if torch_version() < OLDEST:
        raise _error("")
    if missing := [f"torch.{name}" for name in names if not _has(name)]:
        raise _error(f"lacks {', '.join(missing)}")


@contextlib.contextmanager
def blame_untested_torch() -> Iterator[None]:
    """Explain a failure to create a process group if torch is newer than the tested versions.

    Raises:
        MpicommError: In place of any exception other than this package's own errors and `torch.distributed.DistError`
            (errors of the store and the network).
    """
    import torch.distributed as dist

    try:
        yield
    except (MpicommError, dist.DistError):
        raise
    except Exception as error:
        if torch_version() <= NEWEST:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        raise _error(f"cannot create the process group ({reason})") from error


def _has(name: str) -> bool:
    import torch

    holder: object = torch
    for part in name.split("."):
        if not hasattr(holder, part):
            return False
        holder = getattr(holder, part)
    return True


def _error(problem: str) -> MpicommError:
    """Return an error whose last line is the command that installs a tested version of torch."""
    import torch

    oldest, newest, after = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST, (NEWEST[0], NEWEST[1] + 1)))
    here, is_newer = torch_version(), torch_version() > NEWEST
    relation = "newer than" if is_newer else "older than" if here < OLDEST else "among"
    version = sys.modules["mpicomm"].__version__  # modules of the package do not import `mpicomm` itself
    joint = "but" if relation == "among" else "and"
    return MpicommError(
        f"torch {torch.__version__} is {relation} the versions that mpicomm {version} is tested with "
        f"({oldest} to {newest}){f', {joint} {problem}' if problem else ''}.\n"
        f"Install a tested version of torch{', or a newer mpicomm' * is_newer}:\n"
        f"  pip install 'torch>={oldest},<{after}'"
    )
