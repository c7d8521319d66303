"""The dump files of a job with four ranks, one of which has another clock: `torchfrtrace` and `mpicomm timeline`."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpicomm import metrics_file
from mpicomm.cli.main import main
from mpicomm.reports import job_trace
from mpicomm.reports.job_trace import RankDump
from tests.launching import run_ranks
from tests.perfetto import processor

SIZE = 4
SHIFT = 5000  # seconds by which the clock of the last rank is ahead, in a time namespace
LATE = 1.0  # seconds by which rank 1 is late

PROGRAM = f"""
import os, sys
here = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
if here == {SIZE - 1} and sys.argv[2:] == ["shifted"]:
    command = ["unshare", "--time", "--monotonic", "{SHIFT}", "--fork", "--kill-child"]
    os.execvp(command[0], [*command, sys.executable, *sys.argv[:2]])
import time
import torch
import torch.distributed as dist
import mpicomm
from mpicomm.job import session
from mpicomm.recorder import flight_recorder
from tests.time_limits import wait_until
world = mpicomm.bootstrap()
rank, size = world.rank, world.size
half = dist.new_group([0, 1])
tensor = torch.ones(1024)
for _ in range(3):
    dist.all_reduce(tensor)
world.comm.Barrier()
if rank == 1:
    time.sleep({LATE})
dist.all_reduce(tensor)
if rank in (0, 1):
    dist.broadcast(tensor, 1, group=half)
right, left = (rank + 1) % size, (rank - 1) % size
for tag in (0, 7):  # the receives are called in another order than the sends
    dist.isend(tensor, right, tag=tag)
works = [dist.irecv(torch.empty(1024), left, tag=tag) for tag in (7, 0)]
for work in works:
    work.wait()
if rank == 0:
    dist.recv(torch.empty(8))  # from any rank
elif rank == 2:
    dist.send(torch.ones(8), 0)
works = [] if rank == 2 else [dist.all_reduce(tensor, async_op=True)]
if rank == 3:
    works.append(dist.irecv(torch.empty(8), 0, tag=9))
world.comm.Barrier()
wait_until(lambda: session.current().watch.clock_offset() is not None, "the watchdog has measured its clock")
pending = [["all_reduce"], ["all_reduce"], [], ["all_reduce", "recv"]][rank]
def are_only_pending():
    left = [operation for operation in flight_recorder.recorded() if operation.end is None]
    have_begun = all(operation.start is not None for operation in left if operation.name == "all_reduce")
    return have_begun and sorted(operation.name for operation in left) == pending
wait_until(are_only_pending, "all other operations are over, and the last all_reduce has begun")
mpicomm.dump_flight_recorder(sys.argv[1])
world.comm.Barrier()
if rank == 2:
    dist.all_reduce(tensor)
elif rank == 0:
    dist.send(torch.ones(8), 3, tag=9)
for work in works:
    work.wait()
"""


def has_time_namespaces() -> bool:
    if os.geteuid() != 0:
        return False
    try:
        subprocess.run(["unshare", "--time", "--monotonic", "1", "--fork", "true"], check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Job:
    folder: Path
    is_shifted: bool
    dumps: list[RankDump]
    trace: dict[str, Any]
    path: Path
    """The file with the trace."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("dumps")
    program, path = tmp_path_factory.mktemp("program") / "program.py", tmp_path_factory.mktemp("trace") / "trace.json"
    program.write_text(PROGRAM)
    is_shifted = has_time_namespaces()
    outcome = run_ranks(SIZE, [str(program), str(folder), *["shifted"] * is_shifted])
    assert outcome.status == 0, outcome
    assert main(["timeline", str(folder), "-o", str(path)]) == 0
    return Job(folder, is_shifted, job_trace.read(folder), json.loads(path.read_text()), path)


# -- torchfrtrace ------------------------------------------------------------------------------------------------------


