"""Faults in launching, start-up and the watchdog."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- dump files -----------------------------------------------------------------------------------------
    Mutant(
        "_numbered",
        old="sequence is not None and (is_whole or record > first)",
        new="sequence is not None",
        fault="Operations of a ring buffer that has dropped others are not aligned with those of other ranks.",
        tests="tests/unit/test_torch_format.py -k ring_buffers",
    ),
    Mutant(
        "_numbered",
        old="sequence = each.group.sequence + queued[each.group.name]",
        new="continue",
        fault="Queued collectives are absent from the files for torchfrtrace, so that their ranks seem to be missing.",
        tests="tests/unit/test_torch_format.py -k queued",
    ),
    Mutant(
        "ClockMonitor.record",
        old="answer.sent + half",
        new="answer.sent",
        fault="The time that the answer of the hub travels is not subtracted from the offset of the clock.",
        tests="tests/unit/test_clock.py -k half_of_the_round_trip",
    ),
    # -- rendezvous -----------------------------------------------------------------------------------------
    Mutant(
        "rendezvous._check_own_connection",
        old="listener.accept()[0].close()",
        new="pass",
        fault="The store of the job gets a connection of the check of its address.",
        tests="tests/unit/test_rendezvous.py -k reach_itself",
    ),
    Mutant(
        "rendezvous.open_store",
        old="_check_own_connection(listeners[chosen], address, port)",
        fault="If rank 0 cannot reach its own address, torch prints C++ stacks until the timeout.",
        tests="tests/unit/test_rendezvous.py -k reach_itself",
    ),
    # -- authentication -------------------------------------------------------------------------------------
    Mutant(
        "authentication._is_nonce",
        old="len(bytes.fromhex(text)) == _NONCE_BYTES",
        new="True",
        fault="A stranger that relays the proof of one rank, with a longer nonce, is taken for another rank.",
        tests="tests/unit/test_channel.py -k nonce_that_is_too_long",
    ),
    # -- forms of programs ----------------------------------------------------------------------------------
    Mutant(
        "request._command",
        old='":" in (*words, *module)',
        new='":" in words',
        fault="mpicomm run passes a colon after -m to the launcher, which starts the next word as another program.",
        tests="tests/unit/test_launch_commands.py -k several_programs",
    ),
    Mutant(
        "request._command",
        old='(".py", ".pyz")',
        new='".py"',
        fault="mpicomm run cannot start a zipapp.",
        tests="tests/unit/test_launch_commands.py -k zipapp",
    ),
    # -- the environment of launchers -----------------------------------------------------------------------
    Mutant(
        "scheduler_query.output_of",
        old="environment.with_home(os.environ)",
        new="os.environ",
        fault="Without HOME, the mpiexec of Open MPI is taken for that of another MPI.",
        tests="tests/unit/test_launch_commands.py -k a_home",
    ),
    Mutant(
        "environment.for_ranks",
        old="with_home(without_job(environ))",
        new="without_job(environ)",
        fault="Without HOME, the mpiexec of Open MPI fails.",
        tests="tests/unit/test_launch_commands.py -k a_home",
    ),
    # -- messages of mpicomm run ----------------------------------------------------------------------------
    Mutant(
        "Start.shown",
        old="name in self.hidden",
        new="False",
        fault="The log of a job shows the value of a secret of mpicomm run --env.",
        tests="tests/unit/test_launch_commands.py -k hidden_values",
    ),
    Mutant(
        "restarts.run",
        old='print_message("run", _NO_JOB)',
        new="pass",
        fault="mpicomm run prints nothing if each rank has run alone.",
        tests="tests/unit/test_restarts.py",
    ),
    Mutant(
        "restarts._should_form_job",
        old="is_python and is_reported and request.ranks != 1",
        new="True",
        fault="mpicomm run calls for bootstrap() in a program of one rank.",
        tests="tests/unit/test_restarts.py",
    ),
    # -- programs that a rank starts ------------------------------------------------------------------------
    Mutant(
        "mpi._inherited_connection",
        old="pid != str(os.getpid())",
        new="False",
        fault="A program that a rank starts waits in MPI_Init of Open MPI.",
        tests="tests/unit/test_mpi.py -k a_rank_starts",
    ),
    Mutant(
        "mpi._inherited_connection",
        old='job == os.environ.get("PMIX_NAMESPACE")',
        new="True",
        fault="A job that a rank starts with mpirun is refused.",
        tests="tests/unit/test_mpi.py -k a_rank_starts",
    ),
    Mutant(
        "mpi._check_connection_to_launcher",
        old='(name, "MASTER_ADDR", "MASTER_PORT")',
        new="(name,)",
        fault="A program that a rank starts as a job of its own cannot listen at the address of the rank's store.",
        tests="tests/unit/test_mpi.py -k a_rank_starts",
    ),
    # -- crash reports --------------------------------------------------------------------------------------
    Mutant(
        "crash_report.install",
        old="_catch_signals()",
        fault="The signal that ends a process is not reported to the other ranks.",
        tests="tests/unit/test_crash_report.py",
    ),
    Mutant(
        "crash_report.install",
        old="sys.__stderr__ if stacks is None else stacks",
        new="sys.__stderr__",
        fault="The report of a signal does not name the last line of Python.",
        tests="tests/unit/test_crash_report.py",
    ),
    Mutant(
        "crash_report._catch_signals",
        old="signal.getsignal(number) == signal.SIG_DFL",
        new="True",
        fault="A signal that the program handles is reported as a crash.",
        tests="tests/unit/test_crash_report.py",
    ),
    Mutant(
        "crash_report.unwatch",
        old="_set_connected(connection, False)",
        new="pass",
        fault="The report of a signal is written into a file that has got the descriptor of a lost connection.",
        tests="tests/unit/test_crash_report.py",
    ),
    Mutant(
        "Channel._drop",
        old="crash_report.unwatch(connection)",
        fault="A closed connection still counts as one that reports a signal.",
        tests="tests/unit/test_channel.py -k reports_a_crash",
    ),
    Mutant(
        "Channel._receive",
        old="lost or crash",
        new="lost",
        fault="A rank that crashes is reported only once its process has ended, when some launchers kill all others.",
        tests="tests/unit/test_channel.py -k crashes_is_lost_at_once",
    ),
    Mutant(
        "remedy_of_death",
        old="CRASH_REMEDY if has_crashed else DEATH_REMEDY",
        new="DEATH_REMEDY",
        fault="The report of a crash sends the user to the log of the kernel.",
        tests="tests/unit/test_coordinator.py -k remedy",
    ),
    Mutant(
        "Job.receive",
        old="not self._recovers",
        new="True",
        fault="mpicomm run names a crash as the cause of the end of a job that has continued after it.",
        tests="tests/unit/test_job_listener.py -k crash_of_rank_0",
    ),
    # -- watchdog -------------------------------------------------------------------------------------------
    Mutant(
        "Coordinator.receive",
        old="case protocol.PossibleHang() | protocol.TimedOut() | protocol.MissingQuery():",
        new="case protocol.PossibleHang() | protocol.MissingQuery():",
        fault="Rank 0 ignores the message that an operation has passed its timeout, so the job never ends.",
        tests="tests/unit/test_coordinator.py -k test_a_deadline_ends_the_job",
    ),
    Mutant(
        "Coordinator._abort_for_exits",
        old="status or 1",
        new="1",
        fault="A job that ends because a rank has exited ends with status 1, not with the status of that rank.",
        tests="tests/unit/test_coordinator.py -k test_the_job_ends_with_the_status_of_the_exited_rank",
    ),
    Mutant(
        "_proof_of",
        old="nonce + name.encode()",
        new="name.encode()",
        fault="The proof of the token does not depend on the nonce, so an old proof is accepted again.",
        tests="tests/unit/test_channel.py -k repeats_an_old_proof",
    ),
    Mutant(
        "Rank0Monitor.turn",
        old="self._place.rank",
        new="self._place.hub",
        fault="All ranks of a hub use the same delay to report in place of rank 0, so several ranks print the cause.",
        tests="tests/launch/test_many_watchdogs.py -k test_rank_1_reports_for_rank_0",
    ),
    Mutant(
        "Watchdog._write_files",
        old="dump.try_write(self._limits.directory, self.place.rank, about, offset, _WRITE_SECONDS)",
        new="dump.try_write(self._limits.directory, self.place.hub, about, offset, _WRITE_SECONDS)",
        fault="A rank writes its operations and stacks into the dump files of its hub.",
        tests="tests/launch/test_leaving.py -k test_all_ranks_write_files",
    ),
    Mutant(
        "Watchdog._extend_deadlines",
        old="""
