"""Mutants of tensors on GPUs: streams, events, staging and messages."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- thread_device.py, vendors.py -----------------------------------------------------------------------
    Mutant(
        "ThreadDevice.enter",
        old="torch.accelerator.set_stream(self.stream)",
        new="torch.accelerator.set_stream(self.__dict__.pop('stream'))",
        fault="The stream of a thread that runs operations is destroyed while it is the current one.",
        tests="tests/unit/test_gpus.py -k lasts",
    ),
    Mutant(
        "is_claimed",
        old="vendor.mpi_queries",
        new="vendor.mpi_queries[:1]",
        fault="An MPI that supports AMD GPUs under HIP's name counts as one without support.",
        tests="tests/mpi/test_gpu_transport.py -k answers_queries",
        ranks=2,
    ),
    Mutant(
        "vendors.vendor",
        old="ROCm() if torch.version.hip else CUDA()",
        new="CUDA()",
        fault="An AMD GPU counts as one of NVIDIA, and the process loads CUDA's driver.",
        tests="tests/unit/test_gpus.py -k vendor_of",
    ),
]
