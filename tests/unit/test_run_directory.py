"""The ownership of the checkpoints in a directory: from which a run resumes, and which it removes."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mpicomm.errors import CheckpointError
from mpicomm.training import run_directory
from mpicomm.training.run_directory import RunDirectory


def saved(run: RunDirectory, step: int, name: str = "", published: Callable[[], object] = lambda: None) -> Path:
    name = name or f"step-{step:09d}"
    content = run.begin(name, step, torch="2")
    (content / "content").write_text(str(step))
    path = run.publish(content, name)
    published()
    run.remove_old(())
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run that keeps one checkpoint, at step 4."""
    run = RunDirectory(tmp_path, keep=1)
    saved(run, 4)
    yield run
    run.close()


def other_program(path: Path) -> None:
    path.mkdir()
    (path / "COMPLETE").write_text('{"step": 3}')
    (path / "precious.pt").write_text("three weeks of training")


def other_run(path: Path) -> None:
    other = RunDirectory(path.parent / "other", keep=1)
    saved(other, 1000, path.name).rename(path)
    other.close()


USERS: dict[str, Callable[[Path], object]] = {
    "step-1000": other_program,
    "step-000001000": other_run,
    "step-best": lambda path: shutil.copytree(path.with_name("step-000000004"), path),
    "step-000000900": lambda path: shutil.copytree(path.with_name("step-000000004"), path),
    "step-000000800": lambda path: path.symlink_to("step-000000004"),
    "step-000000700": lambda path: path.with_name("step-000000004").rename(path),
    "step-000000600.partial": other_program,
    "step-000000500": lambda path: path.write_text("a file"),
    "step-last": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("name", USERS)
def test_files_of_the_user_are_neither_removed_nor_resumed(run: RunDirectory, name: str) -> None:
    users = run.path / name
    USERS[name](users)
    for step in (5, 6):
        newest = saved(run, step)
    run.close()
    again = RunDirectory(run.path, keep=1)
    assert again.newest() == newest
    saved(again, 7)
    again.close()
    assert os.path.lexists(users)
    assert set(names(run.path)) - {"other"} == {name, "step-000000007"}


@pytest.mark.parametrize("step", [10**9 - 1, 10**9])
def test_the_step_in_the_marker_decides(run: RunDirectory, step: int) -> None:
    """With ten digits a name sorts before those of nine digits."""
    paths = [saved(run, step), saved(run, step + 1)]
    assert run.newest() == paths[1]
    assert names(run.path) == [paths[1].name]


def test_checkpoints_of_one_step_are_in_the_order_of_their_names(run: RunDirectory) -> None:
    run._keep = 9
    for name in ("step-000000005", "step-000000005-epoch-00001", "step-000000005-epoch-00001-evaluated"):
        assert run.newest() != saved(run, 5, name)
        assert run.newest() == run.path / name


@pytest.mark.parametrize("hidden", ["copied", "removed", "damaged"])
def test_a_copied_directory_is_resumed_and_kept(run: RunDirectory, hidden: str) -> None:
    run.close()
    copy = run.path / "copy"
    shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("copy"))
    if hidden == "removed":
        (copy / ".lock").unlink()
    elif hidden == "damaged":
        (copy / ".lock").write_text('{"run')
    for step in (5, 6):
        again = RunDirectory(copy, keep=1)
        newest = again.newest()
        assert newest is not None
        assert json.loads((newest / "COMPLETE").read_text())["step"] == step - 1
        saved(again, step)
        again.close()
    assert names(copy) == ["step-000000004", "step-000000006"]


@pytest.mark.parametrize("name", ["step-best", "step-000000004", "step-000000700", "step-000001000"])
def test_a_directory_with_checkpoints_of_others_only_is_refused(run: RunDirectory, name: str) -> None:
    if name == "step-000000004":
        (run.path / name).rename(run.path / "elsewhere")
        (run.path / name).symlink_to("elsewhere")
    else:
        USERS[name](run.path / name)
        shutil.rmtree(run.path / "step-000000004", ignore_errors=True)
    its = "step-000001000, of step 1000" if name == "step-000001000" else f"{name}, of step 4"
    with pytest.raises(CheckpointError, match=rf"has no checkpoint of this run, but .*: {its}\.\nTo continue from it,"):
        run.newest()


def test_checkpoints_of_several_runs_are_refused(run: RunDirectory) -> None:
    other_run(run.path / "step-000001000")
    run.close()
    (run.path / ".lock").unlink()
    with pytest.raises(CheckpointError, match=r"of one run, got those of 2 runs\.\nMove the"):
        RunDirectory(run.path, keep=1)


def test_a_name_that_is_taken_is_refused(run: RunDirectory) -> None:
    other_program(run.path / "step-000000005")
    content = run.begin("step-000000005", 5)
    with pytest.raises(FileExistsError, match="this run did not make"):
        run.publish(content, "step-000000005")
    run.remove_incomplete()
    assert names(run.path) == ["step-000000004", "step-000000005"]
    assert (run.path / "step-000000005" / "precious.pt").exists()


