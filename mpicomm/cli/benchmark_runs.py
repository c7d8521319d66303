"""Runs the benchmarks of `mpicomm bench`, prints their tables, and writes their files."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mpicomm.bench import startup
from mpicomm.cli import ensure_ranks, launch_plan
from mpicomm.cli.argument_types import check_writable
from mpicomm.cli.console import FAILED, console, failed
from mpicomm.errors import LaunchError, MPINotFoundError
from mpicomm.launch import detect
from mpicomm.launch.request import Request
from mpicomm.reports import benchmarks, drawing, result_files

if TYPE_CHECKING:
    from mpicomm.session import World

_ERRORS = (LaunchError, MPINotFoundError, OSError, ValueError, ImportError)
_OURS, _THEIRS = "mpicomm", "torchrun + Gloo"
_IMPORT = "seconds of `import mpicomm`"
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}  # with GPUs there would be no Gloo for comparison
Values = dict[str, Any]
"""The results of a benchmark, as in its JSON file."""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark, and how its results are shown."""

    command: str
    """The command, for messages."""
    what: str
    """The measured quantity and its unit, for the JSON file."""
    measure: Callable[..., Values]
    tables: Callable[[argparse.Namespace, Values], list[Table]]
    backends: tuple[str, ...] = ()
    """The backends that it compares on the ranks of a job."""


def run_on_ranks(benchmark: Benchmark, arguments: argparse.Namespace) -> int:
    """Measure on the ranks of this job, or run this command in ranks that measure; return the exit status."""
    # 1. start the ranks
    try:
        if detect.guess_rank(os.environ) == 0:  # rank 0, or the process that starts the ranks
            _check_files(arguments)
        ensure_ranks.ensure(arguments.ranks)
    except _ERRORS as error:
        return failed(benchmark.command, error)
    from mpicomm import runtime
    from mpicomm.bench import compared_backends, timing

    with runtime.bootstrap() as world:
        # 2. measure
        bench = timing.on_ranks_of(world, arguments.rounds, device=arguments.device)
        found = {"ranks": world.size, "nodes": world.num_nodes, "device": arguments.device, "rounds": arguments.rounds}
        try:
            names, device = compared_backends.select(arguments.backend, benchmark.backends, arguments.device, world)
            found |= benchmark.measure(arguments, world, names, device, bench)
        except LaunchError as error:  # the same on every rank
            return failed(benchmark.command, error) if world.rank == 0 else FAILED
        # 3. print and write the results
        return _report(benchmark, arguments, found) if world.rank == 0 else 0


def run_startup(arguments: argparse.Namespace) -> int:
    """Measure the startup of jobs, and return the exit status."""
    try:
        _check_files(arguments)
        found = STARTUP.measure(arguments)
    except _ERRORS as error:
        return failed(STARTUP.command, error)
    return _report(STARTUP, arguments, found)


def _check_files(arguments: argparse.Namespace) -> None:
    """Check the files and matplotlib before the measurement."""
    if arguments.plot is not None:
        drawing.new_figure((1.0, 1.0))
    for path in filter(None, (arguments.json, arguments.csv, arguments.plot)):
        check_writable(path)
    if arguments.compare is not None:
        result_files.read_operations(arguments.compare)


def _report(benchmark: Benchmark, arguments: argparse.Namespace, found: Values) -> int:
    """Print the tables, write the files, and return the exit status."""
    try:
        for table in benchmark.tables(arguments, found):
            console().print(table)
        for what, why in found.get("refused", {}).items():
            print(f"{what}: {why}")
        if "inputs" in found:
            print(f"inputs: {found['inputs']}")
        if arguments.json is not None:
            from mpicomm import job_info

            head = job_info.description(benchmark.what, shlex.join(["mpicomm", *sys.argv[1:]]))
            result_files.write(arguments.json, head | found)
        if arguments.csv is not None:
            result_files.write_csv(arguments.csv, found["rows"])
        if arguments.plot is not None:
            drawing.save(benchmarks.draw(found["rows"]), arguments.plot)
    except OSError as error:
        return failed(benchmark.command, error)
    return 0


