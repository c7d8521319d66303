"""Options of a job: their help and valid forms, since a directive neither quotes nor expands text, and conversions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from pathlib import PurePath
from typing import Any

from mpicomm.launch.request import VARIABLE_OPTIONS, without_value


@dataclasses.dataclass(frozen=True)
class Form:
    """The valid form of a text."""

    pattern: str
    expected: str

    def check(self, flag: str, text: str) -> None:
        """Raise ValueError if the text has another form."""
        if not re.fullmatch(self.pattern, text, re.ASCII | re.DOTALL):
            shown = without_value(text) if flag in VARIABLE_OPTIONS else text
            raise ValueError(f"{flag} {shown!r}: expected {self.expected}")


WORD = Form(r"\w[\w.+-]*", "only letters, digits and _ . + -")
NAME = Form(r"\w[\w.+-]{0,63}", "at most 64 letters, digits and _ . + -")
FEATURES = Form(r"[\w\[(][\w&|*,.\[\]()-]*", "features, combined with & | and brackets")
FILE = Form(
    r"[\w./%^][\w./%^+=-]*",
    "only letters, digits and _ . / % + = -: directives neither quote nor expand text, not even $HOME and ~",
)
_PATH = (
    "a path without variables and ~, which are not expanded, and without - at its start; let your shell expand it: "
    '"$HOME/x"'
)
DIRECTORY = Form(r"(?!.*\$[A-Za-z_{(])[^~\0-].*", _PATH)
CHDIR = Form(r"(?!.*\$(?!\{?(SLURM_ARRAY_TASK_ID|PBS_ARRAY_INDEX|LSB_JOBINDEX)\b)[A-Za-z_{(])[^~\0-].*", _PATH)
"""A directory in which the index of a job array may stand."""
IMAGE = Form(r"[^~$\0\s-][^$\0\s]*", "an image without spaces, $HOME and ~, which are not expanded")
MODULE = Form(r"\w[\w./:+@-]*", "a module, for example openmpi/5.0.5")
VARIABLE = Form(r"[A-Za-z_]\w*=[^\0]*", "NAME=VALUE")
PASSED_VARIABLE = Form(r"[A-Za-z_]\w*(=[^\0]*)?", "NAME=VALUE, or NAME of a variable that is set in the job")
ADDRESS = Form(r"\w[\w.+-]*(@\w[\w.-]*)?", "one address")
DIRECTIVE = Form(r"[ \t]*[^\s#\0][^\r\n\0]*", "one line, without #SBATCH, #PBS, #BSUB or # flux: at its start")
ARGUMENT = Form(r"[^\0]+", "an argument of the launcher")
MEMORY = Form(r"[1-9][0-9]*[KMGTkmgt]i?[Bb]?", "a number with its unit, K, M, G or T: 4G")
COMMAND = Form(
    rf"{DIRECTIVE.pattern}(?<!\\)", "a command of bash on one line, without # at its start and \\ at its end"
)
UMASK = Form(r"0?[0-7]{3}", "three octal digits: 027")
DEPENDENCY = Form(
    r"(afterok|afternotok|afterany)(:[\wƒ.\[\]-]+)+",
    "afterok, afternotok or afterany, and the IDs of jobs: afterok:123 or afterok:123:124; with 123;west of a named "
    "cluster of Slurm, afterok:123 and --directive=--clusters=west",
)
SIGNAL = Form(r"(USR1|USR2|TERM)@[1-9][0-9]{0,4}", "USR1, USR2 or TERM, @ and seconds: USR1@180")


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of `mpicomm job`."""

    help: str
    metavar: str | None = None
    form: Form | None = None
    least: int | None = None
    choices: tuple[str, ...] | None = None
    alias: str | None = None
    only: tuple[tuple[str, ...], str] | None = None
    """The only schedulers that have it, and the alternative in the others."""

    def check(self, name: str, value: Any, special: Collection[str] = ()) -> None:
        """Raise ValueError if a value is too small, is no choice, or has another form.

        Args:
            name: The option, for messages.
            special: Patterns of texts that are valid in addition to the form.
        """
        if self.least is not None and value < self.least:
            raise ValueError(f"{name} {value}: expected {self.least} or more")
        if self.choices and value is not None:
            check_choice(name, value, self.choices)
        for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
            if self.form and not any(re.fullmatch(pattern, text, re.ASCII) for pattern in special):
                self.form.check(name, text)


