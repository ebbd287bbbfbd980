"""A page of the documentation as a reader follows it: its files are written, its commands run, its outputs compared.

- A block with the name of a file as its title is written to this file.
- A block `sh` without a title runs in the reader's shell and must succeed. A block `python` runs as a program.
- A block `sh` with another title runs in a shell of its own, beside the page, until the page ends. `babelbus serve` or
  `make serve` there starts a server.
- A block `text` is what the command above it prints, or the shell that its title names: these lines, in this order,
  perhaps with others between them. `...` stands for anything, and blanks may be more.
- A block with another language and no title is for the reader alone.

Default ports become the ports of the test's server. Commands that install something are left out.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.cli.shell import COMMAND, ENVIRONMENT, Served
from tests.support.bus import SAFETY_NET_SECONDS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'^( *)```(\w+)(?: title="([^"]*)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
LISTENS = "babelbus listen"
SERVE = re.compile(r"^(?:babelbus|make) serve\b")
LEFT_OUT = re.compile(r"^(?:mvn |npm install|pip install|python3? -m venv|\. \S*activate|make |git clone|cd )")
SERVERS = ("serve", "sbusd", "repair", "check")
"""Commands that run a server, or work on the data folder of one."""
WAIT_SECONDS = SAFETY_NET_SECONDS
PORTS = {
    "5320": "jebp",
    "8080": "worterbuch",
    "9090": "worterbuch-tcp",
    "15555": "zbus",
    "10000": "eventmesh-tcp",
    "10105": "eventmesh-http",
    "10205": "eventmesh-grpc",
    "8600": "admin",
}


class Block(msgspec.Struct, frozen=True):
    """One fenced block."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = []
    for indent, language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        found.append(Block(language, title, re.sub(f"^{indent}", "", text, flags=re.MULTILINE)))
    return found


