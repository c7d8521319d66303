"""`pytest --ranks N`: replaces the process by `mpicomm run -n N python -m pytest --with-mpi`, with its arguments."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import pytest

from mpicomm.errors import LaunchError
from mpicomm.launch import detect, environment

_LATER_SECONDS = 2.0

# Options with which pytest prints information instead of running tests.
_INFORMATION = ("help", "version", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow")

# Options that cannot work on several ranks: their attribute, their name, and the reason.
_REFUSED = (
    ("usepdb", "--pdb", "The ranks have no terminal for a debugger"),
    ("trace", "--trace", "The ranks have no terminal for a debugger"),
    ("numprocesses", "-n", "The processes of pytest-xdist are not ranks of a job"),
    ("tx", "--tx", "The processes of pytest-xdist are not ranks of a job"),
    ("looponfail", "--looponfail", "The processes of pytest-xdist are not ranks of a job"),
    ("basetemp", "--basetemp", "Each rank would remove the directories of the others; set TMPDIR"),
    ("log_file", "--log-file", "Each rank would replace the file of the others"),
)


def add_option(group: pytest.OptionGroup) -> None:
    """Add `--ranks`."""
    group.addoption(
        "--ranks",
        metavar="N",
        type=_count,
        default=0,
        help="run the tests on N ranks, which `mpicomm run` starts; 0: in this process (default: 0)",
    )


def start_if_requested(config: pytest.Config) -> None:
    """Replace this process by the launcher of the ranks, if `--ranks` is given.

    Raises:
        pytest.UsageError: If the ranks cannot be started from here, or another option cannot work on several ranks.
    """
    from mpicomm import terminal

    options = config.known_args_namespace
    ranks = options.ranks
    if not ranks or any(getattr(options, name, None) for name in _INFORMATION):
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _refuse_in_job(ranks, "a rank that torchrun has started")
    try:
        environment.refuse_ranks(os.environ, [name for _, name in terminal.processes_above()])
    except LaunchError as error:
        _refuse_in_job(ranks, str(error).splitlines()[0].removeprefix("this process is ").partition(":")[0])
    for attribute, option, reason in _REFUSED:
        if getattr(options, attribute, None):
            raise pytest.UsageError(f"--ranks {ranks} cannot be combined with {option}. {reason}.\nRemove one of them.")
    if not config.pluginmanager.hasplugin("pytest_mpi"):
        raise pytest.UsageError(f"--ranks {ranks} needs pytest-mpi.\nInstall it: pip install pytest-mpi")
    arguments = [str(argument) for argument in config.invocation_params.args]
    if arguments != sys.argv[1:]:
        raise pytest.UsageError(
            f"--ranks {ranks} replaces the process, so it is an option of the command only, not of pytest.main().\n"
            f"Start `pytest --ranks {ranks}` or `python -m pytest --ranks {ranks}`."
        )
    # Open MPI gives a rank a terminal of 80 columns, whatever this process writes to; MPICH gives it a pipe.
    is_terminal = sys.stdout.isatty()
    if is_terminal:
        os.environ["COLUMNS"] = str(shutil.get_terminal_size().columns)
    if options.color == "auto":
        arguments.insert(0, f"--color={'yes' if is_terminal else 'no'}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command(ranks, arguments, _python_options()))


def command(ranks: int, arguments: Sequence[str], python_options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs pytest on ranks.

    Args:
        ranks: Their number.
        arguments: Those of pytest. `--ranks` may also be in `addopts`: the ranks must not start ranks themselves.
        python_options: Options of Python, such as `-W error`.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    pytest_arguments = ["--with-mpi", *arguments[:end], "--ranks=0", *arguments[end:]]
    run = [sys.executable, "-m", "mpicomm", "run", "-n", str(ranks)]
    return [*run, sys.executable, *python_options, "-m", "pytest", *pytest_arguments]


def _python_options() -> list[str]:
    """Return the options of Python with which this process was started, before `-m pytest` or the script."""
    words = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return words[:-2] if words[-2:-1] == ["-m"] else words[:-1]


def _refuse_in_job(ranks: int, process: str) -> NoReturn:
    if detect.detect(os.environ).rank != 0:
        time.sleep(_LATER_SECONDS)  # rank 0 prints the message; launchers end a job at the first status other than 0
        raise SystemExit(pytest.ExitCode.USAGE_ERROR)
    raise pytest.UsageError(
        f"--ranks {ranks} starts a job, but this process is {process}.\n"
        f"Use one of the two: `pytest --ranks {ranks}`, or `mpirun -n {ranks} pytest --with-mpi`."
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of ranks, got {text}")
    return int(text)
