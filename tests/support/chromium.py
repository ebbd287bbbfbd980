"""A page in a real browser, by the DevTools protocol: what it shows is asked for until it is there."""

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.bus import SAFETY_NET_SECONDS

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SHOWN = """new Promise((resolve) => setInterval(() => {
  const text = document.body.innerText;
  if (%s.every((part) => text.includes(part))) resolve(text);
}, 50))"""


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def shown(browser: str, folder: Path, url: str, *parts: str) -> str:
    """Return the text of the page at `url`, when it has all of the parts."""

    async def run() -> str:
        with devtools(browser, folder) as address:
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{address}/json") as answer:
                    (tab,) = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(tab["webSocketDebuggerUrl"]) as socket:
                    numbers = itertools.count(1)

                    async def call(method: str, **params: Any) -> dict[str, Any]:
                        number = next(numbers)
                        await socket.send_json({"id": number, "method": method, "params": params})
                        while True:
                            message: dict[str, Any] = await socket.receive_json()
                            if message.get("id") == number:
                                result: dict[str, Any] = message["result"]
                                return result

                    await call("Page.navigate", url=url)
                    script = SHOWN % list(parts)
                    answer_ = await call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
                    return str(answer_["result"]["value"])

    return asyncio.run(asyncio.wait_for(run(), SAFETY_NET_SECONDS))


@contextlib.contextmanager
def devtools(browser: str, folder: Path) -> Iterator[str]:
    """Run a browser without a window; yield the address of its DevTools."""
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
    with subprocess.Popen(
        [browser, *options, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        try:
            found = next(filter(None, (re.search(r"ws://([^/]+)/", line) for line in process.stderr)))
            yield found[1]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
