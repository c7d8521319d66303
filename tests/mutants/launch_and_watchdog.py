"""Faults in launching, start-up and the watchdog."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- watchdog -------------------------------------------------------------------------------------------
    Mutant(
        "watchdog/coordinator.py",
        old="case protocol.PossibleHang() | protocol.TimedOut() | protocol.MissingQuery():",
        new="case protocol.PossibleHang() | protocol.MissingQuery():",
        fault="Rank 0 ignores the message that an operation has passed its timeout, so the job never ends.",
        tests="tests/unit/test_coordinator.py -k test_a_deadline_ends_the_job",
        ranks=0,
    ),
    Mutant(
        "watchdog/coordinator.py",
        old="_DUMP_SECONDS, now, status or 1)",
        new="_DUMP_SECONDS, now, 1)",
        fault="A job that ends because a rank has exited ends with status 1, not with the status of that rank.",
        tests="tests/unit/test_coordinator.py -k test_the_job_ends_with_the_status_of_the_leaver",
        ranks=0,
    ),
    Mutant(
        "watchdog/channel.py",
        old='hmac.digest(token, nonce + str(rank).encode(), "sha256")',
        new='hmac.digest(token, str(rank).encode(), "sha256")',
        fault="The proof of the token does not depend on the nonce, so an old proof is accepted again.",
        tests="tests/unit/test_channel.py -k repeats_an_old_proof",
        ranks=0,
    ),
    Mutant(
        "watchdog/rank_0_monitor.py",
        old="return turn_of(self._place.rank) + behind",
        new="return turn_of(self._place.hub) + behind",
        fault="All ranks of a hub use the same delay to report in place of rank 0, so several ranks print the cause.",
        tests="tests/launch/test_many_watchdogs.py -k test_rank_1_speaks_for_rank_0",
        ranks=0,
    ),
    Mutant(
        "watchdog/agent.py",
        old="dump.try_write(self._limits.directory, self.place.rank, about, ",
        new="dump.try_write(self._limits.directory, self.place.hub, about, ",
        fault="A rank writes its operations and stacks into the dump files of its hub.",
        tests="tests/launch/test_leaving.py -k test_all_ranks_write_files",
        ranks=0,
    ),
    Mutant(
        "watchdog/agent.py",
        old="""\
            for operation in flight_recorder.running():
                operation.extend_deadline(late)""",
        new="""\
            pass""",
        fault="The time for which a process is suspended counts toward the timeout of its operations.",
        tests="tests/launch/test_ends.py -k test_a_job_that_was_suspended_goes_on",
        ranks=0,
    ),
    Mutant(
        "watchdog/signals.py",
        old="if signal.SIGTERM not in numbers:",
        new="if numbers[0] != signal.SIGTERM:",
        fault="SIGTERM is lost if another signal arrived before it.",
        tests="tests/unit/test_signals.py -k test_a_process_ends_by_sigterm_if_nobody_takes_care_of_it",
        ranks=0,
    ),
    Mutant(
        "watchdog/exit_hooks.py",
        old="if self is not _current or os.getpid() != self.pid or _continues():",
        new="if self is not _current or _continues():",
        fault="An exception in a forked child of a rank ends the whole job.",
        tests="tests/launch/test_children.py -k fork",
        ranks=0,
    ),
    Mutant(
        "watchdog/flight_recorder.py",
        old="if start <= instruction < end and line is not None)",
        new="if start <= instruction and line is not None)",
        fault="An operation is reported at the first line of the calling function.",
        tests="tests/unit/test_flight_recorder.py -k test_the_callers_line_is_found",
        ranks=0,
    ),
    Mutant(
        "watchdog/channel_setup.py",
        old="if failed := agreement.failures(comm.allgather, check, OSError):",
        new="failed = agreement.failures(comm.allgather, check, OSError)\n"
        "    if any(rank == comm.rank for rank, _ in failed):",
        fault="Each rank decides alone whether the channel is open; ranks with a channel wait for a rank without one.",
        tests="tests/launch/test_ends.py -k channel",
        ranks=0,
    ),
    # -- startup --------------------------------------------------------------------------------------------
    Mutant(
        "startup/rendezvous.py",
        old="if all(received)]",
        new="if any(received)]",
        fault="The store listens on an address that one node can reach, but not every node.",
        tests="tests/unit/test_rendezvous.py -k test_a_place_is_chosen_that_every_node_reaches",
        ranks=0,
    ),
    Mutant(
        "startup/startup_barrier.py",
        old="tag=_ARRIVAL) for rank in range(1, comm.size)}",
        new="tag=_ARRIVAL) for rank in range(1, comm.size - 1)}",
        fault="Rank 0 does not wait for the last rank, and therefore never reports it as missing.",
        tests="tests/launch/test_failures.py -k test_one_rank_is_missing",
        ranks=0,
    ),
    Mutant(
        "startup/devices.py",
        old="chosen[rank] = uuids[rank % len(uuids)]",
        new="chosen[rank] = uuids[0]",
        fault="All ranks in excess of the number of GPUs share the first GPU.",
        tests="tests/unit/test_devices.py -k test_ranks_that_outnumber_gpus_share_evenly",
        ranks=0,
    ),
    # -- runtime --------------------------------------------------------------------------------------------
    Mutant(
        "watchdog/first_report.py",
        old='private.add("mpicomm/failures", 1) == 1',
        new='private.add("mpicomm/failures", 1) >= 1',
        fault="Every failing rank considers itself the first to fail, so each prints its traceback.",
        tests="tests/launch/test_failures.py -k test_all_ranks_fail_at_once",
        ranks=0,
    ),
    Mutant(
        "watchdog/flight_recorder.py",
        old='_MACHINERY = ("contextlib", "functools", ',
        new='_MACHINERY = ("functools", ',
        fault="A decorator of contextlib around new_group is reported as the line of the program.",
        tests="tests/launch/test_ends.py -k new_group",
        ranks=0,
    ),
    Mutant(
        "watchdog/flight_recorder.py",
        old="            operation.take_number()\n            self._open.append(operation)",
        new="            operation.begin()\n            self._open.append(operation)",
        fault="The time that an operation waits in a GPU's stream counts toward its timeout.",
        tests="tests/unit/test_flight_recorder.py -k wait_for_earlier",
        ranks=0,
    ),
    Mutant(
        "watchdog/flight_recorder.py",
        old="    if _rank_pid:",
        new="    if False:",
        fault="A forked child can call collectives as if it were the rank.",
        tests="tests/launch/test_children.py -k fork",
        ranks=0,
    ),
    Mutant(
        "runtime.py",
        old="""\
        session.environ[name] = os.environ.get(name)
        os.environ[name] = str(value)""",
        new="""\
        os.environ[name] = str(value)
        session.environ[name] = os.environ.get(name)""",
        fault="shutdown() does not restore RANK and the other variables that bootstrap() has set.",
        tests="tests/launch/test_exit.py -k test_a_world_of_one",
        ranks=0,
    ),
    Mutant(
        "runtime.py",
        old="timeout=session.request.limit,",
        new="timeout=StartRequest().limit,",
        fault="The process group does not get the timeout passed to bootstrap().",
        tests="tests/launch/test_leaving.py -k deadlock",
        ranks=0,
    ),
    Mutant(
        "runtime.py",
        old="""\
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before""",
        new="""\
        os.environ.pop(name, None)""",
        fault="shutdown() removes variables that were set before bootstrap(), such as those of torchrun.",
        tests="tests/launch/test_exit.py -k test_a_world_of_one",
        ranks=0,
    ),
    Mutant(
        "startup/devices.py",
        old="for rank, uuid in zip(ranks, assign(",
        new="for rank, uuid in zip(range(len(ranks)), assign(",
        fault="GPUs are assigned by the rank in the job, not by the rank on the node.",
        tests="tests/unit/test_devices.py -k test_every_node_seats_its_own_ranks",
        ranks=0,
    ),
    # -- launch/detect, settings, mpi, errors ---------------------------------------------------------------
    Mutant(
        "launch/known_launchers.py",
        old='size="FLUX_JOB_SIZE"',
        new='size="FLUX_JOB_NNODES"',
        fault="The number of nodes of a Flux job is read as its number of ranks.",
        tests="tests/unit/test_detect.py -k test_a_launcher_is_detected_by_its_variables",
        ranks=0,
    ),
    Mutant(
        "launch/detect.py",
        old="""\
    if override == "torchrun" or (override is None and environ.get("TORCHELASTIC_RUN_ID")):
