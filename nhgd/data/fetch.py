"""Downloading image sets: checked by hash, continued where a line broke, kept in a cache."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from nhgd.errors import InputError, RunError, unknown


@dataclass(frozen=True)
class Published:
    """An image set as it is published: mirrors, tried in turn, and the MD5 sum of each file."""

    mirrors: tuple[str, ...]
    files: dict[str, str]


# The sums are the publishers' own.
PUBLISHED = {
    "mnist": Published(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": Published(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}


def cache() -> Path:
    """Where fetched files are kept: NHGD_CACHE, else the user's own cache folder."""
    asked = os.environ.get("NHGD_CACHE")
    if asked:
        return Path(asked).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nhgd"


def fetch(name: str, folder: Path | None = None, tell: Callable[[float, str], None] | None = None) -> list[Path]:
    """Download an image set, or what is missing of it, and return its four files.

    A file that is there and right is left alone; one that broke off goes on where it stopped; a mirror that fails or
    lies is followed by the next. Nothing but a file with the right sum gets its final name.

    Args:
        name: "mnist" or "fashion-mnist".
        folder: where to; default: `cache() / name`.
        tell: called with the part done and a few words.
    """
    if name not in PUBLISHED:
        raise unknown("image set", name, PUBLISHED)
    try:
        import pooch
    except ModuleNotFoundError:
        raise InputError("Downloading needs pooch: pip install 'nhgd[cli]'.") from None
    place = cache() / name if folder is None else folder
    published = PUBLISHED[name]
    found = []
    for number, (file, md5) in enumerate(published.files.items()):
        start = number / len(published.files)

        def partly(done: float, file: str = file, start: float = start) -> None:
            if tell is not None:
                tell(start + done / len(published.files), file)

        partly(0.0)
        reasons = []
        for mirror in published.mirrors:
            try:
                path = pooch.retrieve(
                    mirror + file,
                    known_hash=f"md5:{md5}",
                    fname=file,
                    path=place,
                    downloader=Resuming(place / f"{file}.part", partly),
                )
                found.append(Path(path))
                break
            except (OSError, ValueError, HTTPException) as error:
                reasons.append(f"{mirror} ({error.__class__.__name__}: {str(error).splitlines()[0]})")
        else:
            raise RunError(
                f"{file} of {name} could not be downloaded from any mirror: {'; '.join(reasons)}. Without a network, copy"
                f" {', '.join(published.files)} into a folder by other means, and point --data or NHGD_DATA at it."
            )
    return found


class Resuming:
    """A downloader for pooch that goes on where the last try broke off."""

    def __init__(self, part: Path, tell: Callable[[float], None], timeout: float = 30.0) -> None:
        self.part = part
        self.tell = tell
        self.timeout = timeout

    def __call__(self, url: str, output_file: Any, _: Any, check_only: bool = False) -> None:
        """Fetch `url` into `output_file`, through the part that is there."""
        if not url.startswith(("https://", "http://")):
            raise ValueError(f"only http and https are fetched, not {url}")
        have = self.part.stat().st_size if self.part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})  # noqa: S310  see above
        self.part.parent.mkdir(parents=True, exist_ok=True)
        try:
            answer = urllib.request.urlopen(request, timeout=self.timeout)  # noqa: S310
        except urllib.error.HTTPError as error:
            if error.code == 416:  # nothing is left to send, or the part is not of this file
                self.part.unlink(missing_ok=True)
            raise
        with answer:
            going_on = answer.status == 206
            have = have if going_on else 0
            total = have + int(answer.headers.get("Content-Length") or 0)
            with open(self.part, "ab" if going_on else "wb") as file:
                while block := answer.read(1 << 16):
                    file.write(block)
                    have += len(block)
                    self.tell(have / total if total else 0.0)
        if total and have < total:
            raise OSError(f"the line broke after {have} of {total} bytes; call again to go on from there")
        # A whole file is handed over and its part removed, so that a wrong one is not continued the next time.
        os.replace(self.part, output_file)
