"""python examples/language_model.py [--tiny]      a transformer learns, while it is trained, which files are corrupted

On one GPU, with 100 million parameters, in bfloat16, saved now and then so that --resume continues it:

    python examples/language_model.py --device cuda --autocast --layers 15 --width 768 --heads 12 --context 128 \\
        --batch 64 --documents 32000 --trusted 512 --lr 4e-4 --checkpoint runs/lm

The corpus is text that is there wherever this runs: the sources of the standard library and of torch, as bytes, cut into
documents of one context each. In half of the files every second byte is replaced by another of the corpus, and nobody says
in which (with --weights document or loss: in half of the documents). A transformer is trained by AdamW on all of them (inner),
with a learnt weight for each file, for each document, or by a function of a document's loss. The weights are chosen such that
the transformer predicts a few files that are known to be good (outer). Then the same one is trained as long on everything alike.

All weights are the same at first. How often each byte occurs is learnt before anything else, and corrupted text teaches that
as well as any other, so weights that moved at once would move for nothing, or the wrong way.
"""

import argparse
import sysconfig
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import nhgd

CORRUPTED = 0.5  # the part of the bytes of a corrupted document that is replaced


def rotated(x):
    """Queries or keys (B, heads, T, n), each pair of their numbers turned by an angle that grows with the place."""
    places, pairs = x.shape[2], x.shape[3] // 2
    angle = torch.arange(places, device=x.device)[:, None] * 1e-3 ** (torch.arange(pairs, device=x.device) / pairs)
    cos, sin, (a, b) = angle.cos(), angle.sin(), x.float().chunk(2, 3)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], 3).to(x.dtype)


