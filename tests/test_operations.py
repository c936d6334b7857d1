"""Work that is captured on the CPU: operations on fixed memory, and those that are done in a faster form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
    assert called(segment) == ["copy_.default"]
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
def test_products_of_a_tall_matrix_are_taken_together(dtype):
    a, one, two = tall(dtype)
    segment, found = captured(lambda: (F.linear(a, one), F.linear(a, two)))
    assert called(segment) == ["_narrow_products"]
    a.mul_(-0.5)
    two.add_(1)
    segment.replay()
    eps = torch.finfo(dtype).eps
    for product, factor in zip(found, (one, two), strict=True):
        assert torch.allclose(product, a @ factor.T, rtol=100 * eps, atol=100 * eps)


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


def test_short_and_wide_work_keeps_its_form():
    x, w = torch.randn(20, 6), torch.randn(4, 6)
    segment, _ = captured(lambda: F.log_softmax(F.linear(x, w), 1))
    assert isinstance(segment, Operations)
    assert "_log_softmax" not in called(segment)
    assert not {kernels._narrow_products, kernels._log_softmax} & {function for function, _, _ in segment._calls}
