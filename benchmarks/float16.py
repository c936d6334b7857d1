"""Hypergradients under float16 autocast, and with eigenvectors of few digits, against float64.

    python -m benchmarks.float16 --out benchmarks/results/float16-cpu.json

On a transformer of two layers and a million parameters, after a few steps of training: K-FAC's hypergradient in the weights of the
sources of documents, with losses as they are and with losses that are a thousandth of that, as those of large sums of terms
often are.
"""

from __future__ import annotations

import argparse
import json
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.environment import environment
from benchmarks.transformer import Job, Transformer, plain, text_job

SMALL = 1e-3  # a factor on all losses


class Scaled(Job):
    """The same job with losses times a factor, under autocast of a dtype."""

    def __init__(self, job: Job, model: nn.Module, factor: float, low: torch.dtype | None) -> None:
        super().__init__(model, job.inner, job.outer, None, low is not None)
        self.factor, self.digits = factor, low

    def setting(self) -> AbstractContextManager[Any]:
        """Autocast to this job's own dtype."""
        return nullcontext() if self.digits is None else torch.autocast(self.device.type, self.digits)

    def losses(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss of every sample, and what the model gave."""
        values, z = super().losses(model, batch)
        return self.factor * values, z


def measured(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Relative errors of each way."""
    width = options.width
    job = text_job(options, device, 2, width, low=False)
    plain(job, 10, 1)
    start = {name: t.clone() for name, t in job.model.state_dict().items()}

    def found(
        factor: float, dtype: torch.dtype, low: torch.dtype | None = None, scale: float | None = None, **settings: Any
    ) -> Tensor:
        torch.manual_seed(0)
        model = Transformer(2, width, options.places).to(device)
        model.load_state_dict(start)
        own = Scaled(job, model.to(dtype), factor, low)
        inverse = nhgd.inverse.KFAC(damping=1e-3 * factor**2, **settings)
        scaler = None if scale is None else torch.amp.GradScaler(device.type, init_scale=scale)
        batches, outer = job.inner[:2], job.outer[0]
        return nhgd.hypergradient(
            own.problem(), batches, outer, inverse=inverse, inner_data=batches, scaler=scaler
        ).grad.double()

    def relation(a: Tensor, b: Tensor) -> dict[str, float]:
        return {
            "cosine": float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0)),
            "relative_error": float((a - b).norm() / b.norm()),
        }

    rows: dict[str, Any] = {"parameters": sum(t.numel() for t in start.values())}
    for name, factor in (("losses", 1.0), ("small losses", SMALL)):
        exact = found(factor, torch.float64)
        rows[name] = {
            "bfloat16": relation(found(factor, torch.float32, torch.bfloat16), exact),
            "float16": relation(found(factor, torch.float32, torch.float16), exact),
            "float16 with a scaler": relation(found(factor, torch.float32, torch.float16, 2.0**40), exact),
        }
    exact = found(1.0, torch.float32, invert_every=1)
    rows["kept"] = {
        str(dtype).removeprefix("torch."): relation(found(1.0, torch.float32, invert_every=1, kept_dtype=dtype), exact)
        for dtype in (torch.float16, torch.bfloat16)
    }
    return rows


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--places", type=int, default=32)
    options = parser.parse_args()
    device = torch.device(options.device)
    warnings.simplefilter("ignore", nhgd.InverseWarning)
    warnings.filterwarnings("ignore", "Per-sample gradients could not be vectorised")  # where scores vanish
    result = {
        "settings": {k: str(v) for k, v in vars(options).items()},
        "environment": environment(device),
        "float16": measured(options, device),
    }
    print(json.dumps(result["float16"], indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
