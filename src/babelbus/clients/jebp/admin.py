"""Requests of the administration API over the connection of a client (the method `admin` of jebp/1.2)."""

import asyncio
from collections.abc import AsyncGenerator
from math import inf

import msgspec

from babelbus.clients.jebp.blocking import BlockingClient
from babelbus.clients.jebp.calls import Calls
from babelbus.clients.jebp.errors import ConnectionLostError, OutcomeUnknownError, RequestTimeoutError
from babelbus.clients.portal import Twin, blocking, streaming
from babelbus.errors import LocalProtocolError
from babelbus.protocols.jebp.call_messages import Administer
from babelbus.protocols.jebp.frames import FRAME_BYTES_MAX

METHOD = "admin"
BODY_BYTES_MAX = FRAME_BYTES_MAX - 64 * 1024
"""The longest body of a request: one frame, without the head of the request."""
_Ended = tuple[int, bytes]


class Admin:
    """The administration API of the server of a client."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def ask(self, method: str, path: str, body: bytes, timeout_seconds: float) -> tuple[int, bytes]:
        """Send a request, and return the status and the body of its answer.

        Raises:
            RequestTimeoutError: there was no answer in time.
            OutcomeUnknownError: the connection was lost before the answer to a request that changes something.
            ClientError: there is no connection, or the server is older than jebp/1.2.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                parts = [part async for part in self.parts(method, path, body)]
        except TimeoutError:
            raise RequestTimeoutError(f"nothing came for {timeout_seconds:g} s") from None
        except ConnectionLostError as error:
            if method == "GET":
                raise
            raise OutcomeUnknownError(f"{error}; it may be done or not") from error
        return parts[-1][0], b"".join(part for _, part in parts)

    async def parts(
        self, method: str, path: str, body: bytes, silence_seconds: float = inf
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Send a request, and yield the status and a part of its answer as the parts come; at least one.

        Raises:
            RequestTimeoutError: the next part did not come for `silence_seconds`.
            ClientError: as `ask`.
            LocalProtocolError: the body is too long.
        """
        if len(body) > BODY_BYTES_MAX:
            raise LocalProtocolError(f"a request has {len(body):,} bytes, jebp carries {BODY_BYTES_MAX:,}")
        async with await self._calls.stream(METHOD, Administer(method, path, body)) as stream:
            while True:
                stream.expect_answer(silence_seconds)
                part = await anext(stream, None)
                stream.deadline = inf  # the caller may take its time
                if part is None:
                    break
                yield 200, bytes(part)
            assert stream.result is not None
            yield msgspec.msgpack.decode(stream.result, type=_Ended)


class BlockingAdmin(Twin[Admin]):
    """`Admin` without `await`, for the connection of a `BlockingClient`."""

    ask = blocking(Admin.ask)
    parts = streaming(Admin.parts)


def admin_of(client: BlockingClient) -> BlockingAdmin:
    """Return the administration API of the server of a client."""
    return BlockingAdmin(client._portal, Admin(client._twin.calls))
