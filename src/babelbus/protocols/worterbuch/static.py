"""Files of the web root beside the API: a web application, as a rule (specs/worterbuch.md, section 12)."""

import errno
import mimetypes
import os
import stat
from pathlib import Path

import msgspec

from babelbus.errors import BabelbusError

INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
}
_BUILT_IN = mimetypes.MimeTypes()  # the same on every machine, unlike `mimetypes.guess_type`
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO)
_UNKNOWN = "application/octet-stream"


class FileRefusedError(BabelbusError):
    """A file that is there and is not served: it is too large, or cannot be read."""


class File(msgspec.Struct, frozen=True):
    """One file, whole."""

    content_type: str
    data: bytes


class Files:
    """What lies below one folder. `read` waits for the disk and may run in any thread."""

    def __init__(self, root: str, *, bytes_max: int) -> None:
        self._root = Path(os.path.realpath(root))
        self._bytes_max = bytes_max

    def read(self, path: str) -> File | None:
        """Give the file of a decoded path of a URL, else the index of the folder, else that of the root.

        The last is what applications need whose addresses are made in the browser. `None`: there is none, or the path
        would leave the folder, by `..` or by a link, or names a hidden file.

        Raises:
            FileRefusedError: it has more than `bytes_max` bytes, or cannot be read.
        """
        parts = [part for part in path.split("/") if part]
        if any(part[0] == "." or "\\" in part or "\0" in part for part in parts):
            return None
        wanted = self._root.joinpath(*parts)
        for candidate in (wanted, wanted / INDEX, self._root / INDEX):
            found = self._read(candidate)
            if found is not None:
                return found
        return None

    def _read(self, path: Path) -> File | None:
        try:
            real = Path(os.path.realpath(path))
            if not real.is_relative_to(self._root):
                return None
            # A FIFO must not hold the thread, and what became a link meanwhile is none of ours.
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return self._read_open(descriptor, path.name)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise FileRefusedError(f"the file cannot be read: {error.strerror}") from error

    def _read_open(self, descriptor: int, name: str) -> File | None:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(self._bytes_max + 1)
        if len(data) > self._bytes_max:
            raise FileRefusedError(f"a file of {about.st_size} bytes, the limit of a message is {self._bytes_max}")
        return File(content_type_of(name), data)


def content_type_of(name: str) -> str:
    """Give the content type of a file by its name."""
    suffix = os.path.splitext(name)[1].lower()
    return _TYPES.get(suffix) or _BUILT_IN.guess_type(name)[0] or _UNKNOWN
