"""Imports PyTorch's test module under a label, and runs single tests on this rank."""

from __future__ import annotations

import datetime
import importlib
import os
import sys
import traceback
import types
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

from mpicomm import torch_compatibility
from tests.conformance import verdicts
from tests.conformance.verdicts import Verdict

if TYPE_CHECKING:
    from tests.conformance.on_accelerator import SharedDevices

_SHOWS_ASYNC_SPANS = (2, 12)
"""The first torch whose profiler keeps spans that end on another thread, which PyTorch's tests check."""

_MODULE = "torch.testing._internal.distributed.distributed_test"
_SKIPS = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


class Suite:
    """PyTorch's tests for a backend of one name."""

    def __init__(self, label: str, rank: int, size: int, devices: SharedDevices | None = None) -> None:
        """Import the test module; these variables determine which tests it skips at import.

        Args:
            devices: The accelerator's, which the tests use in place of those that they name.
        """
        os.environ.update(BACKEND=label, WORLD_SIZE=str(size), INIT_METHOD="file:///set/for/each/test")
        sys.modules.pop(_MODULE, None)
        self.label = label
        self._rank = rank
        self._size = size
        self._module: Any = importlib.import_module(_MODULE)
        if torch_compatibility.torch_version() < _SHOWS_ASYNC_SPANS:
            self._module.PROFILING_SUPPORTED_BACKENDS = []
            self._module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []
        self._devices = devices
        if devices is not None:
            devices.redirect(self._module, label, rank)
        # The class that PyTorch's own runner, test_distributed_spawn.py, names TestDistBackendWithSpawn.
        bases = (self._module.TestDistBackend, self._module.DistributedTest._DistTestBase)
        self._case = types.new_class("Case", bases)

    def names(self) -> list[str]:
        """Return the names of the tests, in the order of execution on all ranks."""
        return sorted(name for name in dir(self._case) if name.startswith("test_"))

    def skip(self, name: str) -> Verdict | None:
        """Return the verdict on a test that is skipped at import; None if it must be run."""
        test = getattr(self._case, name)
        reason = None if self._devices is None else self._devices.reason_to_skip(test, self.label, self._size)
        if reason is not None:
            return Verdict(verdicts.SKIP, reason)
        if not getattr(test, "__unittest_skip__", False):
            return None
        return Verdict(verdicts.SKIP, verdicts.in_one_line(test.__unittest_skip_why__))

    def run(self, name: str, scratch: Path, check: Callable[[Any], None]) -> Verdict:
        """Run one test on this rank, in a new default group, as `TestDistBackend._run` does in a new process.

        Args:
            scratch: An empty directory that all ranks can access.
            check: Called with the default group.
        """
        case = self._prepare(name, scratch)
        try:
            self._open_group(case, name)
            check(dist.group.WORLD)
            common_utils.set_rng_seed(common_utils.SEED)
            getattr(case, name)()
        except unittest.SkipTest as skip:
            return Verdict(verdicts.SKIP, verdicts.in_one_line(str(skip)))
        except SystemExit as end:
            return verdict_of_exit(end)
        except Exception as error:  # noqa: BLE001  any exception of a test is its verdict
            traceback.print_exc()
            return verdict_of_error(error, self._module.__file__)
        if "cuda" in name and not torch.accelerator.is_available():
            return Verdict(verdicts.FAIL, "a test of GPUs that passes without one")
        return Verdict(verdicts.PASS)

    def _prepare(self, name: str, scratch: Path) -> Any:
        """Do the set-up of `TestDistBackend.setUp` and of the start of a process."""
        os.environ["TEMP_DIR"] = str(scratch)
        os.environ["INIT_METHOD"] = self._module.INIT_METHOD = f"file://{scratch}/init"
        os.environ["MASTER_ADDR"] = self._module.MASTER_ADDR
        self._module.Barrier.barrier_id = 0
        case = self._case(name)
        case.rank = self._rank
        case.file_name = str(scratch / "store")
        return case

    def _open_group(self, case: Any, name: str) -> None:
        seconds = self._module.CUSTOM_PG_TIMEOUT.get(name, self._module.default_pg_timeout)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="For MPI backend, world_size")
            dist.init_process_group(
                self.label,
                init_method=case.init_method,
                world_size=self._size,
                rank=self._rank,
                timeout=datetime.timedelta(seconds=seconds),
            )


def make_scratch(scratch: Path) -> None:
    """Create the directories through which PyTorch's tests synchronise."""
    for name in ("barrier", "test_dir"):
        (scratch / name).mkdir(parents=True)


def verdict_of_error(error: Exception, file: str) -> Verdict:
    """Return the verdict of a test that raised, with the line of the test: "False is not true" alone is not enough."""
    text = "".join(traceback.format_exception_only(error))
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file and frame.line]
    return Verdict(verdicts.FAIL, verdicts.in_one_line(f"{text} in `{lines[-1]}`" if lines else text))


def verdict_of_exit(end: SystemExit) -> Verdict:
    """Return the verdict of a test that called `sys.exit`: PyTorch's tests use exit codes to skip."""
    if end.code in _SKIPS:
        return Verdict(verdicts.SKIP, _SKIPS[end.code])
    return Verdict(verdicts.FAIL, f"sys.exit({end.code})")
