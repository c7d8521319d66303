"""Compares ratios with the targets in docs/performance.md: `python -m benchmarks.ratios --json F`.

`mpicomm bench` measures both figures of a ratio in alternating rounds, with two ranks on this host and starts of four.
The program takes some minutes; its exit status is 1 if a target is not met.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicomm import job_info
from mpicomm.cli.argument_types import check_writable, count
from mpicomm.reports import result_files

_NOT_MET, _FAILED = 1, 2  # exit statuses
_SIZES = {"4 B": 4, "1 KiB": 2**10, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
_HALF = 2**25  # bytes of as many bfloat16 elements as 64 MiB have float32 elements
_RANKS, _STARTED = 2, 4
_PARAMETERS = {"small": "33 k", "middle": "525 k", "large": "8.4 M"}
_THAN_GLOO = {"4 B": 20.0, "1 KiB": 30.0, "1 MiB": 5.0, "64 MiB": 2.5}
_THAN_MPI = {"16 MiB": 1.2, "64 MiB": 2.0}
_STEPS = {"small": 4.0, "middle": 2.0, "large": 1.5}

Results = Mapping[str, Mapping[str, Any]]
"""Results of each of `COMMANDS`, as in its --json file."""

COMMANDS: dict[str, Sequence[str]] = {
    "float32": ("-n", str(_RANKS), "--size", ",".join(map(str, [*_SIZES.values(), _HALF]))),
    "bfloat16": ("-n", str(_RANKS), "--dtype", "float32,bfloat16", "--backend", "mpi",
        "--size", f"{_HALF},{2 * _HALF}"),
    "ddp": ("ddp", "-n", str(_RANKS)),
    "fsdp": ("ddp", "-n", str(_RANKS), "--strategy", "fsdp", "--model", "middle"),
    "startup": ("startup", "--ranks", str(_STARTED)),
}  # fmt: skip
"""Arguments of `mpicomm bench` for each measurement."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A measured ratio and its target."""

    what: str
    value: float
    target: float
    is_least: bool
    """Whether the target is a lower bound; otherwise it is an upper bound."""

    @property
    def is_met(self) -> bool:
        """Whether the value meets the target."""
        return self.value >= self.target if self.is_least else self.value <= self.target

    def __str__(self) -> str:
        """Return a line of the table."""
        bound = f"{'>=' if self.is_least else '<='} {self.target:g}"
        return f"{self.what:60}  {self.value:8.3g}  {bound:>8}{'' if self.is_met else '  not met'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all ratios, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ratios", description="Compare ratios with their targets."
    )
    parser.add_argument("--rounds", metavar="R", type=count, default=7, help="rounds of each measurement (%(default)s)")
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    try:
        if options.json is not None:
            check_writable(options.json)
        found = measure(lambda command: _result([*command, "--rounds", str(options.rounds)]))
        if options.json is not None:
            _write(found, options.json)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _FAILED
    print(*found, sep="\n")
    return 0 if all(each.is_met for each in found) else _NOT_MET


def measure(run: Callable[[Sequence[str]], Mapping[str, Any]]) -> list[Ratio]:
    """Run all measurements, one command after the other, and return the ratios.

    Args:
        run: Runs `mpicomm bench` with these arguments, and returns the contents of its --json file.
    """
    results = {name: run(command) for name, command in COMMANDS.items()}
    return [*_of_all_reduce(results), *_of_training(results), *_of_startup(results)]


def _of_all_reduce(results: Results) -> list[Ratio]:
    us = {(row["nbytes"], row["backend"]): row["us"] for row in _in_place(results["float32"])}

    def quotient(one: str, other: str, size: str, target: float) -> Ratio:
        name = {"gloo": "Gloo"}.get(one, one)
        value = us[_SIZES[size], one] / us[_SIZES[size], other]
        return Ratio(f"all_reduce of {size}: {name} / mpicomm", value, target, is_least=True)

    narrow = {(row["dtype"], row["nbytes"]): row["us"] for row in _in_place(results["bfloat16"])}
    wrong = sum(row["wrong"] for name in ("float32", "bfloat16") for row in results[name]["rows"])
    return [
        Ratio("all_reduce of 4 B: mpicomm - mpi4py, us", us[4, "mpi"] - us[4, "mpi4py"], 4, is_least=False),
        *(quotient("gloo", "mpi", size, least) for size, least in _THAN_GLOO.items()),
        *(quotient("mpi4py", "mpi", size, least) for size, least in _THAN_MPI.items()),
        Ratio("all_reduce of 16 Mi numbers: bfloat16 / float32",
            narrow["bfloat16", _HALF] / narrow["float32", 2 * _HALF], 0.8, is_least=False),
        Ratio("wrong elements", wrong, 0, is_least=False),
    ]  # fmt: skip


def _of_training(results: Results) -> list[Ratio]:
    ms = {(row["model"], row["strategy"], row["backend"]): row["ms"]
        for name in ("ddp", "fsdp") for row in results[name]["rows"]}  # fmt: skip

    def steps(strategy: str, called: str, model: str, target: float) -> Ratio:
        what = f"step of {called}, {_PARAMETERS[model]} parameters: Gloo / mpicomm"
        return Ratio(what, ms[model, strategy, "gloo"] / ms[model, strategy, "mpi"], target, is_least=True)

    return [
        *(steps("ddp", "DDP", model, least) for model, least in _STEPS.items()),
        steps("fsdp", "FSDP2", "middle", 2.5),
    ]


def _of_startup(results: Results) -> list[Ratio]:
    start = next(each for each in results["startup"]["starts"] if each["way"] == "mpicomm")
    importing = 1e3 * results["startup"]["seconds of `import mpicomm`"]
    return [
        Ratio("import mpicomm, ms", importing, 5, is_least=False),
        Ratio(f"bootstrap() of {_STARTED} ranks after import torch and MPI_Init, ms",
            1e3 * start["steps"]["bootstrap"], 150, is_least=False),
    ]  # fmt: skip


def _in_place(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["in_place"]]


def _result(command: Sequence[str]) -> Mapping[str, Any]:
    """Return the results of a command of `mpicomm bench`.

    Raises:
        CalledProcessError: If the command fails; it has printed the reason.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "found.json"
        program = [sys.executable, "-m", "mpicomm", "bench", *command, "--json", str(path)]
        subprocess.run(program, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        found: Mapping[str, Any] = json.loads(path.read_text())
        return found


def _write(found: Sequence[Ratio], path: Path) -> None:
    command = shlex.join(["python", "-m", "benchmarks.ratios", *sys.argv[1:]])
    whole = job_info.description("ratios, or the unit in the name", command)
    rows = [{**dataclasses.asdict(each), "value": round(each.value, 3)} for each in found]
    result_files.write(path, {**whole, "ratios": rows})


if __name__ == "__main__":
    sys.exit(main())
