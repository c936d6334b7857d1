"""BatchNorm in training mode: statistics of the batch objective, against networks written out by hand."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.algorithm import NHGD
from nhgd.execution.distributed.wire import Layout
from nhgd.inverse import EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow
from nhgd.inverse._learned.learning import learn
from nhgd.objective import Objective, OracleCalls
from nhgd.record import LayerStatistics, joined
from tests import oracles
from tests.catalogue import Made, cross_entropy, mean_cross_entropy, normal, of_classifier

LEARNED = ["kfac", "ekfac", "fisher_diagonal"]


def mlp(samples: int = 10) -> Made:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    return of_classifier(net, samples=samples)


def cnn(samples: int = 10) -> Made:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 3))
    return of_classifier(net, features=9, shape=(1, 3, 3), samples=samples)


def varied(problem: nhgd.Bilevel) -> None:
    """Weights and biases of BatchNorm that are not one and zero."""
    with torch.no_grad():
        for module in problem.theta.given.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                module.weight.copy_(1 + 0.3 * normal(module.num_features))
                module.bias.copy_(0.3 * normal(module.num_features))


class ByHand(NamedTuple):
    """Inputs (B, T, in + 1) and scores (K, B, T, out) of the two layers; rows of BatchNorm's weight and bias, (K B, C)."""

    inputs: dict[str, Tensor]
    scores: dict[str, Tensor]
    weight: Tensor
    bias: Tensor


def by_hand(problem: nhgd.Bilevel, batch: Any, seeds: Tensor | None = None, weighted: bool = True) -> ByHand:
    """The network written out: the batch's mean and variance are functions of its samples, and scores go through them."""
    x, y, i = batch
    net, v = problem.theta.given, problem.v.given
    p = {name: t.detach() for name, t in net.named_parameters()}
    conv = x.ndim == 4
    a0 = F.unfold(x, 2).transpose(1, 2) if conv else x[:, None]  # (B, T, in)
    z = (a0 @ p["0.weight"].reshape(len(p["0.bias"]), -1).T + p["0.bias"]).requires_grad_()  # (B, T, C)
    mean = z.mean((0, 1))
    n = (z - mean) / ((z - mean).square().mean((0, 1)) + net[1].eps).sqrt()
    out = (n.detach() * p["1.weight"] + p["1.bias"]).requires_grad_()
    through = n * p["1.weight"] + p["1.bias"]
    name = "4" if conv else "3"

    def head(h: Tensor) -> tuple[Tensor, Tensor]:
        a1 = h.relu().transpose(1, 2).flatten(1) if conv else h[:, 0].tanh()
        return a1, a1 @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    root = v[i].sigmoid().sqrt() if weighted else torch.ones(len(x), dtype=x.dtype)
    scores: list[tuple[Tensor, ...]] = []
    for k in range(1 if seeds is None else len(seeds)):
        a1, logits = head(out)
        logits_leaf = logits.detach().requires_grad_()
        if seeds is None:
            total = (root * F.cross_entropy(logits_leaf, y, reduction="none")).sum()
        else:
            total = (root[:, None] * logits_leaf * seeds[k]).sum()
        g_logits = torch.autograd.grad(total, logits_leaf)[0]
        g_out = torch.autograd.grad(logits, out, g_logits)[0]
        scores.append((torch.autograd.grad(through, z, g_out, retain_graph=True)[0], g_out, g_logits[:, None]))
    first, norm, last = (torch.stack(s) for s in zip(*scores, strict=True))
    one = torch.ones_like
    return ByHand(
        {
            "0.weight": torch.cat([a0, one(a0[..., :1])], 2),
            f"{name}.weight": torch.cat([a1, one(a1[:, :1])], 1)[:, None].detach(),
        },
        {"0.weight": first, f"{name}.weight": last},
        (norm * n.detach()).sum(2).flatten(0, 1),
        norm.sum(2).flatten(0, 1),
    )


