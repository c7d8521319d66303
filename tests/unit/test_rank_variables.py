"""The variables of torchrun's ranks that `mpicomm run` sets for programs that do not call `bootstrap()`."""

from __future__ import annotations

import socket

import pytest

from mpicomm import rank_variables
from mpicomm.launch.known_launchers import OPEN_MPI, PMIX, SLURM
from mpicomm.settings import PARENT_VARIABLE
from mpicomm.watchdog.parent_link import Parent

SIZE = 4
RANK = {OPEN_MPI.rank: "3", OPEN_MPI.size: str(SIZE), OPEN_MPI.local_rank: "1", OPEN_MPI.local_size: "2"}


def parent(*addresses: str, port: int = 1, ranks: int = SIZE) -> dict[str, str]:
    return {PARENT_VARIABLE: str(Parent(addresses, port, b"secret", 2, ranks))}


def test_a_rank_of_mpirun() -> None:
    assert rank_variables.of_rank({**RANK, **parent("127.0.0.1")}) == {
        "RANK": "3",
        "WORLD_SIZE": str(SIZE),
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "2",
        "_MPICOMM_RANK_STORE": "127.0.0.1 2",
        "TORCHELASTIC_USE_AGENT_STORE": "1",
    }


def test_srun_passes_no_size_through_pmix() -> None:
    environ = {PMIX.rank: "2", **parent("127.0.0.1")}
    assert rank_variables.of_rank(environ)["WORLD_SIZE"] == str(SIZE)


@pytest.mark.parametrize(
    "environ",
    [{}, {PMIX.rank: "2", **parent("127.0.0.1", ranks=0)}, {**RANK, OPEN_MPI.size: "four"}, {SLURM.rank: "1"}],
    ids=["no launcher", "no size", "no number", "no step"],
)
def test_no_variables_without_rank_and_size(environ: dict[str, str]) -> None:
    assert rank_variables.of_rank(environ) == {}


def test_variables_of_the_user_are_kept() -> None:
    of_user = {"LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    found = rank_variables.of_rank({**RANK, **of_user, **parent("127.0.0.1")})
    assert found == {"RANK": "3", "WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": "2"}
    found = rank_variables.of_rank({**RANK, "MASTER_ADDR": "localhost", **parent("127.0.0.1")})
    assert "MASTER_ADDR" not in found
    assert found["MASTER_PORT"] == "2"


def test_another_version_of_mpicomm_run() -> None:
    found = rank_variables.of_rank({**RANK, PARENT_VARIABLE: "127.0.0.1/1/00"})
    assert found["RANK"] == "3"
    assert "MASTER_PORT" not in found


def test_an_address_that_cannot_be_reached_is_left_out() -> None:
    """The store starts at the first connection to its port, so the test connects to the other one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environ = {**RANK, **parent("127.1.2.3", "127.0.0.1", "127.9.9.9", port=listener.getsockname()[1])}
        assert rank_variables.of_rank(environ)["MASTER_ADDR"] == "127.0.0.1"


def test_no_colors_unless_the_output_is_a_terminal() -> None:
    on_terminal = Parent(("127.0.0.1",), 1, b"secret", has_terminal=True)
    assert rank_variables.without_colors(parent("127.0.0.1")).keys() == {"TERM", "NO_COLOR", "TTY_COMPATIBLE"}
    assert rank_variables.without_colors({**parent("127.0.0.1"), "FORCE_COLOR": "1"}) == {}
    assert rank_variables.without_colors({PARENT_VARIABLE: str(on_terminal)}) == {}
    assert rank_variables.without_colors({}) == {}