for operation in flight_recorder.running():
    operation.extend_deadline(late)
""",
        fault="The time for which a process is suspended counts toward the timeout of its operations.",
        tests="tests/launch/test_ends.py -k test_a_job_that_was_suspended_continues",
    ),
    Mutant(
        "deliver",
        old="signal.SIGTERM in numbers",
        new="signal.SIGTERM == numbers[0]",
        fault="SIGTERM is lost if another signal arrived before it.",
        tests="tests/unit/test_signals.py -k test_a_process_without_a_handler_ends_by_sigterm",
    ),
    Mutant(
        "Hook._fail",
        old="isinstance(error, LaunchError) and not self.is_formed()",
        new="isinstance(error, LaunchError)",
        fault="A LaunchError after bootstrap() is followed by a report that a rank died.",
        tests="tests/launch/test_failures.py -k refuse",
    ),
    Mutant(
        "LaunchError.brief",
        old="commands or lines",
        new="commands",
        fault="If only a rank other than 0 has a LaunchError, the next step is lost unless it is a command.",
        tests="tests/unit/test_exit_status.py -k launch_error",
    ),
    Mutant(
        "Hook.__call__",
        old="os.getpid() != self.pid",
        new="False",
        fault="An exception in a forked child of a rank ends the whole job.",
        tests="tests/launch/test_children.py -k fork",
    ),
    Mutant(
        "number_of_line",
        old="start <= instruction < end",
        new="start <= instruction",
        fault="An operation is reported at the first line of the calling function.",
        tests="tests/unit/test_flight_recorder.py -k test_the_callers_line_is_found",
    ),
    Mutant(
        "start_watchdog",
        old="if failed:",
        new="if any((rank == comm.rank for rank, _ in failed)):",
        fault="Each rank decides alone whether the channel is open; ranks with a channel wait for a rank without one.",
        tests="tests/launch/test_ends.py -k channel",
    ),
    Mutant(
        "_job_of_scheduler",
        old="scheduler_query.current_allocation(os.environ) if launch.is_plain else None",
        new="None",
        fault="Plain python in a Flux instance is a world of one without a warning.",
        tests="tests/launch/test_schedulers.py -k plain_python",
    ),
    # -- mpicomm run ----------------------------------------------------------------------------------------
    Mutant(
        "_request",
        old="allocation.requeues(os.environ) > 0",
        new="False",
        fault="A job that Slurm has requeued deletes the logs of its earlier start.",
        tests="tests/launch/test_run.py -k keep_the_earlier_output",
    ),
    Mutant(
        "Authenticator._is_valid",
        old="hmac.compare_digest(message.proof, expected) and self._is_expected(message.rank)",
        new="self._is_expected(message.rank)",
        fault="Any process that reaches mpicomm run can report the end of a job.",
        tests="tests/unit/test_job_listener.py -k without_the_token",
    ),
    Mutant(
        "_authenticate",
        old="hmac.compare_digest(welcome.proof, _proof_of(token, nonce, _WELCOME))",
        new="welcome.proof",
        fault="Any process that takes the port of mpicomm run can ask the job to stop.",
        tests="tests/unit/test_channel.py -k without_the_token",
    ),
    Mutant(
        "_authenticate",
        old="str(rank)",
        new="_WELCOME",
        fault="A rank sends the proof of the other end.",
        tests="tests/unit/test_channel.py -k sends_its_proof",
    ),
    Mutant(
        "Supervisor._pass_on",
        old="_SENT.get(launcher, {}).get(number, (number,))",
        new="(number,)",
        fault="One Ctrl-C does not end the tasks of srun and flux run.",
        tests="tests/launch/test_supervisor.py -k signals_that_end_its_tasks",
    ),
    Mutant(
        "Supervisor._result",
        old="self._is_forced or not status",
        new="self._is_forced",
        fault="mpicomm run exits with status 0 if a rank was lost and the launcher exits with status 0.",
        tests="tests/launch/test_supervisor.py -k hides",
    ),
    Mutant(
        "Supervisor._check_answers",
        old="""
