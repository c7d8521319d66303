"""Containers of ranks: how each runtime starts a rank in an image, and why ranks in containers cannot form one job.

The launcher runs outside and the ranks inside, so that variables, sockets and shared memory of the launcher must reach
the ranks. Sources: user guide and source of Apptainer (August 2026), READMEs and hooks of pyxis (May 2026) and enroot
(April 2026), usage of shifter (June 2026), Container Engine of CSCS (August 2026).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePath

from mpicomm.errors import LaunchError
from mpicomm.launch import visible_devices

PYTHON = "python"
"""The command of Python in an image."""

CARRIER = "CONTAINER_ENV_"
"""The start of the names under which the launcher passes the user's variables to containers."""

OF_IMAGE = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME")
"""Variables of the ranks in containers with which the launcher and the runtime outside would not start."""

_BIND = re.compile(r"(?P<source>/[^:,;\s]*)(:(?P<target>/[^:,;\s]*)(:(?P<flag>ro|rw))?)?")
_FILE = re.compile(r"\.{0,2}/.*|.*\.(sif|sqsh|squashfs|img|toml)")
_URI = re.compile(r"[\w-]+://.*|(docker-daemon|docker-archive|oci|oci-archive):.*")  # of Apptainer; not NAME:TAG
_GPU_OPTIONS = {visible_devices.NVIDIA: ("--nv",), visible_devices.AMD: ("--rocm",)}
# Apptainer's variables for options with which MPI cannot connect the ranks of a node, or gets no variables. Apptainer
# reads the values by Go's strconv.ParseBool, and fails with others.
_FALSE = ("", "0", "f", "F", "false", "False", "FALSE")
_SEPARATING = ("CONTAIN", "CONTAINALL", "CLEANENV", "COMPAT", "PID", "UNSHARE_PID", "NET", "UNSHARE_NET")
_IMAGE_VARIABLES = {
    "APPTAINER_CONTAINER": "Apptainer",  # before Singularity's, which Apptainer sets too
    "SINGULARITY_CONTAINER": "Singularity",
    "SHIFTER_RUNTIME": "Shifter",
}


@dataclasses.dataclass(frozen=True)
class Bind:
    """A directory or file of the host that is visible in the container."""

    source: str
    target: str
    flag: str = ""

    @classmethod
    def parse(cls, text: str) -> Bind:
        """Parse `PATH`, `PATH:TARGET`, or `PATH:TARGET:ro`.

        Raises:
            LaunchError: If the text has another form, or the target is the root of the image.
        """
        match = _BIND.fullmatch(text)
        bind = match and cls(match["source"], match["target"] or match["source"], match["flag"] or "")
        if bind is None or bind.hides_image:
            raise LaunchError(
                f"cannot bind {text!r} in a container: expected absolute paths without spaces and : , ; and a target "
                f"other than /.\nPass --container-bind PATH, PATH:TARGET or PATH:TARGET:ro."
            )
        return bind

    @classmethod
    def of_directory(cls, directory: str, meaning: str) -> Bind:
        """Return the bind of a directory that is at the same path in the container.

        Args:
            meaning: What the directory is, for the error.

        Raises:
            LaunchError: If no runtime can bind it there.
        """
        bind = cls(directory, directory)
        if bind.hides_image or not _BIND.fullmatch(directory) or ":" in directory:
            raise LaunchError(
                f"the {meaning} {directory!r} cannot be visible in a container: expected a directory other than /, and "
                f"a path without spaces and : , ;\nUse another directory."
            )
        return bind

    @property
    def hides_image(self) -> bool:
        """Whether nothing of the image would be visible."""
        return os.path.normpath(self.target) in ("/", "//")

    def joined(self) -> str:
        """Return the form of pyxis, Apptainer and Shifter."""
        return ":".join(filter(None, (self.source, self.target, self.flag)))


