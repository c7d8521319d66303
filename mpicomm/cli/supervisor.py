"""`mpicomm run` as the parent of the launcher: passes signals on, demands the end of every rank, leaves no process.

A signal that asks the job to stop (SIGTERM from a scheduler, Ctrl-C) goes to rank 0 over the connection of
`parent_link`, since Open MPI's mpirun, for example, kills its ranks 0.5 s after it receives SIGTERM itself. If the
program handles the signal, as `mpicomm.Trainer` does, the ranks have the grace period to save a checkpoint and exit.
Otherwise the launcher receives the signal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import subprocess
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mpicomm.arguments import Deadline
from mpicomm.cli import child_process
from mpicomm.cli.console import print_message
from mpicomm.cli.job_listener import Job, JobListener
from mpicomm.errors import LaunchError
from mpicomm.launch.known_launchers import STOPS, WARNINGS
from mpicomm.launch.request import Start
from mpicomm.settings import HOST_TIMEOUT, Settings

_CAUGHT = (*STOPS, *WARNINGS, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT)
# srun and flux run only print their state at the first SIGINT. SIGTERM ends flux run, but not its tasks.
_SENT: dict[str, dict[int, tuple[signal.Signals, ...]]] = {
    "srun": {signal.SIGINT: (signal.SIGTERM,)},
    "flux": dict.fromkeys(STOPS, (signal.SIGINT, signal.SIGINT)),
}
"""The signals that some launchers need to end their tasks, by the signal that `mpicomm run` has received."""

_BETWEEN_SECONDS = 0.5  # between two of them: a pending signal is delivered once
_ANSWER_SECONDS = 5.0  # for rank 0, whose main thread need not run, to answer whether the program handles a signal
_LAUNCHER_SECONDS = 15.0  # from the failure of a job to the end of its launcher; mpirun may wait for a lost host
_KILL_SECONDS = 5.0  # from SIGTERM for the launcher to SIGKILL
_LAST_SECONDS = 2.0  # for messages in flight once the launcher has ended; those of a lost host never arrive
_POLL_SECONDS = 0.5
_WAKE_UP_BYTES = 4096  # of one read; each byte is a signal


@dataclasses.dataclass(frozen=True)
class End:
    """How a launch ended."""

    status: int
    """The exit status for `mpicomm run`."""

    stopped_by: int | None
    """The first signal that asked the job to stop; None if there was none."""

    has_formed_job: bool
    """Whether `bootstrap()` has completed, or a rank has connected by `init_process_group("env://")`."""

    cause: str
    """Why the launch failed; empty if the status is 0, or only the launcher knows."""

    may_have_lost_host: bool = False
    """Whether mpirun has ended a job that would continue after failures of ranks, as it does if a host is lost."""

    failed_hosts: tuple[str, ...] = ()
    """The hosts on which ranks failed first, as far as rank 0 has reported them."""


@contextlib.contextmanager
def handling(numbers: Sequence[int], handler: Callable[[int, types.FrameType | None], None]) -> Iterator[None]:
    """Call a handler for signals within the block; one that is ignored stays ignored, such as SIGHUP under nohup."""
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Supervisor:
    """Runs one launch."""

    def __init__(self, command: str, start: Start, grace: float, received: list[int] | None = None) -> None:
        """Create the supervisor.

        Args:
            command: The subcommand of `mpicomm`, for messages.
            start: The launch.
            grace: Seconds for the ranks to save a checkpoint and exit when they are asked to stop.
            received: Signals that have arrived before, to which the caller may add; they are removed as they are
                handled.
        """
        self._command = command
        self._start = start
        self._grace = grace
        self._selector = selectors.DefaultSelector()
        self._listener = JobListener(
            self._selector,
            is_local=start.is_local,
            has_store=start.has_store,
            ranks=start.ranks,
            host_timeout=_host_timeout(start.environ),
        )
        self._process: subprocess.Popen[bytes]
        self._received = [] if received is None else received
        self._stopped_by: int | None = None
        self._questions: dict[int, Deadline] = {}  # the signals about which rank 0 has been asked
        self._end_due: Deadline | None = None  # for the end of the launcher
        self._end_reason = ""
        self._kill_due: Deadline | None = None
        self._is_forced = False

    def run(self) -> End:
        """Run the launcher until it ends.

        Raises:
            OSError: If it cannot be executed.
        """
        start = self._start.with_parent(str(self._listener.parent))
        try:
            with self._catching_signals():
                self._process = child_process.start(start.command, start.environ, has_input=start.has_input)
                self._run_launcher()
                status, cause = self._result(self._process.returncode)
                if status or self._is_forced:
                    child_process.kill_descendants()
        finally:
            self._listener.close()  # ranks on other hosts abort if they have not finished
            self._selector.close()
        self._handle_signals()  # no restart begins after a signal that has arrived meanwhile
        if cause:
            self._print(cause)
        is_spread = not self._start.is_local and self._stopped_by is None
        may_have_lost_host = is_spread and any(job.may_have_lost_host for job in self._listener.jobs)
        failed_hosts = tuple(host for job in self._listener.jobs if not job.is_finished for host in job.failed_hosts)
        return End(status, self._stopped_by, self._listener.has_formed_job, cause, may_have_lost_host, failed_hosts)

    def _run_launcher(self) -> None:
        """Wait until the launcher has ended; an error of this process ends it, too."""
        try:
            while self._process.poll() is None:
                self._wait(_POLL_SECONDS)
                self._check()
            self._read_last_messages()
        except BaseException:
            self._pass_on(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS)
            child_process.kill_descendants()
            raise

    # -- events --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        woken, waker = socket.socketpair()
        for end in (woken, waker):
            end.setblocking(False)

        def drain(_mask: int) -> None:
            with contextlib.suppress(BlockingIOError):
                woken.recv(_WAKE_UP_BYTES)

        self._selector.register(woken, selectors.EVENT_READ, drain)
        before_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        before = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # only wakes
        try:
            with handling(_CAUGHT, lambda number, _frame: self._received.append(number)):
                yield
        finally:
            signal.signal(signal.SIGCHLD, before)
            signal.set_wakeup_fd(before_fd)
            self._selector.unregister(woken)
            woken.close()
            waker.close()

    def _wait(self, seconds: float) -> bool:
        """Handle the events that arrive within some seconds, and return whether there were any."""
        events = self._selector.select(seconds)
        for key, mask in events:
            key.data(mask)
        self._handle_signals()
        return bool(events)

    def _read_last_messages(self) -> None:
        deadline = Deadline(_LAST_SECONDS)
        while self._listener.is_connected and deadline.count_down() > 0:
            self._wait(_POLL_SECONDS)

    # -- signals -------------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        while self._received:
            self._handle_signal(self._received.pop(0))

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            # The default action of SIGTSTP has no effect on the launcher, whose session has no terminal.
            child_process.signal_descendants(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if number == signal.SIGCONT:
            child_process.signal_descendants(signal.SIGCONT)
            return
        if number == signal.SIGQUIT:
            self._pass_on(number)
            return
        if number == signal.SIGINT and self._stopped_by is not None:
            self._terminate("second Ctrl-C")
            return
        if self._stopped_by is not None:
            return  # schedulers repeat signals
        if number in STOPS:
            self._stopped_by = number
            self._questions.clear()  # the launcher must not receive a warning while the ranks save their state
            self._end_within(self._grace, "the grace period has passed")
        if self._listener.is_connected:
            self._questions[number] = Deadline(_ANSWER_SECONDS)
            self._listener.ask_to_stop(number)
        else:
            self._pass_on(number)

    def _act_on_answers(self, number: int) -> None:
        """Pass a signal on to the launcher unless every job handles it, which rank 0 answers."""
        answers = [job.answers.get(number) for job in self._listener.jobs if job.is_connected]
        if None in answers and self._questions[number].count_down() > 0:
            return
        del self._questions[number]
        if not answers or not all(answers):
            self._pass_on(number)
        elif number in STOPS:
            self._print(
                f"{_name(number)}: the ranks save their state and exit, within {self._grace:g} s (--grace-period); "
                f"press Ctrl-C again to end them at once"
            )

    def _pass_on(self, number: int) -> None:
        launcher = Path(self._start.command[0]).name
        first, *others = _SENT.get(launcher, {}).get(number, (number,))
        with contextlib.suppress(OSError):  # it has ended
            self._process.send_signal(first)
            for other in others:
                time.sleep(_BETWEEN_SECONDS)
                self._process.send_signal(other)

    # -- the end of the launcher ---------------------------------------------------------------------------------

    def _check(self) -> None:
        for number in list(self._questions):
            self._act_on_answers(number)
        self._listener.close_expired()
        if any(job.has_failed for job in self._listener.jobs):
            self._end_within(_LAUNCHER_SECONDS, "the job has failed, but its launcher has not ended")
        if self._end_due is not None and self._end_due.count_down() <= 0:
            self._terminate(self._end_reason)
        if self._kill_due is not None and self._kill_due.count_down() <= 0:
            self._process.kill()

    def _end_within(self, seconds: float, reason: str) -> None:
        if self._end_due is None or seconds < self._end_due.count_down():
            self._end_due, self._end_reason = Deadline(seconds), reason

    def _terminate(self, reason: str) -> None:
        if not self._is_forced:
            self._is_forced = True
            self._kill_due = Deadline(_KILL_SECONDS)
            self._pass_on(signal.SIGTERM)
            self._print(f"{reason}; terminating {self._start.command[0]} and the remaining processes")

    # -- the result ----------------------------------------------------------------------------------------------

    def _result(self, returned: int) -> tuple[int, str]:
        """Return the exit status, and why the launch failed."""
        jobs = self._listener.jobs
        failed = [job for job in jobs if not job.is_finished]
        status = 128 - returned if returned < 0 else returned
        cause = self._cause(returned, failed)
        if self._stopped_by is not None and (self._is_forced or failed or not jobs):
            # The ranks did not end by themselves: the status of a command that the signal ends.
            status = 128 + self._stopped_by if status or failed else 0
        elif failed and (self._is_forced or not status):
            status = 1
        return status, cause

    def _cause(self, returned: int, failed: list[Job]) -> str:
        launcher = Path(self._start.command[0]).name
        ended = f"was killed by {_name(-returned)}" if returned < 0 else f"exited with status {returned}"
        ended = "timed out" if self._is_forced else ended
        if self._stopped_by is None and failed:
            return f"{'; '.join(job.cause or job.describe_end() for job in failed)} ({launcher} {ended})"
        return f"{launcher} {ended}" if self._stopped_by is None and returned < 0 else ""

    def _print(self, message: str) -> None:
        print_message(self._command, message)


def _host_timeout(environ: Mapping[str, str]) -> int:
    try:
        return Settings.from_environ(environ).host_timeout
    except LaunchError:  # bootstrap() reports it
        return HOST_TIMEOUT


def _name(number: int) -> str:
    return signal.Signals(number).name
