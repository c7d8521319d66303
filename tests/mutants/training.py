"""Faults in the trainer, its checkpoints, its reports and the benchmarks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- agreement of the ranks -----------------------------------------------------------------------------
    Mutant(
        "StopVote.close",
        old="self._gathered.tolist",
        new="self._mine.tolist",
        fault="Each rank checks only its own vote, so a rank with a stop request exits without the others.",
        tests="tests/training/test_checkpoints.py -k stop_request_during_the_evaluation",
        ranks=4,
    ),
    Mutant(
        "most",
        old="dist.ReduceOp.MAX",
        new="dist.ReduceOp.MIN",
        fault="With different numbers of batches per rank in a step, batches beyond the smallest number are dropped.",
        tests="tests/training/test_uneven.py -k very_different_lengths",
        ranks=4,
    ),
    # -- callbacks and limits -------------------------------------------------------------------------------
    Mutant(
        "EMA.evaluating",
        old="""
try:
    yield
finally:
    self._exchange(trainer)
""",
        new="""
try:
    yield
finally:
    pass
""",
        fault="Training continues from the averaged parameters after an evaluation.",
        tests="tests/training/test_callbacks.py -k ema_averages",
        ranks=2,
    ),
    Mutant(
        "load_of_all_ranks",
        old='parts.callbacks.load(run["callbacks"])',
        fault="A resumed run starts with new states of its callbacks.",
        tests="tests/training/test_callbacks.py -k in_parts",
        ranks=2,
    ),
    Mutant(
        "Checkpoints._remove_old",
        old="[each for each in old if each.parent.name not in kept]",
        new="old",
        fault="The best checkpoint is removed when newer ones are complete.",
        tests="tests/training/test_callbacks.py -k best_checkpoint",
        ranks=2,
    ),
    Mutant(
        "TrainingLoop._evaluate_if_due",
        old="parallel.share_buffers(self.parts.wrapped.inner)",
        fault="An evaluation within an epoch gives other figures in a run that resumes with it.",
        tests="tests/training/test_callbacks.py -k in_parts",
        ranks=2,
    ),
    Mutant(
        "RunLimits.is_epoch_complete",
        old="position.consumed == total or (limit is not None and position.steps_of_epoch >= limit)",
        new="limit is not None and position.steps_of_epoch >= limit",
        fault="A run whose last step by max_steps is the last one of an epoch does not complete the epoch.",
        tests="tests/training/test_run_limits.py -k max_steps_ends",
        ranks=2,
    ),
    # -- checkpoints ----------------------------------------------------------------------------------------
    Mutant(
        "_newest",
        old="-1",
        new="0",
        fault="A run resumes from the oldest checkpoint instead of the newest.",
        tests="tests/training/test_runs.py -k killed_while_it_saves",
    ),
    Mutant(
        "Checkpoints._save",
        old="failure = self._store(temporary, state)",
        new="""
if self._rank == 0:
    temporary.mkdir(exist_ok=True)
    self._mark(temporary, step)
