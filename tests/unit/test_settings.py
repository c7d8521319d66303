"""The MPICOMM_* environment variables."""

from __future__ import annotations

import dataclasses

import pytest

from mpicomm.errors import LaunchError
from mpicomm.settings import LAUNCHERS, PREFIX, Settings

VALID = {
    "launcher": "mpi",
    "on_timeout": "raise",
    "hang_seconds": "2.5",
    "host_timeout": "300",
    "debug": "1",
    "gpu_aware": "0",
    "gpu_chunk_kib": "512",
    "shared_memory": "0",
    "native": "0",
    "spares": "2",
}
FIELDS = [field.name for field in dataclasses.fields(Settings)]


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_one_variable(field: str) -> None:
    value = VALID.get(field, "some text")
    settings = Settings.from_environ({PREFIX + field.upper(): value})
    assert settings == dataclasses.replace(Settings(), **{field: value})


def test_nothing_is_set_by_default() -> None:
    assert dataclasses.asdict(Settings.from_environ({"HOME": "/root", "LAUNCHER": "x"})) == dict.fromkeys(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_an_empty_variable_counts_as_unset(field: str) -> None:
    assert Settings.from_environ({PREFIX + field.upper(): ""}) == Settings()


@pytest.mark.parametrize("text", ["slrum", "MPI", "mpi "])
def test_another_launcher_is_refused_with_those_that_exist(text: str) -> None:
    with pytest.raises(LaunchError, match=f"^MPICOMM_LAUNCHER must be one of .*, got {text}\\.") as caught:
        Settings.from_environ({"MPICOMM_LAUNCHER": text})
    assert ", ".join(LAUNCHERS) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ON_TIMEOUT", "never"),
        ("DEBUG", "yes"),
        ("HANG_SECONDS", "0"),
        ("HANG_SECONDS", "soon"),
        ("SPARES", "-1"),
        ("GPU_AWARE", "maybe"),
        ("GPU_CHUNK_KIB", "0"),
        ("GPU_CHUNK_KIB", "4M"),
    ],
)
def test_an_invalid_value_is_refused(name: str, text: str) -> None:
    with pytest.raises(LaunchError, match=f"^{PREFIX}{name} must be .*, got {text}\\."):
        Settings.from_environ({PREFIX + name: text})


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "86401", "long"])
def test_a_host_timeout_out_of_range_is_refused(text: str) -> None:
    expected = f"^MPICOMM_HOST_TIMEOUT must be a whole number of seconds from 1 to 86400, got {text}\\.\n"
    with pytest.raises(LaunchError, match=expected):
        Settings.from_environ({"MPICOMM_HOST_TIMEOUT": text})


def test_the_meaning_of_the_variables() -> None:
    quiet, loud = Settings(), Settings(on_timeout="raise", debug="1", hang_seconds="2.5")
    assert (quiet.raises_timeouts, quiet.compares_calls, quiet.seconds_to_report) == (False, False, 60)
    assert (loud.raises_timeouts, loud.compares_calls, loud.seconds_to_report) == (True, True, 2.5)
    off = Settings(on_timeout="abort", debug="0")
    assert (off.raises_timeouts, off.compares_calls) == (False, False)
    assert [Settings(shared_memory=text).shares_memory for text in (None, "1", "0")] == [True, True, False]
    assert [Settings(native=text).uses_native for text in (None, "1", "0")] == [True, True, False]
    assert [Settings(host_timeout=text).seconds_to_lose_host for text in (None, "300")] == [30, 300]
    assert quiet.gpu_chunk_bytes == 2**22
    assert Settings(gpu_chunk_kib="512").gpu_chunk_bytes == 2**19


def test_unknown_variables_are_refused_by_name_with_those_that_exist() -> None:
    with pytest.raises(LaunchError, match=r"^unknown environment variable MPICOMM_COLOUR, MPICOMM_LUANCHER") as caught:
        Settings.from_environ({"MPICOMM_LUANCHER": "mpi", "MPICOMM_COLOUR": "red"})
    assert all(PREFIX + field.upper() in str(caught.value) for field in FIELDS)


def test_every_setting_is_explained() -> None:
    import inspect

    source = inspect.getsource(Settings)
    for field in FIELDS:
        declaration = source.index(f"    {field}: ")
        assert source[declaration:].splitlines()[1].strip().startswith('"""'), field
