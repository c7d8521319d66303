"""The dump files of a rank's last operations and stacks, in directories that another user may have prepared."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from mpicomm.recorder import dump

NAMES = {"fr_trace_rank_3", "rank-3.json", "rank-3.stacks.txt"}


def test_only_this_user_can_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "dumps" / "job"
    for size in (3, 4):  # later files replace the first ones
        path = dump.write(folder, 3, {"size": size}, is_of_job=True)
    assert path == folder / "rank-3.json"
    assert json.loads(path.read_text())["size"] == 4
    assert {each.name for each in folder.iterdir()} == NAMES
    modes = {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()}
    assert (stat.S_IMODE(folder.stat().st_mode), modes) == (0o700, {0o600})


@pytest.mark.parametrize("is_of_job", [True, False])
def test_links_to_files_are_replaced(tmp_path: Path, is_of_job: bool) -> None:
    folder, victim = tmp_path / "job", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    for name in NAMES:
        (folder / name).symlink_to(victim)
    dump.write(folder, 3, {}, is_of_job=is_of_job)
    assert victim.read_text() == "precious"
    assert not any(each.is_symlink() for each in folder.iterdir())


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "job").symlink_to("victim")
    with pytest.raises(
        PermissionError, match=r"job is a symbolic link, and .*\. Set MPICOMM_DUMP_DIR to a directory of your"
    ):
        dump.write(tmp_path / "job", 3, {}, is_of_job=True)
    assert list((tmp_path / "victim").iterdir()) == []
    dump.write(tmp_path / "job", 3, {})  # allowed, because the user has chosen the directory
    assert {each.name for each in (tmp_path / "victim").iterdir()} == NAMES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match="job belongs to user 65534, and this user is 0"):
        dump.write(folder, 3, {}, is_of_job=True)
    assert list(folder.iterdir()) == []
