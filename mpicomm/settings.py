"""Every `MPICOMM_*` environment variable, read in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpicomm.errors import LaunchError

PREFIX = "MPICOMM_"
LAUNCHERS = ("single", "mpi", "torchrun", "slurm")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the environment asks of mpicomm; each field is the variable `MPICOMM_<FIELD>`."""

    launcher: str | None = None
    """Who says the ranks, when the environment is ambiguous: single, mpi, torchrun or slurm."""

    interface: str | None = None
    """The network interface, by name or address, on which rank 0 listens: ib0, 10.1.0.7."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings; an empty variable counts as unset.

        Raises:
            LaunchError: If a variable is unknown or its value is.
        """
        names = {PREFIX + field.name.upper(): field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value}
        if unknown := sorted(set(given) - set(names)):
            raise LaunchError(
                f"{', '.join(unknown)} is set, but mpicomm knows no such variable.\n"
                f"It knows {', '.join(sorted(names))}. Correct the name, or unset it."
            )
        settings = cls(**{names[name]: value for name, value in given.items()})
        if settings.launcher not in (None, *LAUNCHERS):
            raise LaunchError(
                f"MPICOMM_LAUNCHER={settings.launcher} is not a launcher.\n"
                f"Set it to one of {', '.join(LAUNCHERS)}, or unset it to let mpicomm find out."
            )
        return settings
