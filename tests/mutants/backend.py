"""Faults in the backend: operations, queue, works, reductions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- fast_path.py: small synchronous collectives ---------------------------------------------------------
    Mutant(
        "FastPath._is_plain",
        old="tensor.is_contiguous()",
        new="True",
        fault="The fast path reduces the memory of a strided tensor as if its elements were contiguous.",
        tests="tests/mpi/test_collectives.py -k test_all_reduce_of_every_layout",
        ranks=4,
    ),
    Mutant(
        "Executor._note",
        old="False",
        new="is_running",
        fault="An all_reduce on the fast path is recorded as a message and does not count in the group's sequence.",
        tests="tests/launch/test_deadlines.py -k barrier",
    ),
    Mutant(
        "Executor.submit_plain",
        old="self._state.fail(operation, error)",
        fault="A group remains usable after an all_reduce on the fast path has failed.",
        tests="tests/mpi/test_shm.py -k test_unequal_sizes_are_refused_on_all_ranks",
        ranks=4,
    ),
    # -- repairs --------------------------------------------------------------------------------------------
    Mutant(
        "torch_internals.set_error",
        old="future._set_unwrap_func(value)\nfuture.set_result(list(tensors))",
        new="future.set_exception(error)",
        fault="DDP takes an exception for the result of an operation, and ends the process with SIGSEGV.",
        tests="tests/features/test_errors.py -k 'DDP and TimeoutError'",
        ranks=4,
    ),
    Mutant(
        "OrderedFuture.set_exception",
        old="backward_errors.record(error, self._backward_thread)",
        new="pass",
        fault="A backward pass in which an operation failed ends without an error, with wrong gradients.",
        tests="tests/features/test_errors.py -k 'DDP and TimeoutError'",
        ranks=4,
    ),
    Mutant(
        "backward_errors.record",
        old="own is None",
        new="True",
        fault="A backward pass raises an error of the pass that another thread runs.",
        tests="tests/unit/test_failed_futures.py",
    ),
    Mutant(
        "backward_errors.record",
        old="list(_errors.values()) if own is None else [own]",
        new="[[] if own is None else own]",
        fault="The error of an operation that a thread of a GPU started is lost.",
        tests="tests/unit/test_failed_futures.py",
    ),
    Mutant(
        "backward_errors._checked",
        old="errors = _errors[thread] = []",
        new="errors = _errors.setdefault(0, [])\n_errors[thread] = errors",
        fault="A backward pass raises an error that an operation before it has raised.",
        tests="tests/unit/test_failed_futures.py",
    ),
    Mutant(
        "torch_internals.check_backward",
        old="is_in_backward()",
        new="False",
        fault="A backward pass within another one, as of a reentrant checkpoint, discards the error of the outer one.",
        tests="tests/unit/test_failed_futures.py",
    ),
    Mutant(
        "backward_errors._check",
        old="raise errors[0] from error",
        new="raise errors[-1] from error",
        fault="A backward pass raises the last error: that the group is broken, in place of the reason.",
        tests="tests/unit/test_failed_futures.py",
    ),
    Mutant(
        "future_callbacks.all_of",
        old="torch.futures.collect_all(list(futures)).then(lambda _: [each.value() for each in futures])",
        new="torch.futures.collect_all(list(futures))",
        fault="A future of several messages succeeds although one has failed.",
        tests="tests/unit/test_failed_futures.py",
        ranks=0,
    ),
    Mutant(
        "Executor._run",
        old="BaseException",
        new="Exception",
        fault="A group remains usable after a KeyboardInterrupt between two parts of an operation.",
        tests="tests/launch/test_interrupts.py -k between_two_parts",
    ),
    Mutant(
        "distinct",
        old="_share(outputs[one], outputs[other])",
        new="False and _share(outputs[one], outputs[other])",
        fault="A tensor that occurs twice in a coalesced all_reduce is reduced twice.",
        tests="tests/mpi/test_misuse.py",
        ranks=4,
    ),
    Mutant(
        "in_memory",
        old="not address and value.numel()",
        new="False",
        fault="A tensor without elements in memory is passed to MPI.",
        tests="tests/mpi/test_misuse.py",
        ranks=4,
    ),
    Mutant(
        "coalesce_batches_of.batch_isend_irecv",
        old="not isinstance(group, kind)",
        new="True",
        fault="NCCL receives the messages of a batch one by one.",
        tests="tests/mpi/test_composite.py -k batch_of_messages_is_one",
        ranks=4,
    ),
    Mutant(
        "prepare.call",
        old="self._all_ranks(are_on_host)",
        new="are_on_host",
        fault="A rank sends a CPU tensor as a whole while another rank sends its GPU tensor in chunks.",
        tests="tests/mpi/test_gpu_transport.py -k take_part_together",
        ranks=4,
    ),
    # -- operations.py --------------------------------------------------------------------------------------
    Mutant(
        "DenseCollectives.all_gather_list",
        old="sum(buffers.counts(outputs[: self._rank]))",
        new="self._rank * source.numel()",
        fault="all_gather of a list places the rank's own part as if all parts had the same length.",
        tests="tests/mpi/test_collectives.py -k test_all_gather_of_uneven_sizes",
        ranks=4,
    ),
    Mutant(
        "Operations.send",
        old="MessageWork([tensor], request, dense, operation, messages)",
        new="MessageWork([tensor], request, tensor, operation, messages)",
        fault="The dense copy of a tensor that is being sent is freed before the send has completed.",
        tests="tests/mpi/test_messages.py -k 'test_ring_of_large_messages and staged'",
        ranks=4,
    ),
    Mutant(
        "_packed.call",
        old="use.writes",
        new="use.writes and not use.reads",
        fault="The result of a reduction is not copied back into a strided tensor.",
        tests="tests/mpi/test_matrix.py -k 'test_all_reduce_and_reduce and bfloat16'",
        ranks=4,
    ),
    Mutant(
        "DenseCollectives.reduce_scatter",
        old="output if is_apart else torch.empty_like(output)",
        new="output",
        fault="reduce_scatter within a node writes its output while other ranks read it as input.",
        tests="tests/mpi/test_collectives.py -k 'test_the_output_may_overlap_two_blocks_of_the_input and direct'",
        ranks=4,
    ),
    Mutant(
        "DenseCollectives._unshared",
        old="source.detach().clone()",
        new="source",
        fault="A block that overlaps others at another offset is overwritten before slots have read it.",
        tests="tests/mpi/test_slots.py -k test_a_block_may_overlap",
        ranks=2,
    ),
    Mutant(
        "DenseCollectives.all_to_all",
        old='Algorithm.MPI if counts is not None else self.node.select("all_to_all", source.nbytes)',
        new='self.node.select("all_to_all", source.nbytes)',
        fault="Blocks of different sizes are exchanged as if all had the same size.",
        tests="tests/mpi/test_all_to_all.py",
        ranks=2,
    ),
    Mutant(
        "DenseCollectives.all_gather_list",
        old='self.node.select("all_gather", nbytes) if is_even else Algorithm.MPI',
        new='self.node.select("all_gather", nbytes)',
        fault="Ranks whose tensors differ in size select the algorithm of all_gather by their own tensor.",
        tests="tests/mpi/test_collectives.py -k test_all_gather_of_uneven_sizes",
        ranks=4,
    ),
    Mutant(
        "backend.algorithms",
        old="(128 * _KIB,   0)",
        new="(128 * _KIB,   128 * _KIB)",
        fault="Sums of three ranks have other bits without the C library, because MPI computes them.",
        tests="tests/unit/test_algorithms.py",
    ),
    Mutant(
        "DenseCollectives.scatter",
        old="start += nbytes",
        fault="scatter of small tensors copies all parts to the place of the first one.",
        tests="tests/mpi/test_fast_path.py -k scatter",
        ranks=4,
    ),
    Mutant(
        "DenseCollectives._fits_staging",
        old="all([each.nbytes == nbytes and each.is_cpu for each in tensors])",
        new="True",
        fault="Lists of small tensors of different sizes are copied as if all had the size of this rank's tensor.",
        tests="tests/mpi/test_collectives.py -k uneven",
        ranks=4,
    ),
    Mutant(
        "Operations.send",
        old="not request.Test()",
        new="False",
        fault="A small message that MPI has not copied counts as sent, and its tensor may change before it is.",
        tests="tests/mpi/test_messages.py -k test_a_small_message_is_in_flight",
        ranks=4,
    ),
    # -- executor.py ----------------------------------------------------------------------------------------
    Mutant(
        "Executor._runs_here",
        old="worker is None or worker.is_idle",
        new="True",
        fault="A synchronous operation runs before asynchronous operations that were queued earlier.",
        tests="tests/mpi/test_async.py -k 'test_a_synchronous_operation_runs_after and staged'",
        ranks=4,
    ),
    Mutant(
        "Executor._take_turn",
        old="worker.is_current_thread or not worker.is_idle",
        new="worker.is_current_thread",
        fault="An all_reduce on the fast path runs before asynchronous operations that were queued earlier.",
        tests="tests/mpi/test_async.py -k 'test_a_synchronous_operation_runs_after and world'",
        ranks=4,
    ),
    Mutant(
        "Executor._take_turn",
        old="self._state.is_usable",
        new="not self._record.broken",
        fault="The fast path of a destroyed group remains open, and calls MPI on a freed communicator.",
        tests="tests/mpi/test_groups.py -k test_a_destroyed_group_cannot_be_used",
        ranks=4,
    ),
    Mutant(
        "Executor._take_down",
        old="if not self._keeps_communicator:",
        new="if False:",
        fault="The communicator of a destroyed group is never freed.",
        tests="tests/mpi/test_groups.py -k test_a_destroyed_group_frees_its_communicator",
        ranks=4,
    ),
    Mutant(
        "PendingMessages._let_advance",
        old="poller is not None and not poller.is_idle",
        new="poller is not None",
        fault="A new message does not wake a sleeping poller, and then advances only while a thread waits for it.",
        tests="tests/mpi/test_messages.py -k test_a_large_message_arrives_while_its_rank_does_something_else",
        ranks=4,
    ),
    Mutant(
        "Executor.barrier",
        old="seconds, operation.limit = operation.limit, None",
        new="seconds = operation.limit",
        fault="The watchdog ends the job at the timeout of mpicomm.barrier(), which raises TimeoutError instead.",
        tests="tests/mpi/test_deadlines.py -k no_deadline_for_a_barrier",
        ranks=2,
    ),
    Mutant(
        "Executor._note",
        old="operation.limit = timeout.total_seconds()",
        fault="The watchdog ends the job at the group's timeout, although the call has its own longer timeout.",
        tests="tests/launch/test_own_timeouts.py",
    ),
    Mutant(
        "Executor.submit_plain",
        old="[list(each) if type(each) is list else each for each in arguments]",
        new="arguments",
        fault="A queued operation reads the caller's list of tensors when it runs, after the caller has changed it.",
        tests="tests/mpi/test_async.py -k test_the_lists_of_a_queued_operation",
        ranks=4,
    ),
    Mutant(
        "QueuedWork.is_completed",
        old="self._done if future is None else future.done()",
        new="self._done",
        fault="A work is completed before its future has its value.",
        tests="tests/mpi/test_async.py -k test_a_completed_work_has_the_value",
        ranks=4,
    ),
    # -- worker_thread.py -----------------------------------------------------------------------------------
    Mutant(
        "Worker._run_job",
        old="flushes_denormals != _flushes_denormals()",
        new="False",
        fault="Whether a sum has denormal numbers depends on the thread that runs the operation: the ranks differ.",
        tests="tests/mpi/test_async.py -k denormals",
        ranks=2,
    ),
    Mutant(
        "Worker.submit",
        old="self._jobs.append",
        new="self._jobs.appendleft",
        fault="The worker runs the most recently queued operation first.",
        tests="tests/mpi/test_async.py -k test_many_at_once",
        ranks=4,
    ),
    Mutant(
        "Worker._may_be_taken",
        old="isinstance(work, QueuedWork)",
        new="True",
        fault="A thread that waits for an operation runs the callbacks of others within its wait().",
        tests="tests/mpi/test_async.py -k test_a_waiting_thread_runs_no_callbacks",
        ranks=4,
    ),
    Mutant(
        "Worker.run_for",
        old="self._running.acquire(blocking=False)",
        new="self._running.acquire(blocking=False) or True",
        fault="A thread that waits for an operation runs later ones while the worker still runs an earlier one.",
        tests="tests/mpi/test_async.py -k test_a_waiting_thread_does_not_overtake_the_worker",
        ranks=4,
    ),
    Mutant(
        "Worker._run_job",
        old="""