def test_an_interrupted_removal_or_save_is_completed_by_the_next_start(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.begin("step-000000005", 5)
    (run.path / "step-000000004" / "COMPLETE").rename(run.path / "step-000000004" / "INCOMPLETE")

    def busy(path: Path, **_: object) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", busy)
        with pytest.warns(RuntimeWarning) as warned:
            run.remove_incomplete()
    assert sorted(str(each.message).split("yet: ")[1][:10] for each in warned) == ["[Errno 16]"] * 2
    run.close()
    again = RunDirectory(run.path, keep=1)
    assert again.newest() is None
    again.close()
    assert names(run.path) == []


def refuse_to_rename(refused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        if path == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)


def test_a_checkpoint_that_cannot_be_removed_does_not_keep_the_others(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example one that the user has protected with chmod."""
    refuse_to_rename(run.path / "step-000000004" / "COMPLETE", monkeypatch)
    for step in (5, 6):
        with pytest.warns(RuntimeWarning, match=r"cannot remove .*step-000000004 yet: .*Permission denied"):
            saved(run, step)
    assert names(run.path) == ["step-000000004", "step-000000006"]


def test_a_replaced_checkpoint_is_kept_while_none_of_its_name_is_complete(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job was killed before it marked the new one, which the next start cannot remove."""
    path, replaced = run.path / "step-000000004", run.path / f"step-000000004.{'0' * 32}"
    path.rename(replaced)
    content = run.begin(path.name, 4)
    content.rename(path)
    run.close()
    with monkeypatch.context() as patch:
        refuse_to_rename(path, patch)
        with pytest.warns(RuntimeWarning, match="cannot remove"):
            RunDirectory(run.path, keep=1).close()
    again = RunDirectory(run.path, keep=1)
    assert again.newest() == path
    assert (path / "content").read_text() == "4"
    again.close()


def test_the_marker_is_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS renames a removed file that a process has open; the directory is then still recognised."""
    directory = tmp_path / "step"
    (directory / "folder").mkdir(parents=True)
    for name in ("a", "folder/b", "INCOMPLETE", "z"):
        (directory / name).touch()
    unlink = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda path: path.rename(path.with_name(".nfs1")) if path.name == "z" else unlink(path)
    )
    with pytest.raises(OSError, match=r"\[Errno 16\].*\.nfs1"):
        run_directory.remove_tree(directory, last="INCOMPLETE")
    assert names(directory) == ["INCOMPLETE"]
    run_directory.remove_tree(directory, last="INCOMPLETE")
    assert not directory.exists()


def test_the_lock_outlives_copies_of_the_directory(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "_LOCK_SECONDS", 0.0)
    shutil.copytree(run.path, run.path / "copy")
    with pytest.raises(CheckpointError, match="is locked by another running job"):
        RunDirectory(run.path, keep=1)
    inherited = os.dup(run._file.fileno())  # as in a process that was forked
    run.close()
    RunDirectory(run.path, keep=1).close()
    os.close(inherited)


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    with pytest.warns(RuntimeWarning, match=r"cannot lock .*Start only one job at a time"):
        RunDirectory(tmp_path, keep=1).close()


def test_a_checkpoint_that_the_user_has_renamed_is_kept(run: RunDirectory) -> None:
    """Also under the name of the next save."""
    (run.path / "step-000000004").rename(run.path / "step-000000008")
    with pytest.raises(FileExistsError):
        saved(run, 8)
    assert (run.path / "step-000000008" / "content").read_text() == "4"


@pytest.mark.parametrize("killed", ["before", "after"], ids=lambda when: f"{when} the new one is in its place")
def test_a_replacement_that_a_killed_job_has_not_completed(run: RunDirectory, tmp_path: Path, killed: str) -> None:
    """A complete checkpoint of this name is left, and only one."""
    path = tmp_path / "step-000000004"
    path.rename(f"{path}.{'0' * 32}")
    if killed == "after":
        content = run.begin(path.name, 4)
        (content / "content").write_text("new")
        run.publish(content, path.name)
    run.close()
    again = RunDirectory(tmp_path, keep=1)
    assert again.newest() == path
    assert (path / "content").read_text() == ("new" if killed == "after" else "4")
    assert names(tmp_path) == [path.name]
    again.close()


_CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def killed(directory: Path, steps: Sequence[int], change: int) -> tuple[bool, int]:
    """Save checkpoints in a process that ends before its `change`-th access that may change the file system.

    Returns:
        Whether it was killed, and the number of complete saves.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        left = itertools.count(change, -1)
        sys.addaudithook(lambda event, _: os._exit(9) if event in _CHANGES and next(left) == 0 else None)
        run = RunDirectory(directory, keep=1)
        for step in steps:
            saved(run, step, published=lambda: os.write(writer, b"."))
        os._exit(0)
    os.close(writer)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    complete = len(os.read(reader, 99))
    os.close(reader)
    assert status in (0, 9)
    return status == 9, complete


@pytest.mark.parametrize("steps", [(4,), (4, 5), (4, 4)], ids=["first save", "removal", "replacement"])
def test_a_run_that_is_killed_at_any_access(tmp_path: Path, steps: Sequence[int]) -> None:
    """The next start has the newest complete checkpoint, and nothing that is left blocks a name or uses space."""
    for change in itertools.count():
        directory = tmp_path / str(change)
        is_killed, complete = killed(directory, steps, change)
        run = RunDirectory(directory, keep=1)
        newest = run.newest()
        saved_step = 0 if newest is None else int((newest / "content").read_text())
        assert saved_step >= max(steps[:complete], default=0)
        assert not [name for name in names(directory) if "." in name], f"killed before access {change}"
        for step in (4, 5):
            path = saved(run, step)
            assert path.exists() == (step >= saved_step)
        assert run.newest() == path
        assert names(directory) == [path.name]
        run.close()
        if not is_killed:
            assert change > 10
            return


def test_a_child_does_not_keep_the_lock_of_a_killed_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a DataLoader outlives its rank by seconds."""
    monkeypatch.setattr(run_directory, "_LOCK_SECONDS", 0.5)
    run = RunDirectory(tmp_path, keep=1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the end of the test
        os._exit(0)
    try:
        run._file.close()  # as the kernel does if the process is killed
        RunDirectory(tmp_path, keep=1).close()
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        os.close(reader)
