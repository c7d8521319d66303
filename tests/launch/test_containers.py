"""Ranks in containers of a stand-in for Apptainer, with real namespaces by bubblewrap: `tests/apptainer.py`.

The image has the environment of this Python at another path, and the checkout; nothing else of this machine's files is
in the containers, except the directories that Apptainer binds.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests import apptainer
from tests.launching import OTHER_MPI_ENV, ROOT, Outcome, run_command

ENVIRONMENTS = {"this MPI": Path(sys.prefix), "the other MPI": ROOT / (OTHER_MPI_ENV or "")}
P2P = ("-m", "mpicomm.examples.p2p")
LAST_LINES = {"rank 0: had 0, received 1 from rank 1", "rank 1: had 1, received 0 from rank 0"}
REDUCE = """
import os, sys, torch, mpicomm
world = mpicomm.bootstrap()
total = mpicomm.all_reduce(torch.full((2**20,), world.rank + 1.0))
is_bound = os.path.exists(sys.argv[1])
line = f"{world.rank} of {world.size}: {total[0]:.0f} {total[-1]:.0f} {sys.executable} {is_bound} {os.environ['DATA']}"
os.write(1, (line + chr(10)).encode())
"""
KILLED = """
import os, signal, time, mpicomm
world = mpicomm.bootstrap()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)  # longer than the limit of a job
"""


@pytest.fixture(name="environment", params=ENVIRONMENTS)
def _environment(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with mpicomm and an MPI; the working directory has an image of it, and Apptainer is in PATH."""
    environment = ENVIRONMENTS[request.param]
    if not (environment / "bin" / "python").exists():
        pytest.skip("OTHER_MPI_ENV is not set")
    if reason := apptainer.problem():
        pytest.skip(reason)
    _, commands = apptainer.make(tmp_path, environment)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return environment


def run(environment: Path, *arguments: str) -> Outcome:
    """Start two ranks by `mpicomm run`, with its own options before the program."""
    command = [str(environment / "bin" / "python"), "-m", "mpicomm", "run", "-n", "2", "--container", "../image"]
    return run_command([*command, *arguments])


def run_by_mpiexec(environment: Path, *options: str) -> Outcome:
    """Start two ranks as a user does, with options of Apptainer."""
    container = ["apptainer", "exec", *options, "--bind", str(Path.cwd()), str(Path("../image").resolve())]
    # The variable is one of this checkout, which `--cleanenv` removes.
    program = ["env", f"PYTHONPATH={ROOT}", "python", *P2P]
    return run_command([str(environment / "bin" / "mpiexec"), "-n", "2", *container, *program])


def last_lines(outcome: Outcome) -> set[str]:
    """Return the last line of each rank; the launcher may show the lines of one rank before earlier ones of another."""
    last = {line.partition(":")[0]: line for line in outcome.stdout.splitlines() if line.startswith("rank ")}
    return set(last.values())


def test_ranks_in_containers_run_an_example(environment: Path) -> None:
    outcome = run(environment, *P2P)
    assert outcome.status == 0, outcome
    assert last_lines(outcome) == LAST_LINES, outcome


def test_ranks_see_the_image_and_the_bound_paths(environment: Path, tmp_path: Path) -> None:
    """They run the python of the image, share memory by the slots, and see what the user binds, and the variables."""
    Path("reduce.py").write_text(REDUCE)
    (tmp_path / "data").mkdir()
    options = ["--container-bind", f"{tmp_path}/data:/data", "--env", "DATA=of the user", "--log-dir", "logs"]
    outcome = run(environment, *options, "reduce.py", "/data")
    assert outcome.status == 0, outcome
    lines = {rank: Path(f"logs/rank_00{rank}.log").read_text().splitlines() for rank in (0, 1)}
    assert lines == {rank: [f"{rank} of 2: 3 3 {apptainer.PLACE}/bin/python True of the user"] for rank in (0, 1)}
    assert "cannot share memory" not in outcome.stderr


def test_temporary_files_may_be_elsewhere(environment: Path) -> None:
    """Sites set TMPDIR to a directory that containers do not see, and Open MPI hangs or crashes without it."""
    with tempfile.TemporaryDirectory(dir="/var/lib") as directory:
        Path("reduce.py").write_text(REDUCE)
        command = [str(environment / "bin" / "python"), "-m", "mpicomm", "run", "-n", "2", "--container", "../image"]
        places = {"TMPDIR": directory, "PRTE_MCA_prte_local_tmpdir_base": directory}
        outcome = run_command([*command, "reduce.py", directory], env=places)
    assert outcome.status == 0, outcome
    assert {line.split()[6] for line in outcome.stdout.splitlines()} == {"True"}


def test_a_killed_rank_ends_the_job(environment: Path) -> None:
    Path("killed.py").write_text(KILLED)
    outcome = run(environment, "killed.py")
    assert outcome.status not in (0, None), outcome
    # MPICH's mpiexec may end rank 0 before it reports which rank has failed; `mpicomm run` then names both.
    assert re.search(r"rank 1\b|ranks 0, 1 of 2 on .* did not reach the end", outcome.stderr), outcome


@pytest.mark.parametrize("options", [["--userns"], ["--pid"], ["--pid", "--ipc", "--userns"]], ids=" ".join)
def test_separated_ranks_do_without_shared_memory(environment: Path, options: list[str]) -> None:
    """MPI crashes or aborts at the first large message unless it is told not to read the memory of other ranks."""
    outcome = run_by_mpiexec(environment, *options)
    assert outcome.status == 0, outcome
    assert last_lines(outcome) == LAST_LINES, outcome


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--contain", "this rank has a /dev/shm of its own (Apptainer, image)"),
        ("--cleanenv", "none of its variables is set there, and MPI reports rank 0 of 1"),
    ],
)
def test_ranks_that_cannot_form_a_job_name_the_option(environment: Path, option: str, error: str) -> None:
    outcome = run_by_mpiexec(environment, option)
    assert outcome.status not in (0, None), outcome
    assert error in outcome.stderr
    assert f"Remove {option} and --containall" in outcome.stderr


def test_the_stand_in_rejects_other_options(environment: Path) -> None:
    outcome = run_by_mpiexec(environment, "--unknown")
    assert outcome.status not in (0, None)
    assert "apptainer exec: error" in outcome.stderr or "unrecognized arguments: --unknown" in outcome.stderr
