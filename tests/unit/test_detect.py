"""Detection of the launcher of a process, and of contradictions: every row of the tables, every rule."""

from __future__ import annotations

import pytest

from mpicomm.errors import LaunchError
from mpicomm.launch import detect
from mpicomm.launch.allocation import Allocation, Host, HostAllocation, SlurmAllocation
from mpicomm.launch.detect import Launch
from mpicomm.launch.known_launchers import COMPARED, MPI_LAUNCHERS, SLURM, TORCHRUN, Launcher
from mpicomm.launch.mpi_library import Library

RANK, SIZE, LOCAL_RANK, LOCAL_SIZE = 5, 8, 1, 4
COMMAND = "python train.py --lr 0.1"
OPEN_MPI = Library("Open MPI", "5.0.11", "/opt/ompi/lib/libmpi.so", "/opt/ompi/bin/mpiexec", "Open MPI v5.0.11")
MPICH = Library(
    "MPICH", "5.0.2", "/opt/mpich/lib/libmpi.so", "/opt/mpich/bin/mpiexec", "MPICH configure: --with-device=ch4:ofi"
)
INTEL = Library("Intel MPI", "2021.18.1", "/opt/intel/lib/libmpi.so", "/opt/intel/bin/mpiexec", "Intel(R) MPI Library")
MPICH_PMIX = Library("MPICH", "5.0.2", description="MPICH configure: --with-pmix=/usr")


def environ_of(
    launcher: Launcher, rank: int = RANK, size: int = SIZE, local_rank: int = LOCAL_RANK, local_size: int = LOCAL_SIZE
) -> dict[str, str]:
    """Return the variables that a launcher sets for one rank."""
    values = {
        launcher.rank: rank,
        launcher.size: size,
        launcher.local_rank: local_rank,
        launcher.local_size: local_size,
    }
    return {name: str(value) for name, value in values.items() if name}


def problem(environ: dict[str, str], rank: int, size: int, library: Library = OPEN_MPI) -> str | None:
    return detect.problem_after_init(detect.detect(environ), environ, library, rank, size, COMMAND)


def by_title(word: str) -> Launcher:
    (found,) = [launcher for launcher in MPI_LAUNCHERS if word in launcher.title]
    return found


MPIRUN, PALS = by_title("mpirun"), by_title("PALS")
PMI, PMIX = by_title("PMI launcher"), by_title("PMIx launcher")
each_launcher = pytest.mark.parametrize("launcher", MPI_LAUNCHERS, ids=lambda launcher: launcher.title)


# -- the tables of variables -----------------------------------------------------------------------------------------

# The variables that each launcher sets for rank 5 of 8 on two nodes, with local rank 1 of 4; the most specific launcher
# is first. Detection must not use the number of nodes or the node rank as another value.
SET_BY = {
    "Open MPI's mpirun": (
        "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
        "OMPI_COMM_WORLD_NODE_RANK=0 OMPI_UNIVERSE_SIZE=16"
    ),
    "MVAPICH's launcher": (
        "MV2_COMM_WORLD_RANK=5 MV2_COMM_WORLD_SIZE=8 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=4"
    ),
    "PALS mpiexec": "PALS_RANKID=5 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=4 PALS_NODEID=2",
    "aprun": "ALPS_APP_PE=5 ALPS_APP_ID=17",
    "jsrun": "JSM_NAMESPACE_RANK=5 JSM_NAMESPACE_SIZE=8 JSM_NAMESPACE_LOCAL_RANK=1",
    "Flux": "FLUX_TASK_RANK=5 FLUX_JOB_SIZE=8 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=2",
    "a PMI launcher (mpiexec)": "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4 PMI_FD=7",
    "a PMIx launcher": "PMIX_RANK=5 PMIX_NAMESPACE=prterun-1@1",
}
PLACE_BY = dict.fromkeys(SET_BY, (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE)) | {
    "PALS mpiexec": (RANK, None, LOCAL_RANK, LOCAL_SIZE),
    "aprun": (RANK, None, None, None),
    "jsrun": (RANK, SIZE, LOCAL_RANK, None),
    "Flux": (RANK, SIZE, LOCAL_RANK, None),
    "a PMIx launcher": (RANK, None, None, None),
}


