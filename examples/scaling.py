"""Strong and weak scaling: the duration of a training step on 1, 2, 4 and all ranks, with PyTorch's own DDP.

Strong scaling divides a batch of fixed size: ideally n ranks take 1 / n of the time. Weak scaling gives each rank a
batch of fixed size: ideally n ranks process n times as many samples in the same time. For both

    speed-up = samples per second of n ranks / samples per second of one        efficiency = speed-up / n

Ranks that share cores cannot scale: they do the same work on the same cores, and communicate in addition. Below, four
ranks share two busy cores, so the figures show the cost of sharing, not how DDP scales. To measure that, give every
rank its own cores or its own GPU, and use the same number of threads in all measurements. `--plot F.png` plots the
figures.

    $ mpirun -n 4 python -m mpicomm.examples.scaling
    strong: 128 samples in all
          ranks     step ms   samples/s    speed-up  efficiency
              1        49.8      2570.5        1.00        1.00
              2        59.0      2170.1        0.84        0.42
              4       119.8      1068.5        0.42        0.10
    weak: 128 samples per rank
          ranks     step ms   samples/s    speed-up  efficiency
              1        43.8      2924.8        1.00        1.00
              2        94.7      2704.2        0.92        0.46
              4       222.9      2297.1        0.79        0.20
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from mpicomm.examples.ddp import share_cores

WIDTH, LAYERS = 768, 4
UNCOUNTED, COUNTED = 2, 7  # rounds; DDP rebuilds its gradient buckets after the first step
KINDS = ("strong", "weak")


class Point(NamedTuple):
    """Figures for one number of ranks."""

    ranks: int
    milliseconds: float
    rate: float
    speed_up: float
    efficiency: float


def main() -> None:
    arguments = parse_arguments()
    figure = import_figure() if arguments.plot else None  # before the measurement, which a missing package would waste
    world = mpicomm.bootstrap()
    share_cores(world)
    times = measure(world, arguments.batch)
    points = {kind: compare(kind, times[kind], arguments.batch) for kind in KINDS}
    if world.rank == 0:
        # Behind a launcher rich may mistake a pipe for a terminal.
        console = Console(force_terminal=False, width=80)
        console.print(make_table(f"strong: {arguments.batch} samples in all", points["strong"]))
        console.print(make_table(f"weak: {arguments.batch} samples per rank", points["weak"]))
        if figure is not None:
            draw(figure, points, arguments.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, help="samples in all, or per rank (%(default)s)")
    parser.add_argument("--plot", metavar="F.png", help="plot the figures to this file")
    return parser.parse_args()


def measure(world: mpicomm.World, batch: int) -> dict[str, dict[int, float]]:
    """Return the milliseconds of a step by kind and number of ranks (collective).

    The kinds and numbers run in turn, so that a load peak of the machine does not affect only one of them. Each time is
    that of the slowest rank; the result is the median of the rounds.
    """
    numbers = [n for n in (2**k for k in range(world.size.bit_length())) if n < world.size] + [world.size]
    models = {n: make_model(world, n) for n in numbers}
    cases = [(kind, n) for kind in KINDS for n in numbers]
    times = torch.zeros(UNCOUNTED + COUNTED, len(cases), device=world.device)
    for row in times:
        for column, (kind, n) in enumerate(cases):
            dist.barrier()  # ranks that do not take part wait here, at the next barrier
            if (model := models[n]) is not None:
                mine = len(range(world.rank, batch, n)) if kind == "strong" else batch
                row[column] = 1000 * take_step(world, model, mine)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    medians = times[UNCOUNTED:].median(dim=0).values.tolist()
    return {kind: {n: ms for (k, n), ms in zip(cases, medians, strict=True) if k == kind} for kind in KINDS}


def make_model(world: mpicomm.World, n: int) -> nn.Module | None:
    """Return a model on the first n ranks, and None on the others (collective)."""
    group = dist.new_group(list(range(n)))  # on all ranks, whether they are members or not
    if world.rank >= n:
        return None
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers).to(world.device), process_group=group)


def take_step(world: mpicomm.World, model: nn.Module, batch: int) -> float:
    """Return the seconds of a step (collective on the model's ranks)."""
    inputs = torch.ones(batch, WIDTH, device=world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start = time.perf_counter()
    model(inputs).square().mean().backward()
    optimizer.step()
    if world.device.type != "cpu":
        torch.accelerator.synchronize()  # calls on a GPU are asynchronous
    return time.perf_counter() - start


def compare(kind: str, times: Mapping[int, float], batch: int) -> list[Point]:
    """Return the figures of each number of ranks in comparison with one rank."""
    rates = {n: 1000 / ms * (batch if kind == "strong" else batch * n) for n, ms in times.items()}
    return [Point(n, times[n], rate, rate / rates[1], rate / rates[1] / n) for n, rate in rates.items()]


def make_table(title: str, points: list[Point]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for name in ("ranks", "step ms", "samples/s", "speed-up", "efficiency"):
        table.add_column(name, justify="right", min_width=10)
    for n, milliseconds, rate, speed_up, efficiency in points:
        table.add_row(str(n), f"{milliseconds:.1f}", f"{rate:.1f}", f"{speed_up:.2f}", f"{efficiency:.2f}")
    return table


def import_figure() -> Any:
    """Return a figure of matplotlib, without pyplot."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(9, 4), layout="constrained")


def draw(figure: Any, points: Mapping[str, list[Point]], path: str) -> None:
    """Plot speed-up and efficiency against the number of ranks, with the ideal lines."""
    ranks = [each.ranks for each in points["strong"]]
    ideals = {"speed-up": ranks, "efficiency": [1] * len(ranks)}
    for axes, (name, ideal) in zip(figure.subplots(1, 2), ideals.items(), strict=True):
        axes.plot(ranks, ideal, "--", color="grey", label="ideal")
        for kind, each in points.items():
            axes.plot(ranks, [getattr(point, name.replace("-", "_")) for point in each], marker="o", label=kind)
        axes.set(xlabel="ranks", ylabel=name, xticks=ranks, ylim=(0, None))
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