failure = self._store(temporary, state)
""",
        fault="A checkpoint is marked complete before the ranks have written it.",
        # The kill during writing happens 1 ms after rank 0 begins: detected unless all files are on disk by then.
        tests="tests/training/test_runs.py -k killed_while_it_saves",
    ),
    Mutant(
        "Checkpoints.abandon",
        old="concurrent.futures.wait([self._running], _LAST_SAVE_SECONDS)",
        fault="An exception on one rank ends the job while a checkpoint is being written, which is lost.",
        tests="tests/training/test_runs.py -k test_a_loss_that_is_not_finite_ends_the_run",
    ),
    Mutant(
        "Checkpoints._store",
        old="True",
        new="False",
        fault="A checkpoint is marked complete before its content is on disk, and can be lost at a power failure.",
        tests="tests/training/test_checkpoints.py -k synced_before",
        ranks=2,
    ),
    Mutant(
        "Checkpoints.has_failed",
        old="running.exception() is not None",
        new="running.cancelled()",
        fault="A failed checkpoint is detected when the next one is due, not at the next step.",
        tests="tests/training/test_uneven.py -k error_of_a_failed_checkpoint",
        ranks=4,
    ),
    Mutant(
        "_is_locked",
        old="error.errno not in (errno.EACCES, errno.EAGAIN)",
        new="True",
        fault="Two jobs may write their checkpoints into one directory at the same time.",
        tests="tests/training/test_checkpoints.py -k another_job_uses",
        ranks=2,
    ),
    Mutant(
        "_copied",
        old='value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()',
        new="value.detach().cpu()",
        fault="On CPUs a checkpoint contains the live parameters, which training changes while they are written.",
        tests="tests/training/test_runs.py -k killed_while_it_saves",
    ),
    Mutant(
        "restore",
        old='parts.losses.total, parts.losses.count = own["losses"]',
        fault="The losses since the last entry are lost when a run resumes, and the loss of the epoch differs.",
        tests="tests/training/test_checkpoints.py -k signal_to_one_rank",
        ranks=4,
    ),
    # -- recovery from failures of ranks --------------------------------------------------------------------
    Mutant(
        "decide",
        old="max",
        new="min",
        fault="After a failure the ranks return to the oldest state, and the newest step is lost.",
        tests="tests/unit/test_newest_state.py -k completed_the_step_sends_it",
    ),
    Mutant(
        "Position.progress",
        old="self.step, self.epoch, self.is_evaluated, self.evaluated_step",
        new="(self.step,), self.evaluated_step",
        fault="A rank that has completed an epoch or its evaluation does not count as newer than the others.",
        tests="tests/unit/test_newest_state.py -k evaluated_epoch_is_newer",
    ),
    Mutant(
        "seed_at",
        old='f"{where} {number} {seed}"',
        new='f"{where} {seed}"',
        fault="All steps draw the same random numbers, such as dropout masks.",
        tests="tests/unit/test_newest_state.py -k seeds_depend",
    ),
    Mutant(
        "newest_complete",
        old="len(found) == sizes[version]",
        new="found",
        fault="A version of the shards counts as complete although a shard is lost.",
        tests="tests/unit/test_newest_state.py -k two_failed_neighbours",
    ),
    Mutant(
        "TrainingLoop._share_step",
        old="parallel.share_buffers(self.parts.wrapped.inner)",
        fault="The buffers of rank 0, such as the statistics of batch normalization, are lost with rank 0.",
        tests="tests/recovery/test_killed_training.py -k bits",
    ),
    Mutant(
        "Assembly.assemble",
        old="self.is_sharded or not options.recovers",
        new="True",
        fault="A spare in the place of rank 0 overwrites the parameters of all ranks with its own.",
        tests="tests/recovery/test_killed_training.py -k bits",
    ),
    Mutant(
        "RecoveringCalls.run",
        old="self._returned <= len(self._results)",
        new="False",
        fault="A spare repeats the calls that the other ranks have completed, and waits for them.",
        tests="tests/recovery/test_killed_training.py -k bits",
    ),
    Mutant(
        "reports.runs",
        old='("resume", "recovery")',
        new='("resume",)',
        fault="The report counts steps that a failed rank 0 had reported, and that were repeated.",
        tests="tests/unit/test_runs.py -k only_the_failed_rank",
    ),
    # -- data -----------------------------------------------------------------------------------------------
    Mutant(
        "EpochPartition.batches",
        old="range(start + rank, end, self.size)",
        new="range(start + rank, end - (end - start) % self.size, self.size)",
        fault="Samples of a step that cannot be divided evenly among the ranks are dropped.",
        tests="tests/unit/test_shares.py -k every_sample",
    ),
    Mutant(
        "LoaderSource.steps",
        old="(self._loader.sampler, self._loader.batch_sampler, self._loader.dataset)",
        new="(self._loader.batch_sampler, self._loader.dataset)",
        fault="The epoch is not set in a DistributedSampler of the user, and every epoch has the same order.",
        tests="tests/unit/test_shares.py -k gets_the_number_of_the_epoch",
    ),
    Mutant(
        "_Share.__iter__",
        old="""
with torch_internals.outside_workers():
    return next(reading, [])
