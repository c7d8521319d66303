"""The Trainer of transformers, unchanged, after bootstrap()."""

from __future__ import annotations

import pytest

from tests.integrations.digits import figures

PACKAGES = ("transformers", "accelerate")
EXAMPLE = "mpicomm.examples.integrations.transformers_digits"


@pytest.mark.parametrize(
    ("command", "size"), [(f"mpirun -n 4 python -m {EXAMPLE}", 4), (f"mpicomm run -n 2 -m {EXAMPLE}", 2)]
)
def test_the_trainer_learns_with_each_launcher(run, command, size):
    outcome = run(command, figures)
    assert f"ParallelMode.DISTRIBUTED on {size} ranks, backend mpicomm\n" in outcome.stdout, outcome
