"""A learning rate and a weight decay by gradient, through a short training, beside a grid of learning rates.

    python examples/learning_rate.py              half a minute on a laptop
    python examples/learning_rate.py --tiny       two seconds

A network gets 40 gradient steps on 300 digits, and no more: how long should they be? Most methods of this library take theta for
the inner optimum, which depends on no step size. Those that differentiate through the steps (itd, truncated) can learn one:
inner_lr=nhgd.schedule.Learnt(function of v). Each training begins at the same first theta (warm_start=False), as the training
that will use the step size does. The ridge, which is a weight decay of 2 l2, is learnt beside it: l2 may be a function of v.

The script begins with a learning rate that is 30 times too short, learns both on validation digits, and trains once more for each
learning rate of a grid. Test digits are used for the table alone.
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd.data.bundled import digits

START = 0.02


def splits():
    """Training, validation and test digits, standardised by the mean and deviation of the first."""
    x, y = digits()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    x = (x - x[:300].mean()) / x[:300].std()
    return [(x[a:b], y[a:b]) for a, b in itertools.pairwise([0, 300, 800, len(y)])]


def network(hidden):
    """A new network; the same first weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))


def inner(model, v, batch):
    """What the network is trained on; Bilevel adds the ridge."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def outer(model, v, batch):
    """What the step size and the ridge are chosen by."""
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(lr, l2, size, train, others):
    """A network trained with a step size and a ridge, by hand: its loss and its accuracy on other data."""
    hidden, steps = size
    model = network(hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=2 * l2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(train[0]), train[1]).backward()
        optimizer.step()
    with torch.no_grad():
        scores = [(model(x), y) for x, y in others]
        return [(float(F.cross_entropy(z, y)), float((z.argmax(1) == y).double().mean())) for z, y in scores]


def learn(size, outer_steps, train, validation):
    """Logarithms of the step size and of the ridge, from gradients through the whole training."""
    hidden, steps = size
    v = {"log_lr": torch.tensor(START).log(), "log_l2": torch.tensor(1e-4).log()}
    problem = nhgd.Bilevel(inner, outer, network(hidden), v, l2=lambda v: v["log_l2"].exp())
    solver = nhgd.Solver(
        problem,
        nhgd.Data(*train),
        nhgd.Data(*validation),
        method=nhgd.algorithm.ITD(warm_start=False),
        inner_steps=steps,
        inner_lr=nhgd.schedule.Learnt(lambda v: v["log_lr"].exp()),
        outer_optimizer=torch.optim.Adam,
        outer_lr=nhgd.schedule.Decay(0.2, final=0.0),
    )
    history = solver.run(steps=outer_steps).history
    for row in history[:: max(1, outer_steps // 5)]:
        print(f"   outer step {row['step']:>3}: learning rate {row['inner_lr']:.3f}, loss {row['outer_loss']:.3f}")
    return float(v["log_lr"].exp()), float(v["log_l2"].exp())


def main(arguments=None):
    """Learn, search, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args(arguments).tiny
    size, outer_steps = ((8, 10), 50) if tiny else ((32, 40), 60)  # size: hidden units, training steps
    train, validation, test = splits()
    lr, l2 = learn(size, outer_steps, train, validation)
    print(f"\n{'learning rate':>15}{'l2':>10}{'validation loss':>18}{'test loss':>12}{'test accuracy':>16}")
    tried = [(rate, 1e-4, "") for rate in (START, 0.06, 0.2, 0.6, 2.0, 6.0)]
    for rate, ridge, mark in [*tried, (lr, l2, "  learnt")]:
        (chosen, _), (loss, accuracy) = trained(rate, ridge, size, train, [validation, test])
        print(f"{rate:>15.3f}{ridge:>10.1e}{chosen:>18.3f}{loss:>12.3f}{accuracy:>16.3f}{mark}")


if __name__ == "__main__":
    main()
