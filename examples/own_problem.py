"""A problem of your own, from a module to a solution: which of eight sensors can be believed?

    python examples/own_problem.py              ten seconds on a laptop
    python examples/own_problem.py --tiny       two

Eight sensors measure the same curve, three of them badly: one is stuck, one drifts, one is mostly noise. Nobody says which. A
network is trained on all readings, each weighted by the trust in its sensor (inner). The trust is chosen such that the network
is right at a few points that were measured by hand (outer). The script

    1. trains with equal trust, and measures the error against the true curve;
    2. asks nhgd.check which inverse gives a good hypergradient for this problem;
    3. learns the trust, and measures again.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd.task._inner_solver import gauss_newton

BAD = {1: "stuck", 4: "drifts", 6: "noise"}


class Curve(nn.Module):
    """Any module will do: this one adds a straight line to a small network."""

    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.bend = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, t):
        """The curve at times (B,)."""
        t = t[:, None]
        return (self.line(t) + self.bend(t))[:, 0]


def truth(t):
    """What the sensors should have shown."""
    return torch.sin(2 * t) + 0.3 * t


def readings(count):
    """Times, readings and the number of the sensor, each (8 count,)."""
    sensor = torch.arange(8).repeat_interleave(count)
    t = 4 * torch.rand(8 * count, dtype=torch.float64) - 2
    seen = truth(t) + 0.05 * torch.randn_like(t)
    seen[sensor == 1] = 1.5
    seen[sensor == 4] += 0.8 * t[sensor == 4] + 1
    seen[sensor == 6] += 3 * torch.randn(count, dtype=torch.float64)
    return t, seen, sensor


def inner(model, trust, batch):
    """Squared errors, weighted: sigmoid keeps a weight between 0 and 1 without a constraint."""
    t, seen, sensor, _ = batch
    found = model(t)
    return nhgd.Losses(0.5 * (found - seen).square(), weights=trust.sigmoid()[sensor], outputs=found)


def outer(model, trust, batch):
    """The error at the points measured by hand."""
    return F.mse_loss(model(batch[0]), batch[1])


def main(arguments=None):
    """Before, check, after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args(arguments).tiny
    torch.manual_seed(0)
    data = readings(20 if tiny else 60)
    by_hand = torch.linspace(-2, 2, 12, dtype=torch.float64)
    everywhere = torch.linspace(-2, 2, 200, dtype=torch.float64)
    model, trust = Curve(6 if tiny else 16).double(), torch.zeros(8, dtype=torch.float64)
    problem = nhgd.Bilevel(inner, outer, theta=model, v=trust, l2=1e-3, likelihood="gaussian")

    def error():
        with torch.no_grad():
            return float((model(everywhere) - truth(everywhere)).square().mean().sqrt())

    batches, judged = nhgd.Data(*data), nhgd.Data(by_hand, truth(by_hand))
    whole = (*data, torch.arange(len(data[0])))  # what nhgd.Data yields: its tensors, and the index of each sample
    gauss_newton(problem, whole, steps=40 if tiny else 200, floor=1e-6)
    before = error()
    print(f"error of the curve with equal trust:  {before:.3f}\n")

    print(nhgd.check(problem, whole, (by_hand, truth(by_hand)), inverses=["kfac", "refined", "cg", "identity"]))

    solver = nhgd.Solver(
        problem,
        batches,
        judged,
        method="nhgd",
        inner_steps=20,
        inner_optimizer=lambda leaves: torch.optim.Adam(leaves, lr=0.01),
        outer_optimizer=torch.optim.Adam,
        outer_lr=0.2,
    )
    solver.run(steps=40 if tiny else 120)
    print("\nsensor   trust   what is wrong with it")
    for number, value in enumerate(trust.sigmoid().tolist()):
        print(f"{number:>6}   {value:5.2f}   {BAD.get(number, '-')}")
    after = error()
    print(f"\nerror of the curve with learnt trust: {after:.3f}")
    return before, after, trust.sigmoid().tolist()


if __name__ == "__main__":
    main()
