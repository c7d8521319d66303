"""The options of sites in `job.toml`, which `mpicomm job --site NAME` uses and `--save` writes."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fcntl
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpicomm.launch.jobscript import JobSpec, KubernetesJob, options
from mpicomm.launch.jobscript.options import Form
from mpicomm.launch.request import without_value

NAME = Form(r"[\w-]+", "letters, digits, _ and -")
_SCHEDULER = "scheduler"
"""The key with the scheduler of a site, for which its directives are valid."""


def path() -> Path:
    """Return the path of the file.

    Raises:
        ValueError: If the user has no home directory.
    """
    directory = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not directory.is_absolute():
        try:
            directory = Path.home() / ".config"
        except RuntimeError as error:
            raise ValueError("this user has no home directory for job.toml; set XDG_CONFIG_HOME or HOME") from error
    return directory / "mpicomm" / "job.toml"


def read(site: str, scheduler: str, job_type: type[JobSpec | KubernetesJob]) -> dict[str, Any] | None:
    """Return the options of a site by field; None if the file does not have the site.

    Raises:
        ValueError: If the file is invalid, or the site is one of another scheduler.
        OSError: If the file cannot be read.
    """
    NAME.check("--site", site)
    text = _text()
    table = _parsed(text).get(site)
    if table is None:
        return None
    described = options.declared(job_type)
    defaults = {field.name: field.default for field in dataclasses.fields(job_type)}
    keys = [_key(field) for field in described]
    if (other := table.get(_SCHEDULER, scheduler)) != scheduler:
        raise ValueError(f"site {site} in {path()} is for {other!r}, not {scheduler}; use mpicomm job {other}")
    values = {}
    for key, value in table.items():
        if key == _SCHEDULER:
            continue
        place = f"{path()}:{_line(text, site, key)}"
        if key not in keys:
            close = difflib.get_close_matches(key, keys, 1)
            remedy = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(keys)}"
            raise ValueError(f"{place}: unknown key {key!r} of site {site}; {remedy}")
        field = key.replace("-", "_")
        if (expected := _type_error(value, defaults[field])) is not None:
            raise ValueError(f"{place}: {key} of site {site} has a wrong type; expected {expected}")
        values[field] = value
    return values


def missing(site: str) -> str:
    """Return the error message for a site that the file does not have."""
    sites = ", ".join(_parsed(_text())) or "no sites"
    return f"unknown site {site!r}: {path()} has {sites}; add it with --site {site} --save and its options"


def save(site: str, scheduler: str, values: Mapping[str, Any]) -> list[str]:
    """Write options of a site to the file, whose other lines are kept, and return a line for each change.

    Args:
        values: The values by field; a field that is not in it keeps its line.

    Raises:
        ValueError: If the file cannot be edited.
        OSError: If it cannot be written.
    """
    NAME.check("--site", site)
    table = {_SCHEDULER: scheduler, **{_key(field): value for field, value in values.items()}}
    with _locked():
        text = _text()
        old = _parsed(text)
        edited, replaced = _edited(text, site, table)
        if not _has(edited, {**old, site: {**old.get(site, {}), **table}}):
            raise ValueError(f"cannot change the lines of site {site} in {path()}; edit the file")
        if edited == text:
            return [f"site {site} in {path()} already has these options"]
        _write(edited)
    action = "changed" if site in old else "saved"
    return [f"{action} site {site} in {path()}", *(f"replaced {line.strip()}" for line in replaced)]


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Let one process at a time edit the file, where the file system has locks."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with path().with_name(".job.toml.lock").open("a") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _has(text: str, document: Mapping[str, Any]) -> bool:
    try:
        return _loads(text) == document
    except ValueError:
        return False


def _key(field: str) -> str:
    return options.flag(field).removeprefix("--")


def _type_error(value: Any, default: Any) -> str | None:
    """Return the expected type of a value if it has another type."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return None if isinstance(value, int) and not isinstance(value, bool) else "an integer"
    if isinstance(default, tuple):
        is_list = isinstance(value, list) and all(isinstance(text, str) for text in value)
        return None if is_list else "a list of strings"
    return None if isinstance(value, str) else "a string"


def _text() -> str:
    try:
        return path().read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path()}: {error}; save it as UTF-8") from error


def _loads(text: str) -> dict[str, Any]:
    """Parse a text of TOML; raise ValueError, with the line, if it is invalid."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _parsed(text: str) -> dict[str, dict[str, Any]]:
    try:
        document = _loads(text)
    except ValueError as error:
        raise ValueError(f"{path()}: {error}; correct this line") from error
    for key, value in document.items():
        if not isinstance(value, dict):
            raise ValueError(f"{path()}: unknown key {key!r} outside of a site; write it below a line [NAME]")
    return document


def _edited(text: str, site: str, table: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the text with the values of a site, and the lines that they replace."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    start = next((index for index, line in enumerate(lines) if _is_header(line, site)), None)
    if start is None:
        lines += [*(["\n"] if lines else []), f"[{site}]\n"]
        start = len(lines) - 1
    left, replaced, end = dict(table), [], start + 1
    for first, last, key, value in reversed(list(_statements(lines, start + 1))):
        end = max(end, last)
        if key in left and (new := left.pop(key)) != value:
            names = f"env = {_toml([without_value(text) for text in value])}" if key == "env" else None  # no secrets
            replaced.append(names or "".join(lines[first:last]))
            lines[first:last] = [f"{key} = {_toml(new)}\n"]
            end -= last - first - 1
    lines[end:end] = [f"{key} = {_toml(value)}\n" for key, value in left.items()]
    return "".join(lines), replaced[::-1]


def _is_header(line: str, site: str) -> bool:
    return re.match(rf"""\s*\[\s*["']?{re.escape(site)}["']?\s*\]""", line) is not None


def _statements(lines: list[str], start: int) -> Iterator[tuple[int, int, str, Any]]:
    """Yield the first and the last line, exclusive, of each key of a table from `start` on, with its value."""
    first = start
    while first < len(lines) and not lines[first].lstrip().startswith("["):
        if not lines[first].strip() or lines[first].lstrip().startswith("#"):
            first += 1
            continue
        for last in range(first + 1, len(lines) + 1):
            try:
                statement = _loads("".join(lines[first:last]))
            except ValueError:
                continue  # an array that continues on the next line
            for key, value in statement.items():
                yield first, last, key, value
            first = last
            break
        else:
            return


def _line(text: str, site: str, key: str) -> int:
    """Return the number of the line of a key."""
    lines = text.splitlines(keepends=True)
    start = next((index for index, line in enumerate(lines) if _is_header(line, site)), 0)
    return next((first for first, _, name, _ in _statements(lines, start + 1) if name == key), start) + 1


def _toml(value: Any) -> str:
    """Write a string, an integer, a truth value or a list of strings."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write(text: str) -> None:
    """Replace the file at once, with permissions for the user only: variables may contain secrets."""
    file = path().resolve()  # a symbolic link stays one
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".job.toml-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink()
        raise
