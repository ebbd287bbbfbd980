"""Requests that do no harm when they are sent twice, answered even if the connection is lost meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf

from babelbus.clients.jebp.connection import Link
from babelbus.clients.jebp.errors import (
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    UnsupportedByServerError,
)
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.messages import Request, Response
from babelbus.protocols.jebp.status import is_success

UNKNOWN_COMMAND_STATUS = 0xB0
RETRY_SECONDS_MIN = 0.02
RETRY_SECONDS_MAX = 1.0

GetLink = Callable[[float | None], Awaitable[Link]]
"""Returns the connection, waiting for a new one this many seconds at the most; `None` is for as long as it takes."""


class Requests:
    """Sends requests, and sends them again on a new connection if `resend` is true."""

    def __init__(self, get_link: GetLink, *, timeout_seconds: float, resend: bool) -> None:
        self.timeout_seconds = timeout_seconds
        self._get_link = get_link
        self._resend = resend

    async def send(self, *contents: bytes, what: str, patient: bool = False) -> list[Response]:
        """Send requests together and return their answers.

        Raises:
            RequestTimeoutError: no answer within the time limit, unless it is `patient`.
            ClientError: the connection was lost, and is not made again.
        """
        now = asyncio.get_running_loop().time
        return await self._send(contents, what, None if patient else now() + self.timeout_seconds)

    async def _send(
        self, contents: tuple[bytes, ...], what: str, deadline: float | None, gives_up: bool = False
    ) -> list[Response]:
        now = asyncio.get_running_loop().time
        limit = self.timeout_seconds if gives_up else None
        lost_at = inf
        while True:
            link = await self._get_link(limit if deadline is None else max(deadline - now(), 0))
            try:
                async with asyncio.timeout_at(deadline):
                    return await link.call(*contents)
            except TimeoutError:
                raise RequestTimeoutError(f"{what}: no answer for {self.timeout_seconds:g} s") from None
            except (ConnectionLostError, RequestTimeoutError):
                lost_at = min(lost_at, now())
                if not self._resend or (limit is not None and now() - lost_at >= limit):
                    raise

    async def ask(
        self,
        content: bytes,
        what: str,
        *,
        patient: bool = False,
        gives_up: bool = False,
        retry_seconds: float | None = None,
    ) -> Response:
        """Send one request and return its answer.

        A request that the server asks to repeat is repeated for `retry_seconds`, by default the request's time limit.
        A `patient` one waits for an answer that is on its way, however slow, and for a lost connection as long as it
        takes; if it `gives_up`, for the request's time limit.

        Raises:
            UnsupportedByServerError: the server does not know the command.
            ClientError: as `send`.
        """
        now = asyncio.get_running_loop().time
        begun, pause = now(), RETRY_SECONDS_MIN
        deadline = None if patient else begun + self.timeout_seconds
        while True:
            (response,) = await self._send((content,), what, deadline, gives_up)
            if response.status == UNKNOWN_COMMAND_STATUS:
                raise UnsupportedByServerError(what, content[0])
            until = begun + (self.timeout_seconds if retry_seconds is None else retry_seconds)
            if not response.repeat or now() + pause >= until:
                return response
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    async def do(self, request: Request, what: str) -> Response:
        """Send one request and return its answer of success.

        Raises:
            RequestError: the server refused, or could not do it for `request_timeout_seconds`.
            RequestTimeoutError: no answer came; it may be done or not.
            UnsupportedByServerError: the server does not know the command.
            LocalProtocolError, ClientError: nothing was sent.
        """
        return check(await self.ask(encode_request(request), what), what)


def check(response: Response, what: str) -> Response:
    """Return an answer of success.

    Raises:
        RequestError: the server refused; its reason is in the message.
    """
    if not is_success(response.status):
        reason = str(response.content, "utf-8", "replace") or "the server refused"
        raise RequestError(f"{what}: {reason}", response.status, response.repeat)
    return response
