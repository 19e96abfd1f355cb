"""A headless Chromium for tests of pages, spoken to over a pipe: no driver, no dependency."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = f"no browser: none of {', '.join(NAMES)} is on the PATH"
TIMEOUT = 120.0

_KEYS = {
    "Enter": 13, "Escape": 27, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37,
    "ArrowRight": 39, "End": 35, "Home": 36,
}  # fmt: skip


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process; each page is a tab of its own."""

    def __init__(self, executable: str, profile: Path) -> None:
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()
        # The protocol wants file descriptors 3 and 4.
        script = f'exec "$@" 3<&{theirs_read} 4>&{theirs_write} >"$0" 2>&1'
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", "--disable-component-update", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ]  # fmt: skip
        command = ["bash", "-c", script, str(profile.parent / "browser.log"), executable, *options]
        self._process = subprocess.Popen(command, pass_fds=(theirs_read, theirs_write))
        os.close(theirs_read)
        os.close(theirs_write)
        self._read, self._write = ours_read, ours_write
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            assert ready, f"the browser said nothing for {TIMEOUT:.0f} s"
            got = os.read(self._read, 1 << 16)
            assert got, "the browser is gone"
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, path: Path, **options: Any) -> Page:
        return Page(self, path, **options)

    def close(self) -> None:
        os.close(self._write)  # it ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)


class Page:
    """A loaded file.

    ``trouble`` lists exceptions, console errors, refused content, dialogs, and requests for
    anything but the file itself.
    """

    def __init__(
        self,
        browser: Browser,
        path: Path,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        script: bool = True,
    ) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._url = path.resolve().as_uri()
        self._first_event = len(browser.events)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}  # a drawing takes its time
        self._call("Emulation.setEmulatedMedia", features=[scheme, still])
        self._call("Performance.enable", timeDomain="threadTicks")
        self._call("Emulation.setScriptExecutionDisabled", value=not script)
        self._call("Page.navigate", url=self._url)
        self._wait_for_load()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def _wait_for_load(self) -> None:
        while not any(event["method"] == "Page.loadEventFired" for event in self._own_events()):
            self._browser.events.append(self._browser._next())

    def _own_events(self) -> list[dict[str, Any]]:
        events = self._browser.events[self._first_event :]
        return [event for event in events if event.get("sessionId") == self._session]

    @property
    def trouble(self) -> list[str]:
        self.evaluate("1")  # everything before it has been said
        found = []
        for event in self._own_events():
            method, params = event["method"], event["params"]
            if method == "Network.requestWillBeSent":
                if params["request"]["url"].split("#")[0] != self._url:
                    found.append(f"request: {params['request']['url']}")
            elif method in ("Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(params))
            elif method == "Page.javascriptDialogOpening":
                found.append(f"dialog: {params['message']}")
                self._call("Page.handleJavaScriptDialog", accept=True)
        return found

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys one after another; a text that is no key's name is typed."""
        for key in keys:
            if key in _KEYS:
                code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
                text = {"text": "\r"} if key == "Enter" else {}
                self._call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
                self._call("Input.dispatchKeyEvent", type="keyUp", **code)
                continue
            if len(key) > 1:
                self._call("Input.insertText", text=key)
                continue
            self._call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
            self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that matches, as a mouse does."""
        at = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": at[0], "y": at[1], "button": "left", "clickCount": 1}
            self._call("Input.dispatchMouseEvent", type=kind, **where)

    def cpu_seconds(self) -> float:
        """Return how long the page's thread has worked, whatever else the machine did."""
        metrics = self._call("Performance.getMetrics")["metrics"]
        [seconds] = [item["value"] for item in metrics if item["name"] == "TaskDuration"]
        return float(seconds)

    def text(self, selector: str) -> str:
        found = f"document.querySelector({json.dumps(selector)}).textContent.trim()"
        return str(self.evaluate(found))

    def texts(self, selector: str) -> list[str]:
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.evaluate(f"{found}.map((element) => element.textContent.trim())"))

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        options: dict[str, Any] = {"captureBeyondViewport": True} if whole else {}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {**size, "scale": 1}
        answer = self._call("Page.captureScreenshot", format="png", **options)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
