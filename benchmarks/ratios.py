"""Compares ratios with the targets in benchmarks/README.md: `python -m benchmarks.ratios --json F`.

Each ratio compares figures that were measured in alternating rounds of one run, with two ranks on this host or starts
of four. Every command runs several times, and the fastest time of each case counts: on a virtual machine, a whole job
may be slow (`benchmarks.steadiness`). The program takes about 12 minutes; its exit status is 1 if a target is not met.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicomm import job_info
from mpicomm.cli.argument_types import check_writable, count
from mpicomm.reports import result_files

_NOT_MET, _FAILED = 1, 2  # exit statuses
_SMALL = (4, 2**10)
_SIZES = {"4 B": 4, "1 KiB": 2**10, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
_HALF = 2**25  # bytes of as many bfloat16 elements as 64 MiB have float32 elements
_RANKS, _STARTED = 2, 4
_STRATEGIES = {"ddp": "DDP", "fsdp": "FSDP2"}
_PARAMETERS = {"small": "33 k", "middle": "525 k"}
_THAN_GLOO = {"4 B": 20.0, "1 KiB": 30.0, "1 MiB": 5.0, "64 MiB": 2.5}
_OVER_COMPUTATION = {"ddp": {"small": 1.15, "middle": 1.3}, "fsdp": {"small": 1.12, "middle": 1.25}}
_AVERAGE, _ASYNCHRONOUS = "_avg", "mpi-async"
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_OTHERS = ("broadcast", "all_gather", "all_to_all", "gather", "scatter")
_EVERY = (*_REDUCTIONS, *_OTHERS, "sendrecv")
_ADDED_US = 2.0

Results = Mapping[str, Mapping[str, Any]]
"""Results of each of `COMMANDS`, as in its --json file."""
Rows = Iterable[Mapping[str, Any]]

_BENCH = ("mpicomm", "bench", "-n", str(_RANKS))
_RUN = ("mpicomm", "run", "-n", str(_RANKS), "-m")
COMMANDS: dict[str, Sequence[str]] = {
    "microseconds": (*_RUN, "benchmarks.microseconds"),
    "small": (*_BENCH, "--op", "all", "--dtype", "float32,bfloat16", "--size", ",".join(map(str, _SMALL)),
        "--backend", "mpi,mpi4py", "--reuse-inputs"),
    "large": (*_BENCH, "--op", ",".join(_EVERY), "--size", "1Mi,16Mi,64Mi", "--backend", "mpi,mpi4py"),
    "all_reduce": (*_BENCH, "--size", ",".join(map(str, _SIZES.values())), "--backend", "mpi,gloo"),
    "bfloat16": (*_BENCH, "--dtype", "float32,bfloat16", "--backend", "mpi", "--size", f"{_HALF},{2 * _HALF}"),
    "steps": ("mpicomm", "bench", "ddp", "-n", str(_RANKS), "--model", "small,middle", "--strategy", "ddp,fsdp"),
    "decode": ("mpicomm", "bench", "decode", "-n", str(_RANKS), "--model", "small"),
    "gil": (*_RUN, "benchmarks.gil"),
    "startup": ("benchmarks.startup", "--ranks", str(_STARTED)),
}  # fmt: skip
"""The module of each measurement, and its arguments."""

WITH_DEEPSPEED: dict[str, Sequence[str]] = {
    "deepspeed": (*_RUN, "benchmarks.deepspeed_all_reduce"),
}
"""The same, where DeepSpeed is installed."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A measured ratio and its target."""

    what: str
    value: float
    target: float
    is_least: bool
    """Whether the target is a lower bound; otherwise it is an upper bound."""
    where: str = ""
    """The operation and size with the worst of several values."""

    @property
    def is_met(self) -> bool:
        """Whether the value meets the target."""
        return self.value >= self.target if self.is_least else self.value <= self.target

    def __str__(self) -> str:
        """Return a line of the table."""
        bound = f"{'>=' if self.is_least else '<='} {self.target:g}"
        return f"{self.what:70}  {self.value:8.3g}  {bound:>8}  {'met' if self.is_met else 'not met':7}  {self.where}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all ratios, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ratios", description="Compare ratios with their targets."
    )
    parser.add_argument("--rounds", metavar="R", type=count, default=7, help="rounds of each measurement (%(default)s)")
    parser.add_argument("--jobs", metavar="J", type=count, default=3, help="runs of each command (%(default)s)")
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    try:
        if options.json is not None:
            check_writable(options.json)
        found = measure(
            lambda command: fastest(
                [_result([*command, "--rounds", str(options.rounds)]) for _ in range(options.jobs)]
            ),
            with_deepspeed=importlib.util.find_spec("deepspeed") is not None,
        )
        if options.json is not None:
            _write(found, options.json)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _FAILED
    print(*found, sep="\n")
    return 0 if all(each.is_met for each in found) else _NOT_MET


