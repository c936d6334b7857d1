"""Downloads, from a server of our own: sums, mirrors, limits, going on after a broken line, no network."""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

import nhgd
from nhgd.cli._program import app
from nhgd.data import fetch as fetching
from nhgd.data.fetch import PUBLISHED, Published, Resuming, Source, cache, fetch
from nhgd.data.idx import find

FILES = {
    "train-images-idx3-ubyte.gz": gzip.compress(bytes(range(256)) * 400, mtime=0),
    "train-labels-idx1-ubyte.gz": b"labels" * 1000,
    "t10k-images-idx3-ubyte.gz": b"images" * 3000,
    "t10k-labels-idx1-ubyte.gz": b"few",
}


class Mirror(BaseHTTPRequestHandler):
    """Serves FILES, in part when asked, and under names of their own does what bad servers do.

    /broken stops half way, /lying sends something else, /larger announces too much and /endless sends it unannounced,
    /dripping sends a byte now and then, /mute its first line so, and /to-SCHEME leads elsewhere.
    """

    asked: list[tuple[str, str | None]]
    sent: int

    def do_GET(self):
        kind, name = self.path.strip("/").split("/")
        asked = self.headers.get("Range")
        type(self).asked.append((self.path, asked))
        try:
            if kind in ("larger", "endless", "dripping", "mute"):
                self.misbehave(kind)
                return
        except OSError:  # the other side has had enough
            return
        if kind.startswith("to-"):
            self.send_response(302)
            self.send_header("Location", f"{kind.removeprefix('to-')}://127.0.0.1:9/{name}")
            self.end_headers()
            return
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

    def misbehave(self, kind):
        over = type(self).over
        if kind == "mute":
            while not over.wait(0.02):
                self.wfile.write(b"H")
                self.wfile.flush()
            return
        self.send_response(200)
        if kind == "larger":
            self.send_header("Content-Length", str(10**9))
        self.end_headers()
        while not over.wait(0.02 if kind == "dripping" else 0.0):
            block = b"x" if kind == "dripping" else b"x" * 10_000
            self.wfile.write(block)
            self.wfile.flush()
            type(self).sent += len(block)

    def log_message(self, *_):
        pass


def published(body):
    return Published(len(body), hashlib.sha256(body).hexdigest(), hashlib.md5(body).hexdigest())


@pytest.fixture
def server(monkeypatch, tmp_path):
    Mirror.asked, Mirror.sent, Mirror.over = [], 0, threading.Event()
    running = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("NHGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NHGD_DATA", raising=False)
    sums = {name: published(body) for name, body in FILES.items()}
    base = f"http://127.0.0.1:{running.server_address[1]}"

    def publish(*kinds):
        mirrors = tuple(f"{base}/{kind}/" for kind in kinds)
        monkeypatch.setitem(PUBLISHED, "mnist", Source(mirrors, sums))

    yield publish
    Mirror.over.set()
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
    with pytest.raises(nhgd.RunError, match="the connection broke after"):
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
    monkeypatch.setitem(PUBLISHED, "mnist", Source(("http://127.0.0.1:9/",), PUBLISHED["mnist"].files))
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
    loader = Resuming(tmp_path / "x", published(b"few"), lambda done: None)
    for url in ("file:///etc/hostname", "ftp://127.0.0.1/x", "data:,x", "/etc/hostname"):
        with pytest.raises(ValueError, match="only http"):
            loader(url, tmp_path / "y", None)


@pytest.mark.parametrize("scheme", ["ftp", "file", "gopher"])
def test_a_server_does_not_lead_out_of_the_web(server, scheme):
    server(f"to-{scheme}")
    with pytest.raises(
        nhgd.RunError, match=f"only http and https are fetched, not {scheme}|Redirection to url .{scheme}"
    ):
        fetch("mnist")
    assert not list(cache().rglob("*.gz"))


def test_a_secure_server_does_not_lead_to_one_that_is_not():
    follow = fetching._Redirects().redirect_request
    asked = urllib.request.Request("https://127.0.0.1/x")
    assert follow(asked, None, 302, "", {}, "https://127.0.0.1/y").full_url == "https://127.0.0.1/y"
    with pytest.raises(ValueError, match="not secure"):
        follow(asked, None, 302, "", {}, "http://127.0.0.1/y")


@pytest.mark.parametrize(("kind", "words"), [("larger", "offers 1000000000 bytes"), ("endless", "sends more than")])
def test_no_more_is_taken_than_the_file_has(server, kind, words):
    server(kind, "good")
    assert len(fetch("mnist")) == 4
    server(kind)
    with pytest.raises(nhgd.RunError, match=words):
        fetch("mnist", cache() / "elsewhere")
    assert [file.stat().st_size for file in (cache() / "elsewhere").glob("*") if file.suffix != ".part"] == []
    sizes = {name: len(body) for name, body in FILES.items()}
    for part in (cache() / "elsewhere").glob("*.part"):
        assert part.stat().st_size <= sizes[part.stem]


@pytest.mark.parametrize("kind", ["dripping", "mute"])
def test_a_download_ends_when_its_time_is_over(server, kind, monkeypatch):
    """Without the limit both go on for ever: a byte comes long before the line counts as silent."""
    monkeypatch.setattr(fetching, "PATIENCE", 0.3)
    monkeypatch.setattr(fetching, "SLOWEST", 10**9)
    server(kind)
    with pytest.raises(nhgd.RunError, match="it took more than"):
        fetch("mnist")
    assert not list(cache().rglob("*.gz"))


@pytest.mark.parametrize("size", [500, 6000, 10**5])
def test_a_wrong_part_is_not_the_end(server, size):
    """Of a part that a lying server left, or of another file, nothing stays."""
    server("good")
    place = cache() / "mnist"
    place.mkdir(parents=True)
    (place / "train-labels-idx1-ubyte.gz.part").write_bytes(b"x" * size)
    assert [path.read_bytes() for path in fetch("mnist")] == list(FILES.values())
    assert not list(place.glob("*.part"))


def test_what_is_published_is_fetched_over_secure_lines_and_told_by_both_sums():
    for source in PUBLISHED.values():
        assert len(source.files) == 4
        assert all(mirror.startswith("https://") for mirror in source.mirrors)
        for size, sha256, md5 in source.files.values():
            assert 1000 < size < 30_000_000
            assert re.fullmatch("[0-9a-f]{64}", sha256)
            assert re.fullmatch("[0-9a-f]{32}", md5)
    every = [found for source in PUBLISHED.values() for found in source.files.values()]
    assert len({found.sha256 for found in every}) == len({found.md5 for found in every}) == 8
