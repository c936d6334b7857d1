"""The ground truth of the tests: dense matrices, loops over samples, finite differences.

Everything here is slow, short and made with plain autograd from the functions the user wrote. Nothing of `nhgd.oracle`,
`nhgd.record` or `nhgd.variable` is used, so that a mistake there cannot hide here. theta and v are flat vectors, (D,) and
(V,), in the order of the user's tensors; None means the current ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

import nhgd


def named(given: Any) -> dict[str, Tensor]:
    """The trained tensors of a tensor, a dict or a module, by name."""
    if isinstance(given, Tensor):
        return {"": given}
    if isinstance(given, dict):
        some = any(t.requires_grad for t in given.values())
        return {k: t for k, t in given.items() if (t.requires_grad if some else t.is_floating_point())}
    return {k: p for k, p in given.named_parameters() if p.requires_grad}


def flat(given: Any) -> Tensor:
    """Their current value as one vector."""
    return torch.cat([t.detach().reshape(-1) for t in named(given).values()]).clone()


def theta_of(problem: nhgd.Bilevel) -> Tensor:
    """The current theta, (D,)."""
    return flat(problem.theta.given)


def v_of(problem: nhgd.Bilevel) -> Tensor:
    """The current v, (V,)."""
    return flat(problem.v.given)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """One vector from tensors."""
    return torch.cat([t.reshape(-1) for t in tensors])


@torch.no_grad()
def assign(given: Any, vector: Tensor) -> None:
    """Write a vector into the user's own tensors."""
    tensors = list(named(given).values())
    for tensor, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.reshape(tensor.shape))


@contextmanager
def holding(given: Any, vector: Tensor) -> Iterator[Any]:
    """What the user's functions expect, holding a vector that may be part of a graph. Buffers are clones."""
    tensors = named(given)
    parts = vector.split([t.numel() for t in tensors.values()])
    swapped = {k: part.reshape(t.shape) for (k, t), part in zip(tensors.items(), parts, strict=True)}
    if isinstance(given, Tensor):
        yield swapped[""]
    elif isinstance(given, dict):
        yield {k: swapped.get(k, t) for k, t in given.items()}
    else:
        clones = {k: b.clone() for k, b in given.named_buffers()}
        with _reparametrize_module(given, swapped | clones, tie_weights=True):
            yield given


