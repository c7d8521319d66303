"""The variables of a launcher on Kubernetes: the host file and ssh options of one MPI, translated for any MPI.

mpi-operator (MPIJob v2beta1) and Kubeflow Trainer v2 (TrainJob) set the variables of Open MPI 4, MPICH or Intel MPI in
the container of the launcher. Open MPI 5 ignores `OMPI_MCA_orte_*`: its mpirun starts all ranks on the launcher, and
exits with 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpicomm.errors import LaunchError
from mpicomm.launch import allocation
from mpicomm.launch.allocation import Host
from mpicomm.launch.mpi_library import Library

_OPEN_MPI_4 = "OMPI_MCA_orte_default_hostfile"
_HOST_FILES = {
    "Open MPI": "PRTE_MCA_prte_default_hostfile",
    "Intel MPI": "I_MPI_HYDRA_HOST_FILE",
    "MPICH": "HYDRA_HOST_FILE",
}
_AGENTS = {
    "Open MPI": ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"),
    "Intel MPI": ("I_MPI_HYDRA_BOOTSTRAP_EXEC",),
    "MPICH": ("HYDRA_LAUNCHER_EXEC",),
}
"""The program that takes ssh's place."""
_AGENT_ARGUMENTS = {
    "Open MPI": ("PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args"),
    "Intel MPI": ("I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS",),
    # MPICH reads the first name; mpi-operator sets the second.
    "MPICH": ("HYDRA_LAUNCHER_EXTRA_ARGS", "HYDRA_LAUNCH_EXTRA_ARGS"),
}
"""Further arguments of that program."""
# They apply to the launcher only. mpi-operator sets the last two to an empty text, so that it gets no GPU.
_OF_LAUNCHER = ("K_MPI_JOB_ROLE", "I_MPI_PERHOST", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")


def host_file(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the variable that names a host file, and the path of the file; None if none is set."""
    names = (_OPEN_MPI_4, *_HOST_FILES.values())
    return next(((name, environ[name]) for name in names if environ.get(name)), None)


def ignored_host_file(environ: Mapping[str, str], library: Library) -> tuple[str, str] | None:
    """Return the variable and the path of a host file that the library's own launcher ignores."""
    named = host_file(environ)
    return None if named is None or named[0] == _host_file_variable(library) else named


def parse(text: str, path: str, ranks: int | None) -> tuple[Host, ...]:
    """Return the hosts of the file, each with at least one of the ranks.

    Args:
        ranks: The requested number of ranks; None for one per slot.

    Raises:
        LaunchError: If the file is invalid, or if a host would have no rank.
    """
    hosts = allocation.with_slots(allocation.parse_host_file(text, path), ranks)
    slots = [host.slots or 1 for host in hosts]
    # Launchers fill the slots in the order of the hosts.
    idle = [host.name for index, host in enumerate(hosts) if ranks is not None and ranks <= sum(slots[:index])]
    if idle:
        shown = ",".join(map(str, hosts[: -len(idle)]))
        raise LaunchError(
            f"-n {ranks} leaves {len(idle)} of {len(hosts)} hosts in {path} without a rank: {', '.join(idle)}\n"
            f"To use all hosts, pass -n {sum(slots)} or omit -n. To use the other hosts only, pass --hosts {shown}"
        )
    return hosts


def for_launcher(environ: Mapping[str, str], library: Library) -> dict[str, str]:
    """Return the environment without the host file, and with the ssh options that were set for another MPI.

    mpiexec gets the hosts as an option: the file may have the syntax of another MPI.
    """
    dropped = (_OPEN_MPI_4, *_HOST_FILES.values(), *_OF_LAUNCHER)
    child = {name: value for name, value in environ.items() if name not in dropped}
    for table in (_AGENTS, _AGENT_ARGUMENTS):
        own = table.get(library.vendor, table["MPICH"])
        value = next((child[name] for names in (own, *table.values()) for name in names if child.get(name)), None)
        child.update({} if value is None else dict.fromkeys(own, value))
    return child


def problem(text: str, ignored: tuple[str, str], library: Library, hosts: Sequence[str]) -> str | None:
    """Return the error message if the ranks are on fewer hosts than an ignored host file names.

    Args:
        text: The contents of the file.
        ignored: The result of `ignored_host_file`.
        hosts: The host of every rank.
    """
    variable, path = ignored
    named, used = allocation.parse_host_file(text, path), dict.fromkeys(hosts)
    if len(used) >= len(named):
        return None
    return (
        f"the ranks run on {len(used)} of {len(named)} hosts: {', '.join(used)}\n"
        f"{variable}={path} names {', '.join(host.name for host in named)}, but {library.vendor} {library.version} "
        f"ignores this variable.\n"
        f"Start the ranks with `mpicomm run train.py`. To run on fewer hosts: unset {variable}"
    )


def _host_file_variable(library: Library) -> str:
    if library.vendor == "Open MPI" and not library.lacks_pmi():
        return _OPEN_MPI_4
    return _HOST_FILES.get(library.vendor, _HOST_FILES["MPICH"])
