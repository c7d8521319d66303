"""The cost of `mpicomm run --fault-tolerant` when nothing fails: `python -m benchmarks.fault_tolerance --json F`.

Jobs with and without it alternate, since Open MPI selects its components at the start. Each job measures all_reduce and
training steps with DistributedDataParallel on two ranks. Of each case, the lowest of the jobs' medians counts: the host
of a virtual machine may move its cores, which then share no cache for the whole of a job. With `--fault-tolerant` the
jobs call `bootstrap(on_failure="recover")`.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from mpicomm import job_info
from mpicomm.bench import timing
from mpicomm.bench.training import WIDTHS
from mpicomm.cli.argument_types import check_writable, count
from mpicomm.reports import result_files

SIZES = {"4 B": 4, "1 KiB": 2**10, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
PARAMETERS = {"small": "33 k", "middle": "525 k", "large": "8.4 M"}
BATCH = 32  # samples per rank and step
STATES = {"without": (), "with": ("--fault-tolerant",)}

Medians = dict[str, float]
"""The median of each case in microseconds."""


def main() -> None:
    """Run the jobs and write the results; or, as a rank of one of them, measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fault_tolerance", description=__doc__)
    parser.add_argument("--jobs", metavar="J", type=count, default=5, help="jobs in each state (default: %(default)s)")
    parser.add_argument("--rounds", metavar="R", type=count, default=15, help="rounds of a job (default: %(default)s)")
    parser.add_argument("-n", dest="ranks", metavar="N", type=count, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    parser.add_argument("--rank", metavar="F", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--recovers", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _measure(options.rank, options.rounds, recovers=options.recovers)
        return
    if options.json is not None:
        check_writable(options.json)
    jobs: dict[str, list[Medians]] = {state: [] for state in STATES}
    for _ in range(options.jobs):
        for state in STATES:
            jobs[state].append(_run_job(state, options.ranks, options.rounds))
    figures = _compared(jobs)
    for case, row in figures.items():
        print(f"{case:22} {row['without']:10.1f} {row['with']:10.1f} us   {row['ratio']:.3f}")
    if options.json is not None:
        command = shlex.join(["python", "-m", "benchmarks.fault_tolerance", *sys.argv[1:]])
        what = "microseconds with and without --fault-tolerant; the lowest of the medians of alternating jobs"
        head = job_info.description(what, command)
        result_files.write(options.json, {**head, "ranks": options.ranks, "figures": figures, "medians_of_jobs": jobs})


def _compared(jobs: dict[str, list[Medians]]) -> dict[str, Medians]:
    figures = {}
    for case in jobs["without"][0]:
        row = {state: round(min(each[case] for each in jobs[state]), 2) for state in STATES}
        figures[case] = {**row, "ratio": round(row["with"] / row["without"], 3)}
    return figures


def _run_job(state: str, ranks: int, rounds: int) -> Medians:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "medians.json")
        program = ["-m", "benchmarks.fault_tolerance", "--rank", str(file), "--rounds", str(rounds)]
        command = [sys.executable, "-m", "mpicomm", "run", "-n", str(ranks), *STATES[state], *program]
        subprocess.run([*command, *["--recovers"] * (state == "with")], check=True)
        found: Medians = json.loads(file.read_text())
    return found


# -- in the ranks ------------------------------------------------------------------------------------------------------


def _measure(file: Path, rounds: int, *, recovers: bool) -> None:
    world = mpicomm.bootstrap("mpi", on_failure="recover" if recovers else "abort")
    torch.set_num_threads(1)
    bench = timing.on_ranks_of(world, rounds)
    calls: dict[str, Callable[[], object]] = {}
    for name, nbytes in SIZES.items():
        calls[f"all_reduce {name}"] = functools.partial(dist.all_reduce, torch.zeros(nbytes // 4))
    for model, parameters in PARAMETERS.items():
        calls[f"DDP step {parameters}"] = _step(WIDTHS[model])
    medians = {
        case: timing.in_turn(bench, {case: call}, times_calls=False)[case].median for case, call in calls.items()
    }
    if world.rank == 0:
        file.write_text(json.dumps(medians))


def _step(width: int) -> Callable[[], object]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(BATCH, width), torch.randn(BATCH, width)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
