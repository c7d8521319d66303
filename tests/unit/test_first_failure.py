"""Which rank reports its failure to the watchdog, if several fail at the same time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpicomm.job import session, session_setup


@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_rank_that_prints_its_error_reports_it(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[str] = []
    watch = SimpleNamespace(fail=lambda: reports.append("failed"))
    monkeypatch.setattr(session, "current", lambda: SimpleNamespace(claim=lambda: is_first, watch=watch))
    monkeypatch.setattr(session_setup, "_is_formed", lambda: True)
    assert session_setup.is_first_to_fail() == is_first
    assert len(reports) == is_first