class Output:
    """The lines that a process prints, as they come."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self.compared = 0
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line.rstrip())
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def expect(self, lines: list[str], names: dict[str, str]) -> None:
        """Wait until the lines have come, in this order."""
        with self._changed:
            for line in lines:
                pattern = line_pattern(line)

                def come(line: str = line, pattern: "re.Pattern[str]" = pattern) -> bool:
                    while self.compared < len(self.lines):
                        self.compared += 1
                        if pattern.fullmatch(plain(rename(self.lines[self.compared - 1], names))):
                            return True
                    if self._ended:
                        raise AssertionError(f"no line {line!r} in {self.lines}")
                    return False

                assert self._changed.wait_for(come, WAIT_SECONDS), f"no line {line!r} in {self.lines}"

    def wait(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended, SAFETY_NET_SECONDS)
        return code


def line_pattern(line: str) -> "re.Pattern[str]":
    return re.compile(".*".join(re.escape(part) for part in re.split(r" ?\.\.\. ?", plain(line))))


def plain(line: str) -> str:
    """Return the line with single blanks: columns are as wide as what they hold."""
    return " ".join(line.split())


def rename(text: str, names: dict[str, str]) -> str:
    """Return the text with each number that is a key of `names` replaced."""
    return re.sub(r"\b\d{4,5}\b", lambda found: names.get(found[0], found[0]), text) if names else text


class Reader:
    """Somebody with a folder who does what a page says."""

    def __init__(
        self,
        folder: Path,
        python: str = sys.executable,
        *,
        seconds: float = SAFETY_NET_SECONDS,
        installed: Path | None = None,
    ) -> None:
        """Set up the reader's folder.

        `installed` is an environment with the wheel of the client. Then commands and programs are those of the
        environment, but for commands of servers, and the server has another folder: the reader has its address and a
        copy of its keys.
        """
        self.folder = folder
        self._installed = installed
        self._seconds = seconds
        self._served: Served | None = None
        self._to_real: dict[str, str] = {}
        self._to_default: dict[str, str] = {}
        self._shells: dict[str, Output] = {}
        self._last: Output | None = None
        tools = folder / ".tools"
        tools.mkdir()
        command = " ".join(f"'{part}'" for part in COMMAND)
        lines = [f'exec {command} "$@"']
        self._environment = dict(ENVIRONMENT)
        if installed is not None:
            python = str(installed / "bin" / "python")
            servers = "|".join(SERVERS)
            lines = [
                f"case \"$1\" in {servers}) PYTHONPATH='{ROOT / 'src'}' {lines[0]};; esac",
                f"exec '{installed / 'bin' / 'babelbus'}' \"$@\"",
            ]
            self._environment.pop("PYTHONPATH", None)
        for name, line in (
            ("babelbus", "\n".join(lines)),
            ("python", f"exec '{python}' \"$@\""),
            ("babelbus-spark-python", f"exec '{sys.executable}' \"$@\""),
        ):
            (tools / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
            (tools / name).chmod(0o755)
        self._environment |= {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "120",
            "PYTHONUNBUFFERED": "1",
        }

    def follow(self, page: Path) -> None:
        steps = blocks(page)
        if not any(SERVE.match(block.text) for block in steps):
            self._serve([])  # a page about a thing begins with a server that runs
        for block in steps:
            self._do(block)

    def _do(self, block: Block) -> None:
        if re.fullmatch(r"[\w/-]+\.\w+", block.title):
            file = self.folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(rename(block.text, self._to_real), encoding="utf-8")
        elif block.language == "sh" and SERVE.match(block.text):
            self._serve(shlex.split(block.text.splitlines()[0], comments=True)[2:])
        elif block.language == "sh" and block.title:
            subscriptions = self._live_subscriptions()
            self._shells[block.title] = self._run(block.text)
            if block.text.startswith(LISTENS):
                wait_until(lambda: self._live_subscriptions() > subscriptions)
        elif block.language == "sh":
            self._finish(self._run(block.text), block)
        elif block.language == "python" and not block.title:
            (self.folder / "snippet.py").write_text(rename(block.text, self._to_real), encoding="utf-8")
            self._finish(self._run("python snippet.py"), block)
        elif block.language == "text":
            output = self._shells[block.title] if block.title else self._last
            assert output is not None, "an output without a command above it"
            output.expect([line for line in block.text.splitlines() if line.strip()], self._to_default)

    def _run(self, text: str) -> Output:
        lines = [line for line in text.splitlines() if not LEFT_OUT.match(line)]
        script = rename("\n".join(lines), self._to_real)
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self._environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return Output(process)

    def _finish(self, output: Output, block: Block) -> None:
        try:
            code = output.wait(self._seconds)
        finally:
            end_group(output.process)
        assert code == 0, f"{block.text}\n{output.lines}"
        self._last = output

    def _serve(self, options: list[str]) -> None:
        assert self._served is None, "a page has one server"
        if self._installed is None:
            self._served = Served(self.folder, *options)
        else:
            data = self.folder.with_name(f"{self.folder.name}-elsewhere")
            self._served = Served(self.folder, "--data-folder", str(data), *options)
            self._take_keys(data, self.folder / "data")
        for port, name in PORTS.items():
            real = self._served.ready["addresses"][name].rpartition(":")[2]
            self._to_real[port] = real
            self._to_default[real] = port

    def _take_keys(self, given: Path, kept: Path) -> None:
        """Copy the keys of a server that is elsewhere, let commands go there, and show the sockets of the machine."""
        assert self._served is not None
        (kept / "conf").mkdir(parents=True)
        for name in ("admin_key", "admin_token"):
            shutil.copy(given / "conf" / name, kept / "conf")
        os.symlink(given / "run", kept / "run")
        self._environment |= {
            "BABELBUS_SERVER": self._served.ready["addresses"]["jebp"],
            "BABELBUS_SERVER_FINGERPRINT": self._served.ready["server_fingerprint"],
            "BABELBUS_IDENTITY": str(kept / "conf" / "admin_key"),
        }

    def _live_subscriptions(self) -> float:
        """Return how many the server has: `babelbus listen` does not say when it hears."""
        if self._served is None:
            return 0.0
        with urllib.request.urlopen(f"http://{self._served.ready['addresses']['admin']}/metrics") as answer:
            found = re.search(rb"^babelbus_live_subscriptions (\S+)$", answer.read(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def close(self) -> None:
        for output in self._shells.values():
            end_group(output.process)
        if self._served is not None:
            code = self._served.stop()
            self._served.kill_started()
            assert code == 0

    def address(self, name: str) -> str:
        """Return where the server of the page listens."""
        assert self._served is not None
        address: str = self._served.ready["addresses"][name]
        return address

    def use(self, folder: Path, name: str) -> None:
        """Let programs of the page find packages that were installed elsewhere."""
        os.symlink(folder / name, self.folder / name)


def end_group(process: "subprocess.Popen[str]") -> None:
    """End the process and everything that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(SAFETY_NET_SECONDS / 4)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SAFETY_NET_SECONDS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.05)


def build(folder: Path) -> None:
    """Build the site as `make docs` does, in another folder."""
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def has(*tools: str) -> bool:
    return all(shutil.which(tool) for tool in tools)
