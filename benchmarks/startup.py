"""The time from the command to the end of the first all_reduce, and of each step: `python -m benchmarks.startup`.

Starts ranks repeatedly, and, for comparison, with torchrun and Gloo. In a Slurm allocation all of its nodes are used.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mpicomm import job_info, terminal
from mpicomm.cli import launching
from mpicomm.cli.argument_types import check_writable, count
from mpicomm.cli.console import console
from mpicomm.errors import LaunchError, MPINotFoundError
from mpicomm.launch import environment, queries
from mpicomm.launch.allocation import SlurmAllocation
from mpicomm.launch.request import Node, Request, Start
from mpicomm.reports import result_files

LAUNCH = "launch"  # from the command to the first line of rank 0's program
_OURS, _THEIRS = "mpicomm", "torchrun + Gloo"
_IMPORT = "seconds of `import mpicomm`"
_IMPORT_PROGRAM = "import time; t = time.perf_counter(); import mpicomm; print(time.perf_counter() - t)"
_IMPORTS = 7  # processes, of which the fastest counts
_TERM_SECONDS = 5.0
_ERROR_TAIL = 2000  # characters of the error output in the message of a failed start
_FAILED = 2  # exit status

# Slurm sets the rank of each agent's node. The rendezvous is on the first node of the step.
_TORCHRUN_TASK = (
    'PET_NODE_RANK=$SLURM_NODEID PET_MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1) '
    'exec "$@"'
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One start."""

    seconds: float
    """Seconds from the command to the result of rank 0."""
    steps: dict[str, float]
    """Seconds of each step of rank 0; their sum is `seconds`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the results, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument(
        "--ranks", metavar="1,2,4", type=_counts, default=(1, 2, 4), help="numbers of ranks (default: 1,2,4)"
    )
    parser.add_argument(
        "--rounds", metavar="R", type=count, default=3, help="starts of each, in turn (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    parser.add_argument(
        "--limit", metavar="S", type=count, default=300, help="seconds until a timeout (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    launchers: dict[str, Callable[[int], Start]] = {
        _OURS: lambda ranks: launching.build(Request(_probe("mpicomm"), ranks), os.environ),
        _THEIRS: lambda ranks: _torchrun(ranks, os.environ),
    }
    cases = list(itertools.product(options.ranks, launchers))
    try:
        if options.json is not None:
            check_writable(options.json)
        for ranks, launcher in cases:
            launchers[launcher](ranks)  # report a launch that cannot work before the first start
        seconds = import_seconds(_IMPORTS)
        starts = measure(cases * options.rounds, launchers, limit=options.limit)
        console().print(table(starts, _OURS, seconds))
        if options.json is not None:
            quantity = "seconds from the command to the end of the first all_reduce; the fastest start"
            head = job_info.description(quantity, shlex.join(["python", "-m", "benchmarks.startup", *sys.argv[1:]]))
            results = {"rounds": options.rounds, _IMPORT: round(seconds, 4), "starts": starts}
            result_files.write(options.json, head | results)
    except (LaunchError, MPINotFoundError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _FAILED
    return 0


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(number) for number in text.split(","))


# -- the launches ------------------------------------------------------------------------------------------------------


def _probe(kind: str) -> tuple[str, ...]:
    """Return the command of the measured program; `startup_probe` describes its argument."""
    return (sys.executable, "-m", "benchmarks.startup_probe", kind)


def _torchrun(ranks: int, environ: Mapping[str, str]) -> Start:
    """Return the launch with torchrun: on this host, or on the nodes of a Slurm allocation."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    program = _probe("gloo")
    job = queries.current_allocation(environ)
    if isinstance(job, SlurmAllocation):
        return torchrun_by_srun(program, ranks, job, port, environ)
    return launching.build(Request(program, ranks, node=Node(0, 1, "127.0.0.1", port)), environ)