def losses(
    problem: nhgd.Bilevel, batch: Any, theta: Tensor | None = None, v: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The losses (B,), weights (B,) and outputs (B, ...) of a batch."""
    theta = theta_of(problem) if theta is None else theta
    v = v_of(problem) if v is None else v
    with holding(problem.theta.given, theta) as theta_given, holding(problem.v.given, v) as v_given:
        found = problem.inner(theta_given, v_given, batch)
    if isinstance(found, Tensor):
        found = nhgd.Losses(found)
    elif isinstance(found, tuple):
        found = nhgd.Losses(*found)
    weights = torch.ones_like(found.values) if found.weights is None else found.weights
    return found.values, weights, found.outputs


def ridge(problem: nhgd.Bilevel, v: Tensor | None = None) -> Tensor:
    """The coefficient of theta^2 for each coordinate, (D,)."""
    tensors = named(problem.theta.given)
    if not callable(problem.l2):
        return torch.full_like(theta_of(problem), problem.l2)
    with holding(problem.v.given, v_of(problem) if v is None else v) as v_given:
        found = problem.l2(v_given)
    tree = found if isinstance(found, dict) else dict.fromkeys(tensors, found)
    return join([tree[name].expand(t.shape) for name, t in tensors.items()])


def objective(problem: nhgd.Bilevel, batch: Any, theta: Tensor | None = None, v: Tensor | None = None) -> Tensor:
    """mean_i( w_i l_i ) + sum( l2 theta^2 )."""
    theta = theta_of(problem) if theta is None else theta
    values, weights, _ = losses(problem, batch, theta, v)
    return (weights * values).mean() + (ridge(problem, v) * theta.square()).sum()


def outer(problem: nhgd.Bilevel, batch: Any, theta: Tensor | None = None, v: Tensor | None = None) -> Tensor:
    """The outer loss."""
    theta = theta_of(problem) if theta is None else theta
    v = v_of(problem) if v is None else v
    with holding(problem.theta.given, theta) as theta_given, holding(problem.v.given, v) as v_given:
        return problem.outer(theta_given, v_given, batch).reshape(())


def _second(problem: nhgd.Bilevel, batch: Any, wrt: str, theta: Tensor | None, v: Tensor | None) -> Tensor:
    """Derivatives in theta or in v of each entry of the inner gradient, row by row."""
    theta = (theta_of(problem) if theta is None else theta).detach().requires_grad_()
    v = (v_of(problem) if v is None else v).detach().requires_grad_()
    slope = torch.autograd.grad(objective(problem, batch, theta, v), theta, create_graph=True)[0]
    side = theta if wrt == "theta" else v
    if not slope.requires_grad:
        return slope.new_zeros(len(slope), len(side))
    rows = [
        torch.autograd.grad(s, side, retain_graph=True, allow_unused=True, materialize_grads=True)[0] for s in slope
    ]
    return torch.stack(rows).detach()


def gradient(problem: nhgd.Bilevel, batch: Any, theta: Tensor | None = None, v: Tensor | None = None) -> Tensor:
    """The inner gradient, ridge included, (D,)."""
    theta = (theta_of(problem) if theta is None else theta).detach().requires_grad_()
    return torch.autograd.grad(objective(problem, batch, theta, v), theta)[0]


def hessian(problem: nhgd.Bilevel, batch: Any, theta: Tensor | None = None, v: Tensor | None = None) -> Tensor:
    """The inner Hessian, ridge included, (D, D)."""
    return _second(problem, batch, "theta", theta, v)


def cross(problem: nhgd.Bilevel, batch: Any, theta: Tensor | None = None, v: Tensor | None = None) -> Tensor:
    """The cross derivative d2 / dtheta dv, (D, V)."""
    return _second(problem, batch, "v", theta, v)


def one(batch: Any, i: int) -> Any:
    """A batch of the i-th sample alone."""
    if isinstance(batch, Tensor):
        return batch[i : i + 1]
    if isinstance(batch, dict):
        return {k: one(item, i) for k, item in batch.items()}
    return type(batch)(one(item, i) for item in batch)


def every(batch: Any, stride: int) -> Any:
    """The batch of every `stride`-th sample."""
    return type(batch)(item[::stride] for item in batch)


def scores(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    """The gradient of every sample's unweighted loss, (B, D), each from a batch of that sample alone."""
    theta = theta_of(problem).requires_grad_()
    rows = []
    for i in range(len(losses(problem, batch)[0])):
        values, _, _ = losses(problem, one(batch, i), theta)
        rows.append(torch.autograd.grad(values.sum(), theta, allow_unused=True, materialize_grads=True)[0])
    return torch.stack(rows)


def rows(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    """sqrt(w_i) s_i, (B, D)."""
    return losses(problem, batch)[1].detach().sqrt()[:, None] * scores(problem, batch)


def fisher(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    """The empirical Fisher matrix mean_i( w_i s_i s_i^T ), (D, D), without the ridge."""
    found = rows(problem, batch)
    return found.T @ found / len(found)


def ridge_hessian(problem: nhgd.Bilevel) -> Tensor:
    """What the ridge adds to the Hessian: diag(2 l2), (D, D)."""
    return torch.diag(2 * ridge(problem).detach())


def damped_fisher(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    """The empirical Fisher matrix plus the ridge: what an online inverse without extra damping inverts, (D, D)."""
    return fisher(problem, batch) + ridge_hessian(problem)


def jacobians(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    """The Jacobian of every sample's outputs, flattened, in theta, (B, M, D), from batches of one sample."""
    theta = theta_of(problem).requires_grad_()
    found = []
    for i in range(len(losses(problem, batch)[0])):
        _, _, outputs = losses(problem, one(batch, i), theta)
        found.append(
            torch.stack([torch.autograd.grad(z, theta, retain_graph=True)[0] for z in outputs.reshape(-1)]),
        )
    return torch.stack(found)


def output_hessians(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    """The Hessian of every sample's loss in its outputs, (B, M, M)."""
    theta = theta_of(problem).requires_grad_()
    values, _, outputs = losses(problem, batch, theta)
    slope = torch.autograd.grad(values.sum(), outputs, create_graph=True)[0].reshape(len(values), -1)
    columns = [
        torch.autograd.grad(slope[:, m].sum(), outputs, retain_graph=True)[0].reshape(len(values), -1)
        for m in range(slope.shape[1])
    ]
    return torch.stack(columns, dim=1)


def ggn(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    """The generalised Gauss-Newton matrix mean_i( w_i J_i^T L_i J_i ), (D, D), without the ridge."""
    jacobian, inside = jacobians(problem, batch), output_hessians(problem, batch)
    weights = losses(problem, batch)[1].detach()
    return torch.einsum("b,bmd,bmn,bne->de", weights, jacobian, inside, jacobian) / len(weights)


def label_fisher(problem: nhgd.Bilevel, batch: Any, labels: Sequence[Tensor], chances: Sequence[Tensor]) -> Tensor:
    """The Fisher matrix under the model's own labels, by adding over them: (D, D), without the ridge.

    Args:
        labels: each a column (B, ...) that takes the place of batch[1].
        chances: the probability (B,) of each under the model.
    """
    weights = losses(problem, batch)[1].detach()
    total = torch.zeros(len(theta_of(problem)), len(theta_of(problem)), dtype=weights.dtype)
    for label, chance in zip(labels, chances, strict=True):
        found = scores(problem, (batch[0], label, *batch[2:]))
        total += found.T @ (found * (weights * chance)[:, None]) / len(weights)
    return total


def hypergradient(problem: nhgd.Bilevel, inner_batch: Any, outer_batch: Any, matrix: Tensor | None = None) -> Tensor:
    """grad_v f - C^T H^{-1} grad_theta f from dense matrices, (V,), with `matrix` in place of H if given."""
    theta, v = theta_of(problem).requires_grad_(), v_of(problem).requires_grad_()
    value = outer(problem, outer_batch, theta, v)
    in_theta, in_v = torch.autograd.grad(value, (theta, v), allow_unused=True, materialize_grads=True)
    matrix = hessian(problem, inner_batch) if matrix is None else matrix
    return in_v - cross(problem, inner_batch).T @ torch.linalg.solve(matrix, in_theta)


def solve_inner(problem: nhgd.Bilevel, batch: Any, v: Tensor | None = None, tol: float = 1e-12) -> Tensor:
    """theta*(v), (D,), by Newton steps from the current theta until the gradient is below `tol`."""
    theta = theta_of(problem)
    for _ in range(300):
        slope = gradient(problem, batch, theta, v)
        if float(slope.norm()) < tol:
            return theta
        curvature, basis = torch.linalg.eigh(hessian(problem, batch, theta, v))
        # Where the Hessian is not positive definite its absolute value still gives a descent direction.
        step = basis @ ((basis.T @ slope) / curvature.abs().clamp_min(1e-6))
        value, share = objective(problem, batch, theta, v), 1.0
        while objective(problem, batch, theta - share * step, v) > value + 1e-14 and share > 1e-6:
            share /= 2
        theta = theta - share * step
    raise AssertionError(f"The inner problem did not converge: gradient {float(slope.norm()):.1e}.")


def raise_deferred(problem: nhgd.Bilevel, batch: Any) -> None:
    """Move the problem's theta to theta*(v)."""
    assign(problem.theta.given, solve_inner(problem, batch))


def phi(problem: nhgd.Bilevel, inner_batch: Any, outer_batch: Any, v: Tensor | None = None) -> float:
    """The true objective Phi(v) = f(v, theta*(v)), the inner problem solved anew."""
    return float(outer(problem, outer_batch, solve_inner(problem, inner_batch, v), v))


def slope(function: Callable[[Tensor], float], at: Tensor, direction: Tensor, step: float = 1e-3) -> float:
    """The derivative along a direction by fourth-order central differences."""
    near = function(at + step * direction) - function(at - step * direction)
    far = function(at + 2 * step * direction) - function(at - 2 * step * direction)
    return (8 * near - far) / (12 * step)


def finite_differences(function: Callable[[Tensor], float], at: Tensor, step: float = 1e-3) -> Tensor:
    """The gradient by fourth-order central differences in every coordinate."""
    return torch.tensor([slope(function, at, e, step) for e in torch.eye(len(at), dtype=at.dtype)], dtype=at.dtype)


def unrolled(
    problem: nhgd.Bilevel,
    inner_batches: Sequence[Any],
    outer_batch: Any,
    v: Tensor,
    steps: int,
    lr: float,
    truncate: int | None = None,
) -> float:
    """f(v, theta_T(v)) after gradient steps from the current theta; all but the last `truncate` are made at the current v."""
    theta, now = theta_of(problem), v_of(problem)
    first = 0 if truncate is None else steps - truncate
    for t in range(steps):
        theta = theta - lr * gradient(problem, inner_batches[t % len(inner_batches)], theta, now if t < first else v)
    return float(outer(problem, outer_batch, theta, v))


def tensors_of(problem: nhgd.Bilevel) -> list[Tensor]:
    """Every tensor the user owns: theta, v, frozen parameters and buffers."""
    found: list[Tensor] = []
    for given in (problem.theta.given, problem.v.given):
        if isinstance(given, nn.Module):
            found += [*given.parameters(), *given.buffers()]
        else:
            found += given.values() if isinstance(given, dict) else [given]
    return found


@contextmanager
def undisturbed(problem: nhgd.Bilevel) -> Iterator[None]:
    """Assert that a block leaves the user's tensors, .grad, training flags and random generator as they were."""
    tensors = tensors_of(problem)
    modules = [m for g in (problem.theta.given, problem.v.given) if isinstance(g, nn.Module) for m in g.modules()]
    values = [t.detach().clone() for t in tensors]
    grads = [None if t.grad is None else t.grad.clone() for t in tensors]
    held = [[*m._parameters.items(), *m._buffers.items()] for m in modules]
    flags = [m.training for m in modules]
    state = torch.get_rng_state()
    yield
    assert all(torch.equal(t.detach(), value) for t, value in zip(tensors, values, strict=True))
    for tensor, grad in zip(tensors, grads, strict=True):
        assert (tensor.grad is None) if grad is None else torch.equal(tensor.grad, grad)
    for module, before in zip(modules, held, strict=True):
        after = [*module._parameters.items(), *module._buffers.items()]
        assert all(name == other and a is b for (name, a), (other, b) in zip(after, before, strict=True))
    assert [m.training for m in modules] == flags
    assert torch.equal(torch.get_rng_state(), state)


def patches(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """What every place of a convolution's output sees, (B, T, G, in), cut out one by one."""
    (kh, kw), (sh, sw), (dh, dw), (ph, pw) = conv.kernel_size, conv.stride, conv.dilation, conv.padding
    x = nn.functional.pad(x, (pw, pw, ph, ph))
    high, wide = dh * (kh - 1) + 1, dw * (kw - 1) + 1
    cut = [
        x[:, :, i : i + high : dh, j : j + wide : dw].reshape(len(x), conv.groups, -1)
        for i in range(0, x.shape[2] - high + 1, sh)
        for j in range(0, x.shape[3] - wide + 1, sw)
    ]
    return torch.stack(cut, dim=1)


def layers(problem: nhgd.Bilevel, batch: Any, exact: bool = False) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs (B, T, G, in), unweighted scores (K, B, T, G, out) and flat positions (G, out, in) of every layer in theta.

    A bias is the last column. Scores are derivatives in zeros that are added to the layer's output: of the sample's loss or,
    where `exact`, of its outputs along the columns of a root of the loss's Hessian in them.
    """
    tensors, start, at = named(problem.theta.given), 0, {}
    for tensor in tensors.values():
        at[id(tensor)] = torch.arange(start, start + tensor.numel())
        start += tensor.numel()
    trained = [
        m
        for m in problem.theta.given.modules()
        if isinstance(m, (nn.Linear, nn.Conv2d)) and m.weight.requires_grad and id(m.weight) in at
    ]
    calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {m: [] for m in trained}

    def probe(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        added = torch.zeros_like(output, requires_grad=True)
        calls[module].append((args[0].detach(), added))
        return output + added

    roots = _roots(problem, batch) if exact else None
    places = {m: (at[id(m.weight)], None if m.bias is None else at.get(id(m.bias))) for m in trained}
    handles = [m.register_forward_hook(probe) for m in trained]
    values, _, outputs = losses(problem, batch)
    for handle in handles:
        handle.remove()

    def score(module: nn.Module, added: Tensor) -> Tensor:
        scalars = [values] if roots is None else [(outputs * root).reshape(len(values), -1).sum(1) for root in roots]
        found = []
        for scalar in scalars:
            own = [torch.autograd.grad(s, added, retain_graph=True)[0][i] for i, s in enumerate(scalar)]
            found.append(torch.stack(own))
        g = torch.stack(found)  # (K, B, ...)
        if isinstance(module, nn.Conv2d):
            return g.flatten(3).unflatten(2, (module.groups, -1)).permute(0, 1, 4, 2, 3)
        return g.reshape(*g.shape[:2], -1, 1, g.shape[-1])

    result = []
    for module in trained:
        a = [
            patches(x, module) if isinstance(module, nn.Conv2d) else x.reshape(len(x), -1, 1, x.shape[-1])
            for x, _ in calls[module]
        ]
        inputs = torch.cat(a, dim=1)
        scores = torch.cat([score(module, added) for _, added in calls[module]], dim=2)
        weight, bias = places[module]
        positions = weight.reshape(inputs.shape[2], -1, inputs.shape[3])
        if bias is not None:
            inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=3)
            positions = torch.cat([positions, bias.reshape(*positions.shape[:2], 1)], dim=2)
        result.append((inputs, scores, positions))
    return result


def _roots(problem: nhgd.Bilevel, batch: Any) -> Tensor:
    """Columns r_ik with sum_k r_ik r_ik^T = the Hessian of the loss in the outputs of sample i, (K, B, ...)."""
    values, vectors = torch.linalg.eigh(output_hessians(problem, batch))
    shape = losses(problem, batch)[2].shape
    return (vectors * values.clamp_min(0).sqrt()[:, None, :]).permute(2, 0, 1).reshape(-1, *shape).detach()


def kronecker_factors(problem: nhgd.Bilevel, batch: Any, exact: bool = False) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For every group of every layer: sum_i w_i a a^T / T, sum_i w_i g g^T, both over B, and its flat positions (out, in)."""
    w = losses(problem, batch)[1].detach()
    return [
        (
            torch.einsum("b,bti,btj->ij", w, a[:, :, n], a[:, :, n]) / (len(w) * a.shape[1]),
            torch.einsum("b,kbto,kbtp->op", w, g[:, :, :, n], g[:, :, :, n]) / len(w),
            at[n],
        )
        for a, g, at in layers(problem, batch, exact)
        for n in range(a.shape[2])
    ]


def kfac(
    problem: nhgd.Bilevel, batches: Sequence[Any], shares: Sequence[float] = (1.0,), exact: bool = False
) -> Tensor:
    """K-FAC's matrix, (D, D), without the ridge, from factors averaged over batches with the given shares.

    Parameters outside the layers have blocks of their own, cut out of the Fisher matrix.
    """
    weight = sum(s * losses(problem, batch)[1].detach().mean() for s, batch in zip(shares, batches, strict=True))
    every = [kronecker_factors(problem, batch, exact) for batch in batches]
    found = blocks(problem, batches, shares, exact)
    for of_layer in zip(*every, strict=True):
        a = sum(s * factor[0] for s, factor in zip(shares, of_layer, strict=True))
        g = sum(s * factor[1] for s, factor in zip(shares, of_layer, strict=True)) / (weight if weight > 0 else 1.0)
        at = of_layer[0][2].reshape(-1)
        found[at[:, None], at] = torch.kron(g, a)
    return found


def ekfac(problem: nhgd.Bilevel, batch: Any, exact: bool = False) -> Tensor:
    """EKFAC's matrix, (D, D), without the ridge: in K-FAC's eigenbasis, the diagonal of the Fisher matrix."""
    whole = ggn(problem, batch) if exact else fisher(problem, batch)
    found = blocks(problem, [batch], (1.0,), exact)
    for a, g, at in kronecker_factors(problem, batch, exact):
        basis = torch.kron(torch.linalg.eigh(g)[1], torch.linalg.eigh(a)[1])
        at = at.reshape(-1)
        diagonal = (basis.T @ whole[at[:, None], at] @ basis).diagonal()
        found[at[:, None], at] = basis @ torch.diag(diagonal) @ basis.T
    return found


def blocks(problem: nhgd.Bilevel, batches: Sequence[Any], shares: Sequence[float], exact: bool = False) -> Tensor:
    """The Fisher matrix within each parameter outside the layers, zero elsewhere, (D, D)."""
    whole = sum(s * (ggn if exact else fisher)(problem, b) for s, b in zip(shares, batches, strict=True))
    found, start = torch.zeros_like(whole), 0
    for size in [t.numel() for t in named(problem.theta.given).values()]:
        place = slice(start, start := start + size)
        found[place, place] = whole[place, place]
    for _, _, positions in layers(problem, batches[0]):
        found[positions.reshape(-1)] = 0.0
    return found
