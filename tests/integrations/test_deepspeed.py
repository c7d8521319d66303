"""DeepSpeed's ZeRO-1, unchanged, after bootstrap()."""

from __future__ import annotations

import pytest

from tests.integrations.digits import run_example

PACKAGES = ("deepspeed",)
PROGRAM = "tests.integrations.deepspeed_zero"


# mpirun may number the local ranks in another order than the ranks, which DeepSpeed refuses; `mpicomm run` does not.
@pytest.mark.parametrize(
    ("command", "size"), [(f"mpirun -n 2 python -m {PROGRAM}", 2), (f"mpicomm run -n 4 -m {PROGRAM}", 4)]
)
def test_zero_1_learns_and_divides_the_state_of_the_optimizer(run, command, size):
    run_example(run, command, f"ZeRO stage 1 on {size} ranks", timeout=600)
