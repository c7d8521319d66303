"""Two kinds of test runs: `pytest` runs tests without the mark `mpi`, `mpirun -n N pytest --with-mpi` tests with it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpicomm.testing import pytest_plugin
from tests.time_limits import scaled

pytest_plugins = ["tests.worlds", "tests.scenarios", "tests.quarantine"]
# Variables that other packages set: pytest; torch, when DDP first checks for its compiler and when the compiler runs
# (also in a CUDA build); scikit-learn and Lightning, at import.
SET_BY_OTHERS = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "CUDA_MODULE_LOADING",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
}
ENDING_SECONDS = 3.0  # scaled
WITHOUT_RANKS = (
    "accelerator",
    "cluster",
    "conformance",
    "docs",
    "examples",
    "integrations",
    "launch",
    "recovery",
    "unit",
)
"""Folders whose tests run in one process; some of them start jobs."""


def pytest_configure(config: pytest.Config) -> None:
    with contextlib.suppress(ImportError):  # torch.compile uses it if it is installed, as Lightning requires
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # its thread would remain
    if not pytest_plugin.runs_on_ranks(config):
        with contextlib.suppress(ImportError):  # tests of other versions do not install it
            import hypothesis

            hypothesis.settings.register_profile("at any speed", deadline=None)
            hypothesis.settings.load_profile("at any speed")
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a script, `pytest &`; the jobs would ignore it too
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _folder_of(path: Path) -> str:
    """Return the folder in tests/ of a file; "" outside of it."""
    tests = Path(__file__).parent
    return path.relative_to(tests).parts[0] if path.is_relative_to(tests) else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import, under mpirun, the folders without tests for ranks: that takes half of the time of collection."""
    is_left_out = collection_path.parent == Path(__file__).parent and collection_path.name in WITHOUT_RANKS
    return True if is_left_out and pytest_plugin.runs_on_ranks(config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, under mpirun, the tests that run once in one process."""
    with_mark = [item for item in items if item.get_closest_marker("mpi")]
    if not pytest_plugin.runs_on_ranks(config):
        if unseen := [item.nodeid for item in with_mark if _folder_of(item.path) in WITHOUT_RANKS]:
            raise pytest.UsageError(f"mpirun does not collect {unseen}. Move them out of the folders {WITHOUT_RANKS}.")
        return
    if not config.pluginmanager.has_plugin("mpicomm-ranks-in-step"):
        raise pytest.UsageError(
            "The entry points of mpicomm are not installed, so a failure on one rank could hang.\nRun `make env`."
        )
    config.hook.pytest_deselected(items=[item for item in items if item not in with_mark])
    items[:] = with_mark


@pytest.fixture(autouse=True)
def without_leftovers() -> Iterator[None]:
    """Fail a test that does not remove its environment variables, threads, process groups and files."""
    before = _surroundings()
    yield
    end = time.monotonic() + scaled(ENDING_SECONDS)
    while (after := _surroundings()) != before and time.monotonic() < end:
        time.sleep(0.01)  # a queue's thread ends shortly after the queue was closed
    for what, left in after.items():
        assert left == before[what], f"the test changed {what} or did not remove them"


def _surroundings() -> dict[str, object]:
    environ = {name: value for name, value in os.environ.items() if name not in SET_BY_OTHERS}
    threads = {thread.name for thread in threading.enumerate() if not thread.name.startswith("mpicomm-")}
    files = {path.name for path in Path.cwd().iterdir() if path.name not in {".hypothesis", ".venv", ".venv-mpich"}}
    return {
        "environment variables": environ,
        "threads": threads,
        "process groups": _process_groups(),
        "files in the working directory": files,
    }


def _process_groups() -> list[str]:
    dist = sys.modules.get("torch.distributed")  # tests that do not import torch have no groups, and need not import it
    return sorted(dist.distributed_c10d._world.pg_names.values()) if dist and dist.is_initialized() else []