def recorded(problem: nhgd.Bilevel, batch: Any, fisher: Any = "empirical", **rest: Any) -> LayerStatistics:
    record = Recorder(problem, "layer", fisher, couples=False, **rest).step(batch).record
    assert isinstance(record, LayerStatistics)
    return record


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [mlp, cnn])
def test_inputs_and_scores_are_those_of_the_batch_objective(make: Any) -> None:
    problem, batch, _ = make()
    varied(problem)
    hand, record = by_hand(problem, batch), recorded(problem, batch)
    assert record.batch_objective
    assert [layer.weight for layer in record.layers] == list(hand.inputs)
    for layer in record.layers:
        close(layer.inputs[:, :, 0], hand.inputs[layer.weight])
        close(layer.scores[..., 0, :], hand.scores[layer.weight])
    assert record.other_names == ("1.weight", "1.bias")
    close(record.other_rows, torch.cat([hand.weight, hand.bias], 1))


@pytest.mark.parametrize("make", [mlp, cnn])
def test_the_factors_are_those_by_hand(make: Any) -> None:
    problem, batch, _ = make()
    varied(problem)
    hand, samples = by_hand(problem, batch), len(batch[0])
    weights = problem.v.given[batch[2]].sigmoid()
    state = learn(KFAC(), problem, [batch])
    moments = learn(EKFAC(), problem, [batch])
    diagonal, places = learn(FisherDiagonal(), problem, [batch]).diagonal, problem.theta.slices()
    for name, a in hand.inputs.items():
        g = hand.scores[name][0]
        wanted_a = torch.einsum("b,bti,btj->ij", weights, a, a) / (samples * a.shape[1])
        wanted_g = torch.einsum("bto,btp->op", g, g) / weights.sum()
        found_a, found_g = state.factors(name)
        close(found_a[0], wanted_a)
        close(found_g[0], wanted_g)
        rows = torch.einsum("bto,bti->boi", g, a)
        basis = moments.bases[name]
        turned = torch.einsum("po,boi,ij->bpj", basis["score_vectors"][0].T, rows, basis["input_vectors"][0])
        close(moments.moments[name][0], turned.square().mean(0))
        squares = rows.square().mean(0)
        close(diagonal[places[name]], squares[:, :-1].reshape(-1))
        close(diagonal[places[name.replace("weight", "bias")]], squares[:, -1])
    for name, rows in (("1.weight", hand.weight), ("1.bias", hand.bias)):
        for learnt in (state, moments):
            close(learnt.blocks[name], rows.T @ rows / samples)
        close(diagonal[places[name]], rows.square().mean(0))


@pytest.mark.parametrize("make", [mlp, cnn])
def test_roots_of_the_exact_fisher_matrix_are_pulled_back_through_the_batch(make: Any) -> None:
    problem, batch, _ = make()
    varied(problem)
    record = recorded(problem, batch, "exact")
    with problem.guarded():
        outputs = problem.losses(batch).outputs
        seeds = problem.likelihood.roots(outputs, outputs[:, 0]).detach()
    # The signs of the roots are random, and seen where BatchNorm has not touched them.
    signs = (record.layers[-1].scores[:, :, 0, 0] * seeds).sum(2).sign()
    assert 0.2 < float((signs > 0).double().mean()) < 0.8
    hand = by_hand(problem, batch, seeds * signs[..., None])
    for layer in record.layers:
        close(layer.scores[..., 0, :], hand.scores[layer.weight])
    close(record.other_rows, torch.cat([hand.weight, hand.bias], 1))


