"""Mutants of tensors on GPUs: streams, events, staging and messages."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- posting_queue.py -----------------------------------------------------------------------------------
    Mutant(
        "PostingQueue.post_ready",
        old="self.waiting[0].is_ready()",
        new="True",
        fault="A call that starts a message waits for the GPU.",
        tests="tests/unit/test_posting_queue.py -k order",
    ),
    Mutant(
        "PostingQueue.post_ready",
        old="self._lock.acquire(blocking=False)",
        new="self._lock.acquire()",
        fault="A call that starts a message waits for the GPU while another thread waits for it.",
        tests="tests/unit/test_posting_queue.py -k another_one",
    ),
    Mutant(
        "_Entry._post_when_ready",
        old="self.ready.synchronize()",
        new="pass",
        fault="MPI sends host memory before the copy from the GPU has ended.",
        tests="tests/unit/test_posting_queue.py -k waits_posts_all",
    ),
    Mutant(
        "_Entry.is_ready",
        old="return True",
        new="return False",
        fault="A message whose copy has failed on the GPU is never completed, nor are those after it.",
        tests="tests/unit/test_posting_queue.py -k error_of_the_device",
    ),
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
