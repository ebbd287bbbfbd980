"""Files of a folder as an HTTP server sends them: by the path of a URL, with a type, a tag and a date.

The one module here that touches the disk: what it may open is decided where the path is read.
"""

import errno
import mimetypes
import os
import stat
from collections.abc import Mapping
from email.utils import formatdate, mktime_tz, parsedate_tz
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
    """A file exists and is not served: too large, or unreadable."""


class File(msgspec.Struct, frozen=True, weakref=True):
    """One whole file."""

    content_type: str
    data: bytes
    """Empty if `unchanged`."""
    tag: str
    """An entity tag in its quotes (RFC 9110, section 8.8.3): it differs after the file has changed."""
    changed: str
    """Time of the last change, as a date of HTTP."""
    unchanged: bool = False
    """Whether the client has it: answer 304."""


class Files:
    """The files below one folder. `read` waits for the disk and may run in any thread."""

    def __init__(self, root: str, *, bytes_max: int) -> None:
        self._root = Path(os.path.realpath(root))
        self._bytes_max = bytes_max

    def read(self, path: str, *, asked: Mapping[str, str] | None = None, always: bool = False) -> File | None:
        """Return the file at a decoded URL path, else the folder's index, else, with `always`, the root's index.

        Applications whose addresses are made in the browser need `always`. `None`: no file, or the path would leave
        the folder, by `..` or by a link, or names a hidden file. `asked` are the headers of a request: a file that the
        client already has is not read.

        Raises:
            FileRefusedError: the file has more than `bytes_max` bytes, or cannot be read.
        """
        parts = [part for part in path.split("/") if part]
        if any(part[0] == "." or "\\" in part or "\0" in part for part in parts):
            return None
        target = self._root.joinpath(*parts)
        candidates = [target / INDEX] if path.endswith("/") else [target, target / INDEX]
        if always:
            candidates.append(self._root / INDEX)
        for candidate in candidates:
            file = self._read(candidate, asked or {})
            if file is not None:
                return file
        return None

    def _read(self, path: Path, asked: Mapping[str, str]) -> File | None:
        try:
            real = Path(os.path.realpath(path))
            if not real.is_relative_to(self._root):
                return None
            # A FIFO must not hold the thread, and a path that became a link meanwhile may lead out of the folder.
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return self._read_open(descriptor, path.name, asked)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise FileRefusedError(f"the file cannot be read: {error.strerror}") from error

    def _read_open(self, descriptor: int, name: str, asked: Mapping[str, str]) -> File | None:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            return None
        tag = f'"{about.st_mtime_ns:x}-{about.st_size:x}-{about.st_ino:x}"'
        content_type, seconds = content_type_of(name), int(about.st_mtime)
        if has_current(asked, tag, seconds):
            return File(content_type, b"", tag, formatdate(seconds, usegmt=True), unchanged=True)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(self._bytes_max + 1)
        if len(data) > self._bytes_max:
            raise FileRefusedError(f"a file of {about.st_size} bytes, the limit of a message is {self._bytes_max}")
        return File(content_type, data, tag, formatdate(seconds, usegmt=True))


def content_type_of(name: str) -> str:
    """Return the content type of a file by its name."""
    suffix = os.path.splitext(name)[1].lower()
    return _TYPES.get(suffix) or _BUILT_IN.guess_type(name)[0] or _UNKNOWN


def has_current(asked: Mapping[str, str], tag: str, changed_seconds: int) -> bool:
    """Return whether a request's headers say that its client has the current file (RFC 9110, section 13.1).

    `tag` is in its quotes; when the headers have tags, the date does not count. An invalid date is ignored.
    """
    tags = asked.get("if-none-match")
    if tags is not None:
        tags_of_client = [text.strip().removeprefix("W/") for text in tags.split(",")]
        return "*" in tags_of_client or tag in tags_of_client
    date = parsedate_tz(asked.get("if-modified-since", ""))
    if date is None:
        return False
    try:
        return changed_seconds <= mktime_tz(date)
    except (ValueError, OverflowError):
        return False
