"""A page in headless Chromium that a test uses as a person does: it types, presses keys and looks at the page.

The browser is driven by the DevTools protocol over a pair of pipes: JSON messages that end with a zero byte.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.browser.chromium import chromium, chromium_environment

TIMEOUT_S = 60.0  # for a stuck browser; a normal one answers within milliseconds
_LOWEST_FD = 10  # keeps the pipes away from 3 and 4, which Chromium expects
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}
_SHIFT = 8


class Browser:
    """A running Chromium."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self._process, self._to, self._from = process, to_browser, from_browser
        self._numbers = itertools.count(1)
        self._rest = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    def open(self, url: str, *, width: int = 1280, height: int = 800, setup: str = "") -> Page:
        """Open a page in a new tab with storages of its own. `setup` is a script that runs before the page's own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        if setup:
            page.call("Page.addScriptToEvaluateOnNewDocument", source=setup)
        page.go_to(url)
        return page

    def call(self, method: str, session: str = "", **parameters: Any) -> Any:
        """Call a method and return its result. Raises RuntimeError for an error."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while number not in self._answers:
            self._receive(deadline)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self, deadline: float) -> None:
        """Wait for messages. Keep answers, and hand events to their pages. Raises TimeoutError."""
        if not select.select([self._from], [], [], max(0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"Chromium did not answer within {TIMEOUT_S:.0f} s")
        *messages, self._rest = (self._rest + os.read(self._from, 1 << 20)).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.hear(message["method"], message["params"])


class Page:
    """One page.

    requests    the methods and URLs of everything that the page has requested, including documents
    complaints  console messages and refusals by the page's policy, without failed requests
    dialogs     the texts of alert() and similar functions
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.requests: list[tuple[str, str]] = []
        self.complaints: list[str] = []
        self.dialogs: list[str] = []

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def hear(self, method: str, event: dict[str, Any]) -> None:
        """Record an event."""
        if method == "Network.requestWillBeSent":
            self.requests.append((event["request"]["method"], event["request"]["url"]))
        elif method == "Log.entryAdded" and event["entry"]["source"] != "network":  # responses with an error status
            self.complaints.append(event["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(" ".join(str(one.get("value", one)) for one in event["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(event["exceptionDetails"].get("exception", {}).get("description", str(event)))
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(event["message"])

    def go_to(self, url: str) -> None:
        """Load a URL and wait until the document is complete."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def reload(self) -> None:
        self.evaluate("window.isOld = true")
        self.call("Page.reload")
        self.wait_for("!window.isOld && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, or of the promise that it gives. Raises AssertionError if it throws."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"{expression}: {self.text('body')}\n{self.complaints}"
            time.sleep(0.01)

    def text(self, selector: str) -> str:
        """Return the text that a person sees in the first element that matches."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        found = self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)")
        assert isinstance(found, list)
        return found

    def is_shown(self, selector: str) -> bool:
        return bool(self.evaluate(f"document.querySelector({json.dumps(selector)})?.checkVisibility()"))

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element, once it is shown."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait_for(f"{found}?.checkVisibility()")
        self.evaluate(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Write a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        fields: dict[str, Any] = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": _KEYS[key],
            "modifiers": _SHIFT * shift,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, **features: str) -> None:
        """Set the user's preferences, such as color_scheme="dark" or reduced_motion="reduce"."""
        wanted = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=wanted)

    def go_offline(self, offline: bool = True) -> None:
        """Cut the page off from the network, or connect it again. Open connections stay open."""
        self.call(
            "Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )

    def controls(self) -> list[tuple[str, str]]:
        """Return the roles and names of all controls, as screen readers get them."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node["name"]["value"])
            for node in nodes
            if any(one["name"] == "focusable" for one in node.get("properties", ()))
            and node["role"]["value"] != "RootWebArea"
        ]

    def screenshot(self, target: Path) -> None:
        """Write a PNG of what is in the window."""
        target.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(home: Path) -> Iterator[Browser]:
    """Run Chromium while the block runs. `home` is an empty folder for its files."""
    if sys.platform == "win32":
        raise NotImplementedError("needs file descriptors that child processes inherit")
    import fcntl

    to_browser, from_browser = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD) for fd in (to_browser[0], from_browser[1])]

    def connect() -> None:
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    process = subprocess.Popen(
        chromium(home, "--remote-debugging-pipe", "about:blank"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=chromium_environment(home),
        close_fds=False,  # only 3 and 4 can be inherited anyway
        preexec_fn=connect,
    )
    for fd in (to_browser[0], from_browser[1], *theirs):
        os.close(fd)
    running = Browser(process, to_browser[1], from_browser[0])
    try:
        yield running
        running.call("Browser.close")
    finally:
        os.close(to_browser[1])
        os.close(from_browser[0])
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
