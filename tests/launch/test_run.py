"""`mpicomm run` with real jobs: the ranks that it starts, and its exit."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from mpicomm import mpi
from tests.launching import Outcome, almost_empty_environment, background_job, refusal, run_command, run_ranks
from tests.ports import reserved_port
from tests.time_limits import EVENT_SECONDS

LIBRARY = mpi.library()
IS_OPEN_MPI = LIBRARY.vendor == "Open MPI"
CORES = len(os.sched_getaffinity(0))

# One write per line: otherwise, the output of different ranks may interleave.
PLACES = """
import os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
host, threads = os.uname().nodename, os.environ["OMP_NUM_THREADS"]
line = f"rank {world.rank} of {world.size}, {node.rank} of {node.size} on {host}, {threads} {sys.argv[1:]}\\n"
os.write(1, line.encode())
os.write(2, f"error of rank {world.rank}\\n".encode())
world.Barrier()
"""


def run(arguments: Sequence[str], *, env: Mapping[str, str] | None = None) -> Outcome:
    """Run `mpicomm run` without the variables with which other tests run MPI on any machine."""
    helps = [name for name in almost_empty_environment() if name.startswith(("OMPI_", "PRTE_", "OMP_"))]
    bare = [word for name in helps for word in ("-u", name)]
    added = [f"{name}={value}" for name, value in (env or {}).items()]
    return run_command(["env", *bare, *added, sys.executable, "-m", "mpicomm", "run", *arguments])


@pytest.fixture(autouse=True)
def _in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(name="script")
def _script(_in_own_directory: None) -> str:
    """Write a script to the working directory, and return its name."""
    Path("places.py").write_text(PLACES)
    return "places.py"


def expected_lines(size: int, *, arguments: Sequence[str] = ()) -> list[str]:
    """Return the expected output of the script."""
    host, threads = socket.gethostname(), max(1, CORES // size)
    return [f"rank {rank} of {size}, {rank} of {size} on {host}, {threads} {arguments}" for rank in range(size)]


@pytest.mark.each_mpi
@pytest.mark.parametrize("size", [CORES, 2 * CORES], ids=["as many as cores", "more than cores"])
def test_ranks_are_one_world(script: str, size: int) -> None:
    outcome = run(["-n", str(size), script, "-n", "3"])
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.splitlines()) == sorted(expected_lines(size, arguments=["-n", "3"])), outcome
    first = outcome.stderr.splitlines()[0]
    assert re.match(rf"mpicomm run: .*{LIBRARY.mpiexec} -n {size} .*{sys.executable} places.py -n 3$", first), outcome


@pytest.mark.each_mpi
def test_the_number_of_ranks_is_that_of_the_cores(script: str) -> None:
    outcome = run([script, "-n", "99"], env={"CUDA_VISIBLE_DEVICES": ""})
    siblings = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in range(CORES)]
    cores = len({path.read_text() for path in siblings})
    assert outcome.stdout.count(f" of {cores}, ") == outcome.stdout.count("['-n', '99']") == cores, outcome
    assert f"If it is meant for mpicomm run:\n  mpicomm run -n 99 {script}\n" in outcome.stderr, outcome


BINDING = """
import os
cpus = sorted(os.sched_getaffinity(0))
import torch
line = f"{cpus} {sorted(os.sched_getaffinity(0))} {os.environ['OMP_NUM_THREADS']} {torch.get_num_threads()}\\n"
os.write(1, line.encode())
"""


@pytest.mark.each_mpi
@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize("mode", ["auto", "cores", "numa"])
def test_no_two_ranks_are_bound_to_a_core(mode: str) -> None:
    Path("binding.py").write_text(BINDING)
    outcome = run(["-n", "2", "--bind", mode, "binding.py"], env={"CUDA_VISIBLE_DEVICES": ""})
    assert outcome.status == 0, outcome
    half = CORES // 2
    first, second = (list(range(start, start + half)) for start in (0, half))
    expected = [f"{cpus} {cpus} {half} {half}" for cpus in (first, second)]
    assert sorted(outcome.stdout.splitlines()) == expected, outcome


@pytest.mark.each_mpi
@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize("means", ["taskset", "cgroup"])
def test_ranks_are_bound_within_the_cpus_of_the_job(means: str, request: pytest.FixtureRequest) -> None:
    confined = ["taskset", "--cpu-list", "1"] if means == "taskset" else request.getfixturevalue("in_cgroup_of_cpu_1")
    Path("binding.py").write_text(BINDING)
    command = [*confined, sys.executable, "-m", "mpicomm", "run", "--bind", "cores"]
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": ""}
    outcome = run_command([*command, "-n", "1", "binding.py"], env=env)
    assert outcome.stdout.startswith("[1] [1] "), outcome
    refused = run_command([*command, "-n", "2", "binding.py"], env=env)
    assert refused.status == 2, refused
    assert "--bind cores: 2 ranks need as many cores, but a host has 1 for them" in refused.stderr


@pytest.fixture
def in_cgroup_of_cpu_1() -> Iterator[list[str]]:
    """Return the words before a command that run it in a control group with CPU 1 alone."""
    directory = Path(f"/sys/fs/cgroup/cpuset/mpicomm-{os.getpid()}")
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        for name, value in (("cpuset.cpus", "1"), ("cpuset.mems", "0")):
            (directory / name).write_text(value)
        yield ["sh", "-c", f'echo $$ > {directory}/tasks && exec "$@"', "sh"]
    finally:
        directory.rmdir()


@pytest.mark.each_mpi
def test_fewer_cores_are_fewer_ranks_that_are_not_bound() -> None:
    command = [sys.executable, "-m", "mpicomm", "run", "--dry-run", "true"]
    outcome = run_command(["taskset", "--cpu-list", "0", *command], env={"CUDA_VISIBLE_DEVICES": ""})
    assert " -n 1 " in outcome.stdout, outcome
    assert "core" not in outcome.stdout, outcome


@pytest.mark.each_mpi
def test_the_launcher_gets_the_arguments_of_the_user() -> None:
    outcome = run(["-n", "2", "--launcher-arg=-wdir", "--launcher-arg", "/", "pwd"])
    assert (outcome.status, outcome.stdout) == (0, "/\n/\n"), outcome


def test_an_empty_argument_for_the_launcher_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --launcher-arg: expected an argument of" in refusal(["run", "--launcher-arg=", "true"], capsys)
    assert refusal(["run", "--launcher-arg", "-u", "true"], capsys).endswith(
        "--launcher-arg: expected one argument; write --launcher-arg=VALUE, with =, for a value that begins with -\n"
    )


@pytest.mark.each_mpi
def test_gpus_decide_the_number_of_ranks(script: str) -> None:
    outcome = run(["--dry-run", script], env={"CUDA_VISIBLE_DEVICES": "0,3,GPU-5"})
    assert " -n 3 " in outcome.stdout, outcome


# -- output ----------------------------------------------------------------------------------------------------------


@pytest.mark.each_mpi
def test_each_rank_has_a_log_and_rank_0_is_shown(script: str) -> None:
    outcome = run(["-n", "3", "--log-dir", "new/logs", script])
    assert outcome.status == 0, outcome
    lines = expected_lines(3, arguments=[])
    assert outcome.stdout.splitlines() == lines[:1], outcome
    assert outcome.stderr.splitlines()[1] == "error of rank 0", outcome
    assert "no rank has called mpicomm.bootstrap()" in outcome.stderr, outcome
    logs = sorted(Path("new/logs").iterdir())
    assert [path.name for path in logs] == ["rank_000.log", "rank_001.log", "rank_002.log"]
    for rank, path in enumerate(logs):
        assert sorted(path.read_text().splitlines()) == sorted([lines[rank], f"error of rank {rank}"])


@pytest.mark.each_mpi
@pytest.mark.parametrize("logs", [[], ["--log-dir", "logs"]], ids=["shown", "logged"])
def test_lines_are_tagged_with_their_rank(logs: list[str], script: str) -> None:
    outcome = run(["-n", "3", "--tag-output", *logs, script])
    tag = "[1,{}]<stdout>: {}" if IS_OPEN_MPI else "[{}] {}"
    tagged = [tag.format(rank, line) for rank, line in enumerate(expected_lines(3, arguments=[]))]
    shown = outcome.stdout.replace("<stdout>:rank", "<stdout>: rank")  # Open MPI 4 writes no space
    assert sorted(shown.splitlines()) == tagged, outcome
    assert Path("logs/rank_002.log").exists() == bool(logs)


FAILING = """
import mpicomm
world = mpicomm.bootstrap()
world.comm.Barrier()
raise RuntimeError("an error")
"""


@pytest.mark.each_mpi
def test_ranks_that_fail_at_once_are_one_cause() -> None:
    """The report of the rank and the last line of `mpicomm run` name the same one."""
    outcome = run_command([sys.executable, "-m", "mpicomm", "run", "-n", "3", sys.executable, "-c", FAILING])
    assert outcome.status != 0, outcome
    report = r"^\0?(?:\[mpicomm\]|mpicomm run:) (rank \d of 3 on \S+) failed"
    reported = re.findall(report, outcome.stderr, re.MULTILINE)
    assert len(set(reported)) == 1, outcome
    assert len(reported) == 2, outcome


@pytest.mark.each_mpi
def test_large_output_is_complete() -> None:
    count = 200_000
    Path("much.py").write_text(f"import os\nprint(*range({count}), sep='\\n', flush=True)\nos._exit(0)\n")
    outcome = run(["-n", "2", "--log-dir", "logs", "much.py"])
    expected = "".join(f"{number}\n" for number in range(count))
    assert outcome.stdout == expected
    assert [path.read_text() == expected for path in sorted(Path("logs").iterdir())] == [True, True]


def test_the_logs_of_a_requeued_slurm_job_keep_the_earlier_output() -> None:
    Path("show.py").write_text("import os; print('start', os.environ.get('SLURM_RESTART_COUNT'))")
    for count in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "0"}):
        outcome = run(["-n", "1", "--log-dir", "logs", "show.py"], env=count)
        assert outcome.status == 0, outcome
        if count.get("SLURM_RESTART_COUNT") == "1":
            assert Path("logs/rank_000.log").read_text().splitlines() == ["start None", "start 1"]
    assert Path("logs/rank_000.log").read_text().splitlines() == ["start 0"]


def test_a_log_that_cannot_be_written_is_an_error(script: str) -> None:
    Path("logs").write_text("no directory")
    outcome = run(["-n", "2", "--log-dir", "logs", script])
    assert outcome.status == 2, outcome
    assert "File exists: 'logs'" in outcome.stderr, outcome


# -- signals ---------------------------------------------------------------------------------------------------------

WAITS = """
import os, signal, time
from mpi4py import MPI
got = []
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
MPI.COMM_WORLD.Barrier()
open(f"up{MPI.COMM_WORLD.rank}", "w").close()
while not got:
    time.sleep(0.05)
