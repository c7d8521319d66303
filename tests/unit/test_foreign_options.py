"""The suggestions of `mpicomm run` for options of another launcher, and for options that follow the program."""

from __future__ import annotations

import pytest

from mpicomm.cli import foreign_options
from mpicomm.cli.main import main


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("-np 4 train.py", "-n 4 train.py"),
        ("--np 4 train.py --np 3", "-n 4 train.py --np 3"),
        ("--nproc-per-node 2 -H a,b train.py", "--nproc-per-node 2 --hosts a,b train.py"),
        ("--tag-output --log-dir logs --ntasks 2 -m module -np 3", "--tag-output --log-dir logs -n 2 -m module -np 3"),
        ("-H a:2,b:2 -np 4 --nnodes 1 -- program -np 3", "--hosts a:2,b:2 -n 4 --nnodes 1 -- program -np 3"),
        ("--machinefile=hosts train.py", "--hostfile hosts train.py"),
    ],
)
def test_an_option_of_another_launcher_is_refused_with_the_command_that_is_meant(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert foreign_options.corrected(line.split()) == meant.split()
    with pytest.raises(SystemExit) as caught:
        main(["run", *line.split()])
    assert caught.value.code == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-2].startswith("mpicomm run: error: unknown option -"), error
    assert error[-1] == f"  mpicomm run {meant}"


@pytest.mark.parametrize(
    ("line", "options", "meant", "kept"),
    [
        ("train.py -n 4", "-n 4", "-n 4 train.py", "train.py -n 4"),
        ("train.py --epochs 3 -np 4 --lr 1", "-np 4", "-n 4 train.py --epochs 3 --lr 1", None),
        ("train.py --no-env NCCL_X --lr 1", "--no-env NCCL_X", "--no-env NCCL_X train.py --lr 1", None),
        ("train.py --nproc-per-node=4", "--nproc-per-node=4", "--nproc-per-node=4 train.py", None),
        ("-m module -n 2 --tag-output", "-n 2 --tag-output", "-n 2 --tag-output -m module", None),
        ("train.py --launcher-arg=-u", "--launcher-arg=-u", "--launcher-arg=-u train.py", None),
        ("-m module -n 2", "-n 2", "-n 2 -m module", "python -m module -n 2"),
        ("program --hosts=a:2,b:2", "--hosts=a:2,b:2", "--hosts=a:2,b:2 program", "program --hosts=a:2,b:2"),
    ],
)
def test_options_that_follow_the_program_get_a_note(line: str, options: str, meant: str, kept: str | None) -> None:
    note = foreign_options.note(line.split())
    name = line.split()[line.startswith("-m")]
    first, command, last = note.splitlines()
    assert first == f"{options} follows {name}, and is passed to it. If it is meant for mpicomm run:"
    assert command == f"  mpicomm run {meant}"
    assert kept is None or last == f"To pass it to {name} without this note: mpicomm run -- {kept}"


@pytest.mark.parametrize(
    "line",
    ["-n 2 train.py -n 4", "--tag-output train.py -n 4", "-- train.py -n 4", "train.py -n fast", "train.py -n",
     "train.py --host a --epochs 4", "-m module", "-m", ""],
)  # fmt: skip
def test_arguments_of_the_program_get_no_note(line: str) -> None:
    assert foreign_options.note(line.split()) is None


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("--frob run train.py", "mpicomm"),
        ("run --frob train.py", "mpicomm run"),
        ("info --frob", "mpicomm info"),
        ("bench --frob", "mpicomm bench"),
        ("bench ddp --frob", "mpicomm bench ddp"),
        ("report . --frob", "mpicomm report"),
    ],
)
def test_an_unknown_option_is_reported_by_its_subcommand(
    line: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: {name} "), error
    assert error.endswith(f"{name}: error: unrecognized arguments: --frob\n"), error
