"""The hosts of `--nnodes` and `--nproc-per-node`, in the first attempt and after the loss of a host."""

from __future__ import annotations

import pytest

from mpicomm.launch import allocation, node_range
from mpicomm.launch.allocation import Host
from mpicomm.launch.node_range import NodeRange, TooFewHostsError
from mpicomm.launch.request import Request

PROGRAM = ("python", "train.py")
HOSTS = tuple(Host(name, 2) for name in "abcd")


@pytest.mark.parametrize(("text", "bounds"), [("4", (4, 4)), ("2:4", (2, 4)), ("1:1", (1, 1))])
def test_a_range_is_parsed(text: str, bounds: tuple[int, int]) -> None:
    parsed = NodeRange.parse(text)
    assert (parsed.least, parsed.most) == bounds


@pytest.mark.parametrize("text", ["", "0", "4:2", "2:", ":4", "a", "2:4:6"])
def test_another_form_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected N or MIN:MAX"):
        NodeRange.parse(text)


@pytest.mark.parametrize(("least", "number"), [(2, 1), (1, 0)])
def test_too_few_hosts_are_an_error(least: int, number: int) -> None:
    with pytest.raises(TooFewHostsError, match="expected at least 2 hosts, got 1" if number else "no host"):
        NodeRange(least).check(number)


@pytest.mark.parametrize("is_step", [False, True])
@pytest.mark.parametrize(("ranks", "selected"), [(8, 2), (8, 4), (7, 2), (3, 4), (1, 1)])
def test_the_first_attempt_has_as_many_ranks_as_requested(ranks: int, selected: int, is_step: bool) -> None:
    hosts = node_range.with_capacity(HOSTS, selected, ranks)
    placed = node_range.place(Request(PROGRAM, ranks), hosts[:selected], is_step=is_step)
    assert placed.ranks == ranks
    assert sum(host.slots or 0 for host in hosts[:selected]) >= ranks


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_lost_host_reduces_the_ranks(left: int) -> None:
    hosts = node_range.with_capacity(HOSTS, len(HOSTS), 2 * len(HOSTS))
    assert node_range.place(Request(PROGRAM, 2 * len(HOSTS)), hosts[:left], is_step=False).ranks == 2 * left


@pytest.mark.parametrize(
    ("hosts", "failed", "left"),
    [
        (["a", "b", "c"], ["b"], ["a", "c"]),
        (["a.cluster", "b.cluster"], ["b"], ["a.cluster"]),
        (["a", "b"], ["b.cluster.example.org"], ["a"]),
        (["Node1", "node2.cluster"], ["node1", "NODE2"], []),
        (["a.x", "a.y", "b.x"], ["a.x"], ["a.y", "b.x"]),
        (["a", "b"], ["other"], ["a", "b"]),
        (["a", "b"], [], ["a", "b"]),
    ],
)
def test_hosts_are_left_out_by_name(hosts: list[str], failed: list[str], left: list[str]) -> None:
    assert [host.name for host in node_range.without([Host(name, 2) for name in hosts], failed)] == left


def test_addresses_are_no_names() -> None:
    hosts = [Host(name) for name in ("a1", "10.0.0.1", "fd00::1", "10.example.org", "1001")]
    assert node_range.addresses(hosts) == ["10.0.0.1", "fd00::1"]


@pytest.mark.parametrize("is_step", [False, True])
def test_a_number_per_node_wins(is_step: bool) -> None:
    placed = node_range.place(Request(PROGRAM), HOSTS[:3], is_step=is_step, per_node=5)
    assert placed.ranks == 3 * 5
    assert placed.ranks_per_node == (5 if is_step else None)


@pytest.mark.parametrize(("ranks", "hosts"), [(6, 4), (8, 4), (2, 4), (0, 4), (3, 1)])
def test_ranks_are_distributed(ranks: int, hosts: int) -> None:
    slots = [host.slots or 0 for host in allocation.distributed("abcd"[:hosts], ranks)]
    assert sum(slots) == ranks
    assert max(slots) - min(slots) <= 1
    assert slots == sorted(slots, reverse=True)
