"""A Chromium driven by its DevTools protocol over a pipe: opens a page, presses keys, counts bytes and long tasks.

The protocol goes over two file descriptors (`--remote-debugging-pipe`), a JSON message ended by a zero byte each:
nothing listens, and no client library is needed. Source: chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from netlayer.errors import CheckFailed, HardwareMissing

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_TIMEOUT_S = 600.0  # of a machine that others use too
_CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Tab": 9, "Escape": 27, "Home": 36, "End": 35}  # fmt: skip  # noqa: E501
_TRACED = ("toplevel", "disabled-by-default-devtools.timeline", "__metadata")
_TASKS = ("RunTask", "ThreadControllerImpl::RunTask")


def find_chromium() -> str | None:
    """Path of a Chromium; None: there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Task(NamedTuple):
    """A task of the page's main thread: how long it took, and for how long of that the thread had a processor."""

    wall_ms: float
    cpu_ms: float


class Browser:
    """One tab of a headless Chromium with a profile of its own; a context manager.

    Args:
        width, height: of the window in CSS pixels.
        dark: the page is told that the reader wants dark colours.

    Raises:
        HardwareMissing: there is no Chromium.
        CheckFailed: it does not answer in time, or an expression fails.
    """

    def __init__(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        program = find_chromium()
        if program is None:
            raise HardwareMissing(f"no Chromium on the PATH ({', '.join(NAMES)}); on Debian: apt-get install chromium")
        self._profile = tempfile.TemporaryDirectory(prefix="netlayer-chromium-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def place() -> None:  # the browser reads descriptor 3 and writes 4
            first, second = os.dup(to_read), os.dup(to_write)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [
                program,
                *_FLAGS,
                f"--user-data-dir={self._profile.name}",
                f"--window-size={width},{height}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,
            close_fds=False,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._rest, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        """Messages of the browser that answer nothing, in order."""
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            target = next(each["targetId"] for each in targets if each["type"] == "page")
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            # By the thread's own clock: what other programs take of the processors does not count.
            self.call("Performance.enable", timeDomain="threadTicks")
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            self.call("Emulation.setDeviceMetricsOverride", **metrics)
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            self.call("Emulation.setEmulatedMedia", features=scheme)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _exc: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the browser with all its processes. Twice is once."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, 9)
                self._process.wait()
        for descriptor in (self._read, self._write):
            if descriptor >= 0:
                os.close(descriptor)
        self._read = self._write = -1
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise CheckFailed(f"{method}: {answer['error'].get('message')}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, url: str) -> None:
        """Open a page and wait until its view is drawn."""
        self.call("Page.navigate", url=url)
        self.settle()

    def settle(self) -> None:
        """Wait until the page's view is drawn."""
        ready = "document.readyState === 'complete' && document.querySelector('#panel')?.dataset.state === 'shown'"
        self.wait_for(ready)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def evaluate(self, expression: str) -> Any:
        """Value of an expression in the page; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise CheckFailed(
                f"{expression[:80]}: {details.get('exception', {}).get('description', details.get('text'))}"
            )
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self._holds(expression):
            if time.monotonic() > deadline:
                raise CheckFailed(f"{expression[:120]}: not true after {timeout_s:.0f} s")
            time.sleep(0.05)

    def _holds(self, expression: str) -> bool:
        try:
            return bool(self.evaluate(f"Boolean({expression})"))
        except CheckFailed as exc:
            if "navigated" not in str(exc):
                raise
            return False  # the page loads anew

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key: a letter, or a name such as ArrowLeft."""
        text = key if len(key) == 1 else "\r" if key == "Enter" else ""
        common: dict[str, Any] = {"key": key, "modifiers": 8 if shift else 0}
        if key in _CODES:
            common |= {"windowsVirtualKeyCode": _CODES[key], "code": key}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page, of all its height where `whole`."""
        parameters: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}
            parameters["clip"] = clip
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **parameters)["data"]))

    def metrics(self) -> Mapping[str, float]:
        """Processor time of the main thread since the tab began: ScriptDuration, TaskDuration, LayoutDuration, s."""
        rows = self.call("Performance.getMetrics")["metrics"]
        return {row["name"]: row["value"] for row in rows}

    def transferred(self) -> int:
        """Bytes of all answers since the tab began, as they came over the wire."""
        done = (each for each in self.events if each.get("method") == "Network.loadingFinished")
        return round(sum(float(each["params"]["encodedDataLength"]) for each in done))

    def problems(self) -> list[str]:
        """Errors of the page: exceptions, messages of its console, what its security policy refused."""
        lines = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                lines.append(str(details.get("exception", {}).get("description", details["text"])))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                lines.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
                lines.append(" ".join(str(each.get("value", "")) for each in params["args"]))
        return lines

    @contextmanager
    def tasks(self) -> Iterator[list[Task]]:
        """Trace the page's main thread: the list has its tasks once the block is left, in order."""
        result: list[Task] = []
        first = len(self.events)
        config = {"includedCategories": list(_TRACED), "recordMode": "recordUntilFull"}
        self.call("Tracing.start", transferMode="ReportEvents", traceConfig=config)
        yield result
        self.evaluate("new Promise((done) => setTimeout(() => done(true), 300))")
        self.call("Tracing.end")
        deadline = time.monotonic() + _TIMEOUT_S
        while not any(event.get("method") == "Tracing.tracingComplete" for event in self.events[first:]):
            self.events.append(self._next(deadline, "Tracing.end"))
        rows = [
            row
            for event in self.events[first:]
            if event.get("method") == "Tracing.dataCollected"
            for row in event["params"]["value"]
        ]
        self.events[first:] = [event for event in self.events[first:] if "Tracing." not in event.get("method", "")]
        main = {
            (row["pid"], row["tid"])
            for row in rows
            if row.get("name") == "thread_name" and row["args"].get("name") == "CrRendererMain"
        }
        for row in sorted(rows, key=lambda one: float(one.get("ts", 0))):
            if row.get("name") in _TASKS and row.get("ph") == "X" and (row["pid"], row["tid"]) in main:
                wall_ms = float(row.get("dur", 0)) / 1e3
                result.append(Task(wall_ms, float(row["tdur"]) / 1e3 if "tdur" in row else wall_ms))

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        """Next message; CheckFailed if it does not come in time, or the browser has ended."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                state = f"has ended ({self._process.poll()})" if ready else f"did not answer in {_TIMEOUT_S:.0f} s"
                raise CheckFailed(f"{what}: the browser {state}")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message