""",
        new="return next(reading, [])",
        fault="A stream that splits itself by worker is split again, and most of its samples are lost.",
        tests="tests/unit/test_shares.py -k splits_itself_by_worker",
    ),
    Mutant(
        "_Share.__iter__",
        old="randomness.drawn(self._read, self.seed)",
        new="self._read()",
        fault="Of a stream that shuffles, the ranks take parts of different orders.",
        tests="tests/unit/test_shares.py -k splits_itself_by_worker_or_shuffles",
    ),
    Mutant(
        "check_first_samples",
        old="len(set(itertools.chain.from_iterable(found))) == 1",
        new="True",
        fault="The share of each rank is split again, and most of the samples are lost.",
        tests="tests/training/test_uneven.py -k splits_itself_by_rank",
        ranks=2,
    ),
    Mutant(
        "_source_of_loader",
        old="len(sampler.data_source) if own is None else len(own)",
        new="None if own is None else len(own)",
        fault="A sampler over a part of the dataset is replaced by one over all of it.",
        tests="tests/unit/test_shares.py -k outside_of_the_sampler",
    ),
    Mutant(
        "_source_of_loader",
        old="is_replaced and _is_usual(loader) and place.size > 1",
        new="False",
        fault="Each rank takes all samples of a DataLoader that has an __iter__ of its own.",
        tests="tests/unit/test_shares.py -k cannot_be_shared",
    ),
    Mutant(
        "IndexedSource.order",
        old="randomness.drawn(lambda: iter(self._sampler), seed)",
        new="self._sampler",
        fault="Of the order of a sampler of the user, the ranks take parts of different orders.",
        tests="tests/unit/test_shares.py -k samples_of_a_sampler",
    ),
    Mutant(
        "agreed_source",
        old="check_equal(",
        new="dict(",
        fault="Ranks with datasets of different lengths train on different numbers of samples.",
        tests="tests/training/test_uneven.py -k compare_their_data",
        ranks=2,
    ),
    Mutant(
        "agreed_source",
        old="if failed:",
        new="if False:",
        fault="A rank without data raises an error, for which the other ranks wait in the next operation.",
        tests="tests/training/test_uneven.py -k compare_their_data",
        ranks=2,
    ),
    Mutant(
        "Trainer._fit",
        old='rank_sync.check_equal(fit_call.limits.agreed, "fit", "Pass the same arguments on every rank.")',
        fault="Ranks with different numbers of epochs train until one of them waits for the others.",
        tests="tests/training/test_uneven.py -k compare_the_limits",
        ranks=2,
    ),
    Mutant(
        "_start_worker",
        old="preemption.SIGNALS",
        new="preemption._WARNINGS",
        fault="SIGTERM ends the data loader processes, whose batches are needed until all ranks have exited.",
        tests="tests/training/test_uneven.py -k signal_to_all_processes",
        ranks=2,
    ),
    # -- gradients and figures ------------------------------------------------------------------------------
    Mutant(
        "bf16_compression_hook",
        old="dist.ReduceOp.AVG",
        new="dist.ReduceOp.SUM",
        fault="The bfloat16 hook sums the gradients instead of averaging them.",
        tests="tests/features/test_hooks.py -k rounds_the_mean_once",
        ranks=4,
    ),
    Mutant(
        "TrainingLoop._log",
        old="total, count = self.parts.logged.reduced_with(self.parts.losses.take())",
        new="""
own, number = self.parts.losses.take()
total, count = self.parts.logged.reduced_with([own / max(number, 1), number])
total *= count / dist.get_world_size()
""",
        fault="The loss of an epoch is the mean of the ranks' means, regardless of their numbers of samples.",
        tests="tests/training/test_steps.py -k loss_of_an_epoch",
        ranks=4,
    ),
    Mutant(
        "MetricsFile.__init__",
        old="_is_truncated(self._file)",
        new="False",
        fault="After a crash in the middle of a line of the metrics file, the next entry is appended to it and lost.",
        tests="tests/unit/test_reporting.py -k after_a_crash",
    ),
    Mutant(
        "FSDPModel.__init__",
        old="dist.broadcast(parameter.detach(), src=0)",
        new="parameter.detach()",
        fault="With FSDP, parameters that were initialized differently on the ranks are combined from their shards.",
        tests="tests/training/test_steps.py -k start_from_the_parameters",
        ranks=2,
    ),
    Mutant(
        "DDPModel.warm_up",
        old="self._hook",
        new="self.hook_state",
        fault='grad_compression="bf16" and "fp16" are accepted but never used.',
        tests="tests/training/test_steps.py -k compressed_gradients",
        ranks=2,
    ),
    Mutant(
        "_evaluating",
        old="model.eval",
        new="model.train",
        fault="The model is evaluated in training mode: with dropout, and batch normalization by batch statistics.",
        tests="tests/training/test_steps.py -k evaluation_counts",
        ranks=2,
    ),
    Mutant(
        "Precision.step",
        old="""
