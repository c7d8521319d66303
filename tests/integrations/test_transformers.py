"""The Trainer of transformers, unchanged, after bootstrap()."""

from __future__ import annotations

import pytest

from tests.integrations.digits import run_example

PACKAGES = ("transformers", "accelerate")
EXAMPLE = "mpicomm.examples.integrations.transformers_digits"


@pytest.mark.parametrize(
    ("command", "size"), [(f"mpirun -n 4 python -m {EXAMPLE}", 4), (f"mpicomm run -n 2 -m {EXAMPLE}", 2)]
)
def test_the_trainer_learns_with_each_launcher(run, command, size):
    run_example(run, command, f"ParallelMode.DISTRIBUTED on {size} ranks")
