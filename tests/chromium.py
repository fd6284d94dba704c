"""Open a page in headless Chromium and ask it questions, over the pipe of its DevTools protocol: needs no package."""

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

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--no-first-run")
SECONDS = 60.0  #: that one answer may take


def chromium() -> str | None:
    """The path of the browser, None where none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page at a width; ``requests`` are the URLs it asked for, ``errors`` what its console reported."""

    def __init__(self, browser: str, path: Path, width: int, script: bool = True):
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process, self._write, self._read = _start(browser, self._folder.name)
        self._last, self._rest, self._session, self._loaded = 0, b"", "", False
        try:
            target = self._ask("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                self._ask(f"{domain}.enable")
            self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            self._ask("Emulation.setScriptExecutionDisabled", value=not script)
            self._ask("Page.navigate", url=path.resolve().as_uri())
            self._until(lambda: self._loaded)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        for end in (self._write, self._read):
            os.close(end)
        self._folder.cleanup()

    def value(self, expression: str):
        """The value of a JavaScript expression in the page. Raises AssertionError where it throws."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse on the middle of an element, as a person does."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self._ask("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press one key."""
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **({"text": text} if text and kind == "keyDown" else {}))

    def theme(self, name: str) -> None:
        """Prefer ``light`` or ``dark``."""
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path: Path) -> None:
        """Save what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    # -- the protocol: JSON messages that end in a zero byte ------------------------------------------------------------

    def _ask(self, method: str, **params) -> dict:
        self._last += 1
        wanted, answer = self._last, {}
        message = {"id": wanted, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")

        def answered() -> bool:
            return bool(answer)

        self._until(answered, wanted, answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _until(self, done, wanted: int = 0, answer: dict | None = None) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"Chromium gave no answer in {SECONDS:g} seconds")
            got = os.read(self._read, 1 << 16)
            if not got:
                raise RuntimeError("Chromium ended")
            *messages, self._rest = (self._rest + got).split(b"\0")
            for message in map(json.loads, messages):
                if answer is not None and message.get("id") == wanted:
                    answer.update(message)
                self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str | None, params: dict) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))


def _start(browser: str, folder: str) -> tuple[subprocess.Popen, int, int]:
    """(the browser, where it is written to, where it is read from). It takes file descriptors 3 and 4 for the protocol."""
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'  # a shell gives the pipes their numbers
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", browser, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}"],
        pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    return process, write, read