if not answers or not all(answers):
    self._pass_on(number)
elif number in _STOPS:
    self._print(
        f"{_name(number)}: the ranks save their state and exit, within {self._grace:g} s (--grace-period); "
        f"press Ctrl-C again to end them at once"
    )
""",
        new="""
self._pass_on(number)
if answers and all(answers) and number in _STOPS:
    self._print(
        f"{_name(number)}: the ranks save their state and exit, within {self._grace:g} s (--grace-period); "
        f"press Ctrl-C again to end them at once"
    )
""",
        fault="The launcher receives SIGTERM although the program handles it, and kills the ranks.",
        tests="tests/launch/test_supervisor.py -k 'not_exit and grace'",
    ),
    Mutant(
        "Supervisor._handle_signal",
        old='self._terminate("second Ctrl-C")',
        fault="A second Ctrl-C does not end a program that handles the first one and goes on.",
        tests="tests/launch/test_supervisor.py -k second",
    ),
    Mutant(
        "_for_step",
        old='child[_EXPORT] = "ALL"',
        fault="In a job of `sbatch --export=NONE` the ranks get no variables.",
        tests="tests/unit/test_launch_commands.py -k test_srun_passes_all_variables",
    ),
    Mutant(
        "with_capacity",
        old="0 if ranks is None else -(-ranks // selected)",
        new="0",
        fault="`-n 8 --nnodes 2` starts fewer ranks than requested.",
        tests="tests/unit/test_node_range.py -k test_the_first_attempt",
    ),
    Mutant(
        "print_message",
        old="(OSError, ValueError)",
        new="ValueError",
        fault="mpicomm run ends during the checkpoint if the reader of its messages has ended.",
        tests="tests/launch/test_supervisor.py -k closed_stderr",
    ),
    Mutant(
        "Supervisor.run",
        old="self._handle_signals()",
        fault="The ranks are restarted although SIGTERM has arrived after the end of the launcher.",
        tests="tests/launch/test_supervisor.py -k after_the_end_of_the_launcher",
    ),
    Mutant(
        "start.prepare",
        old="_has_leftover()",
        new="False",
        fault="mpirun does not start if one with the same pid, which was killed, left its session directory.",
        tests="tests/unit/test_child_process.py",
    ),
    Mutant(
        "Supervisor._handle_signal",
        old="child_process.signal_descendants(signal.SIGSTOP)",
        fault="Ctrl-Z stops mpicomm run, and the ranks continue.",
        tests="tests/launch/test_supervisor.py -k ctrl_z",
    ),
    Mutant(
        "Supervisor.run",
        old="status or self._is_forced",
        new="self._is_forced",
        fault="Processes of a failed launch keep their memory while the ranks are restarted.",
        tests="tests/launch/test_supervisor.py -k leftover",
    ),
    Mutant(
        "JobListener.ask_to_stop",
        old="job.answers.pop(number, None)",
        fault="The answer to an earlier signal decides on a later one.",
        tests="tests/unit/test_job_listener.py -k belongs_to_the_last_question",
    ),
    Mutant(
        "attach_parent.attach",
        old="self._coordinator.repeat_reports_to_parent()",
        fault="A successful job counts as failed if a rank exits before rank 0 is connected to mpicomm run.",
        tests="tests/unit/test_job_listener.py -k before_rank_0_is_connected",
    ),
    Mutant(
        "take_address",
        old="environ.pop",
        new="environ.get",
        fault="A child process of a rank registers its own job with mpicomm run, and its crash ends the training.",
        tests="tests/unit/test_job_listener.py -k only_the_first_reader",
    ),
    Mutant(
        "_is_failure",
        old="end.status not in (0, STOPPED_STATUS)",
        new="end.status != 0",
        fault="A run that has stopped with a checkpoint (status 85) is restarted.",
        tests="tests/launch/test_supervisor.py -k test_no_restart",
    ),
    Mutant(
        "main",
        old="0 if appends else os.O_TRUNC",
        new="os.O_TRUNC",
        fault="The log of a restarted rank loses the output of the former attempt.",
        tests="tests/launch/test_supervisor.py -k logs_are_kept",
    ),
    # -- startup --------------------------------------------------------------------------------------------
    Mutant(
        "_prove",
        old="all",
        new="any",
        fault="The store listens on an address that one node can reach, but not every node.",
        tests="tests/unit/test_rendezvous.py -k test_a_place_is_chosen_that_every_node_reaches",
    ),
    Mutant(
        "_wait_for_all_ranks",
        old="{rank: comm.Irecv(bytearray(1), source=rank, tag=_ARRIVAL) for rank in range(1, comm.size)}",
        new="{rank: comm.Irecv(bytearray(1), source=rank, tag=_ARRIVAL) for rank in range(1, comm.size - 1)}",
        fault="Rank 0 does not wait for the last rank, and therefore never reports it as missing.",
        tests="tests/launch/test_failures.py -k test_one_rank_is_missing",
    ),
    Mutant(
        "assign",
        old="rank % len(uuids)",
        new="0",
        fault="All ranks in excess of the number of GPUs share the first GPU.",
        tests="tests/unit/test_devices.py -k test_ranks_that_outnumber_gpus_share_evenly",
    ),
    # -- session --------------------------------------------------------------------------------------------
    Mutant(
        "claim_in.ask",
        old='private.add("mpicomm/failures", 1) == 1',
        new='private.add("mpicomm/failures", 1) >= 1',
        fault="Every failing rank considers itself the first to fail, so each prints its traceback.",
        tests="tests/launch/test_failures.py -k test_all_ranks_fail_at_once",
    ),
    Mutant(
        "watchdog.flight_recorder",
        old='("contextlib", "functools", "threading", "typing_extensions", "warnings")',
        new='("functools", "threading", "typing_extensions", "warnings")',
        fault="A decorator of contextlib around new_group is reported as the line of the program.",
        tests="tests/launch/test_ends.py -k new_group",
    ),
    Mutant(
        "StreamQueue.started",
        old="operation.take_number",
        new="operation.begin",
        fault="The time that an operation waits in a GPU's stream counts toward its timeout.",
        tests="tests/unit/test_flight_recorder.py -k wait_for_earlier",
    ),
    Mutant(
        "refuse_children",
        old="if _rank_pid:",
        new="if False:",
        fault="A forked child can call collectives as if it were the rank.",
        tests="tests/launch/test_children.py -k fork",
    ),
    Mutant(
        "_export",
        old="""
