"""Work that is captured on the CPU: operations on fixed memory, and those that are done in a faster form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import nhgd
from nhgd._captured import kernels
from nhgd._captured.operations import OperationCapture, Operations
from nhgd._tape import NotRepeatable


def captured(work):
    """The segment of some work, which returns tensors that stay, and those tensors."""
    capture = OperationCapture()
    capture.open()
    try:
        found = work()
        return capture.close(), found
    except BaseException:
        capture.abandon()
        raise


def called(segment):
    return [getattr(function, "__name__", "") for function, _, _ in segment._calls]


def test_a_gradient_is_repeated_on_other_numbers():
    x, w = torch.randn(6, 3).double(), torch.randn(3).double().requires_grad_()

    def work():
        with torch.enable_grad():
            loss = ((x @ w).sigmoid() ** 2).mean()
            (gradient,) = torch.autograd.grad(loss, w)
        return gradient

    segment, gradient = captured(work)
    x.copy_(torch.randn(6, 3))
    segment.replay()
    wanted = work()
    assert torch.equal(gradient, wanted)
    assert not torch.equal(gradient, torch.zeros(3))


def test_results_that_nobody_reads_and_views_are_left_out():
    x, place = torch.randn(8, 4), torch.zeros(4)

    def work():
        x.exp().sum()
        place.copy_(x.T.reshape(4, 8)[:, 0])

    segment, _ = captured(work)
    assert called(segment) == ["copy_"]
    x.normal_()
    segment.replay()
    assert torch.equal(place, x[0])


def test_memory_is_shared_by_results_that_are_not_needed_together():
    x, place = torch.randn(64), torch.zeros(64)

    def work():
        y = x
        for _ in range(6):
            y = y.sin()
        place.copy_(y)

    segment, _ = captured(work)
    outs = {kwargs["out"].data_ptr() for _, _, kwargs in segment._calls if "out" in kwargs}
    assert len(outs) == 2
    x.normal_()
    segment.replay()
    assert torch.equal(place, x.sin().sin().sin().sin().sin().sin())


def test_what_somebody_holds_keeps_its_memory():
    x = torch.randn(64)
    segment, (one, two) = captured(lambda: (x + 1, (x * 2).cos()))
    x.normal_()
    segment.replay()
    assert torch.equal(one, x + 1)
    assert torch.equal(two, (x * 2).cos())


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda: torch.ones(3).sum().item(), "reads a number"),
        (lambda: torch.ones(3).tolist(), "reads a number"),
        (lambda: torch.ones(3).nonzero(), "reads a number"),
        (lambda: torch.ones(3)[torch.tensor([True, False, True])], "a mask selects"),
        (lambda: torch.rand(3), "draws random numbers"),
        (lambda: F.dropout(torch.ones(3), 0.5), "draws random numbers"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj() + 1, "other than dense real"),
    ],
    ids=["item", "tolist", "nonzero", "mask", "rand", "dropout", "conjugate"],
)
def test_what_cannot_be_repeated_is_refused(work, why):
    with pytest.raises(NotRepeatable, match=why):
        captured(work)


def tall(dtype, rows=320, inside=7, columns=5):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, inside, generator=generator).to(dtype)
    one, two = (torch.randn(columns, inside, generator=generator).to(dtype) for _ in range(2))
    return a, one, two


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the other form is faster with MKL alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biases", [(None, None), (True, True), (True, None), (None, True)])
def test_products_of_a_tall_matrix_are_taken_together(dtype, biases):
    a, one, two = tall(dtype)
    added = [None if given is None else torch.linspace(-1, 2, 5).to(dtype) for given in biases]
    segment, found = captured(lambda: (F.linear(a, one, added[0]), F.linear(a, two, added[1])))
    assert called(segment) == ["_narrow_products"]
    a.mul_(-0.5)
    two.add_(1)
    for bias in added:
        if bias is not None:
            bias.mul_(3)
    segment.replay()
    eps = torch.finfo(dtype).eps
    for product, factor, bias in zip(found, (one, two), added, strict=True):
        wanted = a @ factor.T + (0 if bias is None else bias)
        assert torch.allclose(product, wanted, rtol=100 * eps, atol=100 * eps)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the other form is faster with MKL alone")
def test_a_tall_product_with_a_bias_is_turned():
    a, one, _ = tall(torch.float64)
    bias = torch.linspace(-1, 2, 5).double()
    segment, found = captured(lambda: F.linear(a, one, bias))
    assert called(segment) == ["_narrow_products"]
    bias.add_(1)
    segment.replay()
    assert torch.allclose(found, a @ one.T + bias, rtol=1e-12)


@pytest.mark.parametrize("scale", [{"beta": 0.5}, {"alpha": 2.0}])
def test_a_product_that_is_scaled_stays_as_it_is(scale):
    a, one, _ = tall(torch.float64)
    bias = torch.linspace(-1, 2, 5).double()
    segment, found = captured(lambda: torch.addmm(bias, a, one.T, **scale))
    assert "_narrow_products" not in called(segment)
    a.mul_(2)
    segment.replay()
    assert torch.allclose(found, torch.addmm(bias, a, one.T, **scale), rtol=1e-12)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the other form is faster with MKL alone")
def test_a_product_waits_for_a_factor_that_is_made_after_the_first():
    a, one, _ = tall(torch.float64)

    def work():
        first = F.linear(a, one)
        return first, F.linear(a, (first.T @ a).contiguous())

    segment, found = captured(work)
    assert called(segment).count("_narrow_products") == 2
    a.mul_(2)
    segment.replay()
    for product, wanted in zip(found, work(), strict=True):
        assert torch.allclose(product, wanted, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_softmax_over_few_classes_is_turned(dtype):
    x = torch.randn(300, 6).to(dtype)
    segment, found = captured(lambda: F.log_softmax(x, 1))
    assert called(segment) == ["_log_softmax"]
    x.normal_()
    segment.replay()
    eps = torch.finfo(dtype).eps
    assert torch.allclose(found, F.log_softmax(x, 1), rtol=20 * eps, atol=20 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_such_a_softmax_is_three_operations(dtype):
    x, along = torch.randn(300, 6).to(dtype), torch.randn(300, 6).to(dtype)
    segment, found = captured(lambda: torch.ops.aten._log_softmax_backward_data(along, x.log_softmax(1), 1, dtype))
    assert called(segment) == ["_log_softmax", "softmax_gradient"]
    x.normal_()
    along.normal_()
    segment.replay()
    eps = torch.finfo(dtype).eps
    wanted = along - x.softmax(1) * along.sum(1, keepdim=True)
    assert torch.allclose(found, wanted, rtol=100 * eps, atol=100 * eps)


def test_entries_of_a_vector_are_taken():
    x, index = torch.randn(50), torch.tensor([3, -1, 49, 3])
    segment, found = captured(lambda: x[index])
    assert called(segment) == ["take"]
    x.normal_()
    index.copy_(torch.tensor([-50, 0, 7, 12]))
    segment.replay()
    assert torch.equal(found, x[index])
    index[0] = 50
    with pytest.raises(IndexError):
        segment.replay()


A, B, SQUARE = torch.rand(4, 3) + 0.1, torch.rand(4, 3) + 0.1, torch.rand(3, 3)
BOUND = {
    **dict.fromkeys(("abs", "exp", "log", "neg", "reciprocal", "sqrt"), (A,)),
    **dict.fromkeys(("add", "div", "eq", "ge", "gt", "le", "lt", "maximum", "minimum", "mul", "ne", "sub"), (A, B)),
    **dict.fromkeys(("clamp", "clamp_max", "clamp_min", "pow"), (A, 0.3)),
    **dict.fromkeys(("addcdiv", "addcmul"), (A, B, B + 1)),
    **{name: (A, [1]) for name in ("amax", "amin")},
    **{name: ([A, B],) for name in ("cat", "stack")},
    "bmm": (A[None], SQUARE[None]),
    "dot": (A[0], B[0]),
    "index_select": (A, 0, torch.tensor([2, 0])),
    "lerp": (A, B, 0.3),
    "mm": (A, SQUARE),
    "mv": (A, B[0]),
    "where": (A > 0.5, A, B),
}


@pytest.mark.parametrize("name", kernels.BOUND.split())
def test_torchs_own_functions_are_called_for_operations(name):
    """Each must exist, take the same arguments and give the same bits."""
    work = getattr(torch, name)
    segment, found = captured(lambda: work(*BOUND[name]))
    assert called(segment) == [name]
    wanted = found.clone()
    found.zero_()
    segment.replay()
    assert torch.equal(found, wanted)
    assert torch.equal(found, work(*BOUND[name]))


@pytest.mark.parametrize("name", kernels.BOUND_IN_PLACE.split())
def test_changes_in_place_are_made_by_torchs_own_functions(name):
    given = {
        "copy_": (B,),
        "index_put_": ([torch.tensor([2, 0])], B[:2], True),
        "lerp_": (B, 0.3),
        "sqrt_": (),
        "zero_": (),
        **dict.fromkeys(("addcdiv_", "addcmul_"), (B, B + 1)),
        **dict.fromkeys(("clamp_", "clamp_max_", "clamp_min_"), (0.3,)),
    }.get(name, (B,))
    place, start = A.clone(), A + 0.2
    segment, _ = captured(lambda: getattr(place, name)(*given))
    assert called(segment) == [name]
    place.copy_(start)
    segment.replay()
    assert torch.equal(place, getattr(start, name)(*given))


def test_other_forms_of_arguments_keep_the_operation():
    x, index, start = torch.randn(3, 4), torch.tensor([1, 2]), torch.randn(3, 4)
    aten = torch.ops.aten

    def work():
        x[:, index] = x[:, index] * 2
        aten.add_.Scalar(x, 2.0, 3.0)

    segment, _ = captured(work)
    assert not {"index_put_", "add_"} & set(called(segment))
    x.copy_(start)
    segment.replay()
    wanted = start.clone()
    wanted[:, index] *= 2
    assert torch.equal(x, wanted + 6)


def test_questions_about_dtypes_are_not_repeated():
    x, place = torch.randn(8), torch.zeros(8).double()

    def work():
        place.copy_(x.to(torch.promote_types(x.dtype, place.dtype)).mul(2))

    segment, _ = captured(work)
    assert not any("promote" in name for name in called(segment))
    x.normal_()
    segment.replay()
    assert torch.equal(place, 2 * x.double())


def test_batches_are_gathered_where_they_are_used():
    """Not all at the start, as on a GPU: by then the first would have left the cache."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(920, 6, generator=generator), torch.randint(3, (920,), generator=generator)
    segment = captured_step(x, y)
    names = called(segment)
    gathers = [i for i, name in enumerate(names) if name == "index_select"]
    products = [i for i, name in enumerate(names) if name == "_narrow_products"]
    assert len(gathers) == 6  # samples and labels of three batches
    assert gathers[2] > products[0]
    assert gathers[4] > products[1]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the other form is faster with MKL alone")
