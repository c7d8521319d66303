"""Remedies after unhandled exceptions whose cause is the launch."""

from __future__ import annotations

import os
import sys

import pytest

from mpicomm import remedies
from mpicomm.errors import LaunchError
from mpicomm.launch.known_launchers import OPEN_MPI

UNDER_MPIRUN = {OPEN_MPI.rank: "1", OPEN_MPI.size: "4"}
OF_TORCH = "Error initializing torch.distributed using env:// rendezvous: environment variable {} expected, but not set"


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--lr", "1"])


def missing(name: str) -> KeyError:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(name, raising=False)
        with pytest.raises(KeyError) as caught:
            os.environ[name]
    return caught.value


class Unprintable(RuntimeError):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError


class ProcessException(Exception):  # noqa: N818  torch's name
    """As torch's."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (missing("LOCAL_RANK"), "does not set LOCAL_RANK"),
        (ValueError(OF_TORCH.format("RANK")), "does not set RANK"),
        (ValueError(OF_TORCH.format("MASTER_ADDR")), "  mpicomm run -n 4 train.py --lr 1\n"),
        (RuntimeError("Distributed package doesn't have MPI built in. MPI is"), 'init_process_group("mpicomm")'),
        (ModuleNotFoundError("No module named 'horovod'", name="horovod.torch"), "mpicomm run --horovod -n 4 train.py"),
        (ProcessException("EADDRINUSE"), "Open MPI's mpirun started the program 4 times"),
    ],
)
def test_the_remedy_follows(error: Exception, text: str) -> None:
    remedy = remedies.after(error, UNDER_MPIRUN, has_bootstrapped=False)
    assert remedy is not None
    assert text in remedy


@pytest.mark.parametrize(
    ("error", "environ"),
    [
        (missing("LOCAL_RANK"), {}),
        (missing("HOST_RANK"), UNDER_MPIRUN),
        (KeyError("RANK"), UNDER_MPIRUN),
        (missing("LOCAL_RANK"), {**UNDER_MPIRUN, "LOCAL_RANK": "0"}),
        (Unprintable(), UNDER_MPIRUN),
        (ValueError(OF_TORCH.format("HOME")), UNDER_MPIRUN),
        (ModuleNotFoundError("No module named 'numpy'", name="numpy"), UNDER_MPIRUN),
        (ProcessException("in a child: mpicomm.errors.LaunchError: no"), UNDER_MPIRUN),
        (ProcessException("EADDRINUSE"), {}),
        (ValueError("trying to initialize the default process group twice!"), UNDER_MPIRUN),
        (LaunchError("RANK"), {**UNDER_MPIRUN, OPEN_MPI.size: "four"}),
    ],
)
def test_no_remedy_of_another_cause(error: Exception, environ: dict[str, str]) -> None:
    assert remedies.after(error, environ, has_bootstrapped=False) is None


def test_a_second_group_after_bootstrap() -> None:
    error = ValueError("trying to initialize the default process group twice!")
    remedy = remedies.after(error, {}, has_bootstrapped=True)
    assert remedy is not None
    assert "mpicomm.bootstrap(backend=None)" in remedy


def test_the_hook_prints_after_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(OPEN_MPI.rank, "0")
    monkeypatch.setenv(OPEN_MPI.size, "2")
    error = missing("RANK")
    monkeypatch.delenv("RANK", raising=False)
    hook = remedies.Hook(remedies.Hook(sys.__excepthook__))
    hook(KeyError, error, None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    after = lines.index("KeyError: 'RANK'") + 1
    assert len([line for line in lines if "[mpicomm]" in line]) == 1
    assert lines[after].startswith("[mpicomm] Open MPI's mpirun does not set RANK")