@dataclasses.dataclass(frozen=True)
class Container:
    """The container in which each rank runs."""

    runtime: Runtime
    command: str
    """The command of the runtime; that of srun if the runtime is a plugin of srun."""
    image: str
    directory: str
    """The working directory of the ranks."""
    binds: tuple[Bind, ...] = ()
    gpu_vendor: str | None = None
    has_other_tmp: bool = False
    """Whether TMPDIR names a directory that the runtime does not bind."""

    def rank_command(self, program: Sequence[str], *, by_srun: bool, variables: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the command of a rank.

        Args:
            variables: The names of variables whose values the rank gets from those with `CARRIER` before the name.

        Raises:
            LaunchError: If the runtime is a plugin of srun, and another launcher starts the ranks.
        """
        if not self.runtime.is_plugin:
            return (*self.runtime.words(self), *_with_variables(program, variables))
        if by_srun:
            return _with_variables(program, variables)
        raise LaunchError(
            f"{self.runtime.name} is a plugin of srun, but another launcher starts the ranks here.\n"
            f"Run the command in a Slurm job in which srun starts the ranks (see `srun --mpi=list`; no --hosts), or "
            f"use --container-runtime apptainer."
        )

    def srun_options(self) -> list[str]:
        """Return the options of srun; none if the runtime is a command."""
        return self.runtime.words(self) if self.runtime.is_plugin else []

    def check_connection(self, *, is_pmix: bool) -> None:
        """Check that the connection to the launcher reaches the ranks.

        Raises:
            LaunchError: If the launcher passes it as a file descriptor, and the runtime closes it.
        """
        if self.runtime.keeps_descriptors or is_pmix:
            return
        raise LaunchError(
            f"{self.runtime.name} closes PMI_FD, the connection to the launcher: each rank would be rank 0 of 1.\n"
            f"Use --container-runtime pyxis or apptainer, or an MPI that connects by PMIx, such as Open MPI."
        )


_NOT_CARRIED = "it did not reach the container. Set it in the image in place of --env"
# The libraries of --nv and --rocm, which Apptainer adds to the value itself (process_linux.go).
_ADDED = {"LD_LIBRARY_PATH": "/.singularity.d/libs"}


def _with_variables(program: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a program with the user's variables, of which an image or a runtime may have others.

    With pyxis, Shifter and Apptainer's %environment, the values of the image take precedence; enroot gets no paths.
    """
    if not names:
        return tuple(program)
    exports = " ".join(map(_export, names))
    carriers = " ".join(f"{CARRIER}{name}" for name in names)
    return ("sh", "-c", f'export {exports}; unset {carriers}; exec "$0" "$@"', *program)


def _export(name: str) -> str:
    carrier, added = f"{CARRIER}{name}", _ADDED.get(name)
    end = f"${{{carrier}:+:}}{added}" if added else ""  # an empty part of a path is the working directory
    return f'{name}="${{{carrier}?{_NOT_CARRIED}}}{end}"'


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A container runtime."""

    name: str
    words: Callable[[Container], list[str]]
    """Returns its command before that of the rank, or its options of srun."""
    commands: tuple[str, ...]
    """Its commands, one of which is installed."""
    srun_option: str = ""
    """The option that its plugin adds to srun."""
    images: str = ".*"
    """Pattern of the images for which it is the default."""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables of the launcher and the ranks, by default."""
    keeps_descriptors: bool = True
    has_binds: bool = True
    """Whether its command binds paths."""

    def parse_binds(self, texts: Sequence[str]) -> list[Bind]:
        """Parse the values of `--container-bind`.

        Raises:
            LaunchError: If one is not valid, or the runtime takes binds from a file.
        """
        binds = [Bind.parse(text) for text in texts]
        if binds and not self.has_binds:
            raise LaunchError(
                f"--container-bind does not work with {self.name}, which takes mounts from its environment file.\n"
                f"Add them there: mounts = [{', '.join(repr(bind.joined()) for bind in binds)}]"
            )
        return binds

    @property
    def is_plugin(self) -> bool:
        """Whether it is a plugin of srun."""
        return bool(self.srun_option)


# -- the runtimes ------------------------------------------------------------------------------------------------------


# Open MPI's mpirun and ranks share files there, and hang or crash if they cannot. Hosts have different directories.
_WITH_TMP = (
    'for path in "$TMPDIR" "$PMIX_SERVER_TMPDIR"; do [ ! -d "$path" ] || set -- --bind "$path" "$@"; done; '
    'exec "$0" exec "$@"'
)


def _apptainer(container: Container) -> list[str]:
    # It binds the working directory itself, unless the site disables that, and then starts in $PWD, which may be the
    # path of a symbolic link that the container does not have.
    binds = [container.directory, *(bind.joined() for bind in container.binds)]
    options = [*(word for bind in binds for word in ("--bind", bind)), "--pwd", container.directory]
    gpus = _GPU_OPTIONS.get(container.gpu_vendor or "", ())
    rank_command = [*options, *gpus, container.image]
    if container.has_other_tmp:
        return ["sh", "-c", _WITH_TMP, container.command, *rank_command]
    return [container.command, "exec", *rank_command]


def _enroot(container: Container) -> list[str]:
    mounts = [
        f"{bind.source}:{bind.target}:none:{','.join(filter(None, ('x-create=auto', 'rbind', bind.flag)))}"
        for bind in (Bind(container.directory, container.directory), *container.binds)
    ]
    options = [word for mount in mounts for word in ("--mount", mount)]
    # The image's script /etc/rc may change the directory; the configuration lets the variables in.
    configuration = str(Path(__file__).with_name("enroot_config.sh"))
    change = ("sh", "-c", 'cd "$0" && exec "$@"', container.directory)
    return [container.command, "start", "--conf", configuration, *options, container.image, *change]


def _shifter(container: Container) -> list[str]:
    # It starts in the working directory, which the site must provide: a volume needs a mount point in the image.
    volumes = ";".join(bind.joined() for bind in container.binds)
    return [container.command, f"--image={container.image}", *([f"--volume={volumes}"] if volumes else [])]


def _pyxis(container: Container) -> list[str]:
    binds = (Bind(container.directory, container.directory), *container.binds)
    mounts = ",".join(bind.joined() for bind in binds)
    return [
        f"--container-image={container.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={container.directory}",
    ]


def _container_engine(container: Container) -> list[str]:
    return [f"--environment={container.image}"]


_SQUASHFS = r".*\.(sqsh|squashfs)"
_OF_REGISTRY = rf"(?![/.]|docker:|{_URI.pattern}|.*\.(sif|img|toml)$).*"
# PMIx otherwise shares files in the launcher's temporary directory, which may not be in the container: MPI_Init fails,
# and mpirun can hang. The plugins of srun bind the directory (hook 50-slurm-pmi.sh of enroot).
_NO_FILES = {"PMIX_MCA_gds": "hash"}
RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("ce", _container_engine, ("srun",), srun_option="--environment", images=r".*\.toml", has_binds=False),
        Runtime("pyxis", _pyxis, ("srun",), srun_option="--container-image", images=rf"{_OF_REGISTRY}|{_SQUASHFS}"),
        Runtime(
            "apptainer",
            _apptainer,
            ("apptainer", "singularity"),
            images=rf"(?!.*\.toml$)/.*|{_URI.pattern}",
            environ=_NO_FILES,
        ),
        Runtime("shifter", _shifter, ("shifter",), images=r"(?!.*(\.(sif|img|sqsh|toml)$|://)).*", environ=_NO_FILES),
        Runtime(
            "enroot",
            _enroot,
            ("enroot",),
            images=rf"[^/]*|{_SQUASHFS}",
            # Each rank has a user namespace of its own, and no variable by which it could detect that.
            environ={**_NO_FILES, "MPIR_CVAR_CH4_CMA_ENABLE": "0"},
            keeps_descriptors=False,
        ),
    )
}
"""The runtimes, in the order in which one is chosen by default."""


