"""A program in a pseudo-terminal, as a person sees it who types."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.bus import SAFETY_NET_SECONDS

CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>()][0-9A-B]?|[\x07\x08\r]"
    r"|\x1b(?:\[[0-?]*[ -/]*|\][^\x07]*)?\Z"  # the rest of it is still to come
)
TYPE_AGAIN_SECONDS = 1.5


class Terminal:
    """A terminal of so many columns with one program; leave the `with` block to end the program."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], *, columns: int = 80, rows: int = 30
    ) -> None:
        self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character
        self._pid, self._file = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execvpe(command[0], list(command), {**environment, "TERM": "xterm-256color"})

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self.wait()
        os.close(self._file)

    @property
    def text(self) -> str:
        """Return what was shown, without colours and moves of the cursor; a move to the first line begins a line."""
        return CONTROL.sub("", self.raw.replace("\x1b[H", "\n"))

    def type(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def read(self, seconds: float) -> bool:
        """Read what comes within some seconds; return whether the program may still write."""
        if not select.select([self._file], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._file, 65_536)
        except OSError:  # EIO: the program has closed the terminal
            return False
        self.raw += self._decoder.decode(data)
        return bool(data)

    def expect(self, words: str, *, again: str = "") -> None:
        """Wait until the words are shown; the keys `again` are pressed now and then until they are."""
        deadline = time.monotonic() + SAFETY_NET_SECONDS
        pressed_at = time.monotonic()
        while words not in self.text:
            assert self.read(0.1), self.text
            now = time.monotonic()
            assert now < deadline, self.text
            if again and now - pressed_at > TYPE_AGAIN_SECONDS:
                self.type(again)
                pressed_at = now

    def wait(self) -> int:
        """Read until the program ends; return its exit code."""
        while self.read(SAFETY_NET_SECONDS):
            pass
        pid, self._pid = self._pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
