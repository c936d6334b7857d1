"""Many runs, several at a time, kept in a file of JSON lines so that an interrupted series continues where it was."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.environment import environment
from benchmarks.zoo.catalogue import CASES
from benchmarks.zoo.run import START, Record, run


@dataclass(frozen=True)
class Key:
    """Which run it is: its problem, method, seed and outer step size, and the share of the problem's budget that it has."""

    problem: str
    method: str
    seed: int
    outer_lr: float
    share: float = 1.0


def keys(
    problems: Iterable[str], methods: Iterable[str], seeds: Iterable[int], outer_lrs: Iterable[float], share: float
) -> list[Key]:
    """All combinations, seed by seed, so that what is broken off is whole for the first seeds."""
    found = product(seeds, problems, methods, outer_lrs)
    return list(dict.fromkeys(Key(p, m, s, 0.0 if m == START else lr, share) for s, p, m, lr in found))


def read(path: Path) -> list[Record]:
    """The runs in a file. Lines about the machine are passed over, and so is one that a crash cut off."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "problem" in found:
            records.append(found)
    return records


def key_of(record: Record) -> Key:
    """The key of a run that was kept."""
    return Key(**{name: record[name] for name in Key.__dataclass_fields__})


def one(key: Key, digits: Path | None) -> Record:
    """A run with its key."""
    return asdict(key) | run(CASES[key.problem], key.method, key.seed, key.outer_lr, digits, key.share)


def measure(out: Path, chosen: Sequence[Key], jobs: int = 1, digits: Path | None = None) -> None:
    """Make the runs that the file lacks, here or in several processes of one thread, and append each as it ends."""
    done = {key_of(record) for record in read(out)}
    left = [key for key in chosen if key not in done]
    if not left:
        return
    with open(out, "a", encoding="utf-8") as file:
        machine = json.dumps({"environment": environment(torch.device("cpu"))})
        file.write(("\n" if file.tell() else "") + machine + "\n")
        for number, record in enumerate(made(left, jobs, digits), 1):
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(f"{number}/{len(left)} {told(record)}", file=sys.stderr, flush=True)


def made(left: Sequence[Key], jobs: int, digits: Path | None) -> Iterator[Record]:
    """The runs, in the order in which they end."""
    if jobs == 1:
        yield from (one(key, digits) for key in left)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes read it when they start
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(one, key, digits) for key in left]):
            yield future.result()


def told(record: Record) -> str:
    """A run in one line."""
    result = record["failed"] or f"{record['held_out_loss']:.4g}"
    return (
        f"{record['problem']} {record['method']} seed {record['seed']} lr {record['outer_lr']:g}: {result},"
        f" {record['cpu_seconds']:.1f} s, {sum(record['warnings'].values())} warnings"
    )
