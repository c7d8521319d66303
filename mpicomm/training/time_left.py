"""The remaining time of a job, from its scheduler: Slurm, PBS, LSF or Flux."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping

from mpicomm.launch.scheduler_query import output_of

_UNLIMITED_IN_FLUX = 2**32 - 1


def clock(environ: Mapping[str, str]) -> Callable[[], float | None] | None:
    """Return a function that queries the scheduler for the remaining seconds.

    Returns:
        None outside of jobs, and where the command of the scheduler is missing.
    """
    flux, slurm = environ.get("FLUX_JOB_ID"), environ.get("SLURM_JOB_ID")
    pbs, lsf = environ.get("PBS_JOBID"), environ.get("LSB_JOBID")
    if flux and shutil.which("flux"):  # SLURM_* may describe the job that contains the instance
        return lambda: seconds_of_flux(output_of(["flux", "job", "timeleft"]))
    if slurm and shutil.which("squeue"):
        return lambda: seconds_of_slurm(output_of(["squeue", "--noheader", "--jobs", slurm, "--format", "%L"]))
    if pbs and shutil.which("qstat"):
        return lambda: seconds_of_pbs(output_of(["qstat", "-f", "-F", "json", pbs]), pbs, time.time())
    if lsf and shutil.which("bjobs"):
        index = environ.get("LSB_JOBINDEX", "0")
        job = lsf if index == "0" else f"{lsf}[{index}]"
        return lambda: seconds_of_lsf(output_of(["bjobs", "-noheader", "-o", "time_left", job]))
    return None


def seconds_of_slurm(text: str) -> float | None:
    """Return the seconds of squeue's `%L` field, [days-][hours:][minutes:]seconds; None if it is not a duration."""
    days, _, clock = text.strip().rpartition("-")
    try:
        parts = [int(part) for part in clock.split(":")]
        total = 86400 * int(days or 0)
    except ValueError:  # UNLIMITED, NOT_SET, INVALID or nothing
        return None
    for place, part in enumerate(reversed(parts)):  # leading units may be absent
        total += part * 60**place
    return float(total)


def seconds_of_pbs(text: str, job: str, now: float) -> float | None:
    """Return the remaining seconds of a PBS job, from its start and walltime: PBS updates the used time late."""
    try:
        jobs = json.loads(text)["Jobs"]
        about = jobs.get(job) or next(iter(jobs.values()))
        hours, minutes, seconds = map(int, about["Resource_List"]["walltime"].split(":"))
        # stime is in the local time of the server.
        start = datetime.datetime.strptime(about["stime"], "%a %b %d %H:%M:%S %Y").astimezone()
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None
    return start.timestamp() + 3600 * hours + 60 * minutes + seconds - now


def seconds_of_lsf(text: str) -> float | None:
    """Return the seconds of the `time_left` of bjobs, hours:minutes and a letter; None without a limit."""
    found = re.fullmatch(r"\s*(\d+):(\d+)(?: [A-Z])?\s*", text)
    return 3600.0 * int(found[1]) + 60.0 * int(found[2]) if found else None


def seconds_of_flux(text: str) -> float | None:
    """Return the seconds that `flux job timeleft` prints; None without a limit, for which it prints 2^32 - 1."""
    seconds = int(text) if text.strip().isdigit() else _UNLIMITED_IN_FLUX
    return float(seconds) if seconds < _UNLIMITED_IN_FLUX else None
