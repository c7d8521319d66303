"""The variables of a Kubernetes operator's launcher, for each MPI of the operator and each MPI that mpi4py loads."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mpicomm import mpi
from mpicomm.cli import launching
from mpicomm.errors import LaunchError
from mpicomm.job import mpi_job
from mpicomm.launch import environment, mpi_operator
from mpicomm.launch.allocation import Host
from mpicomm.launch.mpi_library import Library
from mpicomm.launch.request import Request

OPEN_MPI_4 = Library("Open MPI", "4.1.4")
OPEN_MPI = Library("Open MPI", "5.0.11")
MPICH = Library("MPICH", "5.0.2")
INTEL = Library("Intel MPI", "2021.18.1")

HOST_FILES = {
    "OMPI_MCA_orte_default_hostfile": OPEN_MPI_4,
    "PRTE_MCA_prte_default_hostfile": OPEN_MPI,
    "HYDRA_HOST_FILE": MPICH,
    "I_MPI_HYDRA_HOST_FILE": INTEL,
}
FILE = "pi-worker-0.pi.ns.svc slots=2\npi-worker-1.pi.ns.svc slots=2\npi-worker-2.pi.ns.svc slots=2\n"
NAMES = [f"pi-worker-{index}.pi.ns.svc" for index in range(3)]


# -- the host file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", HOST_FILES)
@pytest.mark.parametrize("library", HOST_FILES.values(), ids=lambda library: f"{library.vendor}-{library.version}")
def test_every_mpi_gets_the_hosts_as_options(variable: str, library: Library) -> None:
    environ = {variable: "/etc/mpi/hostfile", "K_MPI_JOB_ROLE": "launcher", "NVIDIA_VISIBLE_DEVICES": "", "KEPT": "x"}
    assert mpi_operator.host_file(environ) == (variable, "/etc/mpi/hostfile")
    assert mpi_operator.for_launcher(environ, library) == {"KEPT": "x"}
    is_ignored = mpi_operator.ignored_host_file(environ, library) is not None
    assert is_ignored == (HOST_FILES[variable] != library)


@pytest.mark.parametrize(
    ("text", "ranks", "slots"),
    [
        (FILE, None, [2, 2, 2]),
        (FILE.replace(" slots=", ":"), None, [2, 2, 2]),
        (FILE, 5, [2, 2, 2]),
        (FILE, 12, [2, 2, 2]),
        ("\n".join(NAMES), None, [1, 1, 1]),
        ("\n".join(NAMES), 6, [2, 2, 2]),
    ],
)
def test_every_host_has_a_rank(text: str, ranks: int | None, slots: list[int]) -> None:
    assert mpi_operator.parse(text, "f", ranks) == tuple(map(Host, NAMES, slots))


@pytest.mark.parametrize(("ranks", "idle"), [(4, NAMES[2:]), (3, NAMES[2:]), (2, NAMES[1:]), (1, NAMES[1:])])
def test_a_host_without_a_rank_is_an_error(ranks: int, idle: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        mpi_operator.parse(FILE, "/etc/mpi/hostfile", ranks)
    first, last = str(caught.value).splitlines()
    assert first == f"-n {ranks} leaves {len(idle)} of 3 hosts in /etc/mpi/hostfile without a rank: {', '.join(idle)}"
    used = ",".join(f"{name}:2" for name in NAMES if name not in idle)
    assert last == f"To use all hosts, pass -n 6 or omit -n. To use the other hosts only, pass --hosts {used}"


def test_ranks_on_fewer_hosts_than_an_ignored_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hostfile"
    path.write_text(FILE)
    environ = {"OMPI_MCA_orte_default_hostfile": str(path)}
    monkeypatch.setattr(mpi, "library", lambda: OPEN_MPI)
    with pytest.raises(LaunchError, match=r"the ranks run on 2 of 3 hosts: pi-launcher, b\n.*ignores this variable"):
        mpi_job._refuse_unused_hosts(environ, ["pi-launcher", "b", "pi-launcher"])
    mpi_job._refuse_unused_hosts(environ, ["a", "b", "c", "a"])
    mpi_job._refuse_unused_hosts({}, ["a"])
    in_another_container = {"OMPI_MCA_orte_default_hostfile": str(tmp_path / "none")}
    mpi_job._refuse_unused_hosts(in_another_container, ["a"])
    monkeypatch.setattr(mpi, "library", lambda: OPEN_MPI_4)
    mpi_job._refuse_unused_hosts(environ, ["a"])  # its launcher uses the file: the user chose fewer ranks


# -- ssh ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "library", "expected"),
    [
        ("OMPI_MCA_plm_rsh_args", OPEN_MPI, ["PRTE_MCA_plm_ssh_args"]),
        ("OMPI_MCA_plm_rsh_args", MPICH, ["HYDRA_LAUNCHER_EXTRA_ARGS", "HYDRA_LAUNCH_EXTRA_ARGS"]),
        ("OMPI_MCA_plm_rsh_args", INTEL, ["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"]),
        ("HYDRA_LAUNCH_EXTRA_ARGS", MPICH, ["HYDRA_LAUNCHER_EXTRA_ARGS"]),
        ("HYDRA_LAUNCH_EXTRA_ARGS", OPEN_MPI, ["PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args"]),
        ("I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", OPEN_MPI, ["PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args"]),
        ("OMPI_MCA_plm_rsh_agent", MPICH, ["HYDRA_LAUNCHER_EXEC"]),
        ("OMPI_MCA_plm_rsh_agent", OPEN_MPI, ["PRTE_MCA_plm_ssh_agent"]),
        ("PRTE_MCA_plm_ssh_agent", INTEL, ["I_MPI_HYDRA_BOOTSTRAP_EXEC"]),
    ],
)
def test_ssh_options_of_one_mpi_reach_another(variable: str, library: Library, expected: list[str]) -> None:
    environ = {"HYDRA_HOST_FILE": "f", variable: "-o A=1"}
    assert mpi_operator.for_launcher(environ, library) == {variable: "-o A=1"} | dict.fromkeys(expected, "-o A=1")


def test_ssh_options_of_the_mpi_itself_have_priority() -> None:
    environ = {"OMPI_MCA_plm_rsh_args": "-o A=1", "PRTE_MCA_plm_ssh_args": "-p 2222"}
    assert set(mpi_operator.for_launcher(environ, OPEN_MPI).values()) == {"-p 2222"}


def test_containers_share_their_variables() -> None:
    environ = {"DATA": "/d", "PATH": "/bin", "HOSTNAME": "pi-launcher", "PRTE_MCA_x": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert environment.forwarded({**environ, "BASH_FUNC_x%%": "() { :; }"}, everything=True) == ["DATA", "PATH"]
    assert environment.forwarded(environ) == ["PATH"]


# -- this host ---------------------------------------------------------------------------------------------------------


def test_a_request_without_a_host_file_is_unchanged() -> None:
    request, environ = Request(("train",)), {"PATH": "/bin", "OMPI_MCA_plm_rsh_args": "-o A=1"}
    assert launching._on_operator_hosts(request, OPEN_MPI, environ) == (request, environ)


def test_hosts_that_the_user_names_replace_the_host_file() -> None:
    request = Request(("train",), ranks=1, hosts=(Host("a", 1),))
    changed, environ = launching._on_operator_hosts(request, MPICH, {"HYDRA_HOST_FILE": "/does/not/exist"})
    assert (changed.hosts, changed.forwards_all, environ) == (request.hosts, True, {})


def test_a_missing_host_file_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"cannot read the host file of HYDRA_HOST_FILE: .*\nPass --hosts"):
        launching._on_operator_hosts(Request(("train",)), MPICH, {"HYDRA_HOST_FILE": "/does/not/exist"})


def test_names_that_resolve_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, calls = tmp_path / "hostfile", []
    path.write_text(FILE)

    def resolve(name: str, port: None) -> None:
        calls.append(name)
        if name == NAMES[2] and calls.count(name) < 3:
            raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(launching, "_NAME_PAUSE_SECONDS", 0.01)
    changed, _ = launching._on_operator_hosts(Request(("train",)), MPICH, {"HYDRA_HOST_FILE": str(path)})
    assert [host.name for host in changed.hosts] == NAMES
    assert capsys.readouterr().err == f"mpicomm run: waiting for the addresses of 1 hosts: {NAMES[2]}\n"
    calls.clear()
    monkeypatch.setattr(launching, "_NAME_SECONDS", 0.0)
    with pytest.raises(LaunchError, match=rf"1 of 3 hosts had no address after 0 s: {NAMES[2]}\nCheck that their pods"):
        launching._on_operator_hosts(Request(("train",)), MPICH, {"HYDRA_HOST_FILE": str(path)})
