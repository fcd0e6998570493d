"""A real Chromium without a window, driven by its own driver over the WebDriver protocol."""

import base64
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import httpx

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")
OBSTACLE = (
    None
    if CHROMIUM and DRIVER
    else "no chromium and chromedriver here: apt-get install chromium chromium-driver"
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window."""

    def __init__(self, driver_url, session):
        self._client = httpx.Client(base_url=f"{driver_url}/session/{session}", timeout=60)

    def _call(self, method, path, body=None):
        json = {} if body is None and method == "POST" else body
        answer = self._client.request(method, path, json=json).json()["value"]
        if isinstance(answer, dict) and "stacktrace" in answer:
            raise AssertionError(f"{answer['error']}: {answer['message'][:300]}")
        return answer

    def open(self, url):
        self._call("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        """What a function body returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector):
        return self.run(f"return document.querySelector({selector!r})?.textContent ?? null")

    def count(self, selector):
        return self.run(f"return document.querySelectorAll({selector!r}).length")

    def type(self, selector, text):
        """Into one element, or into what has the focus."""
        found = {"using": "css selector", "value": selector}
        element = self._call("POST", "/element", found) if selector else self._active()
        self._call("POST", f"/element/{element[_ELEMENT]}/value", {"text": text})

    def _active(self):
        return self._call("GET", "/element/active")

    def click(self, selector):
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{element[_ELEMENT]}/click")

    def until(self, condition, seconds=30):
        """Waits for a Python condition."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.03)
        return found

    def emulate(self, width, height, *, scheme="light", scale=1):
        """A screen of that size, in pixels of CSS, that is light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.command("Emulation.setEmulatedMedia", media)

    def command(self, name, parameters):
        """One of the DevTools protocol."""
        self._call("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def log(self):
        """What the console was told of, such as a violated policy.

        A page may have asked a server for its state after that server's end, which says nothing.
        """
        entries = self._call("POST", "/se/log", {"type": "browser"})
        told = [one["message"] for one in entries if one["level"] in ("SEVERE", "WARNING")]
        return [one for one in told if not one.endswith("net::ERR_CONNECTION_REFUSED")]

    def screenshot(self, path):
        pathlib.Path(path).write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def close(self):
        try:
            self._client.request("DELETE", str(self._client.base_url).rstrip("/"))
        finally:
            self._client.close()


@contextlib.contextmanager
def chromium():
    """A browser with a profile of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [DRIVER, f"--port={port}", "--log-level=OFF"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"HOME": profile},
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(f"{url}/status")
            options = {
                "binary": CHROMIUM,
                "args": [
                    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                    f"--user-data-dir={profile}/data", "--window-size=1280,900",
                    "--no-proxy-server",
                ],
            }  # fmt: skip
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = httpx.post(
                f"{url}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=120
            ).json()["value"]
            assert "sessionId" in made, made
            browser = Browser(url, made["sessionId"])
            try:
                yield browser
            finally:
                browser.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever is left of the browser
            process.wait()


def _wait_for(url):
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).json()["value"]["ready"]:
                return
        assert time.monotonic() < deadline, "chromedriver does not answer"
        time.sleep(0.05)