def option(
    help_text: str, metavar: str | None = None, form: Form | None = None, *, default: Any = None, **others: Any
) -> Any:
    """Return a field of a dataclass that is an option."""
    return dataclasses.field(default=default, metadata={"option": Option(help_text, metavar, form, **others)})


def declared(job_type: type) -> dict[str, Option]:
    """Return the options of `mpicomm job` that a dataclass declares, by field."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(job_type) if field.metadata}


def check_program(command: Sequence[str], starters: Collection[str], reason: str) -> None:
    """Raise ValueError without a program, or if the command starts the ranks itself.

    Args:
        starters: The commands that start ranks.
        reason: Why it must not, for the message.
    """
    if not command or not command[0]:
        raise ValueError("missing program; append it after two dashes: -- python train.py")
    name = PurePath(command[0]).name
    if name in starters or tuple(command[:2]) == ("mpicomm", "run"):
        raise ValueError(f"{reason}: remove {name} and its options from the command")


def check_choice(name: str, value: str, valid: Collection[str]) -> None:
    """Raise ValueError if a value is not one of the valid ones."""
    if value not in valid:
        raise ValueError(f"{name} {value!r}: expected one of {', '.join(valid)}")


def flag(field: str) -> str:
    """Return the command-line option of a field."""
    return "--" + field.replace("_", "-")


_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-5]?[0-9]))?(?::([0-5]?[0-9]))?")
_ARRAY = re.compile(r"(?P<ranges>[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?(,[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?)*)(%[1-9][0-9]*)?")


def seconds_of(time: str, *, has_days: bool) -> int:
    """Convert a time limit to seconds.

    Args:
        has_days: Whether the scheduler accepts days.

    Raises:
        ValueError: If the text has another form, is ambiguous, or is zero.
    """
    match = _TIME.fullmatch(time)
    forms = "hours:minutes:seconds (1:00:00)" + ", days-hours:minutes:seconds" * has_days + " or minutes (60)"
    if not match:
        raise ValueError(f"--time {time!r}: expected {forms}")
    days, first, second, third = match.groups()
    if days is None and second is not None and third is None:
        raise ValueError(f"--time {time} is ambiguous, minutes:seconds or hours:minutes; expected {forms}")
    hours, minutes = ("0", first) if days is None and second is None else (first, second)
    total = 86400 * int(days or 0) + 3600 * int(hours) + 60 * int(minutes or 0) + int(third or 0)
    if days is not None and not has_days:
        raise ValueError(f"--time {time}: only Slurm accepts days; use --time {clock(total)}")
    if total == 0:
        raise ValueError(f"--time {time} must be positive; expected {forms}")
    return total


def clock(seconds: int, *, has_days: bool = False) -> str:
    """Format seconds as hours:minutes:seconds, or days-hours:minutes:seconds if they may be days and are."""
    if has_days and seconds >= 86400:
        return f"{seconds // 86400}-{clock(seconds % 86400)}"
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def memory(text: str) -> str:
    """Return 64G for 64Gi, 64GB and the like: all schedulers count in powers of 1024."""
    return re.sub("[Bb]|i", "", text).upper()


def check_array(array: str) -> None:
    """Raise ValueError if the text is not a valid job array."""
    match = _ARRAY.fullmatch(array)
    if not match:
        raise ValueError(f"--array {array!r}: expected 0-9, 0-9%2 (two at a time), 0-30:10 or 1,3,5")
    for indices in match["ranges"].split(","):
        first, _, last = indices.partition(":")[0].partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"--array {array}: the range {indices} ends before it begins")


def program_name(command: Sequence[str]) -> str:
    """Return the name of a program: `train` for `python train.py`, `ddp` for `python -m mpicomm.examples.ddp`."""
    first, second = (*command, "", "")[1:3]
    if first == "-m" and re.match("python|torchrun", PurePath(command[0]).name):
        return second.rpartition(".")[2]
    return next((PurePath(word).stem for word in command if word.endswith(".py")), PurePath(command[0]).name)
