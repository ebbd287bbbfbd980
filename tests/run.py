"""`make test` and `make interop`: all tests, in parts that run beside each other.

Much of their time Spark and the servers that are started, killed and started again wait for something, so the parts
together take little longer than the longest of them. With arguments it is pytest with these arguments.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "spark": ("tests/spark",),
    "commands": ("tests/cli", "tests/crash", "tests/documentation", "tests/end_to_end", "tests/examples"),
    "servers": ("tests/cluster", "tests/server", "tests/storage"),
}
"""Chosen so that the parts take about the same time on two cores; the part `rest` is of all other tests."""
PARTS = {
    "rest": tuple(f"--ignore={path}" for paths in FOLDERS.values() for path in paths),
    **FOLDERS,
}
INTEROP = "interop"
CONSOLE = "tests/interop/console"
VIEWS = tuple(f"{CONSOLE}/test_{name}.py" for name in ("groups", "log_in", "pages", "state"))
INTEROP_PARTS = {
    "console": ("-m", "interop", *(f"--ignore={path}" for path in VIEWS), CONSOLE),
    "views": ("-m", "interop", *VIEWS),
    "clients": ("-m", "interop", f"--ignore={CONSOLE}", "tests/interop"),
}
"""Browsers wait for servers, installers of clients for the network."""
RUN_SECONDS = 2700
"""No run takes so long on any machine: a part that does hangs, and shows where before it is ended."""
STOP_SECONDS = 60
MARK = "BABELBUS_TEST_RUN"
"""Variable that all processes of a part inherit: those that have a session of their own too, as JVMs and daemons."""
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that lives for some seconds: compiling well and collecting beside the work take a quarter of the CPU."""

HASH_SEED = "0"
"""Sets have the same order in each run, so that a run gives the verdict of the run before it."""


class Part:
    """One run of pytest, in a process group of its own; its lines are printed as they come, with its name before."""

    def __init__(self, name: str, choice: tuple[str, ...], say: Callable[[str], None]) -> None:
        self.name = name
        self.failures: list[str] = []
        self.last = ""
        self._say = say
        self._mark = f"{MARK}={uuid.uuid4()}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *choice],
            cwd=ROOT,
            env={
                **os.environ,
                "JDK_JAVA_OPTIONS": os.environ.get("JDK_JAVA_OPTIONS", SHORT_LIVED),
                "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", HASH_SEED),
                MARK: self._mark.partition("=")[2],
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        # A process that outlives pytest may hold the pipe: nobody waits for its end.
        self._reader = threading.Thread(target=self._print, daemon=True)
        self._reader.start()

    def _print(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            line = line.rstrip()
            self._say(f"{self.name:9} | {line}")
            if line.startswith(("FAILED ", "ERROR ")):
                self.failures.append(line)
            elif line:
                self.last = line

    def wait(self, deadline: float) -> int:
        """Wait for its end, or the monotonic clock's `deadline`, and give its exit code; no process of it is left."""
        try:
            code = self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self._say(f"{self.name:9} | still runs although its time is over: these are its threads")
            self._process.send_signal(signal.SIGABRT)  # pytest has faulthandler print the stacks of all threads
            code = self._process.wait()
        self._end_group()
        return code

    def interrupt(self) -> None:
        """Ask it to stop, as Ctrl+C does: it prints the failures that it has seen, and stops its servers."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def _end_group(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing was left
        for number, command in left_behind(self._mark):
            self._say(f"{self.name:9} | ended process {number}, which a test left behind: {command}")
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended by itself
        self._reader.join(STOP_SECONDS)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()


def left_behind(mark: str) -> list[tuple[int, str]]:
    """Give the processes whose environment has a mark, each with its command; none where there is no /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                found.append((int(folder.name), command))
        except OSError:
            continue  # it has ended, or is of somebody else
    return found


def main(arguments: list[str]) -> int:
    """Run the tests, or with the one argument `interop` those with clients of others; give 0 if all passed."""
    if arguments and arguments != [INTEROP]:
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode
    lock = threading.Lock()

    def say(line: str) -> None:
        with lock:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parts = [Part(name, choice, say) for name, choice in (INTEROP_PARTS if arguments else PARTS).items()]
    try:
        deadline = time.monotonic() + RUN_SECONDS
        codes = [part.wait(deadline) for part in parts]
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for part in parts:
            part.interrupt()
        deadline = time.monotonic() + STOP_SECONDS
        codes = [128 + signal.SIGINT, *(part.wait(deadline) for part in parts)]
    say("")
    for part in parts:
        for failure in part.failures:
            say(f"{part.name:9} | {failure}")
        say(f"{part.name:9} | {part.last}")
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