def test_the_outer_loss_here_and_its_gradient_ahead_are_one_product():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(920, 6, generator=generator), torch.randint(3, (920,), generator=generator)
    segment = captured_step(x, y)
    outer = [args for function, args, _ in segment._calls if args and getattr(args[0], "shape", ()) == (6, 280)]
    assert len(outer) == 1  # a forward pass reads the data once
    assert len(outer[0][-1]) == 2


def captured_step(x, y):
    """The only segment of a captured outer step with a horizon."""

    def inner(model, v, batch):
        z = model(batch[0])
        return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none"), weights=v[batch[2]], outputs=z)

    torch.manual_seed(0)
    problem = nhgd.Bilevel(
        inner,
        lambda model, v, batch: F.cross_entropy(model(batch[0]), batch[1]),
        torch.nn.Linear(6, 3, bias=False),
        torch.full((640,), 0.5),
        l2=1e-2,
        likelihood="categorical",
    )
    data = nhgd.Data(x[:640], y[:640], batch=320), nhgd.Data(x[640:], y[640:])
    method = nhgd.algorithm.NHGD(nhgd.inverse.KFAC(solver="products", iterations=3))
    settings = {"inner_steps": 3, "inner_lr": 0.1, "outer_lr": 0.1, "project_v": (0, 1)}
    solver = nhgd.Solver(problem, *data, method=method, compile="graph", **settings)
    found = solver.run(steps=16, progress=False)
    assert found.stats["compile"]["repeated"] > 0, found.stats["compile"]["why"]
    script = max(solver._captured._graphs.values(), key=lambda graph: graph.since).script
    segments = [cell.cell_contents for play in script.segments for cell in play.__closure__]
    (segment,) = [found for found in segments if isinstance(found, Operations) and len(found)]
    return segment


def test_short_and_wide_work_keeps_its_form():
    x, w = torch.randn(20, 6), torch.randn(4, 6)
    segment, _ = captured(lambda: F.log_softmax(F.linear(x, w), 1))
    assert isinstance(segment, Operations)
    assert "_log_softmax" not in called(segment)
    assert not {kernels._narrow_products, kernels._log_softmax} & {function for function, _, _ in segment._calls}
