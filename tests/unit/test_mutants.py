"""Every mutant can be applied to the package as it is now, so that a change of the package updates the mutants too."""

from __future__ import annotations

from tests.launching import ROOT
from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS


def _problem(mutant: Mutant) -> str:
    try:
        changed = mutant.applied_to((ROOT / "mpicomm" / mutant.file).read_text())
        if mutant.file.endswith(".py"):
            compile(changed, mutant.file, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        return f"{mutant.file}: {mutant.fault}\n{error}"
    return ""


def test_every_mutant_can_be_applied() -> None:
    assert [problem for problem in map(_problem, MUTANTS) if problem] == []
    assert len({(each.file, each.fault) for each in MUTANTS}) == len(MUTANTS)
