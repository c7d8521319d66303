"""One fault: a replacement in one file of the package, and the tests that must fail with it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault that is applied to a copy of the package."""

    file: str
    """The file, relative to mpicomm/."""

    old: str = dataclasses.field(kw_only=True)
    """Text that occurs exactly once in the file."""

    new: str = dataclasses.field(kw_only=True)
    """The replacement."""

    fault: str = dataclasses.field(kw_only=True)
    """The resulting misbehaviour, in one sentence."""

    tests: str = dataclasses.field(kw_only=True)
    """Arguments of pytest that select the tests expected to fail."""

    ranks: int = dataclasses.field(kw_only=True)
    """The number of ranks under mpirun; 0 for pytest in one process."""

    equivalent: str = dataclasses.field(default="", kw_only=True)
    """The reason if no test can detect the fault; such a mutant is listed, but not run."""

    def applied_to(self, source: str) -> str:
        """Return the source with the fault.

        Raises:
            ValueError: If the text to replace does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: expected {self.old!r} once, found it {count} times.\nUpdate the mutant.")
        return source.replace(self.old, self.new)
