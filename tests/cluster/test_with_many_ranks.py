"""More ranks than a desktop machine usually runs: they start and communicate.

This module is the last one, because it occupies the whole machine. `make many-ranks` starts 48 ranks.
"""

from __future__ import annotations

import os

from tests.cluster.running import Cluster, Flavour

RANKS = int(os.environ.get("RANKS", "16"))


def test_p2p(cluster: Cluster, open_mpi: Flavour) -> None:
    options = ["-N4", f"-n{RANKS}", "--overcommit", "--mpi=pmix"]
    outcome = cluster.run("srun", *options, open_mpi.python, "-m", "mpicomm.examples.p2p", timeout=300)
    assert outcome.status == 0, outcome
    before = {rank: (rank - 1) % RANKS for rank in range(RANKS)}
    ring = [f"rank {rank}: had {rank}, received {other} from rank {other}" for rank, other in before.items()]
    assert sorted(outcome.stdout.splitlines()[-RANKS:]) == sorted(ring)
