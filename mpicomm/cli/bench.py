"""`mpicomm bench`: measures operations with several backends in turn, and with mpi4py alone on the same buffers."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicomm.cli import bench_ddp, bench_ratios, bench_startup, ensure_ranks
from mpicomm.cli.argument_types import among, check_writable, png
from mpicomm.cli.console import FAILED, console, failed
from mpicomm.errors import LaunchError, MPINotFoundError
from mpicomm.reports import benchmark_plots, benchmarks

if TYPE_CHECKING:
    from mpicomm.bench.sweep import Found
    from mpicomm.runtime import World

_OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_BACKENDS = ("mpi", "gloo", "nccl", "mpi4py")
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8")
_SIZE = re.compile(r"(\d+)(?:(Ki|Mi|Gi)B?)?")
_FACTORS = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_STEP = 4  # factor between successive sizes
_DESCRIPTION = """\
Measure operations on tensors with several backends, which run in turn, and with mpi4py alone on the same buffers.

Under mpirun or srun the command measures the ranks of that job, otherwise it starts ranks as `mpicomm run` does. The
latency is that of the slowest rank, the mean of the fastest round. Sizes and bandwidths are those of nccl-tests."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="measure operations, training steps and startup",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--op", metavar="OP,...", type=among("operation", (*_OPERATIONS, "sendrecv")), default=["all_reduce"],
        help=f"all, or a list of {', '.join(_OPERATIONS)} and sendrecv (default: all_reduce)",
    )  # fmt: skip
    parser.add_argument(
        "--backend",
        metavar="B,...",
        type=among("backend", _BACKENDS),
        help=f"a list of {', '.join(_BACKENDS)} (default: all available)",
    )
    parser.add_argument(
        "--size", metavar="A:B", type=_sizes, default=_sizes("4:64Mi"),
        help=f"bytes, from A to B in steps of factor {_STEP}, or a list: 4,1Ki,64Mi (default: 4:64Mi)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", metavar="D,...", type=among("dtype", _DTYPES), default=["float32"],
        help=f"a list of {', '.join(_DTYPES)} (default: float32)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the tensors (default: %(default)s)"
    )
    parser.add_argument("--async", dest="starts", action="store_true", help="run asynchronously; measure the overlap")
    ensure_ranks.add_options(parser)
    parser.add_argument("--csv", metavar="F", type=Path, help="write the results to this CSV file")
    parser.add_argument("--plot", metavar="F.png", type=png, help="plot the results to this file (needs matplotlib)")
    parser.add_argument("--compare", metavar="OLD.json", type=Path, help="compare with the JSON file of another run")
    parser.set_defaults(run=run)
    kinds = parser.add_subparsers(title="other measurements", metavar="ddp|ratios|startup")
    for kind in (bench_ddp, bench_ratios, bench_startup):
        kind.add_parser(kinds)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or exec the launcher of ranks that measure; return the exit status."""
    try:
        before = _prepare(arguments) if ensure_ranks.writes() else []
        ensure_ranks.ensure(arguments.ranks)
    except (LaunchError, MPINotFoundError, OSError, ValueError, ImportError) as error:
        return failed("bench", error)
    return _measure(arguments, before)


def _prepare(arguments: argparse.Namespace) -> Sequence[Mapping[str, Any]]:
    """Check the output files and matplotlib before the measurement, and return the rows to compare with."""
    if arguments.plot is not None:
        benchmark_plots.check()
    for path in filter(None, (arguments.json, arguments.csv, arguments.plot)):
        check_writable(path)
    return _rows_of(arguments.compare) if arguments.compare is not None else []


def _measure(arguments: argparse.Namespace, before: Sequence[Mapping[str, Any]]) -> int:
    import torch

    from mpicomm import runtime
    from mpicomm.bench import compared_backends, sweep

    with runtime.bootstrap() as world:
        try:
            # 1. create the backends, on all ranks
            device = compared_backends.device(arguments.device, world)
            compared = compared_backends.make(
                arguments.backend or compared_backends.known(world, device, has_raw=True), world
            )
        except ValueError as error:
            return failed("bench", error) if world.rank == 0 else FAILED
        # 2. measure
        plan = sweep.Sweep(
            operations=arguments.op,
            sizes=arguments.size,
            dtypes=[getattr(torch, name) for name in arguments.dtype],
            device=device,
            asynchronous=arguments.starts,
        )
        bench = ensure_ranks.timing(arguments.rounds, arguments.device)
        with ensure_ranks.progress(world, sweep.number_of_cases(plan, world.size)) as advance:
            found = sweep.measure(plan, compared, bench, world.rank, world.size, advance)
        # 3. show and write the results
        if world.rank == 0:
            return _show(arguments, found, before, world)
    return 0


def _show(arguments: argparse.Namespace, found: Found, before: Sequence[Mapping[str, Any]], world: World) -> int:
    from mpicomm.bench import machine

    rows = [dataclasses.asdict(row) for row in found.rows]
    whole = machine.described("microseconds of the slowest rank, the mean of the fastest round; bandwidths in GB/s")
    whole |= {"ranks": world.size, "nodes": world.num_nodes, "device": arguments.device, "rounds": arguments.rounds}
    whole |= {"rows": rows, "refused": found.refusals}
    for table in benchmarks.tables(rows, before):
        console().print(table)
    for what, why in found.refusals.items():
        print(f"{what}: {why}")
    try:
        if arguments.json is not None:
            machine.write(whole, arguments.json)
        if arguments.csv is not None:
            _write_csv(rows, arguments.csv)
        if arguments.plot is not None:
            benchmark_plots.save(rows, arguments.plot)
    except OSError as error:
        return failed("bench", error)
    return 0


def _write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _rows_of(path: Path) -> list[Mapping[str, Any]]:
    """Return the rows of a file that `--json` wrote.

    Raises:
        ValueError: If the file has another format.
    """
    try:
        rows: list[Mapping[str, Any]] = json.loads(path.read_text())["rows"]
        for row in rows:
            benchmarks.key_of(row)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by `mpicomm bench --json`: {error!r}") from error
    return rows


def _sizes(text: str) -> list[int]:
    if ":" not in text:
        return [_size(part) for part in text.split(",")]
    first, _, last = text.partition(":")
    size, largest = _size(first), _size(last)
    if size > largest:
        raise argparse.ArgumentTypeError(f"{text}: the first size is larger than the last; put the smaller size first")
    found = []
    while size <= largest:
        found.append(size)
        size *= _STEP
    return found


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of bytes, for example 4, 1Ki, 64Mi or 1Gi")
    return int(match[1]) * _FACTORS[match[2]]
