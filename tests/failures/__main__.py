"""Fault injection: `table` runs all fault cases and writes docs/faults.md.

`analyse` runs all fault cases, and writes what PyTorch's analyser reports on their dump files to docs/faults.md.

`OTHER_MPI_ENV=path python -m tests.failures table` runs the cases with both MPI libraries, and with `--srun` as steps
of a Slurm cluster with two nodes (`python -m tests.cluster up` starts one), where TMPDIR must be a shared directory.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

from mpicomm.recorder import rank_text
from mpicomm.reports import result_files
from tests.compat import results
from tests.failures import analyser, ways
from tests.failures.ways import Result
from tests.launching import ROOT, run_command

PAGE = ROOT / "docs" / "faults.md"
MPI4PY = ROOT / "docs" / "results" / "faults.json"

_RANK = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.failures", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="run all fault cases and write docs/faults.md")
    table.add_argument("--srun", action="store_true", help="start ranks with srun on two nodes, instead of mpiexec")
    analyse = commands.add_parser("analyse", help="run all fault cases and torchfrtrace on their dump files")
    analyse.add_argument("--only", nargs="+", choices=list(ways.BY_NAME), metavar="FAULT", help="run only these")
    args = parser.parse_args()
    if args.command == "table":
        return write_tables(by_srun=args.srun)
    return analyse_dumps(args.only or list(ways.BY_NAME))


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# -- the table ---------------------------------------------------------------------------------------------------------

_INTRODUCTION = f"""\
# Rank failures and early exits

If a rank fails, exits early or hangs, the other ranks must not wait for it forever. With mpicomm:

