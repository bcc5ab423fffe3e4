"""A page in a headless chromium, driven over a pipe: what it shows, what it complains of, and whom it asks."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.conftest import CHROMIUM

# Without a sandbox, which needs rights that a container does not give; the pages are our own.
_FLAGS = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --disable-background-networking".split()


class Browser:
    """A browser with one page; a context manager."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions, and requests that failed."""
        self.requested: list[str] = []
        """The address of each request."""
        self._last = 0

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        found = next(filter(None, map(shutil.which, CHROMIUM)))
        # The browser reads from 3 and writes to 4.
        command = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", found, *_FLAGS, f"--user-data-dir={self._profile.name}"],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._waiting = b""
        self._session = ""
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the browser's protocol, and return its result."""
        self._last += 1
        session = {"sessionId": self._session} if self._session else {}
        asked = {"id": self._last, "method": method, "params": params} | session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._last:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result
            self._note(told.get("method", ""), told.get("params", {}))

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        """Go to a page, on a screen of this size in pixels."""
        is_narrow = width < 600
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_narrow)
        self("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return what a script gives."""
        done = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> Any:
        """Return what a script gives once that is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.1)
        return value

    def screenshot(self, path: Path, is_whole: bool = False) -> None:
        """Write a picture of the page: of what is seen, or of all of it."""
        taken = self("Page.captureScreenshot", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def asked_elsewhere(self, host: str) -> list[str]:
        """Return the requests that went to other hosts than this one."""
        return [
            url
            for url in self.requested
            if urlsplit(url).scheme.startswith(("http", "ws")) and urlsplit(url).hostname != host
        ]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            read = os.read(self._from, 2**16)
            assert read, "the browser has ended"
            self._waiting += read
        told, _, self._waiting = self._waiting.partition(b"\0")
        result: dict[str, Any] = json.loads(told)
        return result

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif event == "Network.webSocketCreated":
            self.requested.append(params["url"])
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(said.get("value", said.get("description"))) for said in params["args"]))
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
