"""Every example runs with the commands in its docstring, and prints the output shown there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.launching import ROOT, Outcome, command_line, run_command

EXAMPLES = ROOT / "examples"
INTEGRATIONS = EXAMPLES / "integrations"  # tests/integrations runs these
DEPENDS_ON_MPI = {"p2p.py", "collectives.py", "overlap.py", "async_checkpoint.py"}
FAILING = {"mpirun -n 4 python -m mpicomm.examples.spawn"}
WITH_A_KILL = "mpicomm run -n 5 --spares 1 -m mpicomm.examples.trainer --dir runs/killed --kill 60"
TRAINED = {"trainer.py", "char_lm.py", "fsdp.py", "checkpoint_interval.py"}
LOADING = " --load"  # the end of a command that loads the checkpoints of the command before it
FIGURES = re.compile(r"epoch \d+:|test accuracy|held-out|rank \d holds")
# A Gloo thread that requests the GIL while Python exits aborts the process: one run in twelve on a loaded machine.
# bootstrap() waits for that thread at exit; a script without mpicomm must be run again.
ABORTED, TRIES = "terminate called without an active exception", 6


def sessions() -> list[tuple[str, str, str]]:
    """Return the file, the command and the output of each session in a docstring.

    `tests/integrations` runs the examples of other libraries.
    """
    found = []
    for path in sorted({*EXAMPLES.rglob("*.py")} - {*INTEGRATIONS.rglob("*.py")}):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        for command, output in re.findall(r"^    \$ (.+)\n((?:    (?!\$ ).*\n?)*)", docstring, re.MULTILINE):
            found.append((str(path.relative_to(EXAMPLES)), command, output))
    return found


@functools.cache
def run(command: str) -> Outcome:
    """Run a command of a docstring, with the programs and the files of this checkout."""
    for _ in range(TRIES if "before.py" in command else 1):
        outcome = run_command(command_line(command))
        if ABORTED not in outcome.stderr:
            break
    return outcome


def form(output: str) -> list[str]:
    """Return the reproducible part of an output: the lines in any order, without measured numbers and the machine."""
    output = re.sub(r"(rank \d+ of \d+ on) .*", r"\1 ...", output)
    output = re.sub(r" *\d+\.\d+", " #.#", output)  # including the spaces that align columns
    return sorted(line.strip() for line in output.splitlines())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a temporary directory, in which runs leave their checkpoints."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("file", "command", "output"),
    [
        pytest.param(*each, id=each[1], marks=pytest.mark.each_mpi if each[0] in DEPENDS_ON_MPI else ())
        for each in sessions()
    ],
)
def test_the_example_works_as_its_docstring_describes(file, command, output):
    if command.endswith(LOADING):
        (saving,) = [other for path, other, _ in sessions() if path == file and not other.endswith(LOADING)]
        run_command(command_line(saving))  # in this test's directory
    outcome = run(command)
    assert outcome.status == (1 if command in FAILING or command.startswith("diff") else 0), outcome
    if command in FAILING:  # the launcher also writes to standard error
        assert set(form(output)) <= set(form(outcome.stderr.replace("PMI_RANK", "OMPI_COMM_WORLD_RANK"))), outcome
    elif command == WITH_A_KILL:  # its docstring shows the lines about the failure only
        assert re.search(
            r"^rank 0 on .* failed: .*; continued from step 59 on 4 ranks, 1 of them sp", outcome.stdout, re.MULTILINE
        )
        assert form(outcome.stdout.splitlines()[-1]) == form(output.splitlines()[-1]), outcome
    elif file in TRAINED:  # progress lines and the text that a model generates vary
        assert [line for line in form(outcome.stdout) if FIGURES.match(line)] == [
            line for line in form(output) if FIGURES.match(line)
        ], outcome
    else:
        assert form(outcome.stdout) == form(output), outcome


def test_trainer_prints_its_result_once_after_the_loss_of_rank_0():
    outcome = run("mpicomm run -n 3 --fault-tolerant -m mpicomm.examples.trainer --epochs 1 --kill 5")
    assert outcome.stdout.count("test accuracy ") == 1, outcome


def test_every_example_has_a_session():
    names = {path.name for path in EXAMPLES.glob("*.py") if path.stem != "__init__"}
    assert names <= {file for file, _, _ in sessions()}


def test_a_script_for_horovod_imports_only_horovod_and_learns():
    source = (EXAMPLES / "horovod_script" / "digits.py").read_text()
    assert set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)) == {
        "__future__", "argparse", "horovod", "torch", "sklearn"
    }  # fmt: skip
    outcome = run("mpicomm run --horovod -n 4 examples/horovod_script/digits.py")
    assert float(re.search(r"accuracy ([\d.]+)%", outcome.stdout)[1]) > 80, outcome


def test_existing_script_finds_the_same_before_and_after():
    outcomes = [run(f"torchrun --nproc-per-node 2 examples/existing_script/{name}.py") for name in ("before", "after")]
    assert outcomes[0].stdout == outcomes[1].stdout
