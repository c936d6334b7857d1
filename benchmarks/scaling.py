"""How the cost of curvature grows with model, batch and number of GPUs: the tables of benchmarks/parallel.md.

    python -m benchmarks.scaling                                            # prints the tables
    python -m benchmarks.scaling --write                                    # and puts them into benchmarks/parallel.md
    python -m benchmarks.scaling --measure benchmarks/results/constants-cpu.json   # the constants of this machine

Flops and bytes are counted; `tests/test_scaling.py` compares the bytes with those that `Device` sends. Rates are measured:
those of a CPU by --measure and benchmarks/submit_beside.py, those of an H200 by benchmarks/streams.py (streams-h200.json).
Links are assumed, because no machine with two GPUs was available. Everything about more than one GPU is arithmetic, not
measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from benchmarks.environment import environment
from benchmarks.tables import ROOT, fill
from nhgd._recording.recorder import Recorder

# Assumed, from data sheets: bytes a second in one direction for one GPU, and seconds of one message.
NVLINK, NVLINK_LATENCY = 450e9, 5e-6
INFINIBAND, INFINIBAND_LATENCY = 50e9, 10e-6
NODE = 8  # GPUs that NVLink joins
NUMBER = 4  # bytes of float32
UPDATE = (
    24  # bytes of memory traffic for each entry of A in a rank-one update: 8 read for the product, 8 read and 8 written
)
INNER_STEPS = 10  # and one solve, for each outer step
WINDOW = 1024


@dataclass(frozen=True)
class Layer:
    """A Linear layer with a bias."""

    inputs: int
    outputs: int

    @property
    def factors(self) -> tuple[int, int]:
        """The sides of A and G."""
        return self.inputs + 1, self.outputs


@dataclass(frozen=True)
class Net:
    """A model as far as its cost goes: its Linear layers, the samples of a batch, and the places (tokens) of a sample."""

    name: str
    layers: tuple[Layer, ...]
    batch: int
    places: int = 1

    @property
    def parameters(self) -> int:
        return sum((layer.inputs + 1) * layer.outputs for layer in self.layers)

    @property
    def positions(self) -> int:
        """Samples times places: the rows of every product."""
        return self.batch * self.places

    def inner_flops(self) -> float:
        """Forward, and backward in weights and inputs."""
        return 6.0 * self.positions * self.parameters

    def record_bytes(self, layers: Sequence[Layer] | None = None) -> int:
        """Inputs and scores of every layer, a scale for each layer and sample, and a weight for each sample."""
        chosen = self.layers if layers is None else layers
        numbers = sum(self.positions * (layer.inputs + layer.outputs) + self.batch for layer in chosen)
        return NUMBER * (numbers + self.batch)

    def row_bytes(self) -> int:
        """The gradient of a batch, as the dense rank-one update takes it."""
        return NUMBER * self.parameters

    def answer_bytes(self) -> int:
        """u and the ridge there and x back, once for each outer step."""
        return NUMBER * (2 * self.parameters + 1)

    def factor_numbers(self, layers: Sequence[Layer] | None = None) -> int:
        chosen = self.layers if layers is None else layers
        return sum(n**2 for layer in chosen for n in layer.factors)

    def factor_flops(self, layers: Sequence[Layer] | None = None) -> float:
        """A and G of one batch."""
        return 2.0 * self.positions * self.factor_numbers(layers)

    def basis_work(self, layers: Sequence[Layer] | None = None) -> float:
        """The sum of n^3 over all factors: what eigendecompositions, and Cholesky factorisations, are a multiple of."""
        chosen = self.layers if layers is None else layers
        return float(sum(n**3 for layer in chosen for n in layer.factors))

    def window_flops(self) -> float:
        """New rows of the Gram matrix, from inputs and scores; with places, for every pair of them."""
        widths = sum(sum(layer.factors) + 1 for layer in self.layers)
        return 2.0 * self.batch * WINDOW * self.places**2 * widths

    def divided(self, parts: int) -> list[tuple[Layer, ...]]:
        """Layers over curvature ranks as `Distributed` divides them: the dearest first, to the rank with least to do."""
        shares: list[list[Layer]] = [[] for _ in range(parts)]
        loads = [0.0] * parts
        for layer in sorted(self.layers, key=lambda one: -self.basis_work([one])):
            part = loads.index(min(loads))
            shares[part].append(layer)
            loads[part] += self.basis_work([layer])
        return [tuple(share) for share in shares]

    def dearest_worker(self, workers: int) -> float:
        """The most n^3 that one of so many workers has when they divide the factors."""
        loads = [0.0] * workers
        for n in sorted((n for layer in self.layers for n in layer.factors), reverse=True):
            loads[loads.index(min(loads))] += float(n) ** 3
        return max(loads)


def mlp(name: str, widths: Sequence[int], batch: int) -> Net:
    return Net(name, tuple(Layer(a, b) for a, b in pairwise(widths)), batch)


def transformer(width: int, blocks: int, batch: int, places: int) -> Net:
    """Attention and feed-forward layers of a decoder; embeddings, norms and the products of attention are left out."""
    block = (Layer(width, 3 * width), Layer(width, width), Layer(width, 4 * width), Layer(4 * width, width))
    return Net("transformer, 100 M", block * blocks, batch, places)


SOFTMAX = mlp("softmax, 7,850", (784, 10), 1024)
MLP = mlp("MLP, 10 M", (784, 2048, 2048, 2048, 10), 8192)
TRANSFORMER = transformer(1024, 8, 64, 512)
NETS = (SOFTMAX, MLP, TRANSFORMER)


@dataclass(frozen=True)
class Machine:
    """Rates of one device as this library runs on it.

    Attributes:
        inner_rate: flops a second of an inner step on a large batch.
        gemm_rate: flops a second of A and G.
        basis_rate: n^3 a second of eigendecompositions.
        memory_rate: bytes a second of the dense rank-one update.
        overhead, overhead_a_layer: seconds an inner step takes however small it is: Python and launches.
        submit: seconds of handing a record over.
    """

    name: str
    inner_rate: float
    gemm_rate: float
    basis_rate: float
    memory_rate: float
    overhead: float
    overhead_a_layer: float
    submit: float

    def inner(self, net: Net) -> float:
        """Seconds of an inner step: the processor launches while the device computes."""
        return max(self.overhead + self.overhead_a_layer * len(net.layers), net.inner_flops() / self.inner_rate)

    def kfac(self, net: Net) -> float:
        """Seconds of curvature for each inner step, the decompositions of one solve spread over the inner steps."""
        return net.factor_flops() / self.gemm_rate + net.basis_work() / self.basis_rate / INNER_STEPS

    def dense(self, net: Net) -> float:
        """The rank-one update in float64: A is read for the product, read and written for the update."""
        return UPDATE * float(net.parameters) ** 2 / self.memory_rate

    def window(self, net: Net) -> float:
        return (net.window_flops() + WINDOW**3 / 3 / INNER_STEPS) / self.gemm_rate


def machine_of_streams(result: dict[str, Any], submit: float) -> Machine:
    """An H200 from what benchmarks/streams.py measured."""
    rows = [row for row in result["rows"] if "milliseconds" in row]

    def seconds(part: str, *words: str, batch: int) -> float:
        found = [r for r in rows if r["batch"] == batch and all(w in f"{r['case']} {r['inverse']}" for w in words)]
        return float(found[0]["milliseconds"][part]) / 1e3 / found[0]["inner_steps"]

    bases = seconds("curvature", "MLP", "invert_every=10", batch=8192)
    factors = seconds("curvature", "MLP", "cholesky", batch=8192)
    small = seconds("inner", "rank-one", batch=1024)
    a_layer = max(0.0, seconds("inner", "MLP", "invert_every=10", batch=1024) - small) / (len(MLP.layers) - 1)
    return Machine(
        "one H200",
        MLP.inner_flops() / seconds("inner", "MLP", "invert_every=10", batch=8192),
        MLP.factor_flops() / factors,
        MLP.basis_work() / (INNER_STEPS * (bases - factors)),
        UPDATE * float(SOFTMAX.parameters) ** 2 / seconds("curvature", "rank-one", batch=1024),
        small - a_layer,
        a_layer,
        submit,
    )


def link(size: float, bandwidth: float, latency: float) -> float:
    return latency + size / bandwidth


def all_reduce(size: float, workers: int) -> float:
    """Seconds of a sum over workers: within nodes by NVLink, then between nodes, each GPU its part, by InfiniBand."""
    if workers == 1:
        return 0.0
    local = min(workers, NODE)
    nodes = math.ceil(workers / NODE)
    found = 2 * (local - 1) / local * size / NVLINK + 2 * math.log2(local) * NVLINK_LATENCY
    if nodes > 1:
        found += 2 * (nodes - 1) / nodes * size / local / INFINIBAND + 2 * math.log2(nodes) * INFINIBAND_LATENCY
    return found


def inner_of(machine: Machine, net: Net, workers: int) -> float:
    """An inner step whose batch is divided, the gradient summed after it."""
    part = replace(net, batch=max(1, net.batch // workers))
    return machine.inner(part) + all_reduce(NUMBER * net.parameters, workers)


def team(machine: Machine, net: Net, workers: int) -> float:
    """An inner step with curvature in the workers: factors are summed, decompositions divided and sent to all."""
    part = replace(net, batch=max(1, net.batch // workers))
    factors = NUMBER * net.factor_numbers()
    exchange = all_reduce(factors, workers) / 2  # one way: every worker needs what the others have made
    bases = net.dearest_worker(workers) / machine.basis_rate + exchange
    sums = part.factor_flops() / machine.gemm_rate + all_reduce(factors, workers)
    return inner_of(machine, net, workers) + sums + bases / INNER_STEPS


def keepers(machine: Machine, net: Net, gpus: int, ranks: int) -> float:
    """An inner step with curvature in `ranks` of the GPUs, which get all records of their layers and go on beside."""
    workers = gpus - ranks
    bandwidth, latency = (NVLINK, NVLINK_LATENCY) if gpus <= NODE else (INFINIBAND, INFINIBAND_LATENCY)
    shares = net.divided(ranks)
    sending = link(max(map(net.record_bytes, shares)) / workers, bandwidth, latency)
    there = max(
        max(link(net.record_bytes(share), bandwidth, latency), net.factor_flops(share) / machine.gemm_rate)
        + net.basis_work(share) / machine.basis_rate / INNER_STEPS
        for share in shares
    )
    return max(inner_of(machine, net, workers) + machine.submit, sending, there)


def best_keepers(machine: Machine, net: Net, gpus: int) -> tuple[int, float] | None:
    counts = [n for n in (1, 2, 4, 8, 16, 32) if n <= min(len(net.layers), gpus - 1)]
    return min(((n, keepers(machine, net, gpus, n)) for n in counts), key=lambda pair: pair[1], default=None)


def size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if number < 999.5 or unit == "PB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.3g}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def counts_table() -> str:
    rows = []
    for net in NETS:
        rows.append(
            [
                net.name,
                f"{net.batch:,}" + (f" x {net.places}" if net.places > 1 else ""),
                f"{net.inner_flops():.1e}",
                f"{net.factor_flops():.1e}",
                f"{net.basis_work():.1e}",
                size(net.record_bytes()),
                size(NUMBER * net.factor_numbers()),
                size(net.answer_bytes()),
                size(8 * net.parameters**2),
            ]
        )
    head = [
        "model",
        "batch",
        "inner step, flops",
        "A and G, flops",
        "sum n^3",
        "record",
        "factors",
        "u and x",
        "dense F",
    ]
    return markdown(head, rows)


def constants_table(machines: Sequence[Machine]) -> str:
    head = ["machine", "inner step", "A and G", "bases, n^3 / s", "rank-one update", "least inner step", "submit"]
    rows = [
        [
            m.name,
            f"{m.inner_rate / 1e12:.2g} Tflop/s",
            f"{m.gemm_rate / 1e12:.2g} Tflop/s",
            f"{m.basis_rate:.2g}",
            f"{size(m.memory_rate)}/s",
            f"{1e3 * m.overhead:.2g} ms + {1e3 * m.overhead_a_layer:.2g} ms a layer",
            f"{1e6 * m.submit:.0f} us",
        ]
        for m in machines
    ]
    return markdown(head, rows)


def second_device_table(machine: Machine) -> str:
    head = ["model", "curvature", "inner, ms", "curvature, ms", "record", "NVLink, ms", "InfiniBand, ms"]
    head += ["second GPU pays, NVLink", "InfiniBand"]
    rows = []
    for net in NETS:
        kinds: list[tuple[str, Callable[[Net], float], int]] = [("K-FAC", machine.kfac, net.record_bytes())]
        if net.parameters < 15_000:
            kinds.insert(0, ("dense, rank one", machine.dense, net.row_bytes()))
        if net.places == 1:
            kinds.append((f"window of {WINDOW:,}", machine.window, net.record_bytes()))
        for name, cost, sent in kinds:
            inner, curvature = machine.inner(net), cost(net)
            links = [link(sent, NVLINK, NVLINK_LATENCY), link(sent, INFINIBAND, INFINIBAND_LATENCY)]
            gains = [(inner + curvature) / max(inner + machine.submit, curvature, there) for there in links]
            rows.append(
                [net.name, name, ms(inner), ms(curvature), size(sent), *map(ms, links), *(f"x {g:.2f}" for g in gains)]
            )
    return markdown(head, rows)


def scaling_table(machine: Machine, net: Net, weak: bool) -> str:
    head = [
        "GPUs",
        "batch",
        "inner alone, ms",
        "team, ms",
        "efficiency",
        "curvature ranks, ms",
        "of them",
        "efficiency",
    ]
    rows = []
    alone = machine.inner(net) + machine.kfac(net)
    for gpus in (1, 8, 64, 256, 1024):
        scaled = replace(net, batch=net.batch * gpus) if weak else net
        work = 1 if weak else gpus
        together = team(machine, scaled, gpus)
        best = best_keepers(machine, scaled, gpus)
        rows.append(
            [
                f"{gpus:,}",
                f"{scaled.batch:,}",
                ms(inner_of(machine, scaled, gpus)),
                ms(together),
                f"{alone / work / together:.0%}",
                "" if best is None else ms(best[1]),
                "" if best is None else str(best[0]),
                "" if best is None else f"{alone / work / best[1]:.0%}",
            ]
        )
    return markdown(head, rows)


def submit_table(result: dict[str, Any]) -> str:
    head = [
        "model",
        "execution",
        "numbers",
        "submit, us",
        "its inner step, us",
        "share",
        "plain inner step, us",
        "share",
    ]
    rows = [
        [
            row["model"],
            row["execution"],
            f"{row['numbers']:,}",
            f"{row['submit_microseconds']:.0f}",
            f"{row['inner_step_microseconds']:.0f}",
            f"{row['share']:.1%}",
            f"{row['plain_step_microseconds']:.0f}",
            f"{row['share_of_plain']:.1%}",
        ]
        for row in result["rows"]
        if row["execution"] != "inline"
    ]
    return markdown(head, rows)


def bench_table(result: list[dict[str, Any]]) -> str:
    """What `nhgd bench` found for some methods: milliseconds, and the gain over inline."""
    rows = []
    for answer in result:
        inline, *others = answer["rows"]
        times = [f"{row['milliseconds']:.1f}, x {row['speedup']:.2f}" for row in others]
        parts = [f"{inline['milliseconds']:.1f}", f"{inline['curvature_milliseconds']:.1f}"]
        rows.append([f"`{answer['method']}`", *parts, *times])
    names = [row["execution"] for row in result[0]["rows"][1:]]
    return markdown(["method", "inline, ms", "of it curvature", *names], rows)


def streams_table(result: dict[str, Any]) -> str:
    head = ["case", "batch", "inner, ms", "curvature, ms", "inline, ms", "stream, ms", "stream over the larger half"]
    rows = [
        [
            row["case"].removesuffix(f", batch {row['batch']}"),
            f"{row['batch']:,}",
            *(f"{row['milliseconds'][part]:.0f}" for part in ("inner", "curvature", "inline", "stream")),
            f"{row['ratio']:.2f}",
        ]
        for row in result["rows"]
        if "milliseconds" in row
    ]
    return markdown(head, rows)


def repeats_table(runs: Sequence[dict[str, Any]]) -> str:
    """The cases that every run has, a column for each run: the ratio, and the quartiles of single rounds."""
    by_case = [{row["case"]: row for row in run["rows"] if "ratio" in row} for run in runs]
    head = ["case", "batch", "rounds", *(f"run {k}" for k in range(1, len(runs) + 1))]
    rows = []
    for case, first in by_case[0].items():
        found = [rows_of[case] for rows_of in by_case if case in rows_of]
        if len(found) == len(runs):
            ratios = [
                f"{row['ratio']:.2f} ({' to '.join(f'{q:.2f}' for q in row['ratio_quartiles'])})" for row in found
            ]
            name = case.removesuffix(f", batch {first['batch']}")
            rows.append([name, f"{first['batch']:,}", str(first["rounds"]), *ratios])
    return markdown(head, rows)


def measured_tables(results: Path) -> dict[str, str]:
    """Those that only show what was measured, where it was."""
    found = {}
    for mark, name, table in (
        ("submit", "submit-beside-cpu.json", submit_table),
        ("bench", "bench-cleaning-cpu.json", bench_table),
        ("streams", "streams-h200.json", streams_table),
    ):
        if (results / name).exists():
            found[mark] = table(json.loads((results / name).read_text(encoding="utf-8")))
    runs = [results / "streams-h200.json", *sorted(results.glob("streams-h200-run*.json"))]
    if len(runs) > 1 and runs[0].exists():
        found["stream-runs"] = repeats_table([json.loads(path.read_text(encoding="utf-8")) for path in runs])
    return found


def tables(machines: Sequence[Machine]) -> dict[str, str]:
    """All of them by their mark in benchmarks/parallel.md; those of GPUs only where a GPU was measured."""
    found = {"counts": counts_table(), "constants": constants_table(machines)}
    gpu = machines[-1]
    if gpu.name != "two CPU cores":
        found["second-gpu"] = second_device_table(gpu)
        for mark, net, strong, weak in (("mlp", MLP, 8192, 1024), ("transformer", TRANSFORMER, 1024, 8)):
            found[f"strong-{mark}"] = scaling_table(gpu, replace(net, batch=strong), weak=False)
            found[f"weak-{mark}"] = scaling_table(gpu, replace(net, batch=weak), weak=True)
    return found


def all_tables(results: Path) -> dict[str, str]:
    return tables(read_machines(results)) | measured_tables(results)


def read_machines(results: Path) -> list[Machine]:
    """What was measured: the CPU, and the H200 where its file is there."""
    rows = json.loads((results / "submit-beside-cpu.json").read_text(encoding="utf-8"))["rows"]
    submit = 1e-6 * max(row["submit_microseconds"] for row in rows if row["execution"] != "inline")
    rates = json.loads((results / "constants-cpu.json").read_text(encoding="utf-8"))["rates"]
    found = [Machine("two CPU cores", **rates, submit=submit)]
    streams = results / "streams-h200.json"
    if streams.exists():
        found.append(machine_of_streams(json.loads(streams.read_text(encoding="utf-8")), submit))
    return found


def timed(work: Callable[[], Any], times: int = 7) -> float:
    work()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def inner_step(widths: Sequence[int], batch: int) -> float:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])

    def inner(model: nn.Module, v: torch.Tensor, batch: Any) -> nhgd.Losses:
        return nhgd.Losses(F.cross_entropy(model(batch[0]), batch[1], reduction="none"), weights=v[batch[2]])

    v = torch.full((batch,), 0.5)
    problem = nhgd.Bilevel(inner, lambda model, v, batch: v.sum(), model, v, l2=1e-3)
    some = torch.randn(batch, widths[0]), torch.randint(10, (batch,)), torch.arange(batch)
    recorder = Recorder(problem, "layer", "empirical")
    return timed(lambda: recorder.step(some), 25)


def measure() -> dict[str, float]:
    """The rates of the CPU this runs on."""
    net = mlp("", (784, 1024, 1024, 10), 1024)
    a, matrix = torch.randn(1024, 1025), torch.randn(1024, 1024)
    matrix = matrix @ matrix.T
    big = torch.randn(3000, 3000, dtype=torch.float64)
    row = torch.randn(3000, dtype=torch.float64)

    def rank_one() -> None:
        big.addr_(big @ row, row, beta=0.9, alpha=1e-9)
        torch.aminmax(big)

    small, four = inner_step((16, 10), 8), inner_step((16, 16, 16, 16, 10), 8)
    return {
        "inner_rate": net.inner_flops() / inner_step((784, 1024, 1024, 10), 1024),
        "gemm_rate": 2 * 1024 * 1025**2 / timed(lambda: a.T @ a),
        "basis_rate": 1024**3 / timed(lambda: torch.linalg.eigh(matrix), 3),
        "memory_rate": UPDATE * 3000**2 / timed(rank_one),
        "overhead": small - (four - small) / 3,
        "overhead_a_layer": (four - small) / 3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", type=Path, metavar="OUT")
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/parallel.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    given = parser.parse_args()
    if given.measure is not None:
        result = {"environment": environment(torch.device("cpu")), "rates": measure()}
        given.measure.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result["rates"], indent=2))
        return
    found = all_tables(given.results)
    for mark, table in found.items():
        print(f"{mark}\n\n{table}\n")
    if given.write:
        fill(ROOT / "benchmarks/parallel.md", found)


if __name__ == "__main__":
    main()
