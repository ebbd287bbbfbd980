"""One end of a link: its frames in, one write of all frames for each turn of the event loop."""

import asyncio
import contextlib
import logging
from typing import Any

import msgspec

from babelbus.errors import BabelbusError
from babelbus.link.frames import DATA, HEADER, PAYLOAD_BYTES_MAX, PING, Decoder, Frame, LinkError, encode

log = logging.getLogger(__name__)

PING_SECONDS = 2.0
SILENCE_SECONDS = 10.0
"""A peer on another machine that sends nothing for so long is gone: it sends a ping every `PING_SECONDS`."""
LOCAL_SILENCE_SECONDS = 60.0
"""The same for an edge process of this machine, which may get no processor for long where others run beside it."""
FRAMES_MAX = 64
"""Frames that are handled in one turn of the event loop: thousands of new clients would hold it."""
CLOSE_SECONDS = 2.0
"""How long the last frames may take to be sent, and the other end to close the link: it may hang."""


class Peer(asyncio.Protocol):
    """Frames of a link both ways. A subclass handles the frames and the end of the link.

    The other end must send something within `silence_seconds`, if that is not 0: the network may lose it without a
    word, or it may hang. The time is counted in beats of this end, so that a wait of this end for a processor does not
    count as the silence of the other one.
    """

    def __init__(self, *, silence_seconds: float) -> None:
        self._decoder = Decoder()
        self._parts: list[bytes | bytearray | memoryview] = []
        self._put_off: list[Frame] = []
        self._resumes = False
        self._is_full = False
        self._taken_bytes = 0
        self._scheduled = False
        self._silence_seconds = silence_seconds
        self._heard = True
        self._timer: asyncio.TimerHandle | None = None
        self._silent_turns = 0
        self._lost = False
        self.is_closing = False
        """Whether this end sends nothing more: it waits for the end of the other one."""
        self.transport: Any = None
        self.received_bytes = 0
        self.sent_bytes = 0
        self.end_reason = ""
        """Why this end closed the link."""
        self.done: asyncio.Future[None]
        """Done when the link is gone."""

    # -- frames in ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self.transport = transport
        self._loop = asyncio.get_running_loop()
        self.done = self._loop.create_future()
        self._timer = self._loop.call_later(PING_SECONDS, self._beat)

    def data_received(self, data: bytes) -> None:
        """Handle the frames of one read."""
        self._heard = True
        self.received_bytes += len(data)
        try:
            frames = self._decoder.receive_data(data)
            if self._put_off or self._is_full or len(frames) > FRAMES_MAX:
                self._put_off += frames
                self.transport.pause_reading()
                if self._is_full:
                    return
                frames = self._take_some()
        except BabelbusError as error:
            self.end(str(error))
        else:
            self._handle(frames)

    def _take_some(self) -> list[Frame]:
        """Return the next frames that were put off; frames behind them wait for the next turn of the event loop."""
        frames, self._put_off = self._put_off[:FRAMES_MAX], self._put_off[FRAMES_MAX:]
        if not self._resumes:
            self._resumes = True
            self._loop.call_soon(self._resume)
        return frames

    def _resume(self) -> None:
        self._resumes = False
        if self._lost or self._is_full or self.transport.is_closing():
            return
        if not self._put_off:
            self.transport.resume_reading()
            return
        self._handle(self._take_some())

    def _handle(self, frames: list[Frame]) -> None:
        try:
            self.handle(frames)
        except BabelbusError as error:
            self.end(str(error))
        except Exception as error:  # a defect of ours; frames that nobody handles must not leave a link that hangs
            log.exception("a link ends, because a frame could not be handled")
            self.end(f"a frame could not be handled: {error}")

    def hold(self) -> None:
        """Handle no further frames: the other end takes too little of what they make this end send."""
        self._is_full = True
        self._taken_bytes = self.sent_bytes - self.transport.get_write_buffer_size()
        self.transport.pause_reading()

    def go_on(self) -> None:
        """Handle frames again."""
        self._is_full = False
        if not self._resumes:
            self._resumes = True
            self._loop.call_soon(self._resume)

    def handle(self, frames: list[Frame]) -> None:
        """Handle frames in their order.

        Raises:
            LinkError: nobody may send such a frame here.
        """
        raise NotImplementedError

    def ended(self, reason: str) -> None:
        """Release everything that the link carried: it is gone."""
        raise NotImplementedError

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the link."""
        self._lost = True
        self._parts.clear()
        if self._timer is not None:
            self._timer.cancel()
        if not self.done.done():
            self.done.set_result(None)
        self.ended(self.end_reason or (str(error) if error else "the other end closed it"))

    # -- frames out --------------------------------------------------------------------------------------------------

    def send(self, kind: int, connection: int = 0, payload: bytes = b"", taken: int = 0) -> None:
        """Send a frame at the end of this turn."""
        self._parts.append(encode(kind, connection, payload, taken))
        if not self._scheduled:
            self._schedule()

    def send_message(self, kind: int, message: msgspec.Struct, connection: int = 0) -> None:
        """Send a frame whose payload is a message.

        Raises:
            LinkError: the message is too long for a frame.
        """
        payload = msgspec.json.encode(message)
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise LinkError(f"{type(message).__name__} of {len(payload)} bytes, limit {PAYLOAD_BYTES_MAX}")
        self.send(kind, connection, payload)

    def send_data(self, connection: int, taken: int, data: bytes | bytearray | memoryview) -> None:
        """Send bytes of a connection at the end of this turn."""
        size = len(data)
        parts = self._parts
        if size <= PAYLOAD_BYTES_MAX:
            parts.append(HEADER.pack(size, DATA, connection, taken))
            parts.append(data)
        else:
            view = memoryview(data)
            for at in range(0, size, PAYLOAD_BYTES_MAX):
                part = view[at : at + PAYLOAD_BYTES_MAX]
                parts.append(HEADER.pack(len(part), DATA, connection, taken))
                parts.append(part)
                taken = 0
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        if self._lost or self.is_closing:
            self._parts.clear()
            return
        self._scheduled = True
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        parts = self._parts
        if parts and not (self._lost or self.is_closing):
            data = b"".join(parts)
            self.sent_bytes += len(data)
            self._parts = []
            self.transport.write(data)

    # -- life --------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a ping, and end the link if the other end was silent for too long."""
        self._timer = self._loop.call_later(PING_SECONDS, self._beat)
        if self._is_full:  # nothing is read, so what it takes is what is heard of it
            taken_bytes = self.sent_bytes - self.transport.get_write_buffer_size()
            self._heard = taken_bytes > self._taken_bytes
            self._taken_bytes = max(taken_bytes, self._taken_bytes)
        self._silent_turns = 0 if self._heard else self._silent_turns + 1
        self._heard = False
        if 0 < self._silence_seconds <= self._silent_turns * PING_SECONDS:
            self.end(f"nothing was heard for {self._silence_seconds:g} s")
            return
        self.send(PING)

    @property
    def is_known(self) -> bool:
        """Whether the other end has said who it is."""
        return True

    def end(self, reason: str) -> None:
        """Close the link at once."""
        self.end_reason = self.end_reason or reason
        if self.transport is not None:
            self.transport.abort()

    async def close(self, reason: str = "closed") -> None:
        """Close the link when what was written is sent, and the other end has closed it, or after `CLOSE_SECONDS`.

        One way is closed first, and the other one is read to its end: if bytes of the other end were still on their
        way, a close of both would reset the connection, and cost that end what it has not read.
        """
        self.end_reason = self.end_reason or reason
        if self.transport is None or self._lost:
            return
        self._flush()
        self.is_closing = True
        if self.is_known and self.transport.can_write_eof():
            try:
                self.transport.write_eof()
            except OSError:  # the other end reset the link, and nothing was read since
                self.transport.abort()
        else:  # TLS closes one way first, too
            self.transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.shield(self.done)
        self.transport.abort()
