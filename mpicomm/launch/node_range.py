"""Which hosts a launch uses: `--nnodes MIN:MAX`, `--nproc-per-node`, and the hosts that are left after a failure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence

from mpicomm.errors import LaunchError
from mpicomm.launch.allocation import Host
from mpicomm.launch.request import Request

_IPV4 = re.compile(r"\d+(\.\d+){3}")
_RANGE = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?")


@dataclasses.dataclass(frozen=True)
class NodeRange:
    """The number of hosts that a launch may use."""

    least: int = 1
    most: int | None = None
    """None for all hosts."""

    @classmethod
    def parse(cls, text: str) -> NodeRange:
        """Parse `4`, exactly four hosts, or `2:4`.

        Raises:
            ValueError: If the text has another form, or the first number is greater than the second.
        """
        match = _RANGE.fullmatch(text)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"expected N or MIN:MAX, such as 4 or 2:4, got {text}")
        return cls(int(match[1]), int(match[2] or match[1]))

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most or ''}"

    def check(self, number: int) -> None:
        """Check the number of usable hosts.

        Raises:
            TooFewHostsError: If they are too few.
        """
        if number == 0:
            raise TooFewHostsError("no host of the job is left.\nCheck the hosts, or start the job again.")
        if number < self.least:
            raise TooFewHostsError(
                f"--nnodes {self}: expected at least {self.least} hosts, got {number}.\n"
                f"Request more hosts, or pass a lower --nnodes. To run one command on each host, add --node-rank and "
                f"--master-addr."
            )


class TooFewHostsError(LaunchError):
    """Fewer hosts than `--nnodes` requires."""


def with_capacity(hosts: Sequence[Host], selected: int, ranks: int | None) -> tuple[Host, ...]:
    """Return hosts whose slots are enough to start a number of ranks on `selected` of them; None for any number."""
    least = 0 if ranks is None else -(-ranks // selected)
    return tuple(Host(host.name, max(host.slots or 1, least)) for host in hosts)


def without(hosts: Sequence[Host], names: Collection[str]) -> tuple[Host, ...]:
    """Return the hosts except those with these names; a name that is no host's may have another domain."""
    own = {host.name.lower(): host for host in hosts}
    exact = own.keys() & {name.lower() for name in names}
    others = {_without_domain(name) for name in names if name.lower() not in exact}
    return tuple(host for name, host in own.items() if name not in exact and _without_domain(name) not in others)


def addresses(hosts: Sequence[Host]) -> list[str]:
    """Return the hosts that have an address in place of a name."""
    return [host.name for host in hosts if ":" in host.name or _IPV4.fullmatch(host.name)]


def _without_domain(name: str) -> str:
    return name.lower().partition(".")[0]


def place(request: Request, hosts: Sequence[Host], *, is_step: bool, per_node: int | None = None) -> Request:
    """Return the request on these hosts only, with fewer ranks if the hosts have fewer slots.

    Args:
        hosts: Hosts with their slots; empty if all ranks are on this host.
        is_step: Whether srun starts the ranks.
        per_node: Number of ranks on each host; None for the slots of `hosts`.
    """
    if not hosts:
        return dataclasses.replace(request, ranks=per_node or request.ranks)
    placed = tuple(Host(host.name, per_node or host.slots) for host in hosts)
    total = sum(host.slots or 1 for host in placed)
    ranks = total if per_node or request.ranks is None else min(request.ranks, total)
    if is_step:
        names = tuple(host.name for host in placed)
        return dataclasses.replace(request, ranks=ranks, slurm_nodes=names, ranks_per_node=per_node)
    return dataclasses.replace(request, ranks=ranks, hosts=placed)
