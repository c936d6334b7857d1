"""Starting the processes of a distributed run on this machine, watching them, and ending them, whatever happens.

A process writes into a pipe, once a second, from before its first import to its end, so that one that stands still is
noticed also where it has not met the others yet, or has left them already. It writes another letter when it has done its
part: then its end is of no importance any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nhgd.cli._signals import number_of
from nhgd.cli._started import started_by_someone as started_by_someone
from nhgd.errors import RunError
from nhgd.execution.distributed.address import SECRET, keep_store, stay_local
from nhgd.execution.distributed.heartbeat import START
from nhgd.execution.distributed.roles import Roles

SIGNS = "NHGD_SIGNS"  # in its environment, too: the number of the pipe for its signs of life
ALIVE, DONE = b".", b"!"
# What a started process does first: everything else takes seconds to import.
FIRST = f"""
import os, sys, threading, time
def beat(pipe):
    try:
        while True:
            os.write(pipe, {ALIVE!r})
            time.sleep(1)
    except OSError:
        return
threading.Thread(target=beat, args=(int(os.environ[{SIGNS!r}]),), daemon=True).start()
sys.argv[0] = "nhgd"
from nhgd.cli import main
main()
"""
LAUNCHER = "NHGD_LAUNCHER"  # in the environment of a process that was started here: who started it
NOTICING = 6.0  # seconds for the others to notice that one is gone, and to say so
LEAVING = 2.0  # seconds to end after being asked, or for the others to fail as one has
STOPPING = 20.0  # seconds for a run that is asked to end to do so
STOPPED = (129, 130, 143)  # exit codes of a run that was asked to end, and has kept what it had reached
SPOKEN = (1, 2, *STOPPED)  # exit codes of a process that has said why


@dataclass
class Member:
    """One started process, and what it has said."""

    rank: int
    process: subprocess.Popen[bytes]
    signs: int  # the pipe with its signs of life
    heard: float  # when the last of them came
    done: bool = False  # whether it has said that it has done its part
    said: bytearray = field(default_factory=bytearray)
    failed: int | None = None  # how it ended before anyone was asked to
    readers: list[threading.Thread] = field(default_factory=list)

    def sentence(self) -> str | None:
        """Its last error."""
        lines = self.said.decode(errors="replace").splitlines()
        errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
        return errors[-1] if errors else None


def launch(arguments: Sequence[str], roles: Roles, restarts: int, timeout: float = START) -> int:
    """Run `nhgd ARGUMENTS` in several processes; the exit code of the whole.

    The first process speaks: its standard output is ours. When a process fails, the others have a while to notice and then
    are ended; a failed run, but not a refused one, is started again up to `restarts` times. Once the first has said that
    its results are written, the run is done: those that do not end within `timeout` seconds then, or end badly, are a
    warning and change nothing of the exit code, 0.
    """
    for attempt in range(restarts + 1):
        store = keep_store("127.0.0.1", 0, limit=60.0)
        with _members(arguments, roles, store.port, attempt) as (members, output):
            try:
                code, why = _watch(members, roles, timeout)
            except KeyboardInterrupt as stop:
                code, why = _stopped(members, roles, stop)
        for member in members:
            for reader in member.readers:
                reader.join(LEAVING)
        if code != 1 or attempt == restarts:
            sys.stdout.flush()
            sys.stdout.buffer.write(output)
            sys.stdout.flush()
            return _concluded(code, why, members, roles, "--json" in arguments and not output)
        print(f"{why or _reason(members, roles)} Starting again, {attempt + 1} of {restarts}.", file=sys.stderr)
    raise AssertionError


def _concluded(code: int, why: str | None, members: Sequence[Member], roles: Roles, silent: bool) -> int:
    """The exit code, when everything is said that the first process did not say itself; `silent`: it owes a JSON object."""
    said = members[0].sentence()
    if code and said is None:
        raise RunError(why or _reason(members, roles))
    if code and silent:
        print(json.dumps({"error": said}))
    if why and not code:
        print(f"Warning: {why}", file=sys.stderr)
    return code


def _reason(members: Sequence[Member], roles: Roles) -> str:
    """Why the run failed, in the words of those who could still speak."""
    for member in members:
        sentence = member.sentence()
        if sentence is not None:
            return sentence
    failed = next(member for member in members if member.failed)
    return f"{roles.called(failed.rank)} ended with {_ending(failed.failed or 0)}."


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


@contextlib.contextmanager
def _members(
    arguments: Sequence[str], roles: Roles, port: int, attempt: int
) -> Iterator[tuple[list[Member], bytearray]]:
    """The processes, running; all of them are gone when the block ends."""
    members: list[Member] = []
    output = bytearray()
    try:
        secret = secrets.token_hex(16)
        for rank in range(roles.world):
            members.append(_start(arguments, roles, rank, port, attempt, output, secret))
        yield members, output
    finally:
        _end(members)


def _stopped(members: Sequence[Member], roles: Roles, stop: KeyboardInterrupt) -> tuple[int, str | None]:
    """Hand a signal on to the process that leads, which ends the run after its outer step and keeps what it has reached."""
    members[0].process.send_signal(number_of(stop))
    deadline = time.monotonic() + STOPPING
    while members[0].process.poll() is None:
        if time.monotonic() > deadline:
            raise stop
        time.sleep(0.05)
    code, why = _watch(members, roles, LEAVING)
    if code not in (0, *STOPPED):
        raise stop  # it had nothing to keep yet
    return code, why


def _start(
    arguments: Sequence[str], roles: Roles, rank: int, port: int, attempt: int, output: bytearray, secret: str
) -> Member:
    world = str(roles.world)
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is kept here, as torchrun's agent does, so that it outlives any of the processes.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        LAUNCHER: str(os.getpid()),
        SECRET: secret,
    }
    stay_local(environment)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // roles.world)))
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", FIRST, *arguments],
        env=environment | {SIGNS: str(theirs)},
        pass_fds=(theirs,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C comes to us alone, and we end them
    )
    os.close(theirs)
    member = Member(rank, process, ours, time.monotonic())
    places = [(process.stderr, member.said, rank == 0)] + ([(process.stdout, output, False)] if rank == 0 else [])
    for pipe, into, aloud in places:
        reader = threading.Thread(target=_read, args=(pipe, into, aloud), daemon=True)
        reader.start()
        member.readers.append(reader)
    return member


def _read(pipe: Any, into: bytearray, aloud: bool) -> None:
    while chunk := os.read(pipe.fileno(), 65536):
        into += chunk
        if aloud:
            sys.stderr.buffer.write(chunk)
            sys.stderr.flush()
    pipe.close()


def _watch(members: Sequence[Member], roles: Roles, timeout: float) -> tuple[int, str | None]:
    """Until all have ended, or one has failed and the others had time to say so, or the run is done and they had time to end.

    The exit code of the whole, and a sentence where it is we who noticed something.
    """
    failed_at: float | None = None
    done_at: float | None = None
    limit = max(timeout, START)
    while True:
        for member in members:
            _listen(member)
            member.failed = member.process.poll()
        now = time.monotonic()
        if members[0].done or members[0].failed == 0:
            done_at = done_at or now
            running = [member.rank for member in members if member.failed is None]
            if running and now - done_at <= timeout:
                time.sleep(0.05)
                continue
            return 0, _blemish(members, roles, timeout)
        # Who has done its part may end as it likes.
        needed = [member for member in members if not (member.done or member.failed == 0)]
        codes = [member.failed for member in needed]
        if any(codes):
            failed_at = failed_at or now
            patience = LEAVING if any(code in SPOKEN for code in codes) else NOTICING
            if None not in codes or now - failed_at > patience:
                return next((code for code in codes if code in (2, *STOPPED)), 1), None
        silent = [member.rank for member in needed if member.failed is None and now - member.heard > limit]
        if silent:
            names = " and ".join(roles.called(rank) for rank in silent)
            return 1, f"{names} gave no sign of life for {limit:g} s."
        time.sleep(0.05)


def _listen(member: Member) -> None:
    """Take note of a process's signs of life."""
    with contextlib.suppress(BlockingIOError):
        while signs := os.read(member.signs, 4096):
            member.heard = time.monotonic()
            member.done = member.done or DONE in signs


