"""`mpicomm bench`: measures on the ranks of this job, or of one that it starts; prints tables and writes files."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mpicomm import terminal
from mpicomm.cli import launching
from mpicomm.cli.argument_types import among, check_outputs, count, html, png
from mpicomm.cli.console import FAILED, console, failed, print_message
from mpicomm.errors import LaunchError, MPINotFoundError
from mpicomm.launch import detect
from mpicomm.launch.request import Request
from mpicomm.reports import benchmarks, html_report, plots, result_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mpicomm.job.session import World

_OPERATIONS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "sendrecv",
    "pingpong", "barrier", "all_reduce_avg", "reduce_avg", "reduce_scatter_avg",
)  # fmt: skip
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8")
_MODELS, _STRATEGIES = ("small", "middle", "large"), ("ddp", "fsdp")
_DECODERS = ("small", "middle")
_VENDORS = ("nccl", "xccl")  # that of another accelerator is compared without being named
_DEVICE_TYPE = re.compile(r"[a-z]\w*")
_SIZE = re.compile(r"(\d+)(?:(Ki|Mi|Gi)B?)?")
_FACTORS = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_STEP = 4  # factor between successive sizes
_OF_OPERATIONS = """\
Measure operations on tensors with several backends, which run in turn, and with mpi4py alone on the same buffers.

Under mpirun or srun the command measures the ranks of that job, otherwise it starts ranks as `mpicomm run` does. The
latency is that of the slowest rank, the mean of the fastest round; that of pingpong is half the round trip. Sizes and
bandwidths are those of nccl-tests. Each backend's result is checked before and after the timed calls, with known
inputs. Before each timed call the ranks write their inputs again and synchronise; that time does not count."""
_OF_STEPS = """\
Measure training steps with DistributedDataParallel or FSDP2 and several backends, which run in turn: milliseconds on
the slowest rank, split into data loading, computation and communication. The models are two linear layers, with 33 k,
525 k and 8.4 M parameters."""
_OF_DECODING = """\
Decode tokens with a small random Llama-like model in float32, whose layers are split over the ranks (tensor
parallelism): an all_reduce after attention and one after the MLP of each layer. Each backend and a single process with
the whole model run in turn, with one thread per process; their tokens are compared."""
_ERRORS = (LaunchError, MPINotFoundError, OSError, ValueError, ImportError)

T = TypeVar("T")
Values = dict[str, Any]
"""The results of a benchmark, as in its JSON file."""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark, and how its results are shown."""

    command: str
    """The command, for messages."""
    quantity: str
    """The measured quantity and its unit, for the JSON file."""
    measure: Callable[..., Values]
    backends: tuple[str, ...]
    """The backends that it can compare."""
    draw: Callable[[result_files.Rows], Figure] | None = None
    """Draws the curves of the rows, if it has any."""


# -- the benchmarks ----------------------------------------------------------------------------------------------------


def _measure_operations(
    arguments: argparse.Namespace, world: World, names: list[str], device: Any, bench: Any
) -> Values:
    import torch

    from mpicomm.bench import compared_backends, sweep

    backends = compared_backends.make(names, world)
    types = [getattr(torch, name) for name in arguments.dtype]
    cases = sweep.cases(arguments.op, arguments.size, types, device, world)
    measured = sweep.measure(
        _progress(world.rank, cases, str),
        backends,
        bench,
        asynchronous=arguments.starts,
        rewrites=not arguments.reuses_inputs,
    )
    return {
        "inputs": sweep.ZEROS if arguments.reuses_inputs else sweep.REWRITTEN,
        "rows": [dataclasses.asdict(row) for row in measured.rows],
        "refused": measured.refusals,
    }


_BENCH = Benchmark(
    "bench",
    "microseconds of the slowest rank, the mean of the fastest round; bandwidths in GB/s",
    _measure_operations,
    ("mpi", "gloo", *_VENDORS, "mpi4py", "mpi-async"),
    benchmarks.draw,
)


def _measure_steps(arguments: argparse.Namespace, world: World, names: list[str], device: Any, bench: Any) -> Values:
    import torch

    from mpicomm.bench import compared_backends, training

    groups = {name: compared_backends.group(name, world) for name in names}
    torch.set_num_threads(1)  # leave a core to communication in the background
    cases = list(itertools.product(arguments.model, arguments.strategy))
    rows = training.measure(_progress(world.rank, cases, ", ".join), groups, bench, device)
    return {"rows": [dataclasses.asdict(row) for row in rows]}


_BENCH_DDP = Benchmark(
    "bench ddp",
    "milliseconds of a step of the slowest rank, the mean of the fastest round",
    _measure_steps,
    ("mpi", "gloo", *_VENDORS, "none"),
)


