"""Faults in the checks of `mpicomm doctor`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "Library.is_of_other_mpi",
        old="_version_match(output) is not None and not self.owns_mpiexec(output)",
        new="False",
        fault="The doctor does not report that the mpirun in PATH belongs to another MPI.",
        tests="tests/unit/test_doctor.py -k test_launchers_that_do_not_fit",
        ranks=0,
    ),
    Mutant(
        "worst",
        old="min",
        new="max",
        fault="The exit status of the doctor is 0 if one check is ok.",
        tests="tests/unit/test_doctor.py -k test_equal_findings_of_ranks_are_one",
        ranks=0,
    ),
    Mutant(
        "_outliers_of",
        old="[pair for pair in values if not set(pair).intersection(slow_members)]",
        new="list(values)",
        fault="The doctor reports each link of a slow host in addition to the host.",
        tests="tests/unit/test_doctor.py -k test_a_slow_host_is_named",
        ranks=0,
    ),
    Mutant(
        "worse",
        old="max(_DEVIATIONS * deviation, math.log(_FACTOR))",
        new="_DEVIATIONS * deviation",
        fault="The doctor reports small differences between links as outliers if the others are equal.",
        tests="tests/unit/test_doctor.py -k outliers",
        ranks=0,
    ),
    Mutant(
        "worse",
        old="-1 if higher_is_better else 1",
        new="1",
        fault="The doctor reports the fastest links as outliers of the bandwidth.",
        tests="tests/unit/test_doctor.py -k test_a_slow_link_is_named",
        ranks=0,
    ),
    Mutant(
        "rounds",
        old="[circle[0], circle[-1], *circle[1:-1]]",
        new="[circle[-1], *circle[:-1]]",
        fault="The doctor measures some pairs of hosts twice, and others never.",
        tests="tests/unit/test_doctor.py -k test_each_pair_is_measured_once",
        ranks=0,
    ),
    Mutant(
        "parse_requirements",
        old='[_REQUIREMENT.match(each) for each in requirements if ";" not in each]',
        new="[_REQUIREMENT.match(each) for each in requirements]",
        fault="The doctor reports packages of extras that are not installed.",
        tests="tests/unit/test_doctor.py -k test_the_supported_ranges",
        ranks=0,
    ),
    Mutant(
        "ProcessorFacts.usable",
        old="min(self.cores, self.quota or self.cores)",
        new="self.cores",
        fault="The doctor ignores the CPU limit of a container when it judges OMP_NUM_THREADS.",
        tests="tests/unit/test_doctor.py -k test_the_processors",
        ranks=0,
    ),
    Mutant(
        "run",
        old="not error.is_on_all_ranks or detect.guess_rank(environ) == 0",
        new="True",
        fault="Under the launcher of another MPI, every process prints the report.",
        tests="tests/launch/test_doctor.py -k test_under_the_launcher_of_another_mpi",
        ranks=0,
    ),
]
