"""A test file of PyTorch's repository, and how a rank runs one of its tests.

PyTorch starts processes or threads for a test, and runs its body in each. Here, every rank of the job runs the body.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import traceback
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
)

from tests.conformance import on_cpu, upstream, verdicts
from tests.conformance.group_creation import GroupCreation
from tests.conformance.verdicts import Verdict

_NOT_RUN = "its processes run several tests, which this program does not support"
_NO_GPU = "returns at once if no accelerator is available"


class UpstreamFile:
    """The tests of a file, in the order of execution on all ranks."""

    def __init__(self, path: Path, rank: int = 0, creation: GroupCreation | None = None) -> None:
        """Import the file; `on_cpu.lift_requirements` has been called."""
        self.label = path.name
        self._rank = rank
        self._creation = creation
        self._module = _load(path)
        cases = _cases_of(self._module)
        on_cpu.move(self._module, cases)
        self._tests = {
            f"{case.__name__}.{name}": (case, name)
            for case in cases
            for name in dir(case)
            if name.startswith("test_") and callable(getattr(case, name))
        }

    def names(self) -> list[str]:
        return sorted(self._tests)

    def ranks_of(self, name: str) -> int | None:
        """Return the number of ranks that a test needs; None if only its run shows it."""
        case, method = self._tests[name]
        if issubclass(case, (MultiProcessTestCase, MultiThreadedTestCase)):
            return int(case(method).world_size)
        return None

    def skip(self, name: str) -> Verdict | None:
        case, method = self._tests[name]
        for skipped in (case, getattr(case, method)):
            if getattr(skipped, "__unittest_skip__", False):
                return Verdict(verdicts.SKIP, verdicts.in_one_line(skipped.__unittest_skip_why__))
        if issubclass(case, MultiProcContinuousTest):
            return Verdict(verdicts.SKIP, _NOT_RUN)
        return Verdict(verdicts.SKIP, _NO_GPU) if on_cpu.returns_at_once(getattr(case, method)) else None

    def run(self, name: str, scratch: Path, check: Callable[[Any], None]) -> Verdict:
        assert self._creation is not None
        self._creation.start_test(scratch, check)
        try:
            self._execute(*self._tests[name], scratch)
        except unittest.SkipTest as skip:
            return Verdict(verdicts.SKIP, verdicts.in_one_line(str(skip)))
        except SystemExit as end:
            return upstream.verdict_of_exit(end)
        except Exception as error:  # noqa: BLE001  any exception of a test is its verdict
            traceback.print_exc()
            return upstream.verdict_of_error(error, str(self._module.__file__))
        return Verdict(verdicts.PASS)

    def _execute(self, case: type[Any], method: str, scratch: Path) -> None:
        if issubclass(case, MultiProcessTestCase):
            os.environ["WORLD_SIZE"] = str(case(method).world_size)
            case._run(self._rank, method, str(scratch / "init"), None)
        elif issubclass(case, MultiThreadedTestCase):
            _run_as_thread(case(method), method, self._rank)
        else:
            case(method).debug()


def _load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    MultiProcessTestCase.run_test = _run_as_process
    spec.loader.exec_module(module)
    return module


def _cases_of(module: types.ModuleType) -> list[type[unittest.TestCase]]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__
    ]


def _run_as_process(case: Any, name: str, _pipe: Any) -> None:
    """Do what `MultiProcessTestCase.run_test` does in a process, but raise the errors of the test."""
    common_utils.set_rng_seed()
    getattr(case, name)()
    if case.destroy_pg_upon_exit and dist.is_initialized():
        dist.destroy_process_group()


def _run_as_thread(case: Any, name: str, rank: int) -> None:
    """Do what `MultiThreadedTestCase` does in a thread, but raise the errors of the test."""
    case.rank = rank
    if hasattr(case, "_tls"):
        case._tls = threading.local()
        case._tls.precision, case._tls.rel_tol = common_utils.TestCase._precision, common_utils.TestCase._rel_tol
    dist.init_process_group("threaded", rank=rank, world_size=case.world_size)
    case.perThreadSetUp()
    try:
        getattr(case, name)()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        case.perThreadTearDown()