def select(requested: str | None, image: str, installed: Collection[str], *, by_srun: bool) -> Runtime:
    """Return the requested runtime, or the first installed one that is made for an image.

    Args:
        installed: The names of the runtimes of this host.
        by_srun: Whether srun starts the ranks, which its plugins need.

    Raises:
        LaunchError: If it is not installed, or if none is suitable.
    """
    if requested is not None:
        if requested not in installed:
            raise LaunchError(f"--container-runtime {requested}: {_missing(RUNTIMES[requested])}.\n{_REMEDY}")
        return RUNTIMES[requested]
    for runtime in RUNTIMES.values():
        if runtime.name in installed and re.fullmatch(runtime.images, image) and (by_srun or not runtime.is_plugin):
            return runtime
    reasons = "".join(f"\n  {name}: {_unsuitable(runtime, installed)}" for name, runtime in RUNTIMES.items())
    raise LaunchError(f"no container runtime of this host can start {image}:{reasons}\n{_REMEDY}")


_REMEDY = (
    "Load the site's module of a runtime, or pass another one: --container-runtime NAME. Apptainer needs the path of a "
    "file, ./NAME for a directory, or docker://IMAGE for an image of a registry."
)


def _missing(runtime: Runtime) -> str:
    if runtime.is_plugin:
        return f"`srun --help` has no {runtime.srun_option}"
    return f"{' or '.join(runtime.commands)} was not found in PATH"


def _unsuitable(runtime: Runtime, installed: Collection[str]) -> str:
    return "not for this image, or not with this launcher" if runtime.name in installed else _missing(runtime)


def has_other_tmp(environ: Mapping[str, str]) -> bool:
    """Return whether temporary files are in a directory that Apptainer does not bind by default."""
    directory = environ.get("TMPDIR") or "/tmp"
    return not any(PurePath(directory).is_relative_to(bound) for bound in ("/tmp", "/var/tmp"))


