"""Job scripts as programs: the recorded ones in jobs/, and what a script does, with stand-ins for what starts ranks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpicomm.cli.main import main
from mpicomm.launch.jobscript import JobSpec, Scheduler, script
from mpicomm.launch.jobscript.spec import SCHEDULERS
from tests.launching import ROOT, Outcome, run_command

JOBS = sorted((ROOT / "jobs").iterdir())
KINDS = ("collectives", "ddp", "p2p", "torchrun", "trainer")
each_job = pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)

# Says how it was called, and does as it is told.
STAND_IN = r"""#!/bin/bash
name=${0##*/}
printf '%s\0' "$name" "$@" $'\036' >>"$CALLS"  # at once: there may be several at a time
[ "$name $1" = "scontrol show" ] && printf 'node1\nnode2\n'
[ "$name" = "torchrun" ] && [ "$PET_NODE_RANK" ] && echo "PET_NODE_RANK=$PET_NODE_RANK"
[ "$name" = "$TERMINATES" ] && kill -TERM "$PPID"
status=STATUS_$name
exit "${!status:-0}"
"""
STARTERS = ("srun", "scontrol", "mpirun", "qsub", "pbs_tmrsh", "torchrun", "module")

VARIABLES = {
    "slurm": {
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "3",
    },
    "pbs": {"PBS_JOBID": "4567[0].server", "PBS_ENVIRONMENT": "PBS_BATCH"},
}


class Job:
    """A script that is run where stand-ins are found first."""

    def __init__(self, directory: Path, spec: JobSpec, file: str = "the job.sh") -> None:
        self.calls_file = directory / "calls"
        self.submitted = directory / "submitted here"
        self.submitted.mkdir()
        self.script = directory / file
        self.script.write_text(script(spec))
        self.stand_ins = directory / "bin"
        self.stand_ins.mkdir()
        for name in STARTERS:
            (self.stand_ins / name).write_text(STAND_IN)
            (self.stand_ins / name).chmod(0o755)
        (directory / "hosts").write_text("node1\nnode1\nnode2\nnode2\n")
        self.env = VARIABLES[spec.scheduler] | {
            "PATH": f"{self.stand_ins}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "PBS_NODEFILE": str(directory / "hosts"),
            "PBS_O_WORKDIR": str(self.submitted),
        }

    def run(self, **env: str | int) -> Outcome:
        added = {name: str(value) for name, value in env.items()}
        # Slurm starts the script where it was submitted, PBS in the home directory.
        where = self.submitted if "SLURM_JOB_ID" in self.env else Path("/")
        command = ["/bin/bash", "-c", 'cd "$0" && exec /bin/bash "$1"', str(where), str(self.script)]
        return run_command(command, env=self.env | added, timeout=30)

    def calls(self, *names: str) -> list[list[str]]:
        """Return the calls, with what was called."""
        if not self.calls_file.exists():
            return []
        text = self.calls_file.read_bytes().decode(errors="surrogateescape")
        found = [call.split("\0")[:-1] for call in text.split("\036\0")[:-1]]
        return [call for call in found if not names or call[0] in names]


@pytest.fixture
def job(tmp_path: Path):
    def make(scheduler: Scheduler, *command: str, **options: object) -> Job:
        return Job(tmp_path, JobSpec(scheduler, command or ("python", "train.py"), nodes=2, **options))

    return make


# -- what is recorded ------------------------------------------------------------------------------------------------


def test_each_kind_is_there_for_both_schedulers() -> None:
    slurm = [f"slurm_{kind}.sbatch" for kind in KINDS]
    assert [path.name for path in JOBS] == sorted([*slurm, *[f"pbs_{kind}.pbs" for kind in KINDS]])


@each_job
def test_a_recorded_job_is_what_its_command_makes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"jobs/{path.name}"
    command = re.search(r"^# Made by:\n#     (.+)\n", path.read_text(), re.MULTILINE)[1]
    program, *arguments = shlex.split(command)
    assert (program, arguments[1]) == ("mpicomm", path.name.partition("_")[0])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    assert main(arguments) == 0
    assert (tmp_path / file).read_text() == path.read_text(), f"to record it anew: {command}"
    assert capsys.readouterr().out.startswith(f"wrote {file}; submit it: ")


@each_job
def test_a_recorded_job_says_how_to_use_it(path: Path) -> None:
    file, text = f"jobs/{path.name}", path.read_text()
    submit, by_hand = ("qsub", "qsub -I ") if path.suffix == ".pbs" else ("sbatch", "salloc ")
    assert f"# Submit:\n#     {submit} {file}\n# Interactively:\n#     {by_hand}" in text
    assert f"bash {file}\n" in text


@each_job
def test_a_recorded_job_is_a_script(path: Path) -> None:
    outcome = run_command(["bash", "-n", str(path)])
    assert (outcome.status, outcome.stderr) == (0, ""), outcome
    modules = re.findall(r"-m (mpicomm\.examples\.(\w+))", path.read_text())
    assert modules
    assert all((ROOT / "examples" / f"{name}.py").exists() for _, name in modules)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
@each_job
def test_shellcheck_finds_nothing(path: Path) -> None:
    outcome = run_command(["shellcheck", "--severity=warning", str(path)])
    assert outcome.status == 0, outcome


# -- the exit status -------------------------------------------------------------------------------------------------


@each_scheduler
@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize("status", [0, 1, 85, 137])
def test_the_job_ends_as_its_ranks_do(job, scheduler: Scheduler, requeue: bool, status: int) -> None:
    made = job(scheduler, requeue=requeue)
    outcome = made.run(STATUS_srun=status, STATUS_mpirun=status)
    assert (outcome.status, outcome.stderr) == (status, ""), outcome
    assert len(made.calls("srun", "mpirun")) == 1
    again = made.calls("scontrol", "qsub")
    if not (requeue and status == 85):
        assert again == []
    elif scheduler == "slurm":
        assert again == [["scontrol", "requeue", "12345"]]
    else:
        assert again == [["qsub", "-v", "JOB_RESTARTS=1", str(made.script)]]


@each_scheduler
@pytest.mark.parametrize(("restarts", "goes_on"), [(1, True), (2, True), (3, False), (4, False)])
def test_restarts_have_a_limit(job, scheduler: Scheduler, restarts: int, goes_on: bool) -> None:
    made = job(scheduler, requeue=True, max_restarts=3)
    outcome = made.run(STATUS_srun=85, STATUS_mpirun=85, SLURM_RESTART_COUNT=restarts, JOB_RESTARTS=restarts)
    assert outcome.status == 85
    assert len(made.calls("scontrol", "qsub")) == goes_on
    assert ("3 restarts are the limit" in outcome.stderr) != goes_on
    if goes_on and scheduler == "pbs":
        assert made.calls("qsub")[0][2] == f"JOB_RESTARTS={restarts + 1}"


@each_scheduler
def test_a_job_that_cannot_be_started_again_keeps_its_status(job, scheduler: Scheduler) -> None:
    made = job(scheduler, requeue=True)
    assert made.run(STATUS_srun=85, STATUS_mpirun=85, STATUS_scontrol=1, STATUS_qsub=1).status == 85


def test_one_job_of_an_array_is_requeued_alone(job) -> None:
    made = job("slurm", requeue=True, array="0-3")
    made.run(STATUS_srun=85, SLURM_ARRAY_JOB_ID=12345, SLURM_ARRAY_TASK_ID=3)
    assert made.calls("scontrol") == [["scontrol", "requeue", "12345_3"]]


@pytest.mark.parametrize("requeue", [False, True])
def test_the_status_outlives_a_term_by_pbs_and_the_end_is_the_end(job, requeue: bool) -> None:
    """qdel sends TERM to the script as well as to the ranks, which then leave with 85: nobody wants them again."""
    made = job("pbs", requeue=requeue)
    outcome = made.run(STATUS_mpirun=85, TERMINATES="mpirun")
    assert outcome.status == 85, outcome
    assert made.calls("qsub") == []


@pytest.mark.parametrize("starter", ["mpirun", "srun"])
def test_nothing_computes_without_its_software(job, starter: str) -> None:
    made = job("slurm" if starter == "srun" else "pbs", module=("openmpi/5", "cuda"), venv="/nowhere")
    outcome = made.run(STATUS_module=3)
    assert (outcome.status, made.calls()) == (3, [["module", "load", "openmpi/5", "cuda"]])
    assert made.run().status != 0
    assert made.calls(starter) == []


@each_scheduler
def test_nothing_computes_in_another_directory(job, scheduler: Scheduler) -> None:
    made = job(scheduler, chdir="/nowhere at all")
    assert made.run().status != 0
    assert made.calls() == []


# -- how ranks are started -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mpi", "kind"), [("openmpi", "pmix"), ("mpich", "pmi2")])
@pytest.mark.parametrize("requeue", [False, True])
def test_srun_is_told_what_it_does_not_know(job, mpi: str, kind: str, requeue: bool) -> None:
    made = job("slurm", mpi=mpi, requeue=requeue)
    assert made.run().status == 0
    kill = f"--kill-on-bad-exit={0 if requeue else 1}"
    assert made.calls() == [["srun", f"--mpi={kind}", kill, "--cpus-per-task=3", "python", "train.py"]]


def test_mpirun_gets_its_hosts(job) -> None:
    made = job("pbs", ranks_per_node=2, env=("A=1",), module=("m",))
    assert made.run().status == 0
    hosts = ["-n", "4", "--hostfile", made.env["PBS_NODEFILE"]]
    bound = ["--map-by", "ppr:2:node", "--bind-to", "none"]
    names = [word for name in ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "A") for word in ("-x", name)]
    assert made.calls("mpirun") == [["mpirun", *hosts, *bound, *names, "python", "train.py"]]


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_without_ssh_pbs_starts_what_mpirun_has_on_other_hosts(job, mpi: str) -> None:
    made = job("pbs", mpi=mpi, no_ssh=True)
    agent = '"${PRTE_MCA_plm_ssh_agent:-$HYDRA_LAUNCHER_EXEC}" -x -q node2 A=1 prted "a  b" ";"'
    (made.stand_ins / "mpirun").write_text(
        f'#!/bin/bash\necho "$HYDRA_LAUNCHER"\nenv -i CALLS="$CALLS" PATH="$PATH" {agent}\n'
    )
    outcome = made.run()
    assert (outcome.status, outcome.stderr) == (0, ""), outcome
    assert outcome.stdout == ("\n" if mpi == "openmpi" else "ssh\n")
    assert made.calls() == [["pbs_tmrsh", "node2", "/bin/sh", "-c", "A=1 prted a  b ;"]]
    assert list(made.submitted.iterdir()) == []


def test_mpich_is_asked_otherwise(job) -> None:
    made = job("pbs", mpi="mpich", env=("A=1",))
    made.run()
    assert made.calls() == [
        ["mpirun", "-n", "4", "--hostfile", made.env["PBS_NODEFILE"], "python", "train.py"],
    ]


def test_srun_starts_a_torchrun_on_each_node(job) -> None:
    made = job("slurm", "torchrun", "--max-restarts", "1", "train.py", "--lr", "3", ranks_per_node=4)
    assert made.run().status == 0
    (starter,) = made.calls("srun")
    assert starter[:4] == ["srun", "--mpi=none", "--kill-on-bad-exit=1", "--cpus-per-task=3"]
    task = run_command(starter[4:], env=made.env | {"SLURM_NODEID": "1"})
    assert task.stdout == "PET_NODE_RANK=1\n"
    place = ["--nproc-per-node=4", "--nnodes=2", "--master-addr=node1", "--master-port=22345"]
    assert made.calls("torchrun") == [["torchrun", *place, "--max-restarts", "1", "train.py", "--lr", "3"]]
    assert made.run(STATUS_srun=7).status == 7


def test_pbs_starts_a_torchrun_on_each_host(job) -> None:
    made = job("pbs", "torchrun", "train.py", "a b", ranks_per_node=4, cpus_per_rank=2, env=("A=it's",))
    assert made.run().status == 0
    calls = sorted(made.calls())
    for node_rank, call in enumerate(calls):
        given, program = call[: call.index("torchrun")], call[call.index("torchrun") :]
        where = ["pbs_tmrsh", f"node{node_rank + 1}", "/usr/bin/env", "-C", str(made.submitted)]
        assert given == [*where, f"PATH={made.env['PATH']}", "OMP_NUM_THREADS=2", "A=it's"]
        place = [f"--node-rank={node_rank}", "--master-addr=node1", "--master-port=24567"]
        assert program == ["torchrun", "--nproc-per-node=4", "--nnodes=2", *place, "train.py", "a b"]
    assert len(calls) == 2
    assert made.run(STATUS_pbs_tmrsh=7).status == 7


@each_scheduler
def test_on_one_node_torchrun_needs_no_address(tmp_path: Path, scheduler: Scheduler) -> None:
    made = Job(tmp_path, JobSpec(scheduler, ("python", "-m", "torch.distributed.run", "x.py"), ranks_per_node=2))
    (made.stand_ins / "python").write_text(STAND_IN)
    (made.stand_ins / "python").chmod(0o755)
    assert made.run(STATUS_python=4, STATUS_srun=4).status == 4
    (call,) = made.calls()
    words = ["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "x.py"]
    assert sorted(call[-6:]) == sorted(words)


@each_scheduler
def test_the_ranks_find_their_surroundings(job, scheduler: Scheduler) -> None:
    made = job(scheduler, "show", env=("A=it's $HOME; `x`\nend",), cpus_per_rank=3, chdir=None)
    starter = made.stand_ins / ("srun" if scheduler == "slurm" else "mpirun")
    starter.write_text('#!/bin/bash\nprintf "%s|" "$PWD" "$OMP_NUM_THREADS" "$A" "$(umask)"\n')
    umask = "0022" if scheduler == "pbs" else run_command(["bash", "-c", "umask"]).stdout.strip()
    assert made.run().stdout == f"{made.submitted}|3|it's $HOME; `x`\nend|{umask}|"


@each_scheduler
@settings(deadline=None, derandomize=True, max_examples=20)
@example(words=["", "'", '"', "$HOME", "`id`", "a\nb", "\\", "*", "#", "\r", "ä\x07", "-- ", "!", "&&", "\udcff"])
@example(words=["a\\nb\nc", "\\\n", "\n\\'"])  # backslashes in words that are not printable
@given(words=st.lists(st.text(st.characters(exclude_characters="\0\036", exclude_categories=["Cs"])), max_size=6))
def test_the_program_gets_its_words(scheduler: Scheduler, words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = Job(Path(directory), JobSpec(scheduler, ("program", *[word for word in words if word != ":"])))
        assert made.run().status == 0
        (call,) = made.calls()
        assert call[call.index("program") + 1 :] == [word for word in words if word != ":"]


# -- with a real mpirun ----------------------------------------------------------------------------------------------

BIN = Path(sys.executable).parent
HAS_OPEN_MPI = "Open MPI" in run_command([str(BIN / "mpirun"), "--version"]).stdout
LEAVES = "import sys; from mpi4py import MPI; MPI.COMM_WORLD.barrier(); print(MPI.COMM_WORLD.size); sys.exit(85)"


def real(directory: Path, *command: str, **options: object) -> Job:
    """Return a job in PBS on this host, which has two ranks' place in it."""
    made = Job(
        directory, JobSpec("pbs", command, ranks_per_node=2, mpi="openmpi" if HAS_OPEN_MPI else "mpich", **options)
    )
    (made.stand_ins / "mpirun").unlink()
    Path(made.env["PBS_NODEFILE"]).write_text(f"{os.uname().nodename}\n" * 2)
    made.env["PATH"] = f"{made.stand_ins}:{BIN}:{os.environ['PATH']}"
    return made


@pytest.mark.each_mpi
def test_ranks_start_in_pbs(tmp_path: Path) -> None:
    made = real(tmp_path, "python", "-m", "mpicomm.examples.p2p", env=(f"PYTHONPATH={ROOT}",))
    outcome = made.run()
    assert outcome.status == 0, outcome
    assert outcome.stdout.count("rank 1: had 1, has 0 from rank 0") >= 1, outcome


@pytest.mark.each_mpi
def test_ranks_that_leave_in_time_are_submitted_again(tmp_path: Path) -> None:
    made = real(tmp_path, "python", "-c", LEAVES, requeue=True)
    outcome = made.run()
    assert (outcome.status, outcome.stdout) == (85, "2\n2\n"), outcome
    assert made.calls() == [["qsub", "-v", "JOB_RESTARTS=1", str(made.script)]]
