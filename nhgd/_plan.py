"""Memory and time of every inverse, before anything is allocated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import log
from typing import Any, NamedTuple

import torch

from nhgd._budget import FEW_PLACES
from nhgd._cost import Operation, Work, work
from nhgd._html import table
from nhgd._memory import extrapolated, peak_of, synchronise
from nhgd._recording.normalisation import normalises_by_batch
from nhgd._recording.recorder import Recorder
from nhgd._shape import Shape
from nhgd._surroundings import library_settings
from nhgd._threads import on_suited_threads
from nhgd._tree import map_tensors
from nhgd._validation import validated
from nhgd.data.batch import Batch, common_length, move
from nhgd.errors import InputError, NhgdError
from nhgd.inverse import INVERSES, AbstractInverse, FisherWindow, resolve
from nhgd.inverse.capabilities import kept, products, saved, warnings_for
from nhgd.loop.calibration import places, samples_of_product
from nhgd.objective import Objective
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel
from nhgd.record import LayerStatistics
from nhgd.variable import Variable

HEADS = ("inverse", "memory", "ms", "ms a step", "  note")
WIDTHS = ("<16", ">12", ">12", ">12", "<6")


@dataclass(frozen=True)
class Plan:
    """What each inverse would need, on this machine as it is now.

    Attributes:
        rows: one dict for each inverse: inverse; bytes (its state, one solve, and the record of a batch, beyond the
            graph of an inner gradient); milliseconds (of one hypergradient, as `check` measures it: the outer gradient,
            the solve and the cross derivative; of an iteration that may stop early, all its steps); solve_milliseconds
            (the solve alone); step_milliseconds (what it adds to each inner step); peak_bytes (all tensors of a run of
            `nhgd`, or of `aid` for an inverse that learns nothing, when they are most: theta, its gradient, what passes
            hold and the inverse; an optimiser's own moments come on top; None without a batch); fits (in the memory
            that is free now); note.
        dimension: D, the number of inner parameters.
        outer_dimension: the number of outer parameters.
        free_bytes: free memory on theta's device; None if unknown.
        gradient_milliseconds: one inner gradient: measured where a batch was given, else estimated from D.
        measured: whether it was.
        samples: in the batch that all of this is about.
    """

    rows: list[dict[str, Any]]
    dimension: int
    outer_dimension: int
    free_bytes: int | None
    gradient_milliseconds: float
    measured: bool
    samples: int

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return dict(vars(self))

    def __str__(self) -> str:
        lines = [self._about, "".join(map(format, HEADS, WIDTHS))]
        lines += ["".join(map(format, self._cells(row), WIDTHS)).rstrip() for row in self.rows]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = [head.strip() for head in HEADS]
        return table(heads, [[cell.strip() for cell in self._cells(row)] for row in self.rows], self._about)

    @property
    def _about(self) -> str:
        how = "measured" if self.measured else "estimated"
        return (
            f"D = {self.dimension}, outer D = {self.outer_dimension}, batches of {self.samples}, one inner gradient"
            f" {self.gradient_milliseconds:.3g} ms ({how})"
        )

    @staticmethod
    def _cells(row: dict[str, Any]) -> list[str]:
        times = f"{row['milliseconds']:.3g}", f"{row['step_milliseconds']:.3g}"
        return [row["inverse"], readable(row["bytes"]), *times, f"  {row['note']}"]


@validated
@on_suited_threads
@library_settings()
def plan(
    problem: Bilevel,
    inner_batch: Batch | None = None,
    inverses: str | AbstractInverse | Sequence[str | AbstractInverse] | None = None,
    batch_size: int | None = None,
) -> Plan:
    """Estimate bytes and milliseconds of each inverse. Nothing of the estimated size is allocated.

    What an inverse computes is counted from shapes. What that takes comes from a few operations that are timed here and
    now: a gradient and a Hessian product where a batch is given, and small matrix products and factorisations.

    Args:
        problem: a `Bilevel`.
        inner_batch: with one, an inner gradient is timed on it and its samples are those of the estimate; without, the
            time of a gradient is estimated as 6 D operations a sample, which is too little for convolutions.
        inverses: names or objects; default: all that are known.
        batch_size: samples a batch where no batch is given; default 1024.

    >>> problem = Bilevel(lambda t, v, x: (x @ t - v) ** 2, lambda t, v, x: t.sum(), torch.zeros(1000), torch.zeros(()))
    >>> {row["inverse"]: row["bytes"] for row in plan(problem, inverses=["cg", "exact"]).rows}
    {'cg': 24000, 'exact': 32000000}
    """
    theta = problem.theta
    given = [inverses] if isinstance(inverses, (str, AbstractInverse)) else inverses
    asked: list[str | AbstractInverse] = list(INVERSES) if given is None else list(given)
    chosen = [(i if isinstance(i, str) else i.name, resolve(i)) for i in asked]
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise InputError(f"batch_size must be a whole number of at least 1, got {batch_size!r}.")
    if inner_batch is not None and batch_size is not None:
        raise InputError("plan uses the samples of the given batch, so batch_size would be ignored. Omit it.")
    prices = _Prices(theta.device, theta.dtype)
    peaks: _Peaks | None = None
    alike: frozenset[str] = frozenset()
    if inner_batch is None:
        samples = 1024 if batch_size is None else batch_size
        shape = Shape.of(theta, samples, None, problem.ridge_coefficients())
        prices.gradient = prices.matmul(3.0 * theta.numel * samples, theta.dtype)
        prices.product, prices.outer = 2 * prices.gradient, 3 * prices.gradient
    else:
        batch = move(inner_batch, theta.device)
        samples = common_length(batch) or _samples(problem, batch)
        with problem.guarded(seed=0):
            shape = Shape.of(theta, samples, places(problem, batch), problem.ridge_coefficients())
        _time_passes(problem, batch, prices)
        many = any(layer.places > FEW_PLACES for layer in shape.layers)
        coupled = problem.theta.root is not None and any(map(normalises_by_batch, problem.theta.root.modules()))
        peaks = _Peaks.of(problem, batch, samples_of_product(many, coupled))
        alike = sharing(problem, batch)
    free = free_bytes(theta.device)
    rows = []
    for name, inverse in chosen:
        found = work(inverse, shape)
        size = (
            inverse.memory(theta)
            - saved(inverse, theta, alike)[0]
            + (0 if inner_batch is None else int(found.record_bytes))
        )
        notes = []
        if free is not None and size > free:
            notes.append(f"does not fit: {readable(free)} free")
        notes.extend(warnings_for(inverse, theta))
        notes.extend(_full_window(inverse, shape, prices))
        solve = prices.of(found.solve)
        rows.append(
            {
                "inverse": name,
                "bytes": size,
                "milliseconds": 1e3 * (prices.outer + solve),
                "solve_milliseconds": 1e3 * solve,
                "step_milliseconds": 1e3 * prices.of(found.step),
                "peak_bytes": None if peaks is None else peaks.with_inverse(inverse, theta, alike),
                "fits": free is None or size <= free,
                "note": "; ".join(notes),
            }
        )
    return Plan(rows, theta.numel, problem.v.numel, free, 1e3 * prices.gradient, inner_batch is not None, samples)


class _Peaks(NamedTuple):
    """Bytes that passes over a batch make and hold at once.

    Attributes:
        step: of an inner step.
        first: of the first one that is recorded, in which layers are verified.
        product: of a product that `nhgd` takes now and then.
        whole: of a product on the whole batch.
        cross: of a cross derivative through the graph of a gradient.
    """

    step: int
    first: int
    product: int
    whole: int
    cross: int

    @classmethod
    def of(cls, problem: Bilevel, batch: Batch, of_product: int) -> _Peaks:
        """Extrapolated from some of the samples; a large model takes `of_product` in a product."""
        samples = common_length(batch)
        vector = torch.ones_like(problem.theta.flat())

        def some(count: int) -> Batch:
            return map_tensors(lambda t: t[:count] if t.ndim else t, batch) if samples is not None else batch

        def step(count: int) -> None:
            with problem.guarded(seed=0, twice=False):
                Objective(problem, some(count)).step()

        def product(count: int) -> None:
            Oracle(problem, [some(count)]).hvp(vector)

        def cross(count: int) -> None:
            Oracle(problem, [some(count)]).cross(vector)

        whole = in_v = 0
        with suppress(RuntimeError):  # an operation without a second derivative: said by those that need one
            whole, in_v = extrapolated(product, samples or 1), extrapolated(cross, samples or 1)
        few = problem.few(batch)
        product_of_few = whole if few is None or not whole else peak_of(lambda: product(of_product))

        def record(count: int) -> None:
            with problem.guarded(seed=0, twice=False):
                Recorder(problem, "layer", couples=False).step(some(count))

        first = 0
        if few is None and problem.theta.root is not None:
            with suppress(NhgdError, RuntimeError, ValueError):  # said by the inverses that learn
                first = extrapolated(record, samples or 1)
        return cls(extrapolated(step, samples or 1), first, product_of_few, whole, in_v)

    def with_inverse(self, inverse: AbstractInverse, theta: Variable, alike: frozenset[str] = frozenset()) -> int:
        """The same with theta and what the inverse keeps, or needs besides."""
        own = theta.numel * theta.dtype.itemsize
        not_most, not_kept = saved(inverse, theta, alike)
        stays, most = kept(inverse, theta) - not_kept, inverse.memory(theta) - not_most
        # Where an inverse learns or solves, a gradient is there, but no pass.
        product = self.product + 2 * own
        if inverse.learner is not inverse:
            product = self.whole + most - stays if products(inverse) != 0 else self.cross + own
        step = self.step if inverse.learner is None else max(self.step, self.first)
        return own + max(step + stays, product + stays, most + own)


def sharing(problem: Bilevel, batch: Batch) -> frozenset[str]:
    """Layers that are given the same tensor as another one, by their weights; from a record of two samples."""
    if common_length(batch) is None or problem.theta.root is None:
        return frozenset()
    first: dict[Any, str] = {}
    with suppress(NhgdError, RuntimeError, IndexError, ValueError), problem.guarded(seed=0):
        few = map_tensors(lambda t: t[:2] if t.ndim else t, batch)
        record = Recorder(problem, "layer", couples=False).step(few).record
        layers = record.layers if isinstance(record, LayerStatistics) else ()
        return frozenset(
            layer.weight for layer in layers if first.setdefault(layer.origin, layer.weight) != layer.weight
        )
    return frozenset()


class _Prices:
    """Seconds of operations on this machine, each timed when it is first asked for."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.gradient = 0.0
        self.product = 0.0
        self.outer = 0.0  # all of a hypergradient but the solve
        self._known: dict[tuple[str, int, torch.dtype], float] = {}

    def of(self, operations: Sequence[Operation]) -> float:
        """Seconds of all of them."""
        return sum(o.times * self.one(o) for o in operations)

    def one(self, operation: Operation) -> float:
        """Seconds of one operation."""
        kind, size, _, double = operation
        dtype = torch.float64 if double else self.dtype
        if kind == "gradient":
            return self.gradient
        if kind == "product":
            return self.product
        if kind == "matmul":
            return self.matmul(size, dtype)
        if kind == "pass":
            fresh = 3 if size > 2**22 else 1  # large arrays come from the system page by page
            return fresh * size * self._timed("pass", 2**20, dtype) / 2**21  # one number is read and one written
        if kind == "call":
            return 3 * self._timed(
                "call", 1, dtype
            )  # what Python does around an operation takes as long again, and more
        return self._factorised(kind, size, dtype)

    def matmul(self, multiplications: float, dtype: torch.dtype) -> float:
        """Seconds of a matrix product."""
        side = 64 if multiplications < 2**22 else 512 if self.device.type == "cpu" else 4096
        return multiplications * self._timed("matmul", side, dtype) / side**3

    def _factorised(self, kind: str, size: float, dtype: torch.dtype) -> float:
        """Interpolate between two timed sizes by a power law, and extrapolate it beyond the largest."""
        sizes = (16, 64, 256, 512)
        high = next((i for i, timed in enumerate(sizes) if i and size <= timed), len(sizes) - 1)
        below, above = self._timed(kind, sizes[high - 1], dtype), self._timed(kind, sizes[high], dtype)
        power = min(3.0, max(0.0, log(above / below) / log(sizes[high] / sizes[high - 1])))
        return float(above * (max(size, 1.0) / sizes[high]) ** power)

    def _timed(self, kind: str, size: int, dtype: torch.dtype) -> float:
        key = (kind, size, dtype)
        if key not in self._known:
            self._known[key] = self._time(kind, size, dtype)
        return self._known[key]

    def _time(self, kind: str, size: int, dtype: torch.dtype) -> float:
        if kind in ("pass", "call"):
            a = torch.ones(size, device=self.device, dtype=dtype)
        else:
            generator = torch.Generator().manual_seed(0)
            a = torch.rand(size, size, generator=generator, dtype=dtype).to(self.device)
            a = a @ a.T / size + torch.eye(size, device=self.device, dtype=dtype)
        kinds: dict[str, Callable[[], Any]] = {
            "matmul": lambda: a @ a,
            "eigh": lambda: torch.linalg.eigh(a),
            "cholesky": lambda: torch.linalg.cholesky_ex(a),
            "pass": lambda: a * 2,
            "call": lambda: a + a,
        }
        return _seconds(kinds[kind], self.device, repeats=20 if kind == "call" else 5)


