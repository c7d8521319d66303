"""Mutants of tensors on GPUs: streams, events, staging and messages."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FUZZ, LATE = "tests/gpu/test_fuzz.py", "tests/gpu/test_late_device.py"
ADDRESSES = "tests/gpu/test_gpu_aware_mpi.py"


def _on_the_device(place: str, old: str, new: str, fault: str, tests: str = FUZZ) -> Mutant:
    """Return a fault that two ranks find on the emulated device."""
    return Mutant(place, old=old, new=new, fault=fault, tests=tests, ranks=2)


MUTANTS = [
    # -- streams and events ---------------------------------------------------------------------------------
    _on_the_device(
        "DeviceMover.follow",
        "mark.wait(self._fetching)",
        "",
        "Content is copied to the host before it has been computed.",
    ),
    _on_the_device(
        "DeviceMover.follow", "mark.wait(self._putting)", "", "A result replaces content that is still to be read."
    ),
    _on_the_device(
        "DeviceMover._copy",
        "accelerator.on_stream(stream)",
        "accelerator.on_stream(None)",
        "Copies run on another stream than that of their event.",
    ),
    _on_the_device(
        "DeviceMover._copy",
        "accelerator.record_event(stream)",
        "accelerator.end_of_work(self._device)",
        "The event of copies is one of another stream.",
    ),
    _on_the_device(
        "accelerator.on_stream",
        "torch.accelerator.set_stream(previous)",
        "pass",
        "The stream of the copies remains the current one of the caller's thread.",
    ),
    _on_the_device(
        "accelerator.on_stream",
        "torch.accelerator.set_device_index(device)",
        "pass",
        "After an operation on a tensor of another GPU, that GPU is the current one of the caller's thread.",
        "tests/gpu/test_tensors.py -k current_device",
    ),
    _on_the_device(
        "ThreadDevice.enter",
        "torch.accelerator.set_stream(self.stream)",
        "pass",
        "An asynchronous operation waits for all work that the program queues on the GPU after it.",
        f"{ADDRESSES} -k later_work",
    ),
    _on_the_device(
        "_Part.__init__",
        "self._mark = mover.mark()",
        "self._mark = None if mover.is_host else torch.Event(tensor.device)",
        "Copies follow an event that was never recorded.",
    ),
    # -- GPU-aware MPI ----------------------------------------------------------------------------------------
    _on_the_device(
        "GPUDirect.prepare", "mark.synchronize()", "pass", "MPI reads content before it has been computed.", ADDRESSES
    ),
    _on_the_device(
        "GPUDirect.for_sending",
        "return buffers.pack(tensor), accelerator.end_of_work(tensor.device)",
        "return buffers.pack(tensor), None",
        "MPI sends content before it has been computed.",
        ADDRESSES,
    ),
    _on_the_device(
        "GPUDirect.for_receiving",
        "return output_buffer, accelerator.end_of_work(tensor.device), deliver",
        "return output_buffer, None, deliver",
        "A message replaces content that is still to be read.",
        ADDRESSES,
    ),
    _on_the_device(
        "mpi_calls.spec",
        "buffers.synchronize_stream(dense)",
        "pass",
        "MPI reads a copy on the GPU before it has been made.",
        ADDRESSES,
    ),
    _on_the_device(
        "DenseCollectives._copy_into",
        "buffers.without_alias(source.detach().view(-1), block)",
        "source.detach().view(-1)",
        "A rank's part is copied to its place while the copy changes the part.",
        ADDRESSES,
    ),
    # -- staging --------------------------------------------------------------------------------------------
    _on_the_device(
        "_Part.host",
        "self._fetched[number % _DEPTH].synchronize()",
        "",
        "MPI sends a chunk before its copy to the host has ended.",
    ),
    _on_the_device(
        "staging._run", "part.wait_for_copies()", "pass", "An operation ends before its result is on the device."
    ),
    _on_the_device(
        "_Part.start_to_host",
        "self._put[slot].synchronize()",
        "",
        "The memory of a chunk is overwritten before its copy to the device has ended.",
    ),
    _on_the_device(
        "StagingTransport._without_hazards",
        "tensor.detach().clone() if is_overwritten else tensor",
        "tensor",
        "The result of one chunk overwrites the input of the next.",
    ),
    _on_the_device(
        "DeviceMover.memory",
        'torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)',
        'torch.empty(count, dtype=dtype, device="cpu")',
        "Copies to host memory that is not pinned block the caller.",
        f"{LATE} -k asynchronous",
    ),
    _on_the_device(
        "staging._run",
        "part.start_to_host(number + 1, chunks[number + 1])",
        "part.start_to_host(number + 1, chunks[number + 1]), part.host(number + 1)",
        "The next chunk is copied before the transfer of this one, not beside it.",
        f"{LATE} -k overlap",
    ),
    _on_the_device(
        "_Part._is_there",
        "self._mover.is_host and len(chunk) == 1",
        "len(chunk) == 1",
        "MPI gets the address of device memory, and its code on the CPU reads it.",
    ),
    # -- messages -------------------------------------------------------------------------------------------
    _on_the_device(
        "_EndOfCopies.__init__",
        "self._event, self._pairs = event, pairs",
        "self._event = event",
        "The packed copy of a tensor is freed before it has been copied to the host.",
    ),
    _on_the_device(
        "StagingTransport.for_sending", "part.start()", "", "A message is sent before its content has been computed."
    ),
    _on_the_device(
        "_Part.deliver", "self.start()", "", "A received message replaces content that is still to be read."
    ),
    _on_the_device(
        "Transfer._advance",
        "self._copied.synchronize()",
        "pass",
        "A receive ends before the message is on the device.",
    ),
    _on_the_device(
        "Transfer._advance",
        "not self._copied.query()",
        "self._copied.synchronize()",
        "A message to a busy stream delays all other messages.",
        f"{LATE} -k busy_stream",
    ),
    _on_the_device(
        "PendingMessages.send",
        "ready is not None or self.unposted.waiting",
        "ready is not None",
        "A message from the host overtakes an earlier one from the device.",
    ),
    _on_the_device(
        "Transfer.test",
        "self._messages.unposted.post_ready()",
        "pass",
        "A message is not sent while its rank computes.",
        f"{LATE} -k while_its_rank_computes",
    ),
    _on_the_device(
        "plain_messages.c",
        "return unposted > 0 ? 0 : ",
        "return ",
        "A plain message from the host overtakes an earlier one from the device.",
    ),
    # -- collectives API ------------------------------------------------------------------------------------
    _on_the_device(
        "Handle._step",
        "accelerator.on_stream(self._stream)",
        "accelerator.on_stream(None)",
        "Later steps of an operation run on another stream than the first.",
    ),
    _on_the_device(
        "_let_current_stream_wait",
        "current.wait_stream(stream)",
        "",
        "A result is read on another stream before it has been computed.",
        f"{LATE} -k another_stream",
    ),
    _on_the_device(
        "_let_current_stream_wait",
        "tensor.record_stream(current)",
        "pass",
        "The memory of a result is reused before another stream has read it.",
        f"{LATE} -k another_stream",
    ),
    # -- posting_queue.py -----------------------------------------------------------------------------------
    _on_the_device(
        "PendingMessages.wait_for_all",
        "self.unposted.post_all()",
        "pass",
        "A message whose group ends before the device has computed its content is never sent.",
        f"{LATE} -k group_that_ends",
    ),
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
    Mutant(
        "transport.has_reached",
        old="not vendors.vendor().is_capturing() and event.query()",
        new="event.query()",
        fault="A message that waits for a GPU invalidates the CUDA graph that its caller captures.",
        tests="tests/unit/test_posting_queue.py -k queries_no_event",
    ),
    Mutant(
        "Transfer._advance",
        old="not waits and vendors.is_capturing(self.tensor.device)",
        new="False",
        fault="The copy of a received message becomes a part of the CUDA graph that its caller captures.",
        tests="tests/unit/test_posting_queue.py -k completes_no_message",
    ),
    # -- beside a vendor's library --------------------------------------------------------------------------
    _on_the_device(
        "CompositeProcessGroup.barrier",
        "accelerator.wait_for_work()",
        "pass",
        "A barrier returns before the GPU has finished the work of the ranks.",
        "tests/gpu/test_vendor.py -k barrier",
    ),
    # -- thread_device.py, vendors.py -----------------------------------------------------------------------
    Mutant(
        "CUDA.own_stream",
        old="weakref.finalize(owner, _idle_streams[ordinal].append, handle).atexit = False",
        new="pass",
        fault="Each group that has ended leaves streams of the GPU that nothing uses.",
        tests="tests/unit/test_gpus.py -k used_again",
    ),
    Mutant(
        "ThreadDevice.note",
        old="vendors.vendor().own_stream(device, self)",
        new="vendors.vendor().own_stream(device, type('Owner', (), {})())",
        fault="Two threads that run operations have one stream of the GPU.",
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
        "vendors._vendor_of",
        old="ROCm() if torch.version.hip else CUDA()",
        new="CUDA()",
        fault="An AMD GPU counts as one of NVIDIA, and the process loads CUDA's driver.",
        tests="tests/unit/test_gpus.py -k vendor_of",
    ),
    Mutant(
        "bytes_of",
        old="dense.as_strided((dense.numel(),), (1,))",
        new="dense.view(-1)",
        fault="A column of a matrix of one row cannot be sent.",
        tests="tests/unit/test_pytree.py -k one_row",
    ),
    # -- Horovod --------------------------------------------------------------------------------------------
    _on_the_device(
        "ProcessSetEngine._complete",
        "accelerator.on_stream(self._gpu.stream)",
        "accelerator.on_stream(None)",
        "An operation fuses its tensors in a buffer from which the results before it are still to be read.",
        "tests/gpu/test_horovod_streams.py -k another_stream",
    ),
    _on_the_device(
        "Submission.wait_for_events",
        "tensor.record_stream(accelerator.current_stream(tensor.device))",
        "pass",
        "The engine reuses the memory of a result before the stream of the program has read it.",
        "tests/gpu/test_horovod_streams.py -k received_splits",
    ),
    _on_the_device(
        "tensor_operations._run",
        "call.tensors if splits is None else [*call.tensors, splits]",
        "call.tensors",
        "The received splits of an alltoall on the host are overwritten on the GPU before they are read.",
        "tests/gpu/test_horovod_streams.py -k received_splits",
    ),
    _on_the_device(
        "Submission.wait_for_events",
        "event.wait(accelerator.current_stream(event.device))",
        "pass",
        "Tensors are reduced before they have been computed.",
        "tests/gpu/test_horovod_streams.py",
    ),
]
