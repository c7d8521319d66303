"""Fault injection: `table` runs all fault cases and writes docs/faults.md, `random 50` runs random faults.

`analyse` runs all fault cases, and writes what PyTorch's analyser reports on their dump files to docs/faults.md.

`OTHER_MPI_ENV=path python -m tests.failures table` runs the cases with both MPI libraries, and with `--srun` as steps
of a Slurm cluster with two nodes (`python -m tests.cluster up` starts one), where TMPDIR must be a shared directory.
`python -m tests.failures random 50 [--seed S] [--only K]` repeats all faults of that seed, or the K-th.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpicomm.reports import result_files
from mpicomm.watchdog import hang_report
from tests.compat import results
from tests.failures import analyser, ways
from tests.failures.ways import Result, Way
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
    faults = commands.add_parser("random", help="run random faults")
    faults.add_argument("count", type=int, help="the number of faults")
    faults.add_argument("--seed", type=int, default=None)
    faults.add_argument("--only", type=int, default=None, metavar="K", help="run only the K-th fault")
    args = parser.parse_args()
    if args.command == "table":
        return write_tables(by_srun=args.srun)
    if args.command == "analyse":
        return analyse_dumps(args.only or list(ways.BY_NAME))
    return run_random(args.count, args.seed, args.only)


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
        return hang_report.called(raw["named"])
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


# -- random faults -----------------------------------------------------------------------------------------------------

_OPERATIONS = [
    "all_reduce()",
    "broadcast({root})",
    "barrier()",
    "ring()",
    "start_all_reduce().wait()",
]
_RING = """
def ring():
    if rank % 2:
        receive((rank - 1) % size)
        send((rank + 1) % size)
    else:
        send((rank + 1) % size)
        receive((rank - 1) % size)
"""
_MOST_OPERATIONS = 30
_TAG = 99  # the tag of a message that no rank sends


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault at a random position in a program of random operations."""

    way: Way
    rank: int
    before: list[str]
    """The operations that all ranks run before the fault."""

    def run(self) -> Result:
        return ways.run(self.way, self.rank, before=_RING + "\n".join(self.before))

    def __str__(self) -> str:
        return f"{self.way.name}, rank {self.rank}, after {len(self.before)} operations"


def _known(*names: str) -> Callable[[random.Random], Way]:
    return lambda rng: ways.BY_NAME[rng.choice(names)]


def _sys_exit(rng: random.Random) -> Way:
    status = rng.choice([0, 1, 3])
    way = ways.BY_NAME["sys.exit(0)"]
    words = way.words.replace("status 0", f"status {status}")
    return dataclasses.replace(
        way, name=f"sys.exit({status})", code=f"sys.exit({status})", words=words, open_mpi_status=status or None
    )


def _os_exit(rng: random.Random) -> Way:
    status = rng.choice([0, 1, 3])
    code = f"os._exit({status})"
    return Way(code, code, ways.AT_ONCE, re.escape(f"called {code}"), open_mpi_status=status or None)


def _standstill(rng: random.Random) -> Way:
    if rng.random() < 0.5:
        return Way(
            "recv of a message that no rank sends",
            f"receive((rank - 1) % size, {_TAG})",
            ways.DEADLINE,
            r"\n  rank {rank} +in recv from rank \d, ",
            named=ways.ANY,  # the waiting ranks may be in several operations
        )
    return Way(
        "barrier while the others call all_reduce, MPICOMM_DEBUG=1",
        "barrier()",
        ways.AT_ONCE,
        r"MismatchError: [\s\S]*?\n *rank {rank}: .*barrier",
        others="all_reduce()",
        env={"MPICOMM_DEBUG": "1"},
    )


_KINDS: dict[str, Callable[[random.Random], Way]] = {
    "exception": _known("exception", "exception, while another thread runs"),
    "sys.exit": _sys_exit,
    "os._exit": _os_exit,
    "SIGKILL": _known("SIGKILL"),
    "SIGSTOP": _known("SIGSTOP"),
    "deadlock or mismatch": _standstill,
    "assertion in a thread": _known("failed assertion in a thread"),
    "end of the program": _known("end of the program"),
}
_OF_EACH = 5


def _draw(count: int, seed: int) -> list[Fault]:
    """Return random faults: an equal number of each kind, up to `_OF_EACH`, and the rest of random kinds."""
    rng = random.Random(seed)
    kinds = list(_KINDS) * min(_OF_EACH, count // len(_KINDS))
    kinds += rng.choices(list(_KINDS), k=count - len(kinds))
    rng.shuffle(kinds)
    return [_draw_one(kind, rng) for kind in kinds]


def _draw_one(kind: str, rng: random.Random) -> Fault:
    way = _KINDS[kind](rng)
    program = [rng.choice(_OPERATIONS).format(root=rng.randrange(ways.SIZE)) for _ in range(_MOST_OPERATIONS)]
    moment = rng.randrange(len(program))
    first = [way.others] if way.env else []  # the call that must mismatch
    others = "\n".join([*first, *program[moment:], "all_reduce()", "all_reduce()"])
    return Fault(dataclasses.replace(way, others=others), rng.randrange(ways.SIZE), program[:moment])


def run_random(count: int, seed: int | None, only: int | None) -> int:
    """Run random faults, and return 1 if a job did not end as specified."""
    seed = random.randrange(1_000_000) if seed is None else seed
    _print(f"seed {seed}: {count} faults at {ways.SIZE} ranks on {ways.mpi_of(ways.programs_of(None))}")
    bad: list[int] = []
    for number, fault in enumerate(_draw(count, seed)):
        if only not in (None, number):
            continue
        result = fault.run()
        bad += [number] if result.problems else []
        _print(f"{number:3} {fault}: {_end(result)}, {_named_ranks(result)}: {'; '.join(result.problems) or 'ok'}")
        if result.problems:
            _print("\n".join(f"      {line}" for line in result.stderr.splitlines()))
    _print(f"{len(bad)} violations{f', in {bad}' if bad else ''}; seed {seed}")
    return 1 if bad else 0


def _named_ranks(result: Result) -> str:
    return f"{hang_report.called(result.named)} named" if result.named else "no rank named"


if __name__ == "__main__":
    sys.exit(main())
