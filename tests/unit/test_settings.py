"""The MPICOMM_* environment variables."""

from __future__ import annotations

import dataclasses

import pytest

from mpicomm.errors import LaunchError
from mpicomm.settings import LAUNCHERS, PREFIX, Settings

VALID = {
    "launcher": ("mpi", "mpi"),
    "on_timeout": ("raise", "raise"),
    "hang_seconds": ("2.5", 2.5),
    "host_timeout": ("300", 300),
    "debug": ("1", True),
    "gpu_aware": ("0", "0"),
    "gpu_chunk_kib": ("512", 512),
    "shared_memory": ("0", False),
    "native": ("0", False),
    "spares": ("2", 2),
}
FIELDS = [field.name for field in dataclasses.fields(Settings)]


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_one_variable(field: str) -> None:
    text, value = VALID.get(field, ("some text", "some text"))
    settings = Settings.from_environ({PREFIX + field.upper(): text})
    assert settings == dataclasses.replace(Settings(), **{field: value})


def test_nothing_is_set_by_default() -> None:
    assert Settings.from_environ({"HOME": "/root", "LAUNCHER": "x"}) == Settings()


@pytest.mark.parametrize("field", FIELDS)
def test_an_empty_variable_counts_as_unset(field: str) -> None:
    assert Settings.from_environ({PREFIX + field.upper(): ""}) == Settings()


@pytest.mark.parametrize("text", ["slrum", "MPI", "mpi "])
def test_another_launcher_is_refused_with_those_that_exist(text: str) -> None:
    with pytest.raises(LaunchError, match=f"^MPICOMM_LAUNCHER must be one of .*, got '{text}'\\.") as caught:
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
        ("SPARES", "²"),
        ("GPU_AWARE", "maybe"),
        ("GPU_CHUNK_KIB", "0"),
        ("GPU_CHUNK_KIB", "4M"),
    ],
)
def test_an_invalid_value_is_refused(name: str, text: str) -> None:
    with pytest.raises(LaunchError, match=f"^{PREFIX}{name} must be .*, got '{text}'\\."):
        Settings.from_environ({PREFIX + name: text})


def test_a_number_with_more_digits_than_int_accepts_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"^MPICOMM_SPARES must be a whole number of processes, got '999") as caught:
        Settings.from_environ({"MPICOMM_SPARES": "9" * 4301})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "86401", "long"])
def test_a_host_timeout_out_of_range_is_refused(text: str) -> None:
    expected = f"^MPICOMM_HOST_TIMEOUT must be a whole number of seconds from 1 to 86400, got '{text}'\\.\n"
    with pytest.raises(LaunchError, match=expected):
        Settings.from_environ({"MPICOMM_HOST_TIMEOUT": text})


@pytest.mark.parametrize(("name", "default"), [("debug", False), ("shared_memory", True), ("native", True)])
def test_a_flag_is_0_or_1(name: str, default: bool) -> None:
    settings = [Settings(), *(Settings.from_environ({PREFIX + name.upper(): text}) for text in "01")]
    assert [getattr(each, name) for each in settings] == [default, False, True]


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
