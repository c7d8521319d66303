"""One fault: a replacement in one function of the package, and the tests that must fail with it."""

from __future__ import annotations

import dataclasses
import shlex

from tests.mutants import syntax


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault that is applied to a copy of the package; `syntax.replace` describes `place`, `old` and `new`."""

    place: str
    """The function, class or module, or the file name of a template."""

    old: str = dataclasses.field(kw_only=True)
    """Code that occurs exactly once in it."""

    new: str = dataclasses.field(default="", kw_only=True)
    """The replacement; empty, as by default, to remove statements."""

    fault: str = dataclasses.field(kw_only=True)
    """The resulting misbehaviour, in one sentence."""

    tests: str = dataclasses.field(kw_only=True)
    """Arguments of pytest that select the tests expected to fail."""

    ranks: int = dataclasses.field(default=0, kw_only=True)
    """The number of ranks under mpirun; 0 for pytest in one process."""

    equivalent: str = dataclasses.field(default="", kw_only=True)
    """The reason if no test can detect the fault; such a mutant is listed, but not run."""

    @property
    def name(self) -> str:
        """The place and the fault."""
        return f"{self.place}: {self.fault}"

    @property
    def files(self) -> list[str]:
        """The test files or directories among the arguments of pytest."""
        return [word.partition("::")[0] for word in shlex.split(self.tests) if word.startswith("tests")]

    def applied_to(self, package: list[syntax.Module]) -> syntax.Replacement:
        """Return the module with the fault.

        Raises:
            ValueError: If the code to replace does not occur exactly once.
        """
        return syntax.replace(package, self.place, self.old, self.new)
