"""Checks of the software: versions against the supported ranges, torch, NumPy, MPI and the MPICOMM_* variables."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterable, Mapping

from mpicomm import host_info, mpi, native, terminal
from mpicomm.doctor.findings import Finding, from_error, ok, problem, warning
from mpicomm.errors import LaunchError, MPINotFoundError
from mpicomm.launch.mpi_library import Library
from mpicomm.settings import Settings

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?")


@dataclasses.dataclass(frozen=True)
class SoftwareFacts:
    """The installed software."""

    versions: Mapping[str, str]
    """The versions of Python and of packages."""

    oldest: Mapping[str, str]
    """The oldest supported version of Python and of each required package; empty if any version is supported."""

    library: Library | None
    """The MPI library; None if it cannot be loaded."""

    mpi_error: str = ""
    """Why MPI cannot be loaded."""

    torch_error: str = ""
    """Why torch cannot be imported."""

    numpy_error: str = ""
    """Why torch cannot use NumPy."""

    settings_error: str = ""
    """The fault in the MPICOMM_* variables."""

    native: bool = True
    """Whether the package's C library can be used."""

    @property
    def can_start(self) -> bool:
        """Whether `bootstrap()` can be called."""
        return not (self.torch_error or self.settings_error) and self.library is not None


def collect(environ: Mapping[str, str]) -> SoftwareFacts:
    """Return the facts about this process; imports torch, and loads MPI without initialising it."""
    library, mpi_error, settings_error = None, "", ""
    try:
        library = mpi.library()
    except MPINotFoundError as error:
        mpi_error = str(error)
    try:
        Settings.from_environ(environ)
    except LaunchError as error:
        settings_error = str(error)
    torch_error, numpy_error, native = _try_torch()
    oldest = oldest_supported()
    versions = {name: host_info.version_of(name) for name in oldest if name != "Python"}
    versions |= host_info.versions()
    return SoftwareFacts(versions, oldest, library, mpi_error, torch_error, numpy_error, settings_error, native)


def oldest_supported() -> dict[str, str]:
    """Return the oldest supported versions, as the metadata of the package lists them; empty without metadata."""
    try:
        python = importlib.metadata.metadata("mpicomm")["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return {}
    required = importlib.metadata.requires("mpicomm") or []
    return parse_requirements([f"Python{python or ''}", *required])


def parse_requirements(requirements: Iterable[str]) -> dict[str, str]:
    """Return the oldest version that each requirement allows, without the requirements of extras."""
    matches = [_REQUIREMENT.match(text) for text in requirements if ";" not in text]
    return {match[1]: match[2] or "" for match in matches if match}


def check(facts: SoftwareFacts) -> list[Finding]:
    """Return the findings about the software."""
    results = [finding for name in facts.oldest if (finding := _version(name, facts)) is not None]
    if not results:
        shown = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
        results = [ok("versions", shown)]
    if facts.torch_error:
        results.append(problem("torch", f"torch cannot be imported: {facts.torch_error}", "Reinstall torch."))
    if facts.numpy_error:
        remedy = "Install versions that fit: a torch built for NumPy 1 needs `pip install 'numpy<2'`."
        results.append(problem("NumPy", f"torch cannot use NumPy: {facts.numpy_error}", remedy))
    results.append(from_error("MPI", facts.mpi_error) if facts.library is None else ok("MPI", facts.library.title))
    if facts.settings_error:
        results.append(from_error("MPICOMM_*", facts.settings_error))
    if not facts.native:
        results.append(warning("C library", native.MISSING_LIBRARY, native.LIBRARY_REMEDY))
    return results


def _version(name: str, facts: SoftwareFacts) -> Finding | None:
    """Return the finding about a version outside the supported range; None if it is supported."""
    version, oldest = facts.versions.get(name, host_info.NOT_INSTALLED), facts.oldest[name]
    if name == "mpi4py" and not facts.mpi_error and version == host_info.NOT_INSTALLED:
        return None  # a copy on PYTHONPATH
    if version == host_info.NOT_INSTALLED:
        return problem(name, f"{name} is not installed", f"Install it: pip install '{name}>={oldest or 0}'")
    if host_info.is_older(version, oldest):
        remedy = (
            f"Create the environment with a newer Python: python{oldest} -m venv ..."
            if name == "Python"
            else f"Upgrade it: pip install --upgrade '{name}>={oldest}'"
        )
        return problem(name, f"{name} {version} is older than {oldest}, the oldest supported version", remedy)
    return None


def _try_torch() -> tuple[str, str, bool]:
    """Return why torch cannot be imported, why it cannot use NumPy, and whether the C library can be used."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:  # OSError: a shared library is missing or broken
        return terminal.first_line(error), "", True
    from mpicomm.native import c_library

    try:
        torch.zeros(1).numpy()
    except (RuntimeError, ImportError) as error:
        return "", terminal.first_line(error), c_library.load() is not None
    return "", "", c_library.load() is not None
