"""Remedies for errors of torch and Python that say nothing about the launch, which is their cause.

They follow the traceback of an unhandled exception: in ranks that have called `bootstrap()`, and, after `import torch`,
in those of a program that has not (`mpicomm.unconverted`).
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

from mpicomm.errors import LaunchError
from mpicomm.launch import detect, request
from mpicomm.launch.detect import Launch
from mpicomm.launch.known_launchers import COMPARED, TORCHRUN
from mpicomm.settings import PARENT_VARIABLE

_OF_RANKS = (*TORCHRUN.variables(COMPARED), "MASTER_ADDR", "MASTER_PORT")
_TWICE = "trying to initialize the default process group twice"
_explained: list[BaseException] = []
"""The exceptions whose remedy has been returned."""

_NO_MPI = "Distributed package doesn't have MPI built in"


@dataclasses.dataclass(frozen=True)
class _Failure:
    """An unhandled exception of a rank."""

    error: BaseException
    environ: Mapping[str, str]
    launch: Launch
    has_bootstrapped: bool

    @property
    def kinds(self) -> set[str]:
        """The names of the exception's classes; torch's need not be imported here."""
        return {kind.__name__ for kind in type(self.error).__mro__}

    def command(self, *options: str) -> str:
        """Return the command that starts this program on as many ranks, with options of `mpicomm run`."""
        number = [] if self.launch.step is not None else ["-n", str(self.launch.least_size)]
        words = sys.orig_argv[1:]
        if words[:1] != ["-m"] and words[:1] and words[0].startswith("-"):  # options of Python
            words = ["python", *words]
        return request.command_line(["mpicomm", "run", *options, *number, *words])


def after(error: BaseException, environ: Mapping[str, str], *, has_bootstrapped: bool) -> str | None:
    """Return what to do after an unhandled exception of a rank; None if its text says so, or nothing is known.

    Args:
        error: The exception.
        environ: The environment of this process.
        has_bootstrapped: Whether the program has called `bootstrap()`.
    """
    if any(error is each for each in _explained):
        return None
    try:
        failure = _Failure(error, environ, detect.detect(environ), has_bootstrapped)
        text = next((text for describe in _REMEDIES if (text := describe(failure)) is not None), None)
    except Exception:  # noqa: BLE001  the exception is the program's, and may fail in its own methods
        return None
    if text is not None:
        _explained.append(error)  # hooks may call each other
    return text


def _of_missing_variable(failure: _Failure) -> str | None:
    """Return the remedy of a program that reads a variable of torchrun's ranks, which mpirun and srun do not set."""
    text = str(failure.error)
    if "KeyError" in failure.kinds and _is_of_environ(failure.error):
        name = text.strip("'\"")
    elif found := re.search(r"environment variable (\w+) expected, but not set", text):
        name = found[1]
    else:
        return None
    if name not in _OF_RANKS or failure.environ.get(name) or failure.launch.least_size == 1:
        return None
    if PARENT_VARIABLE in failure.environ:
        is_address = name.startswith("MASTER") and failure.environ.get("MASTER_PORT")
        return "MASTER_PORT is set without MASTER_ADDR: set both, or neither for `mpicomm run`." if is_address else None
    return (
        f"{failure.launch.title} does not set {name}, which torchrun sets for its ranks. Start the program with\n"
        f"  {failure.command()}\n"
        f"which sets it, or call mpicomm.bootstrap() before {name} is first read."
    )


def _is_of_environ(error: BaseException) -> bool:
    """Return whether `os.environ[name]` raised an error, and not another dictionary."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_locals.get("self") is os.environ


def _of_second_group(failure: _Failure) -> str | None:
    if not (failure.has_bootstrapped and _TWICE in str(failure.error)):
        return None
    return (
        "mpicomm.bootstrap() has initialized torch.distributed: delete this call of init_process_group().\n"
        "If a library calls it, use mpicomm.bootstrap(backend=None), which only sets the variables that it reads."
    )


def _of_name_mpi(failure: _Failure) -> str | None:
    if _NO_MPI not in str(failure.error):
        return None
    return (
        "mpicomm has a backend over MPI, for which torch need not be built. Call mpicomm.bootstrap(), or\n"
        'init_process_group("mpicomm"), after `import mpicomm`; from torch 2.14 on, its name is also "mpi".'
    )


def _of_spawned_ranks(failure: _Failure) -> str | None:
    """Return the remedy of a program that starts its own ranks in each rank, which then use the same ports."""
    is_explained = LaunchError.__name__ in str(failure.error)
    if failure.launch.least_size == 1 or "ProcessException" not in failure.kinds or is_explained:
        return None
    return (
        f"The program starts processes by torch.multiprocessing, and {failure.launch.title} started the program "
        f"{failure.launch.least_size} times. If\nthese processes are its ranks: call their function directly, with the "
        f"rank in RANK, and start the ranks with\n  {failure.command()}"
    )


def _of_horovod(failure: _Failure) -> str | None:
    if not isinstance(failure.error, ModuleNotFoundError) or (failure.error.name or "").partition(".")[0] != "horovod":
        return None
    return (
        f"mpicomm has Horovod's interface for PyTorch: {failure.command('--horovod')}\n"
        f"or `import mpicomm.horovod as hvd` in place of `import horovod.torch as hvd`."
    )


_REMEDIES: tuple[Callable[[_Failure], str | None], ...] = (
    _of_missing_variable,
    _of_second_group,
    _of_name_mpi,
    _of_spawned_ranks,
    _of_horovod,
)


class Hook:
    """A `sys.excepthook` that adds the remedy to an exception that ends the program."""

    def __init__(self, previous: Callable[..., Any]) -> None:
        """Create the hook.

        Args:
            previous: The hook that prints the exception.
        """
        self.previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        """Print the exception and its remedy."""
        self.previous(kind, error, trace)
        if (remedy := after(error, os.environ, has_bootstrapped=False)) is not None:
            sys.stderr.write(f"[mpicomm] {remedy}\n")