def _measure_decoding(arguments: argparse.Namespace, world: World, names: list[str], device: Any, bench: Any) -> Values:
    import torch
    import torch.distributed as dist

    from mpicomm.bench import compared_backends, decode

    torch.set_num_threads(1)  # of each rank, and of the process that decodes alone
    groups = {name: compared_backends.group(name, world) for name in names}
    reducers = {name: functools.partial(dist.all_reduce, group=group) for name, group in groups.items()}
    models = _progress(world.rank, arguments.model, str)
    rows = [row for model in models for row in decode.measure(model, reducers, world, bench, device)]
    return {"tokens": decode.TOKENS, "rows": [dataclasses.asdict(row) for row in rows]}


_BENCH_DECODE = Benchmark(
    "bench decode",
    "tokens per second of the fastest round; the model is split over the ranks, or whole on one of them",
    _measure_decoding,
    ("mpi", "gloo", *_VENDORS, "none"),
)


# -- the arguments -----------------------------------------------------------------------------------------------------


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="measure operations, training steps and decoding",
        description=_OF_OPERATIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_list(parser, "--op", "operation", _OPERATIONS, ["all_reduce"])
    _add_ranks(parser, _BENCH, "; mpi-async (each call is asynchronous, then awaited) only if named")
    parser.add_argument(
        "--size", metavar="A:B", type=_sizes, default=_sizes("4:64Mi"),
        help=f"bytes, from A to B in steps of factor {_STEP}, or a list: 4,1Ki,64Mi (default: 4:64Mi)",
    )  # fmt: skip
    _add_list(parser, "--dtype", "dtype", _DTYPES, ["float32"])
    parser.add_argument("--async", dest="starts", action="store_true", help="run asynchronously; measure the overlap")
    parser.add_argument(
        "--reuse-inputs", dest="reuses_inputs", action="store_true",
        help="run the timed calls in a row, on zeros that are not written again between the calls",
    )  # fmt: skip
    parser.add_argument("--csv", metavar="F", type=Path, help="write the results to this CSV file")
    parser.add_argument("--plot", metavar="F.png", type=png, help="plot the results to this file (needs matplotlib)")
    parser.add_argument("--compare", metavar="OLD.json", type=Path, help="compare with the JSON file of another run")
    others = parser.add_subparsers(title="other measurements", metavar="ddp|decode")
    steps = others.add_parser("ddp", help="training steps", description=_OF_STEPS)
    _add_list(steps, "--model", "model", _MODELS, list(_MODELS))
    _add_list(steps, "--strategy", "strategy", _STRATEGIES, ["ddp"])
    _add_ranks(steps, _BENCH_DDP, "; none is a no-op, a lower bound")
    decoding = others.add_parser("decode", help="tensor-parallel inference", description=_OF_DECODING)
    _add_list(decoding, "--model", "model", _DECODERS, list(_DECODERS))
    _add_ranks(decoding, _BENCH_DECODE, "; none is a no-op, an upper bound")


