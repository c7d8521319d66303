"""`import mpicomm` is sufficient for torch to find the backend by its name."""

from __future__ import annotations

import pytest

from tests.launching import run_alone

GROUP = """
store = torch.distributed.HashStore()
torch.distributed.init_process_group("mpicomm", store=store, rank=0, world_size=1)
tensor = torch.ones(3)
torch.distributed.all_reduce(tensor)
assert torch.distributed.get_backend() == "mpicomm" and tensor.sum() == 3
torch.distributed.destroy_process_group()
print("ended well")
"""


# mpicomm's import hook waits for the import of torch, then removes itself.
MPICOMM_FIRST = """
import sys, mpicomm
finders = len(sys.meta_path)
import torch, torch.distributed
assert len(sys.meta_path) == finders - 1, sys.meta_path
"""


@pytest.mark.parametrize("order", [MPICOMM_FIRST, "import torch, mpicomm"], ids=["mpicomm first", "torch first"])
def test_both_orders_of_import(order: str) -> None:
    outcome = run_alone(f"{order}\n{GROUP}")
    assert outcome.status == 0, outcome
    assert "ended well" in outcome.stdout, outcome
