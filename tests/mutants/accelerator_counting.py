"""Faults in the counting of accelerators, and in the launches that depend on their number and vendor."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_MACHINES = "tests/unit/test_machines.py -k ranks_devices_and_backend"
_FILES = "tests/unit/test_machines.py -k kernels_files"
_VARIABLES = "tests/unit/test_machines.py -k rules_of_its_vendor"

MUTANTS = [
    # -- the kernel's files ---------------------------------------------------------------------------------------
    Mutant(
        "counting.count",
        old="any(partitions.values())",
        new="partitions[NVIDIA]",
        fault="On a machine with GPUs of AMD, CUDA_VISIBLE_DEVICES adds GPUs of NVIDIA.",
        tests="tests/unit/test_machines.py -k another_vendor",
    ),
    Mutant(
        "counting.count",
        old="[0] * _MOST_DEVICES",
        new="[]",
        fault="On Windows Subsystem for Linux a rank per core is started although CUDA_VISIBLE_DEVICES names GPUs.",
        tests="tests/unit/test_machines.py -k without_device_files",
    ),
    Mutant(
        "_numbers",
        old="(int(name) for name in names if name.isdigit())",
        new="(int(name[0]) for name in names)",
        fault="The connectors of a card are taken for cards.",
        tests=_FILES,
    ),
    Mutant(
        "_read_nvidia",
        old="len(_children(root / 'proc/driver/nvidia/gpus', '*'))",
        new="0",
        fault="GPUs whose device files do not exist yet are not counted: the driver creates them at the first use.",
        tests=_FILES,
    ),
    Mutant(
        "_read_nvidia",
        old="'mig/gi*/ci*'",
        new="'mig/gi*/none*'",
        fault="Two GPUs with MIG devices get a rank each, and both ranks use the first device.",
        tests=_FILES,
    ),
    Mutant(
        "_is_amd_gpu",
        old="properties.get('unique_id') == 0",
        new="False",
        fault="The GPU in a Ryzen processor is counted: one rank is started in place of one per core.",
        tests=_FILES,
    ),
    Mutant(
        "_is_amd_gpu",
        old="properties.get('unique_id') == 0",
        new="not properties.get('unique_id')",
        fault="Kernels that do not report the unique ID show no GPU.",
        tests=_FILES,
    ),
    Mutant(
        "_is_amd_gpu",
        old="properties.get('cpu_cores_count', 0) > 0",
        new="False",
        fault="The GPU of an older APU, part of the processor's node, is counted.",
        tests=_FILES,
    ),
    Mutant(
        "_is_amd_gpu",
        old="minor == 0 or _may_open(root, minor)",
        new="True",
        fault="In a container the GPUs of other containers are counted.",
        tests=_FILES,
    ),
    Mutant(
        "_may_open",
        old="os.R_OK | os.W_OK",
        new="os.R_OK",
        fault="A GPU is counted that this user may not use.",
        tests="tests/unit/test_machines.py -k may_not_open",
    ),
    Mutant(
        "_is_discrete_intel_gpu",
        old="f'PCI_SLOT_NAME={_INTEGRATED_INTEL}' not in host_info.read(device / 'uevent').splitlines()",
        new="True",
        fault="On a laptop one rank is started for the GPU of the processor.",
        tests=_MACHINES,
    ),
    Mutant(
        "_is_discrete_intel_gpu",
        old="not minors or _may_open(root, minors[0])",
        new="True",
        fault="In a container the Intel GPUs of other containers are counted.",
        tests=_FILES,
    ),
    Mutant(
        "_tiles",
        old="len(_numbers(card / 'device', 'tile')) or len(_numbers(card / 'gt', 'gt'))",
        new="len(_numbers(card / 'device', 'tile'))",
        fault="With the driver i915 a GPU of two tiles gets one rank.",
        tests=_MACHINES,
    ),
    Mutant(
        "_tiles",
        old="len(_numbers(card / 'device', 'tile')) or len(_numbers(card / 'gt', 'gt'))",
        new="len(_numbers(card / 'gt', 'gt'))",
        fault="With the driver xe a GPU of two tiles gets one rank.",
        tests=_FILES,
    ),
    Mutant(
        "_read_gaudi",
        old="host_info.read(accel / f'accel{minor}/device/vendor') == _HABANA_VENDOR",
        new="True",
        fault="The NPU of a processor is taken for a Gaudi.",
        tests=_FILES,
    ),
    # -- variables ------------------------------------------------------------------------------------------------
    Mutant(
        "_valid",
        old="match is None or int(match['index'] or 0) >= devices",
        new="match is None",
        fault="Indices of CUDA_VISIBLE_DEVICES that no GPU has add ranks without a GPU.",
        tests=_VARIABLES,
    ),
    Mutant(
        "_valid",
        old="break",
        new="continue",
        fault="Entries behind an invalid one, which CUDA ignores, add ranks without a GPU.",
        tests=_VARIABLES,
    ),
    Mutant(
        "_valid",
        old="[] if repeat_hides_all else entries",
        new="entries",
        fault="CUDA_VISIBLE_DEVICES=1,1, with which CUDA hides all GPUs, starts a rank for a GPU.",
        tests=_VARIABLES,
    ),
    Mutant(
        "_count_rocm",
        old="devices = len(_valid(environ[_ROCR], devices, repeat_hides_all=False))",
        new="devices = len(_valid(environ[_ROCR], devices))",
        fault="ROCR_VISIBLE_DEVICES=1,1, with which ROCr shows a GPU, starts a rank per core.",
        tests=_VARIABLES,
    ),
    Mutant(
        "_count_rocm",
        old="_count_listed(environ.get(_HIP, environ.get(_CUDA)), devices)",
        new="_count_listed(environ.get(_HIP, environ.get(_CUDA)), len(partitions))",
        fault="HIP_VISIBLE_DEVICES selects among all GPUs, not among those that ROCR_VISIBLE_DEVICES leaves.",
        tests=_VARIABLES,
    ),
    Mutant(
        "_count_rocm",
        old="environ.get(_HIP, environ.get(_CUDA))",
        new="environ.get(_HIP)",
        fault="On GPUs of AMD CUDA_VISIBLE_DEVICES, which HIP reads too, is ignored.",
        tests=_VARIABLES,
    ),
    Mutant(
        "_count_cuda",
        old="1 if sees_mig else len(selected)",
        new="len(selected)",
        fault="Ranks are started for several MIG devices, and all use the first one: CUDA shows a process no other.",
        tests=_VARIABLES,
    ),
    Mutant(
        "_count_level_zero",
        old="environ.get('ZE_FLAT_DEVICE_HIERARCHY') == 'COMPOSITE'",
        new="environ.get('ZE_FLAT_DEVICE_HIERARCHY') != 'FLAT'",
        fault="Each GPU of Aurora gets one rank, so that half of the tiles are idle.",
        tests=_MACHINES,
    ),
    Mutant(
        "_count_level_zero",
        old="len({device_of[entry] for entry in selected if entry in device_of})",
        new="len([entry for entry in selected if entry in device_of])",
        fault="With ZE_AFFINITY_MASK=1.0,1.1 two ranks share the GPU that its tiles form.",
        tests=_VARIABLES,
    ),
    Mutant(
        "visible_devices.count",
        old="_RULES[vendor](environ, partitions) if partitions else 0",
        new="_RULES[vendor](environ, partitions)",
        fault="CUDA_VISIBLE_DEVICES=MIG-... makes a rank for a GPU that does not exist.",
        tests=_VARIABLES,
    ),
    Mutant(
        "visible_devices.hiding",
        old="name != _LEVEL_ZERO",
        new="True",
        fault="An empty ZE_AFFINITY_MASK, which selects all GPUs, silences the warning that torch cannot use them.",
        tests="tests/unit/test_launch_commands.py -k gpus_that_a_process_was_assigned",
    ),
    # -- launches -------------------------------------------------------------------------------------------------
    Mutant(
        "allocation._number",
        old="sum(map(int, numbers))",
        new="int(numbers[-1])",
        fault="In a Slurm job with GPUs of two types only those of the last type get a rank.",
        tests="tests/unit/test_launch_commands.py -k slurm_allocation_is_used",
    ),
    Mutant(
        "HostAllocation.with_rank_per_gpu",
        old="any(((host.slots or 1) > 1 for host in self.hosts))",
        new="False",
        fault="`mpiprocs` of PBS is replaced by the number of GPUs.",
        tests="tests/unit/test_machines.py -k rank_per_gpu",
    ),
    Mutant(
        "Machine.with_default_ranks",
        old="self.is_exclusive_to(job)",
        new="True",
        fault="A PBS job that shares its hosts starts ranks on the GPUs of other jobs.",
        tests="tests/unit/test_machines.py -k rank_per_gpu",
    ),
    Mutant(
        "launching.hosts",
        old="_machine(environ).with_default_ranks(queries.current_allocation(environ))",
        new="queries.current_allocation(environ)",
        fault="After a restart on the hosts that are left, a PBS job has one rank per host.",
        tests="tests/unit/test_machines.py -k hosts_of_pbs",
    ),
    Mutant(
        "Library.gpu_environ",
        old="self.implementation.vendor_environ.get(vendor, {})",
        new="next(iter(self.implementation.vendor_environ.values()), {})",
        fault="Intel MPI loads the library of Intel's GPUs on machines with other GPUs.",
        tests="tests/unit/test_launch_commands.py -k gpu_buffers",
    ),
    Mutant(
        "environment.forwarded",
        old="name not in _LOCAL and name.isidentifier()",
        new="name.isidentifier()",
        fault="The ranks on other hosts get the GPUs that the scheduler assigned on the first one.",
        tests="tests/unit/test_launch_commands.py -k forwarded",
    ),
]
