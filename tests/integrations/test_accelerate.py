"""accelerate, unchanged, after bootstrap()."""

from __future__ import annotations

import re

import pytest

from tests.integrations.digits import run_example

PACKAGES = ("accelerate",)
EXAMPLE = "mpicomm.examples.integrations.accelerate_digits"


@pytest.mark.parametrize(
    ("command", "size"),
    [
        (f"mpirun -n 2 python -m {EXAMPLE}", 2),
        pytest.param(f"mpicomm run -n 4 -m {EXAMPLE}", 4, marks=pytest.mark.make_integrations),
        pytest.param(f"torchrun --nproc-per-node 2 -m {EXAMPLE}", 2, marks=pytest.mark.make_integrations),
    ],
)
def test_a_loop_learns_with_each_launcher(run, command, size):
    run_example(run, command, f"DistributedType.MULTI_CPU on {size} ranks")


@pytest.mark.make_integrations
@pytest.mark.parametrize("size", [2, 4])
def test_the_test_script_of_accelerate_passes(run, size):
    outcome = run(f"mpirun -n {size} python -m tests.integrations.accelerate_script", _parts)
    assert len(re.findall(r"^rank \d of \d has passed$", outcome.stdout, re.MULTILINE)) == size, outcome


def _parts(outcome):
    """Return the parts of the script that ran, and the reasons for which it skipped parts."""
    parts = re.findall(r"^\*\*(.+)\*\*$", outcome.stdout, re.MULTILINE)
    assert {"Initialization", "DataLoader integration test", "Training integration test"} <= set(parts), outcome
    return {"parts": parts, "skipped": sorted(set(re.findall(r"^Skipped because .*$", outcome.stdout, re.MULTILINE)))}
