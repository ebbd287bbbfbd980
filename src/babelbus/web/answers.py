"""How the administration endpoint answers: JSON, JSON lines, and every failure as {"error": text, "code": word}."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
from aiohttp import hdrs, web

from babelbus.core.access import AccessRefusedError, Identity, InvalidAccessError
from babelbus.core.access.gate import AccessConflictError, LockOutError
from babelbus.core.catalog import TopicExistsError, UnknownTopicError
from babelbus.core.groups import (
    AmbiguousGroupError,
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
    InvalidMomentsError,
    InvalidPatternError,
    InvalidValueError,
    NoSuchKeyError,
    ReadOnlyKeyError,
    TooManyChangesError,
    ValueChangedError,
    VersionedError,
    VersionMismatchError,
)
from babelbus.core.topic import ClosedTopicError, ReservedTopicError, UnknownPartitionError
from babelbus.errors import UNREADABLE, BabelbusError, ConfigError, InvalidTopicNameError, StorageError
from babelbus.identities.errors import CredentialError, InvalidProofError, KeyFileError, TooManyProofsError
from babelbus.records.format import InvalidRecordError
from babelbus.storage.errors import DiskFullError, OffsetOutOfRangeError
from babelbus.web.callers import caller_of
from babelbus.web.calls import BODY_BYTES_MAX, LINES_BEGUN, SAFE_HEADERS, Call, Lines
from babelbus.web.errors import (
    ClientExistsError,
    ImportedPrincipalError,
    InvalidCopyError,
    InvalidEventError,
    MoveRefusedError,
    NoClusterError,
    NoRecordError,
    SessionsClosedError,
    TooManyPipelinesError,
    UnknownClientError,
    UnknownConnectionError,
    UnknownConsumerError,
    UnknownPrincipalError,
    UnknownResponderError,
)
from babelbus.web.search.language import FilterError

log = logging.getLogger(__name__)

LINES_AT_ONCE = 1_000
T = TypeVar("T")
HttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The first line that fits decides: HTTP status, and the code that a program looks at.
ERRORS: list[tuple[type[BabelbusError], int, str]] = [
    (UnknownTopicError, 404, "unknown_topic"),
    (ClosedTopicError, 503, "topic_closed"),
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
    (AmbiguousGroupError, 409, "ambiguous_group"),
    (NoSuchKeyError, 404, "no_such_key"),
    (InvalidKeyError, 400, "invalid_key"),
    (InvalidPatternError, 400, "invalid_pattern"),
    (InvalidValueError, 400, "invalid_value"),
    (InvalidEventError, 400, "invalid_event"),
    (InvalidRecordError, 400, "invalid_event"),
    (NoRecordError, 404, "no_record"),
    (InvalidCopyError, 400, "invalid_copy"),
    (FilterError, 400, "invalid_filter"),
    (ReadOnlyKeyError, 403, "read_only_key"),
    (TooManyPipelinesError, 429, "too_many_pipelines"),
    (VersionedError, 409, "versioned"),
    (VersionMismatchError, 409, "version_mismatch"),
    (ValueChangedError, 409, "value_changed"),
    (InvalidMomentsError, 400, "invalid_moments"),
    (TooManyChangesError, 400, "too_many_changes"),
    (HistoryGoneError, 410, "history_gone"),
    (OffsetOutOfRangeError, 416, "offset_out_of_range"),
    (AccessRefusedError, 403, "refused"),
    (ReservedTopicError, 403, "refused"),
    (QuotaExceededError, 429, "quota_exceeded"),
    (AccessConflictError, 409, "access_conflict"),
    (LockOutError, 409, "locks_out"),
    (UnknownPrincipalError, 404, "unknown_principal"),
    (UnknownConnectionError, 404, "unknown_connection"),
    (SessionsClosedError, 403, "no_login"),
    (ImportedPrincipalError, 409, "imported_principal"),
    (MoveRefusedError, 409, "move_refused"),
    (NoClusterError, 404, "no_cluster"),
    (ClientExistsError, 409, "client_exists"),
    (UnknownClientError, 404, "unknown_client"),
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
    408: "timeout",
    413: "too_large",
    421: "misdirected",
    429: "too_many_guesses",
    503: "busy",
}
TOLD_STATUSES = (400, 401, 403, 421, 429, 503)
"""Whose text is ours and says more than the status."""
TOLD_HEADERS = (hdrs.ALLOW, hdrs.RETRY_AFTER, hdrs.WWW_AUTHENTICATE)


@web.middleware
async def answer_errors(request: web.Request, handler: HttpHandler) -> web.StreamResponse:
    """Answer every failure as {"error": text, "code": word}; an unforeseen failure is logged and not shown."""
    try:
        return await handler(request)
    except ConnectionError as error:
        # Not raised again: aiohttp would log a traceback. It fails to write this response too, and ends in silence.
        log.debug("%s %s: the client disconnected: %s", request.method, request.path, error)
        return web.Response(status=500)
    except Exception as error:
        reply = answer_of(error, f"{request.method} {request.path}", caller_of(request))
        if LINES_BEGUN in request and request.transport is not None:
            # The lines would not end with a second response among them, and must not end as if they were complete.
            log.info("%s %s: cut short: %s", request.method, request.path, error)
            request.transport.close()
        return reply


def answer_of(error: Exception, request: str, caller: Identity | None) -> web.Response:
    """Return the answer to a request that failed, with the names as the caller knows them."""
    if isinstance(error, web.HTTPException):
        headers = {name: value for name, value in error.headers.items() if name in TOLD_HEADERS}
        text = error.text if error.status in TOLD_STATUSES else error.reason
        reply = answer({"error": text, "code": CODES.get(error.status, "failed")}, status=error.status, headers=headers)
        if error.status == 429:
            reply.force_close()
        return reply
    if isinstance(error, BabelbusError):
        status, code = next((status, code) for type_, status, code in ERRORS if isinstance(error, type_))
        more = {"offset": error.offset, "time_ms": error.time_ms} if isinstance(error, HistoryGoneError) else {}
        if isinstance(error, FilterError):
            more = {"column": error.column}
        told = str(error) if caller is None else caller.relative_text(str(error))
        return answer({"error": told, "code": code, **more}, status=status)
    log.error("%s failed", request, exc_info=error)
    return answer({"error": "the server failed; its log says more", "code": "internal"}, status=500)


async def read_body(call: Call, type_: type[T], bytes_max: int = BODY_BYTES_MAX) -> T:
    """Read a JSON body of this type, one mebibyte at most by default; the error of a wrong body names the key."""
    content = await call.read(bytes_max)
    try:
        return msgspec.json.decode(content, type=type_)
    except UNREADABLE as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise web.HTTPBadRequest(text=f"the body is wrong: {reason}") from error


def read_text(call: Call, name: str) -> str:
    """Read a mandatory parameter of the query."""
    try:
        return call.query[name]
    except KeyError:
        raise web.HTTPBadRequest(text=f"the query has no {name}") from None


def read_number(call: Call, name: str, minimum: int = 0) -> int | None:
    """Read an optional whole number of the query."""
    text = call.query.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not minimum <= int(text) < 2**63:
        raise web.HTTPBadRequest(text=f"{name} is a whole number from {minimum} on, not {text[:40]!r}")
    return int(text)


def read_moment(call: Call, name: str = "as_of") -> AsOf | None:
    """Read `as_of_offset` or `as_of_time` (ms since 1970); neither is now."""
    offset, time_ms = read_number(call, f"{name}_offset"), read_number(call, f"{name}_time")
    if offset is None and time_ms is None:
        return None
    try:
        return AsOf(offset=offset, time_ms=time_ms)
    except ValueError:
        raise web.HTTPBadRequest(text=f"{name}_offset and {name}_time are two moments: give one of them") from None


def answer(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Answer with JSON."""
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers=SAFE_HEADERS | (headers or {}),
    )


async def write_lines(response: Lines, lines: Iterable[bytes]) -> None:
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
