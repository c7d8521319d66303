"""Containers: the runtime for an image, the commands of ranks, the errors before a start, and the reasons in a rank."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mpicomm import mpi
from mpicomm.cli import launching
from mpicomm.cli.main import main
from mpicomm.errors import LaunchError
from mpicomm.launch import commands, containers, queries
from mpicomm.launch.allocation import Allocation, Host, HostAllocation, SlurmAllocation
from mpicomm.launch.containers import RUNTIMES, Bind, Container
from mpicomm.launch.jobscript import JobSpec, script
from mpicomm.launch.mpi_library import Library
from mpicomm.launch.request import Machine, Request
from mpicomm.launch.visible_devices import AMD, INTEL, NVIDIA

OPEN_MPI = Library("Open MPI", "5.0.11")
MPICH = Library("MPICH", "5.0.2", description="MPICH Version: 5.0.2\nconfigure: --with-pm")
MACHINE = Machine(cores=8, is_whole=True, is_root=False, python="/venv/bin/python")
SLURM_JOB = SlurmAllocation(nodes=2, ranks=8, cpus=(8, 8))
PROGRAM = ("python", "train.py")
HOME = {"HOME": "/home/u", "PATH": "/bin"}
CONTAINERS = {
    "apptainer": Container(RUNTIMES["apptainer"], "apptainer", "/i/a.sif", "/work"),
    "pyxis": Container(RUNTIMES["pyxis"], "srun", "nvcr.io#nvidia/pytorch:25.06-py3", "/work"),
    "ce": Container(RUNTIMES["ce"], "srun", "/home/u/a.toml", "/work"),
    "shifter": Container(RUNTIMES["shifter"], "shifter", "docker:user/image:1", "/work"),
    "enroot": Container(RUNTIMES["enroot"], "enroot", "/images/a.sqsh", "/work"),
}
BINDS = (Bind("/data", "/data"), Bind("/fs", "/s", "ro"))


# -- commands of ranks -------------------------------------------------------------------------------------------------

ENROOT_FILE = Path(containers.__file__).with_name("enroot_config.sh")
ENROOT = f"enroot start --conf {ENROOT_FILE} --mount /work:/work:none:x-create=auto,rbind"
PYXIS_IMAGE = "--container-image=nvcr.io#nvidia/pytorch:25.06-py3"
IN_WORK = """sh -c 'cd "$0" && exec "$@"' /work python train.py"""


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("apptainer", {}, "apptainer exec --bind /work --pwd /work /i/a.sif python train.py"),
        (
            "apptainer",
            {"binds": BINDS, "gpu_vendor": NVIDIA},
            "apptainer exec --bind /work --bind /data:/data --bind /fs:/s:ro --pwd /work --nv /i/a.sif python train.py",
        ),
        (
            "apptainer",
            {"command": "singularity", "gpu_vendor": AMD},
            "singularity exec --bind /work --pwd /work --rocm /i/a.sif python train.py",
        ),
        (
            "apptainer",
            {"has_other_tmp": True},
            f"sh -c {shlex.quote(containers._WITH_TMP)} apptainer --bind /work --pwd /work /i/a.sif python train.py",
        ),
        ("apptainer", {"gpu_vendor": INTEL}, "apptainer exec --bind /work --pwd /work /i/a.sif python train.py"),
        ("shifter", {}, "shifter --image=docker:user/image:1 python train.py"),
        (
            "shifter",
            {"binds": BINDS},
            "shifter --image=docker:user/image:1 '--volume=/data:/data;/fs:/s:ro' python train.py",
        ),
        ("enroot", {}, f"{ENROOT} /images/a.sqsh {IN_WORK}"),
        (
            "enroot",
            {"binds": BINDS[1:]},
            f"{ENROOT} --mount /fs:/s:none:x-create=auto,rbind,ro /images/a.sqsh {IN_WORK}",
        ),
    ],
)
def test_a_command_starts_the_rank_in_a_container(name: str, change: dict[str, object], expected: str) -> None:
    container = dataclasses.replace(CONTAINERS[name], **change)
    assert shlex.join(container.rank_command(PROGRAM, by_srun=False)) == expected
    assert container.srun_options() == []
    assert container.runtime.environ["PMIX_MCA_gds"] == "hash"
    assert ("MPIR_CVAR_CH4_CMA_ENABLE" in container.runtime.environ) == (name == "enroot")


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (
            "pyxis",
            {"binds": BINDS},
            f"{PYXIS_IMAGE} --container-mounts=/work:/work,/data:/data,/fs:/s:ro --container-workdir=/work",
        ),
        ("ce", {}, "--environment=/home/u/a.toml"),
    ],
)
def test_a_plugin_of_srun_gets_options(name: str, change: dict[str, object], expected: str) -> None:
    container = dataclasses.replace(CONTAINERS[name], **change)
    assert " ".join(container.srun_options()) == expected
    assert container.rank_command(PROGRAM, by_srun=True) == PROGRAM
    assert container.runtime.environ == {}
    with pytest.raises(LaunchError, match=f"^{name} is a plugin of srun, but another launcher"):
        container.rank_command(PROGRAM, by_srun=False)


def test_the_container_engine_takes_mounts_from_its_file() -> None:
    with pytest.raises(LaunchError, match=r"mounts = \['/data:/data', '/fs:/s:ro'\]$"):
        RUNTIMES["ce"].parse_binds(["/data", "/fs:/s:ro"])
    assert RUNTIMES["ce"].parse_binds([]) == []


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_users_variables_replace_those_of_the_image(name: str) -> None:
    """The launcher passes them under names that no image has, and a shell in the container renames them."""
    variables = {"A": "of user", "LD_LIBRARY_PATH": "/lib"}
    request = Request(PROGRAM, container=CONTAINERS[name], variables=variables)
    assert request.launcher_variables == {
        "A": "of user",  # the libraries of the image are not for the launcher
        "CONTAINER_ENV_A": "of user",
        "CONTAINER_ENV_LD_LIBRARY_PATH": "/lib",
    }
    command = request.rank_command(MACHINE.python, by_srun=CONTAINERS[name].runtime.is_plugin)
    in_container = list(command[-5:])
    assert in_container[:2] == ["sh", "-c"]
    assert in_container[-2:] == list(PROGRAM)
    in_container[-2:] = ["env"]
    of_image = {"PATH": os.environ["PATH"], "A": "of image", "CONTAINER_ENV_A": "of user"}
    done = subprocess.run(in_container, env=of_image, capture_output=True, text=True, check=False)
    assert done.returncode != 0  # not an empty value
    assert "CONTAINER_ENV_LD_LIBRARY_PATH: it did not reach the container. Set it in the image" in done.stderr
    for value, expected in {"": "/.singularity.d/libs", "/lib": "/lib:/.singularity.d/libs"}.items():
        of_image["CONTAINER_ENV_LD_LIBRARY_PATH"] = value
        done = subprocess.run(in_container, env=of_image, capture_output=True, text=True, check=True)
        assert {"A=of user", f"LD_LIBRARY_PATH={expected}"} <= set(done.stdout.splitlines())
    assert "CONTAINER_ENV_" not in done.stdout


def test_values_of_variables_are_hidden_in_containers_too(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dry-run", "--container", "image.sif", "--env", "TOKEN=secret"]
    assert main(["run", "-n", "2", *options, "train.py"]) == 0
    shown = capsys.readouterr().out
    assert "CONTAINER_ENV_TOKEN=***" in shown
    assert f"{host}/image.sif sh -c 'export TOKEN=" in shown
    assert "secret" not in shown


def test_a_rank_binds_itself_in_the_container() -> None:
    """The wrappers of a program run by the python of the image."""
    request = Request(PROGRAM, container=CONTAINERS["apptainer"], bind="gpu", log_dir="/data/logs")
    command = request.rank_command(MACHINE.python, binds_in=4)
    wrappers = "python -m mpicomm.rank_log /data/logs 0 python -m mpicomm.rank_binding gpu 4 python train.py"
    assert shlex.join(command) == f"apptainer exec --bind /work --pwd /work /i/a.sif {wrappers}"


@pytest.mark.parametrize("components", [1, 2])
def test_srun_gets_the_options_before_the_program(components: int) -> None:
    request = Request(PROGRAM, container=CONTAINERS["pyxis"], log_dir="logs")
    start = commands.srun(request, MACHINE, dataclasses.replace(SLURM_JOB, groups=components), "pmix", HOME)
    image = start.command.index(PYXIS_IMAGE)
    assert start.command[image + 2] == "--container-workdir=/work"
    assert start.command[-7:] == ("python", "-m", "mpicomm.rank_log", "logs", "0", *PROGRAM)


@pytest.mark.parametrize(
    ("library", "mpi_type", "is_refused"), [(OPEN_MPI, "pmix_v4", False), (MPICH, "pmi2", True), (MPICH, "pmix", False)]
)
def test_enroot_needs_a_launcher_with_pmix(library: Library, mpi_type: str, is_refused: bool) -> None:
    request = Request(PROGRAM, ranks=2, container=CONTAINERS["enroot"])
    starts = [lambda: commands.srun(request, MACHINE, SLURM_JOB, mpi_type, HOME)]
    if mpi_type != "pmix":
        starts.append(lambda: commands.mpiexec(request, MACHINE, library, "mpiexec", HOME))
    for start in starts:
        if is_refused:
            with pytest.raises(LaunchError, match="enroot closes PMI_FD"):
                start()
        else:
            assert start().command[-len(PROGRAM) :] == PROGRAM


def test_enroot_gets_the_variables_and_files_of_the_rank(tmp_path: Path) -> None:
    environ = {
        "PATH": "/bin:/usr/bin",
        "PMIX_RANK": "3",
        "A": "x y",
        "LINES_OF": "a\nb",
        "LD_PRELOAD": "",
        "HOME": "/",
        "TMPDIR": "/none",
        "PMIX_SERVER_TMPDIR": str(tmp_path),
    }
    command = ["bash", "-c", f". {shlex.quote(str(ENROOT_FILE))}; environ; mounts"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == [
        f"{tmp_path} {tmp_path} none x-create=dir,bind",
        "A=x y",
        "PMIX_RANK=3",
        f"PMIX_SERVER_TMPDIR={tmp_path}",
    ]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, False), ({"TMPDIR": "/tmp/a"}, False), ({"TMPDIR": "/var/tmp"}, False), ({"TMPDIR": "/local/7"}, True)],
)
def test_temporary_directories_that_apptainer_does_not_bind(environ: Mapping[str, str], expected: bool) -> None:
    assert containers.has_other_tmp(environ) == expected


# -- choice of the runtime ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "installed", "by_srun", "expected"),
    [
        ("/a.sif", RUNTIMES, True, "apptainer"),
        ("/a.sqsh", RUNTIMES, True, "pyxis"),
        ("/a.sqsh", RUNTIMES, False, "apptainer"),
        ("/a.sqsh", ["enroot", "shifter"], False, "enroot"),
        ("/a.toml", RUNTIMES, True, "ce"),
        ("nvcr.io#nvidia/pytorch", RUNTIMES, True, "pyxis"),
        ("docker://debian", RUNTIMES, True, "apptainer"),
        ("debian:12.5", RUNTIMES, True, "pyxis"),
        ("docker:debian:12", RUNTIMES, True, "shifter"),
        ("/sandbox", RUNTIMES, True, "apptainer"),
        ("name", ["enroot"], True, "enroot"),
        ("docker-archive:a.tar", RUNTIMES, True, "apptainer"),
    ],
)
def test_the_default_runtime_is_made_for_the_image(
    image: str, installed: list[str], by_srun: bool, expected: str
) -> None:
    assert containers.select(None, image, installed, by_srun=by_srun).name == expected


@pytest.mark.parametrize(
    ("image", "installed", "by_srun", "reason"),
    [
        ("/a.sif", ["shifter", "enroot"], True, "enroot: not for this image"),
        ("/a.toml", ["ce"], False, "ce: not for this image, or not with this launcher"),
        ("debian:12.5", ["apptainer"], True, "apptainer: not for this image"),
        ("/a.sif", [], True, "apptainer: apptainer or singularity was not found in PATH"),
        ("/a.sif", [], True, "pyxis: `srun --help` has no --container-image"),
    ],
)
def test_an_image_without_a_runtime_is_an_error(image: str, installed: list[str], by_srun: bool, reason: str) -> None:
    with pytest.raises(LaunchError, match="no container runtime of this host can start") as caught:
        containers.select(None, image, installed, by_srun=by_srun)
    assert f"\n  {reason}" in str(caught.value)


def test_a_requested_runtime_must_be_installed() -> None:
    assert containers.select("enroot", "/a.sif", ["enroot"], by_srun=False).name == "enroot"
    with pytest.raises(LaunchError, match="--container-runtime enroot: enroot was not found in PATH"):
        containers.select("enroot", "/a.sif", ["apptainer"], by_srun=False)


@pytest.mark.parametrize(
    ("help_text", "expected"), [("--container-image=x\n", {"pyxis"}), ("--environment=x\n", {"ce"}), ("--mpi\n", set())]
)
def test_plugins_are_found_by_the_help_of_srun(help_text: str, expected: set[str], tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\necho '{help_text}'\n")
    srun.chmod(0o755)
    queries.constant_output.cache_clear()
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    try:
        assert set(queries.container_commands(str(tmp_path))) == expected
    finally:
        os.environ["PATH"] = before
        queries.constant_output.cache_clear()


def test_singularity_takes_the_place_of_apptainer(tmp_path: Path) -> None:
    (tmp_path / "singularity").touch(0o755)
    assert queries.container_commands(str(tmp_path)) == {"apptainer": "singularity"}


# -- errors before the start -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a", Bind("/a", "/a")),
        ("/a:/b", Bind("/a", "/b")),
        ("/a:/b:ro", Bind("/a", "/b", "ro")),
        ("a", None),
        ("/a:b", None),
        ("/a,b", None),
        ("/a b", None),
        ("/a:/b:rx", None),
        ("/", None),
        ("/a:/b/..", None),
    ],
)
def test_a_bind_has_absolute_paths(text: str, expected: Bind | None) -> None:
    if expected:
        assert Bind.parse(text) == expected
    else:
        with pytest.raises(LaunchError, match="Pass --container-bind PATH"):
            Bind.parse(text)


@pytest.fixture(name="host")
def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an image and a script, on a host with Apptainer only."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apptainer").touch(0o755)
    (tmp_path / "image.sif").touch()
    (tmp_path / "data" / ".singularity.d").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def test_a_dry_run_shows_the_command_of_apptainer(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log of a rank, the working directory and the user's paths are visible in the container."""
    options = ["--container", "image.sif", "--container-bind", f"{host}/data:/data:ro", "--log-dir"]
    assert main(["run", "-n", "2", "--dry-run", *options, "/logs", "train.py", "--lr", "1"]) == 0
    shown = capsys.readouterr().out
    expected = (
        f"apptainer exec --bind {host} --bind {host}/data:/data:ro --bind /logs:/logs --pwd {host} {host}/image.sif "
        f"python -m mpicomm.rank_log /logs 0 python -m mpicomm.rank_variables python train.py --lr 1\n"
    )
    assert shown.endswith(expected)
    assert " PMIX_MCA_gds=hash " in f" {shown}"


