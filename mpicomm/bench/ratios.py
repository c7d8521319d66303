"""The performance targets of this project: ratios of figures that are measured side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SIZES = {"4 B": 4, "1 KiB": 2**10, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
_HALF = 2**25  # bytes of as many bfloat16 elements as 64 MiB have float32 elements
_RANKS, _STARTED = 2, 4
_PARAMETERS = {"small": "33 k", "middle": "525 k", "large": "8.4 M"}

Results = Mapping[str, Mapping[str, Any]]
"""Results of each of `COMMANDS`, as in its --json file."""

COMMANDS: dict[str, Sequence[str]] = {
    "float32": ("-n", str(_RANKS), "--size", ",".join(map(str, [*_SIZES.values(), _HALF]))),
    "bfloat16": (
        "-n",
        str(_RANKS),
        "--dtype",
        "float32,bfloat16",
        "--backend",
        "mpi",
        "--size",
        f"{_HALF},{2 * _HALF}",
    ),
    "ddp": ("ddp", "-n", str(_RANKS)),
    "fsdp": ("ddp", "-n", str(_RANKS), "--strategy", "fsdp", "--model", "middle"),
    "startup": ("startup", "--ranks", str(_STARTED)),
}
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


def of(results: Results) -> list[Ratio]:
    """Return all ratios."""
    return [*_of_all_reduce(results), *_of_training(results), *_of_starts(results)]


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


_THAN_GLOO = {"4 B": 20.0, "1 KiB": 30.0, "1 MiB": 5.0, "64 MiB": 2.5}
_THAN_MPI = {"16 MiB": 1.2, "64 MiB": 2.0}
_STEPS = {"small": 4.0, "middle": 2.0, "large": 1.5}


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


def _of_starts(results: Results) -> list[Ratio]:
    start = next(each for each in results["startup"]["starts"] if each["way"] == "mpicomm")
    importing = 1e3 * results["startup"]["seconds of `import mpicomm`"]
    return [
        Ratio("import mpicomm, ms", importing, 5, is_least=False),
        Ratio(f"bootstrap() of {_STARTED} ranks after import torch and MPI_Init, ms",
            1e3 * start["steps"]["bootstrap"], 150, is_least=False),
    ]  # fmt: skip


def _in_place(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["in_place"]]


def measure(run: Callable[[Sequence[str]], Mapping[str, Any]]) -> list[Ratio]:
    """Run all measurements, one command after the other.

    Args:
        run: Runs `mpicomm bench` with these arguments, and returns the contents of its --json file.
    """
    return of({name: run(command) for name, command in COMMANDS.items()})
