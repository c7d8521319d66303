"""The launcher as a child process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpicomm.cli import child_process
from tests.time_limits import scaled


def test_a_pid_whose_session_directory_was_left_over_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_leftover, tried = child_process._has_leftover, tmp_path / "tried"
    monkeypatch.setattr(child_process.tempfile, "gettempdir", lambda: str(tmp_path))

    def record() -> bool:  # runs in the child
        if not tried.exists() or len(tried.read_text().split()) < 3:
            (tmp_path / f"ompi.{os.getpid()}").mkdir()
        with tried.open("a") as file:
            file.write(f"{os.getpid()} ")
        return has_leftover()

    monkeypatch.setattr(child_process, "_has_leftover", record)
    process = child_process.start(["true"], os.environ)
    assert process.wait(scaled(60)) == 0
    assert [int(pid) for pid in tried.read_text().split()][3:] == [process.pid]