with self._lock:
    is_given_up = work not in self._open
    self._open.pop(work, None)
try:
    if not is_given_up:
        work.finish(error)
finally:
    # Only now: operations that the callbacks call precede those that another thread calls next.
    with self._lock:
        self._pending -= 1
        self._changed.notify_all()
""",
        new="""
with self._lock:
    is_given_up = work not in self._open
    self._open.pop(work, None)
    self._pending -= 1
    self._changed.notify_all()
if not is_given_up:
    work.finish(error)
""",
        fault="The queue counts as empty while callbacks run, so another thread's operation may run before theirs.",
        tests="tests/mpi/test_async.py -k test_calls_of_a_callback_run_before",
        ranks=4,
    ),
    Mutant(
        "Worker._wait_for",
        old="""
for callback in after:
    callback.has_ended.wait()
""",
        fault="An operation does not wait for the callbacks of other groups that were added before it.",
        tests="tests/mpi/test_async.py -k test_callbacks_on_other_groups",
        ranks=4,
    ),
    Mutant(
        "Worker.wait_for_place_of",
        old="self.is_idle or callback in self._awaited",
        new="self.is_idle",
        fault="A callback of one group waits for an operation of another group that waits for the callback.",
        tests="tests/mpi/test_async.py -k test_callbacks_on_other_groups",
        ranks=4,
    ),
    Mutant(
        "Worker.submit",
        old="self._timer.set(_SOON_NS)",
        fault="An operation starts only when its caller waits for it.",
        tests="tests/mpi/test_async.py -k test_an_operation_runs_although_its_caller_does_not_wait",
        ranks=4,
    ),
    Mutant(
        "Worker.submit",
        old="elif self._pending == 0:",
        new="elif True:",
        fault="A program that starts operations at short intervals postpones the first of them each time.",
        tests="tests/mpi/test_async.py -k test_later_operations_do_not_delay_the_first",
        ranks=4,
    ),
    Mutant(
        "Worker.submit",
        old="self._changed.wait_for(lambda: not self._jobs, _START_SECONDS)",
        fault="A long operation starts only when its caller releases the GIL, for which the other ranks wait.",
        tests="tests/mpi/test_async.py -k test_a_long_operation_starts_within_its_call",
        ranks=4,
    ),
    Mutant(
        "_of_others",
        old="each.thread == thread and each.queue is not queue",
        new="each.queue is not queue",
        fault="Threads with separate groups wait for each other's callbacks, in orders that differ between ranks.",
        tests="tests/mpi/test_async.py -k test_threads_do_not_wait",
        ranks=4,
    ),
    Mutant(
        "_of_others",
        old="[each for each in _pending if each.thread == thread and each.queue is not queue]",
        new="[]",
        fault="Callbacks of two groups run in arbitrary order.",
        tests="tests/mpi/test_async.py -k test_callbacks_of_two_groups",
        ranks=4,
    ),
    Mutant(
        "Poller.stop",
        old="""
