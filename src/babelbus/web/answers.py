"""How the administration endpoint answers: JSON, JSON lines, and every failure as {"error": text, "code": word}."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
from aiohttp import hdrs, web

from babelbus.core.access import AccessRefusedError, InvalidAccessError
from babelbus.core.access.gate import AccessConflictError
from babelbus.core.catalog import TopicExistsError, UnknownTopicError
from babelbus.core.groups import (
    GroupClosedError,
    GroupExistsError,
    GroupOwnedError,
    InvalidGroupNameError,
    LettersWaitingError,
    NoDeadLetterTopicError,
    UnknownFilterError,
    UnknownGroupError,
)
from babelbus.core.quotas import QuotaExceededError
from babelbus.core.request import (
    NoRespondersError,
    RequestAbandonedError,
    RequestFailedError,
    RequestTimeoutError,
    TooManyRequestsError,
)
from babelbus.core.settings import InvalidSettingError
from babelbus.core.state import (
    AsOf,
    HistoryGoneError,
    InvalidKeyError,
    InvalidPatternError,
    InvalidValueError,
    NoSuchKeyError,
    ReadOnlyKeyError,
    VersionedError,
    VersionMismatchError,
)
from babelbus.core.topic import UnknownPartitionError
from babelbus.errors import BabelbusError, ConfigError, InvalidTopicNameError, StorageError
from babelbus.identities.errors import CredentialError, InvalidProofError, KeyFileError, TooManyProofsError
from babelbus.storage.errors import DiskFullError, OffsetOutOfRangeError
from babelbus.web.callers import told
from babelbus.web.errors import (
    ImportedPrincipalError,
    InvalidEventError,
    TooManyPipelinesError,
    UnknownConsumerError,
    UnknownPrincipalError,
    UnknownResponderError,
)

log = logging.getLogger(__name__)

LINES_AT_ONCE = 1_000
LINES_TYPE = "application/x-ndjson"
SAFE_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""No cache keeps an answer, and no browser takes it for anything else."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The first line that fits decides: HTTP status, and the code that a program looks at.
ERRORS: list[tuple[type[BabelbusError], int, str]] = [
    (UnknownTopicError, 404, "unknown_topic"),
    (TopicExistsError, 409, "topic_exists"),
    (InvalidTopicNameError, 400, "invalid_topic_name"),
    (InvalidSettingError, 400, "invalid_setting"),
    (ConfigError, 400, "invalid_setting"),
    (UnknownPartitionError, 404, "unknown_partition"),
    (UnknownGroupError, 404, "unknown_group"),
    (GroupExistsError, 409, "group_exists"),
    (GroupOwnedError, 409, "group_owned"),
    (GroupClosedError, 409, "group_closed"),
    (InvalidGroupNameError, 400, "invalid_group_name"),
    (UnknownFilterError, 400, "unknown_filter"),
    (UnknownConsumerError, 410, "unknown_consumer"),
    (UnknownResponderError, 410, "unknown_responder"),
    (NoRespondersError, 404, "no_responders"),
    (RequestTimeoutError, 504, "no_reply"),
    (RequestFailedError, 502, "responder_failed"),
    (RequestAbandonedError, 503, "stopping"),
    (TooManyRequestsError, 503, "busy"),
    (NoDeadLetterTopicError, 404, "no_dead_letters"),
    (LettersWaitingError, 409, "letters_waiting"),
    (NoSuchKeyError, 404, "no_such_key"),
    (InvalidKeyError, 400, "invalid_key"),
    (InvalidPatternError, 400, "invalid_pattern"),
    (InvalidValueError, 400, "invalid_value"),
    (InvalidEventError, 400, "invalid_event"),
    (ReadOnlyKeyError, 403, "read_only_key"),
    (TooManyPipelinesError, 429, "too_many_pipelines"),
    (VersionedError, 409, "versioned"),
    (VersionMismatchError, 409, "version_mismatch"),
    (HistoryGoneError, 410, "history_gone"),
    (OffsetOutOfRangeError, 416, "offset_out_of_range"),
    (AccessRefusedError, 403, "refused"),
    (QuotaExceededError, 429, "quota_exceeded"),
    (AccessConflictError, 409, "access_conflict"),
    (UnknownPrincipalError, 404, "unknown_principal"),
    (ImportedPrincipalError, 409, "imported_principal"),
    (InvalidAccessError, 400, "invalid_access"),
    (InvalidProofError, 400, "invalid_credential"),
    (CredentialError, 400, "invalid_credential"),
    (TooManyProofsError, 503, "busy"),
    (KeyFileError, 503, "key_file"),
    (DiskFullError, 507, "disk_full"),
    (StorageError, 503, "storage"),
    (BabelbusError, 500, "failed"),
]
CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    421: "misdirected",
    429: "too_many_guesses",
    503: "busy",
}
TOLD_STATUSES = (400, 401, 403, 421, 429, 503)
"""Whose text is ours and says more than the status."""
TOLD_HEADERS = (hdrs.ALLOW, hdrs.RETRY_AFTER, hdrs.WWW_AUTHENTICATE)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every failure as {"error": text, "code": word}; an unforeseen failure is logged and not shown."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        headers = {name: value for name, value in error.headers.items() if name in TOLD_HEADERS}
        text = error.text if error.status in TOLD_STATUSES else error.reason
        reply = answer({"error": text, "code": CODES.get(error.status, "failed")}, status=error.status, headers=headers)
        if error.status == 429:
            reply.force_close()
        return reply
    except BabelbusError as error:
        status, code = next((status, code) for type_, status, code in ERRORS if isinstance(error, type_))
        more = {"offset": error.offset, "time_ms": error.time_ms} if isinstance(error, HistoryGoneError) else {}
        return answer({"error": told(request, error), "code": code, **more}, status=status)
    except ConnectionError as error:
        # Not raised again: aiohttp would log a traceback. It fails to write this response too, and ends in silence.
        log.debug("%s %s: the client disconnected: %s", request.method, request.path, error)
        return web.Response(status=500)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return answer({"error": "the server failed; its log says more", "code": "internal"}, status=500)


async def read_body(request: web.Request, type_: type[T], bytes_max: int | None = None) -> T:
    """Read a JSON body of this type, one mebibyte at most by default; the error of a wrong body names the key."""
    content = await request.read() if bytes_max is None else await read_bytes(request, bytes_max)
    try:
        return msgspec.json.decode(content, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise web.HTTPBadRequest(text=f"the body is wrong: {error}") from error


async def read_bytes(request: web.Request, bytes_max: int) -> bytes:
    """Read a body; a longer body is refused before all of it has arrived."""
    content = bytearray()
    async for chunk in request.content.iter_any():
        content += chunk
        if len(content) > bytes_max:
            raise web.HTTPRequestEntityTooLarge(bytes_max, len(content))
    return bytes(content)


def read_text(request: web.Request, name: str) -> str:
    """Read a mandatory parameter of the query."""
    try:
        return request.query[name]
    except KeyError:
        raise web.HTTPBadRequest(text=f"the query has no {name}") from None


def read_number(request: web.Request, name: str, minimum: int = 0) -> int | None:
    """Read an optional whole number of the query."""
    text = request.query.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not minimum <= int(text[:20]) < 2**63:
        raise web.HTTPBadRequest(text=f"{name} is a whole number from {minimum} on, not {text[:40]!r}")
    return int(text)


def read_moment(request: web.Request) -> AsOf | None:
    """Read `as_of_offset` or `as_of_time` (ms since 1970); neither is now."""
    offset, time_ms = read_number(request, "as_of_offset"), read_number(request, "as_of_time")
    if offset is None and time_ms is None:
        return None
    try:
        return AsOf(offset=offset, time_ms=time_ms)
    except ValueError:
        raise web.HTTPBadRequest(text="as_of_offset and as_of_time are two moments: give one of them") from None


def answer(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Answer with JSON."""
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers=SAFE_HEADERS | (headers or {}),
    )


async def begin_lines(request: web.Request) -> web.StreamResponse:
    """Begin an answer of JSON lines."""
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: LINES_TYPE} | SAFE_HEADERS)
    await response.prepare(request)
    return response


async def write_lines(response: web.StreamResponse, lines: Iterable[bytes]) -> None:
    """Write lines as fast as the reader takes them; other tasks run in between.

    Raises:
        ConnectionResetError: the reader has disconnected.
    """
    batch: list[bytes] = []
    for line in lines:
        batch.append(line)
        if len(batch) == LINES_AT_ONCE:
            await response.write(b"\n".join(batch) + b"\n")
            batch.clear()
            await asyncio.sleep(0)
    if batch:
        await response.write(b"\n".join(batch) + b"\n")