def set_by(title: str) -> dict[str, str]:
    return dict(each.split("=") for each in SET_BY[title].split())


@pytest.mark.parametrize("title", SET_BY)
def test_a_launcher_is_detected_by_its_variables(title: str) -> None:
    launch = detect.detect(set_by(title))
    (claim,) = launch.claims
    assert (launch.kind, launch.title, launch.forced) == ("mpi", title, False)
    assert (claim.rank, claim.size, claim.local_rank, claim.local_size) == PLACE_BY[title]
    assert (launch.rank, launch.size, launch.local_size) == (RANK, claim.size or 1, claim.local_size or 1)


@each_launcher
def test_an_empty_variable_counts_as_unset(launcher: Launcher) -> None:
    assert detect.detect(dict.fromkeys(launcher.variables(COMPARED), "")).claims == ()


def test_the_most_specific_launcher_gives_the_title() -> None:
    environ = {name: text for title in SET_BY for name, text in set_by(title).items()}
    launch = detect.detect(environ)
    assert launch.title == "Open MPI's mpirun"
    assert [claim.title for claim in launch.claims] == list(SET_BY) == [each.title for each in MPI_LAUNCHERS]


@each_launcher
def test_the_rank_of_an_mpi_launcher_is_the_best_guess(launcher: Launcher) -> None:
    """RANK may be left over from another job, and SLURM_PROCID is the rank of mpirun's daemon."""
    assert detect.guess_rank({launcher.rank: "5", "RANK": "1", "SLURM_PROCID": "0"}) == 5


def test_without_an_mpi_launcher_others_give_the_rank() -> None:
    assert detect.guess_rank({"RANK": "1", "SLURM_PROCID": "0"}) == 1
    assert detect.guess_rank({"PMI_RANK": "", "RANK": "one", "SLURM_PROCID": "3"}) == 3
    assert detect.guess_rank({}) == 0


def test_plain_python_claims_nothing() -> None:
    launch = detect.detect({})
    assert launch == Launch("mpi", "plain python")
    assert (launch.rank, launch.size, launch.local_size) == (0, 1, 1)


def test_srun_with_a_pmi_is_called_srun() -> None:
    environ = environ_of(PMI) | {"SLURM_STEP_ID": "0", "SLURM_MPI_TYPE": "pmi2"}
    assert detect.detect(environ).title == "srun --mpi=pmi2"


CRAY = Library(
    "Cray MPICH", "8.1.28", "/opt/cray/lib/libmpi_gnu.so", description="MPI VERSION    : CRAY MPICH version 8.1.28"
)
# Slurm's plugin mpi/cray_shasta sets variables of PALS and of PMI, but not PALS_LOCAL_SIZE.
CRAY_SHASTA = {"PALS_RANKID": str(RANK), "PALS_LOCAL_RANKID": str(LOCAL_RANK), "PALS_NODEID": "2"}
CRAY_SHASTA |= {"PMI_RANK": str(RANK), "PMI_SIZE": str(SIZE), "SLURM_STEP_ID": "0", "SLURM_MPI_TYPE": "cray_shasta"}


def test_srun_on_cray_is_called_srun() -> None:
    environ = environ_of(SLURM) | CRAY_SHASTA
    launch = detect.detect(environ)
    assert launch.title == "srun --mpi=cray_shasta"
    assert (launch.rank, launch.size, launch.value("local_rank")) == (RANK, SIZE, LOCAL_RANK)
    assert problem(environ, RANK, SIZE, CRAY) is None
    message = problem(environ, 0, 1, MPICH)
    assert f"  srun --mpi=pmi2 {COMMAND}\n" in message


@pytest.mark.parametrize(
    ("library", "start"),
    [
        (CRAY, f"mpiexec --pmi cray -n {LOCAL_SIZE} {COMMAND}"),
        (
            Library("MPICH", "5.0.0", description="configure: --with-pmix"),
            f"mpiexec --pmi pmix -n {LOCAL_SIZE} {COMMAND}",
        ),
        (MPICH, f"{MPICH.mpiexec} -n {LOCAL_SIZE} {COMMAND}"),  # its own
    ],
)
def test_pals_with_the_wrong_wire_up_is_an_error_with_the_right_one(library: Library, start: str) -> None:
    environ = environ_of(PALS, rank=1, local_rank=1, local_size=LOCAL_SIZE)
    assert f"\n  {start}\n" in problem(environ, 0, 1, library)


