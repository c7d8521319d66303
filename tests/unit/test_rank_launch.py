"""`pytest --ranks N`: the command that it executes, and where it refuses to start ranks."""

from __future__ import annotations

import argparse
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm import terminal
from mpicomm.testing import rank_launch, time_limit

STARTED_BY_MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have replaced this process, in an environment without a job."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "environ", {"PATH": "/bin"})
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(command))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False, flush=lambda: None))
    return commands


def start(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, plugins: tuple[str, ...] = ("pytest_mpi",), **options: Any
) -> None:
    python = [sys.executable, "-W", "error", "-m", "pytest"] if "-x" in arguments else [sys.executable, "/bin/pytest"]
    monkeypatch.setattr(sys, "argv", ["pytest", *arguments])
    monkeypatch.setattr(sys, "orig_argv", [*python, *arguments])
    rank_launch.start_if_requested(
        SimpleNamespace(
            known_args_namespace=SimpleNamespace(**{"ranks": 4, "color": "auto", **options}),
            pluginmanager=SimpleNamespace(hasplugin=plugins.__contains__),
            invocation_params=SimpleNamespace(args=options.get("args", arguments)),
        )
    )


def test_the_ranks_get_the_arguments(executed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, "--ranks", "4", "-s", "-k", "a or b", "--", "--odd")
    start(monkeypatch, "-x", color="yes")
    start(monkeypatch, ranks=0)
    start(monkeypatch, help=True)
    launch = [sys.executable, "-m", "mpicomm", "run", "-n", "4", sys.executable]
    options = ["-m", "pytest", "--with-mpi"]
    # `--ranks=0` follows, in case that the setting addopts has --ranks.
    of_first = ["--color=no", "--ranks", "4", "-s", "-k", "a or b", "--ranks=0", "--", "--odd"]
    assert executed == [[*launch, *options, *of_first], [*launch, "-W", "error", *options, "-x", "--ranks=0"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"usepdb": True}, "--ranks 4 cannot be combined with --pdb"),
        ({"trace": True}, "--ranks 4 cannot be combined with --trace"),
        ({"basetemp": "x"}, "--ranks 4 cannot be combined with --basetemp"),
        ({"log_file": "x"}, "--ranks 4 cannot be combined with --log-file"),
        ({"numprocesses": 2}, "--ranks 4 cannot be combined with -n"),
        ({"plugins": ()}, "--ranks 4 needs pytest-mpi.\nInstall it: pip install pytest-mpi"),
        ({"args": ("tests",)}, "not of pytest.main"),
    ],
)
def test_refused_options(
    options: dict[str, Any], message: str, executed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        start(monkeypatch, **options)
    assert not executed


def test_a_rank_does_not_start_ranks(executed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "processes_above", lambda: [(2, "prterun")])
    os.environ.update(STARTED_BY_MPIRUN)
    with pytest.raises(
        pytest.UsageError, match=r"--ranks 4 starts a job, but this process is a rank .*\n.*mpirun -n 4"
    ):
        start(monkeypatch)
    monkeypatch.setattr(rank_launch, "_LATER_SECONDS", 0.0)
    os.environ["OMPI_COMM_WORLD_RANK"] = "1"
    with pytest.raises(SystemExit, match="4"):  # without a second message
        start(monkeypatch)
    os.environ.pop("OMPI_COMM_WORLD_RANK")
    os.environ.update({"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    with pytest.raises(pytest.UsageError, match="a rank that torchrun has started"):
        start(monkeypatch)
    assert not executed


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "soon"])
def test_a_wrong_time_limit(text: str) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match=f"expected a number of seconds, or 0 for no limit, got {text}"
    ):
        time_limit._seconds(text)
