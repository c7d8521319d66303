"""Fills the template of a job, that of the package or one of the user, and locates the errors of templates."""

from __future__ import annotations

import difflib
import functools
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from mpicomm.launch.jobscript import quoting

DIRECTORY = Path(__file__).resolve().parents[1] / "templates"
_REMEDY = "correct this line of the template"
# What jinja2 reports about `job.nodez` and about `nodez`.
_UNKNOWN = re.compile(r"'[\w.]+\.(?:JobSpec|KubernetesJob) object' has no attribute '(\w+)'|'(\w+)' is undefined")


def fill(path: Path, job: Any) -> str:
    """Return the text of a template in which `job` is the description of a job.

    A template can extend, include and import the templates of the package, and those of its own directory.

    Raises:
        ValueError: If the template cannot be read, is invalid, or uses a name that the job does not have.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the template {path}: {error.strerror}; pass --template another file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read the template {path}: {error}; save it as UTF-8") from error
    try:
        return _template(path, source).render(job=job)
    except jinja2.TemplateSyntaxError as error:
        message = f"{error.message}".rstrip(".")
        raise ValueError(f"{error.filename or path}:{error.lineno}: {message}; {_REMEDY}") from error
    except Exception as error:  # an expression of a template can raise whatever operators and methods of Python raise
        raise ValueError(f"{_position(path, error)}: {_explanation(job, error)}") from error


@functools.cache
def _template(path: Path, source: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([DIRECTORY, path.parent]),
        undefined=jinja2.StrictUndefined,
        finalize=_not_none,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for function in (quoting.quoted, quoting.joined, quoting.yaml):
        environment.filters[function.__name__] = _of_a_value(function)
    # Not by the loader: a template slurm.j2 of the user may extend slurm.j2 of the package.
    code = environment.compile(source, filename=str(path))
    return jinja2.Template.from_code(environment, code, environment.globals)


def _of_a_value(function: Callable[..., str]) -> Callable[..., str]:
    return lambda value, *arguments: function(_not_none(value), *arguments)


def _not_none(value: Any) -> Any:
    """Refuse the value of an option that was not passed: it would be written as the word None."""
    if value is None:
        raise jinja2.TemplateRuntimeError(
            "a value is None because its option was not passed; "
            "write this line between {% if job.NAME %} and {% endif %}"
        )
    return value


def _position(path: Path, error: BaseException) -> str:
    """Return the file and the line of the innermost template that was being filled."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if Path(frame.filename).parent in (DIRECTORY, path.parent)]
    return f"{lines[-1].filename}:{lines[-1].lineno}" if lines else str(path)


def _explanation(job: Any, error: Exception) -> str:
    message = " ".join(str(error or type(error).__name__).split())
    if isinstance(error, jinja2.TemplateNotFound):
        templates = ", ".join(sorted(file.name for file in DIRECTORY.glob("*.j2")))
        return f"no template {error.name!r}; expected one of {templates}, or a file beside this template"
    if unknown := _UNKNOWN.fullmatch(message):
        names = [name for name in dir(job) if not name.startswith("_")]
        name = unknown[1] or unknown[2]
        close = difflib.get_close_matches(name, names, cutoff=0.7)
        if close:
            return f"unknown name {name}; did you mean {' or '.join(f'job.{close_name}' for close_name in close)}?"
        return f"unknown name {name}; expected one of {', '.join(f'job.{valid}' for valid in names)}"
    if isinstance(error, jinja2.TemplateRuntimeError) and not isinstance(error, jinja2.UndefinedError):
        return message
    return f"{message}; {_REMEDY}"
