"""The ranks' program: `mpirun -n 4 python -m tests.conformance.ranks --journal FILE --scratch DIR mpicomm mpi gloo`.

With `--plan`, a JSON file with the names of tests by path of a test file of PyTorch, they run these tests.
The ranks run every test in the same order, in a new default group, and agree on its verdict over MPI. Rank 0 writes
each test's start and verdict into the journal; tests that are already in the journal are skipped. A test in which a
rank fails while others wait, or that exceeds its time limit, ends the job: its name is the last in the journal.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import mpicomm
from mpicomm.backend import registration
from tests.conformance import routing, sample, upstream, verdicts
from tests.conformance.journal import Journal
from tests.conformance.verdicts import Verdict

if TYPE_CHECKING:
    from tests.conformance.on_accelerator import SharedDevices
    from tests.conformance.upstream_file import UpstreamFile

_ON_CPU = Verdict(verdicts.SKIP, "uses no device")


class Ranks:
    """Runs the tests on all ranks of the job."""

    def __init__(
        self,
        comm: Any,
        journal: Journal,
        scratch: Path,
        devices: SharedDevices | None = None,
        *,
        is_ours: bool,
        limit: float,
        total: float = math.inf,
    ) -> None:
        self._comm = comm
        self._journal = journal
        self._scratch = scratch
        self._devices = devices
        self._is_ours = is_ours
        self._limit = limit
        self._deadline = time.monotonic() + total

    def run(self, suite: upstream.Suite | UpstreamFile, is_chosen: Callable[[str], bool]) -> None:
        """Run the selected tests that are not in the journal yet, on all ranks."""
        done = self._comm.bcast(self._journal.names(suite.label))
        for name in suite.names():
            if name not in done and is_chosen(name) and self._has_time():
                self._run_one(suite, name)

    def _has_time(self) -> bool:
        return self._comm.bcast(time.monotonic() < self._deadline)

    def _run_one(self, suite: upstream.Suite | UpstreamFile, name: str) -> None:
        if self._comm.rank == 0:
            self._journal.start(suite.label, name)
        verdict = suite.skip(name) or self._run_test(suite, name)
        if self._comm.rank == 0:
            self._journal.end(suite.label, name, verdict)

    def _run_test(self, suite: upstream.Suite | UpstreamFile, name: str) -> Verdict:
        """Run a test, and return the verdict of all ranks."""
        scratch = self._new_scratch()
        faulthandler.dump_traceback_later(self._limit, exit=True)
        try:
            with _as_it_was():
                check = functools.partial(routing.check_engine, is_ours=self._is_ours)
                with contextlib.nullcontext() if self._devices is None else self._devices.in_test():
                    own = suite.run(name, scratch, check)
                verdict = self._agree(suite, name, own)
                end = self._agree(suite, name, self._end_test())
        finally:
            faulthandler.cancel_dump_traceback_later()
        if end.outcome == verdicts.FAIL and verdict.outcome != verdicts.FAIL:
            return end
        is_on_device = self._devices is None or self._comm.allreduce(self._devices.are_used)
        return _ON_CPU if verdict.outcome == verdicts.PASS and not is_on_device else verdict

    def _end_test(self) -> Verdict:
        """Wait for the devices, and destroy the groups of a test; an error there fails the test."""
        try:
            if self._devices is not None:
                self._devices.synchronize()
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:  # noqa: BLE001  any exception is the verdict
            return Verdict(verdicts.FAIL, verdicts.in_one_line(f"at the end of the test: {error!r}"))
        return Verdict(verdicts.PASS)

    def _agree(self, suite: upstream.Suite | UpstreamFile, name: str, own: Verdict) -> Verdict:
        return self._journal.agree(self._comm, suite.label, name, own, self._limit)

    def _new_scratch(self) -> Path:
        scratch = None
        if self._comm.rank == 0:
            scratch = Path(tempfile.mkdtemp(dir=self._scratch))
            upstream.make_scratch(scratch)
        return self._comm.bcast(scratch)


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Restore the process after a test: PyTorch runs each test in a new process."""
    environ, hook = dict(os.environ), sys.excepthook
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        dist.set_debug_level_from_env()
        sys.excepthook = hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("labels", nargs="*")
    parser.add_argument("--plan", type=Path, help="run these tests of PyTorch's test files")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="a directory that all ranks can access")
    parser.add_argument("--of-torch", action="store_true", help="run torch's own backend, for comparison")
    parser.add_argument("--limit", type=float, default=60, help="time limit of a test in seconds")
    parser.add_argument("--total", type=float, default=math.inf, help="seconds after which no test starts")
    parser.add_argument("--pattern", default="", help="run the tests whose names contain this text")
    parser.add_argument("--sample", action="store_true", help="run only the tests of sample.py")
    parser.add_argument("--device", choices=["cpu", "accelerator"], default="cpu", help="the device of the tensors")
    args = parser.parse_args()
    devices = None
    if args.device == "accelerator":
        from tests.conformance import on_accelerator

        devices = on_accelerator.install()
    world = mpicomm.bootstrap(None)
    assert world.comm is not None
    limits = {"limit": args.limit, "total": args.total}
    ranks = Ranks(world.comm, Journal(args.journal), args.scratch, devices, is_ours=not args.of_torch, **limits)
    if args.plan:
        from tests.conformance import on_cpu  # these need a newer torch than the other tests
        from tests.conformance.group_creation import GroupCreation
        from tests.conformance.upstream_file import UpstreamFile

        on_cpu.lift_requirements()
        creation = GroupCreation("gloo" if args.of_torch else registration.NAME, world.rank, world.size)
        creation.install()
        for path, names in json.loads(args.plan.read_text()).items():
            ranks.run(UpstreamFile(Path(path), world.rank, creation), names.__contains__)
    elif not args.of_torch:
        routing.route(routing.BUILT_IN if devices is None else on_accelerator.LABELS)
    for label in args.labels:
        suite = upstream.Suite(label, world.rank, world.size, devices)
        ranks.run(suite, lambda name: args.pattern in name and (not args.sample or name in sample.NAMES))
    if world.rank == 0:
        Journal(args.journal).finish()


if __name__ == "__main__":
    main()
