"""The operations that an inverse computes, from shapes alone; nothing is run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, Literal, NamedTuple

import torch

from nhgd._shape import Layer, Shape
from nhgd.inverse._learned.kronecker import AbstractKronecker
from nhgd.inverse._learned.layer_ridge import ITERATIONS, pays
from nhgd.inverse._learned.resting import POLISH
from nhgd.inverse._learned.ring import factors_pay
from nhgd.inverse.base import AbstractInverse, Learned
from nhgd.inverse.bfgs import BFGS
from nhgd.inverse.broyden import Broyden
from nhgd.inverse.capabilities import products
from nhgd.inverse.ekfac import EKFAC
from nhgd.inverse.exact import Exact
from nhgd.inverse.fisher_dense import FisherDense
from nhgd.inverse.fisher_diagonal import FisherDiagonal
from nhgd.inverse.fisher_window import FisherWindow
from nhgd.inverse.kfac import KFAC
from nhgd.inverse.nystrom import Nystrom
from nhgd.inverse.refined import Refined
from nhgd.variable import Variable

Kind = Literal["gradient", "product", "matmul", "eigh", "cholesky", "pass", "call"]


class Operation(NamedTuple):
    """One kind of operation, done `times` times.

    "gradient": an inner gradient, and "product": a Hessian product, both of size 1. "matmul": a matrix product of
    `size` multiplications. "eigh" and "cholesky": a factorisation of a matrix of `size` rows. "pass": `size` numbers
    read or written. "call": nothing but being called.
    """

    kind: Kind
    size: float = 1.0
    times: float = 1.0
    double: bool = False  # in float64, whatever theta's dtype


@dataclass(frozen=True)
class Work:
    """The operations that an inverse adds to an inner step, those of a solve, and the bytes of a record."""

    step: list[Operation] = field(default_factory=list)
    solve: list[Operation] = field(default_factory=list)
    record_bytes: float = 0.0


def flops(operation: Operation) -> float:
    """About how many floating-point operations one of them takes; a number that is read or written counts for many.

    >>> flops(Operation("matmul", 1e6))
    2000000.0
    """
    if operation.kind == "matmul":
        return 2 * operation.size
    if operation.kind == "eigh":
        return 12 * operation.size**3
    if operation.kind == "cholesky":
        return operation.size**3 / 3
    return 16 * operation.size if operation.kind == "pass" else 0.0


def largest(inverse: AbstractInverse | None, theta: Variable, samples: int, steps: int = 1) -> float:
    """The floating-point operations of the largest single operation of an inverse.

    What a solve takes counts for less where there is one after so many inner `steps`.
    """
    if inverse is None:
        return 0.0
    found = work(inverse, Shape.of(theta, samples))
    return max((*map(flops, found.step), *(flops(o) / steps for o in found.solve)), default=0.0)


@singledispatch
def work(inverse: AbstractInverse, shape: Shape) -> Work:
    """The operations of an inverse. An unknown one counts as its Hessian products, with a few vectors around each."""
    known = products(inverse)
    count = shape.numel if known is None else known
    if not count:
        return Work(solve=[Operation("call", times=2)])
    return Work(solve=_products(count, shape))


@work.register
def _(inverse: Exact, shape: Shape) -> Work:
    n = shape.numel
    return Work(
        solve=[
            Operation("product", times=n),
            Operation("pass", 4 * n**2, double=True),
            Operation("eigh", n, double=True),
        ]
    )


@work.register
def _(inverse: Broyden, shape: Shape) -> Work:
    pairs = min(inverse.pairs, inverse.steps + 1)
    steps = inverse.steps + 2
    return Work(solve=[*_products(steps, shape), Operation("pass", 4 * pairs * shape.numel, steps)])


@work.register
def _(inverse: BFGS, shape: Shape) -> Work:
    pairs = min(inverse.pairs, inverse.steps)
    steps = inverse.steps
    return Work(solve=[*_products(steps, shape), Operation("pass", 4 * pairs * shape.numel, steps)])


@work.register
def _(inverse: Nystrom, shape: Shape) -> Work:
    rank, n = min(inverse.rank, shape.numel), shape.numel
    return Work(
        solve=[
            *_products(rank, shape, vectors=2),
            Operation("matmul", 4 * n * rank**2, double=True),
            Operation("pass", 10 * rank * n, double=True),
            Operation("eigh", rank, 2, double=True),
            Operation("call", times=40),
        ]
    )


@work.register
def _(inverse: Refined, shape: Shape) -> Work:
    inside = work(inverse.inverse, shape)
    # Factorisations are done once; the rest of a solve at each step.
    once = [o for o in inside.solve if o.kind in ("eigh", "cholesky")]
    each = [o._replace(times=o.times * (inverse.steps + 1)) for o in inside.solve if o not in once]
    return Work(inside.step, [*_products(inverse.steps + 1, shape), *once, *each], inside.record_bytes)


@work.register
def _(inverse: FisherDiagonal, shape: Shape) -> Work:
    numbers = _record(inverse, shape)
    squares = [_second_moments(layer, shape.samples, roots=_roots(inverse, shape)) for layer in shape.layers]
    step = [
        *_beside_layers(inverse, shape),
        *(o for found in squares for o in found),
        Operation("pass", 6 * shape.numel),
    ]
    step += [Operation("pass", 4 * numbers), Operation("call", times=12 + 15 * len(shape.layers))]
    solve = [Operation("pass", 12 * shape.numel), Operation("call", times=20)]
    return Work(_at_times(step, inverse.factor_every), solve, numbers * shape.itemsize)


@work.register
def _(inverse: FisherDense, shape: Shape) -> Work:
    n, rows = shape.numel, shape.samples * _roots(inverse, shape) if inverse.records == "sample" else 1
    step = (
        []
        if inverse.records != "sample"
        else [*_beside_layers(inverse, shape), Operation("pass", 4 * rows * n, double=True)]
    )
    if inverse.form == "matrix":
        step += [Operation("matmul", rows * n**2, double=True), Operation("call", times=30)]
        solve = [
            Operation("cholesky", n, double=True),
            Operation("pass", 6 * n**2, double=True),
            Operation("call", times=40),
        ]
        return Work(step, solve, rows * n * 8)
    if rows == 1:
        step += [Operation("pass", 5 * n**2, double=True), Operation("call", times=30)]
    else:
        few = min(rows, n)
        step += [
            Operation("matmul", few * n**2 * 2 + 2 * few**2 * n, double=True),
            Operation("cholesky", few, double=True),
            Operation("pass", 6 * n**2, double=True),
            Operation("call", times=40),
        ]
    return Work(step, [Operation("pass", n**2, double=True), Operation("call", times=20)], rows * n * 8)


@work.register
def _(inverse: FisherWindow, shape: Shape) -> Work:
    return windowed(inverse, shape, inverse.length if inverse.records == "batch" else shape.samples)


def windowed(inverse: FisherWindow, shape: Shape, samples: int) -> Work:
    """The operations of a window once it holds `samples`, or as many as it can."""
    kept, new, roots = min(inverse.length, samples), 1, 1
    if inverse.records != "batch":
        new, roots = min(kept, shape.samples), _roots(inverse, shape)
    rows = kept * roots
    products, both, numbers = (
        0.0,
        0.0,
        0.0,
    )  # multiplications for a Gram matrix, for R and R^T on a vector; numbers kept
    for layer in shape.layers if inverse.records == "layer" else ():
        width, out = layer.columns, layer.out
        if layer.groups == 1 and factors_pay(layer.places, roots, width, out):
            products += (new * layer.places) * (kept * layer.places) * (width + roots**2 * out)
            both += 2 * kept * layer.places * width * out
            numbers += kept * layer.places * (width + roots * out)
        else:
            products += new * kept * roots**2 * layer.numel + 4 * new * roots * layer.places * layer.numel
            both += 2 * rows * layer.numel
            numbers += rows * layer.numel
    rest = sum(shape.others) if inverse.records == "layer" else shape.numel
    products += new * kept * roots**2 * rest
    both += 2 * rows * rest
    numbers += rows * rest
    record = shape.numel if inverse.records == "batch" else _record(inverse, shape)
    each = 2 + len(shape.layers)
    step = [
        *_beside_layers(inverse, shape),
        Operation("pass", 6 * numbers + 4 * record, double=True),
        Operation("matmul", products, double=True),
        Operation("pass", 3 * new * roots * rows * each, double=True),
        Operation("call", times=40 + 20 * each),
    ]
    solve = [
        Operation("pass", 6 * rows**2 + 4 * numbers + 10 * shape.numel, double=True),
        Operation("matmul", both, double=True),
        Operation("cholesky", rows, double=True),
        Operation("call", times=40 + 12 * each),
    ]
    return Work(step, solve, record * shape.itemsize)


@work.register(AbstractKronecker)
def _(inverse: AbstractKronecker[Any], shape: Shape) -> Work:
    step, bases, solve, record = kronecker(inverse, shape, inverse.invert_every is not None)
    if inverse.invert_every is None:
        solve += bases
    else:
        step += _at_times(bases, inverse.invert_every)
    return Work(_at_times(step, inverse.factor_every), solve, record * shape.itemsize)


class Kronecker(NamedTuple):
    """The operations of a full record, of the decompositions of all layers, and of a solve with them; the numbers in
    a record.
    """

    step: list[Operation]
    bases: list[Operation]
    solve: list[Operation]
    record: float


def kronecker(inverse: AbstractKronecker[Any], shape: Shape, kept: bool, iterations: int = ITERATIONS) -> Kronecker:
    """The work of an inverse in Kronecker factors, in its three parts.

    Args:
        kept: whether decompositions are kept from one solve to the next.
        iterations: of conjugate gradients, where the ridge needs them.
    """
    shape = shape.in_blocks(inverse.largest)
    samples, roots = shape.samples, _roots(inverse, shape)
    double = inverse.dtype is torch.float64
    record = _record(inverse, shape)
    step = [*_beside_layers(inverse, shape), Operation("pass", 6 * record, double=double)]
    solve: list[Operation] = []
    bases: list[Operation] = []
    for layer in shape.layers:
        groups, out, columns, places = layer[:4]
        seen = samples * places * groups
        size = groups * (columns**2 + out**2)
        step += [
            Operation("matmul", seen * columns**2, double=double),
            Operation("matmul", roots * seen * out**2, double=double),
            Operation("pass", 6 * size, double=double),
            Operation("call", times=30),
        ]
        turned = groups * (out * columns**2 + out**2 * columns)
        products = inverse.iterations if isinstance(inverse, KFAC) and inverse.solver == "products" else 0
        products = (
            3 * POLISH if inverse.basis_dtype is not None else products
        )  # and as many turns into the basis and back
        solve += [
            Operation("matmul", max(2, products) * turned, double=double),
            Operation("pass", products * 15 * layer.numel, double=double),
            Operation("call", times=15 * products),
            Operation("pass", 8 * layer.numel + 4 * size, double=double),
            Operation("call", times=15),
            *_uneven_ridge(inverse, layer, kept, iterations),
        ]
        bases += [Operation("eigh", columns, groups, double), Operation("eigh", out, groups, double)]
        if isinstance(inverse, EKFAC):
            step += [
                Operation("matmul", seen * columns**2, double=double),
                Operation("matmul", roots * seen * out**2, double=double),
                *_second_moments(layer, samples, roots, double),
                Operation("pass", 5 * layer.numel, double=double),
                Operation("call", times=20),
            ]
            carried = 4 * groups * (columns**3 + out**3) + 3 * turned
            bases += [Operation("matmul", carried, double=double), Operation("pass", 10 * layer.numel, double=double)]
    for n in shape.others:
        dense = n <= inverse.dense_limit
        step += [Operation("matmul", samples * roots * n**2) if dense else Operation("pass", 2 * samples * roots * n)]
        solve += [Operation("eigh", n, 1, double)] if dense else [Operation("pass", 4 * n)]
        solve.append(Operation("call", times=15))
    if isinstance(inverse, KFAC) and inverse.solver == "products":
        bases = []
    if isinstance(inverse, KFAC) and inverse.solver == "cholesky":
        bases = [o._replace(kind="cholesky") for o in bases]
    solve.append(Operation("call", times=20))
    return Kronecker(step, bases, solve, record)


def _uneven_ridge(inverse: AbstractKronecker[Any], layer: Layer, kept: bool, iterations: int) -> list[Operation]:
    """The extra operations of a solve if the ridge differs within a layer; an iteration counts with all its steps."""
    if layer.ridge == "even" or (isinstance(inverse, KFAC) and inverse.solver != "eigen"):
        return []
    groups, out, columns = layer[:3]
    double = inverse.dtype is torch.float64
    sizes = {"columns": [columns], "rows": [out], "uneven": [columns, out]}[layer.ridge]
    decomposes = kept and pays(sizes, out, columns, iterations)
    found = [Operation("pass", 6 * layer.numel, double=double), Operation("call", times=15)]
    if decomposes and not (isinstance(inverse, EKFAC) and layer.ridge == "uneven"):
        found += [Operation("eigh", n, groups, double) for n in sizes]
        found += [Operation("matmul", groups * (columns**3 + out**3), double=double), Operation("call", times=15)]
    if isinstance(inverse, KFAC) and layer.ridge != "uneven" and (decomposes or not kept):
        return found
    turned = groups * (out * columns**2 + out**2 * columns)
    return [
        *found,
        Operation("matmul", 4 * turned, iterations, double),
        Operation("pass", 20 * layer.numel, iterations, double),
        Operation("call", times=30 * iterations),
    ]


def _products(count: int, shape: Shape, vectors: int = 12) -> list[Operation]:
    """Hessian products, with the vectors that are read and written around each of them."""
    return [
        Operation("product", times=count),
        Operation("pass", vectors * shape.numel, count),
        Operation("call", times=10 * count),
    ]


def _at_times(operations: list[Operation], every: int) -> list[Operation]:
    """The same operations, once in every `every` steps."""
    return [o._replace(times=o.times / every) for o in operations]


def _roots(inverse: Learned[Any], shape: Shape) -> int:
    return shape.outputs if inverse.fisher == "exact" else 1


def _record(inverse: Learned[Any], shape: Shape) -> float:
    """How many numbers the record of a batch has."""
    samples, roots = shape.samples, _roots(inverse, shape)
    if inverse.records == "sample":
        return float(samples * roots * shape.numel)
    seen = sum(layer.groups * layer.places * (layer.columns + roots * layer.out) for layer in shape.layers)
    return float(samples * (seen + roots * sum(shape.others)))


def _beside_layers(inverse: Learned[Any], shape: Shape) -> list[Operation]:
    """The operations of recording, in addition to the inner gradient: a pass for each root, and gradients of single
    samples.
    """
    if inverse.records == "batch":
        return []
    found = [Operation("call", times=30 + 10 * len(shape.layers))]
    for layer in shape.layers:
        if layer.places > 1:  # the patches of a convolution are laid out, and the places brought to the front
            found.append(Operation("pass", 20 * shape.samples * layer.places * layer.groups * layer.columns))
    if inverse.fisher != "empirical":
        found.append(Operation("gradient", times=_roots(inverse, shape)))
    if shape.others:
        found += [Operation("gradient", times=4), Operation("call", times=300)]
    if inverse.records == "sample":
        found.append(Operation("matmul", shape.samples * _roots(inverse, shape) * shape.numel))
    return found


def _second_moments(layer: Layer, samples: int, roots: int, double: bool = False) -> list[Operation]:
    """Sums of squared gradients of single samples."""
    multiplications = samples * layer.numel * (1 if layer.places == 1 else roots * layer.places)
    found = [Operation("matmul", multiplications, double=double)]
    if layer.places > 1:
        found.append(Operation("pass", 3 * roots * samples * layer.numel, double=double))
    return found