""",
        new="""\
    is_of_mpi = any(environ.get(launcher.rank) for launcher in MPI_LAUNCHERS)
    if override == "torchrun" or (override is None and environ.get("TORCHELASTIC_RUN_ID") and not is_of_mpi):
""",
        fault="The variables of an MPI launcher take precedence over those of torchrun.",
        tests="tests/unit/test_detect.py -k test_under_torchrun",
        ranks=0,
    ),
    Mutant(
        "launch/detect.py",
        old="for launcher in (*MPI_LAUNCHERS, TORCHRUN, SLURM)]",
        new="for launcher in (SLURM, TORCHRUN, *MPI_LAUNCHERS)]",
        fault="Under mpirun in a Slurm job the ranks use SLURM_PROCID as their rank, and share one log of --log-dir.",
        tests="tests/unit/test_detect.py -k test_the_rank_of_an_mpi_launcher_is_the_best_guess",
        ranks=0,
    ),
    Mutant(
        "settings.py",
        old='return self.debug == "1"',
        new="return bool(self.debug)",
        fault="With MPICOMM_DEBUG=0 the ranks compare their calls.",
        tests="tests/unit/test_settings.py -k test_the_meaning_of_the_variables",
        ranks=0,
    ),
    Mutant(
        "mpi.py",
        old="if mpi is None or _pid not in (None, os.getpid()):",
        new="if mpi is None:",
        fault="A forked child of a rank finalizes MPI when it ends.",
        tests="tests/launch/test_children.py -k fork",
        ranks=0,
    ),
    Mutant(
        "errors.py",
        old="    error.is_on_all_ranks = True\n",
        new="",
        fault="An error that every rank raises is not marked as such, so every rank prints it.",
        tests="tests/launch/test_failures.py -k test_one_rank_is_missing",
        ranks=0,
    ),
    # -- launch ---------------------------------------------------------------------------------------------
    Mutant(
        "launch/commands.py",
        old='"--kill-on-bad-exit=0"',
        new='"--kill-on-bad-exit=1"',
        fault="When the first rank exits with status 85, srun kills the others, and the status is lost.",
        tests="tests/unit/test_launch_commands.py -k test_ranks_are_tasks_of_a_step",
        ranks=0,
    ),
    Mutant(
        "launch/commands.py",
        old='f"--nproc-per-node={ranks // nodes}"',
        new='f"--nproc-per-node={ranks}"',
        fault="torchrun starts the number of ranks of the whole job on each node.",
        tests="tests/unit/test_launch_commands.py -k test_srun_starts_one_agent_on_each_node",
        ranks=0,
    ),
    Mutant(
        "launch/allocation.py",
        old='found.append((match["name"], slots[1] if slots else match["hydra"]))',
        new='found.append((match["name"], match["hydra"]))',
        fault="`slots=4` in a host file is ignored.",
        tests="tests/unit/test_launch_commands.py -k test_files_of_hosts",
        ranks=0,
    ),
    # -- jobscript ------------------------------------------------------------------------------------------
    Mutant(
        "launch/jobscript/slurm.py",
        old='"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
        new='"$SLURM_ARRAY_JOB_ID"',
        fault="One job of an array requeues the whole array.",
        tests="tests/unit/test_jobs.py -k test_one_job_of_an_array_is_requeued_alone",
        ranks=0,
    ),
    Mutant(
        "launch/jobscript/shell.py",
        old='if character in "\\\\\'":',
        new='if character == "\'":',
        fault="A backslash in an argument with a newline is not quoted: bash changes the argument.",
        tests="tests/unit/test_jobs.py -k test_the_program_gets_its_arguments",
        ranks=0,
    ),
    # -- cli, job_info --------------------------------------------------------------------------------------
    Mutant(
        "rank_log.py",
        old="(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)",
        new="(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)",
        fault="SIGUSR1, with which a scheduler warns a rank, ends the process that writes the rank's log.",
        tests='tests/launch/test_run.py -k "test_ranks_get_the_signals and logged"',
        ranks=0,
    ),
    Mutant(
        "cli/info.py",
        old="out.print(_variables(gathered[arguments.env]))",
        new="out.print(_variables(gathered[world.rank]))",
        fault="`mpicomm info --env 1` shows the variables of rank 0.",
        tests="tests/launch/test_info.py -k test_variables_of_launchers",
        ranks=0,
    ),
    Mutant(
        "job_info.py",
        old="if wanted.intersection(here):",
        new="if wanted.issuperset(here):",
        fault="A NUMA node is not shown if a rank can use only some of its processors.",
        tests="tests/launch/test_info.py -k test_numa_nodes",
        ranks=0,
    ),
]