# -- the benchmarks ----------------------------------------------------------------------------------------------------


def _measure_operations(
    arguments: argparse.Namespace, world: World, names: list[str], device: Any, bench: Any
) -> Values:
    import torch

    from mpicomm.bench import compared_backends, sweep

    backends = compared_backends.make(names, world)
    types = [getattr(torch, name) for name in arguments.dtype]
    cases = sweep.cases(arguments.op, arguments.size, types, device, world)
    progress = ensure_ranks.progress(world.rank, cases)
    found = sweep.measure(
        progress, backends, bench, asynchronous=arguments.starts, rewrites=not arguments.reuses_inputs
    )
    return {
        "inputs": sweep.ZEROS if arguments.reuses_inputs else sweep.REWRITTEN,
        "rows": [dataclasses.asdict(row) for row in found.rows],
        "refused": found.refusals,
    }


def _operation_tables(arguments: argparse.Namespace, found: Values) -> list[Table]:
    before = [] if arguments.compare is None else result_files.read_operations(arguments.compare)
    return benchmarks.operation_tables(found["rows"], before)


OPERATIONS = Benchmark(
    "bench",
    "microseconds of the slowest rank, the mean of the fastest round; bandwidths in GB/s",
    _measure_operations,
    _operation_tables,
    ("mpi", "gloo", "nccl", "mpi4py", "mpi-async", "deepspeed"),
)


def _measure_steps(arguments: argparse.Namespace, world: World, names: list[str], device: Any, bench: Any) -> Values:
    import torch

    from mpicomm.bench import compared_backends, training

    groups = {name: compared_backends.group(name, world) for name in names}
    torch.set_num_threads(1)  # leave a core to communication in the background
    cases = list(itertools.product(arguments.model, arguments.strategy))
    rows = training.measure(ensure_ranks.progress(world.rank, cases), groups, bench, device)
    return {"rows": [dataclasses.asdict(row) for row in rows]}


STEPS = Benchmark(
    "bench ddp",
    "milliseconds of a step of the slowest rank, the mean of the fastest round",
    _measure_steps,
    lambda _, found: [benchmarks.step_table(found["rows"])],
    ("mpi", "gloo", "nccl", "none"),
)


def _measure_decoding(arguments: argparse.Namespace, world: World, names: list[str], device: Any, bench: Any) -> Values:
    import torch

    from mpicomm.bench import compared_backends, decode

    torch.set_num_threads(1)  # of each rank, and of the process that decodes alone
    reducers = {name: compared_backends.reducer(name, world) for name in names}
    models = ensure_ranks.progress(world.rank, arguments.model)
    rows = [row for model in models for row in decode.measure(model, reducers, world, bench, device)]
    return {"tokens": decode.TOKENS, "rows": [dataclasses.asdict(row) for row in rows]}


DECODING = Benchmark(
    "bench decode",
    "tokens per second of the fastest round; the model is split over the ranks, or whole on one of them",
    _measure_decoding,
    lambda _, found: [benchmarks.decode_table(found["rows"])],
    ("mpi", "gloo", "none", "deepspeed"),
)


def _measure_startup(arguments: argparse.Namespace) -> Values:
    environ = {**os.environ, **_WITHOUT_GPUS}
    ways = {
        _OURS: lambda ranks: launch_plan.build(Request(startup.probe("mpicomm"), ranks), environ),
        _THEIRS: lambda ranks: launch_plan.build_torchrun(Request(startup.probe("gloo"), ranks), environ),
    }
    cases = list(itertools.product(arguments.ranks, ways))
    for ranks, way in cases:
        ways[way](ranks)  # report a launch that cannot work before the first start
    seconds = startup.import_seconds(7)
    starts = startup.measure(ensure_ranks.progress(0, cases * arguments.rounds), ways, limit=arguments.limit)
    return {"rounds": arguments.rounds, _IMPORT: round(seconds, 4), "starts": starts}


STARTUP = Benchmark(
    "bench startup",
    "seconds from the command to the end of the first all_reduce; the fastest start",
    _measure_startup,
    lambda _, found: [benchmarks.startup_table(found["starts"], _OURS, found[_IMPORT])],
)
