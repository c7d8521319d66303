"""`mpicomm job --submit`: with stand-ins for the commands of the schedulers, which print what the real ones print."""

from __future__ import annotations

import errno
import shlex
import sys
from pathlib import Path

import pytest

from mpicomm.cli import job_submission
from mpicomm.cli.main import main
from mpicomm.launch.jobscript import SCHEDULERS, JobSpec
from mpicomm.launch.jobscript.queues import QUEUES
from tests.docs import documents
from tests.docs.documents import LAUNCHING, is_like
from tests.launching import run_command

SLURM = """JobId=3 JobName=train
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}
   StdErr=/a b/train-3.out
   StdIn=/dev/null
   StdOut=/a b/train-3.out
   Power=
"""
PBS = """Job Id: 12.pbs
    Job_Name = train
    job_state = {state}
    Output_Path = login:/a/very/long/path/of/
\tthe/output
    Mail_Points = a
{status}"""
SLURM_FILE, PBS_FILE = "/a b/train-3.out", "/a/very/long/path/of/the/output"


def slurm(state: str, code: str, reason: str = "None") -> str:
    return SLURM.format(state=state, code=code, reason=reason)


def pbs(state: str, status: int | None = None) -> str:
    return PBS.format(state=state, status="" if status is None else f"    Exit_status = {status}\n")


STATES = [
    # (the scheduler, the output of a query, the outcome, the exit status of the script, that of --wait)
    ("slurm", slurm("PENDING", "0:0", "Priority"), None, None, None),
    ("slurm", slurm("COMPLETING", "7:0"), None, None, None),
    ("slurm", slurm("COMPLETED", "0:0"), "completed", 0, 0),
    ("slurm", slurm("FAILED", "7:0", "NonZeroExitCode"), "failed", 7, 7),
    ("slurm", slurm("FAILED", "0:9", "RaisedSignal"), "failed", 137, 137),
    ("slurm", slurm("TIMEOUT", "0:15", "TimeLimit"), "time limit", 143, 143),
    ("slurm", slurm("TIMEOUT", "0:0", "TimeLimit"), "time limit", None, 1),
    ("slurm", slurm("CANCELLED", "0:0"), "cancelled", None, 1),
    ("slurm", slurm("NODE_FAIL", "1:0"), "failed", 1, 1),
    ("slurm", "CANCELLED by 0|0:15\n", "cancelled", 143, 143),
    ("slurm", "slurm_load_jobs error: Invalid job id specified\n", "unknown", None, 1),
    ("pbs", pbs("Q"), None, None, None),
    ("pbs", pbs("F", 0), "completed", 0, 0),
    ("pbs", pbs("F", 7), "failed", 7, 7),
    ("pbs", pbs("F", 265), "failed", 137, 137),
    ("pbs", pbs("F", 271), "cancelled", 143, 143),
    ("pbs", pbs("F", -29), "time limit", None, 1),
    ("pbs", pbs("F", -3), "failed", None, 1),
    ("pbs", pbs("F"), "cancelled", None, 1),
    ("pbs", "qstat: Unknown Job Id 12.pbs\n", "unknown", None, 1),
    ("lsf", "PEND|-|-\n", None, None, None),
    ("lsf", "DONE|-|-\n", "completed", 0, 0),
    ("lsf", "EXIT|7|-\n", "failed", 7, 7),
    ("lsf", "EXIT|140|TERM_RUNLIMIT: job killed after reaching LSF run time limit\n", "time limit", 140, 140),
    ("lsf", "EXIT|130|TERM_OWNER: job killed by owner\n", "cancelled", 130, 130),
    ("lsf", "Job <12> is not found\n", "unknown", None, 1),
    ("flux", "SCHED;;\n", None, None, None),
    ("flux", "INACTIVE;COMPLETED;0\n", "completed", 0, 0),
    ("flux", "INACTIVE;FAILED;7\n", "failed", 7, 7),
    ("flux", "INACTIVE;CANCELED;-128\n", "cancelled", 256, 1),
    ("flux", "INACTIVE;TIMEOUT;142\n", "time limit", 142, 142),
    ("flux", "flux-jobs: ERROR: JobID fuW9 unknown\n", "unknown", None, 1),
]


@pytest.mark.parametrize(("scheduler", "text", "outcome", "status", "exit_status"), STATES)
def test_states(scheduler: str, text: str, outcome: str | None, status: int | None, exit_status: int | None) -> None:
    state = QUEUES[scheduler].state(text)
    assert state is not None
    assert (state.outcome, state.status) == (outcome, status)
    if outcome is not None:
        assert state.exit_status == exit_status
    files = {"slurm": SLURM_FILE if "StdOut" in text else None, "pbs": PBS_FILE if "Output_Path" in text else None}
    assert state.output == files.get(scheduler)