session.environ[name] = os.environ.get(name)
os.environ[name] = str(value)
""",
        new="""
os.environ[name] = str(value)
session.environ[name] = os.environ.get(name)
""",
        fault="shutdown() does not restore RANK and the other variables that bootstrap() has set.",
        tests="tests/launch/test_exit.py -k test_a_world_of_one",
    ),
    Mutant(
        "_make_group",
        old="session.request.limit",
        new="StartRequest().limit",
        fault="The process group does not get the timeout passed to bootstrap().",
        tests="tests/launch/test_leaving.py -k deadlock",
    ),
    Mutant(
        "restore_environ",
        old="""
if before is None:
    os.environ.pop(name, None)
else:
    os.environ[name] = before
""",
        new="os.environ.pop(name, None)",
        fault="shutdown() removes variables that were set before bootstrap(), such as those of torchrun.",
        tests="tests/launch/test_exit.py -k test_a_world_of_one",
    ),
    Mutant(
        "assign_on_nodes",
        old="zip(ranks, assign([list(usable[rank]) for rank in ranks]), strict=True)",
        new="zip(range(len(ranks)), assign([list(usable[rank]) for rank in ranks]), strict=True)",
        fault="GPUs are assigned by the rank in the job, not by the rank on the node.",
        tests="tests/unit/test_devices.py -k test_every_node_seats_its_own_ranks",
    ),
    # -- launch/detect, settings, mpi, errors ---------------------------------------------------------------
    Mutant(
        "launch.known_launchers",
        old='"FLUX_JOB_SIZE"',
        new='"FLUX_JOB_NNODES"',
        fault="The number of nodes of a Flux job is read as its number of ranks.",
        tests="tests/unit/test_detect.py -k test_a_launcher_is_detected_by_its_variables",
    ),
    Mutant(
        "launch.detect",
        old="environ.get('TORCHELASTIC_RUN_ID')",
        new="environ.get('TORCHELASTIC_RUN_ID') and not any(environ.get(mpi.rank) for mpi in MPI_LAUNCHERS)",
        fault="The variables of an MPI launcher take precedence over those of torchrun.",
        tests="tests/unit/test_detect.py -k test_under_torchrun",
    ),
    Mutant(
        "guess_rank",
        old="(*MPI_LAUNCHERS, TORCHRUN, SLURM)",
        new="(SLURM, TORCHRUN, *MPI_LAUNCHERS)",
        fault="Under mpirun in a Slurm job the ranks use SLURM_PROCID as their rank, and share one log of --log-dir.",
        tests="tests/unit/test_detect.py -k test_the_rank_of_an_mpi_launcher_is_the_best_guess",
    ),
    Mutant(
        "Settings.compares_calls",
        old='self.debug == "1"',
        new="bool(self.debug)",
        fault="With MPICOMM_DEBUG=0 the ranks compare their calls.",
        tests="tests/unit/test_settings.py -k test_the_meaning_of_the_variables",
    ),
    Mutant(
        "is_usable",
        old="mpi is None or _pid not in (None, os.getpid())",
        new="mpi is None",
        fault="A forked child of a rank finalizes MPI when it ends.",
        tests="tests/launch/test_children.py -k fork",
    ),
    Mutant(
        "raised_on_all_ranks",
        old="error.is_on_all_ranks = True",
        fault="An error that every rank raises is not marked as such, so every rank prints it.",
        tests="tests/launch/test_failures.py -k test_one_rank_is_missing",
    ),
    # -- launch ---------------------------------------------------------------------------------------------
    Mutant(
        "_options_of_step",
        old='"--kill-on-bad-exit=0"',
        new='"--kill-on-bad-exit=1"',
        fault="When the first rank exits with status 85, srun kills the others, and the status is lost.",
        tests="tests/unit/test_launch_commands.py -k test_ranks_are_tasks_of_a_step",
    ),
    Mutant(
        "torchrun_by_srun",
        old='f"--nproc-per-node={ranks // nodes}"',
        new='f"--nproc-per-node={ranks}"',
        fault="torchrun starts the number of ranks of the whole job on each node.",
        tests="tests/unit/test_launch_commands.py -k test_srun_starts_one_agent_on_each_node",
    ),
    Mutant(
        "parse_host_file",
        old='slots[1] if slots else match["hydra"]',
        new='match["hydra"]',
        fault="`slots=4` in a host file is ignored.",
        tests="tests/unit/test_launch_commands.py -k test_files_of_hosts",
    ),
    Mutant(
        "launch.known_launchers",
        old='"0*1"',
        new='".*"',
        fault="Tasks of pbsdsh are worlds of one without an error.",
        tests="tests/unit/test_detect.py -k test_copies_that_mpi_does_not_connect",
    ),
    Mutant(
        "_problem_with_copies",
        old="size > 1 or launch.all_claims",
        new="size > 1",
        fault="A rank of a one-rank mpirun, whose daemon blaunch has started, is refused as a copy.",
        tests="tests/unit/test_detect.py -k test_ranks_of_mpirun_are_no_copies",
    ),
    Mutant(
        "warning_after_init",
        old='launch.kind != "mpi" or is_task or job is None or job.ranks == 1',
        new='launch.kind != "mpi" or is_task or job is None or job.title != "Slurm" or job.ranks == 1',
        fault="Plain python in a PBS or LSF job of several tasks gives no warning.",
        tests="tests/unit/test_detect.py -k test_plain_python_in_a_batch_script",
    ),
    Mutant(
        "warning_of_agents",
        old="_number(environ, str(TORCHRUN.num_nodes)) != 1",
        new="_number(environ, str(TORCHRUN.num_nodes)) == 1",
        fault="Several torchruns that form a world each give no warning.",
        tests="tests/unit/test_detect.py -k test_several_torchruns",
    ),
    Mutant(
        "SlurmAllocation.from_environ",
        old="groups > 1",
        new="groups > 9",
        fault="Only the tasks of the first component of a heterogeneous job are counted.",
        tests="tests/unit/test_launch_commands.py -k test_a_heterogeneous_slurm_job",
    ),
    Mutant(
        "flux_run",
        old='["-N", str(nodes), "-n", str(ranks), "-c", str(cores), "-o", "exit-timeout=none"]',
        new='["-n", str(ranks), "-c", str(cores), "-o", "exit-timeout=none"]',
        fault="In a Flux instance of several nodes all ranks may run on one node.",
        tests="tests/unit/test_launch_commands.py -k flux_job_on_all_nodes",
    ),
    Mutant(
        "_placement",
        old="hosts = job.hosts if job.file is None else ()",
        new="hosts: tuple[Host, ...] = ()",
        fault="mpirun in an LSF job does not get its hosts: all ranks run on the first one.",
        tests="tests/unit/test_launch_commands.py -k test_hosts_of_lsf",
    ),
    Mutant(
        "mpiexec",
        old="[*forwarded, *request.variables]",
        new="environment.forwarded(child)",
        fault="`mpicomm run --env A` does not reach ranks on other hosts.",
        tests="tests/unit/test_launch_commands.py -k test_variables_that_the_user_names",
    ),
    Mutant(
        "why_unusable",
        old="torch.cuda.is_available()",
        new="not torch.cuda.is_available()",
        fault="A GPU that torch cannot use is ignored silently.",
        tests="tests/unit/test_devices.py -k test_why_an_assigned_gpu",
    ),
    # -- jobscript ------------------------------------------------------------------------------------------
    Mutant(
        "_start",
        old="'\"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID\"'",
        new="'\"$SLURM_ARRAY_JOB_ID\"'",
        fault="One job of an array requeues the whole array.",
        tests="tests/unit/test_jobs.py -k test_one_job_of_an_array_is_requeued_alone",
    ),
    Mutant(
        "_escaped",
        old='character in "\\\\\'"',
        new='character == "\'"',
        fault="A backslash in an argument with a newline is not quoted: bash changes the argument.",
        tests="tests/unit/test_jobs.py -k test_the_program_gets_its_arguments",
    ),
    Mutant(
        "quoted",
        old='rf"\\$(?:{variable}\\b|{{{variable}}})"',
        new='rf"\\$(?:{variable}|{{{variable}}})"',
        fault="A longer name that begins with that of an array's index is expanded.",
        tests="tests/unit/test_jobs.py -k test_the_index_of_an_array",
    ),
    Mutant(
        "_run",
        old="'trap : USR1 USR2'",
        new="''",
        fault="LSF's warning before the time limit kills the script, and the job is not submitted again.",
        tests="tests/unit/test_jobs.py -k test_the_script_outlives_the_signals",
    ),
    Mutant(
        "_for_torchrun",
        old='["PATH", *["LD_LIBRARY_PATH"] * bool(spec.module), "OMP_NUM_THREADS", *spec.system.job_variables]',
        new='["PATH", *["LD_LIBRARY_PATH"] * bool(spec.module), "OMP_NUM_THREADS"]',
        fault="The ranks of torchrun do not get PBS_JOBID.",
        tests="tests/unit/test_jobs.py -k test_pbs_starts_a_torchrun",
    ),
    # -- cli, job_info --------------------------------------------------------------------------------------
    Mutant(
        "rank_log",
        old="(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)",
        new="(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)",
        fault="SIGUSR1, with which a scheduler warns a rank, ends the process that writes the rank's log.",
        tests='tests/launch/test_run.py -k "test_ranks_get_the_signals and logged"',
    ),
    Mutant(
        "_show",
        old="gathered[arguments.env]",
        new="gathered[world.rank]",
        fault="`mpicomm info --env 1` shows the variables of rank 0.",
        tests="tests/launch/test_info.py -k test_variables_of_launchers",
    ),
    Mutant(
        "numa_nodes",
        old="wanted.intersection",
        new="wanted.issuperset",
        fault="A NUMA node is not shown if a rank can use only some of its processors.",
        tests="tests/launch/test_info.py -k test_numa_nodes",
    ),
    # -- mpicomm top ----------------------------------------------------------------------------------------
    Mutant(
        "Observers._receive",
        old="not isinstance(message, StatusRequest) or observer.asks or connection.has_outgoing",
        new="not isinstance(message, StatusRequest) or False",
        fault="Rank 0 stores answers without limit for an observer that asks and does not read.",
        tests="tests/unit/test_observers.py -k does_not_read",
    ),
    Mutant(
        "Coordinator.receive",
        old="(self._collection, self._observation)",
        new="(self._collection or self._observation,)",
        fault="An observer that asks during a hang report gets no answer from the ranks.",
        tests="tests/unit/test_coordinator.py -k neither_hides_nor_answers_a_hang",
    ),
    Mutant(
        "_is_private",
        old="not found.st_mode & 0o077",
        new="True",
        fault="The socket and the token of a job are written to a directory that other users can open.",
        tests="tests/unit/test_observers.py -k others_can_open",
    ),
    Mutant(
        "bytes_per_second",
        old="each.end is not None and each.end > since",
        new="each.called > since",
        fault="The rate of bytes counts operations that still run.",
        tests="tests/unit/test_flight_recorder.py -k the_rate_counts",
    ),
    # -- commands -----------------------------------------------------------------------------------------
    Mutant(
        "request._command",
        old="(python, *words[1:])",
        new="tuple(words)",
        fault="`mpicomm run python train.py` starts the Python in PATH, which may not have mpi4py.",
        tests="tests/unit/test_launch_commands.py -k run_by_its_interpreter",
    ),
    Mutant(
        "Start.shown",
        old='removed = [word for name in sorted(before.keys() - self.environ.keys()) for word in ("-u", name)]',
        new="removed = []",
        fault="The command that --dry-run prints keeps variables of another job.",
        tests="tests/unit/test_launch_commands.py -k shown_as_a_shell_command",
    ),
    Mutant(
        "options.seconds_of",
        old="days is None and second is not None and third is None",
        new="False",
        fault="`mpicomm job --time 1:30` is accepted as 1.5 hours, which is 1.5 minutes in Slurm.",
        tests="tests/unit/test_jobscript.py -k 'an_error_is_one_line and 30'",
    ),
    Mutant(
        "pbs._memory",
        old="int(text[:-1]) * times",
        new="int(text[:-1])",
        fault="`mpicomm job pbs --mem-per-cpu` requests the memory of one CPU for all CPUs of a node.",
        tests="tests/unit/test_jobscript.py",
    ),
    Mutant(
        "flux._end",
        old='"flux --parent "',
        new='"flux "',
        fault="A job of Flux that is submitted again ends with the instance of the first one.",
        tests="tests/unit/test_jobs.py -k 'equals_the_output and flux'",
    ),
    Mutant(
        "spec._check_resources",
        old="gpus and gpus % ranks and ranks % gpus",
        new="gpus and gpus % ranks",
        fault="`mpicomm job` refuses two ranks per GPU.",
        tests="tests/unit/test_jobscript.py -k numbers_of_gpus",
    ),
    Mutant(
        "_check_indices",
        old="name != spec.index",
        new="True",
        fault="`mpicomm job` refuses the index of a job array in the command.",
        tests="tests/unit/test_jobs.py -k index_of_an_array",
    ),
    Mutant(
        "run_line._separated",
        old="follows.isdecimal()",
        new="True",
        fault="`mpicomm run` prints a note about an option -n of the program that is not a number.",
        tests="tests/unit/test_run_line.py -k get_no_note",
    ),
    Mutant(
        "_Parser.parse_known_args",
        old='given.index("--") if "--" in given else len(given)',
        new="len(given)",
        fault="`mpicomm job` interprets options of the program after `--`.",
        tests="tests/unit/test_jobscript.py -k after_the_dashes",
    ),
    Mutant(
        "top_table._position",
        old="max(status.running, key=lambda each: each.seconds or 0.0)",
        new="status.running[0]",
        fault="`mpicomm top` shows the first of several running operations instead of the longest.",
        tests="tests/unit/test_top.py -k row_of_each_state",
    ),
    Mutant(
        "top.run",
        old="chosen = exact or chosen",
        fault="`mpicomm top run-1` is refused if there is a job run-10.",
        tests="tests/unit/test_top.py -k whole_name",
    ),
    Mutant(
        "argument_types.png",
        old='path.suffix.lower() != ".png"',
        new="False",
        fault="`mpicomm report --plot curves.jpg` writes a PNG file under that name.",
        tests="tests/unit/test_command.py -k wrong_command",
    ),
    Mutant(
        "cli.report.run",
        old='print_message("report", f"warning: {warning}")',
        new='print(f"warning: {warning}")',
        fault="A warning precedes the output of `mpicomm report --json`, which is not valid JSON then.",
        tests="tests/unit/test_command.py -k warnings_do_not_mix",
    ),
    Mutant(
        "launch_plan._build",
        old="environment.refuse_ranks(environ, [name for _, name in terminal.processes_above()])",
        fault="`mpicomm run` on each rank of mpirun starts a job for every rank.",
        tests="tests/launch/test_run.py -k a_rank_starts_no_job",
    ),
    Mutant(
        "terminal.table",
        old="Text(str(cell))",
        new="str(cell)",
        fault="A cell of a table with text in brackets loses it.",
        tests="tests/unit/test_command.py -k brackets",
    ),
    Mutant(
        "native.library",
        old="len(sources) == len(SOURCES) and found.mpicomm_source_crc() != zlib.crc32(b''.join(sources))",
        new="False",
        fault="After an update, a C library of the earlier version is used.",
        tests="tests/unit/test_native.py -k another_source",
    ),
    Mutant(
        "JobObserver._handle",
        old='raise OSError(f"job {self.job.name} refuses the request: {message.reason}")',
        fault="`mpicomm top` waits for a job that has refused its request, instead of an error with the reason.",
        tests="tests/unit/test_observers.py -k refusal_is_an_error",
    ),
    Mutant(
        "job_trace._messages",
        old='ends[fields["group"], fields["members"], source, target, fields["tag"], fields["message"]] = entry',
        new='ends[fields["group"], fields["members"], source, target, fields["message"]] = entry',
        fault="`mpicomm timeline` connects messages of different tags.",
        tests="tests/launch/test_timeline.py -k messages_match_by_tag",
    ),
    Mutant(
        "cli.timeline.run",
        old="except (OSError, ValueError) as error:",
        new="except OSError as error:",
        fault="`mpicomm timeline` prints a traceback if a file is not a dump file.",
        tests="tests/launch/test_timeline.py -k other_directories",
    ),
    Mutant(
        "notice.seconds_before",
        old="limit / 2",
        new="limit",
        fault="With a short timeout, bootstrap() fails before it prints which ranks are absent.",
        tests="tests/launch/test_failures.py -k one_rank_is_missing",
    ),
    Mutant(
        "unused_hosts.refuse",
        old="raise LaunchError(problem)",
        fault="In Kubernetes, a job whose launcher ignored the host file runs all ranks in one container.",
        tests="tests/launch/test_unused_hosts.py",
    ),
]