def test_logs_outside_the_working_directory_are_visible(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`../logs` and a symbolic link to another directory are below the working directory by name only."""
    (host / "data" / "link").symlink_to(host / "bin")
    monkeypatch.chdir(host / "data")
    for given, path in (("../logs", host / "logs"), ("link", host / "bin"), ("logs", None)):
        assert main(["run", "-n", "2", "--dry-run", "--container", "../image.sif", "--log-dir", given, "train.py"]) == 0
        shown = capsys.readouterr().out
        assert f"rank_log {path or host / 'data' / 'logs'} 0 " in shown
        assert (f" --bind {path}:{path} " in shown) == (path is not None)
        assert shown.count(" --bind ") == 1 + (path is not None)


def test_the_variables_of_the_ranks_choose_the_command(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    image = ["run", "-n", "2", "--dry-run", "--container", "image.sif"]
    assert main([*image, "--env", f"TMPDIR={host.root}scratch", "train.py"]) == 0
    assert "PMIX_SERVER_TMPDIR" in capsys.readouterr().out
    assert main([*image, "--env", "APPTAINER_CONTAINALL=1", "train.py"]) == 2
    assert "unset APPTAINER_CONTAINALL" in capsys.readouterr().err
    monkeypatch.setenv("APPTAINER_CONTAINALL", "1")
    assert main([*image, "--no-env", "APPTAINER_CONTAINALL", "train.py"]) == 0


def test_a_dry_run_shows_the_command_of_pyxis(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    srun = host / "bin" / "srun"
    srun.write_text("#!/bin/sh\necho 'pmix pmi2 --container-image=IMAGE'\n")
    srun.chmod(0o755)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_CPUS_PER_NODE": "8"}.items():
        monkeypatch.setenv(name, value)
    queries.constant_output.cache_clear()
    try:
        assert main(["run", "--dry-run", "--container", "nvcr.io#nvidia/pytorch:25.06-py3", "train.py"]) == 0
        by_srun = capsys.readouterr().out
        if mpi.library().vendor == OPEN_MPI.vendor:  # mpirun starts the ranks
            assert main(["run", "--dry-run", "--fault-tolerant", "--container", "docker://a/b:1", "train.py"]) == 0
            assert " apptainer exec " in capsys.readouterr().out
    finally:
        queries.constant_output.cache_clear()
    mpi_type = mpi.library().srun_type
    assert by_srun.endswith(
        f" srun --mpi={mpi_type} --kill-on-bad-exit=0 '{PYXIS_IMAGE}' --container-mounts={host}:{host} "
        f"--container-workdir={host} --ntasks=4 --cpus-per-task=2 python -m mpicomm.rank_variables python train.py\n"
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--container", "other.sif"], "--container other.sif: the image does not exist in"),
        (["--container", "./name"], "--container ./name: the image does not exist in"),
        (["--container", ""], "expected an image, got an empty text"),
        (["--container", "a#b/c:1", "--container-runtime", "apptainer"], "In a registry, it is docker://a/b/c:1."),
        (["--container", "image.sif", "--container-bind", "/none/a:/"], "a target other than /"),
        (["--container", "image.sif", "--log-dir", "/a b"], "the directory of --log-dir '/a b' cannot be visible"),
        (["--container", "image.sif", "--container-bind", "/none/a:/b"], "/none/a does not exist"),
        (["--container", "image.sif", "--container-runtime", "enroot"], "enroot was not found in PATH"),
        (
            ["--container", "image.sif", "--stage-env=/tmp"],
            "which ranks in a container do not use.\nRemove --stage-env",
        ),
        (["--container-runtime", "enroot"], "need --container"),
        (["--container-bind", "/data"], "need --container"),
    ],
)
def test_a_wrong_option_is_an_error_before_the_start(
    host: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-n", "2", *options, "train.py"]) == 2
    assert reason in capsys.readouterr().err


def test_no_directory_hides_the_image(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(LaunchError, match="the working directory '/' cannot be visible in a container"):
        launching.container(str(host / "image.sif"), None, [], os.environ, log_dir=None, may_use_srun=False)


def test_logs_are_not_lost_outside_of_the_mounts(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = host / "bin" / "srun"
    srun.write_text("#!/bin/sh\necho ' --environment=FILE'\n")
    srun.chmod(0o755)
    (host / "a.toml").touch()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    queries.constant_output.cache_clear()
    try:
        with pytest.raises(LaunchError, match="/logs is not below the working directory, and ce takes mounts from"):
            launching.container("a.toml", None, [], os.environ, log_dir="/logs", may_use_srun=True)
        container = launching.container("a.toml", None, [], os.environ, log_dir=f"{host}/logs", may_use_srun=True)
    finally:
        queries.constant_output.cache_clear()
    assert container.srun_options() == [f"--environment={host}/a.toml"]


def test_a_sandbox_is_not_the_name_of_another_image(host: Path) -> None:
    """Without `./`, a path has the form of a name in a registry; a requested runtime decides."""

    def selected(runtime: str | None) -> tuple[str, str]:
        container = launching.container("data", runtime, [], os.environ, log_dir=None, may_use_srun=False)
        return container.runtime.name, container.image

    (host / "bin" / "enroot").touch(0o755)
    assert selected(None) == ("apptainer", str(host / "data"))
    assert selected("enroot") == ("enroot", "data")
    (host / "data" / ".singularity.d").rmdir()
    assert selected(None) == ("enroot", "data")


@pytest.mark.parametrize("name", ["APPTAINER_CONTAINALL", "APPTAINER_CLEANENV", "SINGULARITY_PID"])
@pytest.mark.usefixtures("host")
def test_variables_that_separate_the_ranks_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "0")
    assert main(["run", "-n", "2", "--dry-run", "--container", "image.sif", "train.py"]) == 0
    for value in ("true", "T", "yes"):  # with the last one Apptainer fails
        monkeypatch.setenv(name, value)
        assert main(["run", "-n", "2", "--container", "image.sif", "train.py"]) == 2
        assert f"unset {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "hosts", "environ", "command"),
    [
        (SLURM_JOB, "", {"APPTAINER_CONTAINER": "/i/a.sif"}, "srun"),
        (SLURM_JOB, "a:1,b:1", {"APPTAINER_CONTAINER": "/i/a.sif"}, "ssh"),
        (HostAllocation("PBS", (Host("a", 1), Host("b", 1))), "", {"SINGULARITY_CONTAINER": "/i/a.sif"}, "ssh"),
        (dataclasses.replace(SLURM_JOB, nodes=1), "", {"APPTAINER_CONTAINER": "/i/a.sif"}, ""),
        (HostAllocation("PBS", (Host("a", 2),)), "", {"APPTAINER_CONTAINER": "/i/a.sif"}, ""),
        (SLURM_JOB, "", {}, ""),
    ],
)
def test_a_container_without_srun_or_ssh_reaches_no_host(
    job: Allocation, hosts: str, environ: Mapping[str, str], command: str, tmp_path: Path
) -> None:
    request = Request(PROGRAM, hosts=tuple(Host(name) for name in hosts.split(",") if name))

    def refuse() -> None:
        launching._refuse_hosts_from_container(request, job, None, {"PATH": str(tmp_path), **environ})

    if command:
        with pytest.raises(LaunchError, match=rf"\(.*, a\.sif\) without {command}, and cannot start ranks on 2 hosts"):
            refuse()
        (tmp_path / command).touch(0o755)
    refuse()


# -- job scripts -------------------------------------------------------------------------------------------------------


def test_a_job_starts_the_launcher_outside_and_the_ranks_inside() -> None:
    spec = JobSpec(
        "slurm",
        ("/opt/conda/bin/python", "train.py"),
        container="/images/a.sif",
        container_runtime="apptainer",
        container_bind=("/data", "/fs:/s:ro"),
    )
    line = next(line for line in script(spec).splitlines() if line.startswith("mpicomm run"))
    assert line == (
        "mpicomm run --container /images/a.sif --container-runtime apptainer --container-bind /data "
        "--container-bind /fs:/s:ro -- \\"
    )


def test_a_job_gives_paths_of_the_image_to_the_ranks_alone() -> None:
    text = script(JobSpec("slurm", PROGRAM, container="/a.sif", env=("PATH=/opt/bin:/bin", "A=1 2", "B")))
    assert " --env PATH=/opt/bin:/bin --env A --env B -- " in text
    assert [line for line in text.splitlines() if line.startswith("export A")] == ["export A='1 2'"]
    assert "export PATH" not in text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"container": "~/a.sif"}, "expected an image without spaces"),
        ({"container": "a.sif", "container_runtime": "docker"}, "expected one of ce, pyxis, apptainer"),
        ({"container_runtime": "apptainer"}, "need --container IMAGE"),
        ({"container_bind": ("/data",)}, "need --container IMAGE"),
        ({"container": "a.sif", "container_bind": ("data",)}, "cannot bind 'data'"),
        ({"container": "a.toml", "container_runtime": "ce", "container_bind": ("/data",)}, "does not work with ce"),
        (
            {"scheduler": "pbs", "container": "a.sqsh", "container_runtime": "pyxis"},
            "srun, got PBS; use an image and --con.* of app",
        ),
        ({"container": "a.sqsh", "container_runtime": "pyxis", "launcher": "mpiexec"}, "got --launcher mpiexec"),
        ({"scheduler": "pbs", "container": "a.toml"}, "ce is a plugin of Slurm's srun, got PBS"),
        ({"container": "a.sif", "command": ("torchrun", "train.py")}, "does not work with torchrun"),
    ],
)
def test_a_job_refuses_a_wrong_container(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        JobSpec(**{"scheduler": "slurm", "command": PROGRAM, **options})
