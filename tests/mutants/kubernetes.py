"""Faults in the manifests for Kubernetes, and in the use of an operator's variables."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "parse",
        old="ranks <= sum(slots[:index])",
        new="ranks < sum(slots[:index])",
        fault="A number of ranks that just fills the first hosts of a host file leaves the next host unused.",
        tests="tests/unit/test_mpi_operator.py -k test_a_host_without_a_rank_is_an_error",
    ),
    Mutant(
        "launch.mpi_operator",
        old='("HYDRA_LAUNCHER_EXTRA_ARGS", "HYDRA_LAUNCH_EXTRA_ARGS")',
        new='("HYDRA_LAUNCH_EXTRA_ARGS",)',
        fault="The ssh options of the operator are in a variable that MPICH does not read.",
        tests="tests/unit/test_mpi_operator.py -k test_ssh_options_of_one_mpi_reach_another",
    ),
    Mutant(
        "problem",
        old="len(used) >= len(named)",
        new="len(hosts) >= len(named)",
        fault="As many ranks as hosts in an ignored host file are accepted, although all are on the launcher.",
        tests="tests/unit/test_mpi_operator.py -k test_ranks_on_fewer_hosts",
    ),
    Mutant(
        "_host_file_variable",
        old='library.vendor == "Open MPI" and not library.lacks_pmi()',
        new='library.vendor == "Open MPI"',
        fault="Open MPI 5 is assumed to read the variable of Open MPI 4: ranks on one of three hosts are accepted.",
        tests="tests/unit/test_mpi_operator.py -k test_ranks_on_fewer_hosts",
    ),
    Mutant(
        "join.decide",
        old="_refuse_unused_hosts(os.environ, hosts)",
        fault="Under mpirun of Open MPI 5, a job of three workers runs on the launcher and succeeds.",
        tests="tests/launch/test_unused_hosts.py",
    ),
    Mutant(
        "forwarded",
        old="(everything and not _matches(name, _OF_MPI)) or _matches(name, _FORWARDED)",
        new="_matches(name, _FORWARDED)",
        fault="ssh loses the variables of the launcher's container.",
        tests="tests/unit/test_mpi_operator.py -k test_containers_share_their_variables",
    ),
    Mutant(
        "_on_operator_hosts",
        old="_wait_for_names([host.name for host in request.hosts])",
        fault="mpicomm run starts the ranks before the names of the workers resolve.",
        tests="tests/unit/test_mpi_operator.py -k test_names_that_resolve_later",
    ),
    Mutant(
        "pods.j2",
        old=' | replace("$", "$$")',
        fault="Kubernetes replaces $(NAME) in the arguments of the program.",
        tests="tests/unit/test_kubernetes.py -k test_kubernetes_restores_every_dollar",
    ),
    Mutant(
        "quoting.yaml",
        old="_PLAIN_YAML.fullmatch(text) and text.lower() not in _NOT_TEXT",
        new="_PLAIN_YAML.fullmatch(text)",
        fault="The argument `no` is written without quotes, so Kubernetes reads a boolean.",
        tests="tests/unit/test_kubernetes.py -k test_every_text_is_read_back",
    ),
]
