"""Faults in the binding of ranks to cores."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_MACHINES = "tests/unit/test_binding.py -k cores_of_the_ranks_of_a_machine"
_OWN_GPU = "tests/unit/test_binding.py -k sees_only_its_own_gpu"
_SRUN = "tests/unit/test_binding.py -k srun_binds"
_MPIEXEC = "tests/unit/test_binding.py -k mpiexec_binds"
_PROCESSORS = "tests/unit/test_doctor.py -k test_the_processors"
_SHARED_CORES = "tests/unit/test_doctor.py -k share_cores"

MUTANTS = [
    # -- the topology of a host -----------------------------------------------------------------------------------
    Mutant(
        "host_info.cpus_by_core",
        old="min(siblings, default=cpu)",
        new="cpu",
        fault="Two ranks get the two hardware threads of one core.",
        tests=_MACHINES,
    ),
    Mutant(
        "locality.processors",
        old="(node_of.get(core[0], 0), core)",
        new="core",
        fault="On hosts that number the CPUs of two sockets alternately, ranks get cores of both sockets.",
        tests=_MACHINES,
    ),
    Mutant(
        "_read_nvidia",
        old="sorted(usable, key=lambda minor: addresses.get(minor, ''))",
        new="usable",
        fault="Ranks are bound far from their GPUs if the driver numbers the device files in another order than CUDA.",
        tests=_MACHINES,
    ),
    Mutant(
        "host_info.cgroup_cpus",
        old="(Path(path), *Path(path).parents)",
        new="(Path(path),)",
        fault="The CPUs of a control group whose parent restricts them are not known.",
        tests="tests/unit/test_binding.py -k control_group",
    ),
    # -- shares ---------------------------------------------------------------------------------------------------
    Mutant(
        "binding.shares",
        old="contextlib.suppress(LaunchError)",
        new="contextlib.nullcontext()",
        fault="With --bind auto a job without cores near a GPU does not start.",
        tests=_MACHINES,
    ),
    Mutant(
        "binding.shares",
        old="binding == AUTO and processors.visible",
        new="processors.visible",
        fault="With --bind numa the ranks are bound near their GPUs.",
        tests=_SRUN,
    ),
    Mutant(
        "_near_gpus",
        old="taken.update(free)",
        new="pass",
        fault="Ranks share cores if the cores near their GPUs overlap.",
        tests="tests/unit/test_binding.py -k served_before_others",
    ),
    Mutant(
        "_near_gpus",
        old="lambda item: len(item[0])",
        new="lambda item: -len(item[0])",
        fault="A GPU of which the cores are not known takes those of the others.",
        tests="tests/unit/test_binding.py -k served_before_others",
    ),
    Mutant(
        "_near_gpus",
        old="(visible[rank % len(visible)] or 0, rank)",
        new="rank",
        fault="Two ranks of a GCD get cores of two L3 caches.",
        tests=_MACHINES,
    ),
    Mutant(
        "_by_numa_node",
        old="(2 * rank + 1) * len(cores) // (2 * ranks)",
        new="rank * len(nodes[0])",
        fault="A NUMA node with few cores for the job has as many ranks as the others, which share cores.",
        tests=_MACHINES,
    ),
    Mutant(
        "_by_numa_node",
        old="ranks <= len(nodes)",
        new="ranks < 1",
        fault="A single rank is bound to one of two NUMA nodes.",
        tests=_MACHINES,
    ),
    Mutant(
        "binding.share_of",
        old="has_own_gpu and own is not None and binding in (AUTO, GPU)",
        new="False",
        fault="Under srun --gpus-per-task=1 a rank gets a fraction of the cores near its GPU.",
        tests=_OWN_GPU,
    ),
    Mutant(
        "binding.refuse_variables",
        old="not (name == SLURM_VARIABLE and environ.get(_SLURM_STEP))",
        new="True",
        fault="In the shell of an salloc --bind is refused because of a variable that Slurm has set.",
        tests="tests/unit/test_binding.py -k slurms_own_variable",
    ),
    # -- the launchers --------------------------------------------------------------------------------------------
    Mutant(
        "_binding_by_srun",
        old="machine.is_whole and set(job.cpus) == {own_cpus} and job.cpus_per_task is None",
        new="True",
        fault="srun gets masks in a job with a part of a node, and ignores them.",
        tests=_SRUN,
    ),
    Mutant(
        "_binding_by_srun",
        old="request.bind == binding.CORES and has_cpus and can_bind",
        new="request.bind == binding.CORES and has_cpus",
        fault="On a Slurm without task/affinity, srun ignores the option, and the ranks are not bound.",
        tests=_SRUN,
    ),
    Mutant(
        "srun",
        old="cpus and not bound.uses_whole_nodes",
        new="cpus",
        fault="srun fails because a mask is outside of the CPUs of the step.",
        tests=_SRUN,
    ),
    Mutant(
        "queries.slurm_binds",
        old="line.startswith('TaskPlugin ') and 'affinity' in line",
        new="'affinity' in line.lower()",
        fault="TaskPluginParam, which may name an affinity, is taken for the plugin.",
        tests="tests/unit/test_binding.py -k whether_slurm",
    ),
    Mutant(
        "_shares",
        old="machine.processors is None or (request.bind in (binding.AUTO, binding.GPU) and has_own_gpus)",
        new="machine.processors is None",
        fault="Tasks with a GPU each are bound by masks for GPUs that other tasks have.",
        tests=_SRUN,
    ),
    Mutant(
        "_binding_by_mpiexec",
        old="shares and place.is_on_one_host and mpi.bound_to_lists",
        new="shares and mpi.bound_to_lists",
        fault="The ranks of another host are bound by the lists of this one.",
        tests=_MPIEXEC,
    ),
    Mutant(
        "_binding_by_mpiexec",
        old="_Binding(unbound.options, None, unbound.environ, binds_in=place.per_node)",
        new="_Binding(unbound.options, None, binds_in=place.per_node)",
        fault="Intel MPI binds the ranks before they bind themselves, to other cores.",
        tests="tests/unit/test_binding.py -k intel_mpi",
    ),
    Mutant(
        "rank_binding._bind",
        old="os.environ.setdefault('OMP_NUM_THREADS', str(number))",
        new="os.environ['OMP_NUM_THREADS'] = str(number)",
        fault="A rank that binds itself ignores the user's OMP_NUM_THREADS.",
        tests="tests/unit/test_binding.py -k users_threads",
    ),
    Mutant(
        "launching._is_host_of",
        old="'SLURMD_NODENAME' in environ",
        new="True",
        fault="The masks of a login node are those of the job.",
        tests="tests/unit/test_binding.py -k host_of_the_job",
    ),
    # -- doctor ---------------------------------------------------------------------------------------------------
    Mutant(
        "ProcessorFacts.is_narrowed",
        old="len(self.cpus) < len(self.cpus_before_torch)",
        new="False",
        fault="The doctor does not find that the import of torch binds the process to one core.",
        tests="tests/unit/test_doctor.py -k test_the_processors",
    ),
    Mutant(
        "examination.collect",
        old="(memory_check, processor_check)",
        new="(memory_check,)",
        fault="The doctor reads the affinity after torch has narrowed it.",
        tests="tests/launch/test_doctor.py -k torch_narrows",
    ),
    Mutant(
        "_check_affinity",
        old="lists and facts.local_size > 1",
        new="lists",
        fault="The doctor warns of a list of CPUs for the threads of a single process.",
        tests=_PROCESSORS,
    ),
    Mutant(
        "_check_affinity",
        old="facts.cores == 1 < facts.share and facts.threads is None",
        new="facts.cores == 1 and facts.threads is None",
        fault="The doctor warns of one core for each rank on a host without more cores.",
        tests=_PROCESSORS,
    ),
    Mutant(
        "_check_overlaps",
        old="len(users) > 1",
        new="False",
        fault="The doctor does not find ranks whose CPUs overlap, or are hardware threads of one core.",
        tests=_SHARED_CORES,
    ),
    Mutant(
        "_check_binding",
        old="len(by_cpus) == 1 < len(ranks) and cores < of_job",
        new="len(ranks) > 1 and cores < of_job",
        fault="The doctor warns of ranks that Open MPI binds to the same NUMA node.",
        tests=_SHARED_CORES,
    ),
]