@pytest.mark.parametrize("scheduler", QUEUES)
def test_other_output_is_no_state(scheduler: str) -> None:
    errors = ("", "slurm_load_jobs error: Unable to contact slurm controller\n", "qstat: cannot connect to server\n")
    assert [QUEUES[scheduler].state(text) for text in errors] == [None] * 3


def test_names_of_output_files() -> None:
    def files(scheduler: str, job_id: str, **options: str) -> list[str]:
        return QUEUES[scheduler].output_files(JobSpec(scheduler, ("python", "train.py"), **options), job_id)

    assert files("slurm", "3;west") == ["train-3.out"]
    assert files("slurm", "3", output="%u.out") == []
    assert files("lsf", "3", output="l/%J.out") == ["l/3.out"]
    assert QUEUES["flux"].job_id("ƒ2e\n") == "f2e", "not every encoding has ƒ"
    assert files("flux", "f2e", output="{{id}}.out") == ["ƒ2e.out", "f2e.out"]
    assert files("flux", "f2e") == ["train-ƒ2e.out", "train-f2e.out"]
    direct = [
        QUEUES["pbs"].late_output(JobSpec("pbs", ("a",), directive=(text,))) == "" for text in ("-k doe", "-l k=d")
    ]
    assert direct == [True, False], "PBS copies the output"
    assert QUEUES["slurm"].cancellation("3;west") == "scancel --clusters=west 3"
    assert QUEUES["slurm"].queries("3;west")[0] == ["scontrol", "--clusters=west", "show", "job", "3"]


# -- the command -----------------------------------------------------------------------------------------------------


class StandIns:
    """Commands of a scheduler: each call of a command runs its next line of bash, and the last one from then on."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.env = {"PATH": f"{self.bin}:/usr/bin:/bin", "CALLS": str(directory / "calls")}

    def add(self, name: str, *lines: str) -> None:
        cases = "".join(f"{number}) {line} ;;\n" for number, line in enumerate(lines[:-1]))
        (self.bin / name).write_text(
            f'#!/bin/bash\nn=$(grep -c "^{name}" "$CALLS" 2>/dev/null)\necho "{name} $*" >>"$CALLS"\n'
            f"case ${{n:-0}} in {cases}*) {lines[-1]} ;; esac\n"
        )
        (self.bin / name).chmod(0o755)

    def calls(self, name: str) -> list[str]:
        return [line for line in Path(self.env["CALLS"]).read_text().splitlines() if line.startswith(name)]


@pytest.fixture(name="stand_ins")
def _stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Stand-ins in PATH, an empty working directory, and short pauses."""
    made = StandIns(tmp_path)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in ("_FIRST_SECONDS", "_LONGEST_SECONDS", "_FOLLOW_SECONDS", "_QUIET_SECONDS"):
        monkeypatch.setattr(job_submission, name, 0.01)
    return made


def printing(text: str) -> str:
    return f"printf %s {shlex.quote(text)}"


COMMANDS = {  # the submitter and its output, the query and its output before, while and after the job runs
    "slurm": ("sbatch", "3\n", "scontrol", ["PENDING 0:0", "RUNNING 0:0", "FAILED 7:0"], "train-3.out"),
    "pbs": ("qsub", "12.pbs\n", "qstat", [pbs("Q"), pbs("R"), pbs("F", 7)], "logs"),
    "lsf": ("bsub", "Job <3> is submitted to default queue <q>.\n", "bjobs", ["PEND|-|-", "RUN|-|-", "EXIT|7|-"], ""),
    "flux": ("flux", "fuW9\n", "flux", ["SCHED;;", "RUN;;", "INACTIVE;FAILED;7"], ""),
}