class Block(nn.Module):
    """Causal attention and a network with one hidden layer, each added to what comes in."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """(B, T, width) -> (B, T, width)."""
        q, k, v = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Bytes (B, T) -> logits of the bytes that follow, (B, T, 256)."""

    def __init__(self, layers, width, heads):
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # what is added to the stream 2 * layers times is smaller
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if added else 0.02)

    def forward(self, x):
        """The logits."""
        x = self.byte(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def texts(folder, size):
    """Every text below a folder, cut into documents of `size` bytes, (n, size)."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "encodings"}
    tops = [top for top in sorted(folder.iterdir()) if top.name not in skipped]
    for path in (path for top in tops for path in ([top] if top.is_file() else sorted(top.rglob("*")))):
        good = path.suffix in {".py", ".txt"} and path.is_file() and not skipped & set(path.relative_to(folder).parts)
        if good and (count := path.stat().st_size // size):
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            yield data[: count * size].reshape(-1, size).long()


def corpus(context, sizes):
    """Parts of so many documents: each as bytes (N, context + 1), and the number of the file of each document, (N,)."""
    folders = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent
    found = [some for folder in folders for some in texts(folder, context + 1)]
    order, parts = iter(torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()), []
    for size in sizes:  # no file gives documents to two parts
        chosen = []
        while sum(map(len, chosen)) < size:
            if (place := next(order, None)) is None:
                raise SystemExit(f"There is too little text for {sum(sizes)} documents of {context + 1} bytes.")
            chosen.append(found[place][: min(64, max(1, size // 64))])  # of a long file only a part
        source = torch.cat([torch.full((len(some),), number) for number, some in enumerate(chosen)])
        parts.append((torch.cat(chosen)[:size], source[:size]))
    return parts


def corrupt(x, bad, generator):
    """Replace some bytes of the documents that are marked by others of the corpus."""
    others = x.flatten()[torch.randint(x.numel(), x.shape, generator=generator)]
    hit = (torch.rand(x.shape, generator=generator) < CORRUPTED) & bad[:, None]
    return torch.where(hit, others, x)


def losses_of(model, x, autocast):
    """The mean loss of each document's bytes, (B,), in float32 whatever the model computes in."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        z = model(x[:, :-1])
    return F.cross_entropy(z.float().transpose(1, 2), x[:, 1:], reduction="none").mean(1)


def weights_of(kind, v, losses, index, source):
    """The weight of each document of a batch, between 0 and 1."""
    if kind == "loss":  # high below a threshold, which is learnt as its distance from the mean, which falls
        return torch.sigmoid(v[0].exp() * (v[1] + losses.detach().mean() - losses.detach()))
    return v[index if kind == "document" else source].sigmoid()


def auc(scores, bad):
    """The probability that a clean document has a higher weight than a corrupted one."""
    ranks = scores.double().argsort().argsort().double()
    bad = bad.bool()
    clean, corrupted = int((~bad).sum()), int(bad.sum())
    return float((ranks[~bad].sum() - clean * (clean - 1) / 2) / (clean * corrupted))


@torch.no_grad()
def mean_loss(model, x, batch, autocast):
    """On documents that had no part in training."""
    return float(torch.cat([losses_of(model, part, autocast) for part in x.split(batch)]).mean())


def parsed(arguments):
    """The options; --tiny sets the sizes that were not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "documents": (8192, 1024),
        "trusted": (256, 32),
        "layers": (2, 1),
        "width": (64, 32),
        "heads": (4, 2),
        "context": (64, 64),
        "batch": (32, 16),
        "inner-steps": (10, 10),
        "steps": (100, 30),
    }
    for name in sizes:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--lr", type=float, default=3e-3, help="of AdamW")
    parser.add_argument("--wait", type=int, help="outer steps before the weights move; by default a quarter of all")
    parser.add_argument("--weights", choices=("source", "document", "loss"), default="source")
    parser.add_argument(
        "--method", default="nhgd", help="of nhgd list: f2sa-shared and sama do well too, bome with --inner-steps 1"
    )
    parser.add_argument("--damping", type=float, default=1.0, help="of nhgd's K-FAC")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16, keep parameters in float32")
    parser.add_argument("--checkpoint", type=Path, help="a folder to save the run in")
    parser.add_argument("--resume", action="store_true", help="continue the run of that folder")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    for name, (usual, tiny) in sizes.items():
        if getattr(options, key := name.replace("-", "_")) is None:
            setattr(options, key, tiny if options.tiny else usual)
    options.wait = options.steps // 4 if options.wait is None else options.wait
    return options


def main(arguments=None):
    """Train with learnt weights, then on everything alike."""
    o = parsed(arguments)
    torch.set_float32_matmul_precision("high")
    good, held_out, (x, source) = corpus(o.context, (o.trusted, o.trusted, o.documents))
    generator = torch.Generator().manual_seed(1)
    halves = torch.randperm(len(x) if o.weights != "source" else int(source[-1]) + 1, generator=generator) % 2 == 1
    bad = halves if o.weights != "source" else halves[source]
    x = corrupt(x, bad, generator)
    x, source, judge, test = (t.to(o.device) for t in (x, source, good[0], held_out[0]))

    def network():
        torch.manual_seed(0)
        return Transformer(o.layers, o.width, o.heads).to(o.device)

    def inner(model, v, batch):
        x, source, index = batch
        losses = losses_of(model, x, o.autocast)
        return nhgd.Losses(losses, weights=weights_of(o.weights, v, losses, index, source))

    def outer(model, v, batch):
        return losses_of(model, batch[0], o.autocast).mean()

    def rate(step):  # rises over a tenth of the outer steps
        return o.lr * min(1, 10 * (step + 1) / o.steps)

    adamw = partial(torch.optim.AdamW, lr=o.lr, betas=(0.9, 0.95), weight_decay=0.0)
    model = network()
    v = torch.zeros(2) if o.weights == "loss" else torch.zeros(len(halves) if o.weights == "source" else len(x))
    problem = nhgd.Bilevel(inner, outer, model, v.to(o.device))
    data, judges = nhgd.Data(x, source, batch=o.batch), nhgd.Data(judge, batch=o.batch)
    print(f"{problem.theta.numel:,} parameters, {len(x)} documents of {o.context + 1} bytes, half of them corrupted")
    if (method := o.method) == "nhgd":
        # AdamW moves theta less where gradients are large, so little of the curvature there is seen within an inner loop.
        # And each inner step is to say something of its files; of a large model only two of them would.
        method = nhgd.algorithm.NHGD(nhgd.inverse.KFAC(damping=o.damping), cross="lagged")
    settings = {
        "method": method,
        "inner_steps": o.inner_steps,
        "inner_optimizer": adamw,
        "inner_lr": rate,
        "outer_optimizer": torch.optim.Adam,
        "outer_lr": lambda step: 0.2 if step >= o.wait else 1e-9,
        "compile": False,
    }
    began = time.perf_counter()
    if o.resume:
        solver = nhgd.Solver.resume(o.checkpoint, problem, data, judges, **settings)
    else:
        solver = nhgd.Solver(problem, data, judges, checkpoint=o.checkpoint, **settings)
    solver.run(steps=o.steps)

    with torch.no_grad():
        found = [losses_of(model, part, o.autocast) for part in x.split(o.batch)]
        index = torch.arange(len(x), device=x.device)
        weights = weights_of(o.weights, problem.v.flat(), torch.cat(found), index, source).cpu()
    separation, learnt = auc(weights, bad), mean_loss(model, test, o.batch, o.autocast)
    means = f"clean {weights[~bad].mean():.2f}, corrupted {weights[bad].mean():.2f}"
    print(f"AUC of the weights: {separation:.3f}; {means}")
    print(f"loss on other files, learnt weights:   {learnt:.3f}   ({time.perf_counter() - began:.0f} s)")

    began, model = time.perf_counter(), network()
    optimizer = adamw(model.parameters())
    for step in range(o.steps * o.inner_steps):
        if step % len(data) == 0:
            batches = iter(data)
        losses_of(model, next(batches)[0], o.autocast).mean().backward()
        optimizer.param_groups[0]["lr"] = rate(step // o.inner_steps)
        optimizer.step()
        optimizer.zero_grad()
    alike = mean_loss(model, test, o.batch, o.autocast)
    print(f"loss on other files, everything alike: {alike:.3f}   ({time.perf_counter() - began:.0f} s)")
    return separation, learnt, alike


if __name__ == "__main__":
    main()
