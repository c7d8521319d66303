"""The cost of `import mpicomm`: it imports no heavy module before it is needed."""

from __future__ import annotations

import pytest

from tests.launching import run_alone

HEAVY = {"torch", "mpi4py", "numpy"}


def imported(code: str) -> set[str]:
    """Return the names of all modules that Python imports to run some code."""
    outcome = run_alone(["-X", "importtime", "-c", code])
    assert outcome.status == 0, outcome
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip() for line in lines}


@pytest.mark.parametrize(
    "code",
    [
        "import mpicomm",
        "import mpicomm; dir(mpicomm); mpicomm.LaunchError",
        "import mpicomm.launch.detect, mpicomm.settings",
    ],
)
def test_neither_torch_nor_mpi_is_imported(code: str) -> None:
    modules = imported(code)
    assert "mpicomm" in modules
    assert not {module.split(".")[0] for module in modules} & HEAVY


def test_the_package_runs_without_docstrings() -> None:
    outcome = run_alone(["-OO", "-c", "import mpicomm.horovod, mpicomm.training.trainer, mpicomm.cli.main"])
    assert outcome.status == 0, outcome


def test_the_door_to_mpi_stays_shut_until_it_is_used() -> None:
    assert "mpi4py" not in {module.split(".")[0] for module in imported("import mpicomm.mpi, mpicomm.job.bootstrap")}
