"""tests.launching: the jobs that tests start."""

from __future__ import annotations

import os
import signal

from tests import launching, time_limits

PYTEST = """
import time
from tests.launching import background_job
with background_job(["sleep", "600"]) as job:
    print(job.pid, flush=True)
    time.sleep(600)
"""


def test_a_job_ends_with_the_pytest_that_started_it() -> None:
    with launching.background_job(launching.python(PYTEST)) as pytest:
        pid = int(pytest.wait_until(pytest.stdout, "the job has started"))
        os.kill(pytest.pid, signal.SIGKILL)
        time_limits.wait_until(lambda: not launching.read_process(pid, "cmdline"), "the job has ended")
