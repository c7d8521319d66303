"""The time in which `mpicomm top` shows all ranks of a busy job: `python -m benchmarks.top_latency -n 48 --json F`.

The job runs on this host under mpirun, also with many more ranks than cores. First its ranks reduce tensors of 64 KiB
all the time, so that the observer competes with them for the cores; then each sleeps for a second between two
reductions, as while its GPU computes. The program measures the answers to one observer, and whole commands, from start
to end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import mpicomm
from mpicomm import job_info, mpi
from mpicomm.cli.argument_types import check_writable, count
from mpicomm.cli.job_observer import JobObserver
from mpicomm.reports import result_files
from mpicomm.watchdog import job_files
from mpicomm.watchdog.job_files import ListedJob

_ELEMENTS = 2**14  # of float32
_START_SECONDS = 600.0  # time limit for the start of the job: 48 ranks import torch on two cores
_PAUSE = 0.5  # seconds between two measurements
_SETTLE_SECONDS = 10.0  # for all ranks to be in a phase
_PERIOD = 16  # operations between two looks at the phase
PHASES = ("busy", "sleeping")
_END = "end"


def main() -> None:
    """Start the job and measure; or, as a rank of the job, exchange tensors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.top_latency", description=__doc__)
    parser.add_argument("-n", dest="ranks", metavar="N", type=count, default=48, help="ranks (default: %(default)s)")
    parser.add_argument("--answers", metavar="N", type=count, default=20, help="answers (default: %(default)s)")
    parser.add_argument("--commands", metavar="N", type=count, default=5, help="commands (default: %(default)s)")
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    parser.add_argument("--rank", metavar="F", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _exchange(options.rank)
        return
    if options.json is not None:
        check_writable(options.json)
    with tempfile.TemporaryDirectory() as folder:
        phase = Path(folder, "phase")
        phase.write_text(PHASES[0])
        figures: dict[str, object] = {}
        program = [sys.executable, "-m", "benchmarks.top_latency", "--rank", str(phase)]
        with subprocess.Popen([mpi.library().mpiexec, "-n", str(options.ranks), *program]) as job:
            try:
                listed = _wait_for_job(job, str(phase))
                for name in PHASES:
                    phase.write_text(name)
                    time.sleep(_SETTLE_SECONDS)
                    figures[name] = _measure(listed, options.answers, options.commands)
            finally:
                phase.write_text(_END)
    print(json.dumps(figures, indent=1))
    if job.returncode:
        sys.exit(f"the job ended with status {job.returncode}")
    if options.json is not None:
        command = shlex.join(["python", "-m", "benchmarks.top_latency", *sys.argv[1:]])
        what = "seconds until mpicomm top has the status of all ranks, and until the command has printed it"
        head = job_info.description(what, command)
        result_files.write(options.json, {**head, "ranks": options.ranks, **figures})


def _wait_for_job(job: subprocess.Popen[bytes], program: str) -> ListedJob:
    """Return the job once it has started.

    Raises:
        RuntimeError: If it has not.
    """
    deadline = time.monotonic() + _START_SECONDS
    while job.poll() is None and time.monotonic() < deadline:
        for each in job_files.listed():
            if program in each.job.program:
                return each
        time.sleep(_PAUSE)
    status = job.poll()
    why = f"has not started after {_START_SECONDS:.0f} s" if status is None else f"has ended with status {status}"
    raise RuntimeError(f"the job {why}")


def _measure(listed: ListedJob, answers: int, commands: int) -> dict[str, object]:
    of_answers: list[float] = []
    with contextlib.closing(JobObserver(listed)) as observer:
        for _ in range(answers):
            time.sleep(_PAUSE)
            status = observer.ask()
            assert status is not None
            assert len(status.statuses) == listed.job.size
            of_answers.append(status.seconds)
    of_commands: list[float] = []
    command = [sys.executable, "-m", "mpicomm", "top", listed.job.name, "--json"]
    for _ in range(commands):
        time.sleep(_PAUSE)
        start = time.monotonic()
        found = subprocess.run(command, check=True, capture_output=True).stdout
        of_commands.append(time.monotonic() - start)
    states = [rank["state"] for rank in json.loads(found)["ranks"]]
    return {
        "load average": round(os.getloadavg()[0], 1),
        "responding": sum(state != "not_responding" for state in states),
        "answer": _summary(of_answers),
        "command": _summary(of_commands),
    }


def _summary(seconds: list[float]) -> dict[str, float]:
    found = {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)}
    return {name: round(value, 4) for name, value in found.items()}


# -- in the ranks ------------------------------------------------------------------------------------------------------


def _exchange(file: Path) -> None:
    world = mpicomm.bootstrap()
    torch.set_num_threads(1)
    values, phase = torch.zeros(_ELEMENTS), torch.zeros(1, dtype=torch.int)
    while phase < len(PHASES):
        for _ in range(_PERIOD if phase == 0 else 1):
            dist.all_reduce(values)
        if phase == 1:
            time.sleep(1.0)
        if world.rank == 0 and (name := file.read_text()):  # it may be written just now
            phase.fill_((*PHASES, _END).index(name))
        dist.broadcast(phase, 0)
    mpicomm.shutdown()


if __name__ == "__main__":
    main()