self.scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
""",
        new="""
nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
self.scaler.unscale_(optimizer)
""",
        fault="Gradients in float16 are clipped before they are unscaled, which makes them nearly zero.",
        tests="tests/training/test_steps.py -k sixteen_bits",
        ranks=2,
    ),
    Mutant(
        "restore",
        old='np.random.set_state(found["numpy"])',
        fault="NumPy's random numbers are not restored from a checkpoint.",
        tests="tests/training/test_checkpoints.py -k run_in_parts",
        ranks=2,
    ),
    Mutant(
        "seed_all",
        old="seed + _SEED_DISTANCE * rank",
        new="seed",
        fault="All ranks draw the same random numbers for dropout and augmentation.",
        tests="tests/training/test_steps.py -k draws_random_numbers",
        ranks=2,
    ),
    Mutant(
        "TrainingStep.accumulate",
        old="batch.count * self.parts.world.size / count",
        new="batch.count / max(step.count, 1)",
        fault="Gradients are averaged without weights, although some ranks have fewer samples in the last step.",
        tests="tests/training/test_steps.py -k all_ranks_train_as_one",
        ranks=4,
    ),
    Mutant(
        "TrainingLoop._take_step",
        old='self.reporter.write("skipped", self.position, rank_samples=samples)',
        new="""
