"""Containers that are separated from the launcher or from each other: the reasons in errors, and MPI's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from mpicomm.job import separation
from mpicomm.launch import containers, detect
from mpicomm.launch.containers import Separation
from mpicomm.launch.mpi_library import Library

OPEN_MPI = Library("Open MPI", "5.0.11")
MPICH = Library("MPICH", "5.0.2", description="MPICH Version: 5.0.2\nconfigure: --with-pm")
IN_APPTAINER = {"APPTAINER_CONTAINER": "/i/a.sif", "SINGULARITY_CONTAINER": "/i/a.sif"}
PMIX = {"PMIX_RANK": "1", "PMIX_VERSION": "5.0.1", "PMIX_SERVER_TMPDIR": "/var/spool/pmix.7"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        (IN_APPTAINER, "Apptainer, a.sif"),
        ({"SINGULARITY_CONTAINER": "/b.sif"}, "Singularity, b.sif"),
        ({"SHIFTER_RUNTIME": "1"}, "Shifter"),
    ],
)
def test_the_container_of_a_process(environ: Mapping[str, str], expected: str) -> None:
    assert containers.running_in(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**SRUN, **PMIX}, []),
        ({**SRUN, **PMIX, **IN_APPTAINER}, ["Apptainer, a.sif", "PMIx 5.0.1", "/var/spool/pmix.7 of the launcher"]),
        ({**SRUN, **IN_APPTAINER}, ["Apptainer, a.sif", "It has no PMI_* or PMIX_* variable"]),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "4", **IN_APPTAINER}, ["must connect to the launcher outside"]),
    ],
)
def test_ranks_that_are_not_connected_name_the_reason(environ: Mapping[str, str], expected: list[str]) -> None:
    problem = detect.problem_after_init(detect.detect(environ), environ, OPEN_MPI, 0, 1, "python train.py")
    assert problem
    assert all(text in problem for text in expected)
    assert ("  container: " in problem) == bool(expected)


def test_another_mpi_in_the_image_is_named_before_mpi_aborts() -> None:
    """The usual cause of N times rank 0; the launcher in the image is not the one to use."""
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", **PMIX, **IN_APPTAINER}
    problem = detect.problem_before_init(detect.detect(environ), environ, MPICH, "python train.py")
    assert problem
    assert "  container: Apptainer, a.sif." in problem
    assert "launcher of MPICH 5.0.2 of the host:\n  mpicomm run -n 4 --container IMAGE python train.py" in problem
    outside = detect.problem_before_init(detect.detect(environ), PMIX, MPICH, "python train.py")
    assert outside
    assert "container" not in outside


SEPARATED = Separation("Apptainer, a.sif", "prterun", has_own_shm=True)


@pytest.mark.parametrize(
    ("separation", "local_size", "is_problem"),
    [
        (SEPARATED, 2, True),
        (SEPARATED, 1, False),
        (dataclasses.replace(SEPARATED, has_own_shm=False, has_own_pids=True, has_own_users=True), 2, False),
    ],
)
def test_ranks_without_common_shared_memory_cannot_form_a_job(
    separation: Separation, local_size: int, is_problem: bool
) -> None:
    problem = separation.problem(local_size)
    assert bool(problem) == is_problem
    assert not problem or "Remove --contain" in problem


@pytest.mark.parametrize(
    ("ancestors", "expected"),
    [
        ([], ("self", "")),
        ([(5, "bash"), (4, "sshd")], ("self", "")),
        ([(5, "sh"), (4, "prterun"), (3, "bash"), (2, "slurmstepd")], (4, "prterun")),
        ([(5, "starter"), (4, "sh"), (3, "slurmstepd")], (4, "slurmstepd")),
        ([(3, "slurmstepd")], ("self", "slurmstepd")),
    ],
)
def test_the_process_outside_the_container(ancestors: list[tuple[int, str]], expected: tuple[int | str, str]) -> None:
    """The step daemon of Slurm is not in the mount namespace that job_container/tmpfs makes for its child."""
    assert separation._launcher(ancestors) == expected


@pytest.mark.parametrize(
    ("separation", "is_problem"),
    [
        (SEPARATED, True),
        (Separation("Apptainer, a.sif"), False),
        (Separation("", "prterun"), False),
        (Separation(), False),
    ],
)
def test_a_launcher_without_variables_in_the_container(separation: Separation, is_problem: bool) -> None:
    assert bool(separation.problem_of_single()) == is_problem


CMA = {"MPIR_CVAR_CH4_CMA_ENABLE": "0"}


@pytest.mark.parametrize(
    ("library", "own_users", "own_pids", "expected"),
    [
        (OPEN_MPI, True, False, {}),
        (OPEN_MPI, False, True, {"OMPI_MCA_btl": "^sm"}),
        (MPICH, True, False, CMA),
        (MPICH, False, True, CMA),
        (MPICH, False, False, {}),
    ],
)
def test_mpi_does_without_the_memory_of_separated_ranks(
    library: Library, own_users: bool, own_pids: bool, expected: Mapping[str, str]
) -> None:
    separation = Separation("Apptainer, a.sif", has_own_users=own_users, has_own_pids=own_pids)
    assert library.separated_environ(separation) == expected
