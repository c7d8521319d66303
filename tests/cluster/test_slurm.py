"""Every method by which Slurm starts ranks, on several nodes."""

from __future__ import annotations

import re
from typing import Any

from tests.cluster.running import Cluster, Flavour, places, quoted

PLACE = ("-m", "tests.cluster.place")


def check_places(found: list[dict[str, Any]], hosts: list[str]) -> None:
    """Check that one rank runs on each of these hosts, in this order, and reports the correct place."""
    order = list(dict.fromkeys(hosts))
    for rank, (place, host) in enumerate(zip(found, hosts, strict=True)):
        expected = {
            "rank": rank,
            "size": len(hosts),
            "local_rank": hosts[:rank].count(host),
            "local_size": hosts.count(host),
            "node_rank": order.index(host),
            "num_nodes": len(order),
            "hostname": host,
            "hosts": hosts,
            "sum_of_ranks": sum(range(len(hosts))),
        }
        assert {key: place[key] for key in expected} == expected


def test_without_pmi_an_error_names_the_right_command(cluster: Cluster, flavour: Flavour) -> None:
    outcome = cluster.run("srun", "-N2", "-n2", "--mpi=none", flavour.python, *PLACE)
    assert outcome.status != 0, outcome
    assert not places(outcome), outcome
    assert "srun started 2 tasks, but MPI reports rank 0 of 1 in this one" in outcome.stderr, outcome
    remedy = re.search(r"^  (srun --mpi=.*)$", outcome.stderr, re.MULTILINE)
    assert remedy is not None, outcome
    assert remedy[1] == f"srun --mpi={flavour.srun_type} python -m tests.cluster.place"
    assert flavour.srun_type in cluster.shell("srun --mpi=list 2>&1").stdout.split()


def test_in_an_allocation(cluster: Cluster, flavour: Flavour) -> None:
    """In one allocation: a step with all of its tasks, then mpirun, which detects the nodes by itself."""
    steps = [
        ["srun", f"--mpi={flavour.srun_type}", flavour.python, *PLACE, "1-all"],
        [*flavour.mpiexec, "-n", 4, flavour.python, *PLACE, "2-mpirun"],
    ]
    script = "set -e; " + "; ".join(quoted(*step) for step in steps)
    options = ["-N2", "--ntasks-per-node=2", "--nodelist=node3,node4"]
    outcome = cluster.run("salloc", *options, "bash", "-c", script)
    assert outcome.status == 0, outcome
    found = places(outcome)
    both = ["node3", "node3", "node4", "node4"]
    check_places(found[:4], both)
    assert {place["launcher"] for place in found[:4]} == {f"srun --mpi={flavour.srun_type}"}
    assert {place["backend"] for place in found} == {"mpi"}
    assert {place["master_addr"] for place in found[:4]} == {cluster.layout.address("node3")}
    check_places(found[4:], both)


def test_heterogeneous_step(cluster: Cluster, flavour: Flavour) -> None:
    part = [f"--mpi={flavour.srun_type}", flavour.python, *PLACE]
    outcome = cluster.run("srun", "-N1", "-n1", *part, ":", "-N1", "-n2", *part)
    assert outcome.status == 0, outcome
    found = places(outcome)
    first, second = (found[rank]["hostname"] for rank in (0, 1))
    assert first != second
    check_places(found, [first, second, second])


def test_two_steps_at_once(cluster: Cluster, open_mpi: Flavour) -> None:
    """Each step uses only a part of the job's allocation."""
    step = quoted("srun", "--exact", "-N1", "-n2", "--mpi=pmix", open_mpi.python, *PLACE)
    folder = cluster.submit("two.sh", "-N2", "--ntasks-per-node=2", lines=f"{step} a &\n{step} b &\nwait")
    text = cluster.finish(folder)
    found = places(text)
    assert [place["label"] for place in found] == ["a", "a", "b", "b"], text
    hosts = [found[index]["hostname"] for index in (0, 2)]
    check_places(found[:2], [hosts[0]] * 2)
    check_places(found[2:], [hosts[1]] * 2)


def test_array_job(cluster: Cluster, mpich: Flavour) -> None:
    step = quoted("srun", "--mpi=pmi2", mpich.python, *PLACE)
    folder = cluster.submit("array.sh", "--array=1-2", "-n2", "-N1", lines=f"{step} $SLURM_ARRAY_TASK_ID")
    text = cluster.finish(folder)
    found = places(text)
    assert [place["label"] for place in found] == ["1", "1", "2", "2"], text
    for pair in (found[:2], found[2:]):
        check_places(pair, [pair[0]["hostname"]] * 2)


def test_python_in_a_batch_script_is_a_world_of_one(cluster: Cluster, open_mpi: Flavour) -> None:
    folder = cluster.submit("alone.sh", "-N2", "-n2", lines=quoted(open_mpi.python, *PLACE))
    text = cluster.finish(folder)
    check_places(places(text), ["node1"])
    assert "this Slurm job has 2 tasks, but this process was started without srun" in text


def test_torchrun_on_every_node(cluster: Cluster, open_mpi: Flavour) -> None:
    torchrun = [open_mpi.python, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400", "--rdzv-id=17"]
    options = ["-N2", "--ntasks-per-node=1", "--nodelist=node1,node2"]
    outcome = cluster.run("srun", *options, *torchrun, *PLACE)
    assert outcome.status == 0, outcome
    found = places(outcome)
    first, second = (found[rank]["hostname"] for rank in (0, 2))  # the rendezvous determines which node is first
    assert {first, second} == {"node1", "node2"}
    check_places(found, [first, first, second, second])
    assert {(place["launcher"], place["backend"], place["has_mpi"]) for place in found} == {("torchrun", "gloo", False)}
