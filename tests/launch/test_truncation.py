"""A message that is larger than the tensor that receives it."""

from __future__ import annotations

import pytest

from tests.launching import run_ranks

# The received tensor is the beginning of a larger one, which has what MPI writes beyond its end.
SCRIPT = """
import torch
import torch.distributed as dist
import mpicomm

world = mpicomm.bootstrap()
whole = torch.zeros(30000)
if world.rank == 0:
    dist.isend(torch.ones(20000), 1).wait()
else:
    try:
        dist.irecv(whole[:3], 0).wait()
    except RuntimeError as error:
        print(f"{error}\\n{whole[3:].count_nonzero().item()} elements beyond the end")
dist.barrier()
"""


@pytest.mark.each_mpi
def test_debug_mode_keeps_mpi_from_writing_beyond_the_end_of_a_tensor() -> None:
    outcome = run_ranks(2, SCRIPT, env={"MPICOMM_DEBUG": "1"})
    assert outcome.status == 0, outcome
    assert "recv of float32[3] failed: " in outcome.stdout, outcome
    assert "\n0 elements beyond the end\n" in outcome.stdout, outcome