os.write(1, f"rank {MPI.COMM_WORLD.rank} got {got == [signal.SIGUSR1]}\\n".encode())
"""


@pytest.mark.each_mpi
@pytest.mark.parametrize("options", [[], ["--log-dir", "logs"]], ids=["shown", "logged"])
def test_ranks_get_the_signals_of_the_command(options: list[str]) -> None:
    Path("waits.py").write_text(WAITS)
    with background_job([sys.executable, "-m", "mpicomm", "run", "-n", "2", *options, "waits.py"]) as job:
        job.wait_until(lambda: Path("up0").exists() and Path("up1").exists(), "both ranks are up")
        os.kill(job.pid, signal.SIGUSR1)
        outcome = job.finish(EVENT_SECONDS)
    assert outcome.status == 0, outcome
    lines = {"rank 0 got True", *([] if options else ["rank 1 got True"])}
    assert set(outcome.stdout.splitlines()) == lines, outcome


# -- without MPI, one command on each node ---------------------------------------------------------------------------

WORLD = """
import os, sys
import torch, torch.distributed as dist
import mpicomm
world = mpicomm.bootstrap()
total = torch.tensor([world.rank])
dist.all_reduce(total)
line = (f"{world.rank} of {world.size}, {world.local_rank} of {world.local_size}, node {world.node_rank} of "
        f"{world.num_nodes}, {world.backend}, {world.comm}, {total.item()}, {'mpi4py.MPI' in sys.modules}\\n")
