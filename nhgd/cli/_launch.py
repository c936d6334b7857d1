"""`nhgd run --execution distributed`: torch's elastic agent starts, watches and restarts the processes of a run.

The agent's own settings are for clusters. Here its store listens on loopback alone, a process that has stopped
answering is killed after seconds, and what failed is one sentence: that of the process which failed first.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from nhgd.cli._signals import ENDING, Stopped
from nhgd.cli._started import LAUNCHER
from nhgd.errors import InputError, RunError
from nhgd.execution.distributed.address import keep_store, stay_local
from nhgd.execution.distributed.roles import Roles

FAILING_SECONDS = 5.0  # for the other processes to fail and report after one has failed
CLOSING_SECONDS = 2.0  # between SIGTERM and SIGKILL, for processes of a run that has failed
STOPPING_SECONDS = 20.0  # the same where the run was asked to stop, and first ends its outer step
REFUSED = 2  # exit code of wrong input, which a restart would not mend
STOPPED = tuple(128 + number for number in ENDING)  # exit codes of a run that was asked to stop and did


def launch(
    arguments: Sequence[str], roles: Roles, restarts: int, timeout: float, checkpoint: Callable[[], str] = str
) -> int:
    """Run `nhgd ARGUMENTS` in several processes; returns the exit code.

    Args:
        arguments: of the command line, without the program's name.
        roles: how many processes there are, and what errors call them.
        restarts: how often a run that failed is started again. One that was refused is not.
        timeout: seconds that the others may take to end after one of them has.
        checkpoint: the words that name the last checkpoint, asked for where no process could say them.
    """
    atexit.register(
        gc.freeze
    )  # otherwise the exit of this process, which others wait for, traverses all of torch once more
    with tempfile.TemporaryDirectory(prefix="nhgd-") as folder, _environment(roles):
        agent = _Agent(arguments, roles, restarts, timeout, checkpoint, folder)
        try:
            result = agent.run()
        except SignalException as stop:
            if agent.exit_code(0) not in (0, *STOPPED):
                raise Stopped(stop.sigval) from None
            return agent.concluded()
        finally:
            agent.kill()
        if result.is_failed() and agent.exit_code(0) != 0:
            refused = any(failure.exitcode == REFUSED for failure in result.failures.values())
            raise (InputError if refused else RunError)(agent.reason(result.failures))
        if result.is_failed():
            print(f"Warning: The run is done, but {agent.blemish(result.failures)}", file=sys.stderr)
        return agent.concluded()


class _Loopback(StaticTCPRendezvous):
    """A rendezvous of the processes of one agent, with a store that is reachable from this machine alone."""

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store for each attempt."""
        self.kept = keep_store("127.0.0.1", 0, limit=60.0)
        place = RendezvousStoreInfo("127.0.0.1", self.kept.port)
        return RendezvousInfo(PrefixStore(self.run_id, self.kept), 0, 1, place)


