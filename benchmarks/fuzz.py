"""Readers of files, given files that were changed at random.

    python -m benchmarks.fuzz benchmarks/results/fuzz-cpu.json --seconds 600

Each try takes a good file, changes it, and reads it: an IDX file, plain or .gz; a CSV file whose columns become numbers; or a
checkpoint whose hashes are made to fit, from which a run continues for one more step. A try must end with a result or with a
sentence (InputError, RunError). Counted are all other exceptions, with their place and the number of a try that shows them,
tries that exceed a time limit, and the memory that the process has gained. `--only N` repeats one try.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nhgd
from benchmarks.environment import environment
from nhgd.data.csv_file import labels, read_table
from nhgd.data.features import Features
from nhgd.data.idx import read_idx, read_images

LIMIT = 20.0  # seconds for one try
WARM = 50  # tries before memory is first looked at
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
ODD_NUMBERS = (0, 1, 2, 127, 255, 256, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
TOKENS = (
    *(b",", b'"', b'""', b"\n", b"\r", b"\r\n", b"\0", b";", b"\t", b"\xff", b"\xe9", b"\xef\xbb\xbf", b"\xe2\x80\xae"),
    *(b"nan", b"inf", b"-inf", b"1e999", b"1e99", b"1_000", b"0x10", b"NA", b"?", b" ", b"\x1b[31m", b"=1+1"),
    *("٣".encode(), "½".encode(), b"y" * 200_000, b",,,,,,", b"9" * 400),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.5, 1e308, 5e-324, "", "x", "\0", "\ud800"),
    *([], [[]], {}, {"": None}, [None] * 50, "a" * 1000, "__import__('os')", "NaN", [0, [1, [2]]], {"kind": "tensor"}),
)


class Hang(BaseException):
    """A try took too long."""


class Wrong(AssertionError):
    """A result that should have been refused."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Hang after so many seconds."""

    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def mutated(data: bytes, choose: random.Random, tokens: tuple[bytes, ...] = ()) -> bytes:
    """Bytes with a few of them changed, cut, doubled, moved or added."""
    found = bytearray(data)
    for _ in range(choose.choice((1, 1, 2, 5, 20))):
        place = choose.randrange(len(found) + 1)
        what = choose.randrange(8 if tokens else 6)
        if what == 0 and found:
            found[place % len(found)] = choose.randrange(256)
        elif what == 1:
            del found[place : place + choose.choice((1, 2, 10, 1000))]
        elif what == 2:
            found[place:place] = choose.randbytes(choose.choice((1, 4, 100)))
        elif what == 3:
            found[place:place] = found[max(0, place - choose.choice((3, 50))) : place]
        elif what == 4:
            del found[place:]
        elif what == 5 and len(found) > place + 4:
            found[place : place + 4] = struct.pack(">I", choose.choice(ODD_NUMBERS))
        elif what > 5:
            found[place:place] = choose.choice(tokens)
    return bytes(found)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


class Images:
    """IDX files, plain or packed: of the packed ones the bytes inside or outside are changed."""

    def __init__(self, packed: bool) -> None:
        self.packed = packed
        draw = np.random.default_rng(0)
        self.good = {}
        for part, count in (("train", 40), ("t10k", 20)):
            self.good[f"{part}-images-idx3-ubyte"] = idx(draw.integers(0, 256, (count, 6, 6)).astype(np.uint8))
            self.good[f"{part}-labels-idx1-ubyte"] = idx((np.arange(count) % 10).astype(np.uint8))

    def __call__(self, choose: random.Random, folder: Path) -> None:
        spoilt = choose.choice(NAMES)
        for name, content in self.good.items():
            data = content
            if name == spoilt:
                head = bytearray(content)
                if choose.random() < 0.5:  # most of what can be wrong is in the header
                    head[choose.randrange(16)] = choose.randrange(256)
                data = bytes(head) if choose.random() < 0.3 else mutated(bytes(head), choose)
            if self.packed:
                data = gzip.compress(data, 1)
                if name == spoilt and choose.random() < 0.5:
                    data = mutated(data, choose) if choose.random() < 0.7 else data + data
            (folder / f"{name}{'.gz' if self.packed else ''}").write_bytes(data)
        if choose.random() < 0.5:
            read_idx(folder / f"{spoilt}{'.gz' if self.packed else ''}")
        else:
            read_images(folder)


class Tables:
    """A CSV file of numbers and categories, read, understood and turned into numbers."""

    def __init__(self) -> None:
        draw = random.Random(0)
        rows = [
            f"{draw.gauss(0, 1):.3f},{draw.randrange(9)},{draw.choice(['red', 'blue'])},{draw.choice('ab')}"
            for _ in range(40)
        ]
        self.good = "\n".join(["size,count,colour,y", *rows, ""]).encode()

    def __call__(self, choose: random.Random, folder: Path) -> None:
        file = folder / "table.csv"
        file.write_bytes(mutated(self.good, choose, TOKENS))
        table = read_table(file)
        labels(table, choose.choice(table.header))
        names = [name for name in table.header if choose.random() < 0.8]
        categories = frozenset(name for name in names if choose.random() < 0.2)
        found = Features(choose.random() < 0.5, categories).fit(table, names).transform(table)
        if found.shape[0] != len(table.rows) or not np.isfinite(found).all():
            raise Wrong(f"shape {found.shape}, finite {np.isfinite(found).all()}")


