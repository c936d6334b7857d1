"""Downloads of image sets: checked by size and hash, resumable, cached."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple

from nhgd._path import check_name, expanded
from nhgd.errors import InputError, RunError, unknown


class Published(NamedTuple):
    """A file as it is published: its size in bytes, and its sums."""

    size: int
    sha256: str
    md5: str


@dataclass(frozen=True)
class Source:
    """An image set as it is published: mirrors, tried in turn, and its files."""

    mirrors: tuple[str, ...]
    files: dict[str, Published]


# Of every file the size and both sums are known, so that a mirror need not be trusted.
PUBLISHED = {
    "mnist": Source(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        {
            "train-images-idx3-ubyte.gz": Published(
                9912422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            ),
            "train-labels-idx1-ubyte.gz": Published(
                28881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "d53e105ee54ea40749a09fcbcd1e9432",
            ),
            "t10k-images-idx3-ubyte.gz": Published(
                1648877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "9fb629c4189551a2d022fa330f9573f3",
            ),
            "t10k-labels-idx1-ubyte.gz": Published(
                4542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        },
    ),
    "fashion-mnist": Source(
        (
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        ),
        {
            "train-images-idx3-ubyte.gz": Published(
                26421880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            ),
            "train-labels-idx1-ubyte.gz": Published(
                29515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "25c81989df183df01b3e8a0aad5dffbe",
            ),
            "t10k-images-idx3-ubyte.gz": Published(
                4422102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "bef4ecab320f06d8554ea6380940ec79",
            ),
            "t10k-labels-idx1-ubyte.gz": Published(
                5148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        },
    ),
}
SLOWEST = 10_000  # bytes a second on average over a file; slower downloads are aborted
PATIENCE = 60.0  # seconds beyond that, for names to be found and lines to be made
SILENCE = 30.0  # seconds without a byte after which a line counts as broken


def cache() -> Path:
    """Where fetched files are kept: NHGD_CACHE, else the user's own cache folder."""
    asked = os.environ.get("NHGD_CACHE")
    if asked:
        return expanded("NHGD_CACHE", asked)
    return Path(os.environ.get("XDG_CACHE_HOME") or expanded("The home folder", "~") / ".cache") / "nhgd"


def fetch(name: str, folder: Path | None = None, tell: Callable[[float, str], None] | None = None) -> list[Path]:
    """Download an image set, or its missing files; returns its four files.

    Existing correct files are kept, and interrupted downloads continue. If a mirror fails, sends a wrong file or is too
    slow, the next one is tried. Only a file with the right size and checksum gets its final name, and no more than that
    size is ever downloaded.

    Args:
        name: "mnist" or "fashion-mnist".
        folder: the target; default: `cache() / name`.
        tell: called with the fraction done and a short text.
    """
    if name not in PUBLISHED:
        raise unknown("image set", name, PUBLISHED)
    try:
        import pooch
    except ModuleNotFoundError:
        raise InputError("Downloading needs pooch: pip install 'nhgd[cli]'.") from None
    place = cache() / name if folder is None else folder
    check_name("The place for the files", place)
    published = PUBLISHED[name]
    found = []
    for number, (file, expected) in enumerate(published.files.items()):
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
                    known_hash=f"sha256:{expected.sha256}",
                    fname=file,
                    path=place,
                    downloader=Resuming(place / f"{file}.part", expected, partly),
                )
                found.append(Path(path))
                break
            except (OSError, ValueError, HTTPException) as error:
                reasons.append(f"{mirror} ({error.__class__.__name__}: {(str(error).splitlines() or ['no words'])[0]})")
        else:
            raise RunError(
                f"{file} of {name} could not be downloaded from any mirror: {'; '.join(reasons)}. Without a network,"
                f" copy {', '.join(published.files)} into a folder, and point --data or NHGD_DATA at it."
            )
    return found


