"""`mpicomm run --stage-env` on one host, and the copies of two ranks, each of which stands for a node."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import small_env
from tests.launching import Outcome, background_job, run_command, run_ranks
from tests.time_limits import EVENT_SECONDS

REAL_TAR = "/usr/bin/tar"
FULL = f"""#!/bin/sh
if [ "$1" = -xf ]; then
    head -c 1000 >/dev/null
    for _ in $(seq 20000); do echo "tar: ./lib/torch.so: Cannot write: No space left on device" >&2; done
    exit 2
fi
exec {REAL_TAR} "$@"
"""
UNREADABLE = f"""#!/bin/sh
if [ "$1" = -cf ]; then
    {REAL_TAR} "$@" | head -c 2000
    echo "tar: ./lib/torch.so: Cannot open: Permission denied" >&2
    exit 2
fi
exec {REAL_TAR} "$@"
"""
SLOW_REMOVAL = """#!/bin/sh
: >removing
while [ ! -e go ]; do sleep 0.05; done
exec /bin/chmod "$@"
"""
WORLD = """
import os, signal, sys
import mpicomm
world = mpicomm.bootstrap()
os.write(1, f"rank {world.rank} of {world.size} in {sys.prefix}\\n".encode())
if "fail" in sys.argv:
    raise SystemExit(world.rank * 3)
if "wait" in sys.argv:
    open(f"up{world.rank}", "w").close()
    signal.pause()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a small environment."""
    return small_env.make(tmp_path_factory.mktemp("env") / "small", Path(sys.executable))


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for the copies; the current directory contains the program."""
    monkeypatch.chdir(tmp_path)
    Path("world.py").write_text(WORLD)
    path = tmp_path / "local"
    path.mkdir()
    return path


def run(python: Path, local: Path, *words: str, env: dict[str, str] | None = None) -> Outcome:
    return run_command([str(python), "-m", "mpicomm", "run", "-n", "2", f"--stage-env={local}", *words], env=env)


def with_command(name: str, script: str) -> dict[str, str]:
    """Return the environment of a job in which a script takes the place of a command."""
    Path("bin").mkdir()
    Path("bin", name).write_text(script)
    Path("bin", name).chmod(0o755)
    return {"PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}"}


@pytest.mark.each_mpi
def test_the_ranks_run_from_a_copy_that_is_removed(python: Path, local: Path) -> None:
    outcome = run(python, local, "--log-dir", "logs", "world.py")
    assert outcome.status == 0, outcome
    lines = sorted(path.read_text().splitlines()[-1] for path in Path("logs").iterdir())
    copy = lines[0].split()[-1]
    assert Path(copy).parent == local
    assert lines == [f"rank {rank} of 2 in {copy}" for rank in range(2)]
    assert f"mpicomm run: copied {python.parent.parent} (" in outcome.stderr, outcome
    assert list(local.iterdir()) == [], outcome


def test_the_copy_is_removed_after_a_failure_of_a_rank(python: Path, local: Path) -> None:
    outcome = run(python, local, "--max-restarts", "1", "world.py", "fail")
    assert outcome.status == 3, outcome
    copies = {line.split()[-1] for line in outcome.stdout.splitlines() if line.startswith("rank ")}
    assert len(copies) == 2, outcome  # a copy for each attempt
    assert list(local.iterdir()) == [], outcome


def test_the_copy_is_removed_after_signals(python: Path, local: Path) -> None:
    """The second one arrives during the removal."""
    command = [str(python), "-m", "mpicomm", "run", "-n", "2", f"--stage-env={local}", "world.py", "wait"]
    with background_job(command, env=with_command("chmod", SLOW_REMOVAL)) as job:
        job.wait_until(lambda: Path("up0").exists() and Path("up1").exists(), "both ranks are up")
        os.kill(job.pid, signal.SIGTERM)
        job.wait_until(Path("removing").exists, "the removal has begun")
        for number in (signal.SIGUSR1, signal.SIGQUIT, signal.SIGTERM):
            os.kill(job.pid, number)
        Path("go").touch()
        outcome = job.finish(EVENT_SECONDS)
    assert outcome.status, outcome
    assert f"SIGTERM: removing {local}/mpicomm-env-" in outcome.stderr, outcome
    assert list(local.iterdir()) == [], outcome


@pytest.mark.parametrize(
    ("tar", "text"),
    [
        (FULL, "cannot write {}: tar: ./lib/torch.so: Cannot write: No space left on device"),
        (UNREADABLE, "tar: "),
    ],
    ids=["full disk", "unreadable"],
)
def test_an_error_of_tar_starts_no_rank(tar: str, text: str, python: Path, local: Path) -> None:
    outcome = run(python, local, "world.py", env=with_command("tar", tar))
    assert outcome.status == 2, outcome
    assert "mpicomm run: no rank was started, since the environment could not be copied" in outcome.stderr, outcome
    assert text.partition("{}")[2] in outcome.stderr, outcome
    assert "rank 0" not in outcome.stdout, outcome
    assert list(local.iterdir()) == [], outcome


