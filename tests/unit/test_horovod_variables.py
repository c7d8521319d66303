"""The `HOROVOD_*` variables: their units, and values that are not valid."""

from __future__ import annotations

import pytest

from mpicomm.horovod.variables import Variables


def test_an_empty_variable_counts_as_unset() -> None:
    assert Variables.from_environ({"HOROVOD_CYCLE_TIME": "", "HOROVOD_STALL_CHECK_DISABLE": "0"}) == Variables()


def test_the_values_of_variables() -> None:
    found = Variables.from_environ(
        {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}
    )
    assert (found.fusion_threshold, found.cycle_seconds, found.stall_shutdown_seconds) == (0, 0.0035, 90.0)
    disabled = Variables.from_environ({"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"})
    assert (disabled.stall_check_seconds, disabled.stall_shutdown_seconds) == (0.0, 0.0)


@pytest.mark.parametrize("text", ["-1", "fast", "nan", "inf"])
def test_a_value_that_is_not_a_finite_number_of_at_least_0_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"CYCLE_TIME must be a finite number of at least 0, got {text}\.\n"):
        Variables.from_environ({"HOROVOD_CYCLE_TIME": text})


@pytest.mark.parametrize(("check", "heartbeat"), [("0", 5.0), ("600", 5.0), ("4", 0.4), ("0.1", 0.1)])
def test_an_idle_rank_answers_several_times_in_the_time_of_a_stall_check(check: str, heartbeat: float) -> None:
    variables = Variables.from_environ({"HOROVOD_STALL_CHECK_TIME_SECONDS": check})
    assert variables.heartbeat_seconds == pytest.approx(heartbeat)
