"""The `mpicomm` command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import mpicomm
from benchmarks import ratios
from benchmarks.ratios import Ratio
from mpicomm import terminal
from mpicomm.cli.main import main
from mpicomm.metrics_file import NAME
from tests.launching import run_alone

ENTRIES = [
    {"event": "start", "time": 1.0, "step": 0, "epoch": 0, "consumed": 0, "ranks": 2, "device": "cpu"},
    {"event": "step", "time": 2.0, "step": 5, "epoch": 0, "consumed": 50, "loss": 1.5, "samples_per_s": 100.0},
    {"event": "epoch", "time": 2.0, "step": 5, "epoch": 1, "consumed": 0, "loss": 1.5, "samples": 50},
    {"event": "end", "time": 3.0, "step": 5, "epoch": 1, "consumed": 0, "seconds": 1.0, "ranks": []},
]


def a_run(directory: Path, *, broken: bool = False) -> str:
    """Write the metrics file of a run, and return the run's directory."""
    directory.mkdir()
    lines = [json.dumps(entry) for entry in ENTRIES]
    (directory / NAME).write_text("\n".join([*["{"] * broken, *lines[broken:], ""]))
    return str(directory)


def test_a_report_as_json_is_the_same_for_one_run_and_for_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = a_run(tmp_path / "one"), a_run(tmp_path / "other")
    assert main(["report", one, "--json"]) == 0
    (alone,) = json.loads(capsys.readouterr().out)
    assert main(["report", "--json", one, other]) == 0
    both = json.loads(capsys.readouterr().out)
    assert [each["run"] for each in both] == ["one", "other"]
    assert both[0] == alone
    assert (alone["state"], alone["steps"], alone["samples"], alone["samples_per_s"]) == ("complete", 5, 50, 100.0)


def test_the_table_of_many_runs_breaks_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *[a_run(tmp_path / f"a-run-with-a-long-name-{n}") for n in range(12)]]) == 0
    assert capsys.readouterr().out.count("\n") < 25


def test_text_in_brackets_is_shown_in_a_table() -> None:
    output = io.StringIO()
    terminal.console(output, width=40).print(terminal.table(("line",), [("model[bold](x)",)]))
    assert "model[bold](x)" in output.getvalue()


