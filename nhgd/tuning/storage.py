"""Where the trials of a sweep are kept: any storage of Optuna, by its address."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nhgd.errors import InputError, RunError

INTERVAL, GRACE = (
    10,
    60,
)  # seconds between two signs of life of a trial, and after which one without them is taken for lost
ATTEMPTS = 5  # at making the tables, which several workers may do at once
JOURNAL = "journal:"
WORKER = "nhgd:worker"
T = TypeVar("T")


def optuna() -> Any:
    """The package, silent; or an error that says how to get it."""
    try:
        import optuna as found
    except ImportError:
        raise InputError("A sweep needs Optuna: pip install 'nhgd[sweep]'.") from None
    found.logging.set_verbosity(found.logging.CRITICAL)  # what it says, the result says too
    return found


def opened(address: str | None) -> Any:
    """The storage at an address; None is one in memory.

    Args:
        address: as SQLAlchemy writes it, such as sqlite:///sweep.db or postgresql://user@host/database; journal:FILE;
            or redis://host:port.
    """
    made = optuna().storages
    if address is None:
        return made.InMemoryStorage()
    if address.startswith(JOURNAL):
        path = Path(address.removeprefix(JOURNAL).removeprefix("//"))
        if not path.name or not path.absolute().parent.is_dir():
            raise InputError(f"--storage {address}: there is no folder {path.absolute().parent}. Make it first.")
        return _reached(lambda: made.JournalStorage(made.journal.JournalFileBackend(str(path))), address)
    if address.startswith("redis://"):
        if importlib.util.find_spec("redis") is None:
            raise InputError("A redis:// storage needs redis: pip install redis.")
        return _reached(lambda: made.JournalStorage(made.journal.JournalRedisBackend(address)), address)
    if "://" not in address:
        raise InputError(
            f"--storage {address} is no address of a storage. Give sqlite:///sweep.db, postgresql://user@host/database,"
            " journal:sweep.log or redis://host:6379."
        )
    # A file that another process writes to is waited for.
    options = {"connect_args": {"timeout": 100}} if address.startswith("sqlite") else {"pool_pre_ping": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
        return _reached(
            lambda: made.RDBStorage(
                _with_driver(address),
                engine_kwargs=options,
                heartbeat_interval=INTERVAL,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=made.RetryHeartbeatStaleTrialCallback(),
            ),
            address,
        )


def closed(storage: Any) -> None:
    """Let go of a database."""
    engine = getattr(storage, "engine", None)
    if engine is not None:
        storage.remove_session()
        engine.dispose()


def _reached(make: Callable[[], T], address: str) -> T:
    """What `make` gives, after a few attempts; its errors are about the address."""
    for attempt in range(ATTEMPTS):
        try:
            return make()
        except ModuleNotFoundError as error:
            raise InputError(
                f"--storage {hidden(address)} needs the package {error.name}: pip install {error.name}."
            ) from None
        except Exception as error:  # of SQLAlchemy, of a driver of any database, of Optuna
            refused = type(error).__name__ in ("NoSuchModuleError", "ArgumentError", "ValueError")
            if refused or attempt == ATTEMPTS - 1:
                raise InputError(f"--storage {hidden(address)} cannot be used: {first_line(error)}") from None
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError


def hidden(address: str | None) -> str | None:
    """An address without its password.

    >>> hidden("postgresql://me:secret@host/sweep")
    'postgresql://me:***@host/sweep'
    """
    return None if address is None else re.sub(r"(://[^:/@]*):.*@", r"\1:***@", address)


def first_line(error: BaseException) -> str:
    """What an error of a database says, in one line."""
    cause = getattr(error, "orig", None) or error.__cause__ or error
    said = hidden(" ".join(str(cause).split())) or type(cause).__name__
    return said if len(said) <= 300 else f"{said[:297]}..."


def in_words(error: Exception, address: str | None) -> RunError:
    """An error of the storage in the midst of a sweep."""
    return RunError(
        f"The storage {hidden(address) or 'of the sweep'} failed: {first_line(error)} The same command goes on from the"
        " trials it has."
    )


def here() -> dict[str, Any]:
    """Which process this is, for a later one that finds its trial unfinished."""
    return {"host": socket.gethostname(), "process": os.getpid()}


def lost(worker: dict[str, Any]) -> bool:
    """Whether a process was on this machine and is no more."""
    number = worker.get("process")
    if worker.get("host") != socket.gethostname() or not isinstance(number, int) or number == os.getpid():
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def give_up_lost(study: Any) -> None:
    """Trials whose process is no more are repeated, by whoever comes first."""
    state = optuna().trial.TrialState
    for trial in study.get_trials(deepcopy=False, states=(state.RUNNING,)):
        worker = trial.user_attrs.get(WORKER)
        if isinstance(worker, dict) and lost(worker):
            try:
                study.tell(trial.number, state=state.FAIL)
            except ValueError:  # another worker did so
                continue
            if trial.params:
                study.enqueue_trial(trial.params)


def errors() -> tuple[type[Exception], ...]:
    """What a storage raises when it fails in the midst of a sweep."""
    found: list[type[Exception]] = [optuna().exceptions.StorageInternalError]
    try:
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        return tuple(found)
    return (*found, SQLAlchemyError)


def _with_driver(address: str) -> str:
    """PostgreSQL by psycopg where that is installed: older versions of SQLAlchemy would ask for its predecessor."""
    scheme, rest = address.split("://", 1)
    if scheme in ("postgresql", "postgres") and importlib.util.find_spec("psycopg") is not None:
        return f"postgresql+psycopg://{rest}"
    return address
