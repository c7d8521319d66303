"""`import mpicomm` is all that torch needs to know the back end by its name."""

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


@pytest.mark.parametrize(
    "order", ["import mpicomm, torch", "import torch, mpicomm", "import mpicomm, torch.distributed"]
)
def test_in_whatever_order_the_two_are_imported(order: str) -> None:
    outcome = run_alone(["-c", f"{order}, torch.distributed\n{GROUP}"], timeout=60)
    assert outcome.status == 0, outcome
    assert "ended well" in outcome.stdout


def test_the_import_of_torch_is_watched_for_only_until_it_has_come() -> None:
    code = "import sys, mpicomm; n = len(sys.meta_path); import torch.distributed; assert len(sys.meta_path) == n - 1"
    outcome = run_alone(["-c", code], timeout=60)
    assert outcome.status == 0, outcome
