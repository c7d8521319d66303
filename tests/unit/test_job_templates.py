"""`mpicomm job --template`: the examples and the names in docs/job-templates.md, and errors of templates."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomm.cli.main import main
from mpicomm.launch.jobscript import JobSpec, KubernetesJob, options, script, template
from tests import launching

DOCUMENT = (launching.ROOT / "docs" / "job-templates.md").read_text()
PROGRAM = ("python", "train.py")
JOBS = {
    "schedulers": (JobSpec("slurm", PROGRAM), options.declared(JobSpec)),
    "Kubernetes": (KubernetesJob(PROGRAM, image="train"), options.declared(KubernetesJob)),
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "user.j2") -> Path:
        Path(name).write_text(text)
        return Path(name)

    return write


def refusal(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a template, which is one line."""
    error = launching.refusal(["job", "slurm", "--template", str(path), "--", *PROGRAM], capsys)
    assert error.count("\n") == 1
    return error.removeprefix("mpicomm job slurm: ").strip()


# -- the document ------------------------------------------------------------------------------------------------------


def test_the_example_writes_its_output(write, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = blocks("jinja")
    write(text, "site.j2")
    command, _, output = blocks("console")[0].partition("\n")
    assert main(command.split()[2:]) == 0
    assert capsys.readouterr().out == output


def test_the_example_of_an_error(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("#!/bin/bash\n\n#SBATCH --nodes={{ job.nodez }}\n", "wrong.j2")
    assert f"mpicomm job slurm: {refusal(path, capsys)}\n" == blocks("console")[1].partition("\n")[2]


@pytest.mark.parametrize("kind", JOBS)
def test_the_table_has_every_name_that_is_no_option(kind: str) -> None:
    job, options = JOBS[kind]
    rows = re.findall(r"^\| (`job\..*?) \| .* \| (\w+) \|$", DOCUMENT, re.MULTILINE)
    listed = {name for names, group in rows if group in ("all", kind) for name in re.findall(r"`job\.(\w+)`", names)}
    assert listed == {name for name in dir(job) if not name.startswith("_")} - set(options)


def test_the_document_has_every_template_and_every_block_of_scripts() -> None:
    templates = {path.name for path in template.DIRECTORY.iterdir()} - {"torchrun.j2", "pods.j2"}  # parts of others
    assert templates <= set(re.findall(r"`(\w+\.j2)`", DOCUMENT))
    names = set(re.findall(r"{% block (\w+)", (template.DIRECTORY / "job.j2").read_text()))
    assert names <= set(re.findall(r"`(\w+)`", DOCUMENT.partition("The blocks of the four")[2].partition("##")[0]))


# -- templates of a user -----------------------------------------------------------------------------------------------


def test_a_template_may_have_the_name_of_the_one_that_it_extends(write) -> None:
    path = write('{% extends "slurm.j2" %}{% block start %}true\n{% endblock %}', "slurm.j2")
    assert script(JobSpec("slurm", PROGRAM), path).endswith("per core\n\ntrue\n")


def test_a_template_may_use_files_beside_it(write, tmp_path: Path) -> None:
    write("module purge\n", "site.sh")
    path = write('{% include "site.sh" %}\n{{ job.command | joined }}')
    assert script(JobSpec("flux", PROGRAM), tmp_path / path) == "module purge\npython train.py"


def test_values_are_quoted_and_never_read_as_templates(write) -> None:
    words = ("python", "{{ job }}", "a\n{% if %}", "$SLURM_ARRAY_TASK_ID")
    path = write("{{ job.command | joined(job.index) }}\n{{ job.command[2] | yaml }}\n")
    line = '''python '{{ job }}' $'a\\012{% if %}' "$SLURM_ARRAY_TASK_ID"'''
    assert script(JobSpec("slurm", words, array="0-9"), path) == f'{line}\n"a\\U0000000a{{% if %}}"\n'


def test_a_template_for_kubernetes(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("image: {{ job.image | yaml }}\n")
    arguments = ["--image", "a:1", "--template", str(path), "--", *PROGRAM]
    assert main(["job", "kubernetes", *arguments]) == 0
    assert capsys.readouterr().out == 'image: "a:1"\n'


WRONG = [
    ("a\n{{ nodes }}", "user.j2:2: unknown name nodes; did you mean job.nodes?"),
    (
        "{{ job.xyzzy }}",
        "user.j2:1: unknown name xyzzy; expected one of job.account, job.array, job.bind, job.caches, ",
    ),
    ("{{ job.title.nodes }}", "user.j2:1: 'str object' has no attribute 'nodes'; correct this line of the template"),
    (
        "\n\n{{ job.mem }}",
        "user.j2:3: a value is None because its option was not passed; write this line between {%",
    ),
    ("{{ job.mem | quoted }}", "user.j2:1: a value is None because its option was not passed; write this line"),
    ("{% if job.mem %}", "user.j2:1: Unexpected end of template. "),
    ("\n{{ job.venv | quotd }}", "user.j2:2: No filter named 'quotd'; correct this line of the template"),
    ("${#hosts[@]}", "user.j2:1: Missing end of comment tag; correct this line of the template"),
    ("{{ 1 / 0 }}", "user.j2:1: division by zero; correct this line of the template"),
    ('{% extends "slurmm.j2" %}', "user.j2:1: no template 'slurmm.j2'; expected one of flux.j2, job.j2, lsf.j2, "),
    ('{% extends "slurm.j2" %}\n{% block start %}{{ job.nodez }}{% endblock %}', "user.j2:2: unknown name nodez; did"),
    ('{% include "user.j2" %}', "user.j2:1: maximum recursion depth exceeded"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_an_error_names_the_file_and_the_line(
    text: str, message: str, write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(write(text), capsys).startswith(message)


def test_an_error_in_an_included_file_names_that_file(write, capsys: pytest.CaptureFixture[str]) -> None:
    write("a\n{% if %}", "part.j2")
    assert re.match(r"(.*/)?part\.j2:2: ", refusal(write('{% include "part.j2" %}'), capsys))


def test_a_template_that_cannot_be_read(write, capsys: pytest.CaptureFixture[str]) -> None:
    message = "cannot read the template gone.j2: No such file or directory; pass --template another file"
    assert refusal(Path("gone.j2"), capsys) == message
    Path("latin.j2").write_bytes(b"\xe9")
    assert refusal(Path("latin.j2"), capsys).endswith("; save it as UTF-8")


# -- imports -----------------------------------------------------------------------------------------------------------


def test_only_the_writing_of_a_script_imports_jinja2() -> None:
    program = (
        "import sys; from mpicomm.cli.main import main; main(['run', '--dry-run', '-n', '1', 'x.py']);"
        "unused = {'jinja2', 'torch'} & sys.modules.keys(); main(['job', 'slurm', '--', 'x']);"
        "print(unused, 'jinja2' in sys.modules, 'torch' in sys.modules)"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout.splitlines()[-1] == "set() True False"
