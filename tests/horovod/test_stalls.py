"""Jobs in which a rank leaves a name out, shuts down early, or is idle."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.launching import run_ranks
from tests.time_limits import scaled

CHECK_SECONDS = 4
LATE_SECONDS = scaled(2.0)  # after the report is due

LATE = f"""
import sys, time
import torch
import mpicomm.horovod as hvd
from mpicomm.horovod import negotiation

hvd.init()
rank, size = hvd.rank(), hvd.size()
negotiation._write = lambda text: print(
    f"phase {{phase}} after {{time.monotonic() - start:.2f}}: {{text}}", file=sys.stderr, flush=True
)

def leave_out():
    # rank 2 submits the name only after the report is due
    global start
    hvd.barrier()
    start = time.monotonic()
    if rank == 2:
        time.sleep({CHECK_SECONDS + LATE_SECONDS})
    return hvd.allreduce(torch.ones(3), name="left_out", op=hvd.Sum).tolist() == [size] * 3

# 1. a name that no rank knows, and 2. one that is in the cache
for phase in (1, 2):
    assert leave_out()
# 3. an idle engine
hvd.barrier()
used = time.process_time()
time.sleep(3)
print(f"idle {{rank}} {{(time.process_time() - used) / 3:.3f}}", flush=True)
# 4. a rank shuts down, the others want to go on
hvd.allreduce(torch.ones(1), name="last")
if rank == 1:
    hvd.shutdown()
    assert not hvd.is_initialized()
else:
    try:
        hvd.allreduce(torch.ones(1), name="after the shutdown")
        raise AssertionError("no error")
    except hvd.HorovodInternalError as error:
        assert "has been shut down" in str(error), error
    hvd.shutdown()
# 5. again
hvd.init()
assert hvd.allreduce(torch.ones(1), name="again", op=hvd.Sum).item() == size
print(f"finished {{rank}}", flush=True)
"""


def test_a_late_rank_an_idle_engine_and_an_early_shutdown(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    env = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(CHECK_SECONDS),
        "HOROVOD_TIMELINE": str(timeline),
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    }
    outcome = run_ranks(4, LATE, env=env)
    assert outcome.status == 0, outcome
    # 1. each report has the name and the missing rank; the first one of each phase is in time
    reports = re.findall(
        r"phase (\d) after ([\d.]+): mpicomm: stalled tensors: .*\n  (.*): waiting [\d.]+ s for ranks (.*)\n",
        outcome.stderr,
    )
    assert {(name, missing) for *_, name, missing in reports} == {("allreduce.left_out", "2")}, outcome
    first = {phase: float(seconds) for phase, seconds, *_ in reversed(reports)}
    assert sorted(first) == ["1", "2"], outcome
    assert max(first.values()) <= CHECK_SECONDS + LATE_SECONDS / 2, outcome
    # 2. an idle engine does not poll
    idle = [float(share) for share in re.findall(r"^idle \d ([\d.]+)$", outcome.stdout, re.MULTILINE)]
    assert len(idle) == 4, outcome
    assert max(idle) < 0.5, outcome
    assert sorted(re.findall(r"^finished (\d)$", outcome.stdout, re.MULTILINE)) == list("0123"), outcome
    # 3. the timeline of the second start replaced that of the first
    events = json.loads(timeline.read_text())
    rows = {each["args"]["name"]: each["pid"] for each in events if each["name"] == "process_name"}
    assert {"allreduce.again", "cycles"} <= set(rows), rows
    phases = [(each["name"], each["ph"]) for each in events if each["pid"] == rows["allreduce.again"] and "ts" in each]
    assert phases == [
        ("NEGOTIATE_ALLREDUCE", "B"),
        ("NEGOTIATE_ALLREDUCE", "E"),
        ("ALLREDUCE", "B"),
        ("ALLREDUCE", "E"),
    ]
    assert ("CYCLE_START", "i") in {(each["name"], each["ph"]) for each in events}
    assert "start_time_since_epoch_in_micros" in events[0]["args"]


MISSING = """
import time
import torch
import mpicomm.horovod as hvd

hvd.init()
if hvd.rank() == 1:
    time.sleep(3600)
hvd.allreduce(torch.ones(3), name="left_out")
"""


def test_a_stall_ends_the_job() -> None:
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    outcome = run_ranks(2, MISSING, env=env)
    assert outcome.status != 0, outcome
    assert "HorovodInternalError: allreduce.left_out: allreduce.left_out waited " in outcome.stderr, outcome
    assert " s for ranks 1.\n" in outcome.stderr, outcome
    assert "or raise HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in outcome.stderr, outcome