class Resuming:
    """A downloader for pooch that continues an interrupted download and accepts only the expected file.

    Args:
        part: the partial file.
        expected: the complete file.
        tell: called with the fraction done.
        seconds: time limit of one try; default: by the size of the file.
    """

    def __init__(
        self, part: Path, expected: Published, tell: Callable[[float], None], seconds: float | None = None
    ) -> None:
        self.part = part
        self.expected = expected
        self.tell = tell
        self.seconds = PATIENCE + expected.size / SLOWEST if seconds is None else seconds

    def __call__(self, url: str, output_file: Any, _: Any, check_only: bool = False) -> None:
        """Fetch `url` into `output_file`, through the part that is there."""
        _check_web(url)
        self.part.parent.mkdir(parents=True, exist_ok=True)
        with Deadline(self.seconds) as deadline:
            # The partial file may have come from a faulty server: then the whole file is requested again.
            if not self._continued(url, self._length(), deadline):
                self._continued(url, 0, deadline)
        os.replace(self.part, output_file)

    def _length(self) -> int:
        """How much there is to go on from."""
        have = self.part.stat().st_size if self.part.exists() else 0
        return have if have <= self.expected.size else 0

    def _is_right(self) -> bool:
        content = self.part.read_bytes()
        sums = hashlib.sha256(content).hexdigest(), hashlib.md5(content, usedforsecurity=False).hexdigest()
        return sums == (self.expected.sha256, self.expected.md5)

    def _continued(self, url: str, have: int, deadline: Deadline) -> bool:
        """Request the missing part; whether the file is complete. A wrong complete file is an error."""
        begun = have
        if have < self.expected.size:
            request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})  # noqa: S310  checked
            try:
                answer = deadline.opener().open(request, timeout=min(SILENCE, self.seconds))
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 416:  # nothing is left to send, or the part is not of this file
                    return False
                raise
            with answer:
                going_on = answer.status == 206
                have = have if going_on else 0
                have += self._taken(answer, have, "ab" if going_on else "wb", deadline)
            deadline.check()
        if have < self.expected.size:
            raise OSError(
                f"the connection broke after {have} of {self.expected.size} bytes; call again to continue from there"
            )
        right = self._is_right()
        if not right and not begun:
            self.part.unlink()
            raise ValueError("the download has another checksum than the published file")
        return right

    def _taken(self, answer: Any, have: int, mode: str, deadline: Deadline) -> int:
        """Append the response to the partial file; returns the number of bytes."""
        said = answer.headers.get("Content-Length", "")
        if said.isdecimal() and have + int(said) > self.expected.size:
            raise ValueError(f"it offers {have + int(said)} bytes, and the file has {self.expected.size}")
        taken = 0
        with open(self.part, mode) as file:
            while block := answer.read1(1 << 16):
                deadline.check()
                taken += len(block)
                if have + taken > self.expected.size:
                    raise ValueError(f"it sends more than the {self.expected.size} bytes of the file")
                file.write(block)
                self.tell((have + taken) / self.expected.size)
        return taken


class Deadline:
    """A limit of time for a download in all: at its end the line is cut, also while a server drips its first line."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.passed = False
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        self._timer.cancel()
        if isinstance(error, (OSError, HTTPException)):
            self.check()  # the broken connection is the cause, whatever the error looks like

    def check(self) -> None:
        """Raise when the time is over."""
        if self.passed:
            raise TimeoutError(f"it took more than {self.seconds:.0f} s; call again to continue from there")

    def opener(self) -> urllib.request.OpenerDirector:
        """What opens pages of the web, and nothing else, within this limit."""
        opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            _Web(self),
            _SecureWeb(self),
            _Redirects(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
        ):
            opener.add_handler(handler)
        return opener

    def watch(self, line: socket.socket) -> None:
        """A line that is to be cut at the end."""
        self._sockets.append(line)
        if self.passed:
            self._cut()

    def _cut(self) -> None:
        self.passed = True
        for line in self._sockets:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from https to an insecure address."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_web(newurl)
        if req.full_url.startswith("https://") and not newurl.startswith("https://"):
            raise ValueError(f"it leads from https to {newurl}, which is not secure")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Web(urllib.request.HTTPHandler):
    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_watched(HTTPConnection, self._deadline), req)


class _SecureWeb(urllib.request.HTTPSHandler):
    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_watched(HTTPSConnection, self._deadline), req)


def _watched(kind: type[HTTPConnection], deadline: Deadline) -> Any:
    """A connection that enforces its deadline on its socket."""

    class Watched(kind):  # type: ignore[misc, valid-type]  # plain or secure
        def connect(self) -> None:
            super().connect()
            deadline.watch(self.sock)

    return Watched


def _check_web(url: str) -> None:
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"only http and https are fetched, not {url}")