def measure(run: Callable[[Sequence[str]], Mapping[str, Any]], *, with_deepspeed: bool = False) -> list[Ratio]:
    """Run all measurements, one command after the other, and return the ratios.

    Args:
        run: Runs a module with its arguments, and returns the contents of its --json file.
        with_deepspeed: Whether DeepSpeed's all_reduce can be measured.
    """
    commands = {**COMMANDS, **(WITH_DEEPSPEED if with_deepspeed else {})}
    results = {name: run(command) for name, command in commands.items()}
    return [
        *_of_small_operations(results),
        *_of_large_operations(results),
        *_of_all_reduce(results),
        *_of_inference(results),
        *_of_training(results),
        *_of_gil(results),
        *_of_startup(results),
    ]


def fastest(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the results of one run of a command, with the best row of all runs for each case.

    Args:
        results: The results of the same command; those without rows are the first run's.
    """

    def best(key: str, choose: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]) -> Mapping[str, Any]:
        return {key: [choose(each) for each in zip(*(result[key] for result in results), strict=True)]}

    found = dict(results[0])
    if "rows" in found:
        found |= best("rows", _fastest_row)
    if "operations" in found:
        found |= best("operations", lambda rows: min(rows, key=lambda row: row["added"]))
    return found


def _fastest_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    time = next(name for name in ("us", "ms", "us_per_token") if name in rows[0])
    row = min(rows, key=lambda each: float(each[time]))
    return {**row, "wrong": sum(each["wrong"] or 0 for each in rows)} if "wrong" in row else row


def _of_small_operations(results: Results) -> list[Ratio]:
    rows = results["microseconds"]["operations"]

    def added(nbytes: Sequence[int], *, messages: bool) -> Iterable[tuple[float, str]]:
        """Yield the time in addition to mpi4py's and torch's part."""
        for row in rows:
            if row["bytes"] in nbytes and (row["operation"] == "sendrecv") is messages:
                yield row["added"], f"{row['operation']}, {row['bytes']} B"

    waits = ((row[_ASYNCHRONOUS], f"{row['operation']}, {row['bytes']} B")
        for row in rows if row["bytes"] in _SMALL and _ASYNCHRONOUS in row)  # fmt: skip
    slow = ((row["mpi"] / max(1.2 * row["mpi4py"], row["mpi4py"] + row["none"] + _ADDED_US), row["operation"])
        for row in rows if row["bytes"] == 2**16)  # fmt: skip
    what = "of 4 B and 1 KiB, the worst: mpicomm - mpi4py - torch, us"
    return [
        _most(f"collectives {what}", added(_SMALL, messages=False), _ADDED_US),
        _most(f"send and receive {what}", added(_SMALL, messages=True), 2 * _ADDED_US),
        _most("asynchronous operations of 4 B and 1 KiB, the worst, us", waits, 20),
        _most("64 KiB, the worst: mpicomm / max(1.2 mpi4py, mpi4py + torch + 2 us)", slow, 1),
        *_of_averages(results),
    ]


def _of_averages(results: Results) -> list[Ratio]:
    us = _microseconds(results["small"]["rows"])

    def added(dtype: str, *names: str) -> Iterable[tuple[float, str]]:
        """Yield the time in addition to mpi4py's for a sum in float32, as MPI has no averages and no bfloat16."""
        for (name, of_type, in_place, nbytes, backend), each in us.items():
            alone = us.get((name.removesuffix(_AVERAGE), "float32", in_place, nbytes, "mpi4py"))
            if (backend, of_type) == ("mpi", dtype) and name in names and alone is not None:
                yield each - alone, f"{name}, {_place(in_place)}, {nbytes} B"

    names = dict.fromkeys(name for name, *_ in us)
    what = "of 4 B and 1 KiB, the worst: mpicomm - mpi4py, us"
    return [
        _most(f"averages {what}", added("float32", *(name for name in names if name.endswith(_AVERAGE))), 9),
        _most(f"operations in bfloat16 {what}", added("bfloat16", *names), 9),
    ]


def _of_large_operations(results: Results) -> list[Ratio]:
    us = _microseconds(results["large"]["rows"])

    def slowdowns(nbytes: int, *names: str) -> Iterable[tuple[float, str]]:
        """Yield the time divided by mpi4py's."""
        for (name, dtype, in_place, of_size, backend), each in us.items():
            alone = us.get((name, dtype, in_place, of_size, "mpi4py"))
            if backend == "mpi" and name in names and of_size == nbytes and alone is not None:
                yield each / alone, f"{name}, {_place(in_place)}"

    quotient = "mpicomm / mpi4py"
    return [
        _most(f"1 MiB, reductions, broadcast and all_gather, the worst: {quotient}",
            slowdowns(2**20, *_REDUCTIONS, "broadcast", "all_gather"), 1.0),
        _most(f"1 MiB, gather, scatter, all_to_all and messages, the worst: {quotient}",
            slowdowns(2**20, "gather", "scatter", "all_to_all", "sendrecv"), 1.3),
        _most(f"16 MiB, the worst reduction: {quotient}", slowdowns(2**24, *_REDUCTIONS), 0.8),
        _most(f"16 MiB, the worst of the others: {quotient}", slowdowns(2**24, *_OTHERS), 1.03),
        _most(f"64 MiB, the worst reduction: {quotient}", slowdowns(2**26, *_REDUCTIONS), 0.4),
    ]  # fmt: skip


def _of_all_reduce(results: Results) -> list[Ratio]:
    us = {(row["nbytes"], row["backend"]): row["us"] for row in results["all_reduce"]["rows"]}
    narrow = {(row["dtype"], row["nbytes"]): row["us"] for row in results["bfloat16"]["rows"]}
    wrong = sum(row.get("wrong") or 0 for result in results.values() for row in result.get("rows", ()))
    than_gloo = [
        Ratio(f"all_reduce of {size}: Gloo / mpicomm", us[_SIZES[size], "gloo"] / us[_SIZES[size], "mpi"], target, True)
        for size, target in _THAN_GLOO.items()
    ]
    quotient = narrow["bfloat16", _HALF] / narrow["float32", 2 * _HALF]
    return [
        *than_gloo,
        Ratio("all_reduce of 16 Mi numbers: bfloat16 / float32", quotient, 0.8, is_least=False),
        Ratio("wrong elements", wrong, 0, is_least=False),
    ]


def _of_inference(results: Results) -> list[Ratio]:
    tokens = {row["backend"]: row["tokens_per_s"] for row in results["decode"]["rows"]}
    decoding = [
        Ratio("decoding, tokens per second: mpicomm / Gloo", tokens["mpi"] / tokens["gloo"], 1.5, is_least=True),
        Ratio("decoding, the same: mpicomm / no communication", tokens["mpi"] / tokens["none"], 0.95, is_least=True),
    ]
    if "deepspeed" not in results:
        return decoding
    us = {(row["nbytes"], row["backend"]): row["us"] for row in results["deepspeed"]["rows"]}
    slowdowns = ((each / us[nbytes, "deepspeed"], f"{nbytes} B")
        for (nbytes, backend), each in us.items() if backend == "mpi")  # fmt: skip
    return [_most("all_reduce of 8 to 256 KiB, the worst: mpicomm / DeepSpeed", slowdowns, 1.3), *decoding]


def _of_training(results: Results) -> list[Ratio]:
    ms = {(row["strategy"], row["model"], row["backend"]): row["ms"] for row in results["steps"]["rows"]}
    return [
        Ratio(f"step of {_STRATEGIES[strategy]}, {_PARAMETERS[model]} parameters: mpicomm / no communication",
            ms[strategy, model, "mpi"] / ms[strategy, model, "none"], target, is_least=False)
        for strategy, targets in _OVER_COMPUTATION.items()
        for model, target in targets.items()
    ]  # fmt: skip


def _of_gil(results: Results) -> list[Ratio]:
    longer = results["gil"]["milliseconds"]["mpicomm"]["longer"]
    return [Ratio("all_reduce of 16 MiB, ms longer beside a Python loop on another rank", longer, 1, is_least=False)]


def _of_startup(results: Results) -> list[Ratio]:
    start = next(each for each in results["startup"]["starts"] if each["way"] == "mpicomm")
    importing = 1e3 * results["startup"]["seconds of `import mpicomm`"]
    return [
        Ratio("import mpicomm, ms", importing, 5, is_least=False),
        Ratio(f"bootstrap() of {_STARTED} ranks after import torch and MPI_Init, ms",
            1e3 * start["steps"]["bootstrap"], 150, is_least=False),
    ]  # fmt: skip


def _microseconds(rows: Rows) -> dict[tuple[str, str, bool, int, str], float]:
    return {(row["operation"], row["dtype"], row["in_place"], row["nbytes"], row["backend"]): row["us"] for row in rows}


def _most(what: str, values: Iterable[tuple[float, str]], target: float) -> Ratio:
    """Return the largest value, which must not exceed the target."""
    value, where = max(values)
    return Ratio(what, value, target, is_least=False, where=where)


def _place(in_place: bool) -> str:
    return "in place" if in_place else "out of place"


def _result(command: Sequence[str]) -> Mapping[str, Any]:
    """Return the results of a module with its arguments.

    Raises:
        CalledProcessError: If the command fails; it has printed the reason.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "found.json"
        program = [sys.executable, "-m", *command, "--json", str(path)]
        subprocess.run(program, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        found: Mapping[str, Any] = json.loads(path.read_text())
        return found


def _write(found: Sequence[Ratio], path: Path) -> None:
    command = shlex.join(["python", "-m", "benchmarks.ratios", *sys.argv[1:]])
    whole = job_info.description("ratios, or the unit in the name", command)
    rows = [{**dataclasses.asdict(each), "value": round(each.value, 3), "is_met": each.is_met} for each in found]
    result_files.write(path, {**whole, "ratios": rows})


if __name__ == "__main__":
    sys.exit(main())
