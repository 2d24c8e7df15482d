"""A headless Chromium, driven over the WebDriver protocol with an HTTP client; no other package."""

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key of an element's id
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
           "--no-first-run", "--disable-extensions", "--disable-background-networking",
           "--disable-component-update", "--disable-sync", "--hide-scrollbars",
           "--no-proxy-server"]  # fmt: skip


def binary() -> str | None:
    """Return the path of the browser, or None."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def missing() -> str:
    """Return why there is no browser, or an empty text."""
    if binary() and shutil.which("chromedriver"):
        return ""
    return "no browser: install the packages chromium and chromium-driver"


class Browser:
    """A session with one window. Selectors are CSS."""

    def __init__(self, driver: str, session: str, client: httpx.Client):
        self._base, self._client = f"{driver}/session/{session}", client

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        json = (body or {}) if method == "POST" else None
        answer = self._client.request(method, self._base + path, json=json)
        value = answer.json()["value"]
        if answer.is_error:
            raise AssertionError(f"{path}: {value['error']}: {value['message']}")
        return value

    def open(self, url: str) -> None:
        """Go to an address, and wait for it to load."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the result of a function's body."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def frame(self) -> None:
        """Wait until changes that scripts made are drawn."""
        script = "requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))"
        self._call("POST", "/execute/async", {"script": script, "args": []})

    def text(self, selector: str) -> str:
        """Return the visible text of all elements, joined by lines."""
        found = f"[...document.querySelectorAll({selector!r})]"
        return self.run(f"return {found}.map((each) => each.innerText).join('\\n')")

    def count(self, selector: str) -> int:
        """Return the number of elements that are displayed."""
        found = f"[...document.querySelectorAll({selector!r})]"
        return self.run(f"return {found}.filter((each) => each.getClientRects().length).length")

    def click(self, selector: str) -> None:
        """Click on the first element as a mouse does: it has to be visible and uncovered."""
        self._call("POST", f"/element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field, by keys. "\\ue007" is Enter."""
        element = self._find(selector)
        self._call("POST", f"/element/{element}/clear")
        self._call("POST", f"/element/{element}/value", {"text": text})

    def press(self, keys: str) -> None:
        """Press keys on the element that has the focus."""
        element = self._call("GET", "/element/active")[ELEMENT]
        self._call("POST", f"/element/{element}/value", {"text": keys})

    def _find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return found[ELEMENT]

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 10.0) -> Any:
        """Wait until a condition holds and is drawn, and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition():
                self.frame()
                return value
            time.sleep(0.02)
        raise AssertionError(f"{what}: not within {seconds} s; the page shows: {self.text('body')}")

    def devtools(self, command: str, **parameters: Any) -> Any:
        """Run a command of Chromium's own protocol."""
        body = {"cmd": command, "params": parameters}
        return self._call("POST", "/goog/cdp/execute", body)

    def problems(self) -> list[str]:
        """Return the errors of the console since the last call, except failed requests."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        texts = [entry["message"] for entry in entries if entry["level"] == "SEVERE"]
        return [text for text in texts if "Failed to load resource" not in text]


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Start a browser whose profile is in a folder; it ends with the context."""
    command = ["chromedriver", "--port=0", "--log-level=WARNING"]
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        httpx.Client(timeout=60, trust_env=False) as client,
    ):
        try:
            assert process.stdout is not None
            started = (re.search(r"started successfully on port (\d+)", s) for s in process.stdout)
            port = next(found[1] for found in started if found)
            driver = f"http://127.0.0.1:{port}"
            arguments = [*OPTIONS, f"--user-data-dir={folder}", "--window-size=1280,800"]
            chrome = {"binary": binary(), "args": arguments}
            always = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
            asked = {"capabilities": {"alwaysMatch": always}}
            answer = client.post(f"{driver}/session", json=asked)
            assert answer.is_success, answer.text
            session = answer.json()["value"]["sessionId"]
            try:
                yield Browser(driver, session, client)
            finally:
                client.delete(f"{driver}/session/{session}")
        finally:
            process.terminate()
