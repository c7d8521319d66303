"""Whether this package runs with the torch that is installed, and the errors where it does not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from mpicomm.backend import versions
from mpicomm.errors import MpicommError

# Not torch 2.7: the options of six operations, all_reduce among them, have no `asyncOp`, so that a group cannot tell
# whether a call is synchronous, and a store's default server takes no listening socket. Not torch 2.6: there also the
# Python part of a Work that C++ holds is freed once nothing in Python refers to it, and DDP then waits without end for
# the broadcast with which it rebuilds its buckets.
OLDEST, NEWEST = (2, 8), (2, 15)
"""The versions of torch that this version of mpicomm is tested with, from one to the other."""


def require(*names: str) -> None:
    """Check that torch is not too old, and that it has names that it does not document.

    Args:
        names: Dotted names below `torch`.

    Raises:
        MpicommError: If it is older than the oldest version tested, or lacks names.
    """
    if versions.of_torch() < OLDEST:
        raise _error("")
    if missing := [f"torch.{name}" for name in names if not _has(name)]:
        raise _error(f"lacks {', '.join(missing)}")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Say so where a process group cannot be made with a torch that is newer than the versions tested.

    Raises:
        MpicommError: In place of any error but this package's own and torch's of its store and network.
    """
    try:
        yield
    except (MpicommError, dist.DistError):
        raise
    except Exception as error:
        if versions.of_torch() <= NEWEST:
            raise
        what = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        raise _error(f"cannot make the process group ({what})") from error


def _has(name: str) -> bool:
    holder: object = torch
    for part in name.split("."):
        if not hasattr(holder, part):
            return False
        holder = getattr(holder, part)
    return True


def _error(problem: str) -> MpicommError:
    """Return an error whose last line is the command that installs another torch."""
    oldest, newest, after = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST, (NEWEST[0], NEWEST[1] + 1)))
    here, is_newer = versions.of_torch(), versions.of_torch() > NEWEST
    relation = "newer than" if is_newer else "older than" if here < OLDEST else "among"
    version = sys.modules["mpicomm"].__version__  # modules of the package do not import it
    joint = "but" if relation == "among" else "and"
    return MpicommError(
        f"torch {torch.__version__} is {relation} the versions that mpicomm {version} is tested with "
        f"({oldest} to {newest}){f', {joint} {problem}' if problem else ''}.\n"
        f"Install a torch of these versions{', or a newer mpicomm' * is_newer}:\n"
        f"  pip install 'torch>={oldest},<{after}'"
    )
