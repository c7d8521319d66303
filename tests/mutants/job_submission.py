"""Faults in the submission of jobs, and in the file with the options of sites."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STATES = "tests/unit/test_job_submission.py -k test_states"

MUTANTS = [
    Mutant(
        "QueueState.exit_status",
        old="return status if 0 < status < 256 else 1",
        new="return status",
        fault="--wait succeeds although the job has exceeded its time limit.",
        tests=_STATES,
    ),
    Mutant(
        "job_submission._wait_for_end",
        old="unknown >= _UNKNOWN_QUERIES",
        new="True",
        fault="A new job that the scheduler does not list yet counts as ended.",
        tests="tests/unit/test_job_submission.py -k test_a_job_that_the_scheduler_forgets",
    ),
    Mutant(
        "job_submission._OutputFile._new",
        old="version == earlier",
        new="False",
        fault="--tail prints the output of an earlier job that had the same file.",
        tests="tests/unit/test_job_submission.py -k earlier_job",
    ),
    Mutant(
        "job_submission._wait",
        old='appends = queue.appends_output or job.requeue or "--open-mode=append" in job.directive',
        new="appends = False",
        fault="--tail prints the output of an earlier job to which this job appends.",
        tests="tests/unit/test_job_submission.py -k earlier_job",
    ),
    Mutant(
        "job._appended",
        old="saved + passed",
        new="list(dict.fromkeys(saved + passed))",
        fault="--save removes repeated values, such as the second --env among the arguments of the launcher.",
        tests="tests/unit/test_job_sites.py -k saved_lists",
    ),
    Mutant(
        "job_sites._edited",
        old="(new := left.pop(key)) != value",
        new="((new := left.pop(key)) or True)",
        fault="--save writes lines anew whose values have not changed, and loses their comments.",
        tests="tests/unit/test_job_sites.py -k lines_written_by_hand",
    ),
    Mutant(
        "job._Parser.parse_known_args",
        old='parsed.scheduler == "pbs"',
        new="False",
        fault="PBS uses the directive of the site in place of that of the command line.",
        tests="tests/unit/test_job_sites.py -k precedence",
    ),
    Mutant(
        "job.j2",
        old='[ "$status" -eq 0 ] || exit "$status"',
        new="",
        fault="The ranks start after a command of --setup has failed.",
        tests="tests/unit/test_jobs.py -k after_a_failed_command",
    ),
]
