"""Faults in the checks of `mpicomm doctor`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "launch/mpi_library.py",
        old="return _version_match(output) is not None and not self.owns_mpiexec(output)",
        new="return False",
        fault="The doctor does not report that the mpirun in PATH belongs to another MPI.",
        tests="tests/unit/test_doctor.py -k test_launchers_that_do_not_fit",
        ranks=0,
    ),
    Mutant(
        "doctor/findings.py",
        old="min((each.status for each in findings), key=STATUSES.index",
        new="max((each.status for each in findings), key=STATUSES.index",
        fault="The exit status of the doctor is 0 if one check is ok.",
        tests="tests/unit/test_doctor.py -k test_equal_findings_of_ranks_are_one",
        ranks=0,
    ),
    Mutant(
        "doctor/links.py",
        old="pairs = [pair for pair in values if not set(pair).intersection(slow_members)]",
        new="pairs = list(values)",
        fault="The doctor reports each link of a slow host in addition to the host.",
        tests="tests/unit/test_doctor.py -k test_a_slow_host_is_named",
        ranks=0,
    ),
    Mutant(
        "doctor/links.py",
        old="limit = median + max(_DEVIATIONS * deviation, math.log(_FACTOR))",
        new="limit = median + _DEVIATIONS * deviation",
        fault="The doctor reports small differences between links as outliers if the others are equal.",
        tests="tests/unit/test_doctor.py -k outliers",
        ranks=0,
    ),
    Mutant(
        "doctor/links.py",
        old="sign = -1 if higher_is_better else 1",
        new="sign = 1",
        fault="The doctor reports the fastest links as outliers of the bandwidth.",
        tests="tests/unit/test_doctor.py -k test_a_slow_link_is_named",
        ranks=0,
    ),
    Mutant(
        "doctor/links.py",
        old="circle = [circle[0], circle[-1], *circle[1:-1]]",
        new="circle = [circle[-1], *circle[:-1]]",
        fault="The doctor measures some pairs of hosts twice, and others never.",
        tests="tests/unit/test_doctor.py -k test_each_pair_is_measured_once",
        ranks=0,
    ),
    Mutant(
        "doctor/software_check.py",
        old='requirements if ";" not in each]',
        new="requirements]",
        fault="The doctor reports packages of extras that are not installed.",
        tests="tests/unit/test_doctor.py -k test_the_supported_ranges",
        ranks=0,
    ),
    Mutant(
        "doctor/processor_check.py",
        old="return min(self.cores, self.quota or self.cores)",
        new="return self.cores",
        fault="The doctor ignores the CPU limit of a container when it judges OMP_NUM_THREADS.",
        tests="tests/unit/test_doctor.py -k test_the_processors",
        ranks=0,
    ),
    Mutant(
        "cli/doctor.py",
        old="is_shown = not error.is_on_all_ranks or detect.guess_rank(environ) == 0",
        new="is_shown = True",
        fault="Under the launcher of another MPI, every process prints the report.",
        tests="tests/launch/test_doctor.py -k test_under_the_launcher_of_another_mpi",
        ranks=0,
    ),
]
