"""Faults in the recovery after failures of ranks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_JOB = "tests/recovery -k test_ranks_die_and_the_others_continue"

MUTANTS = [
    Mutant(
        "RankFailures.wait_until_known",
        old="mpi.poll(self._is_known, _NAME_SECONDS)",
        fault="On a busy machine, the error of an operation does not name the rank that has failed.",
        tests="tests/unit/test_rank_failures.py -k busy_watchdog",
    ),
    Mutant(
        "rank_failures.current",
        old="_current is None or _current.is_aborting",
        new="_current is None",
        fault="While the job is being aborted, operations ask to recover from the ranks that the abort has ended.",
        tests="tests/unit/test_rank_failures.py -k being_aborted",
    ),
    Mutant(
        "Session.close",
        old="if not recovers: rank_failures.set_current(None)",
        new="rank_failures.set_current(None)",
        fault="While the ranks form the next world, operations raise errors of MPI in place of RankFailedError.",
        tests="tests/unit/test_rank_failures.py -k until_the_next_world",
    ),
    Mutant(
        "next_ranks",
        old="next(vacant, None) if rank is None else rank",
        new="rank",
        fault="A spare never takes the place of a failed rank.",
        tests="tests/recovery -k test_spares_take_the_places_of_failed_ranks",
    ),
    Mutant(
        "find_survivors",
        old="except Exception as caught:",
        new="except mpi.api().Exception as caught:",
        fault="An incomplete result of a collective operation during the recovery ends the job.",
        tests="tests/recovery/test_recovery.py -k incomplete",
    ),
    Mutant(
        "find_survivors",
        old="comm.size == before and error is not None and not isinstance(error, mpi.api().Exception)",
        new="False and not isinstance(error, mpi.api().Exception)",
        fault="An error in the search for the remaining ranks, without a failure, is repeated silently.",
        tests="tests/recovery/test_recovery.py -k no_failure_explains",
    ),
    Mutant(
        "create",
        old="None if last.job.is_spare else last.world.rank",
        new="job.rank_topology.rank",
        fault="After a recovery, a rank's previous rank is its new one, also on a spare that has joined.",
        tests=_JOB,
    ),
    Mutant(
        "_check_enough",
        old="survivors.size >= least",
        new="survivors.size >= 1",
        fault="The job continues although fewer than min_ranks ranks are left.",
        tests="tests/recovery -k test_the_job_ends_if_too_few_ranks_are_left",
    ),
    Mutant(
        "_make_group",
        old="torch_internals.restart_group_names()",
        fault="After an interrupted recovery, the ranks give a new group different names, and its creation hangs.",
        tests="tests/recovery -k equal_names",
    ),
    Mutant(
        "recover_from",
        old="_ATTEMPTS",
        new="1",
        fault="recover() fails if an attempt to form the new world fails once although no rank has failed.",
        tests="tests/recovery -k an_attempt_to_form",
    ),
    Mutant(
        "recover_from",
        old="attempts + 1 if comm.size == size else 1",
        new="1",
        fault="recover() tries for ever to form a world that cannot be formed.",
        tests="tests/recovery -k cannot_be_formed",
    ),
    Mutant(
        "_cause",
        old="error is None or isinstance(error, (RankFailedError, mpi.api().Exception))",
        new="error is None and isinstance(error, (RankFailedError, mpi.api().Exception))",
        fault="recover() reports the consequence of an error on another rank instead of that error.",
        tests="tests/recovery -k cannot_be_formed",
    ),
    Mutant(
        "_is_pending",
        old="mpi.api().Exception",
        new="ZeroDivisionError",
        fault="After a recovery a rank does not report its end, if a barrier was interrupted by the failure.",
        tests="tests/recovery -k interrupted_barrier",
    ),
    Mutant(
        "Coordinator._end_rank",
        old="not self._recovers",
        new="self._recovers",
        fault="A dead rank aborts the job although the others can continue.",
        tests=_JOB,
    ),
    Mutant(
        "raise_if_failed",
        old="failures.error() if failures is not None and failures.has_any.is_set() else None",
        new="None",
        fault="Ranks that serve rank 0 wait on when a rank has failed.",
        tests="tests/recovery -k ranks_that_serve_rank_0",
    ),
    Mutant(
        "end_all",
        old="True",
        new="False",
        fault="The error of a group of an ended world does not say which group to use instead.",
        tests=_JOB,
    ),
    Mutant(
        "Job.is_finished",
        old="self.is_replaced or len(self._finished) == len(self._hosts)",
        new="len(self._finished) == len(self._hosts)",
        fault="mpicomm run reports ranks of a world that has ended as ranks that did not finish.",
        tests=_JOB,
    ),
    Mutant(
        "report_end",
        old='(JobStarted({"": "0"}, name, recovers=True), RankFinished(0))',
        new='(JobStarted({"": "0"}, name, recovers=True),)',
        fault="If rank 0 dies at the end of the program, mpicomm run reports that the others did not finish.",
        tests="tests/recovery -k test_a_rank_that_dies_at_the_end_does_not_fail_the_job",
    ),
    Mutant(
        "tolerates_failures",
        old='has_calls and api().get_vendor()[0] == "Open MPI" and is_enabled',
        new='has_calls and api().get_vendor()[0] == "Open MPI"',
        fault='A job under mpirun without ULFM starts with on_failure="recover", and a failure then ends it.',
        tests="tests/recovery -k test_without_ulfm_the_start_fails",
    ),
    Mutant(
        "launch.mpi_library",
        old='"--with-ft ulfm"',
        new='"--with-ft none"',
        fault="mpicomm run --fault-tolerant starts Open MPI without ULFM.",
        tests="tests/recovery -k test_the_option_needs_an_mpi_that_tolerates_failures",
    ),
]
