"""Bodies in chunks (RFC 9112, section 7.1), cut anywhere.

body := chunk*, "0" [extension] CRLF, trailer lines, CRLF; chunk := size in hex [extension] CRLF, data, CRLF
"""

import re

from babelbus.wire.buffer import Buffer
from babelbus.wire.http.fields import HttpError, read_fields

LINE_BYTES_MAX = 256
"""A chunk's size and its extensions, which are ignored."""

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_CRLF = b"\r\n"


def encode_chunk(data: bytes) -> bytes:
    """Return one chunk; nothing for no data, because an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


class ChunkedBody:
    """Decodes one body.

    Attributes:
        data: the decoded bytes so far; a reader of streams may take them away in between.
        done: whether the body has ended.
    """

    def __init__(self, *, bytes_max: int, trailer_bytes_max: int, trailers_max: int) -> None:
        self.data = Buffer()
        self.done = False
        self._bytes_max = bytes_max
        self._total = 0
        self._left = 0  # bytes of the current chunk that have not arrived
        self._ending = False  # the line end behind a chunk's data comes next
        self._in_trailers = False
        self._trailers: list[bytes] = []
        self._trailer_bytes = 0
        self._trailer_bytes_max = trailer_bytes_max
        self._trailers_max = trailers_max

    def feed(self, data: bytes, position: int) -> int:
        """Read from `position` on, and return where reading stopped: the body has ended, or more data is needed.

        Raises:
            HttpError: the chunks are invalid, or the body is too large.
        """
        while not self.done:
            if self._left:
                part = data[position : position + self._left]
                if not part:
                    break
                self.data.add(part)
                position += len(part)
                self._left -= len(part)
                self._ending = not self._left
            elif self._ending:
                if len(data) - position < len(_CRLF):
                    break
                if data[position : position + 2] != _CRLF:
                    raise HttpError(400, "a chunk is longer than its size")
                position += 2
                self._ending = False
            else:
                line_max = self._trailer_bytes_max if self._in_trailers else LINE_BYTES_MAX
                end = data.find(b"\n", position, position + line_max)
                if end < 0:
                    if len(data) - position >= line_max:
                        raise HttpError(431 if self._in_trailers else 400, "a line in a body in chunks is too long")
                    break
                if end == position or data[end - 1] != 13:
                    raise HttpError(400, "a line in a body in chunks does not end with CR LF")
                self._read_line(data[position : end - 1])
                position = end + 1
        return position

    def _read_line(self, line: bytes) -> None:
        if not self._in_trailers:
            match = _SIZE.fullmatch(line)
            if match is None:
                raise HttpError(400, f"invalid chunk size: {line[:40]!r}")
            self._left = int(match[1], 16)
            self._total += self._left
            # Refused before the chunk arrives, as a length in the head would be.
            if self._total > self._bytes_max:
                raise HttpError(413, f"a body of {self._total} bytes or more, limit {self._bytes_max}")
            self._in_trailers = not self._left
        elif line:
            self._trailers.append(line)
            self._trailer_bytes += len(line) + len(_CRLF)
            if self._trailer_bytes > self._trailer_bytes_max or len(self._trailers) > self._trailers_max:
                raise HttpError(431, "too many trailers")
        else:
            # RFC 9110, section 6.5.1: trailers may be dropped, and must not be merged unasked. Bad ones are refused.
            read_fields(self._trailers)
            self.done = True
