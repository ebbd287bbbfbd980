"""Publishing with command 12, one request for each record: what a server of jebp/1.0 understands."""

import asyncio
import zlib
from collections.abc import Sequence

from babelbus.clients.jebp.connection import Link
from babelbus.clients.jebp.errors import ClientError, OutcomeUnknownError, RequestError
from babelbus.errors import LocalProtocolError
from babelbus.protocols.jebp.codec import RECORD_FIELDS
from babelbus.protocols.jebp.messages import CREATE_RECORD, Response
from babelbus.protocols.jebp.names import encode_name_field
from babelbus.protocols.jebp.status import is_success

WINDOW = 4_096
"""Requests of one call that may be on the way."""
CHUNK = 512
"""Requests that are sealed and written together."""


class PlainRun:
    """The records of one call, a chunk of requests at a time; the `Pending` of a link. One future at a time for all.

    Attributes:
        stored: requests that were answered with success.
    """

    def __init__(self, link: Link, topic: str, *, in_flight_bytes_max: int) -> None:
        self.stored = 0
        self._link = link
        self._prefix = bytes((CREATE_RECORD,)) + encode_name_field(topic)
        self._in_flight_bytes_max = in_flight_bytes_max
        self._on_the_way = 0
        self._answered = 0
        self._room = 0
        self._refused: tuple[int, Response] | None = None
        self._lost: ClientError | None = None
        self._wake: asyncio.Future[None] | None = None

    async def send(self, payloads: Sequence[bytes], timestamps: Sequence[int] | None) -> None:
        """Send all records and return when all are answered; see `Client.create_records_plain`."""
        if timestamps is not None and len(timestamps) != len(payloads):
            raise LocalProtocolError(f"{len(timestamps)} timestamps for {len(payloads)} records")
        if timestamps and not 0 <= min(timestamps) <= max(timestamps) < 2**63:
            raise LocalProtocolError("a timestamp is milliseconds since the epoch, or 0 for the server's time")
        largest = max(map(len, payloads), default=0) + 1
        chunk = max(1, min(CHUNK, self._in_flight_bytes_max // largest))
        window = max(chunk, min(WINDOW, self._in_flight_bytes_max // largest))
        for at in range(0, len(payloads), chunk):
            contents = self._encode(payloads[at : at + chunk], timestamps and timestamps[at : at + chunk])
            await self._until(window - len(contents))
            if self._lost is not None or self._refused is not None:
                break
            self._on_the_way += len(contents)
            self._link.send(self._link.sealer.seal_many(contents), len(contents), self)
        await self._until(0)
        if self._refused is not None:
            number, response = self._refused
            raise RequestError(f"the server refused record {number} of the call", response.status, response.repeat)
        if self._lost is not None:
            raise OutcomeUnknownError(
                f"the connection was lost after {self._answered} of {len(payloads)} answers; of the "
                f"{self._on_the_way} records on the way any number may be stored"
            ) from self._lost

    def _encode(self, payloads: Sequence[bytes], timestamps: Sequence[int] | None) -> list[bytes]:
        prefix, pack, crc32 = self._prefix, RECORD_FIELDS.pack, zlib.crc32
        if timestamps is None:
            return [prefix + pack(crc32(payload), 0) + payload for payload in payloads]
        return [
            prefix + pack(crc32(payload), timestamp) + payload
            for payload, timestamp in zip(payloads, timestamps, strict=True)
        ]

    async def _until(self, room: int) -> None:
        """Return when at most `room` requests are on the way, or the connection is lost."""
        while self._on_the_way > room and self._lost is None:
            self._room = room
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        self._wake = None

    def answered(self, responses: Sequence[Response]) -> None:
        """Count answers."""
        count = len(responses)
        # Acks are one and the same object, so that this comparison is a loop over pointers.
        if is_success(responses[0].status) and responses.count(responses[0]) == count:
            self.stored += count
        else:
            for number, response in enumerate(responses, self._answered):
                if is_success(response.status):
                    self.stored += 1
                else:
                    self._refused = self._refused or (number, response)
        self._answered += count
        self._on_the_way -= count
        if self._wake is not None and self._on_the_way <= self._room and not self._wake.done():
            self._wake.set_result(None)

    def lost(self, error: ClientError) -> None:
        """Wake the caller: nobody knows what became of the requests on the way."""
        self._lost = error
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
