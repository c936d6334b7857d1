"""Grey pictures as PNG files, from the standard library alone."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from nhgd.errors import InputError


def write_png(path: Path, pixels: Tensor) -> Path:
    """Write pixels (rows, columns), 0 for black to 1 for white; values outside are clipped."""
    if pixels.ndim != 2 or not pixels.numel():
        raise InputError(f"A picture needs pixels of shape (rows, columns), got {tuple(pixels.shape)}.")
    grey = (pixels.detach().clamp(0, 1) * 255).round().to("cpu", torch.uint8).numpy()
    rows, columns = grey.shape
    lines = b"".join(b"\0" + line.tobytes() for line in grey)  # 0: no filter
    header = struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0)  # 8 bits, grey
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in parts))
    return path


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def image_grid(images: Tensor, columns: int, zoom: int = 1, gap: int = 1) -> Tensor:
    """Images (N, rows, columns) side by side in lines of `columns`, each pixel `zoom` wide, on white.

    >>> image_grid(torch.zeros(3, 4, 4), columns=2).shape
    torch.Size([11, 11])
    """
    count, high, wide = images.shape
    lines = -(-count // columns)
    page = torch.ones(gap + lines * (high + gap), gap + columns * (wide + gap), dtype=images.dtype)
    for n, image in enumerate(images.detach().cpu()):
        top, left = gap + n // columns * (high + gap), gap + n % columns * (wide + gap)
        page[top : top + high, left : left + wide] = image
    return page.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