self._step_scheduler("step")
self.reporter.write("skipped", self.position, rank_samples=samples)
""",
        fault="The learning rate scheduler steps when the optimizer skips a step.",
        tests="tests/training/test_steps.py -k without_a_finite_loss",
        ranks=4,
    ),
    Mutant(
        "TrainingLoop._train_epoch",
        old="train.steps(position.epoch, position.consumed, position.steps_of_epoch)",
        new="train.steps(position.epoch, 0, 0)",
        fault="A run that resumes within an epoch restarts with the first sample of that epoch.",
        tests="tests/training/test_uneven.py -k while_some_ranks_have_data",
        ranks=4,
    ),
    # -- interruptions --------------------------------------------------------------------------------------
    Mutant(
        "Preempted.__init__",
        old="STOPPED_STATUS",
        new="0",
        fault="A run that stops early exits with status 0, and no script restarts it.",
        tests="tests/training/test_uneven.py -k signal_to_all_processes",
        ranks=4,
    ),
    Mutant(
        "seconds_of_flux",
        old="float(seconds) if seconds < _UNLIMITED_IN_FLUX else None",
        new="float(seconds)",
        fault="Flux's number for no limit is taken for a time, and an error message for a limit.",
        tests="tests/unit/test_leaving_in_time.py -k test_remaining_time_of_flux",
    ),
    Mutant(
        "StopRequest._install_handlers",
        old='"FLUX_JOB_ID" in os.environ',
        new="False",
        fault="At the time limit of Flux a run ends without a checkpoint.",
        tests="tests/unit/test_leaving_in_time.py -k time_limit_of_flux",
    ),
    Mutant(
        "StopRequest._poll_scheduler",
        old="stop_margin, is_first = min(stop_margin, left / 2), False",
        new="is_first = False",
        fault="A job with less time than the margin stops immediately, and never makes progress when restarted.",
        tests="tests/unit/test_leaving_in_time.py -k requests_a_stop",
    ),
    # -- the metrics file and the display -------------------------------------------------------------------
    Mutant(
        "Display._left",
        old="self._samples - epoch * (self._total or 0)",
        new="self._total or 0",
        fault="The displayed remaining time is that of the epoch, not of the run.",
        tests="tests/unit/test_reporting.py -k progress_line",
    ),
    Mutant(
        "Reporter.step",
        old="count",
        new="count // self._world.size",
        fault="The samples per second of the metrics file and of the display are those of one rank.",
        tests="tests/unit/test_reporting.py -k samples_per_second",
    ),
    Mutant(
        "opened",
        old="prints and directory is not None",
        new="directory is not None",
        fault="Every rank writes the metrics file.",
        tests="tests/training/test_checkpoints.py -k the_files_of_a_run",
        ranks=4,
    ),
    Mutant(
        "Clock.add_backward",
        old="now - self._last - exposed",
        new="now - self._last",
        fault="The time for which a rank waits for communication also counts as computation.",
        tests="tests/training/test_timing.py",
        ranks=2,
    ),
    # -- reports --------------------------------------------------------------------------------------------
    Mutant(
        "_draw",
        old='(row["nbytes"], row[name])',
        new='(row["nbytes"], row["us"])',
        fault="The bus bandwidth panel shows the latency.",
        tests="tests/unit/test_benchmark_reports.py -k curves",
    ),
    Mutant(
        "_ratio",
        old='f"{one / other:.2f}"',
        new='f"{other / one:.2f}"',
        fault="The ratios of `mpicomm bench` to mpicomm and to an earlier run are inverted.",
        tests="tests/unit/test_benchmark_reports.py -k table_compares",
    ),
    Mutant(
        "save",
        old="except OSError as error:",
        new="except PermissionError as error:",
        fault="If a plot cannot be written, the remedy is printed only for missing permissions.",
        tests="tests/unit/test_runs.py -k plot_that_cannot_be_written",
    ),
    Mutant(
        "compute",
        old="sum(entry.samples for entry in steps) / seconds if seconds else None",
        new='sum(each.number("samples_per_s") or 0.0 for each in steps) / len(steps) if steps else None',
        fault="The samples per second of a run are the mean of its entries' rates, regardless of their durations.",
        tests="tests/unit/test_runs.py -k figures_of_a_run",
    ),
    Mutant(
        "_draw_communication",
        old='parts["communication"]',
        new='parts["compute"]',
        fault="The plot of several runs shows computation time labelled as communication.",
        tests="tests/unit/test_runs.py -k plot_of_several_runs",
    ),
    Mutant(
        "_counting",
        old="each.step <= entry.step",
        new="each.step < entry.step",
        fault="A report omits the epoch and the evaluation that ended at the step from which a run resumed.",
        tests="tests/unit/test_runs.py -k epoch_that_was_not_repeated",
    ),
    Mutant(
        "startup_table",
        old='row[ours]["seconds"]',
        new='row[ours]["median"]',
        fault="The table of startup times compares mpicomm's median with the fastest start of the alternatives.",
        tests="tests/unit/test_benchmark_reports.py -k table_of_starts",
    ),
    Mutant(
        "_column",
        old='"{0.value:.4g} ({0.which}, epoch {0.epoch})"',
        new='"{0.value:.4g} ({0.which}, epoch {0.step})"',
        fault="The table of a run shows the step of the best value as its epoch.",
        tests="tests/unit/test_runs.py -k columns_of_one_table",
    ),
    # -- benchmarks -----------------------------------------------------------------------------------------
    Mutant(
        "_without_communication",
        old='("allreduce", "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single")',
        new='("_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single")',
        fault="The no-op backend runs DDP's all-reduces, so the lower bound of a step's time includes communication.",
        tests="tests/bench/test_operations.py -k backend_none",
        ranks=2,
    ),
    Mutant(
        "_row",
        old='f"{algbw * operation.load:.4g}"',
        new='f"{algbw / operation.load:.4g}"',
        fault="Bus bandwidth is the bandwidth divided by its factor instead of multiplied.",
        tests='tests/bench/test_operations.py -k "no_backend_is_wrong and all_reduce"',
        ranks=4,
    ),
    Mutant(
        "main",
        old="""
dist.all_reduce(torch.ones(1))
laps["first all_reduce"] = time.perf_counter()
""",
        new="""
