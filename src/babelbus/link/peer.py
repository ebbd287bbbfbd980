"""One end of a link: its frames in, one write of all frames for each turn of the event loop."""

import asyncio
import contextlib
from typing import Any

import msgspec

from babelbus.errors import BabelbusError
from babelbus.link.frames import (
    DATA,
    HEADER,
    PAYLOAD_BYTES_MAX,
    PING,
    Decoder,
    Frame,
    LinkError,
    encode,
)

PING_SECONDS = 2.0
SILENCE_SECONDS = 10.0
"""A peer on another machine that sends nothing for so long is gone: it sends a ping every `PING_SECONDS`."""
FRAMES_MAX = 64
"""Frames that are handled in one turn of the event loop: thousands of new clients would hold it."""
CLOSE_SECONDS = 2.0
"""How long the last frames may take to be sent."""


class Peer(asyncio.Protocol):
    """Frames of a link both ways. A subclass handles the frames and the end of the link.

    With `watched`, the other end must send something within `SILENCE_SECONDS`: the network may lose it without a word.
    """

    def __init__(self, *, watched: bool) -> None:
        self._decoder = Decoder()
        self._parts: list[bytes | bytearray | memoryview] = []
        self._put_off: list[Frame] = []
        self._resumes = False
        self._scheduled = False
        self._watched = watched
        self._heard = True
        self._timer: asyncio.TimerHandle | None = None
        self._silent_turns = 0
        self._lost = False
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
            if self._put_off or len(frames) > FRAMES_MAX:
                self._put_off += frames
                self.transport.pause_reading()
                frames = self._take_some()
            self.handle(frames)
        except BabelbusError as error:
            self.end(str(error))

    def _take_some(self) -> list[Frame]:
        """Return the next frames that were put off; frames behind them wait for the next turn of the event loop."""
        frames, self._put_off = self._put_off[:FRAMES_MAX], self._put_off[FRAMES_MAX:]
        if not self._resumes:
            self._resumes = True
            self._loop.call_soon(self._resume)
        return frames

    def _resume(self) -> None:
        self._resumes = False
        if self._lost or self.transport.is_closing():
            return
        if not self._put_off:
            self.transport.resume_reading()
            return
        try:
            self.handle(self._take_some())
        except BabelbusError as error:
            self.end(str(error))

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
        if self._lost:
            self._parts.clear()
            return
        self._scheduled = True
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        parts = self._parts
        if parts and not self._lost:
            data = b"".join(parts)
            self.sent_bytes += len(data)
            self._parts = []
            self.transport.write(data)

    # -- life --------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a ping, and end the link if the other end was silent for too long."""
        self._timer = self._loop.call_later(PING_SECONDS, self._beat)
        self._silent_turns = 0 if self._heard else self._silent_turns + 1
        self._heard = False
        if self._watched and self._silent_turns * PING_SECONDS >= SILENCE_SECONDS:
            self.end(f"nothing was heard for {SILENCE_SECONDS:g} s")
            return
        self.beat()

    def beat(self) -> None:
        """Send a sign of life."""
        self.send(PING)

    def end(self, reason: str) -> None:
        """Close the link at once."""
        self.end_reason = self.end_reason or reason
        if self.transport is not None:
            self.transport.abort()

    async def close(self, reason: str = "closed") -> None:
        """Close the link when what was written is sent, or after `CLOSE_SECONDS`."""
        self.end_reason = self.end_reason or reason
        if self.transport is None or self._lost:
            return
        self._flush()
        self.transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.shield(self.done)
        self.transport.abort()
