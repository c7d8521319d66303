"""Runs on several hosts that lose a rank or a host: `make cluster-up`, then `python -m tests.cluster.recovery`.

If a rank is killed, the others continue in place. mpirun does not continue without a host: `mpicomm run --max-restarts`
starts the ranks again on the other hosts, from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mpicomm import job_info
from mpicomm.reports import result_files
from tests.cluster import cluster as clusters
from tests.cluster import hosts, processes
from tests.cluster.layout import ROOT, Layout
from tests.cluster.running import SECONDS, Cluster
from tests.launching import Outcome
from tests.recovery import kill_plan
from tests.recovery.kill_plan import Kill
from tests.recovery.killed_runs import entries

RESULTS = ROOT / "docs" / "results" / "recovery-hosts-openmpi.json"
RANK, HOST, CUT = "a rank is killed", "a host is killed", "a host is cut off"
IN_PLACE, RESTARTED = "in place", "restarted"
_FAULTS: dict[str, Callable[[Layout, str], None]] = {HOST: hosts.kill, CUT: hosts.cut}
_RANKS = 4
_EPOCHS = 12
_PAUSE = 0.1  # seconds that each forward pass takes longer: the fault must hit a run that has saved a checkpoint


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run continued."""

    outcome: Outcome
    way: str
    """IN_PLACE or RESTARTED; empty if it did not continue."""

    gap_s: float
    """Seconds from the fault to the next step that the remaining ranks completed; 0 if there was none."""

    survivors: int
    """The number of ranks that completed the run."""


def run(
    cluster: Cluster, python: Path, places: Mapping[str, int], what: str, *options: object, epochs: int = _EPOCHS
) -> Result:
    """Train on some hosts, and kill the last rank, or kill or cut off the last host, once there is a checkpoint.

    Args:
        places: The number of ranks on each host.
        options: More options of `mpicomm run`.
    """
    folder = cluster.folder() / "run"
    folder.mkdir()
    kills = [Kill(0, sum(places.values()) - 1, "at a random moment", delay=1.0)] if what == RANK else []
    place = ",".join(f"{host}:{ranks}" for host, ranks in places.items())
    # The hosts share the cores of this machine, which only the ranks of one host would know.
    command = [python, "-m", "mpicomm", "run", "--fault-tolerant", "--hosts", place, *options]
    command += ["--env", "OMPI_MCA_mpi_yield_when_idle=1", "-m", "tests.recovery.training_job", folder]
    command += ["--kills", kill_plan.to_text(kills), "--pause", _PAUSE, "--epochs", epochs]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(cluster.run, "env", f"--chdir={ROOT}", *command, timeout=2 * SECONDS)
        if what != RANK:
            processes.wait_until(lambda: _has_checkpoint(folder) or job.done(), SECONDS, f"{place} has a checkpoint")
            at = time.time()
            _FAULTS[what](cluster.layout, list(places)[-1])
        outcome = job.result()
    if what == RANK:
        at = next(iter(kill_plan.killed(folder)))["time"]
    return Result(outcome, _way(outcome), _gap(folder, at), len(list(folder.glob("final-*.json"))))


def _has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("run/step-*/COMPLETE"))


def _way(outcome: Outcome) -> str:
    if "(recovery 1)" in outcome.stderr:
        return IN_PLACE
    return RESTARTED if "mpicomm run: restart 1 of 1" in outcome.stderr else ""


def _gap(folder: Path, at: float) -> float:
    """Return the time from a fault to the first step after the run has continued."""
    events = entries(folder / "run" / "metrics.jsonl")
    continued = [each["time"] for each in events if each["event"] in ("recovery", "resume") and each["time"] > at]
    steps = [each for path in folder.glob("steps-*.jsonl") for each in entries(path)]
    later = [each["time"] for each in steps if each["what"] == "end" and continued and each["time"] > continued[0]]
    return min(later, default=at) - at


# -- the results file --------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.recovery", description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=0, help="the cluster (%(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    cluster = Cluster(clusters.find(arguments.number, None))
    found = []
    for size in (2, 4):
        for what in (RANK, HOST, CUT):
            places = dict.fromkeys(cluster.layout.names[:size], _RANKS // size)
            restarts = [] if what == RANK else ["--max-restarts", 1]
            result = run(cluster, Path(sys.executable), places, what, *restarts)
            cluster.settle()
            found.append({"hosts": size, "what": what, "way": result.way, "ranks_after": result.survivors})
            found[-1]["gap_s"] = round(result.gap_s, 1)
            sys.stdout.write(f"{found[-1]}\n")
            if result.outcome.status != 0 or not result.way:
                sys.stdout.write(f"{result.outcome}\n")
                return 1
    if arguments.write:
        what = "seconds from a fault to the next step that the remaining ranks of a training run complete"
        command = shlex.join(["python", "-m", "tests.cluster.recovery"])
        result_files.write(RESULTS, {**job_info.description(what, command), "ranks": _RANKS, "faults": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