def _blemish(members: Sequence[Member], roles: Roles, timeout: float) -> str | None:
    """What was not as it should be at the end of a run that is done."""
    for member in members:
        name = roles.called(member.rank)
        if member.failed is None:
            return f"The run is done, but {name} did not end within {timeout:g} s after it, and was ended."
        if member.failed:
            return f"The run is done, but {name} ended with {_ending(member.failed)} after it."
    return None


def _end(members: Sequence[Member]) -> None:
    """Ask those that still run to end, and then end them."""
    running = [member.process for member in members if member.process.poll() is None]
    for process in running:
        process.terminate()
        with contextlib.suppress(OSError, AttributeError):
            process.send_signal(signal.SIGCONT)  # a paused one hears it only then
    deadline = time.monotonic() + LEAVING
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()
    for member in members:
        os.close(member.signs)


def tie_to_launcher() -> None:
    """In a started process: end when the one that started it is gone."""
    if LAUNCHER not in os.environ:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, where there is one
    if os.getppid() != int(os.environ[LAUNCHER]):
        os._exit(1)


def done() -> None:
    """In a started process: it has done its part, and what it wrote and printed is complete."""
    if SIGNS in os.environ:
        sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(int(os.environ[SIGNS]), DONE)


def end_now(sentence: str, more: Callable[[], str] = str, seconds: float = 5.0) -> None:
    """The last resort when a process is lost and this one does not notice, deep in a computation: end it from outside.

    `more` is asked then what to add to the sentence; where it takes long, because the disk is lost too, nothing is.
    """
    found = [""]

    def work() -> None:
        asking = threading.Thread(target=lambda: found.append(more()), daemon=True)
        asking.start()
        asking.join(LEAVING)
        print(f"Error: {sentence}{found[-1]}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
