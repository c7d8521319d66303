"""Faults in the backend: operations, queue, works, reductions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- fast_path.py: small synchronous collectives ---------------------------------------------------------
    Mutant(
        "backend/fast_path.py",
        old="            and tensor.is_contiguous()\n",
        new="",
        fault="The fast path reduces the memory of a strided tensor as if its elements were contiguous.",
        tests="tests/mpi/test_collectives.py -k test_all_reduce_of_every_layout",
        ranks=4,
    ),
    Mutant(
        "backend/executor.py",
        old="recorder.note(self._record, name, dtype, count, root, False, is_running)",
        new="recorder.note(self._record, name, dtype, count, root, is_running, is_running)",
        fault="An all_reduce on the fast path is recorded as a message and does not count in the group's sequence.",
        tests="tests/launch/test_deadlines.py -k barrier",
        ranks=0,
    ),
    Mutant(
        "backend/executor.py",
        old="""        except BaseException as error:
            if operation is not None:
                self._state.fail(operation, error)
            raise
""",
        new="""        except BaseException:
            raise
""",
        fault="A group remains usable after an all_reduce on the fast path has failed.",
        tests="tests/mpi/test_shm.py -k test_unequal_sizes_are_refused_on_all_ranks",
        ranks=4,
    ),
    # -- repairs --------------------------------------------------------------------------------------------
    Mutant(
        "backend/executor.py",
        old="""                call()
        except BaseException as error:
""",
        new="""                call()
        except Exception as error:
""",
        fault="A group remains usable after a KeyboardInterrupt between two parts of an operation.",
        tests="tests/launch/test_interrupts.py -k between_two_parts",
        ranks=0,
    ),
    Mutant(
        "backend/checks.py",
        old="""        if _share(outputs[one], outputs[other]):
            raise ValueError(
                f"{what}: {argument}[{min(one, other)}]""",
        new="""        if False and _share(outputs[one], outputs[other]):
            raise ValueError(
                f"{what}: {argument}[{min(one, other)}]""",
        fault="A tensor that occurs twice in a coalesced all_reduce is reduced twice.",
        tests="tests/mpi/test_misuse.py",
        ranks=4,
    ),
    Mutant(
        "backend/checks.py",
        old="    if not address and value.numel():",
        new="    if False:",
        fault="A tensor without elements in memory is passed to MPI.",
        tests="tests/mpi/test_misuse.py",
        ranks=4,
    ),
    Mutant(
        "backend/torch_internals.py",
        old="        if not isinstance(group, kind):\n            return torchs(p2p_op_list)",
        new="        if True:\n            return torchs(p2p_op_list)",
        fault="NCCL receives the messages of a batch one by one.",
        tests="tests/mpi/test_composite.py -k batch_of_messages_is_one",
        ranks=4,
    ),
    Mutant(
        "backend/staging.py",
        old="            if self._all_ranks(are_on_host):",
        new="            if are_on_host:",
        fault="A rank sends a CPU tensor as a whole while another rank sends its GPU tensor in chunks.",
        tests="tests/mpi/test_gpu_transport.py -k take_part_together",
        ranks=4,
    ),
    # -- operations.py --------------------------------------------------------------------------------------
    Mutant(
        "backend/dense_collectives.py",
        old="self._put(source, flat, sum(buffers.counts(outputs[: self._rank])))",
        new="self._put(source, flat, self._rank * source.numel())",
        fault="all_gather of a list places the rank's own part as if all parts had the same length.",
        tests="tests/mpi/test_collectives.py -k test_all_gather_of_uneven_sizes",
        ranks=4,
    ),
    Mutant(
        "backend/operations.py",
        old='return messages.track("send", MessageWork([tensor], request, dense, operation, messages))',
        new='return messages.track("send", MessageWork([tensor], request, tensor, operation, messages))',
        fault="The dense copy of a tensor that is being sent is freed before the send has completed.",
        tests="tests/mpi/test_messages.py -k 'test_ring_of_large_messages and staged'",
        ranks=4,
    ),
    Mutant(
        "backend/collective.py",
        old="            if use.writes:\n",
        new="            if use.writes and not use.reads:\n",
        fault="The result of a reduction is not copied back into a strided tensor.",
        tests="tests/mpi/test_matrix.py -k 'test_all_reduce_and_reduce and bfloat16'",
        ranks=4,
    ),
    Mutant(
        "backend/dense_collectives.py",
        old="result = output if is_apart else torch.empty_like(output)",
        new="result = output",
        fault="reduce_scatter within a node writes its output while other ranks read it as input.",
        tests="tests/mpi/test_collectives.py -k 'test_the_output_may_overlap_two_blocks_of_the_input and direct'",
        ranks=4,
    ),
    Mutant(
        "backend/dense_collectives.py",
        old="                return source.detach().clone()\n",
        new="                return source\n",
        fault="A block that overlaps others at another offset is overwritten before slots have read it.",
        tests="tests/mpi/test_slots.py -k test_a_block_may_overlap",
        ranks=2,
    ),
    Mutant(
        "backend/dense_collectives.py",
        old="Algorithm.MPI if counts is not None else self.node",
        new="self.node",
        fault="Blocks of different sizes are exchanged as if all had the same size.",
        tests="tests/mpi/test_all_to_all.py",
        ranks=2,
    ),
    Mutant(
        "backend/dense_collectives.py",
        old='self.node.select("all_gather", nbytes) if is_even else Algorithm.MPI',
        new='self.node.select("all_gather", nbytes)',
        fault="Ranks whose tensors differ in size select the algorithm of all_gather by their own tensor.",
        tests="tests/mpi/test_collectives.py -k test_all_gather_of_uneven_sizes",
        ranks=4,
    ),
    Mutant(
        "backend/algorithms.py",
        old="(128 * _KIB,   4 * _KIB)",
        new="(128 * _KIB,   128 * _KIB)",
        fault="Sums of three ranks have other bits without the C library, because MPI computes them.",
        tests="tests/unit/test_algorithms.py",
        ranks=0,
    ),
    Mutant(
        "backend/dense_collectives.py",
        old="                ctypes.memmove(start, source.data_ptr(), nbytes)\n                start += nbytes\n",
        new="                ctypes.memmove(start, source.data_ptr(), nbytes)\n",
        fault="scatter of small tensors copies all parts to the place of the first one.",
        tests="tests/mpi/test_fast_path.py -k scatter",
        ranks=4,
    ),
    Mutant(
        "backend/dense_collectives.py",
        old="all([each.nbytes == nbytes and each.is_cpu for each in tensors])",
        new="True",
        fault="Lists of small tensors of different sizes are copied as if all had the size of this rank's tensor.",
        tests="tests/mpi/test_collectives.py -k uneven",
        ranks=4,
    ),
    Mutant(
        "backend/operations.py",
        old="torch_internals.is_profiling() or not request.Test():",
        new="torch_internals.is_profiling():",
        fault="A small message that MPI has not copied counts as sent, and its tensor may change before it is.",
        tests="tests/mpi/test_messages.py -k test_a_small_message_is_in_flight",
        ranks=4,
    ),
    # -- executor.py ----------------------------------------------------------------------------------------
    Mutant(
        "backend/executor.py",
        old="return not is_async and (worker is None or worker.is_idle)",
        new="return not is_async",
        fault="A synchronous operation runs before asynchronous operations that were queued earlier.",
        tests="tests/mpi/test_async.py -k 'test_a_synchronous_operation_runs_after and staged'",
        ranks=4,
    ),
    Mutant(
        "backend/executor.py",
        old="if (worker is not None and (worker.is_current_thread or not worker.is_idle)) or",
        new="if (worker is not None and worker.is_current_thread) or",
        fault="An all_reduce on the fast path runs before asynchronous operations that were queued earlier.",
        tests="tests/mpi/test_async.py -k 'test_a_synchronous_operation_runs_after and world'",
        ranks=4,
    ),
    Mutant(
        "backend/executor.py",
        old="return self._state.is_usable and self._try_turn(False)",
        new="return not self._record.broken and self._try_turn(False)",
        fault="The fast path of a destroyed group remains open, and calls MPI on a freed communicator.",
        tests="tests/mpi/test_groups.py -k test_a_destroyed_group_cannot_be_used",
        ranks=4,
    ),
    Mutant(
        "backend/executor.py",
        old="""        if not self._keeps_communicator:
            mpi.free(self._comm)
""",
        new="",
        fault="The communicator of a destroyed group is never freed.",
        tests="tests/mpi/test_groups.py -k test_a_destroyed_group_frees_its_communicator",
        ranks=4,
    ),
    Mutant(
        "backend/pending_messages.py",
        old="if (poller is not None and not poller.is_idle) or work.is_completed() or not mpi.serves_threads():",
        new="if poller is not None or work.is_completed() or not mpi.serves_threads():",
        fault="A new message does not wake a sleeping poller, and then advances only while a thread waits for it.",
        tests="tests/mpi/test_messages.py -k test_a_large_message_arrives_while_its_rank_does_something_else",
        ranks=4,
    ),
    Mutant(
        "backend/executor.py",
        old="seconds, operation.limit = operation.limit, None  # TimeoutError is raised instead",
        new="seconds = operation.limit",
        fault="The watchdog ends the job at the timeout of mpicomm.barrier(), which raises TimeoutError instead.",
        tests="tests/mpi/test_deadlines.py -k no_deadline_for_a_barrier",
        ranks=2,
    ),
    Mutant(
        "backend/executor.py",
        old="operation.limit = timeout.total_seconds()",
        new="pass",
        fault="The watchdog ends the job at the group's timeout, although the call has its own longer timeout.",
        tests="tests/launch/test_own_timeouts.py",
        ranks=0,
    ),
    Mutant(
        "backend/executor.py",
        old="kept = [list(each) if type(each) is list else each for each in arguments]",
        new="kept = arguments",
        fault="A queued operation reads the caller's list of tensors when it runs, after the caller has changed it.",
        tests="tests/mpi/test_async.py -k test_the_lists_of_a_queued_operation",
        ranks=4,
    ),
    Mutant(
        "backend/work.py",
        old="return self._done if future is None else future.done()",
        new="return self._done",
        fault="A work is completed before its future has its value.",
        tests="tests/mpi/test_async.py -k test_a_completed_work_has_the_value",
        ranks=4,
    ),
    # -- worker_thread.py -----------------------------------------------------------------------------------
    Mutant(
        "backend/worker_thread.py",
        old="self._jobs.append(job)",
        new="self._jobs.appendleft(job)",
        fault="The worker runs the most recently queued operation first.",
        tests="tests/mpi/test_async.py -k test_many_at_once",
        ranks=4,
    ),
    Mutant(
        "backend/worker_thread.py",
        old="return isinstance(work, QueuedWork) and not after and not self._gpu.is_known",
        new="return not after and not self._gpu.is_known",
        fault="A thread that waits for an operation runs the callbacks of others within its wait().",
        tests="tests/mpi/test_async.py -k test_a_waiting_thread_runs_no_callbacks",
        ranks=4,
    ),
    Mutant(
        "backend/worker_thread.py",
        old="if not self._running.acquire(blocking=False):",
        new="if not (self._running.acquire(blocking=False) or True):",
        fault="A thread that waits for an operation runs later ones while the worker still runs an earlier one.",
        tests="tests/mpi/test_async.py -k test_a_waiting_thread_does_not_overtake_the_worker",
        ranks=4,
    ),
    Mutant(
        "backend/worker_thread.py",
        old="""            self._open.pop(work, None)
        try:
            if not is_given_up:
                work.finish(error)
        finally:
            # Only now: operations that the callbacks call precede those that another thread calls next.
            with self._lock:
                self._pending -= 1
                self._changed.notify_all()
""",
        new="""            self._open.pop(work, None)
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
        "backend/worker_thread.py",
        old="""        for callback in after:
            callback.has_ended.wait()
""",
        new="",
        fault="An operation does not wait for the callbacks of other groups that were added before it.",
        tests="tests/mpi/test_async.py -k test_callbacks_on_other_groups",
        ranks=4,
    ),
    Mutant(
        "backend/worker_thread.py",
        old="lambda: self.is_idle or callback in self._awaited",
        new="lambda: self.is_idle",
        fault="A callback of one group waits for an operation of another group that waits for the callback.",
        tests="tests/mpi/test_async.py -k test_callbacks_on_other_groups",
        ranks=4,
    ),
    Mutant(
        "backend/worker_thread.py",
        old="                self._timer.set(_SOON_NS)\n",
        new="                pass\n",
        fault="An operation starts only when its caller waits for it.",
        tests="tests/mpi/test_async.py -k test_an_operation_runs_although_its_caller_does_not_wait",
        ranks=4,
    ),
    Mutant(
        "backend/worker_thread.py",
        old="elif self._pending == 0:",
        new="else:",
        fault="A program that starts operations at short intervals postpones the first of them each time.",
        tests="tests/mpi/test_async.py -k test_later_operations_do_not_delay_the_first",
        ranks=4,
    ),
    Mutant(
        "backend/worker_thread.py",
        old="                self._changed.wait_for(lambda: not self._jobs, _START_SECONDS)\n",
        new="                pass\n",
        fault="A long operation starts only when its caller releases the GIL, for which the other ranks wait.",
        tests="tests/mpi/test_async.py -k test_a_long_operation_starts_within_its_call",
        ranks=4,
    ),
    Mutant(
        "backend/future_callbacks.py",
        old="    return [each for each in _pending if each.thread == thread and each.queue is not queue]",
        new="    return [each for each in _pending if each.queue is not queue]",
        fault="Threads with separate groups wait for each other's callbacks, in orders that differ between ranks.",
        tests="tests/mpi/test_async.py -k test_threads_do_not_wait",
        ranks=4,
    ),
    Mutant(
        "backend/future_callbacks.py",
        old="    return [each for each in _pending if each.thread == thread and each.queue is not queue]",
        new="    return []",
        fault="Callbacks of two groups run in arbitrary order.",
        tests="tests/mpi/test_async.py -k test_callbacks_of_two_groups",
        ranks=4,
    ),
    Mutant(
        "backend/worker_thread.py",
        old="""        for work in self._watched:
            work.finish()
""",
        new="",
        fault="The future of an incomplete message never completes when its group is destroyed or aborted.",
        tests="tests/launch/test_aborted_groups.py -k future",
        ranks=0,
    ),
    # -- work.py --------------------------------------------------------------------------------------------
    Mutant(
        "backend/work.py",
        old="        return self._status.source\n",
        new="        return self._operation.group.ranks[self._status.source]\n",
        fault="source_rank() returns the sender's rank in the job, while torch expects its rank in the group.",
        tests="tests/mpi/test_messages.py -k test_any_source",
        ranks=4,
    ),
    Mutant(
        "backend/work.py",
        old="""        except Exception as error:  # noqa: BLE001  wait() raises it, on its caller's thread
            self._error = error
        self._memory = None
""",
        new="""        except Exception:  # noqa: BLE001  wait() raises it, on its caller's thread
            pass
        self._memory = None
""",
        fault="The error of a message that is shorter than its tensor is ignored, and the tensor keeps old values.",
        tests="tests/mpi/test_messages.py -k test_a_message_of_another_size_is_an_error",
        ranks=4,
    ),
    Mutant(
        "backend/work.py",
        old="""        self._operation.finish()
        self._keeper.forget(self)
""",
        new="        self._operation.finish()\n",
        fault="Completed messages and their tensors are never freed.",
        tests="tests/mpi/test_messages.py -k test_completed_messages_are_not_kept",
        ranks=4,
    ),
    # -- buffers.py -----------------------------------------------------------------------------------------
    Mutant(
        "backend/buffers.py",
        old=(
            "if not is_dense(each) or each.storage_offset() != place or each.untyped_storage().data_ptr() != storage:"
        ),
        new="if not is_dense(each) or each.untyped_storage().data_ptr() != storage:",
        fault="Parts of one storage with gaps between them, or in another order, are treated as one dense tensor.",
        tests="tests/mpi/test_matrix.py -k 'test_reduce_scatter and float32'",
        ranks=4,
    ),
    Mutant(
        "backend/buffers.py",
        old="return tensor.detach().resolve_conj().resolve_neg().contiguous()",
        new="return tensor.detach().contiguous()",
        fault="A tensor that torch conjugates lazily, such as x.conj(), is sent without the conjugation.",
        tests="tests/mpi/test_collectives.py -k test_views_that_torch_conjugates",
        ranks=4,
    ),
    # -- reductions.py --------------------------------------------------------------------------------------
    Mutant(
        "backend/reductions.py",
        old='rounding_mode="trunc"',
        new='rounding_mode="floor"',
        fault="Negative averages of integers are rounded down instead of toward zero.",
        tests="tests/mpi/test_matrix.py -k test_the_average_of_narrow_integers_does_not_overflow",
        ranks=4,
    ),
    Mutant(
        "backend/reductions.py",
        old="                interface.divide(raw, self.divisor)\n",
        new="""                dense = raw.to(tensor.dtype)
                interface.divide(dense, self.divisor)
""",
        fault="AVG of narrow floats rounds the sum before the division: it rounds twice, and float16 overflows.",
        tests="tests/mpi/test_narrow_floats.py -k test_an_average_whose_sum_is_beyond_the_range",
        ranks=4,
    ),
    # -- dtypes.py ------------------------------------------------------------------------------------------
    Mutant(
        "backend/dtypes.py",
        old='torch.uint32: "UINT32_T"',
        new='torch.uint32: "INT32_T"',
        fault="MIN and MAX of uint32 treat numbers from 2^31 on as negative.",
        tests="tests/mpi/test_matrix.py -k 'test_all_reduce_and_reduce and uint32'",
        ranks=4,
    ),
    # -- mpi_calls.py ---------------------------------------------------------------------------------------
    Mutant(
        "backend/mpi_calls.py",
        old="return dense.detach().view(-1).split(largest_count())",
        new="return dense.detach().view(-1).split(largest_count() + 1)",
        fault="The parts of a tensor that is too long for one call have one element more than MPI can count.",
        tests="tests/mpi/test_more_methods.py -k test_operations_that_the_limit_cuts_into_parts",
        ranks=4,
    ),
    Mutant(
        "backend/mpi_calls.py",
        old="        mpi.api().Request.Waitall(requests)\n",
        new="        pass\n",
        fault="An exchange of parts that are too long for one call returns before its messages have completed.",
        tests="tests/mpi/test_all_to_all.py -k test_even_parts",
        ranks=4,
    ),
    Mutant(
        "backend/mpi_calls.py",
        old="            block.copy_(got)\n",
        new="            pass\n",
        fault="Blocks that the collective call moves, between larger ones, are received and not copied to the output.",
        tests="tests/mpi/test_all_to_all.py",
        ranks=4,
    ),
    # -- process_group.py -----------------------------------------------------------------------------------
    Mutant(
        "backend/process_group.py",
        old="self._operations.record.timeout = timeout.total_seconds()",
        new="self._operations.record.timeout = timeout.seconds",
        fault="set_timeout() drops the days and the fractions of a second of its timeout.",
        tests="tests/mpi/test_more_methods.py -k test_a_timeout_of_the_group_set_later",
        ranks=4,
    ),
    Mutant(
        "backend/process_group.py",
        old="if output_split_sizes or input_split_sizes:",
        new="if output_split_sizes and input_split_sizes:",
        fault="all_to_all_single ignores split sizes that a rank passes only for the output or only for the input.",
        tests="tests/mpi/test_all_to_all.py -k test_uneven_parts_on_one_side",
        ranks=4,
    ),
    # -- torch_internals.py ---------------------------------------------------------------------------------
    Mutant(
        "backend/torch_internals.py",
        old="""    if timeout is not None:
        made.timeout = timeout
""",
        new="",
        fault="The timeout argument of a call is ignored; the group's timeout applies instead.",
        tests="tests/launch/test_deadlines.py -k own",
        ranks=0,
    ),
    Mutant(
        "backend/torch_internals.py",
        old="    return tensor.wait() if",
        new="    return tensor.elem if",
        fault="The output tensor of a running functional collective is read before the collective has completed.",
        tests="tests/mpi/test_collectives.py -k test_a_tensor_that_a_functional_collective_still_fills",
        ranks=4,
    ),
    Mutant(
        "backend/torch_internals.py",
        old="    return not _is_pending(value)",
        new="    return False",
        fault="Tensor subclasses do not receive operations.",
        tests="tests/features/test_dispatcher.py -k test_a_wrapper_subclass",
        ranks=4,
    ),
    Mutant(
        "backend/torch_internals.py",
        old="NotImplemented if is_fake else run(",
        new="run(",
        fault="Before torch 2.14, fake tensors are passed to MPI.",
        tests="tests/features/test_dispatcher.py -k test_fake_tensors",
        ranks=4,
    ),
    Mutant(
        "backend/torch_internals.py",
        old="        if work is NotImplemented:\n",
        new="        if False:\n",
        fault="Before torch 2.14, Gloo groups fail after a mode has received an operation.",
        tests="tests/features/test_dispatcher.py -k test_groups_of_other_backends",
        ranks=4,
    ),
    # -- dispatcher.py --------------------------------------------------------------------------------------
    Mutant(
        "backend/dispatcher.py",
        old="torch_internals.active_modes() > 0 or ",
        new="",
        fault="Dispatch modes receive no operations.",
        tests="tests/features/test_dispatcher.py -k test_the_mode_that_counts_collectives",
        ranks=4,
    ),
    Mutant(
        "backend/dispatcher.py",
        old=" and not torch_internals.is_dispatch_disabled()",
        new="",
        fault="An operation fails if a mode is active but disabled.",
        tests="tests/features/test_dispatcher.py -k test_no_mode_where_dispatch_is_disabled",
        ranks=4,
    ),
    Mutant(
        "backend/dispatcher.py",
        old="return JointWork(works) if len(works) > 1 else made.works[0]",
        new="return made.works[0]",
        fault="The work of an operation on a tensor subclass waits only for the first of the subclass's tensors.",
        tests="tests/features/test_dispatcher.py -k test_messages_to_a_wrapper_subclass",
        ranks=4,
    ),
    Mutant(
        "backend/process_group.py",
        old="        if not active_modes() and (work := self._fast_path.all_gather_single",
        new="        if (work := self._fast_path.all_gather_single",
        fault="Dispatch modes do not receive small synchronous operations.",
        tests="tests/features/test_dispatcher.py -k test_the_mode_that_counts_collectives",
        ranks=4,
    ),
    Mutant(
        "backend/composite.py",
        old="        if dispatcher.is_needed(*args, *kwargs.values()):\n",
        new="        if False:\n",
        fault="Dispatch modes do not receive the operations of the inner backend.",
        tests="tests/mpi/test_composite.py -k test_a_mode_receives_operations_of_the_inner_backend",
        ranks=4,
    ),
]