def is_path(image: str, runtime: str | None, *, exists: bool) -> bool:
    """Return whether an image is a path, and not a name in a registry or of a runtime.

    Args:
        runtime: The runtime that the user requests.
        exists: Whether an image exists at this path.
    """
    if _URI.fullmatch(image):
        return False
    return _FILE.fullmatch(image) is not None or runtime == "apptainer" or (exists and runtime is None)


def missing_image(image: str, directory: str) -> LaunchError:
    """Return the error about an image that `is_path`, and does not exist in a directory."""
    name = image.removeprefix("docker:").replace("#", "/")
    of_registry = "" if _FILE.fullmatch(image) else f" In a registry, it is docker://{name}."
    return LaunchError(f"--container {image}: the image does not exist in {directory}.\nCorrect the path.{of_registry}")


def refuse_separation(runtime: Runtime, environ: Mapping[str, str]) -> None:
    """Refuse variables of Apptainer that separate the ranks of a node from each other, or from the launcher.

    Raises:
        LaunchError: If one of them is set.
    """
    names = [f"{prefix}_{name}" for prefix in ("APPTAINER", "SINGULARITY") for name in _SEPARATING]
    set_names = [name for name in names if environ.get(name, "") not in _FALSE]
    if set_names and runtime is RUNTIMES["apptainer"]:
        raise LaunchError(
            f"{' and '.join(set_names)} separates ranks in containers from the launcher and from each other: MPI would "
            f"crash or hang.\n  unset {' '.join(set_names)}"
        )


# -- in a container ----------------------------------------------------------------------------------------------------


def running_in(environ: Mapping[str, str]) -> str:
    """Return the container of this process, by its variables; empty outside one, or in one that sets none."""
    for name, title in _IMAGE_VARIABLES.items():
        if image := environ.get(name):
            return title if name == "SHIFTER_RUNTIME" else f"{title}, {PurePath(image).name}"
    return ""


@dataclasses.dataclass(frozen=True)
class Separation:
    """How the container of a rank is separated from the launcher, and so from the containers of the other ranks."""

    container: str = ""
    """The container, for messages; empty outside one."""
    launcher: str = ""
    """The name of the process that has started the ranks of this node; empty if this process cannot see it."""
    has_own_users: bool = False
    """Whether it has a user namespace, as without Apptainer's setuid program: processes cannot read each other."""
    has_own_pids: bool = False
    """Whether it has a PID namespace: processes have the same IDs in several containers."""
    has_own_shm: bool = False
    """Whether it has a /dev/shm."""

    def problem(self, local_size: int) -> str | None:
        """Return the error that would make MPI crash or hang; None without one.

        Args:
            local_size: The number of ranks on this node.
        """
        if not self.has_own_shm or local_size == 1:
            return None
        return (
            f"this rank has a /dev/shm of its own ({self.container}), which the other ranks of this host do not see: "
            f"MPI, which shares memory there, would crash or hang.\n"
            f"Remove --contain and --containall, or start the ranks outside the container:\n"
            f"  mpicomm run --container IMAGE train.py"
        )

    def problem_of_single(self) -> str | None:
        """Return the error if no variable of the launcher has reached this process, which is a world of size 1."""
        if not (self.container and self.launcher):
            return None
        return (
            f"{self.launcher} started this process in a container ({self.container}), but none of its variables is set "
            f"there, and MPI reports rank 0 of 1: each rank would run alone.\n"
            f"Remove --cleanenv and --containall, or set APPTAINERENV_MPICOMM_LAUNCHER=single to run each on its own."
        )


def connection_hint(environ: Mapping[str, str]) -> str:
    """Return lines for an error about ranks that MPI has not connected, why in a container; empty outside one."""
    container = running_in(environ)
    if not container:
        return ""
    lines = [f"  container: {container}. The MPI in the image must connect to the launcher outside."]
    if version := environ.get("PMIX_VERSION"):
        directory = environ.get("PMIX_SERVER_TMPDIR", "/tmp")
        lines.append(f"  The launcher provides PMIx {version}: the MPI in the image needs a PMIx compatible with it.")
        lines.append(f"  If {directory} of the launcher is not in the container, bind it, or set PMIX_MCA_gds=hash.")
    elif not any(name.startswith(("PMI_", "PMIX_")) for name in environ):
        lines.append("  It has no PMI_* or PMIX_* variable: the launcher provides no PMI, or --cleanenv removes them.")
    return "\n".join(lines) + "\n"
