"""What PyTorch's analyser `torchfrtrace` reports on the dump files of the fault cases.

`python -m tests.failures analyse` runs every case, analyses the dump files of its ranks, and writes
docs/results/torchfrtrace-<MPI>.json, from which docs/faults.md has its section.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from mpicomm.recorder import rank_text
from mpicomm.reports import result_files
from tests.failures import ways
from tests.failures.ways import Way
from tests.launching import ROOT, run_within
from tests.time_limits import scaled

RESULTS = ROOT / "docs" / "results"
PATTERN = "torchfrtrace-*.json"

_LIMIT = 120.0
_NO_DUMPS = "no dump files"

# The analyser's messages that name ranks.
_NO_FILE = re.compile(r"AssertionError: Missing dump files from ranks \{([\d, ]+)\}")
_NOT_JOINED = re.compile(r"missing ranks: \{([\d, ]+)\}")
_CULPRIT = re.compile(r"Culprit rank (\d+); Error type: (\w+)")

_INTRODUCTION = """
## The verdict of PyTorch's analyser

`torchfrtrace DIR`, a command of torch's wheel, reads the [dump files](execution-model.md#the-flight-recorder) of a job.
The table shows which ranks it names for the faults above, on rank {rank} of {size}. For every fault after which the job
waits, they are the ranks that mpicomm names. An exception is not a hang: it ends the job at once, without dump files.
When a rank is killed, MPICH's launcher also kills the others, before or while they write their files.
`python -m tests.failures analyse` generates the table.
"""
_HEAD = "| fault | {mpis} |\n|---|{rules}|\n"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the analyser reports on the dump files of a job."""

    ranks: list[int]
    """The ranks that it names first."""

    reason: str
    """Why it names them."""

    dumped: list[int]
    """The ranks with a dump file."""

    output: str

    def __str__(self) -> str:
        return self.reason if not self.ranks else f"{rank_text.name_ranks(self.ranks)}: {self.reason}"


def analyse(folder: Path) -> Verdict:
    """Run the analyser on the directory of a job's dump files."""
    dumped = sorted(int(each.name.rpartition("_")[2]) for each in folder.glob("fr_trace_rank_*"))
    if not dumped:
        return Verdict([], _NO_DUMPS, [], "")
    command = str(ways.programs_of(None) / "torchfrtrace")
    outcome = run_within(scaled(_LIMIT), [command, str(folder)])
    if missing := _NO_FILE.search(outcome.stderr):
        ranks = _ranks(missing[1])
        return Verdict(ranks, "no dump file", dumped, outcome.stderr)
    assert outcome.status == 0, outcome
    return Verdict(*_named(outcome.stderr), dumped, outcome.stderr)


def _named(output: str) -> tuple[list[int], str]:
    """Return the ranks that the output names, and why: those with another collective, or else those without one."""
    if culprits := _CULPRIT.findall(output):
        return sorted({int(rank) for rank, _ in culprits}), culprits[0][1].lower().replace("_", " ")
    missing = sorted({rank for found in _NOT_JOINED.findall(output) for rank in _ranks(found)})
    return (missing, "did not join") if missing else ([], "no error found")


def _ranks(text: str) -> list[int]:
    return sorted(int(rank) for rank in text.split(","))


def run(way: Way, rank: int, environment: Path | None) -> Verdict:
    """Run a case, and analyse the dump files of its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ways.run(dataclasses.replace(way, env={**way.env, "MPICOMM_DUMP_DIR": folder}), rank, environment=environment)
        jobs = list(Path(folder).iterdir())
        return analyse(jobs[0]) if jobs else Verdict([], _NO_DUMPS, [], "")


def write(machine: dict[str, Any], rows: dict[str, Verdict]) -> None:
    """Write the results of one MPI."""
    name = machine["mpi"].rpartition(" ")[0].lower().replace(" ", "")
    found = {"machine": machine, "rows": {way: dataclasses.asdict(each) for way, each in rows.items()}}
    result_files.write(RESULTS / f"torchfrtrace-{name}.json", json.loads(_without_directories(json.dumps(found))))


def _without_directories(text: str) -> str:
    """Return JSON with the names of source files only, in messages and in tracebacks."""
    text = re.sub(r" at (?:/|<)\S*?([\w.]+>?):(\d+)", r" at \1:\2", text)
    return re.sub(r'File \\"/[^"]*?([^/"]+)\\"', r'File \\"\1\\"', text)


def section(rank: int) -> str:
    """Return the section of docs/faults.md with the results of all MPIs."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(PATTERN), reverse=True)]
    if not found:
        return ""
    head = _HEAD.format(mpis=" | ".join(each["machine"]["mpi"] for each in found), rules="|".join(["---"] * len(found)))
    rows = []
    for way in found[0]["rows"]:
        cells = [str(Verdict(**each["rows"][way])) if way in each["rows"] else "" for each in found]
        rows.append(f"| {way} | {' | '.join(cells)} |\n")
    introduction = _INTRODUCTION.format(rank=rank, size=ways.SIZE)
    return f"{introduction}\n{head}{''.join(rows)}"