def _add_ranks(parser: argparse.ArgumentParser, benchmark: Benchmark, note: str = "") -> None:
    """Add the options of a benchmark that compares backends on several ranks."""
    _add_list(parser, "--backend", "backend", benchmark.backends, None, note)
    parser.add_argument(
        "--device", metavar="TYPE", type=_device_type, default="cpu",
        help="type of the tensors' device: cpu, cuda, xpu or another accelerator of torch (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("-n", dest="ranks", metavar="N", type=count, help="ranks to start, outside mpirun and srun")
    parser.add_argument(
        "--rounds", metavar="R", type=count, default=7,
        help="rounds, in each of which the backends run in turn (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    parser.add_argument("--html", metavar="F.html", type=html, help="write the tables and curves to this page")
    # Only `mpicomm bench` itself has options for the last three.
    parser.set_defaults(run=functools.partial(run, benchmark), csv=None, plot=None, compare=None)


def _add_list(
    parser: argparse.ArgumentParser,
    option: str,
    noun: str,
    known: Sequence[str],
    default: list[str] | None,
    note: str = "",
) -> None:
    """Add an option whose argument is a list of known words."""
    shown = "all available" if default is None else ",".join(default)
    every = "" if default is None else "all, or "
    parser.add_argument(
        option, metavar=f"{noun.upper()},...", type=among(noun, known), default=default,
        help=f"{every}a list of {', '.join(known)}{note} (default: {shown})",
    )  # fmt: skip


def _device_type(text: str) -> str:
    if _DEVICE_TYPE.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(
            f"expected a type of device without an index, such as cpu, cuda or xpu, got {text!r}; bootstrap() assigns "
            f"each rank its device"
        )
    return text


def _sizes(text: str) -> list[int]:
    if ":" not in text:
        return [_size(part) for part in text.split(",")]
    first, _, last = text.partition(":")
    size, largest = _size(first), _size(last)
    if size > largest:
        raise argparse.ArgumentTypeError(f"{text}: the first size is larger than the last; put the smaller size first")
    sizes = []
    while size <= largest:
        sizes.append(size)
        size *= _STEP
    return sizes


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of bytes, for example 4, 1Ki, 64Mi or 1Gi")
    return int(match[1]) * _FACTORS[match[2]]


# -- the run -----------------------------------------------------------------------------------------------------------


def run(benchmark: Benchmark, arguments: argparse.Namespace) -> int:
    """Measure on the ranks of this job, or run this command in ranks that measure; return the exit status."""
    # 1. start the ranks
    before: Values = {}
    try:
        if detect.guess_rank(os.environ) == 0:  # rank 0, or the process that starts the ranks
            before = _check_files(benchmark, arguments)
        if detect.detect(os.environ).is_plain:
            program = (sys.executable, "-m", "mpicomm", *sys.argv[1:])
            start = launching.build(Request(program, arguments.ranks), os.environ)
            return launching.execute(start, "bench").status
    except _ERRORS as error:
        return failed(benchmark.command, error)
    from mpicomm.bench import compared_backends, processor_use, timing
    from mpicomm.job.bootstrap import bootstrap

    with bootstrap() as world:
        # 2. measure
        bench = timing.on_ranks_of(world, arguments.rounds, device=arguments.device)
        head = {"ranks": world.size, "nodes": world.num_nodes, "device": arguments.device, "rounds": arguments.rounds}
        try:
            names, device = compared_backends.select(arguments.backend, benchmark.backends, arguments.device, world)
            times = processor_use.times_now()
            results = head | benchmark.measure(arguments, world, names, device, bench)
            hosts = processor_use.since(times, bench, world)
        except LaunchError as error:  # the same on every rank
            return failed(benchmark.command, error) if world.rank == 0 else FAILED
        # 3. print and write the results
        if world.rank > 0:
            return 0
        warnings = [host.warning for host in hosts if host.warning is not None]
        if before:
            warnings += benchmarks.differences(results, before, str(arguments.compare))
        results |= {"hosts": [dataclasses.asdict(host) for host in hosts], "warnings": warnings}
        status = _report(benchmark, arguments, results, before.get("rows", []))
        for warning in warnings:
            print_message(benchmark.command, f"warning: {warning}")
        return status


def _check_files(benchmark: Benchmark, arguments: argparse.Namespace) -> Values:
    """Check the files and matplotlib before the measurement; return the results to compare with, empty without any."""
    if benchmark.draw is not None and (arguments.plot or arguments.html) is not None:
        plots.new_figure((1.0, 1.0))
    if arguments.plot is not None and set(arguments.op) == {"barrier"}:
        raise ValueError(
            "--plot draws curves over sizes, and barrier has no size.\nAdd an operation, or remove --plot."
        )
    names = ("json", "csv", "plot", "html")
    outputs = {f"--{name}": getattr(arguments, name) for name in names}
    check_outputs(outputs, [] if arguments.compare is None else [arguments.compare])
    return {} if arguments.compare is None else result_files.read_operations(arguments.compare)


def _report(benchmark: Benchmark, arguments: argparse.Namespace, results: Values, before: result_files.Rows) -> int:
    """Print the tables, write the files, and return the exit status."""
    tables, notes, rows = benchmarks.tables(results, before), benchmarks.notes(results), results["rows"]
    try:
        for table in tables:
            console().print(table)
        for note in notes:
            print(note)
        if arguments.json is not None:
            from mpicomm import job_info

            head = job_info.description(benchmark.quantity, shlex.join(["mpicomm", *sys.argv[1:]]))
            result_files.write(arguments.json, head | results)
        if arguments.csv is not None:
            result_files.write_csv(arguments.csv, rows)
        if arguments.plot is not None and benchmark.draw is not None:
            plots.save(benchmark.draw(rows), arguments.plot)
        if arguments.html is not None:
            title = f"mpicomm {benchmark.command} ({results['ranks']} ranks, {results['device']})"
            figure = benchmark.draw(rows) if benchmark.draw is not None and benchmarks.has_curves(rows) else None
            section = html_report.Section(title, tables, notes, results["warnings"], figure)
            arguments.html.write_text(html_report.page(title, [section]), encoding="utf-8")
    except OSError as error:
        return failed(benchmark.command, error)
    return 0


def _progress(rank: int, cases: Sequence[T], describe: Callable[[T], str]) -> Iterator[T]:
    """Yield the cases, and show a progress bar on rank 0's terminal.

    The bar is drawn between the cases only: a thread that draws it would interrupt the measured calls.
    """
    is_shown = rank == 0 and terminal.columns(sys.stderr) is not None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(sys.stderr), auto_refresh=False, disable=not is_shown) as bar:
        task = bar.add_task("", total=len(cases))
        for case in cases:
            bar.update(task, description=describe(case), refresh=True)
            yield case
            bar.update(task, advance=1, refresh=True)