os.write(1, line.encode())
"""


def test_one_command_on_each_node_makes_one_world() -> None:
    Path("world.py").write_text(WORLD)
    with reserved_port() as port:
        command = f"{sys.executable} -m mpicomm run --nnodes 2 --master-addr 127.0.0.1 --master-port {port} --node-rank"
        program = "-n 2 --log-dir logs world.py"
        line = f"{command} 1 {program} >second 2>&1 & {command} 0 {program}; status=$?; wait; exit $status"
        outcome = run_command(["bash", "-c", line])
    assert outcome.status == 0, outcome
    written = [path.read_text().splitlines()[-1] for path in sorted(Path("logs").iterdir())]
    total = sum(range(4))
    assert written == [
        f"{rank} of 4, {rank % 2} of 2, node {rank // 2} of 2, gloo, None, {total}, False" for rank in range(4)
    ], outcome


# -- schedulers ------------------------------------------------------------------------------------------------------


@pytest.mark.each_mpi
def test_a_rank_starts_no_job() -> None:
    outcome = run_ranks(2, ["-m", "mpicomm", "run", "-n", "2", "true"])
    assert outcome.status != 0, outcome
    assert "mpicomm run: this process is a rank that " in outcome.stderr, outcome


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("-n 0 places.py", "expected a positive integer, got 0"),
        ("gone.py", "script gone.py does not exist"),
        ("-- gone", "command gone was not found"),
        ("--hosts a:x places.py", "as in --hosts a:4,b:4"),
        ("--hosts a --hostfile b places.py", "not allowed with argument"),
        ("--hostfile gone places.py", "No such file or directory: 'gone'"),
        ("--nnodes 1:2 --node-rank 0 --master-addr a places.py", "--nnodes must be one number with --node-rank"),
        ("--node-rank 0 --nnodes 1 --master-addr a --max-restarts 1 places.py", "Use torchrun --max-restarts"),
        ("--max-restarts -1 places.py", "expected a positive integer, got -1"),
        ("--exclude-failed places.py", "--exclude-failed has no effect without restarts.\nAdd --max-restarts N."),
        (
            "--exclude-failed --max-restarts 1 --hosts 10.0.0.1:2,b:2 places.py",
            "--exclude-failed needs the names of the hosts, which ranks report, got 10.0.0.1.\nPass their names",
        ),
        ("--stage-env places.py", "got places.py; to omit it, write --stage-env -- places.py"),
        ("--stage-env=/tmp true", "--stage-env requires a program that"),
        ("--stage-env=/tmp --node-rank 0 --nnodes 1 --master-addr a places.py", "--stage-env does not work with"),
        ("--grace-period 0 places.py", "expected a positive number of seconds, got 0"),
        ("--master-port 5 places.py", "--nnodes, --node-rank and --master-addr must be given together"),
        ("--nnodes 2 --node-rank 2 --master-addr a places.py", "must be from 0 to 1 with --nnodes 2, got 2"),
        ("--nnodes 2 --node-rank 0 --master-addr a --hosts b places.py", "cannot be combined with --hosts"),
    ],
)
def test_a_mistake_is_an_error_and_starts_nothing(
    arguments: str, text: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refusal(["run", *arguments.split()], capsys)


def test_a_pbs_job_that_has_ended_is_an_error(script: str) -> None:
    over = {"PBS_JOBID": "7.pbs1", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "/gone/7.pbs1"}
    outcome = run([script], env=over)
    assert outcome.status == 2, outcome
    assert "unset PBS_JOBID PBS_ENVIRONMENT PBS_NODEFILE" in outcome.stderr, outcome


def test_the_command_needs_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "mpicomm", "run", "--dry-run", "-n", "2", "true"]
    outcome = run_command(command)
    modules = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in outcome.stderr.splitlines()}
    assert "mpi4py" in modules, outcome
    assert not modules & {"torch", "numpy"}
