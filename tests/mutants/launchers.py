"""Faults in the choice of the launcher, and in the commands for PALS and ibrun."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LINES = "tests/unit/test_selection.py -k test_the_launch_command"
_ERRORS = "tests/unit/test_selection.py -k test_a_launcher_that_cannot"

MUTANTS = [
    # -- PALS -----------------------------------------------------------------------------------------------
    Mutant(
        "Library.launchers",
        old="return (PALS, own)",
        new="return (own, PALS)",
        fault="MPICH's mpiexec of a conda environment, which comes first in PATH, starts ranks of Cray MPICH.",
        tests=_LINES,
    ),
    Mutant(
        "launch.mpi_library",
        old='"--no-abort-on-failure"',
        new='""',
        fault="When the first rank exits with status 85, PALS ends the others, and the status is lost.",
        tests="tests/launch/test_pals.py -k status_is_kept",
    ),
    Mutant(
        "commands.mpiexec",
        old="{**mpi.default_environ, **ranks_environ}",
        new="{**ranks_environ, **mpi.default_environ}",
        fault="The user's PALS_PMI is replaced.",
        tests=_LINES,
    ),
    Mutant(
        "commands._host_options",
        old='re.search("{slots}|{per_node}", template)',
        new='"{slots}" in template',
        fault="PALS distributes the ranks in another way than the hosts of the user have slots.",
        tests="tests/unit/test_selection.py -k 'test_a_launcher_that_cannot or different_numbers'",
    ),
    Mutant(
        "launch.known_launchers",
        old='("PALS_APID", "PALS_APINFO", "PALS_SPOOL_DIR")',
        new='("PALS_*",)',
        fault="The PALS_PMI that a site's module sets is removed: no rank of its MPI joins the world.",
        tests="tests/unit/test_launch_commands.py -k test_variables_of_another_job",
    ),
    Mutant(
        "detect._remedy",
        old="library.pals_pmi and any(claim.launcher is PALS for claim in launch.claims)",
        new="False",
        fault="The remedy for a wrong wire-up of PALS is the command that the user has typed.",
        tests="tests/unit/test_detect.py -k test_pals_with_the_wrong_wire_up",
    ),
    Mutant(
        "launch.detect",
        old="(PALS, PMI, PMIX)",
        new="(PMI, PMIX)",
        fault="On Cray the launcher of a task of srun is called PALS, and errors advise mpiexec.",
        tests="tests/unit/test_detect.py -k test_srun_on_cray",
    ),
    Mutant(
        "queries.mpiexec",
        old="launchers or library.launchers",
        new="library.launchers",
        fault="--launcher pals starts the ranks by another mpiexec.",
        tests=_LINES,
    ),
    Mutant(
        "commands._on_hosts",
        old="most = max(slots) if ranks <= sum(slots) else max(*slots, -(-ranks // len(slots)))",
        new="most = max(slots)",
        fault="Where PBS has one line for each node, PALS gets --ppn 1 for the 28 ranks of each.",
        tests="tests/launch/test_centres.py -k 'ranks_of_the_page and Aurora'",
    ),
    Mutant(
        "pbs.j2",
        old="{% if not has_mpiprocs %} -n {{ job.nodes * job.ranks_per_node }}{% endif %}",
        new="",
        fault="The script for Polaris starts one rank on each node.",
        tests="tests/launch/test_centres.py -k 'ranks_of_the_page and Polaris'",
    ),
    Mutant(
        "launcher_check.collect",
        old="launcher in library.launchers_of_pals",
        new="False",
        fault="mpicomm doctor calls the mpiexec of PALS one of Cray MPICH.",
        tests="tests/launch/test_pals.py -k doctor",
    ),
    # -- ibrun ----------------------------------------------------------------------------------------------
    Mutant(
        "commands.ibrun",
        old='["-n", str(ranks), "-o", "0"]',
        new='["-n", str(ranks)]',
        fault="ibrun gets -n without -o, which it needs.",
        tests=_LINES,
    ),
    Mutant(
        "commands.ibrun",
        old="ranks > job.ranks",
        new="False",
        fault="mpicomm run asks ibrun for more tasks than the job has hosts for.",
        tests=_ERRORS,
    ),
    Mutant(
        "launching._has_ibrun",
        old='is_of_site and shutil.which("ibrun", path=environ.get("PATH")) is not None',
        new='shutil.which("ibrun", path=environ.get("PATH")) is not None',
        fault="ibrun starts ranks of an MPI from PyPI by the launcher of the site's MPI: worlds of size 1.",
        tests=_LINES,
    ),
    Mutant(
        "launching.host_selecting_scheduler",
        old='"a Slurm job of ibrun" if _launcher(request, mpi.library(), job, environ) == selection.IBRUN else None',
        new="None",
        fault="With ibrun --nnodes has no effect.",
        tests=_ERRORS,
    ),
    # -- the choice -----------------------------------------------------------------------------------------
    Mutant(
        "selection.select",
        old="is_ibrun_site and job.groups == 1",
        new="is_ibrun_site",
        fault="ibrun starts the ranks of a heterogeneous job, of which it knows one component.",
        tests="tests/unit/test_selection.py -k heterogeneous",
    ),
    Mutant(
        "selection._check",
        old="not isinstance(job, kind)",
        new="False",
        fault="--launcher srun outside of an allocation starts mpiexec.",
        tests=_ERRORS,
    ),
    Mutant(
        "_check_scheduler",
        old='check_choice(f"--launcher in {spec.system.title}", spec.launcher, spec.system.launchers)',
        new="pass",
        fault="mpicomm job pbs --launcher srun writes a script that fails after it has waited in the queue.",
        tests="tests/unit/test_jobscript.py -k test_an_error_is_one_line",
    ),
]
