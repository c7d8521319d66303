"""A pytest plugin: the ranks of a job run the same tests in step, a failure on one rank is one on all, and none hangs.

pytest loads it where mpicomm is installed. Loading it imports neither torch nor MPI, and changes nothing outside of a
job that an MPI launcher has started, unless `pytest --ranks N` is to start one. `--with-mpi` and the marker `mpi` are
those of the package pytest-mpi.

- `rank_launch` starts the ranks for `pytest --ranks N`.
- `ranks_in_step` lets the ranks agree on the outcome of each test, and gathers the failures on rank 0, which reports.
- `time_limit` ends the job when a test exceeds its time limit (`--rank-timeout`).
- `fixtures` has the fixtures for the user's tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest

from mpicomm.errors import MpicommError
from mpicomm.launch import detect
from mpicomm.testing import rank_launch, time_limit

pytest_plugins = ["mpicomm.testing.fixtures"]

_launch = detect.detect(os.environ)

_is_in_job = _launch.kind == "mpi" and bool(_launch.claims)

if _is_in_job:
    # What is written while pytest captures stderr is lost if the job is aborted. This plugin is loaded before that.
    sys.__stderr__ = os.fdopen(os.dup(2), "w")  # type: ignore[misc]


def runs_on_ranks(config: pytest.Config) -> bool:
    """Return whether this session is one of the ranks of `pytest --ranks N`, or of `mpirun -n N pytest --with-mpi`."""
    return _is_in_job and bool(config.getoption("--with-mpi", False))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and settings."""
    group = parser.getgroup("mpicomm", "tests on several ranks (mpicomm)")
    rank_launch.add_option(group)
    time_limit.add_options(parser, group)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest captures the output
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """With `--ranks`, replace this process by the launcher, before a conftest.py is imported, which may start MPI."""
    rank_launch.start_if_requested(early_config)
    return (yield)


@pytest.hookimpl(tryfirst=True)  # before the plugin of --junitxml reads its option
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Initialise MPI (collective), and let rank 0 alone write the file of --junitxml.

    Raises:
        pytest.UsageError: If MPI cannot be initialised.
    """
    if not runs_on_ranks(config):
        return
    from mpicomm import mpi

    try:
        rank = mpi.initialize(_launch.local_size).rank
    except MpicommError as error:
        raise pytest.UsageError(str(error)) from error
    if rank != 0:
        config.option.xmlpath = None


@pytest.hookimpl(trylast=True)  # after the terminal reporter is registered
def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins of a rank (collective)."""
    config.addinivalue_line("markers", time_limit.MARKER)
    if not runs_on_ranks(config):
        return
    from mpicomm import mpi
    from mpicomm.testing.ranks_in_step import QuietRank, RanksInStep

    # Dup is collective: every rank calls it here, at the start of its session, where it cannot hang.
    comm = mpi.initialize(_launch.local_size).Dup()
    in_step = RanksInStep(config, comm)
    config.pluginmanager.register(in_step, "mpicomm-ranks-in-step")
    config.pluginmanager.register(time_limit.TimeLimit(config, in_step), "mpicomm-time-limit")
    if comm.rank != 0:
        config.pluginmanager.register(QuietRank(config, comm.rank), "mpicomm-quiet-rank")