def test_a_plot_is_written_in_addition_to_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "curves.png"
    assert main(["report", a_run(tmp_path / "run"), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "complete" in capsys.readouterr().out


def test_warnings_do_not_mix_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", a_run(tmp_path / "run", broken=True), "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.startswith("mpicomm report: warning: line 1 of ")
    assert len(json.loads(output.out)[0]["warnings"]) == 1


def test_any_file_is_that_of_a_benchmark_and_the_order_in_json_is_that_of_the_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"operation": "reduce", "dtype": "int32", "in_place": True, "nbytes": 4, "backend": "mpi", "us": 2.0}
    results = tmp_path / "b.results"
    results.write_text(json.dumps({"rows": [row]}))
    directory = a_run(tmp_path / "run")
    (tmp_path / "run" / "rank-0.json").write_text("{}")  # the dump file of a job in the directory of its checkpoints
    assert main(["report", str(results), directory, str(results), "--json"]) == 0
    first, run, last = json.loads(capsys.readouterr().out)
    assert (first["rows"], run["run"], last) == ([row], "run", first)
    assert main(["report", str(tmp_path / "run" / NAME)]) == 2
    assert f"Pass the directory that contains it: {directory}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1]", "TypeError: list indices"),
        ("\xff", "UnicodeDecodeError: "),
        ('{"rows": [{"backend": "mpi"}]}', "KeyError: 'model'"),
        (
            '{"rows": [{"operation": "a", "dtype": "b", "in_place": true, "backend": "mpi", "nbytes": 4}]}',
            "KeyError: 'us'",
        ),
        (
            '{"rows": [{"operation": "a", "dtype": "b", "in_place": true, "nbytes": null}]}',
            "'nbytes' has the value None",
        ),
        (
            '{"rows": [{"model": "a", "strategy": "ddp", "backend": "mpi", "ms": 1}, {"backend": "mpi"}]}',
            "KeyError: 'model'",
        ),
    ],
)
def test_a_file_of_no_benchmark_is_an_error(
    content: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.json"
    path.write_text(content, encoding="latin-1")
    assert main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mpicomm report: {path} was not written by `mpicomm bench --json`: ")
    assert reason in error


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("report run --html gone/x.html", "cannot write gone/x.html; use a file in a writable directory"),
        ("report old.html --html ./old.html", "--html old.html would replace the file which the command reads.\nPass"),
        ("timeline dumps --html gone/x.html", "cannot write gone/x.html"),
        ("timeline dumps -o dumps/rank-0.json", "--output dumps/rank-0.json would replace the file which the command"),
        ("timeline dumps -o x.html --html x.html", "--html x.html would replace the file of --output"),
        ("timeline dumps", "trace.json exists.\nReplace it with -o trace.json, or name another file."),
        ("bench --json b --csv ./b", "--csv b would replace the file of --json.\nPass another path to --csv."),
        ("bench --compare old.json --json old.json", "--json old.json would replace the file which the command reads"),
        ("bench --op barrier --plot b.png", "--plot draws curves over sizes, and barrier has no size."),
    ],
)
def test_no_file_is_replaced_that_the_command_reads_or_has_written(
    line: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "run")
    (tmp_path / "dumps").mkdir()
    for name in ("trace.json", "old.json", "old.html", "dumps/rank-0.json"):
        Path(name).write_text("mine")
    assert main(line.split()) == 2
    assert text in capsys.readouterr().err
    assert Path("trace.json").read_text() == Path("dumps/rank-0.json").read_text() == "mine"
    assert not {path.name for path in tmp_path.iterdir()} - {"run", "dumps", "trace.json", "old.json", "old.html"}


def test_a_directory_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = a_run(tmp_path / "good")
    for wrong, text in (
        (tmp_path / "gone", "gone does not exist.\nPass the checkpoint_dir"),
        (tmp_path, "is neither the directory of a run, which has a metrics.jsonl, nor"),
    ):
        assert main(["report", good, str(wrong)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("mpicomm report: ")
        assert text in output.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: COMMAND"),
        (["repotr"], "repotr"),
        (["report"], "required: PATH"),
        (["report", ".", "--plot", "a.jpg"], "expected a .png file, got a.jpg; use a.png"),
        (["report", ".", "--html", "metrics.jsonl"], "expected a .html file, got metrics.jsonl; use metrics.html"),
        (["timeline", ".", "--html", "-"], "expected a .html file, got -; use -.html"),
        (["bench", "--html", "b.json"], "expected a .html file, got b.json; use b.html"),
        (["bench", "--device", "cuda:0"], "expected a type of device without an index"),
    ],
)
def test_a_wrong_command_is_an_error(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_the_command_from_a_shell_needs_neither_torch_nor_mpi(tmp_path: Path) -> None:
    outcome = run_alone(["-X", "importtime", "-m", "mpicomm", "report", a_run(tmp_path / "run")])
    assert outcome.status == 0, outcome
    assert "complete" in outcome.stdout
    modules = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in outcome.stderr.splitlines()}
    assert "mpicomm" in modules
    assert not modules & {"torch", "mpi4py", "numpy", "matplotlib"}


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"mpicomm {mpicomm.__version__}\n")


@pytest.mark.parametrize(("value", "status"), [(2.0, 0), (1.9, 1)])
def test_the_status_is_1_if_a_ratio_is_not_met(
    value: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Ratio("a figure", 3.0, 2.0, is_least=True), Ratio("another", value, 2.0, is_least=True)]
    monkeypatch.setattr(ratios, "measure", lambda run, **_: found)
    assert ratios.main([]) == status
    assert ("not met" in capsys.readouterr().out) == (status == 1)
