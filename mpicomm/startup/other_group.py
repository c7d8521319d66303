"""Detects a process group that the program initialized before `bootstrap()`, and reports the call to delete."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import torch.distributed as dist

from mpicomm.errors import LaunchError

_CALL = re.compile(r"[^#]*\binit_process_group\s*\(")
_PACKAGE = Path(__file__).resolve().parents[1]


def refuse(backend: str | None) -> None:
    """Raise an error if torch.distributed is already initialized.

    Args:
        backend: The `backend` argument of `bootstrap`, for the message.

    Raises:
        LaunchError: If it is initialized; the message lists the source lines that may have done so.
    """
    if not dist.is_initialized():
        return
    made = f"backend {dist.get_backend()}, {dist.get_world_size()} ranks"
    calls = _calls_on_the_stack()
    call = "bootstrap()" if backend in (None, "auto") else f"bootstrap({backend!r})"
    where = f", by init_process_group() at {' or '.join(calls)}" if calls else ""
    raise LaunchError(
        f"torch.distributed is already initialized ({made}){where}, before mpicomm.bootstrap().\n"
        f"Delete that call of init_process_group(): mpicomm.{call} initializes torch.distributed itself.\n"
        f"Or, to keep the call, put mpicomm.bootstrap(backend=None) before it."
    )


def _calls_on_the_stack() -> list[str]:
    """Return the lines that call init_process_group, as file:line, in the files on the call stack."""
    files = dict.fromkeys(frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    return [
        f"{file}:{number}"
        for file in files
        if _PACKAGE not in Path(file).parents
        for number, line in enumerate(linecache.getlines(file), start=1)
        if _CALL.match(line)
    ]
