"""The options of horovodrun after `mpicomm run --horovod`, and the commands of programs that import Horovod."""

from __future__ import annotations

import sys

import pytest

from mpicomm.cli import foreign_options
from mpicomm.cli.main import main
from mpicomm.errors import LaunchError
from mpicomm.launch import request

MIB = 2**20


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-np 4", "-n 4"),
        ("--num-proc=4", "-n 4"),
        ("-H a:2,b:2", "--hosts a:2,b:2"),
        ("-hostfile hosts", "--hostfile hosts"),
        ("--timeline-filename t.json", "--env HOROVOD_TIMELINE=t.json"),
        ("--fusion-threshold-mb 32", f"--env HOROVOD_FUSION_THRESHOLD={32 * MIB}"),
        ("--cycle-time-ms 3.5", "--env HOROVOD_CYCLE_TIME=3.5"),
        ("--no-stall-check", "--env HOROVOD_STALL_CHECK_DISABLE=1"),
        ("--output-filename logs", "--log-dir logs"),
        ("--min-np 2", "--fault-tolerant --env HOROVOD_ELASTIC_MIN_NP=2"),
    ],
)
@pytest.mark.parametrize("line", ["--horovod {} train.py -np 3", "{} --tag-output --horovod -- python train.py -np 3"])
def test_an_option_of_horovodrun_is_replaced_and_its_equivalent_reported(line: str, theirs: str, ours: str) -> None:
    found, notes = foreign_options.translated(line.format(theirs).split())
    assert found == line.format(ours).split()
    assert notes == [f"horovodrun's {theirs} is {ours}"]


def test_options_of_horovods_own_launcher_have_no_effect() -> None:
    found, notes = foreign_options.translated(["--horovod", "--mpi", "--verbose", "-n", "2", "train.py", "--mpi"])
    assert found == ["--horovod", "-n", "2", "train.py", "--mpi"]
    assert [note.partition(":")[0] for note in notes] == [
        "horovodrun's --mpi has no effect",
        "horovodrun's --verbose has no effect",
    ]


@pytest.mark.parametrize("line", ["-np 4 train.py", "-n 2 train.py --horovod -np 4", "-m train --horovod"])
def test_other_lines_are_unchanged(line: str) -> None:
    assert foreign_options.translated(line.split()) == (line.split(), [])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--horovod --fusion-threshold-mb x train.py", "--fusion-threshold-mb must be a number of MiB, got x"),
        ("--horovod -np", "expected one argument"),
        ("--horovod --autotune train.py", "unrecognized arguments: --autotune"),
    ],
)
def test_an_invalid_option_is_reported(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", *line.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


PYTHON = sys.executable


@pytest.mark.parametrize(
    ("words", "module", "expected"),
    [
        ("train.py --lr 1", "", "-m mpicomm.horovod train.py --lr 1"),
        ("python -u -W error train.py -c x", "", "-u -W error -m mpicomm.horovod train.py -c x"),
        ("-- python -m train", "", "-m mpicomm.horovod -m train"),
        ("", "train --lr 1", "-m mpicomm.horovod -m train --lr 1"),
    ],
)
def test_a_program_runs_with_the_module_horovod(words: str, module: str, expected: str) -> None:
    program = request.program(words.split(), module.split(), PYTHON)
    assert request.with_horovod(program, PYTHON) == (PYTHON, *expected.split())


@pytest.mark.parametrize("words", ["bash train.sh", "python -c pass", "python -u", "pytest"])
def test_another_program_is_refused(words: str) -> None:
    program = request.program(words.split(), [], PYTHON)
    with pytest.raises(
        LaunchError, match=r"requires a Python script or a module, got .*\n.*\n  python -m mpicomm.horovod"
    ):
        request.with_horovod(program, PYTHON)
