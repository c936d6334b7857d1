"""Downloads, from a server of our own: sums, mirrors, going on after a broken line, no network."""

from __future__ import annotations

import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

import nhgd
from nhgd.cli.program import app
from nhgd.data import fetch as fetching
from nhgd.data.fetch import PUBLISHED, Published, cache, fetch
from nhgd.data.idx import find

FILES = {
    "train-images-idx3-ubyte.gz": gzip.compress(bytes(range(256)) * 400, mtime=0),
    "train-labels-idx1-ubyte.gz": b"labels" * 1000,
    "t10k-images-idx3-ubyte.gz": b"images" * 3000,
    "t10k-labels-idx1-ubyte.gz": b"few",
}


class Mirror(BaseHTTPRequestHandler):
    """Serves FILES, in part when asked; under /broken it stops half way, under /lying it sends something else."""

    asked: list[tuple[str, str | None]]

    def do_GET(self):
        kind, name = self.path.strip("/").split("/")
        asked = self.headers.get("Range")
        type(self).asked.append((self.path, asked))
        body = FILES[name] if kind != "lying" else b"x" * len(FILES[name])
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        rest = body[start:]
        self.wfile.write(rest[: len(rest) // 2] if kind == "broken" and not asked else rest)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    Mirror.asked = []
    running = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("NHGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NHGD_DATA", raising=False)
    sums = {name: hashlib.md5(body).hexdigest() for name, body in FILES.items()}
    base = f"http://127.0.0.1:{running.server_address[1]}"

    def publish(*kinds):
        mirrors = tuple(f"{base}/{kind}/" for kind in kinds)
        monkeypatch.setitem(PUBLISHED, "mnist", Published(mirrors, sums))

    yield publish
    running.shutdown()
    running.server_close()
    thread.join()


def test_four_files_arrive_and_are_not_fetched_again(server):
    server("good")
    told = []
    files = fetch("mnist", tell=lambda done, words: told.append(done))
    assert [file.read_bytes() for file in files] == list(FILES.values())
    assert all(file.parent == cache() / "mnist" for file in files)
    assert told == sorted(told)
    assert told[-1] == 1.0
    asked = len(Mirror.asked)
    assert fetch("mnist") == files
    assert len(Mirror.asked) == asked
    assert find("mnist", None, cached=True) == cache() / "mnist"
    assert find("mnist", None) is None


def test_a_broken_line_goes_on_where_it_stopped(server):
    server("broken")
    with pytest.raises(nhgd.RunError, match="the line broke after"):
        fetch("mnist")
    part = cache() / "mnist" / "train-images-idx3-ubyte.gz.part"
    have = part.stat().st_size
    assert 0 < have < len(FILES["train-images-idx3-ubyte.gz"])
    server("good")
    assert len(fetch("mnist")) == 4
    assert ("/good/train-images-idx3-ubyte.gz", f"bytes={have}-") in Mirror.asked
    assert not part.exists()


def test_a_lying_mirror_is_followed_by_the_next(server):
    server("lying", "good")
    assert len(fetch("mnist")) == 4
    server("lying")
    other = cache() / "elsewhere"
    with pytest.raises(nhgd.RunError, match="could not be downloaded from any mirror"):
        fetch("mnist", other)
    assert not list(other.glob("*.gz"))


def test_without_a_network_it_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(PUBLISHED, "mnist", Published(("http://127.0.0.1:9/",), PUBLISHED["mnist"].files))
    result = CliRunner().invoke(app, ["data", "fetch", "mnist", "--out", str(tmp_path / "new")])
    assert result.exit_code == 1
    assert "point --data or NHGD_DATA at it" in result.stderr
    assert not list((tmp_path).rglob("*.gz"))


def test_the_command(server, tmp_path):
    server("good")
    result = CliRunner().invoke(app, ["data", "fetch", "mnist", "--out", str(tmp_path / "mnist"), "--json"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").read_bytes() == b"few"
    result = CliRunner().invoke(app, ["data", "fetch", "mnits"])
    assert result.exit_code == 2
    assert "Did you mean 'mnist'" in result.stderr


def test_only_the_web_is_fetched(tmp_path):
    with pytest.raises(ValueError, match="only http"):
        fetching.Resuming(tmp_path / "x", lambda done: None)("file:///etc/hostname", tmp_path / "y", None)
