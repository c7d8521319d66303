"""Faults in the recovery after failures of ranks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_JOB = "tests/recovery -k test_ranks_die_and_the_others_continue"

MUTANTS = [
    Mutant(
        "startup/survivors.py",
        old="number = next(vacant, None) if rank is None else rank",
        new="number = rank",
        fault="A spare never takes the place of a failed rank.",
        tests="tests/recovery -k test_spares_take_the_places_of_failed_ranks",
        ranks=0,
    ),
    Mutant(
        "session.py",
        old="previous_rank = job.where.rank if before is None else before.place.rank",
        new="previous_rank = job.where.rank",
        fault="After a recovery, a rank's previous rank is its new one, also on a spare that has joined.",
        tests=_JOB,
        ranks=0,
    ),
    Mutant(
        "recovery.py",
        old="if found.size >= least:",
        new="if found.size >= 1:",
        fault="The job continues although fewer than min_ranks ranks are left.",
        tests="tests/recovery -k test_the_job_ends_if_too_few_ranks_are_left",
        ranks=0,
    ),
    Mutant(
        "session.py",
        old="    torch_internals.restart_group_names()",
        new="    pass",
        fault="After an interrupted recovery, the ranks give a new group different names, and its creation hangs.",
        tests="tests/recovery -k equal_names",
        ranks=0,
    ),
    Mutant(
        "watchdog/coordinator.py",
        old="if not self._recovers or self.is_ending:",
        new="if self._recovers or self.is_ending:",
        fault="A dead rank aborts the job although the others can continue.",
        tests=_JOB,
        ranks=0,
    ),
    Mutant(
        "watchdog/rank_failures.py",
        old="failed = _current.error() if _current is not None and _current.has_any.is_set() else None",
        new="failed = None",
        fault="A backward pass of DDP in which a rank fails ends without an error and with wrong gradients.",
        tests=_JOB,
        ranks=0,
    ),
    Mutant(
        "watchdog/flight_recorder.py",
        old="group.broken, group.has_ended, group.running = cause, True, None",
        new="group.broken, group.has_ended, group.running = cause, False, None",
        fault="The error of a group of an ended world does not say which group to use instead.",
        tests=_JOB,
        ranks=0,
    ),
    Mutant(
        "cli/job_listener.py",
        old="return self.is_replaced or len(",
        new="return len(",
        fault="mpicomm run reports ranks of a world that has ended as ranks that did not finish.",
        tests=_JOB,
        ranks=0,
    ),
    Mutant(
        "watchdog/parent_link.py",
        old='for message in (JobStarted({"": "0"}, name, recovers=True), RankFinished(0)):',
        new='for message in (JobStarted({"": "0"}, name, recovers=True),):',
        fault="If rank 0 dies at the end of the program, mpicomm run reports that the others did not finish.",
        tests="tests/recovery -k test_a_rank_that_dies_at_the_end_does_not_fail_the_job",
        ranks=0,
    ),
    Mutant(
        "mpi.py",
        old='return has_calls and api().get_vendor()[0] == "Open MPI" and is_enabled',
        new='return has_calls and api().get_vendor()[0] == "Open MPI"',
        fault='A job under mpirun without ULFM starts with on_failure="recover", and a failure then ends it.',
        tests="tests/recovery -k test_without_ulfm_the_start_fails",
        ranks=0,
    ),
    Mutant(
        "launch/mpi_library.py",
        old='fault_tolerant="--with-ft ulfm",',
        new='fault_tolerant="--with-ft none",',
        fault="mpicomm run --fault-tolerant starts Open MPI without ULFM.",
        tests="tests/recovery -k test_the_option_needs_an_mpi_that_tolerates_failures",
        ranks=0,
    ),
]