class _Agent(LocalElasticAgent):
    """The agent, with time limits for one machine."""

    def __init__(
        self,
        arguments: Sequence[str],
        roles: Roles,
        restarts: int,
        timeout: float,
        checkpoint: Callable[[], str],
        folder: str,
    ) -> None:
        self._roles, self._timeout, self._checkpoint, self._folder = roles, timeout, checkpoint, Path(folder)
        self._restarts = 0
        self._first: dict[int, int] = {}  # exit codes of the ranks that failed before any was asked to end
        self._since: float | None = None  # when one had failed, or the first rank had ended well
        self._pauses: dict[int, float] = {}  # since when ranks have been paused
        self._paused: int | None = None  # the rank that was paused for too long
        spec = WorkerSpec(
            role="nhgd",
            local_world_size=roles.world,
            rdzv_handler=_Loopback("127.0.0.1", 0, 0, 1, "run", 60),
            entrypoint=sys.executable,
            args=("-m", "nhgd", *arguments),
            max_restarts=restarts,
            monitor_interval=0.05,
        )
        # The first process speaks. Its answer is kept until it is known whether it is the last one.
        streams = {rank: Std.ALL if rank else Std.OUT for rank in range(roles.world)}
        super().__init__(spec, DefaultLogsSpecs(log_dir=folder, redirects=streams), exit_barrier_timeout=1.0)

    def _codes(self) -> dict[int, int | None]:
        """The exit codes of the processes by rank; None for those that run."""
        context = self._pcontext
        handlers = context.subprocess_handlers if isinstance(context, SubprocessContext) else {}
        return {rank: handler.proc.poll() for rank, handler in handlers.items()}

    def exit_code(self, rank: int) -> int | None:
        """The exit code of a process, if it has ended."""
        return self._codes().get(rank)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._codes()
        failed = {rank: code for rank, code in codes.items() if code}
        self._first = self._first or failed
        if self._since is None and (failed or codes[0] == 0):
            self._since = time.monotonic()
        self._paused = self._paused or self._long_paused(codes)
        if self._paused is not None:
            self._shutdown()
        elif self._since is not None and None in codes.values():
            if time.monotonic() < self._since + (FAILING_SECONDS if failed else self._timeout):
                return RunResult(state=WorkerState.HEALTHY)
            self._shutdown()
        if codes[0] == 0 or any(code in (REFUSED, *STOPPED) for code in failed.values()):
            self._remaining_restarts = 0
        found: RunResult = super()._monitor_workers(worker_group)
        return found

    def _long_paused(self, codes: Mapping[int, int | None]) -> int | None:
        """A rank that is still running but was paused for longer than the others wait."""
        pids = {} if self._pcontext is None else self._pcontext.pids()
        for rank, pid in pids.items():
            if codes[rank] is not None or not _is_paused(pid):
                self._pauses.pop(rank, None)
            elif time.monotonic() > self._pauses.setdefault(rank, time.monotonic()) + self._timeout:
                return rank
        return None

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        failures = {rank: self._failure(rank, code) for rank, code in self._codes().items() if code}
        number, limit = self._restarts + 1, worker_group.spec.max_restarts
        print(f"{self.reason(failures)} Restarting, {number} of {limit}.", file=sys.stderr)
        super()._restart_workers(worker_group)
        self._restarts = number
        self._first, self._since, self._pauses, self._paused = {}, None, {}, None

    def _failure(self, rank: int, code: int) -> ProcessFailure:
        return ProcessFailure(rank, 0, code, str(self._place(rank) / "error.json"))

    def _shutdown(self, death_sig: signal.Signals | None = None, *_: Any, **__: Any) -> None:
        """End the processes, after a signal or a failure."""
        seconds = CLOSING_SECONDS if death_sig is None else STOPPING_SECONDS
        if self._pcontext is not None:
            self._pcontext.close(death_sig or signal.SIGTERM, int(seconds))

    def kill(self) -> None:
        """Kill all processes that still run."""
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGKILL, int(CLOSING_SECONDS))

    def _place(self, rank: int) -> Path:
        """The folder for the output and errors of a process of the last attempt."""
        return next(iter(self._folder.glob(f"*/attempt_{self._restarts}/{rank}")))

    def concluded(self) -> int:
        """Copy the output of the first process; returns its exit code."""
        sys.stdout.flush()
        sys.stdout.buffer.write((self._place(0) / "stdout.log").read_bytes())
        sys.stdout.flush()
        return self.exit_code(0) or 0

    def reason(self, failures: Mapping[int, ProcessFailure]) -> str:
        """Why the run failed: by an error of its own, because a process was killed, or because one did not answer."""
        told: dict[int, dict[str, Any]] = {
            rank: failure.error_file_data for rank, failure in failures.items() if "kind" in failure.error_file_data
        }
        own = [data for data in told.values() if data["lost"] is None]
        killed = {rank: code for rank, code in self._first.items() if rank not in told}
        if self._paused is not None:
            who = self._roles.called(self._paused)
            data: dict[str, Any] = {
                "message": f"{who} did not respond for {self._timeout:g} s: it is paused.",
                "checkpoint": False,
            }
        elif own:
            data = min(own, key=lambda data: (data["code"] != REFUSED, data["timestamp"]))
        elif killed:
            rank, code = next(iter(killed.items()))
            data = {"message": f"{self._roles.called(rank)} ended with {_ending(code)}.", "checkpoint": False}
        elif told:
            data = min(told.values(), key=lambda data: (data["lost"] < 0, data["timestamp"]))
        else:
            rank = min(failures)
            data = {"message": f"{self._roles.called(rank)} did not exit by itself.", "checkpoint": False}
        return str(data["message"]) + ("" if data["checkpoint"] else self._checkpoint())

    def blemish(self, failures: Mapping[int, ProcessFailure]) -> str:
        """What went wrong at the end of a run that completed."""
        rank, failure = next(iter(failures.items()))
        if rank in self._first:
            return f"{self._roles.called(rank)} ended with {_ending(failure.exitcode)} after it."
        return f"{self._roles.called(rank)} did not end within {self._timeout:g} s after it, and was killed."


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _is_paused(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP, if the system says so."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    return False


@contextmanager
def _environment(roles: Roles) -> Iterator[None]:
    """The environment of the processes; the agent's own reports to cluster operators are switched off."""
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in ENDING}
    heeded = [number.name for number, handler in handlers.items() if handler is not signal.SIG_IGN]
    try:
        os.environ[LAUNCHER] = str(os.getpid())
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(heeded)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // roles.world)))
        stay_local(os.environ)
        logging.disable(logging.CRITICAL)
        yield
    finally:
        logging.disable(logging.NOTSET)
        os.environ.clear()
        os.environ.update(before)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # torch leaves its own behind
                signal.signal(number, handler)


def tie_to_launcher() -> None:
    """In a started process: end when the one that started it is gone."""
    if LAUNCHER not in os.environ:
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, on Linux
    if os.getppid() != int(os.environ[LAUNCHER]):
        os._exit(1)
