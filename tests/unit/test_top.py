"""`mpicomm top`: the choice of the job, the table and its JSON."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from mpicomm.cli import main, top, top_table
from mpicomm.cli.job_observer import JobStatus
from mpicomm.recorder.status import ExitedRank, NotResponding, OperationInfo, RankStatus, Status, Usage
from mpicomm.watchdog import job_files

GIB = 2**30
FAILED = 2
STOPPED = "process 7 is stopped by a signal (SIGSTOP)"

Publish = Callable[..., socket.socket]


@pytest.fixture(name="publish")
def _publish(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publish]:
    """Return a function that writes the file of a job and listens for its observers."""
    with tempfile.TemporaryDirectory() as above, contextlib.ExitStack() as stack:
        monkeypatch.setattr(job_files, "folders", lambda: [Path(above, "jobs")])

        def publish(name: str, started: float = 0.0) -> socket.socket:
            _, listener = job_files.publish(job_files.new(name, 4, f"train_{name}.py", started))
            return stack.enter_context(contextlib.closing(listener))

        yield publish


def operation(seconds: float, name: str = "all_reduce") -> OperationInfo:
    where = f"train.py:88 ({name})"
    return OperationInfo(7, name, "0", "", 42, False, "float32", 1024, None, where, seconds, seconds, False)


STATUSES: list[Status] = [
    RankStatus([operation(3.25), operation(12.5, "barrier")], None, "train.py:1", {}, Usage(2.5e6, GIB)),
    RankStatus([], operation(1.0), "train.py:90 (step)", {}, Usage(0.0, 2 * GIB, 30 * GIB, 80 * GIB, 97)),
    NotResponding(2.5, STOPPED),
    ExitedRank(3, 61.0),
]


def status_of(statuses: list[Status]) -> JobStatus:
    job = job_files.new("1", len(statuses), "train.py", time.time() - 3725)
    return JobStatus(job, ["node0"] * len(statuses), statuses, 0.0125)


def cells_of(statuses: list[Status]) -> list[list[str]]:
    """Return the cells of the table by row, the titles first."""
    out = Console(width=200, record=True)
    out.print(top_table.table(top_table.rows(status_of(statuses))))
    lines = out.export_text().replace("┃", "│").splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_the_row_of_each_state() -> None:
    assert cells_of(STATUSES) == [
        ["rank", "host", "operation", "line", "seconds", "bytes/s", "memory", "GPU memory", "GPU %"],
        ["0", "node0", "barrier #42, float32[1024]", "train.py:88 (barrier)", "12.5", "2.5 MB", "1.1 GB", "", ""],
        ["1", "node0", "", "train.py:90 (step)", "", "0 bytes", "2.1 GB", "32.2 GB of 85.9 GB", "97"],
        ["2", "node0", f"not responding: {STOPPED}", "", "2.5", "", "", "", ""],
        ["3", "node0", "exited with status 3", "", "61.0", "", "", "", ""],
    ]


def test_a_job_without_gpus_has_no_columns_for_them() -> None:
    assert cells_of(STATUSES[:1])[0][-2:] == ["bytes/s", "memory"]


def test_the_json_has_numbers() -> None:
    found = top_table.as_json(status_of(STATUSES))
    assert (found["job"], found["size"], found["program"], found["answer_seconds"]) == ("1", 4, "train.py", 0.0125)
    states = [rank["state"] for rank in found["ranks"]]
    assert states == ["in_operation", "computing", "not_responding", "exited"]
    assert [rank["seconds"] for rank in found["ranks"]] == [12.5, None, 2.5, 61.0]
    assert [rank["bytes_per_second"] for rank in found["ranks"]] == [2.5e6, 0.0, None, None]
    assert [rank["memory"] for rank in found["ranks"]] == [GIB, 2 * GIB, None, None]
    assert [rank["gpu_utilization"] for rank in found["ranks"]] == [None, 97, None, None]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(("height", "shown"), [(60, 48), (25, 19)])
def test_the_table_fits_the_terminal(height: int, shown: int) -> None:
    out = Console(width=120, height=height, record=True)
    out.print(top._screen(status_of([STATUSES[0]] * 48), out))
    lines = out.export_text().splitlines()
    assert len(lines) <= height
    assert len([line for line in lines if "barrier #42" in line]) == shown
    assert (f"... and {48 - shown} more ranks" in lines[-1]) == (shown < 48)
    assert lines[0].startswith("job 1: 48 ranks, running for 1:02:05, answered in 0.013 s  train.py")


def test_several_jobs_are_listed(publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    publish("later", 2.0)
    publish("first", 1.0)
    assert main.main(["top", "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [(each["job"], each["size"], each["program"]) for each in jobs] == [
        ("first", 4, "train_first.py"),
        ("later", 4, "train_later.py"),
    ]
    assert main.main(["top"]) == 0
    out = capsys.readouterr().out
    assert out.index("train_first.py") < out.index("train_later.py") < out.index("mpicomm top JOB")


def test_a_name_must_be_that_of_one_job(publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    publish("run-1")
    publish("run-2")
    assert main.main(["top", "run"]) == FAILED
    error = capsys.readouterr().err
    assert error.startswith("mpicomm top: JOB must name one job, got run, which is a part of run-1, run-2.\nUse ")
    assert main.main(["top", "other"]) == FAILED
    assert "no running job whose name contains other of user " in capsys.readouterr().err


def test_the_whole_name_of_a_job_is_not_that_of_another(
    publish: Publish, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("run-1")
    publish("run-10")
    chosen: list[str] = []

    def observer(listed: job_files.ListedJob) -> None:
        chosen.append(listed.job.name)
        raise OSError("no answer")

    monkeypatch.setattr(top, "JobObserver", observer)
    assert main.main(["top", "run-1"]) == FAILED
    assert (chosen, capsys.readouterr().err) == (["run-1"], "mpicomm top: no answer\n")


def test_no_job_is_an_error_with_the_places(publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top"]) == FAILED
    error = capsys.readouterr().err
    assert f"on {socket.gethostname()}, expected its file in {job_files.folders()[0]}.\n" in error
    assert "Run `mpicomm top` on the host of `mpicomm run`" in error


def test_a_job_that_was_killed_is_named_once(publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    publish("gone").close()
    path = job_files.folders()[0] / "gone.json"
    notice = f"mpicomm top: job gone (train_gone.py) has ended without removing {path}\n"
    for expected in (notice, ""):
        assert main.main(["top"]) == FAILED
        assert capsys.readouterr().err.startswith(f"{expected}mpicomm top: no running job of user ")
        assert not path.exists()


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "x", "31"])
def test_an_interval_must_be_positive_and_short(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["top", "--interval", interval])
    expected = f"expected a number of seconds greater than 0 and at most 30, got {interval}"
    assert expected in capsys.readouterr().err
