"""Hosts and their numbers of ranks: `--hosts`, and host files in the formats of Open MPI, MPICH and PBS."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from mpicomm.errors import LaunchError

_OPTION = re.compile(r"(?P<name>[^\s,:]+)(:(?P<slots>[1-9]\d*))?")
_LINE = re.compile(r"(?P<name>[^\s:]+)(:(?P<hydra>[1-9]\d*))?(?P<rest>(\s+\S+)*)")
_SLOTS = re.compile(r"\bslots\s*=\s*([1-9]\d*)\b")


@dataclasses.dataclass(frozen=True)
class Host:
    """A host and its number of ranks (slots); None if not specified."""

    name: str
    slots: int | None = None

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


def of_option(text: str) -> tuple[Host, ...]:
    """Parse `a:4,b:4` or `a,b`.

    Raises:
        LaunchError: If the text has another form.
    """
    matches = [_OPTION.fullmatch(each) for each in text.split(",")]
    if not all(matches):
        raise LaunchError(f"--hosts {text}: expected names with the number of ranks on each, as in --hosts a:4,b:4")
    return _merged([(match["name"], match["slots"]) for match in matches if match])


def of_file(text: str, path: str) -> tuple[Host, ...]:
    """Parse a host file with one host per line: `a slots=4` (Open MPI), `a:4` (MPICH), or `a` once for each rank (PBS).

    Args:
        text: The contents of the file.
        path: The name of the file, for messages.

    Raises:
        LaunchError: If a line has another form, or if the file has no host.
    """
    found: list[tuple[str, str | None]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        slots = _SLOTS.search(words)
        if match is None or (match["rest"].strip() and "=" not in match["rest"]):
            raise LaunchError(f"{path}, line {number}: expected `host slots=4` or `host:4`, got {line.strip()!r}")
        found.append((match["name"], slots[1] if slots else match["hydra"]))
    if not found:
        raise LaunchError(f"{path} names no host; expected lines like `host slots=4` or `host:4`")
    return _merged(found)


def _merged(found: Sequence[tuple[str, str | None]]) -> tuple[Host, ...]:
    """Merge repeated hosts: a host that is named n times gets n ranks, or the sum of its numbers."""
    sums: dict[str, int] = {}
    for name, slots in found:
        sums[name] = sums.get(name, 0) + int(slots or 1)
    if all(slots is None for _, slots in found) and len(sums) == len(found):
        return tuple(Host(name) for name in sums)
    return tuple(Host(name, slots) for name, slots in sums.items())


def with_slots(hosts: Sequence[Host], ranks: int | None) -> tuple[Host, ...]:
    """Return the hosts with their slots; hosts without a number get an equal share of the ranks, or 1."""
    share = 1 if ranks is None else -(-ranks // len(hosts))
    return tuple(Host(host.name, host.slots or share) for host in hosts)


def slots(hosts: Sequence[Host]) -> int:
    """Return the total number of slots."""
    return sum(host.slots or 1 for host in hosts)
