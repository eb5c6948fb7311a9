"""A headless Chromium, driven by the DevTools protocol over a pipe; needs no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_FLAGS = (
    "--headless=new --remote-debugging-pipe --no-first-run --disable-gpu --disable-extensions "
    "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars "
    "--disable-dev-shm-usage --no-default-browser-check --mute-audio"
).split()


class Browser:
    """One browser with one page.

    Attributes:
        problems: console errors, exceptions and refusals since the page was opened.
        requests: addresses that the page asked for, but for itself and data within it.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._number, self._rest, self._answers = 0, b"", {}
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        flags = [*_FLAGS, f"--user-data-dir={self._profile}"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        pipes = f'exec "$@" 3</dev/fd/{to_read} 4>/dev/fd/{to_write}'
        self._process = subprocess.Popen(
            ["sh", "-c", pipes, "sh", CHROMIUM, *flags, "about:blank"],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._session = None
        targets = self._ask("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, path: Path, width: int = 1280, height: int = 800) -> None:
        """Opens a file and waits until it is loaded."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._page = path.resolve().as_uri()
        self.problems.clear()
        self.requests.clear()
        self._ask("Page.navigate", url=self._page)
        self.wait("location.protocol === 'file:' && document.readyState === 'complete'")

    def theme(self, name: str) -> None:
        """Prefers a `light` or a `dark` page from now on."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self._ask("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 120) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"waited {seconds} s for {condition}"
            time.sleep(0.02)

    def point(self, x: float, y: float, *, click: bool = False) -> None:
        """Moves the mouse to a place of the window, and clicks where asked."""
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self._ask(
                    "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
                )

    def press(self, key: str, text: str = "") -> None:
        """Presses and releases a key."""
        self._ask("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, text=text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Writes what is shown as a PNG, by default the whole page."""
        found = self._ask("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while self._number not in self._answers:
            self._read()
        answer = self._answers.pop(self._number)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _read(self) -> None:
        ready, _, _ = select.select([self._in], [], [], 60)
        assert ready, "the browser does not answer"
        data = os.read(self._in, 2**20)
        assert data, "the browser has ended"
        *messages, self._rest = (self._rest + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "assert"):
            self.problems.append(str(event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.problems.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = event["request"]["url"]
            if url != self._page and not url.startswith(("data:", "blob:")):
                self.requests.append(url)
