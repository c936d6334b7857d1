"""python examples/resnet_cleaning.py [--tiny] [--data DIR] [--device cuda]      wrong labels, by a ResNet with BatchNorm

Without --data: the 8 x 8 digits that come with scikit-learn. With --data: Fashion-MNIST from IDX files (DIR/fashion-mnist), as many
images as --samples says. Three labels of ten are wrong.

1. Three times a small ResNet is trained on two thirds of the images, each with a learnt weight, chosen such that the network is
   right on a few trusted images (method nhgd; its curvature is learnt from the training steps, through BatchNorm in training
   mode). It then says how probable each class is for the images of the other third, which it has not seen.
2. nhgd.LabelCleaner finds the wrong labels from these probabilities. That works on top of any nn.Module, or anything else.
3. The network is trained on all labels, and on those that are left. Which does better on test images?
"""

import argparse
import copy
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd.data.bundled import digits
from nhgd.data.idx import find, read_images

WRONG, FOLDS, RIDGE = 0.3, 3, 5e-4
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Residual(nn.Module):
    """Two convolutions around which the input goes too."""

    def __init__(self, channels, out, stride):
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.around = nn.Identity() if (channels, stride) == (out, 1) else nn.Conv2d(channels, out, 1, stride)

    def forward(self, x):
        """(B, channels, H, W) -> (B, out, H / stride, W / stride)."""
        inside = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(inside + self.around(x))


class ResNet(nn.Module):
    """Images (B, 1, H, W) -> class scores (B, 10)."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x):
        """The scores."""
        return self.head(self.body(x))


def images(data, samples):
    """Training images with wrong labels, their true labels, trusted images, and test images."""
    generator = torch.Generator().manual_seed(0)
    if data is None:
        x, y = digits()
        x, samples, trusted = x.reshape(-1, 1, 8, 8), min(samples, 1200), 100
    else:
        files = read_images(find("fashion-mnist", data))
        x = torch.as_tensor(np.concatenate([files.train_images, files.test_images]))[:, None]
        y = torch.as_tensor(np.concatenate([files.train_labels, files.test_labels])).long()
        trusted = 500
    order = torch.randperm(len(y), generator=generator)
    x, y = x[order].float(), y[order]
    x = (x - x[:samples].mean()) / x[:samples].std()
    ends = [samples, samples + trusted, samples + trusted + min(len(y) - samples - trusted, 5000)]
    right = y[: ends[0]]
    turned = (right + torch.randint(1, 10, right.shape, generator=generator)) % 10
    given = torch.where(torch.rand(right.shape, generator=generator) < WRONG, turned, right)
    return (
        x[: ends[0]],
        given,
        right,
        (x[ends[0] : ends[1]], y[ends[0] : ends[1]]),
        (x[ends[1] : ends[2]], y[ends[1] : ends[2]]),
    )


def inner(model, v, batch):
    """What the network is trained on."""
    x, y, index = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weights=v[index].sigmoid(), outputs=z)


def outer(model, v, batch):
    """What the weights are chosen by."""
    return F.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def applied(function, x):
    """A function of images, some of them at a time."""
    return torch.cat([function(part) for part in x.split(1000)]).cpu()


def accuracy(model, x, y):
    """With the running statistics of BatchNorm."""
    found = applied(model.eval(), x).argmax(1)
    return float((found == y.cpu()).double().mean())


def weighted(model, x, given, trusted, steps):
    """A network trained with learnt weights, and the weights."""
    v = torch.zeros(len(x), device=x.device)
    problem = nhgd.Bilevel(inner, outer, model, v, l2=RIDGE, likelihood="categorical")
    data, judges = nhgd.Data(x, given, batch=128), nhgd.Data(*trusted, batch=128)
    adam = partial(torch.optim.Adam, lr=0.1)
    nhgd.Solver(problem, data, judges, inner_optimizer=SGD, outer_optimizer=adam).run(steps=steps)
    return model, v.sigmoid().cpu()


def plain(model, x, given, steps):
    """A network trained as long on all labels alike, with the same ridge."""
    data, optimizer = nhgd.Data(x, given, batch=128), SGD(model.parameters(), weight_decay=2 * RIDGE)
    for step in range(10 * steps):
        if step % len(data) == 0:
            batches = iter(data)
        part, labels, _ = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(part), labels).backward()
        optimizer.step()
    return model


def main(arguments=None):
    """Train on folds, clean, and train again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--data")
    parser.add_argument("--samples", type=int, default=10_000, help="training images")
    parser.add_argument("--width", type=int, help="channels of the first layer")
    parser.add_argument("--steps", type=int, help="outer steps")
    parser.add_argument("--device", default="cpu")
    o = parser.parse_args(arguments)
    width, steps = o.width or (4 if o.tiny else 16), o.steps or (20 if o.tiny else 60)
    x, given, right, trusted, test = images(o.data, o.samples if not o.tiny else 600)
    x, given, *rest = (t.to(o.device) for t in (x, given, *trusted, *test))
    trusted, test = rest[:2], rest[2:]
    torch.manual_seed(0)
    first, folds = ResNet(width).to(o.device), torch.arange(len(x), device=o.device) % FOLDS
    probable = torch.zeros(len(x), 10)
    for fold in range(FOLDS):
        model, weights = weighted(copy.deepcopy(first), x[folds != fold], given[folds != fold], trusted, steps)
        unseen = (folds == fold).cpu()
        probable[unseen] = applied(model.eval(), x[folds == fold]).softmax(1)
        wrong = (given.cpu() != right)[~unseen]
        print(
            f"fold {fold + 1}: weights of right labels {weights[~wrong].mean():.2f}, of wrong ones {weights[wrong].mean():.2f}"
        )

    wrong, labels = (given.cpu() != right).numpy(), given.cpu().numpy()
    cleaner = nhgd.LabelCleaner(random_state=0).fit(x.flatten(1).cpu().numpy(), labels, pred_probs=probable.numpy())
    suspects = cleaner.label_issues_
    hits = int(wrong[suspects].sum())
    print(f"{hits} of the {len(suspects)} suspects have a wrong label; {int(wrong.sum())} wrong labels were given\n")

    kept = torch.ones(len(x), dtype=torch.bool, device=o.device)
    kept[torch.as_tensor(suspects.copy(), device=o.device)] = False
    for words, some in (("all labels", torch.ones_like(kept)), ("the labels left", kept)):
        model = plain(copy.deepcopy(first), x[some], given[some], steps)
        print(f"test accuracy with {words}: {accuracy(model, *test):.3f}")
    return hits, len(suspects), int(wrong.sum())


if __name__ == "__main__":
    main()