class Checkpoints:
    """Checkpoints of small runs, their JSON or tensors changed and the hashes made to fit; a run goes on from them."""

    METHODS = ("nhgd", "aid-cg", "nhgd-window", "saba", "fsla")

    def __init__(self, place: Path) -> None:
        self.good: list[Path] = []
        for method in self.METHODS:
            kept = place / method
            with nhgd_solver(method, checkpoint=str(kept)) as solver:
                solver.run(steps=3)
            self.good.append(kept)

    def __call__(self, choose: random.Random, folder: Path) -> None:
        good = choose.choice(self.good)
        kept = folder / "kept"
        shutil.copytree(good, kept)
        # The newest alone: one that is refused must not be hidden by the one before it.
        newest = max(kept.glob("checkpoint-*"))
        for other in kept.glob("checkpoint-*"):
            if other != newest:
                shutil.rmtree(other)
        forge(newest, choose)
        problem, inner, outer = nhgd_problem()
        solver = nhgd.Solver.resume(kept, problem, inner, outer)
        try:
            solver.run(steps=4)
        finally:
            solver.close()


def nhgd_problem() -> tuple[nhgd.Bilevel, nhgd.Data, nhgd.Data]:
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 3, generator=made), torch.randn(24, generator=made)
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)

    def inner(model: Any, v: Any, batch: Any) -> Any:
        x, y, i = batch
        z = model(x)[:, 0]
        return nhgd.Losses(0.5 * (z - y).square(), weights=v[i].sigmoid(), outputs=z[:, None])

    def outer(model: Any, v: Any, batch: Any) -> Any:
        return (model(batch[0])[:, 0] - batch[1]).square().mean()

    problem = nhgd.Bilevel(inner, outer, model, torch.zeros(24), l2=0.1, likelihood="gaussian")
    return problem, nhgd.Data(x, y, batch=8), nhgd.Data(x[:10], y[:10], batch=5)


@contextmanager
def nhgd_solver(method: str, **settings: Any) -> Iterator[nhgd.Solver]:
    problem, inner, outer = nhgd_problem()
    solver = nhgd.Solver(problem, inner, outer, method=method, inner_steps=2, **settings)
    try:
        yield solver
    finally:
        solver.close()


