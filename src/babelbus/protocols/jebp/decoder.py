"""Bytes of an established jebp connection -> messages, a whole chunk at a time.

A chunk goes through three loops: cut it into sealed contents, open them all, read them all. Frames with small content
go together; one with large content (over `box.SMALL_BYTES_MAX`) goes alone, gathered and opened in one buffer
that becomes the memory of its message: 16 MiB that arrive in 64 KiB pieces are copied once.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.box import SMALL_BYTES_MAX, TAG_BYTES, Opener
from babelbus.protocols.jebp.codec import TopicExists, decode_answer, decode_request
from babelbus.protocols.jebp.frames import FRAME_BYTES_MAX, HANDSHAKE_BYTES_MAX, read_head
from babelbus.protocols.jebp.messages import CallItems, Request, Response

M = TypeVar("M")

PART_BYTES = 256
"""Memory of a part beside its bytes: a peer may send single bytes."""
_RUN_MAX = 512  # frames that are looked at together for a run of equal size


class _Decoder(Generic[M]):
    """The part that both sides share: cutting and opening. `read` gets one content, in memory that nobody else has.

    Attributes:
        error: why nothing more can be read; the connection is to be closed when `events` has given the last messages.
    """

    def __init__(self, opener: Opener, read: Callable[[bytes | memoryview], M], frame_bytes_max: int) -> None:
        if frame_bytes_max < HANDSHAKE_BYTES_MAX:
            raise ValueError(f"frame limit of {frame_bytes_max} bytes, at least {HANDSHAKE_BYTES_MAX}")
        self.error: RemoteProtocolError | None = None
        self._opener = opener
        self._read = read
        self._frame_bytes_max = frame_bytes_max
        self._chunks: list[bytes] = []
        self._parts: list[bytes | memoryview] = []  # of the large sealed content that is being gathered
        self._parts_bytes = 0
        self._gather_bytes = 0  # size of the large sealed content that is being gathered, else 0

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Receive bytes from the transport, cut anywhere; parse them with `events`."""
        if data and self.error is None:
            self._chunks.append(data if type(data) is bytes else bytes(data))

    def events(self) -> list[M]:
        """Return the complete messages that have arrived, in order; incomplete ones wait for more data.

        Messages that were whole before the peer broke the protocol are given first, with `error` set; carry them out,
        then close.

        Raises:
            RemoteProtocolError: the peer broke the protocol and there is no message left to give.
        """
        messages: list[M] = []
        if self.error is None and self._chunks:
            try:
                self._cut(messages)
            except RemoteProtocolError as error:
                self.fail(error)
        if self.error is not None and not messages:
            raise self.error
        return messages

    @property
    def unfinished_bytes(self) -> int:
        """Memory of a frame that is not complete."""
        if not (self._chunks or self._parts):
            return 0
        return sum(map(len, self._chunks)) + self._parts_bytes + PART_BYTES * len(self._parts)

    def fail(self, error: RemoteProtocolError) -> None:
        """Read nothing more, and drop the frame that is not complete."""
        self.error = error
        self._chunks.clear()
        self._parts, self._parts_bytes = [], 0

    def _cut(self, messages: list[M]) -> None:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        position = self._gather(data, 0, messages) if self._gather_bytes else 0
        size = len(data)
        small: list[bytes] = []
        try:
            while position < size:
                if data.startswith(b"\x01\x01", position) and position + 2 < size:
                    start = position + 3  # the common form, without a call
                    end = start + data[position + 2]
                    if end > size:
                        break
                    if end < size and data.startswith(data[position:start], end):
                        position = _take_run(data, position, end - start, small)
                        continue
                else:
                    head = read_head(data, position, self._frame_bytes_max)
                    if head is None:
                        break
                    start, length = head
                    end = start + length
                    if length > SMALL_BYTES_MAX:
                        if small:
                            before, small = small, []  # they are opened once, also if one of them is broken
                            self._open(before, messages)
                        self._gather_bytes = length
                        position = self._gather(data, start, messages)
                        continue
                    if end > size:
                        break
                small.append(data[start:end])
                position = end
        finally:  # also what stands before a broken frame was said by the peer
            if small:
                self._open(small, messages)
        if position < size:
            chunks.append(data[position:])

    def _gather(self, data: bytes, position: int, messages: list[M]) -> int:
        end = position + self._gather_bytes - self._parts_bytes
        part = memoryview(data)[position:end] if position or end < len(data) else data
        self._parts.append(part)
        self._parts_bytes += len(part)
        if end > len(data):
            return len(data)
        sealed = bytearray().join(self._parts)  # growing it part by part would copy it several times
        self._parts, self._parts_bytes, self._gather_bytes = [], 0, 0
        messages.append(self._read(self._opener.open_in_place(sealed)))
        return end

    def _open(self, sealed: list[bytes], messages: list[M]) -> None:
        read, append = self._read, messages.append
        if len(sealed) == 1:
            append(read(self._opener.open_alone(sealed[0])))
            return
        for plain, stride, part in self._opener.open_many(sealed):
            start = 0
            for content in part:
                append(read(plain[start : start + len(content) - TAG_BYTES]))
                start += stride


def _take_run(data: bytes, position: int, length: int, small: list[bytes]) -> int:
    """Collect the frames from `position` on that are as long as the first one, and return where they end.

    Heads at a fixed distance are compared by slices with a step, 4 times as fast as head by head.
    """
    step = length + 3
    stop = min(len(data), position + step * _RUN_MAX)
    count = (stop - position) // step
    for at, expected in enumerate((b"\x01", b"\x01", data[position + 2 : position + 3])):
        column = data[position + at : stop : step]
        count = min(count, len(column) - len(column.lstrip(expected)))
    end = position + step * count
    small += [data[start : start + length] for start in range(position + 3, end, step)]
    return end


class ServerDecoder(_Decoder[Request]):
    """The requests of one client, from the end of the handshake on.

    Args:
        opener: of the client's direction, as the handshake left it.
        frame_bytes_max: largest content of a frame, tag included; at least 1,024.
        topic_exists: for the option `jebp_bare_records`: which topics there are.
    """

    def __init__(
        self,
        opener: Opener,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        topic_exists: TopicExists | None = None,
    ) -> None:
        super().__init__(opener, partial(decode_request, topic_exists=topic_exists), frame_bytes_max)


class ClientDecoder(_Decoder[Response | CallItems]):
    """The answers of the server, from the end of the handshake on; arguments as those of `ServerDecoder`."""

    def __init__(self, opener: Opener, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        super().__init__(opener, decode_answer, frame_bytes_max)