for work in self._watched:
    work.finish()
""",
        fault="The future of an incomplete message never completes when its group is destroyed or aborted.",
        tests="tests/mpi/test_messages.py -k on_its_way",
        ranks=2,
    ),
    # -- work.py --------------------------------------------------------------------------------------------
    Mutant(
        "MessageWork.source_rank",
        old="self._status.source",
        new="self._operation.group.ranks[self._status.source]",
        fault="source_rank() returns the sender's rank in the job, while torch expects its rank in the group.",
        tests="tests/mpi/test_messages.py -k test_any_source",
        ranks=4,
    ),
    Mutant(
        "MessageWork._settle",
        old="self._error = error",
        fault="The error of a message that is shorter than its tensor is ignored, and the tensor keeps old values.",
        tests="tests/mpi/test_messages.py -k test_a_message_of_another_size_is_an_error",
        ranks=4,
    ),
    Mutant(
        "MessageWork._settle",
        old="self._keeper.forget(self)",
        fault="Completed messages and their tensors are never freed.",
        tests="tests/mpi/test_messages.py -k test_completed_messages_are_not_kept",
        ranks=4,
    ),
    # -- buffers.py -----------------------------------------------------------------------------------------
    Mutant(
        "_common_memory",
        old=("each.storage_offset() != place"),
        new="False",
        fault="Parts of one storage with gaps between them, or in another order, are treated as one dense tensor.",
        tests="tests/mpi/test_matrix.py -k 'test_reduce_scatter and float32'",
        ranks=4,
    ),
    Mutant(
        "pack",
        old="tensor.detach().resolve_conj().resolve_neg",
        new="tensor.detach",
        fault="A tensor that torch conjugates lazily, such as x.conj(), is sent without the conjugation.",
        tests="tests/mpi/test_collectives.py -k test_views_that_torch_conjugates",
        ranks=4,
    ),
    # -- reductions.py --------------------------------------------------------------------------------------
    Mutant(
        "Reduction.store",
        old='"trunc"',
        new='"floor"',
        fault="Negative averages of integers are rounded down instead of toward zero.",
        tests="tests/mpi/test_matrix.py -k test_the_average_of_narrow_integers_does_not_overflow",
        ranks=4,
    ),
    Mutant(
        "Reduction.store",
        old="interface.divide(raw, self.divisor)",
        new="""
