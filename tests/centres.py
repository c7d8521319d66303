"""The example job of each centre's page, in centres.json, and the meaning of its directives and options.

A placeholder such as <project> has a name there, `PROJECT`. `launch` is the launcher and its options, without the
program; `job` are the arguments of `mpicomm job SCHEDULER` that write the same job.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from unittest import mock

# The short and the long name of an option in sbatch(1) and srun(1).
SLURM_LONG = {
    "-A": "--account",
    "-C": "--constraint",
    "-J": "--job-name",
    "-N": "--nodes",
    "-c": "--cpus-per-task",
    "-e": "--error",
    "-l": "--label",
    "-n": "--ntasks",
    "-o": "--output",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
    "-u": "--unbuffered",
}
_FLAGS = ("--label", "--unbuffered", "--disable-dcgm")  # without a value
_SHORT_FLAGS = "lu"
_TIMES = ("--time", "-l walltime")


@dataclasses.dataclass(frozen=True)
class Centre:
    """The example of one page."""

    system: str
    scheduler: str
    page: str
    source: str
    date: str
    directives: tuple[str, ...]
    launch: str
    job: str
    run_on: str
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """The arguments of `mpicomm`, with the variables of the page expanded as a shell does."""
        with mock.patch.dict(os.environ, self.variables):
            return ["job", self.scheduler, *shlex.split(os.path.expandvars(self.job))]

    @property
    def launch_options(self) -> dict[str, str]:
        """The options of the launch line by name, with their values."""
        with mock.patch.dict(os.environ, self.variables):
            return of_slurm(shlex.split(os.path.expandvars(self.launch))[1:])


def _read() -> list[Centre]:
    entries = json.loads(Path(__file__).with_suffix(".json").read_text())
    return [Centre(**{**entry, "directives": tuple(entry["directives"])}) for entry in entries]


def of_slurm(words: Iterable[str]) -> dict[str, str]:
    """Return the options among words by their long name. The last value of an option counts, as in getopt_long(3)."""
    options: dict[str, str] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        while (flags := re.fullmatch(f"-([{_SHORT_FLAGS}])([{_SHORT_FLAGS}]+)", word)) is not None:
            options[SLURM_LONG[f"-{flags[1]}"]] = ""
            word = f"-{flags[2]}"
        if not word.startswith("--") and len(word) > 2:  # -N2
            left.insert(0, word[2:])
            word = word[:2]
        name, has_value, value = word.partition("=")
        name = SLURM_LONG.get(name, name)
        takes_next = not has_value and name not in _FLAGS and left
        options[name] = _meaning(name, left.pop(0) if takes_next else value)
    return options


def of_pbs(directives: Iterable[str]) -> dict[str, str]:
    """Return the options of directives. OpenPBS 23 uses the first value of a resource, the last of another option."""
    options: dict[str, str] = {}
    for letter, text in (directive.split(" ", 1) for directive in directives):
        if letter != "-l":
            options[letter] = text
            continue
        name, _, value = text.partition("=")
        options.setdefault(f"-l {name}", _meaning(f"-l {name}", value))
    return options


def effective(scheduler: str, directives: Iterable[str]) -> dict[str, str]:
    """Return the options that the scheduler takes from the directives of a script."""
    if scheduler == "pbs":
        return of_pbs(directives)
    return of_slurm([word for directive in directives for word in shlex.split(directive)])


def _meaning(name: str, value: str) -> str:
    """Return the value, and of a time its seconds: 1:00:00 and 01:00:00 are equal in both schedulers."""
    if name not in _TIMES:
        return value
    hours, minutes, seconds = map(int, value.split(":"))
    return str(3600 * hours + 60 * minutes + seconds)


CENTRES = _read()
