"""The version of the installed torch."""

from __future__ import annotations


def of_torch() -> tuple[int, int]:
    """Return the major and minor version of torch; this also works during torch's import."""
    from torch.version import __version__

    major, minor = (int(part) for part in __version__.split(".")[:2])
    return major, minor
