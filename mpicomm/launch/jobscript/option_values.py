"""The values of options: what they may look like, since a directive quotes and expands nothing, and what they mean."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Form:
    """What a text must look like."""

    pattern: str
    expected: str

    def check(self, option: str, text: str) -> None:
        """Refuse another text."""
        if not re.fullmatch(self.pattern, text, re.ASCII | re.DOTALL):
            raise ValueError(f"{option} {text!r}: expected {self.expected}")


_WORD = Form(r"\w[\w.+-]*", "letters, digits and _ . + - alone")
_PATH = Form(
    r"[\w./%^][\w./%^+=-]*",
    "letters, digits and _ . / % + = - alone: nothing is quoted or expanded in a directive, not even $HOME and ~",
)
FORMS = {
    "name": Form(r"\w[\w.+-]{0,63}", "at most 64 letters, digits and _ . + -"),
    "partition": _WORD,
    "account": _WORD,
    "project": _WORD,
    "qos": _WORD,
    "constraint": Form(r"[\w\[(][\w&|*,.\[\]()-]*", "features with & | and brackets between them"),
    "output": _PATH,
    "error": _PATH,
    "chdir": Form(r"[^~$\0].*", "the whole path: $HOME and ~ are not expanded"),
    "venv": Form(r"[^~$\0].*", "the whole path: $HOME and ~ are not expanded"),
    "module": Form(r"\w[\w./:+@-]*", "a module, for example openmpi/5.0.5"),
    "env": Form(r"[A-Za-z_]\w*=[^\0]*", "NAME=VALUE"),
    "mail_user": Form(r"\w[\w.+-]*(@\w[\w.-]*)?", "one address"),
    "mem": Form(r"[1-9][0-9]*[KMGT]", "a number with its unit, K, M, G or T: 4G"),
    "mem_per_cpu": Form(r"[1-9][0-9]*[KMGT]", "a number with its unit, K, M, G or T: 4G"),
    "mem_per_gpu": Form(r"[1-9][0-9]*[KMGT]", "a number with its unit, K, M, G or T: 4G"),
    "signal": Form(r"(USR1|USR2|TERM)@[1-9][0-9]{0,4}", "USR1, USR2 or TERM, @ and seconds: USR1@180"),
}

_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-5]?[0-9]))?(?::([0-5]?[0-9]))?")
_ARRAY = re.compile(r"(?P<ranges>[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?(,[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?)*)(%[1-9][0-9]*)?")


def seconds_of(time: str, *, has_days: bool) -> int:
    """Return the seconds in a time.

    Args:
        has_days: Whether the scheduler knows days.
    """
    found = _TIME.fullmatch(time)
    forms = "hours:minutes:seconds (1:00:00)" + ", days-hours:minutes:seconds" * has_days + " or minutes (60)"
    if not found:
        raise ValueError(f"--time {time!r}: expected {forms}")
    days, first, second, third = found.groups()
    if days is None and second is not None and third is None:
        raise ValueError(f"--time {time}: minutes and seconds, or hours and minutes? Expected {forms}")
    hours, minutes = ("0", first) if days is None and second is None else (first, second)
    total = 86400 * int(days or 0) + 3600 * int(hours) + 60 * int(minutes or 0) + int(third or 0)
    if days is not None and not has_days:
        raise ValueError(f"--time {time}: PBS knows no days; the same is --time {clock(total)}")
    if total == 0:
        raise ValueError(f"--time {time}: a job needs some time; expected {forms}")
    return total


def clock(seconds: int) -> str:
    """Return hours:minutes:seconds."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def days_and_clock(seconds: int) -> str:
    """Return a time with its days, where there are any."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{clock(rest)}" if days else clock(rest)


def check_array(array: str) -> None:
    """Refuse what is no array of jobs."""
    found = _ARRAY.fullmatch(array)
    if not found:
        raise ValueError(f"--array {array!r}: expected 0-9, 0-9%2 (two at a time), 0-30:10 or 1,3,5")
    for each in found["ranges"].split(","):
        first, _, last = each.partition(":")[0].partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"--array {array}: {each} ends before it begins")