def _seconds(action: Callable[[], Any], device: torch.device, repeats: int = 3) -> float:
    """The shortest of a few runs, because other work on the machine can only slow it down."""
    # What a single thread takes of a core is not lengthened by others that want the core, too.
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    action()
    synchronise(device)
    times = []
    for _ in range(repeats):
        started = clock()
        action()
        synchronise(device)
        times.append(clock() - started)
    return max(min(times), 1e-9)


def _time_passes(problem: Bilevel, batch: Batch, prices: _Prices) -> None:
    """Time an inner gradient, a Hessian product with its graph ready, and the rest of a hypergradient except the
    solve.
    """
    device = problem.theta.device

    def gradient() -> None:
        with problem.guarded(seed=0), torch.enable_grad():
            torch.autograd.grad(problem.objective(batch), problem.theta.leaves, allow_unused=True)

    prices.gradient = _seconds(gradient, device)
    vector = torch.ones_like(problem.theta.flat())
    points: list[Oracle] = []

    def product() -> None:
        points[-1].hvp(vector)

    def first() -> None:
        points[:] = [Oracle(problem, [batch])]
        points[-1].cross(vector)

    try:
        # The outer gradient is taken to cost what the inner one does, and the cross derivative brings the graph.
        prices.outer = prices.gradient + _seconds(first, device)
        prices.product = _seconds(product, device)
    except RuntimeError:  # an operation without a second derivative: said by those that need one
        prices.product, prices.outer = 2 * prices.gradient, 3 * prices.gradient


def _samples(problem: Bilevel, batch: Batch) -> int:
    """The samples of a batch whose tensors do not show it."""
    with problem.guarded(seed=0), torch.no_grad():
        return max(1, problem.losses(batch).values.numel())


def _full_window(inverse: AbstractInverse, shape: Shape, prices: _Prices) -> list[str]:
    """The cost of a window that several batches have filled."""
    if not isinstance(inverse, FisherWindow) or inverse.records == "batch" or shape.samples >= inverse.window:
        return []
    full: Work = work(inverse, replace(shape, samples=inverse.window))
    more = 1e3 * (prices.outer + prices.of(full.solve))
    return [f"{more:.3g} ms once {inverse.window} samples fill its window"]


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def readable(size: int) -> str:
    """Bytes for people.

    >>> readable(20_000_000)
    '20.0 MB'
    """
    number = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