laps["first all_reduce"] = time.perf_counter()
dist.all_reduce(torch.ones(1))
""",
        fault="The time of the first all_reduce counts as part of the launch.",
        tests="tests/unit/test_benchmarks.py -k each_step_of_a_start",
    ),
    Mutant(
        "selected",
        old='read(path).partition("[")[2].partition("]")[0] or "unknown"',
        new='(read(path).split() or ["unknown"])[0].strip("[]")',
        fault="Result files contain the first huge-page setting that the kernel lists, not the selected one.",
        tests="tests/unit/test_benchmarks.py -k huge_pages",
    ),
    Mutant(
        "MeasuredOperation.prepare",
        old="self.receive.fill_(known_inputs.POISON)",
        fault="Elements that a backend does not write pass, because the previous backend's result is still in memory.",
        tests="tests/bench/test_operations.py -k another_backend_is_overwritten",
    ),
    Mutant(
        "Overlap.percent",
        old="100 * (1 - (self.together - self.computation) / self.operation)",
        new="100 * (self.together - self.computation) / self.operation",
        fault="`mpicomm bench --async` reports the exposed share of an operation as its overlap.",
        tests="tests/unit/test_benchmarks.py -k overlap",
    ),
    Mutant(
        "Ratio.is_met",
        old="self.value >= self.target if self.is_least else self.value <= self.target",
        new="self.value >= self.target",
        fault="`benchmarks.ratios` reports a target as met if the value exceeds its upper limit.",
        tests="tests/unit/test_benchmarks.py -k ratio_is_met",
    ),
    Mutant(
        "sample_of",
        old="seconds - sum(steps.values())",
        new="seconds",
        fault="The launch time includes the whole startup.",
        tests="tests/launch/test_bench.py -k beside_torchrun",
    ),
    Mutant(
        "_of_all_ranks",
        old="max(of_ranks)",
        new="min(of_ranks)",
        fault="Latency is that of the fastest rank.",
        tests="tests/unit/test_benchmarks.py -k slowest_rank",
    ),
    Mutant(
        "_one_by_one",
        old="""
before()
settle()
synchronize()
start = now()
""",
        new="""