def forge(place: Path, choose: random.Random) -> None:
    """Change a checkpoint and make its hashes fit."""
    from safetensors.torch import load_file, save_file

    document = json.loads((place / "run.json").read_text())
    contents = document["contents"]
    tensors = load_file(place / "tensors.safetensors")
    what = choose.random()
    deep = ""
    if what < 0.6:
        for _ in range(choose.choice((1, 1, 1, 3))):
            change_tree(contents, choose)
        if choose.random() < 0.02:
            contents["deep"], deep = "DEEP", "[" * 100_000 + "]" * 100_000
    elif what < 0.9:
        for _ in range(choose.choice((1, 1, 3))):
            change_tensors(tensors, choose)
        save_file(tensors, place / "tensors.safetensors")
    elif what < 0.95:
        file = place / "tensors.safetensors"
        file.write_bytes(mutated(file.read_bytes(), choose))
    else:
        rows = place / "history.jsonl"
        if rows.exists():
            rows.write_bytes(mutated(rows.read_bytes(), choose, (b"null\n", b"{}\n", b"[" * 5000, b"NaN", b"\n\n")))
            if isinstance(contents.get("history"), dict):
                data = rows.read_bytes()
                told = {"rows": data.count(b"\n"), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                contents["history"] |= told
        else:
            contents["history"] = choose.choice(ODD_VALUES)
    if choose.random() < 0.03:
        document[choose.choice(["format", "version"])] = choose.choice(ODD_VALUES)
    document["tensors_sha256"] = hashlib.sha256((place / "tensors.safetensors").read_bytes()).hexdigest()
    document["contents_sha256"] = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
    document["contents"] = contents
    (place / "run.json").write_text(json.dumps(document).replace('"DEEP"', deep or '"DEEP"'))


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a tree of dicts and lists: the parent, and the key or the index."""
    found: list[tuple[Any, Any]] = []
    parents = [tree]
    while parents:
        parent = parents.pop()
        for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
            found.append((parent, key))
            if isinstance(parent[key], (dict, list)):
                parents.append(parent[key])
    return found


def change_tree(tree: Any, choose: random.Random) -> None:
    """Change one place in a tree of JSON."""
    known = places(tree)
    parent, key = choose.choice(known)
    what = choose.randrange(7)
    value = parent[key]
    if what == 0:
        del parent[key]
    elif what == 1:
        other, where = choose.choice(known)
        parent[key] = copy.deepcopy(other[where])
    elif what == 2 and isinstance(parent, dict):
        parent[choose.choice([str(key) + "x", "", "kind", "0"])] = parent.pop(key)
    elif what == 3 and isinstance(value, (int, float)) and not isinstance(value, bool):
        parent[key] = choose.choice([value + 1, -value, value * 10**6, float(value), str(value), int(abs(value) < 1)])
    elif what == 4 and isinstance(value, str) and value:
        parent[key] = choose.choice([value[:-1], value.upper(), value + "x", value[::-1], "os.system", "builtins.eval"])
    elif what == 5 and isinstance(value, list):
        parent[key] = choose.choice([value[:-1], value + value, value[::-1], [value]])
    else:
        parent[key] = copy.deepcopy(choose.choice(ODD_VALUES))


def change_tensors(tensors: dict[str, torch.Tensor], choose: random.Random) -> None:
    """Change one tensor: its name, its dtype, its shape or its numbers."""
    name = choose.choice(sorted(tensors))
    tensor = tensors[name]
    what = choose.randrange(7)
    if what == 0:
        del tensors[name]
        if not tensors:
            tensors["x"] = torch.zeros(1)
    elif what == 1:
        tensors[name + "x"] = tensors.pop(name)
    elif what == 2:
        kinds = (torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16)
        tensors[name] = tensor.to(choose.choice(kinds))
    elif what == 3:
        shapes = [(0,), (), (1,) * 6, (tensor.numel() + 1,), (*tensor.shape, 1), (2, *tensor.shape)]
        tensors[name] = torch.zeros(choose.choice(shapes), dtype=tensor.dtype)
    elif what == 4 and tensor.is_floating_point():
        tensors[name] = torch.full_like(
            tensor, choose.choice([float("nan"), float("inf"), torch.finfo(tensor.dtype).max, -1.0, 0.0])
        )
    elif what == 5 and tensor.numel():
        tensors[name] = tensor.flatten().flip(0).reshape(tensor.shape).contiguous()
    else:
        tensors[name] = tensors[choose.choice(sorted(tensors))].clone()


def resident() -> float:
    """Megabytes of memory that this process has now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def fuzz(name: str, reader: Callable[[random.Random, Path], None], seconds: float, seed: int, only: int | None) -> Any:
    """Try a reader for so long; what was found."""
    found: dict[str, Any] = {"tries": 0, "read": 0, "refused": 0, "failed": 0, "hangs": [], "slowest_seconds": 0.0}
    others: dict[str, dict[str, Any]] = {}
    began, first = time.monotonic(), None
    number = 0 if only is None else only
    while time.monotonic() - began < seconds and not (only is not None and found["tries"]):
        choose = random.Random(f"{seed} {name} {number}")
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                with limited(LIMIT), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    reader(choose, Path(folder))
                found["read"] += 1
            except nhgd.InputError:
                found["refused"] += 1
            except nhgd.RunError:
                found["failed"] += 1
            except Hang:
                found["hangs"].append(number)
            except Exception as error:
                if only is not None:
                    traceback.print_exc()
                frames = [f for f in traceback.extract_tb(error.__traceback__) if "nhgd" in Path(f.filename).parts]
                last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
                place = f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno} {last.name}"
                told = others.setdefault(place, {"count": 0, "first": number, "words": str(error)[:200]})
                told["count"] += 1
        found["slowest_seconds"] = max(found["slowest_seconds"], time.monotonic() - started)
        found["tries"] += 1
        number += 1
        if found["tries"] == WARM:
            first = resident()
    last_resident = resident()
    return found | {
        "others": dict(sorted(others.items(), key=lambda item: -item[1]["count"])),
        "seconds": time.monotonic() - began,
        "megabytes": {
            "after_the_first_tries": first,
            "at_the_end": last_resident,
            "gained": None if first is None else last_resident - first,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the result goes, as JSON")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", help="idx, idx-gz, csv or checkpoint; default: all")
    parser.add_argument("--only", type=int, help="the number of the one try to repeat, with its traceback")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        makers: dict[str, Callable[[], Any]] = {
            "idx": lambda: Images(packed=False),
            "idx-gz": lambda: Images(packed=True),
            "csv": Tables,
            "checkpoint": lambda: Checkpoints(Path(place)),
        }
        results = {}
        for name in given.reader or makers:
            results[name] = fuzz(name, makers[name](), given.seconds, given.seed, given.only)
            told = results[name]
            print(
                f"{name}: {told['tries']} tries, {told['read']} read, {told['refused'] + told['failed']} refused,"
                f" {sum(other['count'] for other in told['others'].values())} other exceptions at {len(told['others'])} places,"
                f" {len(told['hangs'])} hangs",
                flush=True,
            )
    result = {"environment": environment(torch.device("cpu")), "seed": given.seed, "limit": LIMIT, "readers": results}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(any(told["others"] or told["hangs"] for told in results.values()))


if __name__ == "__main__":
    main()
