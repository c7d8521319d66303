"""Ranks in containers of a stand-in for Apptainer, which Slurm starts on several nodes by PMIx and by PMI."""

from __future__ import annotations

from tests import apptainer
from tests.cluster.running import Cluster, Flavour, places
from tests.cluster.test_slurm import PLACE, check_places

NODES = ["-N2", "--ntasks-per-node=2", "--nodelist=node3,node4"]


def test_srun_starts_ranks_in_containers(cluster: Cluster, flavour: Flavour) -> None:
    image, commands = apptainer.make(cluster.folder(), flavour.python.parents[1])
    run = [flavour.python, "-m", "mpicomm", "run", "--container", image, *PLACE]
    outcome = cluster.run("salloc", *NODES, "env", f"PATH={commands}:/usr/bin:/bin", *run)
    assert outcome.status == 0, outcome
    check_places(places(outcome), ["node3", "node3", "node4", "node4"])
    assert f"srun --mpi={flavour.srun_type} " in outcome.stderr, outcome
    assert f" {image} python -m tests.cluster.place" in outcome.stderr, outcome
