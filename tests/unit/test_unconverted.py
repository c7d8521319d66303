"""Which calls of init_process_group() use the store of `mpicomm run`."""

from __future__ import annotations

from typing import Any

import pytest

from mpicomm import unconverted
from mpicomm.settings import STORE_OF_RANK

ENVIRON = {
    STORE_OF_RANK: "10.0.0.7 4000",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "4000",
    "RANK": "2",
    "WORLD_SIZE": "3",
}


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({}, {}),
        ({"init_method": "env://"}, {}),
        ({"rank": 2, "world_size": 3}, {"RANK": "0"}),
        ({}, {"MASTER_ADDR": "localhost"}),
        ({"init_method": "tcp://node7:4000", "rank": 2, "world_size": 3}, {}),
        ({"init_method": "tcp://node7:4000?rank=2&world_size=3"}, {"RANK": "0"}),
    ],
)
def test_calls_at_the_store(given: dict[str, Any], environ: dict[str, str]) -> None:
    store = unconverted._Store.of(given, {**ENVIRON, **environ})
    assert store is not None
    assert (store.address, store.port, store.rank, store.size) == ("10.0.0.7", 4000, 2, 3)


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({}, {"MASTER_PORT": "29500"}),
        ({"store": object()}, {}),
        ({"init_method": "tcp://10.0.0.7:29500", "rank": 2, "world_size": 3}, {}),
        ({"init_method": "file:///scratch/store", "rank": 2, "world_size": 3}, {}),
        ({}, {STORE_OF_RANK: ""}),
    ],
)
def test_calls_elsewhere(given: dict[str, Any], environ: dict[str, str]) -> None:
    assert unconverted._Store.of(given, {**ENVIRON, **environ}) is None
