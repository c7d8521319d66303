"""The copy of a Python environment: its path, the request that uses it, and the space that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpicomm.cli import env_copy, launching, stage_env
from mpicomm.errors import LaunchError
from mpicomm.launch.allocation import Host
from mpicomm.launch.request import Request, Start
from mpicomm.launch.staged_env import StagedEnv

PYTHON = "/home/user/env/bin/python3"
STAGED = "/local/mpicomm-env-1f/bin/python3"
ENV = StagedEnv("/home/user/env", "/local/mpicomm-env-1f")


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta"])
def test_virtual_and_conda_environments_are_copied(mark: str, tmp_path: Path) -> None:
    (tmp_path / mark).mkdir()
    assert StagedEnv.new(str(tmp_path), "/local", "1f") == StagedEnv(str(tmp_path), "/local/mpicomm-env-1f")


def test_a_whole_installation_is_not_copied(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"installed in {tmp_path}.\nCreate an environment"):
        StagedEnv.new(str(tmp_path), "/local", "1f")


@pytest.mark.parametrize(
    "program",
    [("train.py", "--lr", "1"), ("-m", "package.train"), ("-u", "-m", "mpicomm.horovod", "train.py", PYTHON)],
)
def test_the_python_of_the_copy_runs_the_program(program: tuple[str, ...]) -> None:
    staged = ENV.staged(Request((PYTHON, *program), 4), PYTHON)
    assert staged.program == (STAGED, *program)
    assert staged.ranks == 4


def test_the_python_of_the_copy_writes_the_logs() -> None:
    request = Request((PYTHON, "train.py"), log_dir="logs")
    assert request.rank_command(PYTHON)[0] == PYTHON
    staged = ENV.staged(request, PYTHON).rank_command(PYTHON)
    assert staged == (STAGED, "-m", "mpicomm.rank_log", "logs", "0", STAGED, "train.py")


@pytest.mark.parametrize(
    ("program", "python"),
    [
        (("hostname",), PYTHON),
        (("/usr/bin/python3", "train.py"), PYTHON),
        (("/usr/bin/python3", "train.py"), "/usr/bin/python3"),
    ],
    ids=["command", "other Python", "Python outside the prefix"],
)
def test_other_programs_are_refused(program: tuple[str, ...], python: str) -> None:
    with pytest.raises(LaunchError, match=f"got {' '.join(program)}.\nPass a script"):
        ENV.staged(Request(program), python)


def test_the_size_of_a_copy_is_that_of_whole_blocks(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/usr/bin/python3")
    (tmp_path / "short").write_bytes(bytes(1))
    (tmp_path / "long").write_bytes(bytes(4097))
    directory = -(-(tmp_path / "bin").lstat().st_size // 4096) * 4096
    assert env_copy.measure(tmp_path) == (directory + 4096 + 4096 + 2 * 4096, 4)


def test_the_size_of_condas_base_is_without_other_environments(tmp_path: Path) -> None:
    for name in ("conda-meta", "envs/a", "pkgs/b", "lib/envs"):
        (tmp_path / name).mkdir(parents=True)
    assert env_copy.left_out(tmp_path) == ()
    (tmp_path / "pkgs" / "urls.txt").touch()
    assert env_copy.measure(tmp_path)[1] == len(["conda-meta", "lib", "lib/envs"])


@pytest.mark.parametrize(
    ("size", "files", "text"),
    [(1 << 50, 1, "expected 1.049e[+]06 GiB or more"), (1, 1 << 60, f"expected {1 << 60} or more")],
)
def test_a_disk_that_is_too_small(size: int, files: int, text: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f" in {tmp_path}, {text}"):
        env_copy.reserve(tmp_path / "copy", size, files)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_reserved_once_and_for_its_user_alone(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    env_copy.reserve(copy, 1, 1)
    assert copy.stat().st_mode & 0o777 == 0o700
    with pytest.raises(OSError, match=f"{tmp_path} is shared with another node"):
        env_copy.reserve(copy, 1, 1)
    assert env_copy.remove(copy) == env_copy.remove(copy) == 0
    assert not copy.exists()


# -- the hosts of the copies -----------------------------------------------------------------------------------------

HOSTS = (Host("a", 4), Host("b", 2))
ONE_EACH = (Host("a", 1), Host("b", 1))


@pytest.mark.parametrize(
    ("hosts", "is_step", "scheduler", "request_", "expected"),
    [
        (HOSTS, False, None, Request(("train.py",), 5), Request(("copy",), 2, ONE_EACH)),
        (HOSTS, True, None, Request(("train.py",)), Request(("copy",), 2, slurm_nodes=("a", "b"), ranks_per_node=1)),
        (
            HOSTS,
            True,
            None,
            Request(
                ("train.py",),
                2,
                slurm_nodes=("b",),
                log_dir="logs",
                tag_output=True,
                launcher_arguments=(
                    "--map-by",
                    "core",
                    "--cpu-bind=mask_cpu:3",
                    "-v",
                    "--bind-to",
                    "none",
                    "--gpu-bind=1",
                ),
            ),
            Request(
                ("copy",),
                1,
                slurm_nodes=("b",),
                ranks_per_node=1,
                launcher_arguments=("-v", "--bind-to", "none"),
            ),
        ),
        ((), False, None, Request(("train.py",), 4), Request(("copy",), 1)),
        ((), False, "a Flux instance", Request(("train.py",), 4), Request(("copy",), 4)),
    ],
    ids=["hosts", "Slurm", "some nodes of Slurm", "this host", "Flux"],
)
def test_a_copy_is_made_once_on_every_host(
    hosts: tuple[Host, ...],
    is_step: bool,
    scheduler: str | None,
    request_: Request,
    expected: Request,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "hosts", lambda *_: (hosts, is_step))
    monkeypatch.setattr(launching, "host_selecting_scheduler", lambda *_: scheduler)
    assert launching.on_every_host(request_, ("copy",), {}) == expected


@pytest.mark.parametrize(
    ("hosts", "reasons", "text"),
    [
        (
            HOSTS,
            {HOSTS[0]: "", HOSTS[1]: "ssh exited with status 255"},
            "may remain on b.\nRemove it there: chmod -R u+rwX /copy && rm -r /copy",
        ),
        (HOSTS, {HOSTS[0]: "", HOSTS[1]: ""}, ""),
        ((), {}, "may remain on the nodes.\nRemove it there: chmod -R u+rwX /copy && rm -r /copy"),
    ],
    ids=["a lost host", "a hang of the launcher", "unknown hosts"],
)
def test_after_the_loss_of_a_host_the_others_keep_no_copy(
    hosts: tuple[Host, ...],
    reasons: dict[Host, str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launching, "build", lambda *_: Start(("mpiexec",), {}))
    monkeypatch.setattr(launching, "run_briefly", lambda *_, **__: (1, ""))
    monkeypatch.setattr(launching, "hosts", lambda *_: (hosts, False))
    monkeypatch.setattr(launching, "try_on_hosts", lambda *_, **__: reasons)
    stage_env._remove(Request(("train.py",), 4), "/copy", 1.0)
    assert capsys.readouterr().err.strip().removeprefix("mpicomm run: /copy ") == text
