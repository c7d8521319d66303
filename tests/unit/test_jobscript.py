"""`mpicomm job`: the description of the job, read back from the directives of a script, and refused input."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomm.cli.main import main
from mpicomm.launch.jobscript import SCHEDULERS, JobSpec, KubernetesJob, options, quoting, script
from mpicomm.launch.jobscript.advice import advice
from tests import launching

PROGRAM = ("python", "train.py")
each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)


def directives(text: str) -> list[str]:
    """Return the directives before the first command, which the scheduler reads; assert that there are no others."""
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    first_command = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    found = [line for line in lines if re.match(r"\s*#(SBATCH\b|PBS\b|BSUB\b|\s*flux:)", line)]
    assert found == [line for line in lines[:first_command] if re.match(r"#(SBATCH|PBS|BSUB| flux:) ", line)]
    (beginning,) = {re.match(r"# flux:|#\w+", line)[0] for line in found}
    return [line.removeprefix(f"{beginning} ") for line in found]


def of_slurm(spec: JobSpec) -> dict[str, str]:
    options = dict(re.fullmatch(r"--([\w-]+)=?(.*)", each).groups() for each in directives(script(spec)))
    assert len(options) == len(directives(script(spec)))
    return options


def of_pbs(spec: JobSpec) -> dict[str, str]:
    """Return options by letter, and the resources of `-l` by name."""
    pairs = [each.split(" ", 1) for each in directives(script(spec))]
    found = {}
    for letter, value in pairs:
        name, text = value.split("=", 1) if letter == "-l" else (letter, value)
        assert name not in found
        found[name] = text
    return found


def chunk(spec: JobSpec) -> tuple[int, dict[str, str]]:
    nodes, *resources = of_pbs(spec)["select"].split(":")
    return int(nodes), dict(each.split("=") for each in resources)


def job(scheduler: str, *command: str, **options: object) -> JobSpec:
    return JobSpec(scheduler, command or PROGRAM, **options)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command and return its output."""
    assert main(["job", *arguments]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused, and return its error, which is one line."""
    error = launching.refusal(["job", *arguments], capsys)
    assert error.startswith(f"mpicomm job {arguments[0]}: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    return error.strip()


# -- the directives of a script --------------------------------------------------------------------------------------


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, object]:
    gpus = draw(st.integers(0, 8))
    ranks = draw(st.sampled_from([n for n in range(1, 33) if not gpus or gpus % n == 0 or n % gpus == 0]))
    memory = draw(st.sampled_from([None, "mem", "mem_per_cpu", *["mem_per_gpu"] * bool(gpus)]))
    size = {
        "nodes": draw(st.integers(1, 500)),
        "ranks_per_node": ranks,
        "gpus_per_node": gpus,
        "cpus_per_rank": draw(st.integers(1, 64)),
        "time": str(draw(st.integers(10, 9999))),
        "exclusive": draw(st.booleans()),
    }
    if memory:
        size[memory] = f"{draw(st.integers(1, 999))}{draw(st.sampled_from('KMGT'))}"
    return size


def without_suffix(text: str) -> tuple[int, str]:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()
    return int(number), unit


@settings(derandomize=True)
@given(sizes(), st.booleans())
def test_slurm_gets_a_task_for_each_rank(size: dict[str, object], has_torchrun: bool) -> None:
    spec = job("slurm", *(["torchrun", "x.py"] if has_torchrun else PROGRAM), **size)
    options = of_slurm(spec)
    assert int(options["nodes"]) == spec.nodes
    assert int(options["ntasks-per-node"]) == (1 if has_torchrun else spec.ranks_per_node)
    cores = int(options["ntasks-per-node"]) * int(options["cpus-per-task"])
    assert cores == spec.ranks_per_node * spec.cpus_per_rank
    assert int(options.get("gpus-per-node", 0)) == spec.gpus_per_node
    assert "gpus-per-task" not in options
    assert seconds(options["time"]) == 60 * int(spec.time)
    assert ("exclusive" in options) == spec.exclusive
    for name in ("mem", "mem-per-cpu", "mem-per-gpu"):
        assert options.get(name) == getattr(spec, name.replace("-", "_"))


def seconds(time: str) -> int:
    """Return the seconds of days-hours:minutes:seconds."""
    days, _, clock = time.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    assert hours < 24 or not days
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + rest


@settings(derandomize=True)
@given(sizes(), st.booleans())
def test_pbs_gets_a_chunk_for_each_node(size: dict[str, object], has_torchrun: bool) -> None:
    spec = job("pbs", *(["torchrun", "x.py"] if has_torchrun else PROGRAM), **size)
    options, (nodes, resources) = of_pbs(spec), chunk(spec)
    assert nodes == spec.nodes
    assert int(resources["mpiprocs"]) == (1 if has_torchrun else spec.ranks_per_node)
    assert int(resources["ncpus"]) == spec.ranks_per_node * spec.cpus_per_rank
    assert int(resources["ompthreads"]) == spec.cpus_per_rank
    assert int(resources.get("ngpus", 0)) == spec.gpus_per_node
    hours, minutes, rest = map(int, options["walltime"].split(":"))
    assert (3600 * hours + 60 * minutes + rest, minutes < 60, rest) == (60 * int(spec.time), True, 0)
    assert options["place"] == ("scatter:exclhost" if spec.exclusive else "scatter")
    memory = {"mem": 1, "mem_per_cpu": spec.ranks_per_node * spec.cpus_per_rank, "mem_per_gpu": spec.gpus_per_node}
    wanted = [(times, without_suffix(getattr(spec, name))) for name, times in memory.items() if getattr(spec, name)]
    assert ("mem" in resources) == bool(wanted)
    for times, (number, unit) in wanted:
        assert without_suffix(resources["mem"]) == (number * times, f"{unit.lower()}b")


@pytest.mark.parametrize(
    ("time", "wanted"),
    [
        ("1:00:00", 3600),
        ("0:00:30", 30),
        ("48:00:00", 172800),
        ("90", 5400),
        ("1-00:00:00", 86400),
        ("2-3", 183600),
        ("1-2:30", 95400),
        ("1-02:30:15", 95415),
    ],
)
def test_times(time: str, wanted: int) -> None:
    assert options.seconds_of(time, has_days=True) == wanted
    assert seconds(of_slurm(job("slurm", time=time))["time"]) == wanted


TEXTS = {  # the option, and its directives for Slurm, PBS, LSF and Flux; None where the scheduler has none
    "partition": ("gpu-large", "--partition=gpu-large", "-q gpu-large", "-q gpu-large", "--queue=gpu-large"),
    "account": ("proj_12.a", "--account=proj_12.a", "-A proj_12.a", "-P proj_12.a", "--bank=proj_12.a"),
    "array": ("1-9%2", "--array=1-9%2", "-J 1-9%2", "-J train[1-9]%2", None),
    "mail_user": ("me@example.org", "--mail-user=me@example.org", "-M me@example.org", "-u me@example.org", None),
    "mail_type": ("begin", "--mail-type=BEGIN", "-m b", "-B", None),
    "output": ("logs/%x-%j.out", "--output=logs/%x-%j.out", "-o logs/%x-%j.out", "-o logs/%x-%j.out", ...),
    "error": ("a.err", "--error=a.err", "-e a.err", "-e a.err", "--error=a.err"),
    "name": ("first-run", "--job-name=first-run", "-N first-run", "-J first-run", "--job-name=first-run"),
    "exclusive": (True, "--exclusive", "-l place=scatter:exclhost", "-x", "--exclusive"),
    "dependency": (
        "afterok:12:13",
        "--dependency=afterok:12:13",
        "-W depend=afterok:12:13",
        '-w "done(12) && done(13)"',
        "--dependency=afterok:12 --dependency=afterok:13",
    ),
    "qos": ("long", "--qos=long", None, None, None),
    "constraint": ("[a100|h100]&nvlink", "--constraint=[a100|h100]&nvlink", None, None, None),
    "signal": ("USR2@60", "--signal=USR2@60", None, "-wa USR2", None),
    "project": ("abc1", None, "-P abc1", None, None),
}


@each_scheduler
@pytest.mark.parametrize("field", TEXTS)
def test_an_option_is_a_directive(scheduler: str, field: str) -> None:
    value, *written = TEXTS[field]
    expected = written[list(SCHEDULERS).index(scheduler)]
    if expected is None:
        flag = field.replace("_", "-")
        with pytest.raises(ValueError, match=f"--{flag} is valid only for (Slurm|PBS)( and LSF| and PBS and LSF)?: "):
            job(scheduler, **{field: value})
        return
    if expected is ...:
        expected = f"--{field}={value}"
    before, after = directives(script(job(scheduler))), directives(script(job(scheduler, **{field: value})))
    assert expected not in before
    assert after.count(expected) == 1


def test_a_file_of_flux_has_its_own_patterns() -> None:
    assert "--output=logs/{{id}}.{{name}}" in directives(script(job("flux", output="logs/{{id}}.{{name}}")))
    for name in ("{{id}", "{{$HOME}}", "-{{id}}"):
        with pytest.raises(ValueError, match="--output "):
            job("flux", output=name)
    with pytest.raises(ValueError, match=r"--error '\{\{id\}\}'"):
        job("slurm", error="{{id}}")


@pytest.mark.parametrize("text", ["64G", "64Gi", "64GiB", "64GB", "64g", "64gb"])
def test_units_of_memory_are_translated(text: str) -> None:
    assert of_slurm(job("slurm", mem=text))["mem"] == "64G"
    assert chunk(job("pbs", mem_per_cpu=text, cpus_per_rank=2))[1]["mem"] == "128gb"
    assert "-R rusage[mem=64GB/host]" in of_lsf(job("lsf", mem=text))
    kubernetes = KubernetesJob(PROGRAM, image="a", mem=text)
    assert script(kubernetes).count('memory: "64Gi"') == 2


def of_lsf(spec: JobSpec) -> list[str]:
    return directives(script(spec))


def test_lsf_gets_a_slot_for_each_rank() -> None:
    spec = job("lsf", nodes=3, ranks_per_node=2, cpus_per_rank=4, gpus_per_node=2, mem_per_cpu="2G", time="1:00:30")
    expected = ["-n 6", "-R span[ptile=2]", "-R affinity[core(4)]", "-gpu num=2", "-R rusage[mem=16GB/host]", "-W 1:01"]
    assert set(expected) <= set(of_lsf(spec))
    torchrun = job("lsf", "torchrun", "x.py", nodes=3, ranks_per_node=2, cpus_per_rank=4)
    assert {"-n 3", "-R span[ptile=1]", "-R affinity[core(8)]"} <= set(of_lsf(torchrun))
    warned = job("lsf", requeue=True, file="x.lsf", signal="USR1@61")
    assert {"-wa USR1", "-wt 2"} <= set(of_lsf(warned)), "whole minutes"
    assert set(of_lsf(job("lsf", mail_user="me", mail_type="ALL"))) >= {"-u me", "-B", "-N"}


@settings(derandomize=True)
@given(sizes(), st.booleans())
def test_flux_gets_a_slot_for_each_node(size: dict[str, object], has_torchrun: bool) -> None:
    size = {name: value for name, value in size.items() if not name.startswith("mem")}
    spec = job("flux", *(["torchrun", "x.py"] if has_torchrun else PROGRAM), **size)
    options = dict(each.removeprefix("--").partition("=")[::2] for each in directives(script(spec)))
    assert int(options["nodes"]) == int(options["nslots"]) == spec.nodes
    assert int(options["cores-per-slot"]) == spec.ranks_per_node * spec.cpus_per_rank
    assert int(options.get("gpus-per-slot", 0)) == spec.gpus_per_node
    assert options["time-limit"] == f"{60 * int(spec.time)}s"
    assert ("exclusive" in options) == spec.exclusive


OF_USERS = ("-l filesystems=home:eagle", '--comment="a b"', "--view=$HOME `x` \\ {{ job }}", " -k doe")


@each_scheduler
def test_directives_of_the_user_are_the_last_ones_and_unchanged(scheduler: str) -> None:
    before, text = directives(script(job(scheduler))), script(job(scheduler, directive=OF_USERS))
    assert directives(text) == [*before, *OF_USERS]
    interactive = text.partition("# Interactively:\n")[2].partition("\n")[0]
    assert interactive.removesuffix(f" bash {SCHEDULERS[scheduler].file}").endswith(" ".join(OF_USERS))


PBS_RESOURCES = [  # directives, our resources that are left, whether PBS knows the number of ranks
    ((), ["select", "place", "walltime"], True),
    (("-l filesystems=home", "-q a-l select=3", "-W x=-lselect=1"), ["select", "place", "walltime"], True),
    (("-l select=2:system=polaris",), ["place", "walltime"], False),
    (("-lselect=2:mpiprocs=4+1:ncpus=2",), ["place", "walltime"], True),
    (("-l place=pack",), ["select", "walltime"], True),
    (("-q x -l walltime=2:00:00,place=pack",), ["select"], True),
    (("-l ncpus=48,walltime=1:00:00 -l mem=4GB",), [], False),
    (("-l nodes=2:ppn=4",), ["walltime"], False),
]


@pytest.mark.parametrize(("lines", "left", "knows_ranks"), PBS_RESOURCES)
def test_a_resource_in_a_directive_replaces_that_of_pbs(
    lines: tuple[str, ...], left: list[str], knows_ranks: bool
) -> None:
    text = script(job("pbs", nodes=2, ranks_per_node=4, gpus_per_node=4, directive=lines))
    ours = [line for line in directives(text) if line not in lines]
    assert [line[3:].partition("=")[0] for line in ours if line.startswith("-l ")] == left
    assert (" run -n 8 -- " in text) != knows_ranks
    assert ("for each line of PBS_NODEFILE" in text) == knows_ranks
    assert ("Unknown resource: ngpus" in text) == ("select" in left)


def test_consequences_of_options() -> None:
    assert of_slurm(job("slurm"))["output"] == "%x-%j.out"
    assert of_slurm(job("slurm", array="1,3,5-9:2%1"))["output"] == "%x-%A_%a.out"
    assert of_slurm(job("slurm", mail_user="me"))["mail-type"] == "END,FAIL"
    assert of_pbs(job("pbs", mail_user="me"))["-m"] == "ea"
    assert of_pbs(job("pbs", mail_type="ALL"))["-m"] == "abe"
    assert of_pbs(job("pbs"))["-j"] == "oe"
    assert "-j" not in of_pbs(job("pbs", error="a.err"))
    requeued = of_slurm(job("slurm", requeue=True))
    assert (requeued["signal"], requeued["open-mode"]) == ("USR1@180", "append")
    assert of_slurm(job("slurm", requeue=True, signal="TERM@60"))["signal"] == "TERM@60"
    assert "--mpi" not in script(job("slurm")), "mpicomm run detects the MPI of the environment"
    assert "ngpus" not in script(job("pbs"))
    assert "Unknown resource: ngpus" in script(job("pbs", gpus_per_node=1))
    assert "--gpus-per-task" not in script(job("slurm", gpus_per_node=1))


@each_scheduler
def test_the_binding_is_passed_to_mpicomm_run(scheduler: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, scheduler, "--bind", "gpu", "--env", "A=1", "--", "python", "train.py")
    start = next(line for line in text.splitlines() if line.startswith("python -m mpicomm run"))
    assert " --bind gpu --env A -- " in start
    assert "--bind" not in script(job(scheduler))


@each_scheduler
def test_ranks_start_with_the_mpi_of_their_python(scheduler: str) -> None:
    text = script(job(scheduler, "/opt/env/bin/python3.12", "train.py"))
    assert re.search(r"\n/opt/env/bin/python3.12 -m mpicomm run .*\\\n    /opt/env/bin/python3.12 train.py\n", text)
    assert re.search(r"\nmpicomm run .*\\\n    ./solver\n", script(job(scheduler, "./solver")))


@each_scheduler
def test_ranks_start_by_the_launcher_of_the_user(scheduler: str) -> None:
    for launcher in SCHEDULERS[scheduler].launchers:
        text = script(job(scheduler, launcher=launcher))
        assert text.count(f"\npython -m mpicomm run --launcher {launcher} ") == 1
    assert "--launcher" not in script(job(scheduler))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "train.py"), "train"),
        (("python", "-u", "a/b/learn.py", "--seed", "1.py"), "learn"),
        (("python", "-m", "mpicomm.examples.ddp"), "ddp"),
        (("torchrun", "-m", "mpicomm.examples.ddp"), "ddp"),
        (("python", "-m", "torch.distributed.run", "x.py"), "x"),
        (("./my program",), "my_program"),
        (("/opt/bin/solver", "-m", "1"), "solver"),
        (("-",), "_"),
        (("é" * 99,), "_" * 64),
    ],
)
@each_scheduler
def test_a_job_has_the_name_of_its_program(scheduler: str, command: tuple[str, ...], name: str) -> None:
    assert directives(script(job(scheduler, *command)))[0] in (f"--job-name={name}", f"-N {name}", f"-J {name}")


@pytest.mark.parametrize(("ranks", "gpus", "text"), [(4, 4, ""), (4, 2, "2 ranks share each GPU"), (2, 4, "2 of 4")])
@each_scheduler
def test_other_numbers_of_gpus_are_explained(scheduler: str, ranks: int, gpus: int, text: str) -> None:
    written = script(job(scheduler, ranks_per_node=ranks, gpus_per_node=gpus))
    assert text in written
    assert ("share" in written, "idle" in written) == ("share" in text, " of " in text)


def test_words_are_quoted_on_one_line() -> None:
    assert quoting.quoted("a\nb'\\é\x85") == r"$'a\012b\'\\é\302\205'"
    assert quoting.joined(["a b", "c", "x$INDEX.y z"], "INDEX") == """'a b' c x"$INDEX"'.y z'"""


def test_interactively_it_is_the_same_job(capsys: pytest.CaptureFixture[str]) -> None:
    options = shlex.split("--nodes 2 --gpus-per-node 4 --time 30 --partition p --account a --exclusive --mem 4G")
    text = run(capsys, "slurm", *options, "--constraint", "a&b", "--qos", "q", "--", *PROGRAM)
    line = next(line for line in text.splitlines() if line.startswith("#     salloc "))
    salloc, *resources, bash, _ = shlex.split(line[1:])
    assert (salloc, bash) == ("salloc", "bash")
    others = {"--job-name=train", "--output=%x-%j.out"}
    assert set(directives(text)) - others == set(resources)

    text = run(capsys, "pbs", *options, "--", *PROGRAM)
    line = next(line for line in text.splitlines() if line.startswith("#     qsub -I "))
    assert set(directives(text)) - {"-N train", "-j oe"} == set(re.findall(r"-\w \S+", line.partition("-I ")[2]))

    text = run(capsys, "lsf", *options, "--", *PROGRAM)
    line = next(line for line in text.splitlines() if line.startswith("#     bsub -Is "))
    assert shlex.split(line[1:])[2:-2] == [word for each in directives(text)[1:-1] for word in each.split()]

    text = run(capsys, "flux", *options[:-2], "--", *PROGRAM)
    line = next(line for line in text.splitlines() if line.startswith("#     flux alloc "))
    assert shlex.split(line[1:])[2:-2] == directives(text)[1:-1]


# -- values that must not break a script -----------------------------------------------------------------------------

NASTY = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("\n\r'\"\\$`;#& "))
FREE = ("name", "partition", "account", "array", "mail_user", "output", "error", "mem", "time")  # of both schedulers


@each_scheduler
@settings(derandomize=True, max_examples=300)
@given(field=st.sampled_from(FREE), value=NASTY)
def test_a_value_is_refused_or_cannot_break_the_script(scheduler: str, field: str, value: str) -> None:
    plain = script(job(scheduler, name="x"))
    try:
        spec = job(scheduler, **{"name": "x", field: value})
    except ValueError as error:
        refused = str(error)
        assert refused.startswith(f"--{field.replace('_', '-')} ")
        assert refused.isprintable()
        return
    text = script(spec)
    assert len(text.split("\n\n", 1)[0].splitlines()) <= len(plain.split("\n\n", 1)[0].splitlines()) + 2
    assert all(re.fullmatch(r"[ -~]+", each) and not re.search(r"[$#`'\"\\;]", each) for each in directives(text))
    assert text.split("\n\n", 1)[1] == plain.split("\n\n", 1)[1]


@each_scheduler
@pytest.mark.parametrize("field", [*FREE, "module", "chdir", "venv", "module_use"])
@pytest.mark.parametrize("value", ["", "~/x", "$HOME/x", "/x/$USER", "/x/${USER}/y", "/$(id)", "-"])
def test_values_that_would_need_expansion_are_refused(scheduler: str, field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^--{field.replace('_', '-')} "):
        job(scheduler, **{field: (value,) if field.startswith("module") else value})


# -- advice ----------------------------------------------------------------------------------------------------------

CORES = (
    "each rank has one core beside its GPU, which the workers of a DataLoader need, too; request more, for example wi"
)
ADVICE = [
    # (the options, the command, the expected advice)
    ({"gpus_per_node": 4}, PROGRAM, CORES),
    ({"gpus_per_node": 4, "cpus_per_rank": 2}, PROGRAM, None),
    ({"gpus_per_node": 4, "exclusive": True}, PROGRAM, None),
    ({"gpus_per_node": 4, "directive": ("--cpus-per-gpu=8",)}, PROGRAM, None),
    ({}, PROGRAM, None),
    (
        {},
        ("python", "a b.py", "--data", '$TMPDIR/"d"', "${HOME}"),
        "the program gets $TMPDIR unchanged; to expand it on each rank: -- bash -c 'exec python '",
    ),
    ({}, ("python", "x.py", "^a$", "$1", "$(id)", "100 $"), None),
    ({}, ("/bin/bash", "-c", "echo $HOME"), None),
    ({}, ("bash", "-x", "-euc", "echo $HOME"), None),
    ({}, ("bash", "-c", "echo $1", "bash", "$HOME"), "the program gets $HOME unchanged"),
    ({}, ("bash", "run.sh", "$TMPDIR/data"), "the program gets $TMPDIR unchanged"),
    ({}, ("x", "${TMPDIR:-/tmp}/data"), "the program gets ${TMPDIR:-/tmp} unchanged"),
    ({"array": "1-9"}, ("python", "x.py", "$SLURM_ARRAY_TASK_ID", "${SLURM_ARRAY_TASK_ID}"), None),
    ({"array": "1-9"}, ("x", "$SLURM_ARRAY_TASK_ID/$USER"), "the program gets $USER unchanged"),
    (
        {"env": ("A=$HOME/x",)},
        PROGRAM,
        "--env A=***: the ranks get $HOME unchanged; to expand it in the job, set the var",
    ),
]


@pytest.mark.parametrize(("options", "command", "text"), ADVICE)
def test_advice(options: dict[str, object], command: tuple[str, ...], text: str | None) -> None:
    sentences = advice(job("slurm", *command, **options))
    assert len(sentences) == (text is not None)
    assert all(sentence.startswith(text) for sentence in sentences)


def test_the_advised_command_expands_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["printf", "%s|", "a b", '$A/"`\\', "${A}", "'$$'", "${A:-}$(id)$1"]
    assert main(["job", "slurm", "--", *words]) == 0
    command = shlex.split(capsys.readouterr().err.partition("on each rank: -- ")[2])
    outcome = launching.run_command(command, env={"A": "x y"})
    assert outcome.stdout == "a b|x y/\"`\\|x y|'$$'|x y$(id)$1|"


# -- refused input ---------------------------------------------------------------------------------------------------

REFUSED = [
    # (the options, the program, the expected part of the error)
    ("slurm --nodez 2", "python x.py", "unknown option --nodez; did you mean --nodes?"),
    ("slurm --node 2", "python x.py", "did you mean --nodes"),
    ("slurm --gpus-per-nod=2", "python x.py", "unknown option --gpus-per-nod; did you mean --gpus-per-node"),
    ("pbs --xyzzy", "python x.py", "unknown option --xyzzy; expected one of --help --nodes --ranks-per-node"),
    ("slurm --nodes 2 python x.py", "", "unexpected argument 'python'; put the program and its arguments after two"),
    ("slurm --nodes 2", "", "missing program; append it after two dashes: -- python train.py"),
    ("slurm --nodes two", "python x.py", "--nodes: invalid int value: 'two'"),
    ("slurm --nodes 0", "python x.py", "--nodes 0: expected 1 or more"),
    ("slurm --ranks-per-node -1", "python x.py", "--ranks-per-node -1: expected 1 or more"),
    ("slurm --gpus-per-node -1", "python x.py", "--gpus-per-node -1: expected 0 or more"),
    ("pbs --ranks-per-node 3 --gpus-per-node 4", "python x.py", "for one GPU per rank use --ranks-per-node 4 or"),
    ("slurm --mem 4G --mem-per-cpu 1G", "python x.py", "--mem and --mem-per-cpu contradict each other: give one of"),
    (
        "pbs --mem-per-gpu 4G --mem-per-cpu 1G --gpus-per-node 1",
        "python x.py",
        "give one of --mem, --mem-per-cpu, --me",
    ),
    ("slurm --mem-per-gpu 4G", "python x.py", "--mem-per-gpu needs --gpus-per-node"),
    ("slurm --mem 4", "python x.py", "--mem '4': expected a number with its unit, K, M, G or T: 4G"),
    ("pbs --mem 0", "python x.py", "--mem '0': expected"),
    ("slurm --time 1:30", "python x.py", "is ambiguous, minutes:seconds or hours:minutes; expected hours:minutes:s"),
    ("slurm --time 1:60:00", "python x.py", "--time '1:60:00': expected hours:minutes:seconds (1:00:00), days-hours"),
    ("slurm --time 0", "python x.py", "--time 0 must be positive; expected hours:minutes:seconds"),
    ("slurm --time UNLIMITED", "python x.py", "--time 'UNLIMITED': expected"),
    ("pbs --time 1-12:00:00", "python x.py", "only Slurm accepts days; use --time 36:00:00"),
    (
        "slurm --requeue --time 2",
        "python x.py",
        "receive it as they start; expected a longer --time, or a later signal, --signal USR1@30",
    ),
    ("slurm --signal B:USR1@60", "python x.py", "--signal 'B:USR1@60': expected USR1, USR2 or TERM, @ and seconds"),
    ("slurm --signal INT@60", "python x.py", "expected USR1, USR2 or TERM"),
    ("pbs --signal USR1@60", "python x.py", "--signal is valid only for Slurm and LSF: elsewhere mpicomm.T"),
    ("pbs --qos long", "python x.py", "--qos is valid only for Slurm: elsewhere use --queue"),
    (
        "slurm --dependency 12",
        "python x.py",
        "--dependency '12': expected afterok, afternotok or afterany, and the IDs of",
    ),
    (
        "slurm --dependency afterok:1;west",
        "python x.py",
        "cluster of Slurm, afterok:123 and --directive=--clusters=west",
    ),
    (
        "slurm --setup a\udcff --submit",
        "python x.py",
        "the script would not be UTF-8; correct the option with this line: 'a\\udcff'",
    ),
    ("slurm --dependency after:12", "python x.py", "--dependency 'after:12': expected afterok, afternotok or"),
    (
        "pbs --dependency afterok:1 --requeue",
        "python x.py",
        "when PBS may no longer know the other jobs; remove one of",
    ),
    ("slurm --umask 9", "python x.py", "--umask '9': expected three octal digits: 027"),
    (
        "slurm --setup #SBATCH",
        "python x.py",
        "--setup '#SBATCH': expected a command of bash on one line, without # at its",
    ),
    (
        "slurm --chdir /x/$USER",
        "python x.py",
        "which are not expanded, and without - at its start; let your shell expand it: ",
    ),
    ("slurm --chdir $SLURM_ARRAY_TASK_ID", "python x.py", "$SLURM_ARRAY_TASK_ID is not set in this job; add --array"),
    ("slurm --setup a\\", "python x.py", "a command of bash on one line, without # at its start and \\ at its end"),
    ("flux --mem 4G", "python x.py", "--mem is valid only for Slurm and PBS and LSF: Flux does not schedule memory"),
    ("flux --requeue", "python x.py", "--requeue: the job submits its script again; add -o FILE, for example -o job.f"),
    ("lsf --no-env FLUX_X", "python x.py", "would remove FLUX_X, which the launcher of the ranks needs"),
    ("flux --no-env *_TASK_ID", "python x.py", "would remove SLURM_ARRAY_TASK_ID, which the launcher of the"),
    ("lsf --array 0-9", "python x.py", "--array 0-9: LSF accepts indices from 1"),
    ("lsf --array 1-9 --requeue", "python x.py", "LSF cannot resubmit one job of an array"),
    ("pbs --array 0-9", "python x.py $SLURM_ARRAY_TASK_ID", "not set in this job; use $PBS_ARRAY_INDEX"),
    ("pbs", "python x.py ${PBS_ARRAY_INDEX}", "$PBS_ARRAY_INDEX is not set in this job; add --array, or remove it"),
    ("slurm --mail-type sometimes", "python x.py", "--mail-type 'SOMETIMES': expected one of NONE, BEGIN, END, FAIL"),
    ("pbs --mail-type requeue", "python x.py", "--mail-type 'REQUEUE': expected one of NONE, BEGIN, END, FAIL, ALL"),
    ("slurm --array 5-2", "python x.py", "--array 5-2: the range 5-2 ends before it begins"),
    ("slurm --array a", "python x.py", "--array 'a': expected 0-9, 0-9%2"),
    ("slurm --array 0-9 --output all.out", "python x.py", "all jobs of the array would write to this file; add %"),
    ("pbs --array 1,3", "python x.py", "PBS accepts one range of two jobs or more"),
    ("pbs --array 3-3", "python x.py", "PBS accepts one range of two jobs or more"),
    ("pbs --array 0-9 --requeue", "python x.py", "PBS cannot resubmit one job of an array; remove one of the two"),
    ("pbs --requeue --output a.out", "python x.py", "would overwrite this file; use a directory, a.out/"),
    ("slurm --env 1A=2", "python x.py", "--env '1A=***': expected NAME=VALUE"),
    ("slurm --no-env A=1", "python x.py", "--no-env A=***: expected the name of a variable, or a pattern such as 'NC"),
    (
        "slurm --no-env *",
        "python x.py",
        "would remove FLUX_URI, LSB_JOBID, LSB_JOBINDEX, ..., which the launcher of the",
    ),
    ("pbs --no-env PBS_ARRAY_*", "python x.py", "--no-env PBS_ARRAY_* would remove PBS_ARRAY_*, PBS_ARRAY_INDEX, wh"),
    (
        "slurm --no-env SLURM_ARRAY_TASK_ID",
        "python x.py",
        "would remove SLURM_ARRAY_TASK_ID, which the launcher of the",
    ),
    ("slurm --env A=1 --no-env A*", "python x.py", "--env A and --no-env contradict each other for this variable"),
    ("slurm --env A", "torchrun x.py", "--env A: torchrun starts without mpicomm run; expected A=VALUE"),
    ("slurm --no-env A", "torchrun x.py", "--no-env is an option of mpicomm run, without which torchrun starts; use -"),
    (
        "pbs --directive=-lselect=9:ngpus=4",
        "python x.py",
        "--directive requests 9 nodes, and --nodes 1; pass --nodes 9",
    ),
    ("pbs --launcher srun", "python x.py", "--launcher in PBS 'srun': expected one of pals, mpiexec"),
    ("slurm --launcher srun", "torchrun x.py", "--launcher does not work with torchrun, which starts the ranks of"),
    ("slurm", "ibrun python x.py", "remove ibrun and its options"),
    ("slurm --max-restarts 0 --requeue", "python x.py", "--max-restarts 0: expected 1 or more"),
    ("slurm", "srun python x.py", "the script starts the ranks itself: remove srun and its options"),
    ("pbs", "/opt/mpi/bin/mpirun -n 4 python x.py", "remove mpirun and its options"),
    ("slurm", "mpicomm run x.py", "the script starts the ranks itself"),
    ("slurm", "A=1 python x.py", "expected a program, got A=***; set a variable with --env A=***"),
    ("slurm", "python x.py : python y.py", "the argument : would start another program"),
    (
        "pbs --mem-per-cpu 4G --directive -lselect=2",
        "python x.py",
        "argument --directive: expected one argument; write -",
    ),
    (
        "pbs --mem-per-cpu 4G --directive=-lselect=2",
        "python x.py",
        "--mem-per-cpu is a part of `-l select`, which --directive replaces; write it in the directive, and remove --m",
    ),
    ("pbs --exclusive --directive=-lncpus=2", "python x.py", "--exclusive is a part of `-l place`, which --directive"),
    ("slurm --launcher-arg", "python x.py", "--launcher-arg=VALUE, with =, for a value that begins with -"),
    ("slurm --launcher-arg=", "python x.py", "--launcher-arg '': expected an argument of the launcher"),
    ("slurm --launcher-arg=-u", "torchrun x.py", "which does not start torchrun; pass its options directly: -- torchr"),
    ("kubernetes --directive=-x", "python x.py", "unknown option --directive; expected one of"),
    ("slurm", "torchrun", "torchrun needs a program"),
    ("slurm", "torchrun --nnodes=2 x.py", "the script passes --nnodes=2 to torchrun, from --nodes"),
    ("pbs", "torchrun --nproc_per_node 2 x.py", "the script passes --nproc_per_node to torchrun"),
    (
        "slurm --bind gpu",
        "torchrun x.py",
        "--bind is an option of `mpicomm run`, and torchrun starts the ranks; use --",
    ),
    ("slurm --requeue", "torchrun x.py", "--requeue does not work with torchrun, which runs without MPI and turns"),
]


@pytest.mark.parametrize(("options", "program", "text"), [pytest.param(*e, id=f"{e[0]} -- {e[1]}") for e in REFUSED])
def test_an_error_is_one_line(options: str, program: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*options.split(), *["--"] * bool(program), *program.split()]
    assert text in refusal(capsys, *arguments)


@pytest.mark.parametrize("text", ["", " ", "-l a\n-l b", "-l a\r", "#PBS -l a", " # flux: -l a"])
@each_scheduler
def test_a_directive_is_one_line_without_its_prefix(
    scheduler: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, scheduler, f"--directive={text}", "--", *PROGRAM)
    assert error.endswith(
        f"--directive {text!r}: expected one line, without #SBATCH, #PBS, #BSUB or # flux: at its start"
    )


def test_a_scheduler_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["job"], ["job", "sge", "--", "python"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "SCHEDULER" in capsys.readouterr().err
    with pytest.raises(ValueError, match="scheduler 'sge': expected one of slurm, pbs, lsf, flux"):
        JobSpec("sge", PROGRAM)


# -- the command -----------------------------------------------------------------------------------------------------


def test_arguments_after_the_dashes_are_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "slurm", "--nodes", "3", "--", "python", "x.py", "--nodes", "7", "--", "-o", "y")
    assert "    python x.py --nodes 7 -- -o y\n" in text
    assert "--nodes=3" in directives(text)


def test_the_default_is_a_rank_for_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--ntasks-per-node=4" in directives(
        run(capsys, "slurm", "--gpus-per-node", "4", "--cpus-per-rank", "2", "--", *PROGRAM)
    )
    assert "--ntasks-per-node=1" in directives(run(capsys, "slurm", "--", *PROGRAM))


@pytest.mark.parametrize(
    ("scheduler", "submit"), [("slurm", "sbatch"), ("pbs", "qsub"), ("lsf", "bsub <"), ("flux", "flux batch")]
)
def test_a_script_is_written(scheduler: str, submit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "the job.sh"
    output = run(capsys, scheduler, "-o", str(file), "--", *PROGRAM)
    assert output == f"wrote {file}; submit it: {submit} '{file}'\n"
    text = file.read_text()
    assert f"#     {submit} '{file}'\n" in text
    assert f"bash '{file}'\n" in text
    assert f"#     mpicomm job {scheduler} -o '{file}' -- python train.py\n" in text


def test_a_script_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    file, template = tmp_path / "job.sh", tmp_path / "own.j2"
    template.write_text("# caf\u00e9\n", encoding="utf-8")
    command = ["-m", "mpicomm", "job", "slurm", "--template", str(template), "-o", str(file), "--", *PROGRAM]
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    outcome = launching.run_alone(command, env=environ)
    assert outcome.status == 0, outcome
    assert file.read_bytes() == "# caf\u00e9\n".encode()


def test_only_a_script_of_this_command_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.touch()
    for nodes in "12":
        run(capsys, "slurm", "--nodes", nodes, "-o", str(file), "--", *PROGRAM)
        assert f"--nodes={nodes}\n" in file.read_text()
    file.write_text("precious\n")
    error = refusal(capsys, "slurm", "-o", str(file), "--", *PROGRAM)
    assert error.endswith(f"-o {file}: this file is not a script of mpicomm job; remove it, or use another name")
    assert file.read_text() == "precious\n"


@pytest.mark.parametrize(("name", "text"), [("no/a.out", "run mkdir -p no\n"), ("%j/a", "known only then"), ("a", "")])
def test_a_missing_directory_of_the_output_is_named(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["job", "slurm", "--output", name, "--", *PROGRAM]) == 0
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == bool(text)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refusal(capsys, "slurm", "-o", str(tmp_path / "gone" / "job.sh"), "--", *PROGRAM)


@each_scheduler
def test_help_names_every_field(scheduler: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["job", scheduler, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    fields = set(JobSpec.__dataclass_fields__) - {"scheduler", "command", "file", "made_by"}
    assert [field for field in fields if f"--{field.replace('_', '-')}" not in text] == []
