"""`mpicomm run` explains that mpirun does not continue without a host, unless it starts the ranks again."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest

from mpicomm.cli import attempts, launching
from mpicomm.cli.attempts import RestartPolicy
from mpicomm.cli.supervisor import End
from mpicomm.errors import LaunchError
from mpicomm.launch.allocation import Host
from mpicomm.launch.node_range import NodeRange
from mpicomm.launch.request import Node, Request, Start
from mpicomm.recorder.hang_report import HOST_REMEDY
from tests.time_limits import scaled


@pytest.mark.parametrize(("max_restarts", "may_have_lost_host"), [(0, True), (0, False), (1, True)])
def test_a_lost_host_is_explained(
    max_restarts: int, may_have_lost_host: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launching, "build", lambda *_: Start(("mpiexec",), {}))
    monkeypatch.setattr(launching, "execute", lambda *_: End(1, None, True, "failed", may_have_lost_host))
    monkeypatch.setattr(launching, "hosts", lambda *_: ((), False))
    status = attempts.run(Request(("train.py",)), RestartPolicy(max_restarts), 1.0)
    assert status == 1
    is_explained = HOST_REMEDY in capsys.readouterr().err
    assert is_explained == (may_have_lost_host and not max_restarts)


HOSTS = tuple(Host(name, 2) for name in "abc")


@pytest.mark.parametrize(
    ("nodes", "excludes", "failed", "second", "text"),
    [
        ("2", True, ("b.cluster",), "ac", "leaving out b, on which a rank failed; 2 of 3 hosts are left"),
        ("2", False, ("b",), "ab", "restart 1 of 1"),
        ("2", True, (), "ab", "it is not known on which host a rank failed first"),
        ("3", True, ("b",), "", "--nnodes 3: expected at least 3 hosts, got 2"),
    ],
    ids=["spare", "without the option", "unknown", "no spare"],
)
def test_a_failed_host_is_left_out_of_a_restart(
    nodes: str,
    excludes: bool,
    failed: tuple[str, ...],
    second: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ends = [End(1, None, True, "failed", failed_hosts=failed), End(0, None, True, "")]
    used: list[str] = []

    def build(request: Request, _environ: object) -> Start:
        used.append("".join(host.name for host in request.hosts))
        return Start(("mpiexec",), {})

    monkeypatch.setattr(launching, "build", build)
    monkeypatch.setattr(launching, "execute", lambda *_: ends.pop(0))
    monkeypatch.setattr(launching, "hosts", lambda *_: (HOSTS, False))
    monkeypatch.setattr(launching, "try_on_hosts", lambda _request, hosts, *_, **__: dict.fromkeys(hosts, ""))
    policy = RestartPolicy(1, NodeRange.parse(nodes), is_range_given=True, excludes_failed=excludes)
    status = attempts.run(Request(("train.py",), hosts=HOSTS), policy, 1.0)
    assert status == (0 if second else 1)
    assert used == ["abc"[: int(nodes)], *([second] if second else [])]
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("hosts", [(), HOSTS[:1]])
def test_a_host_can_be_left_out_only_of_several(hosts: tuple[Host, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "hosts", lambda *_: (hosts, False))
    with pytest.raises(LaunchError, match="--exclude-failed does not work in a job of 1 host"):
        attempts.run(Request(("train.py",)), RestartPolicy(1, excludes_failed=True), 1.0)


PYTHON = ("/usr/bin/python3", "train.py")


@pytest.mark.parametrize(
    ("end", "request_", "ranks", "is_expected"),
    [
        (End(0, None, False, ""), Request(PYTHON), None, True),
        (End(0, None, False, ""), Request(PYTHON), 2, True),
        (End(0, None, False, ""), Request(PYTHON), 1, False),
        (End(0, None, False, ""), Request(("hostname",)), 2, False),
        (End(0, None, False, ""), Request(PYTHON, node=Node(0, 1, "127.0.0.1", 1234)), 2, False),
        (End(0, None, False, ""), Request(PYTHON, variables={"MPICOMM_LAUNCHER": "single"}), 2, False),
        (End(0, None, True, ""), Request(PYTHON), 2, False),
        (End(1, None, False, ""), Request(PYTHON), 2, False),
        (End(0, 15, False, ""), Request(PYTHON), 2, False),
    ],
)
def test_ranks_that_form_no_job_are_reported(
    end: End,
    request_: Request,
    ranks: int | None,
    is_expected: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MPICOMM_LAUNCHER", raising=False)
    monkeypatch.setattr(launching, "build", lambda *_: Start(("mpiexec",), {}, ranks=ranks))
    monkeypatch.setattr(launching, "execute", lambda *_: end)
    assert attempts.run(request_, RestartPolicy(), 1.0) == end.status
    last = capsys.readouterr().err.splitlines()[-1:]
    assert last == (["For one job, call mpicomm.bootstrap() at the start of the program."] if is_expected else [])


def test_a_short_program_has_a_status_and_the_output_of_its_ranks() -> None:
    start = Start(("sh", "-c", "echo out; echo err >&2; exit 3"), {"PATH": "/usr/bin:/bin"})
    assert launching.run_briefly(start) == (3, "out\nerr\n")


def test_a_short_program_that_takes_too_long_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_BRIEF_SECONDS", 0.1)
    assert launching.run_briefly(Start(("sleep", "60"), {"PATH": "/usr/bin:/bin"})) == (None, "")


def test_a_launcher_that_ignores_its_signals_does_not_outlive_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_TERM_SECONDS", 0.1)
    processes: list[subprocess.Popen[str]] = []

    class InterruptedProcess(subprocess.Popen[str]):
        def communicate(self, *arguments: Any, **options: Any) -> Any:
            processes.append(self)
            assert self.stdout is not None
            assert self.stdout.readline() == "ready\n"  # it ignores the signals from now on
            raise KeyboardInterrupt

    monkeypatch.setattr(launching.subprocess, "Popen", InterruptedProcess)
    command = ("sh", "-c", "trap '' INT TERM; echo ready; exec sleep 60")
    with pytest.raises(KeyboardInterrupt):
        launching.run_briefly(Start(command, {"PATH": "/usr/bin:/bin"}))
    assert processes[0].wait(scaled(30)) == -signal.SIGKILL
