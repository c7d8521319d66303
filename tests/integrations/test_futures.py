"""mpi4py.futures on our ranks; tests/examples runs head_worker, with an executor on `world.comm`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import Outcome

PACKAGES = ("mpi4py",)

# `python -m mpi4py.futures` runs the script on rank 0; the other ranks import it, and run its tasks.
SCRIPT = """
import os
from mpi4py.futures import MPIPoolExecutor

def square(number):
    return os.getpid(), number**2

if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        workers, results = executor.num_workers, list(executor.map(square, range(100)))
    assert os.getpid() not in {pid for pid, _ in results}
    print(workers, sum(value for _, value in results))
"""


@pytest.mark.each_mpi
def test_a_script_distributes_tasks_without_bootstrap(run: Callable[..., Outcome], tmp_path: Path) -> None:
    script = tmp_path / "squares.py"
    script.write_text(SCRIPT)
    outcome = run(f"mpicomm run -n 4 -m mpi4py.futures {script}")
    workers, total = map(int, outcome.stdout.split())
    assert workers == 4 - 1
    assert total == sum(number**2 for number in range(100))