def test_the_analyser_names_the_rank_that_is_missing(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    from tests.failures import analyser

    verdict = analyser.analyse(job.folder)
    assert verdict.ranks == [0, 2]  # 2 has not called all_reduce, 0 has not sent a message
    assert verdict.output.count("missing ranks:") == 2
    assert "collective: gloo:all_reduce\nmissing ranks: {2}" in verdict.output
    assert "group info: 0 0->3 tag 9:messages\ncollective: gloo:recv 1<-0\nmissing ranks: {0}" in verdict.output
    # a message from any rank has its sender
    content = pickle.loads((job.folder / "fr_trace_rank_0").read_bytes())
    assert [each["process_group"][0] for each in content["entries"] if each["input_sizes"] == [[8]]] == ["0 2->0"]


# -- the time axis -----------------------------------------------------------------------------------------------------


def test_the_clocks_of_all_ranks_agree(job: Job) -> None:
    """No rank leaves an all_reduce before all ranks have called it."""
    if not job.is_shifted:
        pytest.skip("needs root, and a kernel with time namespaces")
    raw = [json.loads((job.folder / f"rank-{rank}.json").read_text())["monotonic"] for rank in range(SIZE)]
    assert raw[SIZE - 1] - raw[0] > SHIFT - 60
    assert [each.clock for each in job.dumps] == ["same clock"] * (SIZE - 1) + ["measured"]
    errors = [each.error for each in job.dumps]
    assert errors[: SIZE - 1] == [0.0] * (SIZE - 1)
    assert 0 < errors[SIZE - 1] < 10
    calls = [[op for op in each.operations if op.fields["name"] == "all_reduce" and op.is_over] for each in job.dumps]
    assert {len(each) for each in calls} == {4}
    for same in zip(*calls, strict=True):
        assert max(each.called for each in same) <= min(each.end for each in same) + max(errors)


def test_the_clock_of_a_rank_without_a_measurement_is_that_of_another_or_the_wall_clock(
    job: Job, tmp_path: Path
) -> None:
    for rank in range(2):
        content = json.loads((job.folder / f"rank-{rank}.json").read_text())
        content["offset"] = None if rank else content["offset"]
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(content))
    assert [each.clock for each in job_trace.read(tmp_path)] == ["same clock", "same clock"]
    content["clock"] = ""
    (tmp_path / "rank-1.json").write_text(json.dumps(content))
    dumps = job_trace.read(tmp_path)
    assert [each.clock for each in dumps] == ["same clock", "wall clock"]
    assert dumps[1].operations[0].called == pytest.approx(job.dumps[1].operations[0].called, abs=1e-3)


def test_ranks_wait_for_the_rank_that_is_late(job: Job) -> None:
    waits = [each for each in job_trace.waits(job.dumps) if each.operation.fields["name"] == "all_reduce"]
    late = [each for each in waits if each.ranks == [1] and each.operation.key == ("0", "", 4)]
    assert {each.operation.rank for each in late} == {0, 2, 3}
    tolerance = max(each.error for each in job.dumps)
    assert all(each.end - each.start > LATE / 2 - tolerance for each in late)
    hanging = [each for each in waits if each.reason]
    assert {(each.operation.rank, tuple(each.ranks), each.reason) for each in hanging} == {
        (rank, (2,), "not arrived") for rank in (0, 1, 3)
    }


def test_messages_match_by_tag(job: Job) -> None:
    arrows = job_trace.arrows(job.dumps)
    shown = sorted((each.send.rank, each.receive.rank, each.send.fields["tag"]) for each in arrows)
    expected = [(rank, (rank + 1) % SIZE, tag) for rank in range(SIZE) for tag in (0, 7)]
    assert shown == sorted([*expected, (2, 0, 0)])
    assert all(each.receive.fields["tag"] == each.send.fields["tag"] for each in arrows)
    assert all(each.receive.fields["nbytes"] == each.send.fields["nbytes"] for each in arrows)


