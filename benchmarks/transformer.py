"""Bilevel training of a byte-level transformer and of a ResNet with BatchNorm, beside training them plainly.

    python -m benchmarks.transformer benchmarks/results/transformer-h200.json
    python -m benchmarks.transformer --layers 2 --width 64 --batch 8 --places 32 --channels 8 --images 16 --steps 2

Weights of the sources of documents are learnt. Every way takes the same inner steps of AdamW (SGD for the ResNet), under bfloat16
autocast on a GPU: `plain` are those steps and one validation gradient; `aid-identity` and `nhgd`, with its defaults, are whole
outer steps, `nhgd-captured` those that are replayed as CUDA graphs. The first outer steps, in which models are inspected and
curvature is built up, are timed apart. In `precision`, on a transformer of two layers and a million parameters, K-FAC's hypergradient in float32 from
whole batches, and those under autocast and of bfloat16 parameters, are compared with that in float64, and with a converged
solution of the Gauss-Newton system. Needs torch and numpy alone.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.environment import environment
from nhgd._recording.recorder import Recorder
from nhgd._recording.sampling import Sampling
from nhgd.hypergradients.implicit import implicit
from nhgd.oracle import Oracle

SOURCES = 32
VALUES = 256


class Block(nn.Module):
    """Attention and two layers, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Reads bytes, and predicts the next one at each place."""

    def __init__(self, layers: int, width: int, places: int) -> None:
        super().__init__()
        self.values, self.places = nn.Embedding(VALUES, width), nn.Embedding(places, width)
        heads = max(1, width // 64)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VALUES)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.values(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or into != out:
            self.short = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))) + self.short(x))


def resnet(channels: int) -> nn.Module:
    """ResNet-18 for images of 32 x 32, if `channels` is 64."""
    parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    into = channels
    for stage in range(4):
        out = channels * 2**stage
        parts += [Residual(into, out, 1 if stage == 0 else 2), Residual(out, out, 1)]
        into = out
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 10))


class Job:
    """A model with its data, and how it is trained."""

    def __init__(self, model: nn.Module, inner: Any, outer: Any, optimizer: Any, low: bool) -> None:
        self.model, self.inner, self.outer, self.optimizer, self.low = model, inner, outer, optimizer, low
        self.device = next(model.parameters()).device

    def setting(self) -> AbstractContextManager[Any]:
        """Autocast, if digits are to be saved."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.low else nullcontext()

    def losses(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss of every sample, and what the model gave."""
        with self.setting():
            if batch[0].dtype == torch.int64:
                z = model(batch[0][:, :-1])
                found = F.cross_entropy(z.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="none")
                return found.reshape(len(batch[0]), -1).mean(1), z
            z = model(batch[0])
            return F.cross_entropy(z, batch[1], reduction="none"), z

    def weighted(self, model: nn.Module, v: Tensor, batch: Any) -> nhgd.Losses:
        """The losses of the inner problem."""
        values, z = self.losses(model, batch)
        source = (
            batch[1] if batch[0].dtype == torch.int64 else batch[2]
        )  # behind it, `nhgd.Data` has the number of a sample
        return nhgd.Losses(values, v[source].sigmoid(), z)

    def problem(self) -> nhgd.Bilevel:
        """Weights of sources, learnt on the outer data."""
        theta = next(self.model.parameters())
        v = torch.zeros(SOURCES, device=self.device, dtype=torch.promote_types(theta.dtype, torch.float32))
        outer = lambda model, v, batch: self.losses(model, batch)[0].mean()  # noqa: E731
        return nhgd.Bilevel(self.weighted, outer, self.model, v, l2=1e-4)


def text_job(options: argparse.Namespace, device: torch.device, layers: int, width: int, low: bool) -> Job:
    """Windows of the text of Python's own library; half of the sources have their bytes shuffled."""
    text = b"".join(path.read_bytes() for path in sorted(Path(json.__file__).parents[1].glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    span, generator = options.places + 1, torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - span, (options.batch * 24,), generator=generator)
    windows = torch.stack([data[s : s + span] for s in starts.tolist()])
    source = torch.arange(len(windows)) % SOURCES
    for i in (source % 2).nonzero()[:, 0].tolist():
        windows[i] = windows[i][torch.randperm(span, generator=generator)]
    torch.manual_seed(0)
    model = Transformer(layers, width, options.places).to(device)
    pieces = zip(windows[: -options.batch].split(options.batch), source.split(options.batch), strict=False)
    inner = [(w.to(device), s.to(device)) for w, s in pieces]
    outer = [(windows[-options.batch :][source[-options.batch :] % 2 == 0].to(device),)]
    return Job(model, inner, outer, lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0), low)


def image_job(options: argparse.Namespace, device: torch.device, low: bool) -> Job:
    """Random images with labels that a random linear map gives."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.images * 5, 3, 32, 32, generator=generator)
    y = (x.flatten(1) @ torch.randn(3072, 10, generator=generator)).argmax(1)
    source = torch.arange(len(x)) % SOURCES
    torch.manual_seed(0)
    model = resnet(options.channels).to(device, memory_format=torch.channels_last)
    parts = [t.to(device).split(options.images) for t in (x, y, source)]
    batches = list(zip(*parts, strict=True))
    inner = [(a.contiguous(memory_format=torch.channels_last), b, c) for a, b, c in batches]
    return Job(model, inner[:-1], inner[-1:], lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), low)


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds, synchronised; of a CPU, of this process alone."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    started = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (clock() - started)


class Memory:
    """The peak of allocated memory inside, in MB; None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak = device, None

    def __enter__(self) -> Memory:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated() / 1e6


def plain(job: Job, inner_steps: int, steps: int) -> dict[str, Any]:
    """Inner steps and one validation gradient, as one would write them."""
    optimizer = job.optimizer(job.model.parameters())
    times, at = [], 0

    def loop() -> None:
        nonlocal at
        for _ in range(inner_steps):
            optimizer.zero_grad()
            job.losses(job.model, job.inner[at % len(job.inner)])[0].mean().backward()
            optimizer.step()
            at += 1
        optimizer.zero_grad()
        job.losses(job.model, job.outer[0])[0].mean().backward()
        optimizer.zero_grad()

    with Memory(job.device) as memory:
        for _ in range(2):
            loop()
        times = [timed(loop, job.device) for _ in range(steps)]
    return {"milliseconds": sorted(times)[len(times) // 2], "mean": sum(times) / len(times), "megabytes": memory.peak}


def bilevel(job: Job, method: Any, inner_steps: int, steps: int, before: int) -> dict[str, Any]:
    """Outer steps of a method."""
    with Memory(job.device) as memory:
        solver = nhgd.Solver(
            job.problem(),
            job.inner,
            job.outer,
            method=method,
            inner_steps=inner_steps,
            inner_optimizer=job.optimizer,
            outer_lr=0.1,
            compile=False,
        )
        first = timed(lambda: [solver.step() for _ in range(before)], job.device)
    with Memory(job.device) as settled:
        times = [timed(solver.step, job.device) for _ in range(steps)]
    return summary(solver, times, first, before, settled, memory)


def captured(job: Job, inner_steps: int, steps: int, before: int) -> dict[str, Any]:
    """The same, replayed as CUDA graphs where they are: with data that lie on the device, as `nhgd.Data` has them."""
    parts = [torch.cat(tensors) for tensors in zip(*job.inner, strict=True)]
    inner = nhgd.Data(*parts, batch=len(job.inner[0][0]))
    outer = nhgd.Data(*job.outer[0], batch=len(job.outer[0][0]))
    with Memory(job.device) as memory:
        solver = nhgd.Solver(
            job.problem(),
            inner,
            outer,
            method="nhgd",
            inner_steps=inner_steps,
            inner_optimizer=job.optimizer,
            outer_lr=0.1,
        )
        first = timed(lambda: solver.run(steps=before), job.device)
    with Memory(job.device) as settled:
        whole = timed(lambda: solver.run(steps=steps), job.device)
    found = summary(solver, [whole / steps], first, before, settled, memory)
    return found | {"compile": str(solver.run(steps=1).stats["compile"])}


def summary(
    solver: nhgd.Solver, times: list[float], first: float, before: int, settled: Memory, memory: Memory
) -> dict[str, Any]:
    """What is told of outer steps."""
    learner = solver.loop.inverse.learner if solver.loop.inverse is not None else None
    return {
        "milliseconds": sorted(times)[len(times) // 2],
        "mean": sum(times) / len(times),
        "longest": max(times),
        "each": [round(t, 1) for t in times],
        "first_milliseconds": first / max(1, before),
        "megabytes": settled.peak,
        "first_megabytes": memory.peak,
        "cross": str(solver.loop.remarks.get("cross")),
        "effort": str(getattr(learner, "effort", None)),
    }


def compared(make: Callable[[], Job], options: argparse.Namespace, replays: bool = False) -> dict[str, Any]:
    """Plain training beside `aid-identity` and `nhgd`, which also `replays` its steps."""
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in make().model.parameters())}
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": lambda: plain(make(), options.inner_steps, options.steps),
        "nhgd": lambda: bilevel(make(), "nhgd", options.inner_steps, 6 * options.steps, options.before),
        "aid-identity": lambda: bilevel(make(), "aid-identity", options.inner_steps, options.steps, 1),
    }
    if replays:
        ways["nhgd-captured"] = lambda: captured(make(), options.inner_steps, 6 * options.steps, options.before + 4)
    if options.ways:
        ways = {name: way for name, way in ways.items() if name in options.ways}
    for name, way in ways.items():
        try:
            found[name] = way()
        except Exception as error:  # one that fails is told beside the others
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        base = found["plain"]
        if "mean" in found[name] and "mean" in base:
            found[name]["times_plain"] = found[name]["mean"] / base["mean"]
            if base["megabytes"]:
                found[name]["memory_times_plain"] = found[name]["megabytes"] / base["megabytes"]
                if "first_megabytes" in found[name]:
                    found[name]["first_memory_times_plain"] = found[name]["first_megabytes"] / base["megabytes"]
        print(name, json.dumps(found[name]), flush=True)
    return found


def precision(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Hypergradients of a small transformer in several precisions."""
    shape = argparse.Namespace(places=min(options.places, 64), batch=min(options.batch, 16))
    width = 192 if options.width >= 192 else options.width
    job = text_job(shape, device, 2, width, low=False)
    plain(job, 10, 1)
    start = {name: t.clone() for name, t in job.model.state_dict().items()}

    def found(inverse: Any, dtype: torch.dtype, low: bool) -> Tensor:
        torch.manual_seed(0)
        model = Transformer(2, width, shape.places).to(device)
        model.load_state_dict(start)
        own = Job(model.to(dtype), job.inner, job.outer, None, low)
        return nhgd.hypergradient(
            own.problem(), job.inner[:2], job.outer[0], inverse=inverse, inner_data=job.inner[:2]
        ).grad.double()

    def relation(a: Tensor, b: Tensor) -> dict[str, float]:
        return {
            "cosine": float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0)),
            "relative_error": float((a - b).norm() / b.norm()),
        }

    def thinned(places: int | None) -> Tensor:
        """From ten records under autocast, as a run's inner steps make them: of all places of a sample, or of a few."""
        torch.manual_seed(0)
        model = Transformer(2, width, shape.places).to(device)
        model.load_state_dict(start)
        own = Job(model, job.inner, job.outer, None, low=True)
        problem, batches = own.problem(), job.inner[:10]
        recorder, state = Recorder(problem, "layer", couples=False), kfac.init(problem.theta)
        for step, batch in enumerate(batches):
            recorder.sampling = None if places is None else Sampling(None, places, step)
            record = recorder.step(batch).record
            assert record is not None
            state = kfac.observe(state, record)
        return implicit(Oracle(problem, job.inner[:2], job.outer[0]), kfac, state).grad.double()

    damping = 1e-3
    kfac = nhgd.inverse.KFAC(damping=damping)
    exact = found(kfac, torch.float64, low=False)
    ways = {
        "float32": found(kfac, torch.float32, low=False),
        "autocast": found(kfac, torch.float32, low=True),
        "bfloat16": found(kfac, torch.bfloat16, low=False),
        "block": found(nhgd.inverse.KFAC(damping=damping, split=max(16, width // 2)), torch.float32, low=True),
    }
    records = {"ten records": thinned(None), "ten records, 8 places": thinned(8)}
    converged = found(nhgd.inverse.Refined(kfac, steps=30, matrix="ggn"), torch.float32, low=False)
    return {
        "parameters": sum(t.numel() for t in start.values()),
        "against_float64": {name: relation(grad, exact) for name, grad in ways.items()},
        "against_converged": {name: relation(grad, converged) for name, grad in (ways | records).items()},
        "thinned": relation(records["ten records, 8 places"], records["ten records"]),
    }


def multiplications(device: torch.device) -> dict[str, float]:
    """Milliseconds of a matrix product of 4096 rows, or of 512 on a CPU."""
    side = 4096 if device.type == "cuda" else 512
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(side, side, device=device).to(dtype)
        for _ in range(3):
            _ = a @ a
        found[str(dtype)] = timed(lambda a=a: [a @ a for _ in range(10)], device) / 10
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--places", type=int, default=512)
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4, help="outer steps that are timed; six times as many of nhgd")
    parser.add_argument("--before", type=int, default=12, help="outer steps of nhgd before those")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--autocast", choices=["auto", "on", "off"], default="auto", help="auto: on a GPU")
    parser.add_argument("--only", choices=["transformer", "resnet", "precision"])
    parser.add_argument("--ways", nargs="+", help="of taking outer steps; default: all")
    options = parser.parse_args()
    device = torch.device(options.device)
    warnings.simplefilter("ignore", nhgd.InverseWarning)
    low = device.type == "cuda" if options.autocast == "auto" else options.autocast == "on"
    found: dict[str, Any] = {
        "settings": {k: str(v) for k, v in vars(options).items()},
        "environment": environment(device),
        "products": multiplications(device),
    }
    parts: dict[str, Callable[[], Any]] = {
        "transformer": lambda: compared(lambda: text_job(options, device, options.layers, options.width, low), options),
        "resnet": lambda: compared(lambda: image_job(options, device, low), options, replays=True),
        "precision": lambda: precision(options, device),
    }
    for name, part in parts.items():
        if options.only in (None, name):
            started = time.perf_counter()
            try:
                found[name] = part()
            except Exception as error:  # the others are worth having
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            print(name, json.dumps(found[name]), f"{time.perf_counter() - started:.1f} s", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
