"""Runs pytest in a process that is forked from one in which torch and pytest are imported, which saves seconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "mpi4py.MPI", "numpy", "pytest", "hypothesis", "yaml", "rich"])


def run(root: Path, arguments: list[str], limit_seconds: float) -> tuple[bool, float]:
    """Run pytest in the checkout `root`; return whether all tests passed within the limit, and the seconds."""
    process = _CONTEXT.Process(target=_run_pytest, args=(str(root), arguments))
    start = time.monotonic()
    process.start()
    process.join(limit_seconds)
    seconds = time.monotonic() - start
    if process.exitcode is None and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return process.exitcode == 0, seconds


def _run_pytest(root: str, arguments: list[str]) -> None:
    os.setsid()
    os.chdir(root)
    with open(os.devnull, "r+") as null:  # noqa: PTH123
        for descriptor in range(3):
            os.dup2(null.fileno(), descriptor)
    # This module was imported from the checkout with the command; the tests import everything from `root`.
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "mpicomm")]:
        del sys.modules[name]
    sys.path.insert(0, root)
    os.environ |= {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "MPICOMM_DUMP_DIR": "none"}
    sys.dont_write_bytecode = False  # compiling the tests and the package takes longer than most tests
    importlib.invalidate_caches()

    import hypothesis
    import pytest

    # conftest.py's profile inherits these. A failure is sufficient: its smallest example is not needed.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
    hypothesis.settings.load_profile("mutants")
    os._exit(pytest.main(["-q", "-x", "-p", "no:xdist", *arguments]))
