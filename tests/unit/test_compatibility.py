"""The errors that a user sees if mpicomm cannot run with the installed torch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import torch_compatibility
from mpicomm.job import session_setup
from mpicomm.job.start_request import StartRequest

TESTED = f"the versions that mpicomm {mpicomm.__version__} is tested with (2.8 to 2.15)"
INSTALL = "  pip install 'torch>=2.8,<2.16'"


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Make torch report this version."""
    monkeypatch.setattr("torch.version.__version__", version)
    monkeypatch.setattr(torch, "__version__", version)


def import_anew(monkeypatch: pytest.MonkeyPatch) -> str:
    """Reimport the module that uses torch's private names, and return the message of its error."""
    monkeypatch.delitem(sys.modules, "mpicomm.torch_internals")
    with pytest.raises(mpicomm.MpicommError) as caught:
        importlib.import_module("mpicomm.torch_internals")
    return str(caught.value)


def test_the_range_is_that_of_the_package_metadata() -> None:
    oldest = ".".join(map(str, torch_compatibility.OLDEST))
    assert f'"torch>={oldest}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("version", "first", "second"),
    [
        ("2.16.0+cu140", "newer than", "Install a tested version of torch, or a newer mpicomm:"),
        ("3.0.0.dev20270101", "newer than", "Install a tested version of torch, or a newer mpicomm:"),
        ("2.13.0a0+ours", "among", "Install a tested version of torch:"),
    ],
)
@pytest.mark.parametrize(
    "name", ["_C._autograd._record_function_with_args_enter", "_C._distributed_c10d.ScatterOptions"]
)
def test_a_torch_that_lacks_a_private_name(
    monkeypatch: pytest.MonkeyPatch, version: str, first: str, second: str, name: str
) -> None:
    pretend(monkeypatch, version)
    monkeypatch.delattr(f"torch.{name}")
    but = "but" if first == "among" else "and"
    assert import_anew(monkeypatch).splitlines() == [
        f"torch {version} is {first} {TESTED}, {but} lacks torch.{name}.",
        second,
        INSTALL,
    ]


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "2.5.1")
    assert import_anew(monkeypatch).splitlines() == [
        f"torch 2.5.1 is older than {TESTED}.",
        "Install a tested version of torch:",
        INSTALL,
    ]


def _make_group(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Create the process group as `bootstrap` does, with a torch that raises this error."""

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(dist, "init_process_group", fail)
    world: Any = type("World", (), {"backend": "mpi", "rank": 0, "size": 1})()
    request = StartRequest("mpi", abort_on_error=False)
    job: Any = type("Job", (), {"store": dist.HashStore()})()
    opened: Any = type("Session", (), {"request": request, "world": world, "job": job})()
    session_setup._make_group(opened)


def test_a_newer_torch_that_cannot_make_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "2.16.0")
    error = RuntimeError("Could not find the default backend type 0.\nException raised from getDefaultBackend")
    what = "RuntimeError: Could not find the default backend type 0"
    with pytest.raises(mpicomm.MpicommError) as caught:
        _make_group(monkeypatch, error)
    assert str(caught.value).splitlines() == [
        f"torch 2.16.0 is newer than {TESTED}, and cannot create the process group ({what}).",
        "Install a tested version of torch, or a newer mpicomm:",
        INSTALL,
    ]
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("version", "error"), [("2.15.0", RuntimeError("no")), ("2.16.0", dist.DistNetworkError("no route to rank 0"))]
)
def test_other_errors_are_left_alone(monkeypatch: pytest.MonkeyPatch, version: str, error: Exception) -> None:
    pretend(monkeypatch, version)
    with pytest.raises(type(error)) as caught:
        _make_group(monkeypatch, error)
    assert caught.value is error
