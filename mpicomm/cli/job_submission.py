"""`mpicomm job --submit`: submits a script, waits for the job, and prints its output file meanwhile."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from mpicomm.cli.console import FAILED, discard, failed, print_message
from mpicomm.launch import queries
from mpicomm.launch.jobscript import JobSpec
from mpicomm.launch.jobscript.queues import QUEUES, QueueState, SchedulerQueue, directories
from mpicomm.launch.jobscript.quoting import quoted
from mpicomm.settings import STOPPED_STATUS

_INTERRUPTED = 130  # the status of a shell's command after Ctrl-C
_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 15.0  # between queries, which load the scheduler
_FOLLOW_SECONDS = 0.5  # between reads of the output file
_NO_ANSWER_SECONDS = 600.0  # a scheduler that restarts answers within minutes
_UNKNOWN_QUERIES = 3  # before a job counts as unknown: some schedulers list a new job with a delay
_LATE_SECONDS = 10.0  # for the output to arrive after the end of the job: PBS and LSF copy it, NFS shows it late
_QUIET_SECONDS = 5.0  # without new output after the end of the job: NFS updates the size of a file after 3 s or more
_REST_SECONDS = 60.0  # at most for the output after the end of the job, which a leftover process may go on writing
_CHUNK_BYTES = 1 << 20
_Version: TypeAlias = tuple[int, int, int]


def create_directories(job: JobSpec) -> None:
    """Create the missing directories of the output files, and print their names.

    Raises:
        ValueError: If a name is known only when the job starts, or if a directory cannot be created.
    """
    for name in directories(job):
        if not Path(name).is_dir():
            try:
                Path(name).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = f"cannot create the directory {name} for the output: {error.strerror}"
                raise ValueError(f"{reason}; pass --output a file in another directory") from error
            print_message(f"job {job.scheduler}", f"created the directory {name} for the output")


def missing_directories(job: JobSpec) -> list[str]:
    """Return a sentence for each directory of the output files that does not exist yet."""
    try:
        missing = [name for name in directories(job) if not Path(name).is_dir()]
    except ValueError as error:
        return [str(error)]
    return [f"no directory {name} for the output; before you submit, run mkdir -p {quoted(name)}" for name in missing]


def run(job: JobSpec, script: str, *, waits: bool, follows: bool) -> int:
    """Submit a job, print its ID, and return the exit status.

    Args:
        script: The text of the script, which is also in the file of the job if it has one.
        waits: Whether to wait until the job has ended, and to return its status.
        follows: Whether to print its output file meanwhile.
    """
    # Without an ID, these are the names that an earlier job may have used.
    versions = [_version(Path(name)) for name in QUEUES[job.scheduler].output_files(job, "")]
    job_id = _submit(job, script)
    if job_id is None:
        return FAILED
    is_printed = _print_id(job, job_id)
    if waits and (is_printed or not follows):
        return _wait(job, job_id, {version[0]: version for version in versions if version}, follows=follows)
    return 0 if is_printed else FAILED


def _submit(job: JobSpec, script: str) -> str | None:
    """Submit a script and return the ID of the job; None after an error.

    The messages of the scheduler's command go to standard error.
    """
    command, queue = f"job {job.scheduler}", QUEUES[job.scheduler]
    words = [*job.system.submit, *queue.submit_options]
    if job.file and job.system.takes_file:
        words.append(job.file)
    try:
        done = subprocess.run(words, input=script.encode(), stdout=subprocess.PIPE, check=False)
    except (FileNotFoundError, PermissionError):
        failed(
            command,
            f"no {words[0]} in PATH: submit on a host of {job.system.title}, or write the script with -o FILE, and "
            f"submit it there",
        )
        return None
    except KeyboardInterrupt:
        failed(command, f"interrupted while {words[0]} ran; check with `{queue.list_jobs}` whether there is a job")
        return None
    output = done.stdout.decode(errors="replace")
    job_id = queue.job_id(output)
    if done.returncode or job_id is None:
        sys.stderr.write(output)
        reason = f"exited with status {done.returncode}" if done.returncode else "printed no ID of a job"
        remedy = "correct what it reports" if done.returncode else f"check with `{queue.list_jobs}`"
        failed(command, f"{words[0]} {reason}; {remedy}, and run this command again")
        return None
    return job_id


def _print_id(job: JobSpec, job_id: str) -> bool:
    """Print the ID of a job; if that fails, print it on standard error, and return False."""
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        print(job_id, flush=True)
    except (OSError, ValueError) as error:
        discard(sys.stdout)
        cancellation = QUEUES[job.scheduler].cancellation(job_id)
        text = f"submitted job {job_id}, but cannot print its ID on standard output: {error}"
        print_message(f"job {job.scheduler}", f"{text}; cancel it with: {cancellation}")
        return False
    return True


def _wait(job: JobSpec, job_id: str, earlier: Mapping[int, _Version], *, follows: bool) -> int:
    """Wait until a job has ended, and return its exit status; after Ctrl-C the job continues."""
    queue, command = QUEUES[job.scheduler], f"job {job.scheduler}"
    cancellation = f"cancel it with: {queue.cancellation(job_id)}"
    paths = [Path(name).absolute() for name in queue.output_files(job, job_id)]
    appends = queue.appends_output or job.requeue or "--open-mode=append" in job.directive
    output = _OutputFile(paths, earlier, appends=appends)
    print_message(command, f"waiting for job {job_id}; {cancellation}")
    if follows and (text := queue.late_output(job)):
        print_message(command, text)
    state = None
    try:
        state = _wait_for_end(queue, job_id, output, command, follows=follows)
        if state is None:
            return failed(command, f"{job.system.title} has not answered for 10 minutes; job {job_id} may still run")
        if follows:
            output.print_rest()
    except KeyboardInterrupt:
        if state is None:
            print_message(command, f"interrupted; job {job_id} continues; {cancellation}")
            return _INTERRUPTED
    except OSError as error:  # of the standard output
        discard(sys.stdout)
        is_closed = isinstance(error, BrokenPipeError)
        reason = "nothing reads the output" if is_closed else f"cannot print the output: {error.strerror}"
        if state is None:
            print_message(command, f"{reason}; job {job_id} continues; {cancellation}")
            return FAILED
        print_message(command, reason)
    print_message(command, _result(job, job_id, state, output))
    return state.exit_status


class _OutputFile:
    """The output file of a job, which appears, or replaces that of an earlier job, after its start."""

    def __init__(self, paths: Sequence[Path], earlier: Mapping[int, _Version], *, appends: bool) -> None:
        self._paths = paths
        self._earlier = earlier
        self._appends = appends
        self._inode: int | None = None
        self._offset = 0  # of the first byte that has not been printed

    def set_path(self, name: str) -> None:
        """Set the path that the scheduler reports."""
        self._paths = [Path(name).absolute()]

    @property
    def path(self) -> Path | None:
        """The path of the existing file, or the only possible one."""
        existing = [path for path in self._paths if _version(path)]
        return existing[0] if existing else self._paths[0] if self._paths else None

    def print_new(self) -> bool:
        """Print what the job has written since the last call, and return whether there was anything."""
        is_new = False
        for data in self._new():
            sys.stdout.buffer.write(data)
            is_new = True
        sys.stdout.buffer.flush()
        return is_new

    def _new(self) -> Iterator[bytes]:
        """Yield what the job has written since the last call.

        Each call opens the file: NFS shows the data of other hosts when a file is opened, and the job may replace it.
        After an error, such as ESTALE of NFS, the next call continues at the same byte.
        """
        if self.path is None:
            return
        with contextlib.suppress(OSError), self.path.open("rb", buffering=0) as file:
            version = inode, size, _ = _version_of(os.fstat(file.fileno()))
            earlier = self._earlier.get(inode)
            if version == earlier:
                return  # the output of an earlier job
            if inode != self._inode:
                self._offset = earlier[1] if self._inode is None and self._appends and earlier else 0
                self._inode = inode
            if size < self._offset:
                self._offset = 0  # the job has started again, and truncated its file
            file.seek(self._offset)
            while data := file.read(_CHUNK_BYTES):
                self._offset += len(data)
                yield data

    def print_rest(self) -> None:
        """Print the rest after the end of the job; the file may appear late, and its last lines, too."""
        end = changed = time.monotonic()
        limit = 0.0 if not self._paths else _LATE_SECONDS if self._inode is None else _QUIET_SECONDS
        while time.monotonic() < min(changed + limit, end + _REST_SECONDS):
            time.sleep(_FOLLOW_SECONDS)
            if self.print_new():
                changed, limit = time.monotonic(), _QUIET_SECONDS


def _version_of(state: os.stat_result) -> _Version:
    """Return the inode, the size and the time of a file, which change when a job writes it."""
    return state.st_ino, state.st_size, state.st_mtime_ns


def _version(path: Path) -> _Version | None:
    with contextlib.suppress(OSError):
        return _version_of(path.stat())
    return None


def _wait_for_end(
    queue: SchedulerQueue, job_id: str, output: _OutputFile, command: str, *, follows: bool
) -> QueueState | None:
    """Return the last state of a job; None if the scheduler does not answer."""
    shown, answered, unknown, pause, next_query = "", time.monotonic(), 0, _FIRST_SECONDS, 0.0
    while True:
        if time.monotonic() >= next_query:
            state = _query(queue, job_id)
            next_query, pause = time.monotonic() + pause, min(1.5 * pause, _LONGEST_SECONDS)
            unknown = unknown + 1 if state and state.outcome == "unknown" else 0
            if state and state.output:
                output.set_path(state.output)
            if state and not unknown and state.name != shown:
                shown = state.name
                print_message(command, f"job {job_id}: {shown}")
            if state:
                answered = time.monotonic()
            if state and state.outcome and (not unknown or unknown >= _UNKNOWN_QUERIES):
                return state
            if time.monotonic() - answered > _NO_ANSWER_SECONDS:
                return None
        if follows:
            output.print_new()
        time.sleep(_FOLLOW_SECONDS)


def _query(queue: SchedulerQueue, job_id: str) -> QueueState | None:
    """Return the state of a job; its outcome is unknown if no query knows the job. None without an answer."""
    state = None
    for words in queue.queries(job_id):
        answer = queue.state(queries.output_of(words, with_errors=True))
        if answer and answer.outcome != "unknown":
            return answer
        state = state or answer
    return state


def _result(job: JobSpec, job_id: str, state: QueueState, output: _OutputFile) -> str:
    """Return the sentence about the end of a job."""
    place = f"its output is in {output.path}" if output.path else "its output is where the script directs it"
    if output.path and not _version(output.path):
        place = f"its output file {output.path} does not exist, or is not visible on this host"
    status = "" if state.status is None else f", exit status {state.status}"
    if state.outcome == "completed":
        return f"job {job_id} has completed; {place}"
    if state.outcome == "unknown":
        return f"{job.system.title} no longer knows job {job_id}: it has ended, with an unknown status; {place}"
    if state.outcome == "time limit":
        return f"job {job_id} has exceeded its time limit ({state.name}{status}); {place}. Request more with --time"
    if state.status == STOPPED_STATUS and job.requeue and job.scheduler != "slurm":
        return f"job {job_id} has exited before its time limit, and its script submits the next job; {place}"
    ending = "was cancelled" if state.outcome == "cancelled" else "has failed"
    return f"job {job_id} {ending} ({state.name}{status}); {place}"