@pytest.mark.parametrize("file", [(), ("-o", "the job.sh")], ids=["without a file", "with a file"])
@pytest.mark.parametrize("scheduler", COMMANDS)
def test_a_job_is_submitted_and_followed(
    scheduler: str, file: tuple[str, ...], stand_ins: StandIns, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    submitter, shown, query, answers, _ = COMMANDS[scheduler]
    log = Path("logs/train.out").absolute()
    if scheduler == "slurm":
        words = [answer.split() for answer in answers]
        answers = [slurm(state, code).replace(SLURM_FILE, str(log)) for state, code in words]
    answers = [answer.replace(PBS_FILE[:21] + "\n\t" + PBS_FILE[21:], str(log)) for answer in answers]
    submission = f"[ -p /dev/stdin -o $# -gt 1 ] && cat >{stand_ins.bin}/stdin; {printing(shown)}"
    lines = [
        printing(answers[0]),
        "exit 1",  # the scheduler does not answer once
        f"{printing(answers[1])}; printf 'a\\nb' >{log}",
        f"{printing(answers[1])}; printf 'c\\xff\\n' >>{log}",
        f"{printing(answers[2])}; printf 'end\\n' >>{log}",
    ]
    stand_ins.add(submitter, *([submission, *lines] if query == submitter else [submission]))
    if query != submitter:
        stand_ins.add(query, *lines)
    status = main(
        ["job", scheduler, "--submit", "--tail", "--output", "logs/train.out", *file, "--", "python", "train.py"]
    )
    out, err = capfdbinary.readouterr()
    job_id = {"slurm": "3", "pbs": "12.pbs", "lsf": "3", "flux": "fuW9"}[scheduler]
    assert (status, out) == (7, f"{job_id}\na\nbc".encode() + b"\xff\nend\n"), err
    messages = err.decode()
    assert f"mpicomm job {scheduler}: created the directory logs for the output\n" in messages
    assert f"waiting for job {job_id}; cancel it with: {QUEUES[scheduler].cancel} {job_id}\n" in messages
    assert f"mpicomm job {scheduler}: job {job_id} has failed (" in messages.splitlines()[-1]
    assert messages.endswith(f", exit status 7); its output is in {log}\n")
    name = "the job.sh" if file and scheduler != "lsf" else ""
    assert (
        stand_ins.calls(submitter)[0].split(" ", 1)[1].strip()
        == " ".join([*SCHEDULERS[scheduler].submit[1:], *QUEUES[scheduler].submit_options, name]).strip()
    )
    text = Path("the job.sh") if file else stand_ins.bin / "stdin"
    assert "    python train.py\n" in text.read_text()


EARLIER = [
    # (the scheduler, further arguments, what writes to the file)
    ("slurm", ["--output", "train.out"], ">"),
    ("slurm", ["--output", "%x.out"], ">"),
    ("slurm", ["--output", "train.out", "--directive=--open-mode=append"], ">>"),
    ("lsf", ["--output", "train.out"], ">>"),
]


@pytest.mark.parametrize(("scheduler", "options", "writes"), EARLIER)
def test_the_output_of_an_earlier_job_is_not_printed(
    scheduler: str, options: list[str], writes: str, stand_ins: StandIns, capfd: pytest.CaptureFixture[str]
) -> None:
    log = Path("train.out").absolute()
    log.write_text("old\n" * 9)
    if scheduler == "slurm":
        stand_ins.add("sbatch", "echo 3")
        before, after = (
            slurm(*state).replace(SLURM_FILE, str(log)) for state in (("RUNNING", "0:0"), ("COMPLETED", "0:0"))
        )
        stand_ins.add("scontrol", printing(before), printing(before), f"{printing(after)}; echo new {writes}{log}")
    else:
        stand_ins.add("bsub", "echo 'Job <3> is submitted to queue <q>.'")
        stand_ins.add("bjobs", "echo 'RUN|-|-'", "echo 'RUN|-|-'", f"echo 'DONE|-|-'; echo new {writes}{log}")
    assert main(["job", scheduler, "--submit", "--tail", *options, "--", "python", "train.py"]) == 0
    assert capfd.readouterr().out == "3\nnew\n"


def test_an_output_file_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    output = job_submission._OutputFile([log], {}, appends=False)

    def printed() -> str:
        output.print_new()
        return capfd.readouterr().out

    log.write_text("first\n")
    assert printed() == "first\n"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle")))
        assert printed() == ""
    log.write_text("first\nsecond\n")
    assert printed() == "second\n"
    log.write_text("again\n")
    assert printed() == "again\n", "truncated"
    (tmp_path / "new").write_text("another file\n")
    (tmp_path / "new").replace(log)
    assert printed() == "another file\n"

    late = iter(["", "late\n", "", "last\n"])  # NFS shows the end of the file some seconds after the end of the job

    def sleep(seconds: float) -> None:
        with log.open("a") as file:
            file.write(next(late, ""))
        clock.append(clock[-1] + seconds)

    clock = [0.0]
    monkeypatch.setattr(job_submission.time, "sleep", sleep)
    monkeypatch.setattr(job_submission.time, "monotonic", lambda: clock[-1])
    output.print_rest()
    assert capfd.readouterr().out == "late\nlast\n"


@pytest.mark.parametrize(("interruption", "message"), [(KeyboardInterrupt(), ""), (BrokenPipeError(), "nothing reads")])
def test_an_interruption_after_the_end_of_the_job(
    interruption: BaseException,
    message: str,
    stand_ins: StandIns,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_ins.add("sbatch", "echo 3")
    stand_ins.add("scontrol", printing(slurm("FAILED", "7:0")))

    def interrupted(_: object) -> None:
        raise interruption

    monkeypatch.setattr(job_submission._OutputFile, "print_rest", interrupted)
    assert main(["job", "slurm", "--submit", "--tail", "--", "python", "train.py"]) == 7
    error = capsys.readouterr().err
    assert message in error
    assert "continues" not in error
    assert "job 3 has failed (FAILED, exit status 7)" in error


def test_the_id_is_shown_if_standard_output_fails(stand_ins: StandIns) -> None:
    stand_ins.add("sbatch", "cat >/dev/null; echo 3")
    stand_ins.add("scontrol", printing(slurm("FAILED", "7:0")))
    command = f"{sys.executable} -m mpicomm job slurm --submit"
    program = "-- python train.py"
    outcome = run_command(["bash", "-c", f"{command} --tail {program} >&-"], env=stand_ins.env)
    assert (outcome.status, Path(stand_ins.env["CALLS"]).exists()) == (2, False), outcome
    assert "--tail prints the output of the job, and the standard output is closed; use --wait\n" in outcome.stderr
    for options, redirection, status in (("", ">/dev/full", 2), ("--wait", ">/dev/full", 7), ("", ">&-", 2)):
        outcome = run_command(["bash", "-c", f"{command} {options} {program} {redirection}"], env=stand_ins.env)
        assert outcome.status == status, outcome
        assert "submitted job 3, but cannot print its ID on standard output: " in outcome.stderr
        assert "; cancel it with: scancel 3\n" in outcome.stderr


def test_interrupting_the_command_leaves_the_job(stand_ins: StandIns) -> None:
    stand_ins.add("sbatch", "echo 3")
    stand_ins.add(
        "scontrol", printing(slurm("RUNNING", "0:0")), f"kill -INT $PPID; {printing(slurm('RUNNING', '0:0'))}"
    )
    words = [sys.executable, "-m", "mpicomm", "job", "slurm", "--submit", "--wait", "--", "python", "train.py"]
    outcome = run_command(words, env=stand_ins.env)
    assert (outcome.status, outcome.stdout) == (130, "3\n"), outcome
    assert outcome.stderr.endswith("mpicomm job slurm: interrupted; job 3 continues; cancel it with: scancel 3\n")


def test_a_closed_pipe_leaves_the_job(stand_ins: StandIns) -> None:
    stand_ins.add("sbatch", "echo 3")
    log = Path("log").absolute()
    running = slurm("RUNNING", "0:0").replace(SLURM_FILE, str(log))
    stand_ins.add("scontrol", f"{printing(running)}; seq 100000 >>{log}")
    command = (
        f"{sys.executable} -m mpicomm job slurm --submit --tail -- python train.py | head -n 2; echo ${{PIPESTATUS[0]}}"
    )
    outcome = run_command(["bash", "-c", command], env=stand_ins.env)
    assert outcome.stdout == "3\n1\n2\n", outcome
    assert "nothing reads the output; job 3 continues; cancel it with: scancel 3\n" in outcome.stderr


def test_a_scheduler_that_does_not_answer(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_submission, "_NO_ANSWER_SECONDS", 0.1)
    stand_ins.add("sbatch", "echo 3")
    stand_ins.add("scontrol", "echo slurm_load_jobs error: Unable to contact slurm controller; exit 1")
    assert main(["job", "slurm", "--submit", "--wait", "--", "python", "train.py"]) == 2
    assert "Slurm has not answered for 10 minutes; job 3 may still run" in capfd.readouterr().err


def test_a_job_that_the_scheduler_forgets(stand_ins: StandIns, capfd: pytest.CaptureFixture[str]) -> None:
    """A new job may be unknown at first; a PBS without a history forgets a job at its end."""
    stand_ins.add("qsub", "echo 12.pbs")
    no_history, unknown = (
        "echo qstat: PBS is not configured to maintain job history",
        "echo qstat: Unknown Job Id 12.pbs",
    )
    stand_ins.add("qstat", no_history, unknown, no_history, printing(pbs("R")), *[no_history, unknown] * 3, "exit 1")
    assert main(["job", "pbs", "--submit", "--wait", "--", "python", "train.py"]) == 1
    error = capfd.readouterr().err
    assert "job 12.pbs: running\n" in error
    assert "PBS no longer knows job 12.pbs: it has ended, with an unknown status; its output file /a/very/" in error


def test_the_commands_of_the_document(stand_ins: StandIns, capfd: pytest.CaptureFixture[str]) -> None:
    stand_ins.add("sbatch", "echo 12345", "echo 12346")
    log = Path("train-12345.out").absolute()
    states = [slurm("PENDING", "0:0", "Priority"), slurm("RUNNING", "0:0"), slurm("COMPLETED", "0:0")]
    first, *others = [printing(state.replace(SLURM_FILE, str(log))) for state in states]
    stand_ins.add("scontrol", f"{first}; echo epoch 1, loss 0.52 >>{log}", *others)
    sections = documents.read(LAUNCHING).sections
    consoles = next(section.consoles() for section in sections if section.title == "Submitting jobs")
    commands = [command for console in consoles for command in console]
    assert len(commands) == 3
    for command in commands:
        assert main(shlex.split(command.line)[1:]) == 0
        output = capfd.readouterr()
        printed = [*output.out.splitlines(), *output.err.splitlines()]
        assert [line for line in command.shown if not any(is_like(line, real) for real in printed)] == []
        assert len(printed) == len(command.shown)


FAILURES = [
    # (the output of sbatch and its status, the expected error)
    (
        "sbatch: error: invalid partition specified: p",
        1,
        "sbatch exited with status 1; correct what it reports, and run",
    ),
    (
        "Submitted with a hook",
        0,
        "Submitted with a hook\nmpicomm job slurm: sbatch printed no ID of a job; check with `squeue",
    ),
]


@pytest.mark.parametrize(("text", "status", "message"), FAILURES)
def test_a_failed_submission(
    text: str, status: int, message: str, stand_ins: StandIns, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = ">&2" if status else ""
    stand_ins.add("sbatch", f"{printing(text + chr(10))} {stream}; exit {status}")
    assert main(["job", "slurm", "--submit", "--wait", "--", "python", "train.py"]) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert text in output.err
    assert message in output.err


REFUSED = [
    (
        ["slurm", "--submit"],
        "no sbatch in PATH: submit on a host of Slurm, or write the script with -o FILE, and submit",
    ),
    (["slurm", "--wait"], "--wait needs --submit"),
    (["slurm", "--tail"], "--tail needs --submit"),
    (
        ["lsf", "--submit", "--tail", "--directive=-o my.out"],
        "--tail and --directive '-o my.out': --tail prints the file of --output; pass --output FILE in its place",
    ),
    (["flux", "--submit", "--tail", "--directive=-n 1 --output=my.out"], "--tail prints the file of --output; pass"),
    (
        ["slurm", "--submit", "--tail", "--output", "%u.out"],
        "the name of the file is known only when the job starts; put the ID of the job into it, as without --output",
    ),
    (
        ["flux", "--submit", "--output", "{{id}}/a.out"],
        "the directory {{id}} must exist when the job starts, and its na",
    ),
    (["flux", "--submit", "--tail", "--output", "{{name}}.out"], "--tail and --output {{name}}.out: the name of the f"),
    (["lsf", "--submit", "--tail", "--output", "%I.out"], "--tail and --output %I.out: the name of the file is known"),
    (
        ["pbs", "--submit", "--wait", "--array", "0-9"],
        "--wait and --array: it waits for one job; submit the array without",
    ),
    (
        ["slurm", "--submit", "--output", "%j/a.out"],
        "the directory %j must exist when the job starts, and its name is kno",
    ),
    (
        ["slurm", "--submit", "--output", "file/a.out"],
        "cannot create the directory file for the output: File exists; pass --output",
    ),
    (["kubernetes", "--image", "a", "--submit"], "unknown option --submit"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refused(
    arguments: list[str],
    message: str,
    stand_ins: StandIns,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("file").touch()
    monkeypatch.setenv("PATH", str(stand_ins.bin))
    try:
        status = main(["job", *arguments, "--", "python", "train.py"])
    except SystemExit as error:
        status = error.code
    output = capfd.readouterr()
    assert (status, output.out) == (2, "")
    assert message in output.err
    assert [path.name for path in Path().iterdir()] == ["file"]