@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("fisher", ["empirical", "exact", "sampled"])
def test_the_curvature_in_front_of_batchnorm_is_that_of_each_loss_in_its_batch(make: Any, fisher: Any) -> None:
    """Up to the samples' influence on each other, which is small in a batch of 200. Seeds are fixed."""
    problem, batch, _ = make(200)
    varied(problem)
    net, outputs = problem.theta.given, []
    hook = net[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    losses = problem.inner(net, problem.v.given, batch)
    hook.remove()
    roots = losses.weights.detach().sqrt()
    if fisher == "empirical":
        sources = list(roots * losses.values)
    else:
        seeds = problem.likelihood.roots(losses.outputs, losses.values).detach()
        sources = [source for seed in seeds for source in roots * (losses.outputs * seed).sum(1)]
    scores = torch.cat([torch.autograd.grad(s, outputs[0], retain_graph=True)[0] for s in sources])
    scores = scores.movedim(1, -1).reshape(-1, scores.shape[1])
    wanted = scores.T @ scores
    found = recorded(problem, batch, fisher).layers[0].scores[..., 0, :].flatten(0, 2)
    apart = {"empirical": 0.25, "exact": 0.02, "sampled": 0.25}[fisher]
    assert float((found.T @ found - wanted).norm() / wanted.norm()) < apart


def test_without_weights_the_rows_add_up_to_the_gradient() -> None:
    problem, batch, _ = cnn()
    varied(problem)
    plain = problem.inner
    problem.inner = lambda *args: plain(*args).values
    calls = OracleCalls()
    record = recorded(problem, batch, calls=calls)
    assert calls.gradients == 1  # no pass beside the gradient's own
    rows = {layer.weight: layer.rows() for layer in record.layers}
    found = torch.cat([*rows["0.weight"], record.other_rows, *rows["4.weight"]], 1).mean(0)
    close(found, oracles.gradient(problem, batch) - 2 * 0.02 * oracles.theta_of(problem))


@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("kind", [KFAC(), EKFAC(), FisherDiagonal(), KFAC(fisher="sampled")], ids=repr)
def test_the_inner_step_is_the_plain_one(make: Any, kind: Any) -> None:
    """Bit for bit, and running statistics follow once."""
    steps = []
    for tap in (True, False):
        problem, batch, _ = make()
        recorder = Recorder(problem, kind.records, kind.fisher, couples=kind.couples)
        objective = Objective(problem, batch)
        for _ in range(3):
            step = objective.step(recorder) if tap else objective.step()
        net = problem.theta.given
        assert int(net[1].num_batches_tracked) == 3
        steps.append([*step.gradient, step.value, net[1].running_mean, net[1].running_var])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


def test_a_sample_of_weight_zero_adds_what_others_feel_of_it() -> None:
    problem, batch, _ = mlp()
    problem.v.given[0] = -1e4
    hand, record = by_hand(problem, batch), recorded(problem, batch)
    close(record.layers[0].scores[0, :, :, 0], hand.scores["0.weight"][0])
    assert record.layers[0].scores[0, 0].any()
    assert not record.layers[1].scores[0, 0].any()
    assert torch.isfinite(record.other_rows).all()


class Scaled(nn.Module):
    """BatchNorm, and parameters that neither a layer nor BatchNorm accounts for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.layer_norm, self.b = (
            nn.Linear(3, 4),
            nn.BatchNorm1d(4),
            nn.LayerNorm(4),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.layer_norm(self.norm(self.a(x)).tanh()))


class Folded(nn.Module):
    """BatchNorm over the tokens of all samples, as one long batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x[..., None])  # (B, T, 4)
        return self.b(self.norm(z.flatten(0, 1)).view_as(z).tanh()).mean(1)


