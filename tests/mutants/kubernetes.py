"""Faults in the manifests for Kubernetes, and in the use of an operator's variables."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "launch/mpi_operator.py",
        old="ranks <= sum(slots[:index])]",
        new="ranks < sum(slots[:index])]",
        fault="A number of ranks that just fills the first hosts of a host file leaves the next host unused.",
        tests="tests/unit/test_mpi_operator.py -k test_a_host_without_a_rank_is_an_error",
        ranks=0,
    ),
    Mutant(
        "launch/mpi_operator.py",
        old='"MPICH": ("HYDRA_LAUNCHER_EXTRA_ARGS", "HYDRA_LAUNCH_EXTRA_ARGS"),',
        new='"MPICH": ("HYDRA_LAUNCH_EXTRA_ARGS",),',
        fault="The ssh options of the operator are in a variable that MPICH does not read.",
        tests="tests/unit/test_mpi_operator.py -k test_ssh_options_of_one_mpi_reach_another",
        ranks=0,
    ),
    Mutant(
        "launch/mpi_operator.py",
        old="    if len(used) >= len(named):",
        new="    if len(hosts) >= len(named):",
        fault="As many ranks as hosts in an ignored host file are accepted, although all are on the launcher.",
        tests="tests/unit/test_mpi_operator.py -k test_ranks_on_fewer_hosts",
        ranks=0,
    ),
    Mutant(
        "launch/mpi_operator.py",
        old='if library.vendor == "Open MPI" and not library.lacks_pmi():',
        new='if library.vendor == "Open MPI":',
        fault="Open MPI 5 is assumed to read the variable of Open MPI 4: ranks on one of three hosts are accepted.",
        tests="tests/unit/test_mpi_operator.py -k test_ranks_on_fewer_hosts",
        ranks=0,
    ),
    Mutant(
        "startup/mpi_job.py",
        old="            unused_hosts.refuse(os.environ, hosts)\n",
        new="            pass\n",
        fault="Under mpirun of Open MPI 5, a job of three workers runs on the launcher and succeeds.",
        tests="tests/launch/test_unused_hosts.py",
        ranks=0,
    ),
    Mutant(
        "launch/environment.py",
        old="if (everything and not _matches(name, _OF_MPI)) or _matches(name, _FORWARDED)]",
        new="if _matches(name, _FORWARDED)]",
        fault="ssh loses the variables of the launcher's container.",
        tests="tests/unit/test_mpi_operator.py -k test_containers_share_their_variables",
        ranks=0,
    ),
    Mutant(
        "cli/operator_hosts.py",
        old="        _wait_for_names([host.name for host in request.hosts])\n",
        new="",
        fault="mpicomm run starts the ranks before the names of the workers resolve.",
        tests="tests/unit/test_mpi_operator.py -k test_names_that_resolve_later",
        ranks=0,
    ),
    Mutant(
        "launch/jobscript/kubernetes.py",
        old='return word.replace("$", "$$")',
        new="return word",
        fault="Kubernetes replaces $(NAME) in the arguments of the program.",
        tests="tests/unit/test_kubernetes.py -k test_kubernetes_restores_every_dollar",
        ranks=0,
    ),
    Mutant(
        "launch/jobscript/manifest.py",
        old="and value.lower() not in _NOT_TEXT):",
        new="):",
        fault="The argument `no` is written without quotes, so Kubernetes reads a boolean.",
        tests="tests/unit/test_kubernetes.py -k test_every_text_is_read_back",
        ranks=0,
    ),
]
