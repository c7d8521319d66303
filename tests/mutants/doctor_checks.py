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
    ),
    Mutant(
        "worst",
        old="min",
        new="max",
        fault="The exit status of the doctor is 0 if one check is ok.",
        tests="tests/unit/test_doctor.py -k test_equal_findings_of_ranks_are_one",
    ),
    Mutant(
        "_find_outliers",
        old="[pair for pair in values if not set(pair).intersection(slow_members)]",
        new="list(values)",
        fault="The doctor reports each link of a slow host in addition to the host.",
        tests="tests/unit/test_doctor.py -k test_a_slow_host_is_named",
    ),
    Mutant(
        "worse",
        old="max(_DEVIATIONS * deviation, math.log(_FACTOR))",
        new="_DEVIATIONS * deviation",
        fault="The doctor reports small differences between links as outliers if the others are equal.",
        tests="tests/unit/test_doctor.py -k outliers",
    ),
    Mutant(
        "worse",
        old="-1 if higher_is_better else 1",
        new="1",
        fault="The doctor reports the fastest links as outliers of the bandwidth.",
        tests="tests/unit/test_doctor.py -k test_a_slow_link_is_named",
    ),
    Mutant(
        "rounds",
        old="[circle[0], circle[-1], *circle[1:-1]]",
        new="[circle[-1], *circle[:-1]]",
        fault="The doctor measures some pairs of hosts twice, and others never.",
        tests="tests/unit/test_doctor.py -k test_each_pair_is_measured_once",
    ),
    Mutant(
        "parse_requirements",
        old='[_REQUIREMENT.match(text) for text in requirements if ";" not in text]',
        new="[_REQUIREMENT.match(text) for text in requirements]",
        fault="The doctor reports packages of extras that are not installed.",
        tests="tests/unit/test_doctor.py -k test_the_supported_ranges",
    ),
    Mutant(
        "ProcessorFacts.usable",
        old="min(self.cores, self.quota or self.cores)",
        new="self.cores",
        fault="The doctor ignores the CPU limit of a container when it judges OMP_NUM_THREADS.",
        tests="tests/unit/test_doctor.py -k test_the_processors",
    ),
    Mutant(
        "run",
        old="not error.is_on_all_ranks or detect.guess_rank(environ) == 0",
        new="True",
        fault="Under the launcher of another MPI, every process prints the report.",
        tests="tests/launch/test_doctor.py -k test_under_the_launcher_of_another_mpi",
    ),
    Mutant(
        "limit_check.check",
        old="facts.rdma_devices and is_limited",
        new="is_limited",
        fault="The doctor reports the limit of locked memory on hosts without an RDMA network.",
        tests="tests/unit/test_doctor.py -k 'without_a_fault or test_limits'",
    ),
    Mutant(
        "_check_cma",
        old='facts.ptrace_scope not in ("", "0")',
        new="facts.ptrace_scope",
        fault="The doctor recommends a change of ptrace_scope if a container forbids cross-memory attach.",
        tests="tests/unit/test_doctor.py -k test_memory",
    ),
    Mutant(
        "_check_binding",
        old="len(ranks) <= cores",
        new="len(ranks) < cores",
        fault="The doctor reports ranks with one CPU each as bound to the same CPUs.",
        tests="tests/unit/test_doctor.py -k binding",
    ),
    Mutant(
        "job_check._name_hosts",
        old="all(facts.rank in members for facts in ranks if facts.host in hosts)",
        new="True",
        fault="The doctor names the host instead of the rank if the versions of two ranks of one host differ.",
        tests="tests/unit/test_doctor.py -k differs_on_one_host",
    ),
    Mutant(
        "check_trial_job",
        old="job.status != 0 or job.size != 2",
        new="job.status != 0",
        fault="The doctor reports success although each of two ranks is a world of one.",
        tests="tests/unit/test_doctor.py -k result_of_two_ranks",
    ),
    Mutant(
        "_check_name",
        old="all(is_local(address) for address in facts.addresses)",
        new="any(is_local(address) for address in facts.addresses)",
        fault="The doctor warns of a host name that resolves to an address of the network as well.",
        tests="tests/unit/test_doctor.py -k the_network",
    ),
    Mutant(
        "read_error",
        old="0 if done == length else ctypes.get_errno()",
        new="0",
        fault="The doctor reports that cross-memory attach works although the kernel forbids it.",
        tests="tests/unit/test_doctor.py -k memory_of_another_process",
    ),
    Mutant(
        "gpu_check.check",
        old="if facts.hidden_by:",
        new="if False:",
        fault="The doctor recommends another driver if CUDA_VISIBLE_DEVICES hides the GPUs.",
        tests="tests/unit/test_doctor.py -k test_gpus",
    ),
]
