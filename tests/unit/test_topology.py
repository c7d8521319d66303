"""The placement of ranks on nodes, from the node identifier that each rank reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpicomm import topology
from mpicomm.topology import Topology


def everyone(nodes: list[str]) -> list[Topology]:
    hosts = [f"host-{node}" for node in nodes]
    return [topology.from_nodes(rank, nodes, hosts) for rank in range(len(nodes))]


def test_two_nodes_may_have_one_host_name() -> None:
    places = [topology.from_nodes(rank, ["0", "1"], ["localhost", "localhost"]) for rank in range(2)]
    assert [where.node_rank for where in places] == [0, 1]
    assert {where.num_nodes for where in places} == {2}


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_any_placement(nodes: list[str]) -> None:
    places = everyone(nodes)
    seats = {(where.node_rank, where.local_rank) for where in places}
    order = enumerate(dict.fromkeys(nodes))
    assert seats == {(index, assignment) for index, node in order for assignment in range(nodes.count(node))}
    assert len({(where.num_nodes, *where.hosts) for where in places}) == 1, "all agree on the whole"
    for rank, where in enumerate(places):
        assert (where.node_rank, where.num_nodes) == (list(dict.fromkeys(nodes)).index(nodes[rank]), len(set(nodes)))
        assert where.local_rank == nodes[:rank].count(nodes[rank])
        assert where.local_size == nodes.count(nodes[rank])
        assert where.hosts[rank] == where.hostname == f"host-{nodes[rank]}"


@given(st.lists(st.integers(0, 5), max_size=12))
def test_nodes_are_numbered_in_the_order_of_the_ranks(nodes: list[int]) -> None:
    order = topology.node_order(nodes)
    assert list(order.values()) == list(range(len(set(nodes))))
    assert list(order) == sorted(set(nodes), key=nodes.index)
