"""Faults in ranks that run in containers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_UNIT = "tests/unit/test_containers.py -k"
_SEPARATION = "tests/unit/test_separation.py -k"

MUTANTS = [
    Mutant(
        "containers._apptainer",
        old="[container.directory, *(bind.joined() for bind in container.binds)]",
        new="[bind.joined() for bind in container.binds]",
        fault="Apptainer starts the ranks in another directory, where a site or a link hides the working directory.",
        tests=f"{_UNIT} command_starts_the_rank",
    ),
    Mutant(
        "containers.has_other_tmp",
        old="PurePath(directory).is_relative_to(bound)",
        new="True",
        fault="Ranks of Open MPI hang or crash in containers that do not see TMPDIR.",
        tests=f"{_UNIT} temporary_directories",
    ),
    Mutant(
        "containers._apptainer",
        old="container.has_other_tmp",
        new="False",
        fault="The temporary directory of a host is not in the container.",
        tests=f"{_UNIT} command_starts_the_rank",
    ),
    Mutant(
        "Container.rank_command",
        old="by_srun",
        new="True",
        fault="mpiexec starts the ranks of a plugin of srun outside the container.",
        tests=f"{_UNIT} plugin_of_srun",
    ),
    Mutant(
        "Container.check_connection",
        old="self.runtime.keeps_descriptors or is_pmix",
        new="True",
        fault="Each rank in an enroot container is a world of its own, since enroot closes PMI_FD.",
        tests=f"{_UNIT} enroot_needs",
    ),
    Mutant(
        "containers.select",
        old="by_srun or not runtime.is_plugin",
        new="True",
        fault="A plugin of srun is chosen where mpiexec starts the ranks, although Apptainer is installed.",
        tests=f"{_UNIT} default_runtime",
    ),
    Mutant(
        "containers.select",
        old="requested not in installed",
        new="False",
        fault="A runtime that is not installed is an error on each rank.",
        tests=f"{_UNIT} requested_runtime",
    ),
    Mutant(
        "containers.refuse_separation",
        old='environ.get(name, "").lower() in ("1", "true", "yes", "y", "on")',
        new="name in environ",
        fault="A variable that is set to 0 is refused.",
        tests=f"{_UNIT} separate_the_ranks",
    ),
    Mutant(
        "containers.refuse_separation",
        old="set_names and runtime is RUNTIMES['apptainer']",
        new="False",
        fault="With APPTAINER_CONTAINALL each rank is a world of its own.",
        tests=f"{_UNIT} separate_the_ranks",
    ),
    Mutant(
        "queries.container_commands",
        old='runtime.srun_option in constant_output(installed, "--help")',
        new="True",
        fault="Every Slurm seems to have pyxis, and srun rejects its options.",
        tests=f"{_UNIT} help_of_srun",
    ),
    Mutant(
        "launching.container",
        old="not Path(bind.source).exists()",
        new="False",
        fault="A missing path is an error on each rank.",
        tests=f"{_UNIT} wrong_option",
    ),
    Mutant(
        "launching.container",
        old="parsed.append(Bind.parse(log_dir))",
        fault="The logs of the ranks are written into the container, and lost.",
        tests=f"{_UNIT} command_of_apptainer",
    ),
    Mutant(
        "launching._refuse_hosts_from_container",
        old="nodes > 1",
        new="False",
        fault="mpiexec in a container without srun or ssh fails with an error about its daemons.",
        tests=f"{_UNIT} reaches_no_host",
    ),
    Mutant(
        "commands._options_of_step",
        old="[*options, *request.container.srun_options()]",
        new="options",
        fault="srun starts the ranks outside the container.",
        tests=f"{_UNIT} before_the_program",
    ),
    Mutant(
        "JobSpec.run_command",
        old="self.container is not None",
        new="False",
        fault="The job script looks for the Python of the image on the host.",
        tests=f"{_UNIT} launcher_outside",
    ),
    Mutant(
        "containers.connection_hint",
        old="not container",
        new="True",
        fault="Ranks that MPI has not connected in a container do not name the container.",
        tests=f"{_SEPARATION} name_the_reason",
    ),
    Mutant(
        "Separation.problem",
        old="not self.has_own_shm or local_size == 1",
        new="True",
        fault="MPI crashes or hangs in containers with a /dev/shm of their own.",
        tests=f"{_SEPARATION} common_shared_memory",
    ),
    Mutant(
        "Library.separated_environ",
        old="separation.has_own_users",
        new="False",
        fault="MPICH aborts at the first large message in containers with user namespaces of their own.",
        tests=f"{_SEPARATION} does_without",
    ),
    Mutant(
        "separation.of_this_process",
        old="not launcher and str(Path('/proc/self/ns/pid').readlink()) != _FIRST_PIDS",
        new="False",
        fault="Open MPI crashes in containers with PID namespaces of their own.",
        tests="tests/launch/test_containers.py -k 'separated_ranks and pid and this and not ipc'",
    ),
    Mutant(
        "mpi_job._check_launch",
        old="problem or separation.of_this_process(os.environ).problem_of_single()",
        new="problem",
        fault="Ranks in containers without the launcher's variables are N worlds of rank 0.",
        tests="tests/launch/test_containers.py -k 'name_the_option and cleanenv and this'",
    ),
]