dense = raw.to(tensor.dtype)
interface.divide(dense, self.divisor)
""",
        fault="AVG of narrow floats rounds the sum before the division: it rounds twice, and float16 overflows.",
        tests="tests/mpi/test_narrow_floats.py -k test_an_average_whose_sum_is_beyond_the_range",
        ranks=4,
    ),
    Mutant(
        "reductions._plan",
        old="_SORT_KEYS.get(wide or dtype) if name in _ORDERED else None",
        new="None",
        fault="MIN and MAX of NaN, and of 0 and -0, are what MPI makes of them: the results of the ranks differ.",
        tests="tests/mpi/test_matrix.py -k test_extremes",
        ranks=4,
    ),
    Mutant(
        "Reduction._nan_shift",
        old="count if self.name == 'MIN' else -count",
        new="0",
        fault="A NaN with a sign is the least number for MAX, a NaN without one the greatest for MIN.",
        tests="tests/mpi/test_matrix.py -k test_extremes",
        ranks=4,
    ),
    Mutant(
        "Reduction.store",
        old="dense.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)",
        new="dense.nan_to_num_(nan=0)",
        fault="MIN and MAX replace NaN and infinities by numbers.",
        tests="tests/mpi/test_matrix.py -k test_extremes",
        ranks=4,
    ),
    # -- dtypes.py ------------------------------------------------------------------------------------------
    Mutant(
        "backend.dtypes",
        old='"UINT32_T"',
        new='"INT32_T"',
        fault="MIN and MAX of uint32 treat numbers from 2^31 on as negative.",
        tests="tests/mpi/test_matrix.py -k 'test_all_reduce_and_reduce and uint32'",
        ranks=4,
    ),
    # -- mpi_calls.py ---------------------------------------------------------------------------------------
    Mutant(
        "_parts",
        old="dense.detach().view(-1).split(largest_count())",
        new="dense.detach().view(-1).split(largest_count() + 1)",
        fault="The parts of a tensor that is too long for one call have one element more than MPI can count.",
        tests="tests/mpi/test_more_methods.py -k test_operations_that_the_limit_cuts_into_parts",
        ranks=4,
    ),
    Mutant(
        "_messages",
        old="mpi.api().Request.Waitall(requests)",
        fault="An exchange of parts that are too long for one call returns before its messages have completed.",
        tests="tests/mpi/test_all_to_all.py -k test_even_parts",
        ranks=4,
    ),
    Mutant(
        "_Blocks.fill",
        old="block.copy_(got)",
        fault="Blocks that the collective call moves, between larger ones, are received and not copied to the output.",
        tests="tests/mpi/test_all_to_all.py",
        ranks=4,
    ),
    # -- process_group.py -----------------------------------------------------------------------------------
    Mutant(
        "MPIProcessGroup.set_timeout",
        old="timeout.total_seconds()",
        new="timeout.seconds",
        fault="set_timeout() drops the days and the fractions of a second of its timeout.",
        tests="tests/mpi/test_more_methods.py -k test_a_timeout_of_the_group_set_later",
        ranks=4,
    ),
    Mutant(
        "MPIProcessGroup.all_to_all_single",
        old="output_split_sizes or input_split_sizes",
        new="output_split_sizes and input_split_sizes",
        fault="all_to_all_single ignores split sizes that a rank passes only for the output or only for the input.",
        tests="tests/mpi/test_all_to_all.py -k test_uneven_parts_on_one_side",
        ranks=4,
    ),
    # -- torch_internals.py ---------------------------------------------------------------------------------
    Mutant(
        "options",
        old="if timeout is not None:",
        new="if False:",
        fault="The timeout argument of a call is ignored; the group's timeout applies instead.",
        tests="tests/launch/test_deadlines.py -k own",
    ),
    Mutant(
        "arrived",
        old="tensor.wait()",
        new="tensor.elem",
        fault="The output tensor of a running functional collective is read before the collective has completed.",
        tests="tests/mpi/test_collectives.py -k test_a_tensor_that_a_functional_collective_still_fills",
        ranks=4,
    ),
    Mutant(
        "overrides_dispatch",
        old="not _is_pending(value)",
        new="False",
        fault="Tensor subclasses do not receive operations.",
        tests="tests/features/test_dispatcher.py -k test_a_wrapper_subclass",
        ranks=4,
    ),
    Mutant(
        "add_kernel.kernel",
        old="NotImplemented if is_fake else run(dist.ProcessGroup.unbox(args[index]), args[:index])",
        new="run(dist.ProcessGroup.unbox(args[index]), args[:index])",
        fault="Before torch 2.14, fake tensors are passed to MPI.",
        tests="tests/features/test_dispatcher.py -k test_fake_tensors",
        ranks=4,
    ),
    Mutant(
        "add_kernel.kernel",
        old="work is NotImplemented",
        new="False",
        fault="Before torch 2.14, Gloo groups fail after a mode has received an operation.",
        tests="tests/features/test_dispatcher.py -k test_groups_of_other_backends",
        ranks=4,
    ),
    # -- dispatcher.py --------------------------------------------------------------------------------------
    Mutant(
        "is_needed",
        old="torch_internals.active_modes() > 0 or any(map(_has_override, arguments))",
        new="any(map(_has_override, arguments))",
        fault="Dispatch modes receive no operations.",
        tests="tests/features/test_dispatcher.py -k test_the_mode_that_counts_collectives",
        ranks=4,
    ),
    Mutant(
        "is_needed",
        old="not torch_internals.is_dispatch_disabled()",
        new="True",
        fault="An operation fails if a mode is active but disabled.",
        tests="tests/features/test_dispatcher.py -k test_no_mode_where_dispatch_is_disabled",
        ranks=4,
    ),
    Mutant(
        "call",
        old="JointWork(works) if len(works) > 1 else made.works[0]",
        new="made.works[0]",
        fault="The work of an operation on a tensor subclass waits only for the first of the subclass's tensors.",
        tests="tests/features/test_dispatcher.py -k test_messages_to_a_wrapper_subclass",
        ranks=4,
    ),
    Mutant(
        "MPIProcessGroup.all_gather_single",
        old="not active_modes() and (work := self._fast_path.all_gather_single(output, source, opts)) is not None",
        new="(work := self._fast_path.all_gather_single(output, source, opts)) is not None",
        fault="Dispatch modes do not receive small synchronous operations.",
        tests="tests/features/test_dispatcher.py -k test_the_mode_that_counts_collectives",
        ranks=4,
    ),
    Mutant(
        "_delegate.method",
        old="dispatcher.is_needed(*args, *kwargs.values())",
        new="False",
        fault="Dispatch modes do not receive the operations of the inner backend.",
        tests="tests/mpi/test_composite.py -k test_a_mode_receives_operations_of_the_inner_backend",
        ranks=4,
    ),
]