def test_the_slices_of_a_thread_are_nested(job: Job) -> None:
    by_thread: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in job.trace["traceEvents"]:
        if each["ph"] == "X":
            start, length = round(each["ts"] * 1000), round(each["dur"] * 1000)
            by_thread.setdefault((each["pid"], each["tid"]), []).append((start, start + length))
    assert len(by_thread) >= SIZE * 2
    for found in by_thread.values():
        open_ends: list[int] = []
        for start, end in sorted(found, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_operations_have_sizes_and_lines(job: Job) -> None:
    slices = [each for each in job.trace["traceEvents"] if each["ph"] == "X" and each["pid"] == 0]
    of_all_reduce = [each["args"] for each in slices if each["name"] == "all_reduce"]
    first = of_all_reduce[0]
    assert (first["nbytes"], first["count"], first["dtype"]) == (4096, 1024, "float32")
    assert first["where"].startswith("program.py:")
    assert [each["is_over"] for each in of_all_reduce] == [True] * 4 + [False]


def test_the_summary_is_shown(job: Job, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["timeline", str(job.folder), "--html", str(tmp_path / "t.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["messages"] == 2 * SIZE + 1
    assert [each["not_over"] for each in found["ranks"]] == [1, 1, 0, 2]
    waited = {each["rank"]: each["waited_for_seconds"] for each in found["ranks"]}
    assert waited[2] > waited[0]
    assert found["straggler"]["seconds"] == max(waited.values()) == waited[found["straggler"]["rank"]]
    named = f"longest for rank {found['straggler']['rank']} on {job.dumps[0].host}:"
    assert named in (tmp_path / "t.html").read_text()


def test_one_report_of_a_run_a_benchmark_and_a_job(job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, page = tmp_path / "digits", tmp_path / "all.html"
    run.mkdir()
    (run / metrics_file.NAME).write_text('{"event": "start", "step": 0, "epoch": 0, "world_size": 4}\n')
    sizes = {"model": "small", "parameters": 33, "strategy": "ddp", "backend": "mpi"}
    times = dict.fromkeys(("ms", "ms_median", "data_ms", "compute_ms", "communication_ms"), 1.5)
    results = {"rows": [sizes | times], "warnings": ["alpha is busy"]}
    (tmp_path / "steps.json").write_text(json.dumps(results))
    paths = [str(path) for path in (job.folder, tmp_path / "steps.json", run)]
    assert main(["report", *paths, "--html", str(page)]) == 0
    shown = capfd.readouterr()
    assert "mpicomm report: warning: steps.json: alpha is busy" in shown.err
    assert "milliseconds per step" in shown.out
    assert "The other ranks waited longest for rank" in shown.out
    text = page.read_text()
    assert re.findall("<h2>(.*)</h2>", text) == ["digits", "steps.json", job.folder.name]
    assert all(each in text for each in ("<p>alpha is busy</p>", "milliseconds per step", "waited longest for rank"))
    assert main(["report", *paths, "--json"]) == 0
    of_job, benchmark, run_values = json.loads(capfd.readouterr().out)
    assert (run_values["run"], benchmark, len(of_job["ranks"])) == ("digits", results, SIZE)
    assert main(["report", *paths[:2], "--plot", str(tmp_path / "runs.png")]) == 2
    assert "no PATH is the checkpoint_dir of a run.\nUse --html" in capfd.readouterr().err


@pytest.mark.parametrize("content", [None, "{", '{"rank": 0}'])
def test_other_directories_are_refused(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "rank-0.json").write_text(content)
    assert (
        main(["timeline", str(tmp_path), "-o", str(tmp_path / "trace.json"), "--html", str(tmp_path / "t.html")]) != 0
    )
    error = capsys.readouterr().err
    assert ("has no files rank-*.json" if content is None else "is not a dump file") in error
    assert not (tmp_path / "trace.json").exists()
    assert not (tmp_path / "t.html").exists()


# -- Perfetto ----------------------------------------------------------------------------------------------------------


def test_perfetto_reads_the_trace_and_draws_an_arrow_for_each_message(job: Job, tmp_path: Path) -> None:
    if needed := processor.missing():
        pytest.skip(needed)
    with processor.opened(job.path, tmp_path) as perfetto:
        errors = processor.rows(
            perfetto, "SELECT name, value FROM stats WHERE value > 0 AND severity IN ('error', 'data_loss')"
        )
        arrows = processor.rows(
            perfetto,
            "SELECT sender.name AS sent, receiver.name AS received, a.pid AS source, b.pid AS target, "
            "EXTRACT_ARG(sender.arg_set_id, 'args.nbytes') AS nbytes FROM flow "
            "JOIN slice sender ON slice_out = sender.id JOIN slice receiver ON slice_in = receiver.id "
            "JOIN thread_track s ON sender.track_id = s.id JOIN thread t USING (utid) JOIN process a USING (upid) "
            "JOIN thread_track r ON receiver.track_id = r.id JOIN thread u ON r.utid = u.utid "
            "JOIN process b ON u.upid = b.upid",
        )
    assert errors == []
    around = [("send", "transfer", rank, (rank + 1) % SIZE, 4096) for rank in range(SIZE) for _ in range(2)]
    assert sorted(map(tuple, arrows)) == sorted([*around, ("send", "transfer", 2, 0, 32)])
