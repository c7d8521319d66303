"""`mpicomm job --site NAME [--save]`: the file job.toml."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpicomm.cli import job_sites
from mpicomm.cli.main import main
from tests import launching

PROGRAM = ("--", "python", "train.py")
HAND_WRITTEN = """\
# My sites.
[lumi]  # in Finland
account = "project_1"  # until May
module = [
    "LUMI",  # first
    "rocm",
]

# The other one.
[polaris]
scheduler = "pbs"
directive = ["-l filesystems=home"]
"""


@pytest.fixture(name="file", autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mpicomm" / "job.toml"


def write(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Run the command; return its output and its messages."""
    assert main(["job", *arguments]) == 0
    output = capsys.readouterr()
    return output.out, output.err


def test_options_are_saved_and_used(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--account", "a", "--gpus-per-node", "8", "--cpus-per-rank", "7", "--exclusive", "--time", "2:00:00"]
    lists = ["--setup", 'echo "a\\b\x7f"', "--module", "rocm", "--env", "A=ä b", "--directive=--uenv=x"]
    saved = ["slurm", "--site", "lumi", "--save", *options, *lists, "--nodes", "1"]
    out, err = run(capsys, *saved)
    assert (out, err) == ("", f"mpicomm job slurm: saved site lumi in {file}\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "variables may be secrets"
    assert "nodes" not in file.read_text().replace("per-node", ""), "a default is not saved"
    text, _ = run(capsys, "slurm", "--site", "lumi", *PROGRAM)
    expected, _ = run(capsys, "slurm", *options, *lists, *PROGRAM)
    assert text.partition("# Submit:")[2] == expected.partition("# Submit:")[2]
    assert run(capsys, *saved) == ("", f"mpicomm job slurm: site lumi in {file} already has these options\n")


def test_the_command_line_has_precedence(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = 'account = "a"\nmodule = ["rocm"]\nenv = ["A=1", "B=1"]\ndirective = ["-x 1"]\n'
    write(file, f"[s]\n{site}[p]\n{site}")
    passed = ["--account", "b", "--module", "cuda", "--env", "A=2", "--directive=-y 2", *PROGRAM]
    text, _ = run(capsys, "slurm", "--site", "s", *passed)
    assert "#SBATCH --account=b\n" in text
    assert "module load rocm cuda " in text
    assert ("export A=1" in text, "export A=2\nexport B=1\n" in text) == (False, True)
    assert "#SBATCH -x 1\n#SBATCH -y 2\n" in text, "Slurm uses the last one"
    text, _ = run(capsys, "pbs", "--site", "p", "--directive=-l a=2 -l b=2", *passed)
    assert "#PBS -l a=2 -l b=2\n#PBS -x 1\n#PBS -y 2\n" in text, "PBS uses the first resource and the last option"
    mixed = ["job", "pbs", "--site", "p", "--directive=-q debug -l a=2", *PROGRAM]
    assert "pass -l and the other options each in a --directive of its own" in launching.refusal(mixed, capsys)


def test_saved_lists_keep_their_values_and_their_order(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env", "A=1", "--env", "B=2"]
    saved = ["slurm", "--site", "s", "--save", "--gpus-per-node", "4", "--ranks-per-node", "1"]
    saved += [f"--launcher-arg={word}" for word in words]
    for _ in range(2):
        run(capsys, *saved)
        assert 'launcher-arg = ["--env", "A=1", "--env", "B=2"]' in file.read_text()
    assert "\nranks-per-node = 1\n" in file.read_text(), "the default is one for each GPU"
    run(capsys, *saved[:4], "--setup", "cd ..", "--setup", "cd ..", "--launcher-arg=--env", "--launcher-arg=B=2")
    assert 'setup = ["cd ..", "cd .."]' in file.read_text()
    assert 'launcher-arg = ["--env", "A=1", "--env", "B=2"]' in file.read_text()


def test_lines_written_by_hand_are_kept_and_replaced_ones_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(file, HAND_WRITTEN)
    changes = ["--site", "lumi", "--save", "--account", "project_2", "--qos", "debug", "--module", "rocm"]
    out, err = run(capsys, "slurm", *changes, "-o", "job.sh", *PROGRAM)
    assert out.startswith("wrote job.sh")
    assert err.splitlines()[1:] == ['mpicomm job slurm: replaced account = "project_1"  # until May']
    expected = HAND_WRITTEN.replace('"project_1"  # until May', '"project_2"')
    assert file.read_text() == expected.replace("\n]\n", '\n]\nscheduler = "slurm"\nqos = "debug"\n')
    run(capsys, "slurm", "--site", "new", "--save", "--account", "x")
    assert file.read_text().endswith('home"]\n\n[new]\nscheduler = "slurm"\naccount = "x"\n')


def test_simultaneous_saves_keep_all_sites(file: Path) -> None:
    sites = [f"s{number}" for number in range(8)]
    with ThreadPoolExecutor(len(sites)) as pool:
        list(pool.map(lambda site: job_sites.save(site, "slurm", {"account": site}), sites))
    text = file.read_text()
    assert [site for site in sites if f"[{site}]\n" not in text] == []


def test_replaced_values_of_variables_are_not_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(file, '[s]\nenv = ["TOKEN=secret", "A"]\n')
    _, err = run(capsys, "slurm", "--site", "s", "--save", "--env", "B=1")
    assert err.splitlines()[1:] == ['mpicomm job slurm: replaced env = ["TOKEN=***", "A"]']


def test_a_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    error = launching.refusal(["job", "slurm", "--site", "s", *PROGRAM], capsys)
    assert error == ("mpicomm job slurm: this user has no home directory for job.toml; set XDG_CONFIG_HOME or HOME\n")


INVALID = [
    # (the file, the scheduler, the expected error after the name of the file)
    ("[s]\n\nacount = 'x'\n", "slurm", ":3: unknown key 'acount' of site s; did you mean account?"),
    ("[s]\nxyzzy = 1\n", "slurm", ":2: unknown key 'xyzzy' of site s; expected one of nodes, ranks-per-node"),
    ("[s]\nnodes = '2'\n", "slurm", ":2: nodes of site s has a wrong type; expected an integer"),
    ("[s]\nnodes = true\n", "slurm", ":2: nodes of site s has a wrong type; expected an integer"),
    ("[s]\nmodule = 'a'\n", "slurm", ":2: module of site s has a wrong type; expected a list of strings"),
    ("[s]\naccount = 1\n", "slurm", ":2: account of site s has a wrong type; expected a string"),
    ("[s]\nexclusive = 1\n", "slurm", ":2: exclusive of site s has a wrong type; expected true or false"),
    ("[s]\nimage = 'a'\n", "slurm", ":2: unknown key 'image' of site s"),
    ("[s]\naccount = \n", "slurm", ": Invalid value (at line 2, column 11); correct this line"),
    ("account = 'x'\n", "slurm", ": unknown key 'account' outside of a site; write it below a line [NAME]"),
    ("[s]\nscheduler = 'pbs'\n", "slurm", " is for 'pbs', not slurm; use mpicomm job pbs"),
    (
        "[s]\nmem = '4'\n",
        "slurm",
        "--mem '4': expected a number with its unit, K, M, G or T: 4G; the options of site s",
    ),
    ("[t]\n[u]\n", "slurm", " has t, u; add it with --site s --save and its options"),
    ("", "pbs", " has no sites; add it with"),
]


@pytest.mark.parametrize("text", ['s = {account = "x"}\n', 's.account = "x"\n'])
def test_a_site_that_cannot_be_edited(text: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(file, text)
    error = launching.refusal(["job", "slurm", "--site", "s", "--save", "--qos", "q"], capsys)
    assert f"cannot change the lines of site s in {file}; edit the file" in error
    assert file.read_text() == text


@pytest.mark.parametrize(("text", "scheduler", "message"), INVALID)
def test_an_invalid_file(
    text: str, scheduler: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, text)
    error = launching.refusal(["job", scheduler, "--site", "s", *PROGRAM], capsys)
    assert error.count("\n") == 1
    assert message in error
    assert str(file) in error


REFUSED = [
    (["--save", "--account", "x", *PROGRAM], "--save needs the name of the site: --site NAME"),
    (
        ["--site", "s", "--save", "--template", "a.j2", *PROGRAM],
        "--save does not keep --template; pass it with each job",
    ),
    (["--site", "s", "--save", "--submit"], "--save without a program makes no job; append the program, -- python tra"),
    (["--site", "s", "--save", "-o", "a"], "-- python train.py, or remove -o"),
    (["--site", "a b", "--save"], "--site 'a b': expected letters, digits, _ and -"),
    (["--site", "s", "--save", "--mem", "4"], "--mem '4': expected a number"),
    (["--site", "s", "--account", "x"], "unknown site 's'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_nothing_is_written_after_an_error(
    arguments: list[str], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in launching.refusal(["job", "slurm", *arguments], capsys)
    assert not file.exists()


def test_a_link_stays_one(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.parent.mkdir()
    file.symlink_to(tmp_path / "dotfiles.toml")
    run(capsys, "kubernetes", "--site", "k", "--save", "--image", "train:1")
    assert file.is_symlink()
    assert 'image = "train:1"' in (tmp_path / "dotfiles.toml").read_text()
    assert 'image: "train:1"' in run(capsys, "kubernetes", "--site", "k", *PROGRAM)[0]
