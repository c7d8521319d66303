"""From the SIGKILL of a process to the next training step, with mpicomm and with torchft.

`python -m benchmarks.recovery_peers --torchft-python PATH --json F`; PATH is the interpreter of an environment with
torchft, which does not need mpicomm. Each job trains the same model with DistributedDataParallel on four processes of
this machine; one of them, each rank in turn, is killed at a random moment. Jobs of the systems alternate. Results of
systems that are not measured stay in F.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from benchmarks.recovery_peers import killed_job, systems
from mpicomm import job_info
from mpicomm.cli.argument_types import check_writable, count
from mpicomm.reports import result_files

_PERCENTILES = {"p50": 50, "p95": 95, "max": 100}
_VERSIONS = (
    "import importlib.metadata, json; "
    "print(json.dumps({each.name: each.version for each in importlib.metadata.distributions()}))"
)


def main() -> None:
    """Run the jobs, print the results and write them."""
    options = _parse_arguments()
    if options.json is not None:
        check_writable(options.json)
    found = systems.all_systems(options.torchft_python)
    names = [name for name in found if not options.systems or any(each in name for each in options.systems)]
    plan = [(name, number % killed_job.PROCESSES) for number in range(options.kills) for name in names]

    def run(case: tuple[str, int]) -> dict[str, Any]:
        name, rank = case
        result = killed_job.run(found[name], rank, options.limit)
        print(f"{name}: {result}", flush=True)
        return result

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(run, plan))
    rows = {
        name: summary([result for (of, _), result in zip(plan, results, strict=True) if of == name]) for name in names
    }
    for name, row in rows.items():
        print(f"{name:34} {row['continued']} of {row['kills']} continued, {json.dumps(row['gap_s'])}")
    if options.json is not None:
        _write(options.json, options.torchft_python, options.jobs, rows)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery_peers", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", metavar="N", type=count, default=10, help="kills per system (default: %(default)s)")
    parser.add_argument("--torchft-python", metavar="PATH", type=Path, help="an interpreter with torchft")
    parser.add_argument("--systems", metavar="TEXT", nargs="+", help="measure systems whose names contain a text")
    parser.add_argument(
        "--jobs", metavar="J", type=count, default=1, help="jobs at the same time, for timeouts (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", metavar="S", type=count, default=90, help="seconds to wait for the next step (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    return parser.parse_args()


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of the results of one system; see `killed_job.result_of`."""
    continued = [each for each in results if not each["problem"]]
    gaps = [each["gap_s"] for each in continued]
    return {
        "kills": len(results),
        "continued": len(continued),
        "gap_s": {name: round(float(numpy.percentile(gaps, cut)), 3) for name, cut in _PERCENTILES.items()}
        if gaps
        else None,
        "discarded_steps": max((each["discarded"] for each in continued), default=None),
        "kills_with_state_transfer": sum(each["received"] > 0 for each in continued),
        "results": list(results),
    }


def _write(path: Path, torchft_python: Path | None, jobs: int, rows: Mapping[str, Mapping[str, Any]]) -> None:
    # The path of the interpreter has no meaning on other machines.
    arguments = ["PATH" if each == str(torchft_python) else each for each in sys.argv[1:]]
    command = shlex.join(["python", "-m", "benchmarks.recovery_peers", *arguments])
    what = "seconds from the SIGKILL of a process to the next step that all remaining processes complete"
    head = job_info.description(what, command)
    measured: dict[str, Any] = {"processes": killed_job.PROCESSES}
    old = json.loads(path.read_text()) if path.exists() and path.stat().st_size else {}
    if torchft_python is not None:
        measured["torchft"] = {"versions": _torchft_versions(torchft_python), "settings": _torchft_settings()}
    each_head = {"command": command, "date": head["date"], "jobs_at_once": jobs}
    merged = {**old.get("systems", {}), **{name: {**each_head, **row} for name, row in rows.items()}}
    measured["systems"] = {name: merged[name] for name in (systems.MPICOMM, *systems.TORCHFT) if name in merged}
    result_files.write(path, {**old, **head, **measured})


def _torchft_versions(python: Path) -> dict[str, str]:
    printed = subprocess.run([python, "-c", _VERSIONS], check=True, capture_output=True, text=True).stdout
    return {name: version for name, version in json.loads(printed).items() if name.startswith("torch")}


def _torchft_settings() -> dict[str, dict[str, str]]:
    return {
        name: {"lighthouse": shlex.join([*systems.LIGHTHOUSE, *lighthouse]), "replica": shlex.join(replica)}
        for name, (lighthouse, replica) in systems.TORCHFT.items()
    }


if __name__ == "__main__":
    main()
