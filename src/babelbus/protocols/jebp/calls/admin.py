"""The method `admin` of jebp/1.2: requests of the administration API, under the principal of the connection.

    open   [method, path with query, body]         the JSON API of docs/operations.md, "Administration endpoint"
    item   a part of the answer's body             of an answer of JSON lines as they come, or of a long one
    end    [status, last part of the body]

An answer of lines ends when the client cancels the call, or when the rights of the client are those of another entry
of the table than at its beginning.
"""

import asyncio
from typing import Final

import msgspec

from babelbus.protocols.jebp.call_messages import Administer
from babelbus.protocols.jebp.calls.call import Call, Method, Stream
from babelbus.protocols.jebp.calls.errors import CallRefusedError
from babelbus.protocols.service import Administer as AnswerRequest
from babelbus.units import MIB

PART_BYTES_MAX: Final = MIB
"""The longest part: other calls of the connection have their turn between two parts."""


class Lines:
    """The answer of one request, as far as it is written before its end."""

    def __init__(self, call: Call) -> None:
        self.address = call.address
        self._call = call
        self._room = asyncio.Event()
        self.begun = False

    async def write(self, data: bytes) -> None:
        """Send a part of the answer; wait while the client does not take what was sent."""
        self.begun = True
        for at in range(0, len(data), PART_BYTES_MAX):
            while self._call.full:
                self._room.clear()
                await self._room.wait()
            self._call.send(data[at : at + PART_BYTES_MAX])

    def resume(self) -> None:
        """Continue: the connection has room again."""
        self._room.set()


class _Request(Stream):
    """One request, until it is answered."""

    def __init__(self, call: Call, lines: Lines) -> None:
        self._call = call
        self._lines = lines
        self._principal = call.principal

    def resume(self) -> None:
        self._lines.resume()

    def access_changed(self) -> None:
        """End an answer of lines that began under other rights; any other request is answered all the same."""
        if self._lines.begun and self._call.principal.rights is not self._principal.rights:
            self._call.fail(CallRefusedError("gone", "the rights of this client are others now: ask again"))


def make_method(answer: AnswerRequest) -> Method:
    """Return the method, which hands requests to `answer`."""

    def begin(call: Call, request: Administer) -> Stream:
        lines = Lines(call)
        call.run(_answer(call, request, lines, answer))
        return _Request(call, lines)

    return Method(Administer, begin)


async def _answer(call: Call, request: Administer, lines: Lines, answer: AnswerRequest) -> None:
    status, body = await answer(call.principal, request.method, request.path, request.body, lines)
    last = (len(body) - 1) // PART_BYTES_MAX * PART_BYTES_MAX if body else 0
    await lines.write(body[:last])
    call.end_encoded(msgspec.msgpack.encode((status, body[last:])))