def torchrun_by_srun(
    program: Sequence[str], ranks: int, job: SlurmAllocation, port: int, environ: Mapping[str, str]
) -> Start:
    """Return the launch of ranks on all nodes of a Slurm allocation, or on one node per rank if there are fewer ranks.

    Raises:
        LaunchError: If the nodes cannot have equal numbers of ranks.
    """
    nodes = min(job.nodes, ranks)
    if ranks % nodes:
        raise LaunchError(
            f"torchrun needs the same number of ranks on every node, got {ranks} ranks and {nodes} nodes.\n"
            f"Pass a multiple of {nodes} as the number of ranks."
        )
    cpus = min(job.cpus, default=1)
    step = ("srun", "--mpi=none", f"--nodes={nodes}", f"--ntasks={nodes}", f"--cpus-per-task={cpus}")
    options = (f"--nnodes={nodes}", f"--nproc-per-node={ranks // nodes}", f"--master-port={port}", "--no-python")
    agent = (sys.executable, "-m", "torch.distributed.run", *options, *program)
    child = environment.for_ranks(environ, threads=cpus * nodes // ranks)
    return Start((*step, "bash", "-c", _TORCHRUN_TASK, "bash", *agent), child)


# -- the measurement ---------------------------------------------------------------------------------------------------


def measure(
    starts: Iterable[tuple[int, str]], launchers: Mapping[str, Callable[[int], Start]], *, limit: float
) -> list[dict[str, Any]]:
    """Start ranks, and return the metrics of each number of ranks and launcher.

    Args:
        starts: The number of ranks and the launcher of each start.
        launchers: Functions that build the launch of the measured program on a number of ranks, by the launcher's name.
        limit: Timeout of a start in seconds.

    Raises:
        LaunchError: If the ranks fail to start, or a start times out.
    """
    samples: dict[tuple[int, str], list[Sample]] = {}
    for ranks, launcher in starts:
        samples.setdefault((ranks, launcher), []).append(sample_of(launchers[launcher](ranks), ranks, limit))
    return [{"ranks": ranks, "way": launcher, **_metrics(each)} for (ranks, launcher), each in samples.items()]


def _metrics(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the steps of the fastest start, and the median; in seconds."""
    fastest = min(samples, key=lambda sample: sample.seconds)
    return {
        "seconds": round(fastest.seconds, 3),
        "median": round(statistics.median(sample.seconds for sample in samples), 3),
        "steps": {name: round(seconds, 4) for name, seconds in fastest.steps.items()},
    }


def sample_of(start: Start, ranks: int, limit: float) -> Sample:
    """Start ranks, and wait until they have communicated and exited.

    Raises:
        LaunchError: If they fail, or exceed the timeout of `limit` seconds.
    """
    with tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        job = subprocess.Popen(
            start.command,
            env=dict(start.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # to kill its child processes with it
        )
        timer = threading.Timer(limit, _end, (job,))
        timer.start()
        try:
            reported, seconds = _probe_result(job, begin)
            status = job.wait()
        finally:
            timer.cancel()
            _end(job)
        if status or reported is None or reported["size"] != ranks:
            errors.seek(0)
            raise LaunchError(_failure(start, ranks, reported, status, time.perf_counter() - begin, errors.read()))
    steps = reported["seconds"]
    return Sample(seconds, {LAUNCH: seconds - sum(steps.values()), **steps})


def import_seconds(rounds: int) -> float:
    """Return the seconds of `import mpicomm` in a new process, the minimum of the rounds."""
    command = [sys.executable, "-c", _IMPORT_PROGRAM]
    return min(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(rounds))


def _probe_result(job: subprocess.Popen[str], begin: float) -> tuple[dict[str, Any] | None, float]:
    """Return the result of rank 0 and its time; the launcher may write other lines to the same stream."""
    assert job.stdout is not None
    reported, seconds = None, 0.0
    for line in job.stdout:
        if reported is None and line.startswith('{"seconds"'):
            reported, seconds = json.loads(line), time.perf_counter() - begin
    return reported, seconds


def _end(job: subprocess.Popen[str]) -> None:
    """Terminate the launcher and its processes, if they have not exited."""
    if job.poll() is None:
        job.terminate()  # launchers terminate their ranks, which are in sessions of their own
        try:
            job.wait(_TERM_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)


def _failure(
    start: Start, ranks: int, reported: dict[str, Any] | None, status: int, seconds: float, errors: str
) -> str:
    reason = f"exit status {status}" if reported is None or status else f"got {reported['size']} ranks"
    return (
        f"starting {ranks} ranks failed after {seconds:.0f} s: {reason}.\n"
        f"Reproduce it with: {start.shown(os.environ)}\n{errors[-_ERROR_TAIL:]}"
    )


# -- output ------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]], ours: str, import_seconds: float) -> Table:
    """Return the table of starts, with one row for each number of ranks.

    Args:
        rows: The results of `measure`.
        ours: The name of the launcher whose steps are shown, and with which the others are compared.
        import_seconds: The duration of `import mpicomm`.
    """
    others = list(dict.fromkeys(row["way"] for row in rows if row["way"] != ours))
    steps = list(rows[0]["steps"] if rows[0]["way"] == ours else {})
    cells = []
    by_number: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_number.setdefault(row["ranks"], {})[row["way"]] = row
    for ranks, row in by_number.items():
        whole = row[ours]["seconds"]
        parts = [f"{row[ours]['steps'][step]:.3f}" for step in steps]
        times = [f"{row[launcher]['seconds']:.2f} ({row[launcher]['seconds'] / whole:.2f}x)" for launcher in others]
        cells.append([ranks, f"{whole:.2f}", *parts, *times])
    title = "seconds from the launch command to the end of the first all_reduce, fastest start"
    titles = ["ranks", ours, *steps, *others]
    shown = terminal.table(titles, cells, right=titles, title=title)
    shown.caption, shown.caption_justify = f"import mpicomm: {1e3 * import_seconds:.1f} ms", "left"
    return shown


if __name__ == "__main__":
    sys.exit(main())