class Shifted(nn.BatchNorm1d):
    """Computes something of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize(
    ("net", "names"),
    [
        (Scaled, ("layer_norm.weight", "layer_norm.bias")),
        (Folded, ("norm.weight", "norm.bias")),
        (lambda: nn.Sequential(nn.Linear(3, 4), Shifted(4), nn.Linear(4, 3)), ("1.weight", "1.bias")),
    ],
)
def test_rows_of_other_parameters_are_of_each_loss_in_its_batch(net: Any, names: Any, fisher: Any) -> None:
    torch.manual_seed(1)
    problem, batch, _ = of_classifier(net())
    record = recorded(problem, batch, fisher)
    losses = problem.inner(problem.theta.given, problem.v.given, batch)
    roots = losses.weights.detach().sqrt()
    leaves = [dict(problem.theta.given.named_parameters())[name] for name in names]
    if fisher == "empirical":
        sources = [root * value for root, value in zip(roots, losses.values, strict=True)]
    else:
        seeds = problem.likelihood.roots(losses.outputs, losses.values).detach()
        sources = [roots[i] * (losses.outputs[i] * seed[i]).sum() for seed in seeds for i in range(len(roots))]
    wanted = torch.stack([oracles.join(torch.autograd.grad(s, leaves, retain_graph=True)) for s in sources])
    sizes = [problem.theta.slices()[name] for name in record.other_names]
    split = record.other_rows.split([s.stop - s.start for s in sizes], 1)
    found = dict(zip(record.other_names, split, strict=True))
    close(torch.cat([found[name] for name in names], 1), wanted)


def test_modules_that_are_called_twice_or_hold_no_parameters() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bare, self.a, self.norm = nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.a(self.norm(self.a(self.bare(x))).tanh()))

    torch.manual_seed(1)
    problem, batch, _ = of_classifier(Twice())
    plain = problem.inner
    problem.inner = lambda *args: plain(*args).values
    calls = OracleCalls()
    record = recorded(problem, batch, calls=calls)
    assert calls.gradients == 1
    assert record.other_names == ("norm.weight", "norm.bias")
    rows = torch.cat([*record.layers[0].rows(), record.other_rows], 1).mean(0)
    close(rows, oracles.gradient(problem, batch) - 2 * 0.02 * oracles.theta_of(problem))


def test_without_running_statistics_the_batch_counts_in_every_mode() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh(), nn.Linear(4, 3))
    problem, batch, _ = of_classifier(net.eval())
    record = recorded(problem, batch)
    assert record.batch_objective
    close(record.layers[0].scores[0, :, :, 0], by_hand(problem, batch).scores["0.weight"][0])
    assert not net[1].training
    assert net[1].running_mean is None


def test_a_module_behind_functional_call() -> None:
    torch.manual_seed(1)
    problem, batch, _ = mlp()
    net = problem.theta.given

    def inner(theta: Any, v: Any, batch: Any) -> Any:
        return cross_entropy(lambda x: torch.func.functional_call(net, theta, (x,)), v, batch)

    tensors = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    other = nhgd.Bilevel(inner, mean_cross_entropy, tensors, problem.v.given, 0.02)
    a, b = recorded(problem, batch), recorded(other, batch)
    assert a.batch_objective
    assert b.batch_objective
    assert torch.equal(a.other_rows, b.other_rows)
    assert all(torch.equal(p.scores, q.scores) for p, q in zip(a.layers, b.layers, strict=True))
    with pytest.raises(nhgd.InputError, match="depends on another sample"):
        Recorder(other, "layer").step(batch)


def test_in_eval_mode_nothing_is_coupled() -> None:
    problem, batch, _ = cnn()
    varied(problem)
    problem.theta.given.eval()
    record = recorded(problem, batch)
    assert not record.batch_objective
    by_layer = {layer.weight: layer.rows() for layer in record.layers}
    rows = torch.cat([*by_layer["0.weight"], record.other_rows, *by_layer["4.weight"]], 1)
    weights = problem.v.given[batch[2]].sigmoid()
    close(rows, weights.sqrt()[:, None] * oracles.scores(problem, batch))
    stats = nhgd.hypergradient(problem, batch, batch[:2], "kfac").stats
    assert "statistics" not in stats.notes


# Refusals.


@pytest.mark.parametrize(
    "inverse", [FisherWindow(), FisherWindow(records="sample"), FisherDense(), FisherDense(fisher="exact")], ids=repr
)
def test_what_needs_per_sample_gradients_refuses_with_the_remedy(inverse: Any) -> None:
    problem, batch, outer = mlp()
    with pytest.raises(nhgd.InputError, match=r"BatchNorm in training mode \('1'\).*kfac.*model.eval\(\).*GroupNorm"):
        nhgd.hypergradient(problem, batch, outer, inverse)


@pytest.mark.parametrize("inverse", LEARNED)
@pytest.mark.parametrize(
    "mix", [lambda z: z - z.mean(0), lambda z: z.cumsum(0), lambda z: F.batch_norm(z, None, None, training=True)]
)
@pytest.mark.parametrize("behind", [True, False])
def test_samples_that_are_coupled_otherwise_are_refused(inverse: Any, mix: Any, behind: bool) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            z = self.a(x)
            return self.b(mix(self.norm(z).tanh()) if behind else self.norm(mix(z)).tanh())

    torch.manual_seed(1)
    problem, batch, outer = of_classifier(Mixing())
    with pytest.raises(nhgd.InputError, match=r"'a\.weight' the loss of one sample depends on another sample"):
        nhgd.hypergradient(problem, batch, outer, inverse)
    net = problem.theta.given
    assert net.norm.training
    assert net.norm.num_batches_tracked == 0


def test_a_loss_observed_in_its_graph_alone_is_looked_at_behind_batchnorm() -> None:
    problem, batch, _ = mlp()
    net = problem.theta.given
    x, y, _ = batch
    with nhgd.observing(problem, "kfac") as curvature:
        with pytest.raises(nhgd.InputError, match=r"'3\.weight' the loss of one sample depends on another sample"):
            curvature.observe(F.cross_entropy(net(x).cumsum(0), y, reduction="none"))
        curvature.observe(F.cross_entropy(net(x), y, reduction="none")).backward()
        assert curvature.steps == 1


# In use.


@pytest.mark.parametrize("way", ["inner", "observe", "bare"])
@pytest.mark.parametrize("inverse", LEARNED)
def test_a_loop_of_the_users_own_learns_the_same(way: str, inverse: str) -> None:
    made, batch, outer = cnn()
    varied(made)
    net = made.theta.given

    def unweighted(net: Any, v: Any, batch: Any) -> Tensor:
        return cross_entropy(net, v, batch).values

    problem = nhgd.Bilevel(unweighted, made.outer, net, made.v.given, lambda v: v.exp().mean())
    with nhgd.observing(problem, inverse) as curvature:
        if way == "inner":
            curvature.inner(batch).backward()
        elif way == "observe":
            curvature.observe(F.cross_entropy(net(batch[0]), batch[1], reduction="none")).backward()
        else:
            F.cross_entropy(net(batch[0]), batch[1]).backward()
        assert int(net[1].num_batches_tracked) == 1
        found = curvature.hypergradient(outer, batch)
    wanted = nhgd.hypergradient(problem, batch, outer, inverse)
    assert found.stats.notes["statistics"] == "of the batch objective"
    torch.testing.assert_close(found.adjoint, wanted.adjoint, rtol=1e-10, atol=1e-12)
    # A window does not learn from it, also where all of theta belongs to layers.
    net[1].requires_grad_(False)
    frozen = nhgd.Bilevel(unweighted, made.outer, net, made.v.given, lambda v: v.exp().mean())
    with nhgd.observing(frozen, "fisher_window") as curvature:
        F.cross_entropy(net(batch[0]), batch[1]).backward()
        with pytest.raises(nhgd.InputError, match="BatchNorm in training mode"):
            curvature.hypergradient(outer, batch)


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("make", [mlp, cnn])
def test_check_tells_how_near_each_inverse_comes(make: Any) -> None:
    problem, batch, outer = make(60)
    optimiser = torch.optim.LBFGS(problem.theta.leaves, 1.0, 2000, tolerance_grad=1e-10, tolerance_change=0)

    def closure() -> Any:
        optimiser.zero_grad()
        with problem.guarded():
            loss = problem.objective(batch)
            loss.backward()
        return loss

    optimiser.step(closure)
    before = copy.deepcopy(problem.theta.given.state_dict())
    report = nhgd.check(problem, batch, outer, [*LEARNED, "fisher_window", "identity"])
    rows = {row["inverse"]: row for row in report.rows}
    hessian = oracles.hessian(problem, batch)  # of the batch objective
    exact = oracles.hypergradient(problem, batch, outer)
    assert report.reference["positive_definite"] == bool((torch.linalg.eigvalsh(hessian) > 0).all())
    for name in LEARNED:
        found = nhgd.hypergradient(problem, batch, outer, name)
        cosine = float(torch.cosine_similarity(oracles.join(found.leaves), exact, dim=0))
        assert rows[name]["cosine"] == pytest.approx(cosine, abs=1e-6)
        assert rows[name]["notes"]["statistics"] == "of the batch objective"
    assert rows["kfac"]["cosine"] > 0.5
    assert "BatchNorm in training mode" in rows["fisher_window"]["error"]
    assert "statistics of kfac, ekfac, fisher_diagonal are of the batch objective" in str(report)
    after = problem.theta.given.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


class Weighted(NamedTuple):
    """Class weights for a network with BatchNorm, on images of which one class has too many wrong labels."""

    problem: nhgd.Bilevel
    inner: nhgd.Data
    outer: nhgd.Data


def weighted(dropout: float = 0.0) -> Weighted:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(96) % 3
    x = torch.randn(96, 1, 4, 4, generator=generator) + y[:, None, None, None].float().cos() * 2
    noisy = torch.where((y == 0) & (torch.rand(96, generator=generator) < 0.6), 1, y)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(16, 3),
    )

    def inner(net: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, _ = batch
        z = net(x)
        return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), v.sigmoid()[y], z)

    def outer(net: Any, v: Any, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    problem = nhgd.Bilevel(inner, outer, net, torch.zeros(3), l2=1e-3, likelihood="categorical")
    return Weighted(problem, nhgd.Data(x, noisy, batch=32), nhgd.Data(x[:48], y[:48], batch=48))


def started(made: Weighted, **settings: Any) -> nhgd.Solver:
    settings = {"inner_steps": 5, "inner_lr": 0.1, "outer_lr": 0.3, "seed": 3} | settings
    return nhgd.Solver(made.problem, made.inner, made.outer, **settings)


def standing(solution: nhgd.Solution) -> list[Tensor]:
    return [solution.v, *solution.theta.state_dict().values()]


def test_the_default_method_trains_class_weights() -> None:
    made = weighted()
    solution = started(made).run(steps=40)
    assert solution.stats["inverse"].startswith("KFAC(")
    assert solution.stats["statistics"] == "of the batch objective"
    # The class that took the others' samples in weighs least.
    assert int(solution.v.argmin()) == 1
    first, last = (sum(r["outer_loss"] for r in rows) / 5 for rows in (solution.history[:5], solution.history[-5:]))
    assert last < first
    made.problem.theta.given.eval()
    assert started(made).run(steps=1).stats["statistics"] is None
    assert started(made, method="aid-identity").run(steps=1).stats["statistics"] is None


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("method", ["nhgd", "nhgd-refined", nhgd.algorithm.NHGD(EKFAC(fisher="sampled"))], ids=str)
def test_a_run_goes_on_bit_for_bit(method: Any, tmp_path: Any) -> None:
    whole = started(weighted(0.2), method=method).run(steps=5)
    started(weighted(0.2), method=method, checkpoint=tmp_path / "a").run(steps=3)
    made = weighted(0.2)
    resumed = nhgd.Solver.resume(tmp_path / "a", made.problem, made.inner, made.outer)
    assert resumed.solution().stats["statistics"] == "of the batch objective"
    found = resumed.run(steps=5)
    assert all(torch.equal(a, b) for a, b in zip(standing(whole), standing(found), strict=True))


def test_running_statistics_follow_the_plain_loop() -> None:
    made, plain = weighted(), weighted()
    started(made, outer_lr=1e-30, method=NHGD(cross="final")).run(steps=4)  # as many batches as the other draws
    started(plain, outer_lr=1e-30, method="aid-identity").run(steps=4)
    a, b = (m.problem.theta.given.state_dict() for m in (made, plain))
    assert int(a["1.num_batches_tracked"]) == 20
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_another_thread_learns_the_same() -> None:
    inline = started(weighted()).run(steps=4)
    threaded = started(weighted(), execution="thread", max_lag=0).run(steps=4)
    assert all(torch.equal(a, b) for a, b in zip(standing(inline), standing(threaded), strict=True))


def test_a_record_keeps_the_word_on_its_way() -> None:
    problem, batch, _ = mlp()
    record = recorded(problem, batch)
    layout, tensors = Layout.of(record)
    sent = Layout.from_text(layout.to_text()).record(tensors)
    assert isinstance(sent, LayerStatistics)
    assert sent.batch_objective
    assert joined([sent, sent]).batch_objective


def test_a_plan_knows_the_places_of_its_convolutions() -> None:
    problem, batch, _ = cnn()
    in_training = nhgd.plan(problem, batch, inverses=["kfac"]).rows[0]["bytes"]
    problem.theta.given.eval()
    assert in_training == nhgd.plan(problem, batch, inverses=["kfac"]).rows[0]["bytes"]
