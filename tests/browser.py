"""Headless Chromium by ChromeDriver's own protocol (W3C WebDriver), with the standard library alone."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


def missing() -> str | None:
    """Why there is no browser; None if there is one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(absent)} (on Debian: apt-get install chromium chromium-driver)" if absent else None


class Browser:
    """A window."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, way: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if way == "POST" else None
        request = urllib.request.Request(
            f"{self._address}{path}", data, {"Content-Type": "application/json"}, method=way
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.loads(reply.read())["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.loads(error.read())["value"]["message"]) from None

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.ask("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def open(self, page: Path, width: int = 1400, height: int = 1000, dark: bool = False, scale: float = 1) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("POST", "/url", url=page.resolve().as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a piece of JavaScript returns."""
        return self.ask("POST", "/execute/sync", script=script, args=list(arguments))

    def click(self, selector: str) -> None:
        found = self.ask("POST", "/element", using="css selector", value=selector)
        self.ask("POST", f"/element/{next(iter(found.values()))}/click")

    def press(self, keys: str) -> None:
        """Keys to whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("POST", "/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the last call."""
        return [entry["message"] for entry in self.ask("POST", "/se/log", type="browser")]

    def requests(self) -> list[str]:
        """What the page has asked for beside itself and what it holds."""
        names = self.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
        return [name for name in names if not name.startswith("data:")]

    def screenshot(self, file: Path, whole: bool = True) -> Path:
        size = self.run("return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        clip = {"clip": {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}} if whole else {}
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        file.write_bytes(base64.b64decode(shot["data"]))
        return file


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in a folder."""
    driver = subprocess.Popen(
        [shutil.which("chromedriver") or "chromedriver", "--port=0"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert driver.stdout is not None
        line = next(line for line in driver.stdout if "successfully on port" in line)
        address = f"http://127.0.0.1:{line.rstrip().rstrip('.').split()[-1]}"
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={folder}"]}
        asked = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        session = Browser(address).ask("POST", "/session", capabilities=asked)["sessionId"]
        window = Browser(f"{address}/session/{session}")
        try:
            yield window
        finally:
            window.ask("DELETE", "")
            time.sleep(0.1)  # until it has let go of its profile
    finally:
        driver.terminate()
        driver.wait(timeout=20)
        assert driver.stdout is not None
        driver.stdout.close()