- an uncaught exception, on any thread, is printed once, with its rank, and ends the job immediately;
- rank 0 reports a rank that is killed, crashes or calls `os._exit` as soon as its connection breaks
  (MPICH's launcher also ends the other ranks when a rank is killed, on a busy machine before rank 0 prints the report);
- a rank that exits normally, by `sys.exit` or at the end of its program, ends the job after another rank has waited for
  it for 5 s;
- any other hang is reported after `MPICOMM_HANG_SECONDS`, in a table of the operation and source line of every rank,
  and ends the job at the timeout of the operation;
- a slow rank does not end the job.

The tables show measurements: the fault occurs on rank {_RANK} of {ways.SIZE} while the others are in `all_reduce`,
once with mpicomm (`bootstrap(timeout={ways.TIMEOUT})`, `MPICOMM_HANG_SECONDS=3`) and once with mpi4py alone.
"seconds" is the time from the fault to the end of the launcher, "status" the launcher's exit status. HANG: the job was
still running {ways.PLAIN_LIMIT} s after its start, and was killed. `python -m tests.failures table` generates this
page, with `--srun` the tables for srun, on two hosts of `make cluster-up`.
"""
_HEAD = """\
| fault on rank {rank} | with mpicomm: ended | seconds | status | named | without: ended | seconds | status |
|---|---|---|---|---|---|---|---|
"""


def write_tables(*, by_srun: bool) -> int:
    """Run every case with and without mpicomm, on the available MPIs, and write the page and the raw results.

    Tables of other launchers and MPIs are kept.
    """
    tables: list[dict[str, Any]] = json.loads(MPI4PY.read_text()) if MPI4PY.exists() else []
    is_well = True
    for environment in ways.environments():
        machine = _machine(environment)
        launcher = _srun(ways.mpi_of(ways.programs_of(environment))) if by_srun else []
        title = _title(machine["mpi"], launcher)
        tables = [each for each in tables if each["title"] != title]
        tables.append({"title": title, "machine": machine, "rows": []})
        for way in ways.WAYS:
            ours = ways.run(way, _RANK, environment=environment, launcher=launcher)
            plain = None if way.env else ways.run(way, _RANK, is_plain=True, environment=environment, launcher=launcher)
            without = "" if plain is None else f"; without mpicomm {_end(plain)}"
            _print(f"{ours}, names {ours.named}{without}{''.join(f'; {each}' for each in ours.problems)}")
            is_well = is_well and not ours.problems
            tables[-1]["rows"].append({"way": way.name, "with": _raw(ours), "without": plain and _raw(plain)})
            _write(tables)
    return 0 if is_well else 1


def analyse_dumps(names: list[str]) -> int:
    """Run the analyser on the dump files of cases, on the available MPIs, and write the results and the page."""
    for environment in ways.environments():
        rows: dict[str, analyser.Verdict] = {}
        for name in names:
            rows[name] = analyser.run(ways.BY_NAME[name], _RANK, environment)
            _print(f"{name}: {rows[name]}; dump files of ranks {rows[name].dumped}")
        analyser.write(_machine(environment), rows)
    _write(json.loads(MPI4PY.read_text()))
    return 0


def _srun(mpi: str) -> list[str]:
    kind = "pmix" if mpi == ways.OPEN_MPI else "pmi2"
    return ["srun", "--kill-on-bad-exit=1", "--nodes=2", f"--ntasks-per-node={ways.SIZE // 2}", f"--mpi={kind}"]


def _title(mpi: str, launcher: list[str]) -> str:
    return f"{mpi}, started by {' '.join(launcher)}" if launcher else mpi


def _write(tables: list[dict[str, Any]]) -> None:
    tables = sorted(tables, key=lambda table: ("srun" in table["title"], not table["title"].startswith(ways.OPEN_MPI)))
    result_files.write(MPI4PY, json.loads(_public(json.dumps(tables))))
    PAGE.write_text(_public(_INTRODUCTION + "".join(_shown_table(table) for table in tables) + analysis()))


def analysis() -> str:
    """Return the section with the analyser's verdicts."""
    section = analyser.section(_RANK)
    return "".join(_code(line) if line.startswith("|") else line for line in section.splitlines(keepends=True))


def _shown_table(table: dict[str, Any]) -> str:
    rows = []
    for row in table["rows"]:
        ours, plain = row["with"], row["without"]
        cells = [_code(row["way"]), *_cells(ours), _named(ours)]
        cells += ["as above", "", ""] if plain is None else _cells(plain)
        rows.append(f"| {' | '.join(cells)} |\n")
    machine = table["machine"]
    return f"\n## {table['title']}\n\n{_described(machine)}\n\n{_HEAD.format(rank=_RANK)}{''.join(rows)}"


def _cells(raw: dict[str, Any]) -> list[str]:
    if not raw["ended"]:
        return ["**HANG**", "", ""]
    seconds = "" if raw["seconds"] is None else f"{raw['seconds']:.1f}"
    return ["yes", seconds, ways.described_status(raw["status"])]


def _named(raw: dict[str, Any]) -> str:
    if raw["named"]:
        return rank_text.name_ranks(raw["named"])
    return "no rank: the launcher was faster" if raw["status"] else "no rank"


def _code(name: str) -> str:
    """Mark calls and variables as code."""
    return re.sub(r"((?:raise )?[\w.]+\(\d*\)|MPICOMM_\w+=\d|all_reduce)", r"`\1`", name)


def _end(result: Result) -> str:
    return f"ends after {result.seconds or 0:.1f} s, status {result.status}" if result.ended else "HANG"


def _raw(result: Result) -> dict[str, Any]:
    names = ("ended", "seconds", "status", "named", "lines", "left")
    raw = {name: getattr(result, name) for name in names}
    return {**raw, "seconds": None if result.seconds is None else round(result.seconds, 2)}


def _machine(environment: Path | None) -> dict[str, Any]:
    python = str(ways.programs_of(environment) / "python")
    facts = json.loads(run_command([python, "-m", "tests.compat.facts"], env={"PYTHONPATH": str(ROOT)}).stdout)
    versions = facts["versions"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": facts["machine"]["cores"],
        "mpi": " ".join(results.mpi_of(versions)),
        "mpi4py": versions["mpi4py"],
        "torch": versions["torch"],
        "python": versions["Python"],
    }


def _described(machine: dict[str, Any]) -> str:
    versions = f"mpi4py {machine['mpi4py']}, torch {machine['torch']}, Python {machine['python']}"
    return f"{machine['date']}, one machine with {machine['cores']} cores: {machine['mpi']}, {versions}."


def _public(text: str) -> str:
    """Remove the machine's name and its paths."""
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "host", text)
    for path in (str(ROOT), sys.prefix, sys.base_prefix, str(Path.home())):
        text = text.replace(path, "...")
    return text


if __name__ == "__main__":
    sys.exit(main())
