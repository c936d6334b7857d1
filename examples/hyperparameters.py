"""The ridges of a network by gradient, compared with a grid search.

    python examples/hyperparameters.py              a minute on a laptop
    python examples/hyperparameters.py --tiny       seconds

A network with one hidden layer learns scikit-learn's 8 x 8 digits from 200 examples, so it matters how strongly its weights are
penalised. A grid search tries pairs of ridges, one for each layer, and trains a network for every pair. The hypergradient of
the validation loss moves the ridges while a single network is trained: first 4 of them, one for each weight and bias, then
67, with one for each pixel in place of one for the first layer, which no grid could search. All use the same training and
validation data. The test data are used once, at the end, with networks trained from scratch.

Look at the last columns: four ridges do about as well as the grid's, for one network in place of 36, and 67 do worse on test
digits. Hyperparameters that are learnt can be overfitted, to the 300 validation digits and to the one network that was trained
meanwhile. Learn few of them, or choose them by much data, and keep test data aside to notice.
"""

import argparse
import itertools
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd.data.bundled import digits
from nhgd.task._inner_solver import adam

LOW, HIGH = math.log(1e-6), math.log(1e-1)  # the logarithms of the weakest and the strongest ridge


def splits(train, validation):
    """Training, validation and test digits, standardised by the mean and deviation of the first."""
    x, y = digits()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order].double(), y[order]
    x = (x - x[:train].mean()) / x[:train].std()
    cuts = [0, train, train + validation, len(y)]
    return [(x[a:b], y[a:b]) for a, b in itertools.pairwise(cuts)]


def network(hidden):
    """A new network; the same first weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10)).double()


def ridge(v):
    """From logarithms to one ridge for each parameter: l2 may be any tree that can be broadcast to theta."""
    return {"0.weight": v[:-3].exp(), "0.bias": v[-3].exp(), "2.weight": v[-2].exp(), "2.bias": v[-1].exp()}


def inner(model, v, batch):
    """What the network is trained on; Bilevel adds the ridge."""
    z = model(batch[0])
    return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none"), outputs=z)


def outer(model, v, batch):
    """What the ridges are chosen by."""
    return F.cross_entropy(model(batch[0]), batch[1])


def from_scratch(v, size, train, other):
    """A network trained to the end with ridges exp(v): its loss and its accuracy on other data."""
    hidden, training = size
    model = network(hidden)
    adam(nhgd.Bilevel(inner, outer, model, v, l2=ridge), train, steps=training, lr=0.01)
    with torch.no_grad():
        z = model(other[0])
        return float(F.cross_entropy(z, other[1])), float((z.argmax(1) == other[1]).double().mean())


def search(points, size, train, validation):
    """The best of all pairs of ridges, one for each layer."""
    found = {}
    for first, second in itertools.product(torch.linspace(LOW, HIGH, points).tolist(), repeat=2):
        v = torch.tensor([first, first, second, second], dtype=torch.float64)
        found[from_scratch(v, size, train, validation)[0]] = v
    return found[min(found)]


def learn(ridges, steps, size, train, validation):
    """All ridges at once, by the hypergradient, from the middle of the range."""
    hidden, training = size
    v = torch.full((ridges,), 0.5 * (LOW + HIGH), dtype=torch.float64)
    problem = nhgd.Bilevel(inner, outer, network(hidden), v, l2=ridge, likelihood="categorical")
    adam(problem, train, steps=training, lr=0.01)  # the formula holds where the network is trained, so begin there
    # K-FAC knows the ridge of each pixel, and nothing of what the layers have to do with each other: a few products bring that in.
    curvature = nhgd.inverse.Refined(nhgd.inverse.KFAC(), steps=5, matrix="ggn")
    nhgd.Solver(
        problem,
        nhgd.Data(*train),
        nhgd.Data(*validation),
        method=nhgd.algorithm.NHGD(curvature),
        inner_optimizer=lambda leaves: torch.optim.Adam(leaves, lr=0.01),
        inner_steps=20,
        outer_optimizer=torch.optim.Adam,
        outer_lr=nhgd.schedule.Decay(0.3, final=0.1),
        project_v=(LOW, HIGH),
    ).run(steps=steps)
    return v


def main(arguments=None):
    """Search, learn, learn more, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args(arguments).tiny
    size, points, steps = ((8, 150), 2, 15) if tiny else ((24, 500), 6, 150)  # size: hidden units, training steps
    train, validation, test = splits(200, 300)
    print(f"{'':<26}{'networks':>9}{'seconds':>9}{'validation loss':>17}{'test loss':>11}{'test accuracy':>15}")
    rows = []
    for words, fits, choose in (
        ("grid search, 2 ridges", points**2, lambda: search(points, size, train, validation)),
        ("hypergradient, 4 ridges", 1, lambda: learn(4, steps, size, train, validation)),
        ("hypergradient, 67 ridges", 1, lambda: learn(67, steps, size, train, validation)),
    ):
        began = time.perf_counter()
        v = choose()
        seconds = time.perf_counter() - began
        loss = from_scratch(v, size, train, validation)[0]
        rows.append((loss, *from_scratch(v, size, train, test)))
        print(f"{words:<26}{fits:>9}{seconds:>9.1f}{loss:>17.3f}{rows[-1][1]:>11.3f}{rows[-1][2]:>15.3f}")
    print("\nhow strongly each of the 64 pixels is penalised, from . (hardly) to # (as far as allowed):\n")
    for line in v[:64].reshape(8, 8).tolist():
        print("   " + " ".join(".-+*#"[min(4, int(5 * (value - LOW) / (HIGH - LOW)))] for value in line))
    return rows


if __name__ == "__main__":
    main()
