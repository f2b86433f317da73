"""A headless Chromium driven over a pipe (DevTools protocol): no package, no port."""

import json
import os
import shutil
import subprocess
from contextlib import contextmanager

CHROMIUM = shutil.which("chromium")


class Page:
    """One tab."""

    def __init__(self, to_browser, from_browser, folder):
        self._out, self._in, self._number, self._session = to_browser, from_browser, 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), eventsEnabled=True)

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        answer = self._until(lambda one: one.get("id") == self._number)
        assert "error" not in answer, answer
        return answer["result"]

    def _until(self, wanted):
        while not wanted(message := json.loads(b"".join(iter(lambda: self._in.read(1), b"\0")))):
            pass
        return message

    def open(self, file):
        self.call("Page.navigate", url=file.as_uri())  # which answers when the new page is there, empty
        loaded = "new Promise(go => document.readyState == 'complete' ? go() : addEventListener('load', go))"
        self.call("Runtime.evaluate", expression=loaded, awaitPromise=True)

    def value(self, script):
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def press(self, *keys):
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def downloaded(self):
        """Wait until a download has ended."""
        self._until(lambda one: one.get("params", {}).get("state") == "completed")


@contextmanager
def chromium(folder):
    """A page of a fresh browser, whose profile and downloads are in ``folder``."""
    (from_us, ours_out), (ours_in, from_it) = os.pipe(), os.pipe()
    options = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={folder / 'profile'}"
    command = f"exec {CHROMIUM} {options} 3<&{from_us} 4>&{from_it}"
    process = subprocess.Popen(["bash", "-c", command], pass_fds=(from_us, from_it), stderr=subprocess.DEVNULL)
    os.close(from_us)
    os.close(from_it)
    with os.fdopen(ours_out, "wb") as to_browser, os.fdopen(ours_in, "rb") as from_browser:
        try:
            yield Page(to_browser, from_browser, folder)
        finally:
            process.kill()
            process.wait()
