"""`JobSpec`: the description of a job, a frozen value that is validated when it is created."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import PurePath

from mpicomm.errors import LaunchError
from mpicomm.launch import binding, environment, known_launchers
from mpicomm.launch.containers import OF_IMAGE, RUNTIMES
from mpicomm.launch.jobscript import options, quoting
from mpicomm.launch.jobscript.options import Option, check_choice, flag, option, program_name
from mpicomm.launch.jobscript.schedulers import SCHEDULERS, Scheduler
from mpicomm.launch.request import torchrun_parts, without_value
from mpicomm.launch.selection import SRUN

_TORCHRUN_ADDED = re.compile(r"--?(nnodes|nproc.per.node|node.rank|rdzv.*|master.*|standalone)(=.*)?")
_NO_QUEUE = (("slurm",), "elsewhere use --queue")
_NO_SIGNAL = (
    ("slurm", "lsf"),
    "elsewhere mpicomm.Trainer queries the remaining time",
)
_NO_MEMORY = (("slurm", "pbs", "lsf"), "Flux does not schedule memory; use --exclusive")
_NO_MAIL = (("slurm", "pbs", "lsf"), "Flux sends no mail")
_NO_ARRAY = (("slurm", "pbs", "lsf"), "in Flux submit the script once for each index")
_MEMORY = ("mem", "mem_per_cpu", "mem_per_gpu")
_OF_RESOURCE = {"select": _MEMORY, "place": ("exclusive",)}
"""The options that are no more than a part of a resource of PBS."""

_CACHES = {
    # https://github.com/ROCm/MIOpen: src/db_path.cpp.in and src/binary_cache.cpp, which create the directories
    "MIOPEN_USER_DB_PATH": "miopen-db",
    "MIOPEN_CUSTOM_CACHE_DIR": "miopen",
    # torch/_inductor/runtime/cache_dir_utils.py and torch/utils/cpp_extension.py; Triton's default is in the home
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
}
_OF_EVERY_JOB = ("PATH", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_URI")
_EARLY = 60  # seconds by which Slurm may send the signal early, see --signal in sbatch(1)


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A job: nodes, ranks, resources and the program. Every field with an `Option` is an option of `mpicomm job`.

    Raises:
        ValueError: If a value is invalid, or if two values contradict each other.
    """

    scheduler: str
    command: tuple[str, ...]

    # 1. resources
    nodes: int = option("number of nodes (default: %(default)s)", "N", default=1, least=1)
    ranks_per_node: int = option("ranks (default: one per GPU of the node, or 1)", "N", default=1, least=1)
    gpus_per_node: int = option("GPUs (default: %(default)s)", "N", default=0, least=0)
    cpus_per_rank: int = option("cores and threads (default: %(default)s)", "N", default=1, least=1)
    bind: str | None = option("cores of each rank, see `mpicomm run --bind`", choices=binding.MODES)
    mem: str | None = option("memory per node", "4G", options.MEMORY, only=_NO_MEMORY)
    mem_per_cpu: str | None = option("memory per core", "4G", options.MEMORY, only=_NO_MEMORY)
    mem_per_gpu: str | None = option("memory of the node per GPU", "4G", options.MEMORY, only=_NO_MEMORY)
    exclusive: bool = option("do not share the nodes with other jobs", default=False)
    time: str = option(
        "time limit, H:MM:SS or minutes; for Slurm also D-HH:MM:SS (default: %(default)s)",
        "1:00:00",
        default="1:00:00",
    )
    array: str | None = option(
        "indices of a job array; its variable, such as $SLURM_ARRAY_TASK_ID, may stand in the command and in --chdir",
        "0-9",
        only=_NO_ARRAY,
    )

    dependency: str | None = option(
        "start after other jobs: afterok, afternotok or afterany, and their IDs", "afterok:ID[:ID]", options.DEPENDENCY
    )

    # 2. name, queue and account
    name: str | None = option("name of the job (default: that of the program)", form=options.NAME)
    partition: str | None = option("Slurm partition, or queue", "P", options.WORD, alias="--queue")
    account: str | None = option("account to charge", "A", options.WORD)
    project: str | None = option(
        "PBS: project to charge, where qsub needs -P", "P", options.WORD, only=(("pbs",), "elsewhere use --account")
    )
    qos: str | None = option("Slurm: quality of service", "Q", options.WORD, only=_NO_QUEUE)
    constraint: str | None = option("Slurm: required features of the nodes", "C", options.FEATURES, only=_NO_QUEUE)

    directive: tuple[str, ...] = option(
        "directive of the scheduler, after those of the other options; repeat for more",
        "TEXT",
        options.DIRECTIVE,
        default=(),
    )

    # 3. output
    output: str | None = option("output file, relative to the submission directory", "FILE", options.FILE)
    error: str | None = option("error file (default: the output file)", "FILE", options.FILE)
    mail_user: str | None = option("recipient of mails", "ADDRESS", options.ADDRESS, only=_NO_MAIL)
    mail_type: str | None = option(
        "events: none,begin,end,fail,all, and Slurm's others (default: end,fail)", "KINDS", only=_NO_MAIL
    )

    # 4. environment of the ranks
    chdir: str | None = option("working directory (default: the submission directory)", "DIR", options.CHDIR)
    module: tuple[str, ...] = option("module to load; repeat for more", "M", options.MODULE, default=())
    module_purge: bool = option("unload all modules first", default=False)
    module_use: tuple[str, ...] = option(
        "directory with modules, for --module; repeat for more", "DIR", options.DIRECTORY, default=()
    )
    setup: tuple[str, ...] = option(
        "command of bash before the ranks start, after --module; the job ends if it fails; repeat for more",
        "COMMAND",
        options.COMMAND,
        default=(),
    )
    venv: str | None = option("Python virtual environment to activate", "DIR", options.DIRECTORY)
    env: tuple[str, ...] = option(
        "variable to export, or NAME of one that is set in the job; repeat for more",
        "NAME[=VALUE]",
        options.PASSED_VARIABLE,
        default=(),
    )
    no_env: tuple[str, ...] = option(
        "variable that the ranks do not get, or a pattern, as in 'NCCL_*'; repeat for more",
        "NAME",
        default=(),
    )
    umask: str | None = option("umask of the job (default: that of the scheduler)", "027", options.UMASK)
    local_caches: bool = option(
        "write the caches of compiled kernels (MIOpen, Triton, torch) to each node's $TMPDIR, or /tmp", default=False
    )

    launcher_arg: tuple[str, ...] = option(
        "argument for the launcher of the ranks; repeat for more", "ARG", options.ARGUMENT, default=()
    )
    launcher: str | None = option("launcher of the ranks (default: that of `mpicomm run` in the job)", "NAME")

    # 5. container of the ranks
    container: str | None = option("run each rank in a container of this image", "IMAGE", options.IMAGE)
    container_runtime: str | None = option("runtime (default: one made for the image)", choices=tuple(RUNTIMES))
    container_bind: tuple[str, ...] = option(
        "path of the hosts in the containers; repeat for more", "PATH[:TARGET[:ro]]", options.DIRECTORY, default=()
    )

    # 6. exit before the time limit
    signal: str | None = option(
        "Slurm, LSF: signal to the ranks, and seconds before the limit", "USR1@180", options.SIGNAL, only=_NO_SIGNAL
    )
    requeue: bool = option("continue in a new run if the ranks exit with status 85", default=False)
    max_restarts: int = option("limit of --requeue (default: %(default)s)", "N", default=10, least=1)

    file: str | None = None
    """File name of the script, for its header."""
    made_by: str = ""
    """The command that generates the script, for its header."""

    def __post_init__(self) -> None:
        check_choice("scheduler", self.scheduler, SCHEDULERS)
        for field, described in options.declared(JobSpec).items():
            _check_option(self, field, described)
        for field in _MEMORY:
            if text := getattr(self, field):
                object.__setattr__(self, field, options.memory(text))
        _check_resources(self)
        _check_time(self)
        for event in self.mail_types:
            check_choice("--mail-type", event, self.system.mail_types)
        _check_variables(self)
        _check_command(self)
        _check_scheduler(self)

    @property
    def system(self) -> Scheduler:
        """The description of the scheduler."""
        return SCHEDULERS[self.scheduler]

    @property
    def seconds(self) -> int:
        """Time limit in seconds."""
        return options.seconds_of(self.time, has_days=self.system.has_days)

    @property
    def clock(self) -> str:
        """Time limit as H:MM:SS, for Slurm D-HH:MM:SS from one day on."""
        return options.clock(self.seconds, has_days=self.system.has_days)

    @property
    def title(self) -> str:
        """Job name; the name of the program by default."""
        name = program_name(self.command if self.torchrun is None else ("torchrun", *self.torchrun[1]))
        return self.name or re.sub(r"[^\w.+-]|^[.+-]", "_", name, flags=re.ASCII)[:64] or "job"

    @property
    def torchrun(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The words that start torchrun, and its arguments, if the program is torchrun; else None."""
        return torchrun_parts(self.command)

    @property
    def run_command(self) -> tuple[str, ...]:
        """The words of `mpicomm run`, with the program's Python: the `mpicomm` in PATH may load another MPI."""
        is_python = re.fullmatch(r"python(3(\.\d+)?)?", PurePath(self.command[0]).name)
        is_outside = self.container is not None  # that Python is the image's, and mpicomm run starts outside
        run = (self.command[0], "-m", "mpicomm", "run") if is_python and not is_outside else ("mpicomm", "run")
        return (*run, *(("--launcher", self.launcher) if self.launcher else ()), *self._container_options)

    @property
    def _container_options(self) -> tuple[str, ...]:
        if self.container is None:
            return ()
        runtime = ("--container-runtime", self.container_runtime) if self.container_runtime else ()
        binds = [word for bind in self.container_bind for word in ("--container-bind", bind)]
        return ("--container", self.container, *runtime, *binds)

    @property
    def processes_per_node(self) -> int:
        """Number of processes that the scheduler or mpirun starts on each node; torchrun starts the ranks itself."""
        return self.ranks_per_node if self.torchrun is None else 1

    @property
    def cpus_per_node(self) -> int:
        """Number of cores for all ranks of a node."""
        return self.ranks_per_node * self.cpus_per_rank

    @property
    def cpus_per_process(self) -> int:
        """Number of cores for each of the `processes_per_node`."""
        return self.cpus_per_node // self.processes_per_node

    @property
    def node_memory(self) -> str | None:
        """Memory of a node with its unit, as 4G, whichever of the three options was passed."""
        amounts = ((self.mem, 1), (self.mem_per_cpu, self.cpus_per_node), (self.mem_per_gpu, self.gpus_per_node))
        return next((f"{int(text[:-1]) * times}{text[-1]}" for text, times in amounts if text), None)

    @property
    def replaced_resources(self) -> set[str]:
        """PBS: the resources of our own `-l` that `directive` replaces.

        Of several values of a resource in a script, qsub uses the first (set_resources() in OpenPBS 23). It refuses
        resources of the whole job, such as ncpus, beside select and place.
        """
        names = {resource.partition("=")[0] for resource in self._resources_in_directives()}
        return names | ({"select", "place"} if names & {"ncpus", "nodes"} else set())

    def _resources_in_directives(self) -> list[str]:
        values = [word for text in self.directive for word in re.findall(r"(?:^|\s)-l\s*(\S+)", text)]
        return [resource for value in values for resource in value.split(",")]

    def _requested_nodes(self) -> int | None:
        """PBS: the number of nodes that `directive` requests, each with all ranks of a node; None without one."""
        chunks = next((text for text in self._resources_in_directives() if text.startswith("select=")), "")
        match = re.fullmatch(r"select=(\d+)(?!.*(?:mpiprocs|\+)).*", chunks)
        return int(match[1]) if match else None

    @property
    def script_file(self) -> str:
        """File name of the script."""
        return self.file or self.system.file

    @property
    def submission(self) -> str:
        """The command line that submits the script."""
        words = [*self.system.submit, *([] if self.system.takes_file else ["<"]), quoting.quoted(self.script_file)]
        return " ".join(words)

    @property
    def variables(self) -> list[tuple[str, str]]:
        """Names and values in `env` that the script sets: all but those that only ranks in containers may have."""
        parts = (assignment.partition("=") for assignment in self.env)
        return [(name, value) for name, has_value, value in parts if has_value and not self._is_of_image(name)]

    @property
    def run_variables(self) -> list[str]:
        """The values of `mpicomm run --env`: NAME of a variable that is set in the script, otherwise NAME=VALUE."""
        pairs = zip(self.variable_names, self.env, strict=True)
        return [assignment if self._is_of_image(name) else name for name, assignment in pairs]

    def _is_of_image(self, name: str) -> bool:
        return self.container is not None and name in OF_IMAGE

    @property
    def variable_names(self) -> list[str]:
        """Names in `env`, with a value or without."""
        return [assignment.partition("=")[0] for assignment in self.env]

    @property
    def caches(self) -> Mapping[str, str]:
        """For each variable that `local_caches` sets, the name of the directory; empty without it."""
        return _CACHES if self.local_caches else {}

    @property
    def dependencies(self) -> list[tuple[str, str]]:
        """Pairs of the condition of `dependency` and the ID of a job."""
        condition, *jobs = (self.dependency or "").split(":")
        return [(condition, job) for job in jobs]

    @property
    def index(self) -> str | None:
        """The variable with the index of this job in its array, which bash expands in the command; None without one."""
        return self.system.array_index if self.array else None

    @property
    def warning(self) -> str | None:
        """The signal before the time limit, as SIGNAL@SECONDS."""
        return self.signal or (self.system.requeue_signal if self.requeue else None)

    @property
    def mail_types(self) -> list[str]:
        """Events that send a mail."""
        text = self.mail_type or ("END,FAIL" if self.mail_user else "")
        return [event for event in text.upper().split(",") if event]


def _check_option(spec: JobSpec, field: str, described: Option) -> None:
    value = getattr(spec, field)
    if value and described.only and spec.scheduler not in described.only[0]:
        titles = [SCHEDULERS[name].title for name in described.only[0]]
        raise ValueError(f"{flag(field)} is valid only for {' and '.join(titles)}: {described.only[1]}")
    described.check(flag(field), value, [text for name, text in spec.system.special_values if name == field])


def _check_resources(spec: JobSpec) -> None:
    ranks, gpus = spec.ranks_per_node, spec.gpus_per_node
    if gpus and gpus % ranks and ranks % gpus:
        raise ValueError(
            f"--gpus-per-node {gpus} cannot be shared evenly by --ranks-per-node {ranks}; "
            f"for one GPU per rank use --ranks-per-node {gpus} or --gpus-per-node {ranks}"
        )
    memory = [flag(field) for field in _MEMORY if getattr(spec, field) is not None]
    if len(memory) > 1:
        raise ValueError(
            f"{' and '.join(memory)} contradict each other: give one of --mem, --mem-per-cpu, --mem-per-gpu"
        )
    if spec.mem_per_gpu and not gpus:
        raise ValueError("--mem-per-gpu needs --gpus-per-node; without GPUs use --mem or --mem-per-cpu")


def _check_time(spec: JobSpec) -> None:
    if spec.array is not None:
        options.check_array(spec.array)
    seconds = spec.seconds
    if spec.warning and int(spec.warning.partition("@")[2]) + _EARLY >= seconds:
        later = (seconds - _EARLY) // 2
        or_later = f", or a later signal, --signal USR1@{later}" if later > 0 else ""
        raise ValueError(
            f"--time {spec.time} is too short for {spec.warning}, which {spec.system.title} may send 60 s early: the "
            f"ranks would receive it as they start; expected a longer --time{or_later}"
        )


def _check_variables(spec: JobSpec) -> None:
    indices = [system.array_index for system in SCHEDULERS.values() if system.array_index]
    try:
        # a pattern stands for variables that only the job will have: SLURM_ARRAY_* matches itself and SLURM_*
        environment.without(dict.fromkeys([*_OF_EVERY_JOB, *indices, *spec.no_env], ""), spec.no_env)
        environment.refuse_contradiction(spec.variable_names, spec.no_env)
    except LaunchError as error:
        raise ValueError(" ".join(str(error).splitlines())) from error


def _check_command(spec: JobSpec) -> None:
    launchers = [launcher for launcher in known_launchers.ALL if launcher is not known_launchers.TORCHRUN]
    starters = [name for launcher in launchers for name in launcher.commands]
    starters += [name for system in SCHEDULERS.values() for name in system.commands]
    options.check_program(spec.command, starters, "the script starts the ranks itself")
    if re.match(r"\w+=", spec.command[0]):
        shown = without_value(spec.command[0])
        raise ValueError(f"expected a program, got {shown}; set a variable with --env {shown}")
    if ":" in spec.command:
        raise ValueError("the argument : would start another program, with srun and with mpirun; remove it")
    if any("\0" in word for word in spec.command):
        raise ValueError("an argument of the program cannot contain a null character; remove it")
    _check_indices(spec)
    _check_container(spec)
    if spec.torchrun is not None:
        _check_torchrun(spec, spec.torchrun[1])


def _check_container(spec: JobSpec) -> None:
    if spec.container is None:
        if spec.container_runtime or spec.container_bind:
            raise ValueError("--container-runtime and --container-bind need --container IMAGE")
        return
    implied = "ce" if spec.container.endswith(".toml") else ""  # no other runtime starts it
    runtime = RUNTIMES.get(spec.container_runtime or implied)
    try:
        (runtime or RUNTIMES["apptainer"]).parse_binds(spec.container_bind)
    except LaunchError as error:
        raise ValueError(" ".join(str(error).splitlines())) from error
    if runtime and runtime.is_plugin and (spec.launcher or spec.system.launchers[0]) != SRUN:
        launcher = f"--launcher {spec.launcher}" if spec.launcher else spec.system.title
        others = [name for name, other in RUNTIMES.items() if not other.is_plugin]
        raise ValueError(
            f"{runtime.name} is a plugin of Slurm's srun, got {launcher}; use an image and --container-runtime of "
            f"{', '.join(others)}"
        )


def _check_indices(spec: JobSpec) -> None:
    """Refuse the index of another scheduler or without an array: the program would get the variable's name."""
    text = "\n".join([*spec.command, spec.chdir or "", *spec.env])
    names = [name for system in SCHEDULERS.values() if (name := system.array_index) and name != spec.index]
    for name in names:
        if re.search(rf"\$({name}\b|{{{name}}})", text):
            remedy = f"use ${spec.index}" if spec.index else "add --array, or remove it"
            raise ValueError(f"${name} is not set in this job; {remedy}")


def _check_torchrun(spec: JobSpec, words: tuple[str, ...]) -> None:
    if not words:
        raise ValueError("torchrun needs a program: -- torchrun train.py")
    for word in words:
        if word in ("-m", "--module") or word.endswith(".py"):
            break
        if _TORCHRUN_ADDED.fullmatch(word):
            raise ValueError(f"the script passes {word} to torchrun, from --nodes and --ranks-per-node; remove it")
    if spec.container is not None:
        raise ValueError("--container does not work with torchrun; use -- python train.py")
    if spec.launcher_arg:
        raise ValueError(
            "--launcher-arg is an option of `mpicomm run`, which does not start torchrun; "
            "pass its options directly: -- torchrun OPTIONS train.py"
        )
    if spec.launcher:
        raise ValueError("--launcher does not work with torchrun, which starts the ranks of each node; remove it")
    if spec.bind:
        raise ValueError("--bind is an option of `mpicomm run`, and torchrun starts the ranks; use -- python train.py")
    for field in ("requeue", "signal"):
        if getattr(spec, field):
            raise ValueError(
                f"{flag(field)} does not work with torchrun, which runs without MPI and turns status 85 into 1; "
                f"use -- python train.py"
            )
    if spec.no_env:
        raise ValueError("--no-env is an option of mpicomm run, without which torchrun starts; use -- python train.py")
    if without := [assignment for assignment in spec.env if "=" not in assignment]:
        raise ValueError(f"--env {without[0]}: torchrun starts without mpicomm run; expected {without[0]}=VALUE")


def _check_scheduler(spec: JobSpec) -> None:
    """Refuse a job that its scheduler cannot run."""
    if spec.scheduler == "slurm":
        _check_slurm(spec)
    elif spec.scheduler == "pbs":
        _check_pbs(spec)
    elif spec.scheduler == "lsf":
        _check_lsf(spec)
    if spec.launcher:
        check_choice(f"--launcher in {spec.system.title}", spec.launcher, spec.system.launchers)
    if spec.requeue and spec.dependency and spec.scheduler != "slurm":
        raise ValueError(
            f"--requeue and --dependency: the job submits its script again, when {spec.system.title} may no longer "
            f"know the other jobs; remove one of the two"
        )
    if spec.requeue and spec.system.resubmits_file and spec.file is None:
        raise ValueError(f"--requeue: the job submits its script again; add -o FILE, for example -o {spec.system.file}")


def _check_slurm(spec: JobSpec) -> None:
    for field in ("output", "error"):
        name = getattr(spec, field)
        if spec.array and name and not re.search(r"%[0-9]*[ajJ]", name):
            raise ValueError(
                f"{flag(field)} {name}: all jobs of the array would write to this file; add %A_%a to the name"
            )


def _check_pbs(spec: JobSpec) -> None:
    if spec.array and not re.fullmatch(r"([0-9]+)-(?!\1[:%]|\1$)[0-9]+(:[0-9]+)?(%[0-9]+)?", spec.array):
        raise ValueError(
            f"--array {spec.array}: PBS accepts one range of two jobs or more; expected 0-9, 0-30:10 or 0-9%2"
        )
    for resource, fields in _OF_RESOURCE.items():
        for field in fields:
            if getattr(spec, field) and resource in spec.replaced_resources:
                raise ValueError(
                    f"{flag(field)} is a part of `-l {resource}`, which --directive replaces; "
                    f"write it in the directive, and remove {flag(field)}"
                )
    if (nodes := spec._requested_nodes()) is not None and nodes != spec.nodes:
        raise ValueError(f"--directive requests {nodes} nodes, and --nodes {spec.nodes}; pass --nodes {nodes}")
    if spec.array and spec.requeue:
        raise ValueError("--array and --requeue: PBS cannot resubmit one job of an array; remove one of the two")
    for field in ("output", "error"):
        name = getattr(spec, field)
        if spec.requeue and name and not name.endswith("/"):
            raise ValueError(
                f"{flag(field)} {name}: a resubmitted job would overwrite this file; "
                f"use a directory, {name}/, in which PBS creates one file per job"
            )


def _check_lsf(spec: JobSpec) -> None:
    if spec.array and re.search(r"(?<![0-9:])0+(?![0-9])", spec.array.partition("%")[0]):
        raise ValueError(f"--array {spec.array}: LSF accepts indices from 1; expected 1-9")
    if spec.array and spec.requeue:
        raise ValueError("--array and --requeue: LSF cannot resubmit one job of an array; remove one of the two")