start = now()
before()
settle()
synchronize()
""",
        fault="The time to write the inputs again counts as time of the operation.",
        tests="tests/unit/test_benchmarks.py -k time_before_calls",
    ),
    Mutant(
        "_measure",
        old="rewrites",
        new="not rewrites",
        fault="`mpicomm bench` writes the inputs again before each call only with --reuse-inputs.",
        tests="tests/bench/test_operations.py -k written_again",
        ranks=2,
    ),
    Mutant(
        "_measure",
        old="wrong[name] += _wrong_after(operation, call, bench)",
        fault="`mpicomm bench` does not detect results that are wrong only after some calls.",
        tests="tests/bench/test_operations.py -k wrong_after_some_calls",
        ranks=2,
    ),
    Mutant(
        "MeasuredOperation._received",
        old="known_inputs.summed(part, self.size).double() / (self.size if self.averages else 1)",
        new="known_inputs.summed(part, self.size)",
        fault="`mpicomm bench` expects the sum as the result of an average.",
        tests='tests/bench/test_operations.py -k "no_backend_is_wrong and all_reduce_avg"',
        ranks=2,
    ),
    Mutant(
        "Decoder._attention",
        old="slice(position, position + len(x))",
        new="slice(0, len(x))",
        fault="`mpicomm bench decode` forgets the keys and values of earlier tokens.",
        tests="tests/bench/test_decode.py -k passes_over_all_tokens",
    ),
    Mutant(
        "_row",
        old="None if name == NOTHING else differing",
        new="None if name == NOTHING else 0",
        fault="`mpicomm bench decode` reports wrong tokens as correct.",
        tests="tests/bench/test_decode.py -k without_sums",
        ranks=2,
    ),
    Mutant(
        "of_rank_1",
        old="bench.gather(mine)[1:2]",
        new="bench.gather(mine)",
        fault="`benchmarks.gil` reports the time of rank 0, which runs the loop, as the wait of rank 1.",
        tests="tests/unit/test_benchmarks.py -k time_of_rank_1",
    ),
    Mutant(
        "_rows",
        old="max(0.0, times[_COMPUTE].least / 1e3 - data)",
        new="times[_COMPUTE].least / 1e3",
        fault="The time to fetch a batch also counts as computation, and is subtracted from communication.",
        tests="tests/unit/test_benchmarks.py -k parts_of_a_step",
    ),
    Mutant(
        "wrong",
        old="found += int((part[whole:] != expected[: len(part) - whole]).sum())",
        fault="Wrong elements after the last whole repetition of the pattern are not counted, in small results never.",
        tests="tests/bench/test_operations.py -k wrong_elements_are_counted",
    ),
    # -- the trainer --------------------------------------------------------------------------------------
    Mutant(
        "Trainer._predict",
        old="with self._opened_outside_fit(data, may_drop=False) as source:",
        new="with self._opened_outside_fit(data) as source:",
        fault="predict() omits the last samples of a DataLoader with drop_last.",
        tests="tests/training/test_predictions.py -k 'shuffles_and_drops and 0'",
        ranks=2,
    ),
    Mutant(
        "Trainer._evaluation_options",
        old="dataclasses.replace(self._options.loader, grad_accum_steps=1, shuffle=False)",
        new="dataclasses.replace(self._options.loader, grad_accum_steps=1)",
        fault="With limit_batches, an evaluation takes other samples than the first ones of the data.",
        tests="tests/training/test_run_limits.py -k limit_batches",
        ranks=2,
    ),
    Mutant(
        "Trainer._evaluation_options",
        old="dataclasses.replace(self._options.loader, grad_accum_steps=1, shuffle=False)",
        new="dataclasses.replace(self._options.loader, shuffle=False)",
        fault="With gradient accumulation, limit_batches allows several times as many batches in an evaluation.",
        tests="tests/training/test_run_limits.py -k limit_batches",
        ranks=2,
    ),
    Mutant(
        "Trainer._export",
        old="with self._callbacks.evaluating(self):",
        new="with contextlib.nullcontext():",
        fault="export() writes the parameters of the last step instead of the averages of EMA.",
        tests="tests/training/test_callbacks.py -k 'ema_averages and ddp'",
        ranks=2,
    ),
    Mutant(
        "Trainer.fit",
        old="self._stop_request.reset()",
        fault="After a signal has stopped a run, each further fit() of the same process stops immediately.",
        tests="tests/training/test_checkpoints.py -k stop_request_during_the_evaluation",
        ranks=2,
    ),
    Mutant(
        "Trainer.fit",
        old="with self._callbacks.reporting_exceptions(self):",
        new="with contextlib.nullcontext():",
        fault="Callbacks are not called when an exception ends fit().",
        tests="tests/training/test_callbacks.py -k exception_in_a_hook",
        ranks=2,
    ),
    Mutant(
        "Trainer.__init__",
        old='on_failure == "recover" and rank_failures.current() is None',
        new="False",
        fault='Trainer(on_failure="recover") is accepted in a job that ends when a rank fails.',
        tests="tests/training/test_steps.py -k recovery_without",
        ranks=2,
    ),
    Mutant(
        "Trainer.__init__",
        old='replicate_shards and (strategy, on_failure) != ("fsdp", "recover")',
        new="False",
        fault="replicate_shards=True is accepted and ignored with DDP.",
        tests="tests/training/test_steps.py -k 'mean_nothing and replicate'",
        ranks=2,
    ),
    # -- parts of the trainer -----------------------------------------------------------------------------
    Mutant(
        "batches.call_of",
        old="Call(tuple(content[:-1]), {}, content[-1])",
        new="Call((content[:-1],), {}, content[-1])",
        fault="A batch (a, b, target) calls the model with one tuple instead of two arguments.",
        tests="tests/unit/test_batches.py -k outermost_level",
    ),
    Mutant(
        "check_loss",
        old="isinstance(loss, torch.Tensor) and not loss.dim() and (loss.requires_grad or not torch.is_grad_enabled())",
        new="isinstance(loss, torch.Tensor) and not loss.dim()",
        fault="A detached loss is an error of autograd that names no remedy.",
        tests="tests/unit/test_batches.py -k invalid_loss",
    ),
    Mutant(
        "CallbackList.reporting_exceptions",
        old="except Exception as other:",
        new="except OSError as other:",
        fault="An error in on_exception replaces the error that ended the run.",
        tests="tests/training/test_callbacks.py -k exception_in_a_hook",
        ranks=2,
    ),
    Mutant(
        "CallbackList.__init__",
        old='kind if counts[kind] == 1 else f"{kind}-{counts[kind]}"',
        new="kind",
        fault="Of several callbacks of one class only the last one is called.",
        tests="tests/training/test_callbacks.py -k several_callbacks_of_one_class",
        ranks=2,
    ),
    Mutant(
        "Averages.add",
        old="value.reshape(()) * count",
        new="value.reshape(())",
        fault="A metric that returns the mean of a batch counts each batch as one sample.",
        tests="tests/training/test_steps.py -k 'evaluation_counts and 37 and ddp'",
        ranks=2,
    ),
    Mutant(
        "check_optimizer",
        old="if required := _required_of_step(optimizer):",
        new="if False:",
        fault="LBFGS is accepted, and fails in the first step.",
        tests="tests/unit/test_optimizers.py -k lbfgs",
    ),
    Mutant(
        "_check_plateau",
        old='scheduler.mode == "max" and monitor is None',
        new="False",
        fault="ReduceLROnPlateau(mode='max') follows the loss, and lowers the learning rate while the loss decreases.",
        tests="tests/unit/test_optimizers.py -k unsupported_schedulers",
    ),
    Mutant(
        "Losses.check",
        old="raise _not_finite(step, indices, value)",
        fault="On a GPU a loss that is not finite does not end the run.",
        tests="tests/unit/test_losses.py -k read_late",
    ),
    Mutant(
        "model_file.export",
        old="dist.get_rank() == 0",
        new="True",
        fault="All ranks write the file of export() at the same time.",
        tests="tests/training/test_model_files.py -k synced_before",
        ranks=2,
    ),
    Mutant(
        "write_whole",
        old="os.fsync(file.fileno())",
        fault="After a power failure the file of export() can be empty under its final name.",
        tests="tests/training/test_model_files.py -k synced_before",
        ranks=2,
    ),
    Mutant(
        "write_whole",
        old="temporary.unlink(missing_ok=True)",
        fault="A failed export() leaves a partial file on the full disk.",
        tests="tests/training/test_model_files.py -k leaves_the_one_before",
        ranks=2,
    ),
    Mutant(
        "ResumableRun.stop",
        old="rank_sync.reasons(self.stop_request.why)",
        new="self.stop_request.why",
        fault="Preempted has no reason on the ranks that did not receive the signal.",
        tests="tests/training/test_checkpoints.py -k signal_to_one_rank",
        ranks=2,
    ),
    Mutant(
        "ResumableRun.ends_between_epochs",
        old="rank_sync.total(self._limits.requests_end) > 0",
        new="self._limits.requests_end",
        fault="If a callback calls stop() on one rank after an epoch, the other ranks wait for it in the next epoch.",
        tests="tests/training/test_run_limits.py -k callback_on_one_rank",
        ranks=2,
    ),
    Mutant(
        "LearningRateLogger.on_step_end",
        old="group.get('name', number)",
        new="number",
        fault="The names of parameter groups are missing in the entries of LearningRateLogger.",
        tests="tests/training/test_callbacks.py -k learning_rates",
        ranks=2,
    ),
    Mutant(
        "CombinedOptimizer.load_state_dict",
        old="self._share()",
        fault="A resumed run with CombinedOptimizer continues with an empty state of the optimizers.",
        tests="tests/training/test_own_steps.py -k 'several_losses and ddp'",
        ranks=2,
    ),
    Mutant(
        "explained",
        old="isinstance(value, (str, int)) and (name, value) in VALUES",
        new="False",
        fault='Values of other libraries, such as precision="bf16-mixed", are errors without the replacement.',
        tests="tests/unit/test_foreign_arguments.py -k argument_of_another_library",
    ),
    Mutant(
        "FigureMonitor._compare",
        old="math.isfinite(figure)",
        new="True",
        fault="If the first figure is NaN, BestCheckpoint keeps that checkpoint and EarlyStopping ends the run.",
        tests="tests/training/test_callbacks.py -k 'best_checkpoint_is_kept and max'",
        ranks=2,
    ),
    Mutant(
        "EarlyStopping.on_fit_start",
        old="self._end_if_due(trainer)",
        fault="A run that EarlyStopping has ended continues when the program is started again.",
        tests="tests/training/test_callbacks.py -k early_stopping_ends",
        ranks=2,
    ),
    Mutant(
        "_Unpickler.persistent_load",
        old="self._tensors[position]",
        new="self._tensors[0]",
        fault="In the restored state of a callback, all tensors are the first one.",
        tests="tests/unit/test_newest_state.py -k keep_their_tensors",
    ),
]
