"""Advice about a job that is valid but probably not intended."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mpicomm.launch.jobscript import quoting
from mpicomm.launch.jobscript.spec import JobSpec
from mpicomm.launch.request import without_value

_VARIABLE = re.compile(r"\$(\w*[A-Za-z_]\w*|{\w+[^}]*})", re.ASCII)
_CORES = re.compile(r"cpu|core|affinity|threads")  # in the directives with which the user requests cores


def advice(job: JobSpec) -> list[str]:
    """Return a sentence for each probable mistake, which ends with the next step."""
    return [text for text in (_on_cores(job), _on_variables(job)) if text]


def _on_cores(job: JobSpec) -> str | None:
    requested = job.exclusive or any(_CORES.search(text) for text in (*job.directive, *job.launcher_arg))
    if not job.gpus_per_node or job.cpus_per_rank > 1 or requested:
        return None
    return (
        "each rank has one core beside its GPU, which the workers of a DataLoader need, too; "
        "request more, for example with --cpus-per-rank 8"
    )


def _on_variables(job: JobSpec) -> str | None:
    """Name a variable that the user may expect to be expanded: the program and the ranks get every $ unchanged."""
    index = job.index and re.compile(rf"\$({job.index}\b|{{{job.index}}})")

    def variable(word: str) -> str | None:
        match = _VARIABLE.search(index.sub("", word) if index else word)
        return match[0] if match else None

    code = _index_of_code(job.command)
    names = [None if index == code else variable(word) for index, word in enumerate(job.command)]
    if name := next(filter(None, names), None):
        pairs = zip(names, job.command, strict=True)
        words = [_expanded(word) if has_variable else quoting.quoted(word) for has_variable, word in pairs]
        command = quoting.quoted(f"exec {' '.join(words)}")
        return f"the program gets {name} unchanged; to expand it on each rank: -- bash -c {command}"
    if assignment := next(filter(variable, job.env), None):
        return (
            f"--env {without_value(assignment)}: the ranks get {variable(assignment)} unchanged; to expand it in the "
            f"job, set the variable with --setup 'export NAME=...', and pass --env NAME"
        )
    return None


def _index_of_code(command: Sequence[str]) -> int | None:
    """Return the index of the word after -c if the program is a shell, which expands the variables of this word."""
    if not re.fullmatch(r"(.*/)?(ba|da|z)?sh", command[0]) or not command[1:] or not command[1].startswith("-"):
        return None
    return next((index + 1 for index, word in enumerate(command) if re.fullmatch(r"-\w*c", word)), None)


def _expanded(word: str) -> str:
    """Quote a word for bash, which expands its variables."""
    return '"' + re.sub(r'(["`\\]|\$(?![A-Za-z_{]))', r"\\\1", word) + '"'