# -- two ranks as two nodes ------------------------------------------------------------------------------------------

COPY = """
import os, sys
from pathlib import Path
from mpicomm import mpi
from mpicomm.cli import env_copy
world = mpi.initialize()
copy = sys.argv[2].format(rank=world.rank)
if world.rank == int(sys.argv[3]):
    os.environ["PATH"] = sys.argv[4] + ":" + os.environ["PATH"]
    if not os.listdir(sys.argv[4]):
        env_copy.reserve = lambda *_: None  # tar cannot start in a directory that does not exist
status = env_copy.copy_to_nodes(world, Path(sys.argv[1]), Path(copy))
world.Barrier()
os.write(1, f"{world.rank}: {status} {os.path.exists(copy)}\\n".encode())
"""


def copy_on_two_nodes(prefix: Path, copy: str, rank: int = -1, path: str = "") -> Outcome:
    return run_ranks(2, ["-c", COPY, str(prefix), copy, str(rank), path])


@pytest.mark.each_mpi
def test_a_copy_has_the_files_links_modes_and_times_of_the_original(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to("/usr/bin/python3")
    (prefix / "bin" / "tool").write_bytes(b"#!/bin/sh\n")
    (prefix / "bin" / "tool").chmod(0o755)
    (prefix / "large").write_bytes(os.urandom(40 << 20))  # several broadcasts
    for name in ("conda-meta", "envs", "pkgs", "lib/envs"):  # the base environment of conda, with others in it
        (prefix / name / "other").mkdir(parents=True)
    (prefix / "pkgs" / "urls.txt").touch()
    os.utime(prefix / "large", (1e9, 1e9))  # Python compiles modules anew if the time of the source changes
    (tmp_path / "nodes").mkdir()
    outcome = copy_on_two_nodes(prefix, f"{tmp_path}/nodes/{{rank}}")
    assert sorted(outcome.stdout.splitlines()) == ["0: 0 True", "1: 0 True"], outcome
    for name in ("envs", "pkgs"):  # these are not copied
        shutil.rmtree(prefix / name)
    for rank in range(2):
        copy = tmp_path / "nodes" / str(rank)
        assert (copy / "large").read_bytes() == (prefix / "large").read_bytes()
        assert (copy / "large").stat().st_mtime == 1e9
        assert (copy / "bin" / "tool").stat().st_mode & 0o111
        assert (copy / "bin" / "python").readlink() == Path("/usr/bin/python3")
        assert subprocess.run(["diff", "-r", "--no-dereference", prefix, copy], check=False).returncode == 0


@pytest.mark.parametrize(
    ("tar", "rank", "text"),
    [
        (FULL, 1, "to 1 of 2 nodes"),
        (FULL, 0, "to 1 of 2 nodes"),
        (UNREADABLE, 0, "cannot read {prefix}: tar: ./lib/torch.so: Cannot open"),
        ("", 1, "No such file or directory"),
    ],
    ids=["full disk", "full disk of rank 0", "unreadable", "tar cannot start"],
)
def test_an_error_on_one_node_leaves_no_copy_on_any(tar: str, rank: int, text: str, tmp_path: Path) -> None:
    for name in ("bin", "prefix", "nodes"):
        (tmp_path / name).mkdir()
    if tar:
        (tmp_path / "bin" / "tar").write_text(tar)
        (tmp_path / "bin" / "tar").chmod(0o755)
    (tmp_path / "prefix" / "large").write_bytes(os.urandom(40 << 20))
    outcome = copy_on_two_nodes(tmp_path / "prefix", f"{tmp_path}/nodes/{{rank}}", rank, str(tmp_path / "bin"))
    assert sorted(outcome.stdout.splitlines()) == ["0: 1 False", "1: 1 False"], outcome
    assert "mpicomm run: cannot copy" in outcome.stderr, outcome
    assert text.format(prefix=tmp_path / "prefix") in outcome.stderr, outcome


def test_nodes_do_not_share_a_copy(tmp_path: Path) -> None:
    (tmp_path / "prefix").mkdir()
    outcome = copy_on_two_nodes(tmp_path / "prefix", f"{tmp_path}/copy")
    assert sorted(outcome.stdout.splitlines()) == ["0: 1 False", "1: 1 False"], outcome
    assert f"{tmp_path} is shared with another node; it must be local" in outcome.stderr, outcome
