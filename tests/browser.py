"""A headless Chromium driven over WebDriver (W3C) by plain HTTP, for tests that look at the page as people do."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from running import await_true

from llamaops.dirs import find_dirs

AXE = "axe-core@4.10.3"
AXE_SHA512 = "Xm7bpRXnDSX2YE2YFfBk2FnF0ep6tmG7xPh8iHee8MIcrgq762Nkce856dYtJYLkuIoYZvGfTs/PbZhideTcEg=="

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]


def missing() -> str | None:
    """Return why there is no browser here, None when there is one."""
    absent = [name for name in ("chromium", "chromedriver", "npm") if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed (Debian: apt install chromium chromium-driver npm)" if absent else None


def axe() -> str:
    """Return axe-core, the accessibility checker, as JavaScript: fetched by npm once, then kept in the cache."""
    kept = find_dirs(os.environ).cache / f"{AXE.replace('@', '-')}.min.js"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            subprocess.run(["npm", "pack", AXE, "--silent"], cwd=folder, check=True, capture_output=True, timeout=240)
            package = next(Path(folder).glob("*.tgz"))
            assert base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode() == AXE_SHA512
            with tarfile.open(package) as archive:
                script = archive.extractfile("package/axe.min.js")
                assert script is not None
                (Path(folder) / "axe.min.js").write_bytes(script.read())
            (Path(folder) / "axe.min.js").replace(kept)
    return kept.read_text()


class Browser:
    """One session."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def _post(self, path: str, **body: Any) -> Any:
        answer = self._client.post(f"/session/{self._session}{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def go(self, url: str) -> None:
        """Load a page."""
        self._post("/url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """Run JavaScript in the page and return its value."""
        return self._post("/execute/sync", script=script, args=list(args))

    def text(self, selector: str) -> str:
        """Return what an element shows."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def keys(self, text: str) -> None:
        """Type into the focused element; \\ue004 is Tab, \\ue007 Enter (WebDriver §17.4.2)."""
        presses = [{"type": kind, "value": char} for char in text for kind in ("keyDown", "keyUp")]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": presses}])

    def console(self) -> list[str]:
        """Return what the console has said since the last call, warnings and errors only."""
        lines = self._post("/se/log", type="browser")
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "WARNING")]

    def devtools(self, command: str, **params: Any) -> Any:
        """Send a DevTools command."""
        return self._post("/goog/cdp/execute", cmd=command, params=params)

    def screenshot(self, path: Path) -> None:
        """Save the whole page, not only what the window shows."""
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: Path, width: int = 1100, height: int = 900) -> Iterator[Browser]:
    """Start a browser with an empty profile in ``folder``; it and its driver are gone afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
            await_true(lambda: _is_up(client), what="chromedriver answers")
            options = {"args": [*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]}
            wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options,
                                      "goog:loggingPrefs": {"browser": "ALL"}}}
            answer = client.post("/session", json={"capabilities": wanted}).json()["value"]
            session = answer.get("sessionId")
            assert session, answer
            try:
                yield Browser(client, session)
            finally:
                client.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait(60)


def _is_up(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return bool(client.get("/status").json()["value"]["ready"])
    return False
