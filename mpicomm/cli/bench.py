"""The arguments of `mpicomm bench` and of its subcommands."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Sequence
from pathlib import Path

from mpicomm.cli import benchmark_runs
from mpicomm.cli.argument_types import among, count, counts, png
from mpicomm.cli.benchmark_runs import Benchmark

_OPERATIONS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "sendrecv",
    "pingpong", "barrier", "all_reduce_avg", "reduce_avg", "reduce_scatter_avg",
)  # fmt: skip
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8")
_MODELS, _STRATEGIES = ("small", "middle", "large"), ("ddp", "fsdp")
_DECODERS = ("small", "middle")
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
_OF_STARTUP = """\
Start ranks repeatedly, and measure the time from the command to the end of the first all_reduce, step by step, and that
of torchrun with Gloo for comparison. In a Slurm allocation all of its nodes are used."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="measure operations, training steps and startup",
        description=_OF_OPERATIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_list(parser, "--op", "operation", _OPERATIONS, ["all_reduce"])
    _add_ranks(parser, benchmark_runs.OPERATIONS, "; mpi-async (each call is asynchronous, then awaited) "
        "and deepspeed (its shared-memory all_reduce, compiled on first use) only if named")  # fmt: skip
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
    others = parser.add_subparsers(title="other measurements", metavar="ddp|decode|startup")
    _add_steps(others)
    _add_decoding(others)
    _add_startup(others)


def _add_steps(others: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = others.add_parser("ddp", help="training steps", description=_OF_STEPS)
    _add_list(parser, "--model", "model", _MODELS, list(_MODELS))
    _add_list(parser, "--strategy", "strategy", _STRATEGIES, ["ddp"])
    _add_ranks(parser, benchmark_runs.STEPS, "; none is a no-op, a lower bound")
    parser.set_defaults(csv=None, plot=None, compare=None)


def _add_decoding(others: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = others.add_parser("decode", help="tensor-parallel inference", description=_OF_DECODING)
    _add_list(parser, "--model", "model", _DECODERS, list(_DECODERS))
    _add_ranks(parser, benchmark_runs.DECODING, "; none is a no-op, an upper bound; deepspeed only if named")
    parser.set_defaults(csv=None, plot=None, compare=None)


def _add_startup(others: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "time from the command to the end of the first all_reduce"
    parser = others.add_parser("startup", help=what, description=_OF_STARTUP)
    parser.add_argument(
        "--ranks", metavar="1,2,4", type=counts, default=(1, 2, 4), help="numbers of ranks (default: 1,2,4)"
    )
    _add_rounds_and_json(parser, 3, "starts of each, in turn")
    parser.add_argument(
        "--limit", metavar="S", type=count, default=300, help="seconds until a timeout (default: %(default)s)"
    )
    parser.set_defaults(run=benchmark_runs.run_startup, csv=None, plot=None, compare=None)


def _add_ranks(parser: argparse.ArgumentParser, benchmark: Benchmark, note: str = "") -> None:
    """Add the options of a benchmark that compares backends on several ranks."""
    _add_list(parser, "--backend", "backend", benchmark.backends, None, note)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the tensors (default: %(default)s)"
    )
    parser.add_argument("-n", dest="ranks", metavar="N", type=count, help="ranks to start, outside mpirun and srun")
    _add_rounds_and_json(parser, 7, "rounds, in each of which the backends run in turn")
    parser.set_defaults(run=functools.partial(benchmark_runs.run_on_ranks, benchmark))


def _add_rounds_and_json(parser: argparse.ArgumentParser, default: int, what: str) -> None:
    parser.add_argument("--rounds", metavar="R", type=count, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")


def _add_list(
    parser: argparse.ArgumentParser,
    option: str,
    what: str,
    known: Sequence[str],
    default: list[str] | None,
    note: str = "",
) -> None:
    """Add an option whose argument is a list of known words."""
    shown = "all available" if default is None else ",".join(default)
    every = "" if default is None else "all, or "
    parser.add_argument(
        option, metavar=f"{what.upper()},...", type=among(what, known), default=default,
        help=f"{every}a list of {', '.join(known)}{note} (default: {shown})",
    )  # fmt: skip


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
