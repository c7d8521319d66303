"""Mutants of the accelerators of a job: their assignment to ranks, and the backend that their vendor determines."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_DEVICES = "tests/unit/test_devices.py"
_BACKENDS = "tests/unit/test_backend_choice.py"

MUTANTS = [
    # -- devices/assignment ---------------------------------------------------------------------------------
    Mutant(
        "visible_devices",
        old="all(uuids) and len(set(uuids)) == count",
        new="all(uuids)",
        fault="Two devices with the same UUID count as one.",
        tests=f"{_DEVICES} -k without_uuids",
    ),
    Mutant(
        "visible_devices",
        old="all(uuids) and len(set(uuids)) == count",
        new="True",
        fault="Devices without a UUID count as one device.",
        tests=f"{_DEVICES} -k without_uuids",
    ),
    Mutant(
        "identities",
        old="environ.get(name)",
        new="name in environ",
        fault="Devices are identified by an empty variable, which selects none.",
        tests=f"{_DEVICES} -k without_uuids",
    ),
    Mutant(
        "identities",
        old="len(settings) == 1 and len(entries) == count",
        new="len(entries) == count",
        fault="A variable that counts among the devices of another one identifies devices alone.",
        tests=f"{_DEVICES} -k without_uuids",
    ),
    Mutant(
        "identities",
        old="len(settings) == 1 and len(entries) == count",
        new="len(settings) == 1",
        fault="The second tile of a GPU is lost.",
        tests=f"{_DEVICES} -k without_uuids",
    ),
    Mutant(
        "usable_devices",
        old="index == requested.index",
        new="True",
        fault="A rank gets another device than that of bootstrap(device=...).",
        tests=f"{_DEVICES} -k is_the_only_one",
    ),
    Mutant(
        "why_unusable",
        old="vendors.vendor() if is_built else vendors.of_variable(assigned.partition('=')[0])",
        new="vendors.vendor()",
        fault="On an AMD node with a torch for CPUs, the message names no vendor.",
        tests=f"{_DEVICES} -k test_why_an_assigned_gpu",
    ),
    Mutant(
        "assignment.parse",
        old="requested.type == 'cpu' and not isinstance(device, int)",
        new="requested.type == 'cpu'",
        fault="With a torch for CPUs, the index of a GPU is accepted as the CPU.",
        tests=f"{_DEVICES} -k test_a_machine_without_gpus",
    ),
    Mutant(
        "assignment.parse",
        old="torch.device('cpu')",
        new="requested",
        fault="bootstrap(device='cpu:0') makes GPU 0 the device under torchrun.",
        tests=f"{_DEVICES} -k test_the_cpu_is_always_there",
    ),
    Mutant(
        "assignment.parse",
        old="own_type is not None and requested.type != own_type",
        new="False",
        fault="A device of an accelerator that this torch lacks is accepted.",
        tests=f"{_DEVICES} -k of_another_accelerator",
    ),
    Mutant(
        "of_variable",
        old="name in known.visible_variables",
        new="False",
        fault="The message about an AMD or Intel GPU that torch cannot use names CUDA.",
        tests=f"{_DEVICES} -k test_why_an_assigned_gpu",
    ),
    # -- the backend of the vendor --------------------------------------------------------------------------
    Mutant(
        "vendor_backend",
        old="not dist.is_backend_available(backend)",
        new="False",
        fault="bootstrap() selects NCCL although torch was built without it.",
        tests=f"{_BACKENDS} -k vendors_backend",
    ),
    Mutant(
        "vendor_backend",
        old="backend in _HOST_BACKENDS",
        new="False",
        fault="Gloo counts as the library of a vendor.",
        tests=f"{_BACKENDS} -k vendors_backend",
    ),
    Mutant(
        "choose_backend",
        old="device_each and vendor",
        new="vendor",
        fault="The vendor's library is selected although ranks share a device.",
        tests=f"{_BACKENDS} -k test_auto",
    ),
    Mutant(
        "vendor_library",
        old="(AUTO, MPI, GLOO)",
        new="(AUTO, MPI)",
        fault="bootstrap('gloo') refuses ranks that share a GPU.",
        tests=f"{_BACKENDS} -k without_a_vendor",
    ),
    Mutant(
        "registration._register",
        old="['cpu']",
        new="['cpu', 'privateuseone']",
        fault="mpicomm becomes torch's default backend of an extension's device, in place of the vendor's.",
        tests=f"{_BACKENDS} -k of_an_extension",
    ),
    Mutant(
        "register_beside",
        old="name not in _names",
        new="True",
        fault="Each bootstrap() of a process registers the backend again.",
        tests=f"{_BACKENDS} -k of_an_extension",
    ),
    Mutant(
        "update_device_types",
        old="accelerator.device_type() if accelerator.is_available() else None",
        new="accelerator.device_type()",
        fault="Without a GPU, a ShardedTensor's gather requests CUDA.",
        tests=f"{_BACKENDS} -k device_types",
    ),
    # -- MPI beside the vendor's library --------------------------------------------------------------------
    Mutant(
        "mpi_takes_gpu_tensors",
        old="vendor if backend == AUTO else vendor_library(backend)",
        new="vendor_library(backend)",
        fault="With 'auto', MPI supports GPU buffers beside NCCL, which can deadlock.",
        tests=f"{_BACKENDS} -k takes_no_gpu_tensors",
    ),
    Mutant(
        "mpi_takes_gpu_tensors",
        old="gpu_aware == '1'",
        new="True",
        fault="MPICOMM_GPU_AWARE=0 leaves MPI's support for GPU buffers enabled.",
        tests=f"{_BACKENDS} -k takes_no_gpu_tensors",
    ),
    Mutant(
        "mpi.initialize",
        old="os.environ.setdefault(name, value)",
        new="os.environ[name] = value",
        fault="The user's variable for GPU buffers is replaced.",
        tests="tests/launch/test_gpu_start.py -k of_the_user",
    ),
    Mutant(
        "mpi_job.initialize",
        old="plan.mpi_takes_gpu_tensors(request.backend, accelerator.vendor_backend(), settings.gpu_aware)",
        new="True",
        fault="MPI supports GPU buffers beside NCCL, which can deadlock.",
        tests="tests/launch/test_gpu_start.py -k vendor",
    ),
    Mutant(
        "_gpu_variables",
        old="not host_info.gpus(os.environ)",
        new="True",
        fault="MPI does not support GPU buffers, or does so beside NCCL.",
        tests="tests/launch/test_gpu_start.py -k vendor",
    ),
    Mutant(
        "mpi_job.initialize",
        old="limit = max(request.join_timeout_seconds, _SHORTEST_INIT)",
        new="limit = max(request.join_timeout_seconds, _SHORTEST_INIT, accelerator.count())",
        fault="bootstrap() calls the driver before MPI_Init.",
        tests="tests/launch/test_gpu_start.py -k auto",
    ),
    Mutant(
        "registration.create",
        old="from mpicomm.backend.process_group import MPIProcessGroup",
        new="from mpicomm.backend.process_group import MPIProcessGroup\nupdate_device_types()",
        fault="init_process_group('mpicomm') calls the driver before MPI_Init.",
        tests="tests/launch/test_gpu_start.py -k without",
    ),
    Mutant(
        "is_claimed",
        old="mpi.library().has_gpu_disabled(environ)",
        new="False",
        fault="The test of GPU-aware MPI passes a GPU address to an MPI whose support for GPUs is disabled.",
        tests="tests/mpi/test_gpu_transport.py -k without_support",
        ranks=2,
    ),
    Mutant(
        "Library.gpu_environ",
        old="if not takes_gpu_tensors:\n    return self.implementation.no_gpu_environ",
        fault="MPI's support for GPU buffers is never disabled.",
        tests="tests/unit/test_launch_commands.py -k gpu_buffers",
    ),
]