NUMBERS = [name for launcher in MPI_LAUNCHERS for name in launcher.variables(COMPARED)]


@pytest.mark.parametrize(
    ("name", "text"), [*((name, "two") for name in NUMBERS), *((NUMBERS[0], text) for text in ("1.5", "4(x2)", "0x1"))]
)
def test_a_variable_that_is_not_a_number_is_an_error(name: str, text: str) -> None:
    (launcher,) = [launcher for launcher in MPI_LAUNCHERS if name in launcher.variables(COMPARED)]
    with pytest.raises(LaunchError, match=f"^{name}=") as caught:
        detect.detect(environ_of(launcher) | {name: text})
    assert text in str(caught.value)
    assert f"Unset {name}" in str(caught.value)


# -- a) torchrun -----------------------------------------------------------------------------------------------------


def test_under_torchrun_nothing_else_is_compared() -> None:
    environ = {"TORCHELASTIC_RUN_ID": "none"} | environ_of(TORCHRUN) | environ_of(MPIRUN, rank=0, size=2)
    environ |= environ_of(SLURM, rank=3, size=16) | {"SLURM_STEP_ID": "0"}
    launch = detect.detect(environ)
    assert (launch.kind, launch.rank, launch.size, launch.local_size) == ("torchrun", RANK, SIZE, LOCAL_SIZE)
    assert detect.problem_before_init(launch, {}, MPICH, COMMAND) is None
    assert detect.problem_after_init(launch, environ, OPEN_MPI, 0, 1, COMMAND) is None
    assert detect.warning_after_init(launch, environ, 1, MANY) is None
    assert detect.warning_of_agents(environ | {"GROUP_WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(
    "outer", [environ_of(MPIRUN), environ_of(PMI), environ_of(SLURM) | {"SLURM_STEP_ID": "0"}], ids=str
)
def test_several_torchruns_of_one_node_are_several_worlds(outer: dict[str, str]) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    message = detect.warning_of_agents(torchrun | outer)
    assert f"started {SIZE} torchruns" in message
    assert "WORLD_SIZE=2" in message
    assert detect.warning_of_agents(torchrun) is None


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_torchrun_must_set_rank_and_size(missing: str) -> None:
    environ = {"TORCHELASTIC_RUN_ID": "none"} | environ_of(TORCHRUN)
    del environ[missing]
    with pytest.raises(LaunchError, match=rf"did not set {missing}"):
        detect.detect(environ)


def test_rank_and_world_size_alone_are_not_torchrun() -> None:
    assert detect.detect(environ_of(TORCHRUN)).kind == "mpi"


# -- b) MPI's launchers ----------------------------------------------------------------------------------------------


@each_launcher
@pytest.mark.parametrize("library", [OPEN_MPI, MPICH, INTEL], ids=lambda library: library.vendor)
def test_a_world_of_one_contradicts_its_launcher(launcher: Launcher, library: Library) -> None:
    environ = environ_of(launcher)
    message = problem(environ, 0, 1, library)
    assert launcher.title in message
    assert all(f"{name}={value}" in message for name, value in environ.items())
    assert f"MPI: rank 0 of 1 ({library.title})" in message
    assert f"  {starter(launcher, library)} -n " in message
    assert f" {COMMAND}\n" in message


@pytest.mark.parametrize(
    "launcher", [each for each in MPI_LAUNCHERS if each.size or each.local_size], ids=lambda launcher: launcher.title
)
def test_rank_0_of_a_wrong_launch_detects_it_too(launcher: Launcher) -> None:
    assert problem(environ_of(launcher, rank=0, local_rank=0), 0, 1) is not None


@each_launcher
def test_a_launcher_of_one_process_agrees_with_a_world_of_one(launcher: Launcher) -> None:
    assert problem(environ_of(launcher, rank=0, size=1, local_rank=0, local_size=1), 0, 1) is None


@pytest.mark.parametrize("launcher", [each for each in MPI_LAUNCHERS if each.size], ids=lambda launcher: launcher.title)
def test_the_remedy_has_the_number_of_ranks(launcher: Launcher) -> None:
    message = problem(environ_of(launcher), 0, 1)
    assert f"{SIZE} processes were started" in message
    assert f"  {starter(launcher, OPEN_MPI)} -n {SIZE} {COMMAND}\n" in message


def starter(launcher: Launcher, library: Library) -> str:
    if launcher.title != "Flux":
        return library.mpiexec
    return "flux run -o pmi=pmix" if library is OPEN_MPI else "flux run"


@each_launcher
def test_slurm_is_ignored_if_an_mpi_launcher_sets_variables(launcher: Launcher) -> None:
    """Under mpirun in a Slurm job, SLURM_* describe the launcher's daemons, one per node."""
    environ = environ_of(launcher) | environ_of(SLURM, rank=0, size=2)
    environ |= {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    assert problem(environ, RANK, SIZE) is None
    assert detect.warning_after_init(detect.detect(environ), environ, SIZE, MANY) is None


def test_invalid_slurm_variables_are_ignored_under_mpirun() -> None:
    environ = environ_of(MPIRUN) | {"SLURM_NTASKS": "many", "SLURM_STEP_NUM_TASKS": "some"}
    assert problem(environ, RANK, SIZE) is None
    assert detect.warning_after_init(detect.detect(environ), environ, SIZE, MANY) is None


@pytest.mark.parametrize("outer", MPI_LAUNCHERS[:-1], ids=lambda launcher: launcher.title)
def test_one_agreeing_launcher_is_sufficient_in_a_larger_world(outer: Launcher) -> None:
    """A job started from the shell of another job inherits the variables of the outer launcher."""
    inner = PMIX if outer is not PMIX else PMI
    environ = environ_of(outer, rank=0, size=64, local_rank=0, local_size=16) | environ_of(inner)
    assert problem(environ, RANK, SIZE) is None


def test_one_agreeing_launcher_is_not_sufficient_in_a_world_of_one() -> None:
    environ = environ_of(MPIRUN, rank=0, size=4) | environ_of(PMI, rank=0, size=1, local_rank=0, local_size=1)
    message = problem(environ, 0, 1)
    assert "OMPI_COMM_WORLD_SIZE=4" in message
    assert "MPICOMM_LAUNCHER=single" in message


def test_a_wrong_rank_in_a_right_size_is_a_contradiction() -> None:
    assert problem(environ_of(PMI), (RANK + 1) % SIZE, SIZE) is not None


def test_more_local_ranks_than_ranks_are_a_contradiction() -> None:
    environ = environ_of(PALS, rank=0, local_rank=0, local_size=SIZE)
    assert problem(environ, 0, SIZE) is None
    assert problem(environ, 0, SIZE - 1) is not None


def test_only_a_process_without_any_launcher_is_plain() -> None:
    assert detect.detect({}).is_plain
    assert detect.detect({}, "mpi").is_plain
    assert not detect.detect({}, "single").is_plain
    for environ in (environ_of(MPIRUN), environ_of(SLURM) | {"SLURM_STEP_ID": "0"}):
        assert not detect.detect(environ).is_plain


# -- b) reported before MPI_Init ---------------------------------------------------------------------------------------


def before(environ: dict[str, str], library: Library, override: str | None = None) -> str | None:
    return detect.problem_before_init(detect.detect(environ, override), environ, library, COMMAND)


def test_mpich_under_mpirun_is_an_error_before_it_aborts() -> None:
    message = before(environ_of(MPIRUN) | environ_of(PMIX), MPICH)
    assert MPIRUN.title in message
    assert MPICH.title in message
    assert f"  {MPICH.mpiexec} -n {SIZE} {COMMAND}\n" in message
    assert f"\n  library:  {MPICH.title}, built without PMIx\n" in message


def test_mpich_under_srun_with_pmix_is_an_error_with_the_right_type() -> None:
    environ = environ_of(PMIX) | {"SLURM_STEP_ID": "0", "SLURM_MPI_TYPE": "pmix_v4"}
    message = before(environ, MPICH)
    assert "srun --mpi=pmix_v4" in message
    assert f"  srun --mpi=pmi2 {COMMAND}\n" in message


def test_mpich_under_pals_with_pmix_alone_is_an_error_before_it_aborts() -> None:
    """PALS passes the rank in its own variables; the only process management interface that it offers here is PMIx."""
    message = before(environ_of(PALS, rank=1, local_size=LOCAL_SIZE) | environ_of(PMIX, rank=1), MPICH)
    assert f"  {MPICH.mpiexec} -n {LOCAL_SIZE} {COMMAND}\n" in message, "the ranks of the node"


@pytest.mark.parametrize(
    ("environ", "library"),
    [
        (environ_of(MPIRUN) | environ_of(PMIX), OPEN_MPI),
        (environ_of(MPIRUN) | environ_of(PMIX), MPICH_PMIX),
        (environ_of(MPIRUN), Library("MPICH", "4.0", description="a text that says nothing")),
        (environ_of(PMI), MPICH),
        (environ_of(MPIRUN) | environ_of(PMI), MPICH),  # the variables of mpirun are left over
        (environ_of(PALS), MPICH),
        ({}, MPICH),
    ],
)
def test_no_error_before_init_if_mpi_may_start(environ: dict[str, str], library: Library) -> None:
    assert before(environ, library) is None


@pytest.mark.parametrize("override", ["single", "mpi"], ids=repr)  # pytest-mpi interprets a test id `mpi` as its marker
def test_no_error_before_init_if_the_user_sets_the_launcher(override: str) -> None:
    assert before(environ_of(MPIRUN), MPICH, override) is None


# -- c) srun without a PMI -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("library", "kind"), [(OPEN_MPI, "pmix"), (MPICH, "pmi2"), (INTEL, "pmi2")])
@pytest.mark.parametrize("rank", range(SIZE))
def test_srun_without_a_pmi(library: Library, kind: str, rank: int) -> None:
    environ = environ_of(SLURM, rank=rank) | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": str(SIZE)}
    message = problem(environ, 0, 1, library)
    assert f"SLURM_STEP_NUM_TASKS={SIZE} SLURM_PROCID={rank}" in message
    assert library.title in message
    assert f"  srun --mpi={kind} {COMMAND}\n" in message
    assert "MPICOMM_LAUNCHER=slurm" in message


def test_the_pmi_that_srun_offered_is_named() -> None:
    environ = environ_of(SLURM) | {"SLURM_STEP_ID": "0", "SLURM_MPI_TYPE": "cray_shasta"}
    message = problem(environ, 0, 1)
    assert "--mpi=cray_shasta" in message


@pytest.mark.parametrize("rank", range(SIZE))
def test_pmix_under_slurm_sets_no_size_but_slurm_does(rank: int) -> None:
    """PMIX_RANK=0 alone would agree with a world of size 1."""
    environ = environ_of(PMIX, rank=rank) | environ_of(SLURM, rank=rank) | {"SLURM_STEP_ID": "0"}
    message = problem(environ, 0, 1)
    assert f"{SIZE} " in message.splitlines()[0], "every rank is to say how many were started, not what it can guess"
    assert f"  srun --mpi={OPEN_MPI.srun_type} {COMMAND}\n" in message
    assert problem(environ, rank, SIZE) is None


def test_a_step_of_one_task_is_a_world_of_one() -> None:
    assert problem(environ_of(SLURM, rank=0, size=1) | {"SLURM_STEP_ID": "0"}, 0, 1) is None


# -- d) leftover variables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stale", "rank", "size"),
    [({"RANK": "1"}, 0, 1), ({"WORLD_SIZE": "4"}, 0, 1), ({"RANK": "0", "WORLD_SIZE": "4"}, RANK, SIZE)],
)
def test_rank_and_world_size_that_differ_are_left_over(stale: dict[str, str], rank: int, size: int) -> None:
    environ = stale | (environ_of(PMI) if size == SIZE else {})
    message = problem(environ, rank, size)
    assert " ".join(f"{name}={value}" for name, value in stale.items()) in message
    assert f"MPI reports rank {rank} of {size}" in message
    assert "unset RANK WORLD_SIZE" in message


@pytest.mark.parametrize("rank", range(SIZE))
def test_rank_and_world_size_that_agree_are_accepted(rank: int) -> None:
    environ = environ_of(PMI, rank=rank) | environ_of(TORCHRUN, rank=rank)
    assert problem(environ, rank, SIZE) is None


def test_only_variables_that_differ_are_reported_as_leftovers() -> None:
    message = problem({"RANK": "0", "WORLD_SIZE": str(SIZE)}, 0, 1)
    assert f"has WORLD_SIZE={SIZE}," in message


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_leftover_variable_must_be_a_number(name: str) -> None:
    with pytest.raises(LaunchError, match=f"^{name}=seven is not a number"):
        problem({name: "seven"}, 0, 1)


# -- tasks of pbsdsh and blaunch -------------------------------------------------------------------------------------

PBS = {"PBS_JOBID": "7.pbs1", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODENUM": "0"}  # pbsdsh gives no PBS_NODEFILE there
LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b 4", "LSB_DJOB_NUMPROC": "8"}
COPIES = {
    "pbsdsh, first host": (PBS | {"PBS_TASKNUM": "00000002"}, "pbsdsh: PBS_TASKNUM=00000002"),
    "pbsdsh, other host": (PBS | {"PBS_TASKNUM": "20000001"}, "pbsdsh: PBS_TASKNUM=20000001"),
    "blaunch": (LSF | {"LSF_PM_TASKID": "1"}, "blaunch: LSF_PM_TASKID=1"),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_that_mpi_does_not_connect_are_an_error(name: str) -> None:
    environ, shown = COPIES[name]
    message = problem(environ, 0, 1)
    assert shown in message
    assert f"\n  mpicomm run {COMMAND}\n" in message
    assert "MPICOMM_LAUNCHER=single" in message
    assert detect.problem_after_init(detect.detect(environ, "single"), environ, OPEN_MPI, 0, 1, COMMAND) is None


@pytest.mark.parametrize("environ", [PBS | {"PBS_TASKNUM": "1"}, PBS | {"PBS_TASKNUM": "00000001"}, LSF], ids=str)
def test_a_batch_script_is_no_copy(environ: dict[str, str]) -> None:
    assert problem(environ, 0, 1) is None


@pytest.mark.parametrize("name", COPIES)
def test_ranks_of_mpirun_are_no_copies(name: str) -> None:
    """The daemons of mpirun are tasks of pbs_tmrsh or blaunch, and the ranks inherit their variables."""
    assert problem(COPIES[name][0] | environ_of(PMI), RANK, SIZE) is None
    assert problem(COPIES[name][0] | environ_of(PMI, rank=0, size=1, local_rank=0, local_size=1), 0, 1) is None


# -- Flux ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [OPEN_MPI, MPICH], ids=lambda library: library.vendor)
def test_the_remedy_under_flux_is_its_plugin_for_open_mpi(library: Library) -> None:
    environ = environ_of(by_title("Flux"), rank=0)
    message = problem(environ, 0, 1, library)
    plugin = " -o pmi=pmix" if library is OPEN_MPI else ""
    assert f"  flux run{plugin} -n {SIZE} {COMMAND}\n" in message
    needed = "\nFlux connects this library only by its plugin flux-pmix. Install flux-pmix, then start with\n"
    assert (needed in message) == (library is OPEN_MPI)
    assert ("\nStart with\n" in message) == (library is MPICH)
    assert (before(environ | environ_of(PMI, rank=0), library) is not None) == (library is OPEN_MPI)


# -- e) a batch script -----------------------------------------------------------------------------------------------

MANY = SlurmAllocation(nodes=2, ranks=SIZE)
JOBS = [
    (MANY, f"this Slurm job has {SIZE} tasks", "started without srun"),
    (HostAllocation("PBS", (Host("a", 2), Host("b", 2)), "/aux/7"), "this PBS job has 4 tasks", "without mpicomm run"),
    (HostAllocation("LSF", (Host("a", 1), Host("b", 2))), "this LSF job has 3 tasks", "without mpicomm run"),
]


def warning(environ: dict[str, str], size: int = 1, override: str | None = None, job: Allocation = MANY) -> str | None:
    return detect.warning_after_init(detect.detect(environ, override), environ, size, job)


@pytest.mark.parametrize(("job", "number", "starter"), JOBS)
def test_plain_python_in_a_batch_script_is_a_world_of_one_with_a_warning(
    job: Allocation, number: str, starter: str
) -> None:
    environ = {"SLURM_PROCID": "0"} if job is MANY else {}
    assert problem(environ, 0, 1) is None
    message = warning(environ, job=job)
    assert number in message
    assert starter in message
    assert f"with `{job.launcher}`" in message
    assert "MPICOMM_LAUNCHER=single" in message


def test_a_job_of_one_task_gives_no_warning() -> None:
    for job in (SlurmAllocation(1, 1), HostAllocation("LSF", (Host("a", 1),)), None):
        assert detect.warning_after_init(detect.detect({}), {}, 1, job) is None


@pytest.mark.parametrize(
    ("environ", "size"), [({"SLURM_STEP_ID": "0"}, 1), ({}, 8), (environ_of(MPIRUN, rank=0, size=1), 1)]
)
def test_usual_launches_give_no_warning(environ: dict[str, str], size: int) -> None:
    assert warning(environ, size) is None


# -- MPICOMM_LAUNCHER ------------------------------------------------------------------------------------------------


def test_single_overrides_the_variables() -> None:
    environ = environ_of(MPIRUN) | environ_of(TORCHRUN) | environ_of(SLURM) | {"TORCHELASTIC_RUN_ID": "x"}
    launch = detect.detect(environ, "single")
    assert (launch.kind, launch.rank, launch.size, launch.forced) == ("single", 0, 1, True)
    assert detect.problem_after_init(launch, environ, OPEN_MPI, RANK, SIZE, COMMAND) is None
    assert warning({}, override="single") is None


def test_mpi_overrides_the_variables() -> None:
    environ = {"TORCHELASTIC_RUN_ID": "x"} | environ_of(TORCHRUN) | environ_of(MPIRUN)
    launch = detect.detect(environ, "mpi")
    assert (launch.kind, launch.forced) == ("mpi", True)
    assert detect.problem_after_init(launch, environ, OPEN_MPI, 0, 1, COMMAND) is None


@pytest.mark.parametrize(("override", "launcher"), [("torchrun", TORCHRUN), ("slurm", SLURM)])
def test_launchers_without_mpi_can_be_selected(override: str, launcher: Launcher) -> None:
    launch = detect.detect(environ_of(launcher) | environ_of(MPIRUN, rank=0, size=2), override)
    assert (launch.kind, launch.rank, launch.size, launch.forced) == (override, RANK, SIZE, True)


@pytest.mark.parametrize(("override", "launcher"), [("torchrun", TORCHRUN), ("slurm", SLURM)])
def test_launchers_without_mpi_must_set_rank_and_size(override: str, launcher: Launcher) -> None:
    with pytest.raises(LaunchError, match=f"did not set {launcher.rank} and {launcher.size}") as caught:
        detect.detect({}, override)
    assert "MPICOMM_LAUNCHER" in str(caught.value)


# -- the library -----------------------------------------------------------------------------------------------------


def test_the_title_of_a_library_without_a_path() -> None:
    assert Library("MPICH", "5.0.2").title == "MPICH 5.0.2"
    assert MPICH.title == f"MPICH 5.0.2, {MPICH.path}"


# -- the variables of a Slurm step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("claims", [{}, {"PMIX_RANK": "5"}, {"PMI_RANK": "5", "PMI_SIZE": "8"}], ids=repr)
def test_a_step_sets_the_number_of_ranks_on_the_node(claims: dict[str, str]) -> None:
    """No PMI passes the number of ranks on the node, and Open MPI needs it to recognise oversubscription."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_GTIDS": "4,5,6,7"}
    launch = detect.detect(step | claims)
    assert (launch.rank, launch.size, launch.local_size) == (5, 8, 4)


def test_a_step_is_ignored_if_mpirun_runs_in_it() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_GTIDS": "0,1"}
    launch = detect.detect(step | environ_of(MPI_LAUNCHERS[0], rank=3, size=4))
    assert (launch.rank, launch.size) == (3, 4)
