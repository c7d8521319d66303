"""`mpicomm bench ddp`: measures training steps with several backends in turn."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from mpicomm.cli import ensure_ranks
from mpicomm.cli.argument_types import among, check_writable
from mpicomm.cli.console import FAILED, console, failed
from mpicomm.errors import LaunchError, MPINotFoundError

if TYPE_CHECKING:
    import torch

    from mpicomm.runtime import World

_MODELS, _STRATEGIES, _BACKENDS = ("small", "middle", "large"), ("ddp", "fsdp"), ("mpi", "gloo", "nccl", "none")


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = kinds.add_parser(
        "ddp",
        help="training steps",
        description="Measure training steps with DistributedDataParallel or FSDP2 and several backends, which run in "
        "turn: milliseconds on the slowest rank, split into data loading, computation and communication. The models "
        "are two linear layers, with 33 k, 525 k and 8.4 M parameters.",
    )
    parser.add_argument("--model", metavar="M,...", type=among("model", _MODELS), default=list(_MODELS),
        help=f"a list of {', '.join(_MODELS)} (default: all)")  # fmt: skip
    parser.add_argument("--strategy", metavar="S,...", type=among("strategy", _STRATEGIES), default=["ddp"],
        help=f"a list of {', '.join(_STRATEGIES)} (default: ddp)")  # fmt: skip
    parser.add_argument("--backend", metavar="B,...", type=among("backend", _BACKENDS),
        help=f"a list of {', '.join(_BACKENDS)}; none is a no-op, a lower bound (default: all available)")  # fmt: skip
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the models (default: %(default)s)"
    )
    ensure_ranks.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or exec the launcher of ranks that measure; return the exit status."""
    try:
        if arguments.json is not None and ensure_ranks.writes():
            check_writable(arguments.json)
        ensure_ranks.ensure(arguments.ranks)
    except (LaunchError, MPINotFoundError, OSError) as error:
        return failed("bench ddp", error)
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    import torch

    from mpicomm import runtime
    from mpicomm.bench import compared_backends, machine, training

    with runtime.bootstrap() as world:
        try:
            device = compared_backends.device(arguments.device, world)
            groups = compared_backends.groups(arguments.backend or _all(world, device), world)
        except ValueError as error:
            return failed("bench ddp", error) if world.rank == 0 else FAILED
        torch.set_num_threads(1)  # leave a core to communication in the background
        with ensure_ranks.progress(world, len(arguments.model) * len(arguments.strategy)) as advance:
            bench = ensure_ranks.timing(arguments.rounds, arguments.device)
            found = training.measure(arguments.model, arguments.strategy, groups, bench, device, advance)
        if world.rank == 0:
            rows = [dataclasses.asdict(row) for row in found]
            whole = machine.described("milliseconds of a step of the slowest rank, the mean of the fastest round")
            whole |= {"ranks": world.size, "nodes": world.num_nodes, "device": arguments.device, "rows": rows}
            console().print(_table(rows))
            if arguments.json is not None:
                machine.write(whole, arguments.json)
    return 0


def _all(world: World, device: torch.device) -> list[str]:
    from mpicomm.bench import compared_backends

    known = compared_backends.known(world, device)
    return [*known, compared_backends.NOTHING] if compared_backends.OURS in known else known


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    found = Table(title="milliseconds per step", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("model", "params", "strategy", "backend"):
        found.add_column(title)
    for title in ("step", "median", "data", "compute", "comm", "/ mpi"):
        found.add_column(title, justify="right")
    ours = {(row["model"], row["strategy"]): row["ms"] for row in rows if row["backend"] == "mpi"}
    for row in rows:
        base = ours.get((row["model"], row["strategy"]))
        figures = [f"{row[name]:.3f}" for name in ("ms", "ms_median", "data_ms", "compute_ms", "communication_ms")]
        ratio = "-" if base is None else f"{row['ms'] / base:.2f}"
        found.add_row(row["model"], f"{row['parameters']:,}", row["strategy"], row["backend"], *figures, ratio)
    return found
