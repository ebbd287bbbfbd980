"""The errors of a client of jebp: all that `client.Client` raises on purpose, beside those of records.

No connection, a refusal, and an unknown outcome are different cases for a caller: the first
may be tried again, the second not, and the third needs a decision.
"""

from typing import ClassVar, TypeVar

from babelbus.errors import BabelbusError

E = TypeVar("E", bound=BabelbusError)


class ClientError(BabelbusError):
    """The root of the errors that a client raises because of its server or its connection."""


class ConnectionLostError(ClientError):
    """There is no connection, and the request was not carried out or may be sent again without harm."""


class OutcomeUnknownError(ClientError):
    """The connection ended before the answer came, and asking again could do it twice; look before you repeat it."""


class RequestTimeoutError(OutcomeUnknownError):
    """The server gave no answer within `request_timeout_seconds`; a record of the request may or may not be stored."""


class ClientClosedError(ClientError):
    """The client was closed, or never entered."""


class NotAuthorisedError(ClientError):
    """The server ended the connection right after the handshake, as it does with unknown clients."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(
            f"the server closed the connection after it saw our certificate {fingerprint}: add this fingerprint "
            f"on the server with 'babelbus clients add'"
        )
        self.fingerprint = fingerprint


class UntrustedServerError(ClientError):
    """The server proved to be another one than expected; nothing about the client was shown to it."""

    def __init__(self, fingerprint: str, expected: str) -> None:
        super().__init__(f"the server's fingerprint is {fingerprint}, expected was {expected}")
        self.fingerprint, self.expected = fingerprint, expected


def copy_error(error: E) -> E:
    """Return a copy of an error to raise: an error that is kept and raised again gets a longer traceback each time.

    The traceback holds the frames of every caller and their variables, so a kept error would hold them for good.
    """
    kind = type(error)
    copy = kind.__new__(kind, *error.args)  # not by `__init__`, whose arguments differ
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def is_loss(error: BaseException) -> bool:
    """Return whether an error is the loss of the connection, after which a stream may be opened again."""
    return isinstance(error, ConnectionLostError | RequestTimeoutError)


class UnsupportedByServerError(ClientError):
    """The server does not understand a command: it is no Babelbus, or one from before our extensions of jebp."""

    def __init__(self, what: str, command: int, reason: str = "") -> None:
        super().__init__(
            f"{what}: {reason}"
            if reason
            else f"{what}: this server does not understand command {command:02x}; Babelbus 0.1 or newer is needed"
        )
        self.command = command


class RequestError(ClientError):
    """The server refused a request. `repeat` is its advice: True when sending it again later may help.

    `status` is the status byte (specification, section 4.1). A call of jebp/1.2 has none (-1): it has a short `code`,
    and `details` that depend on the method.
    """

    code: str = ""
    details: object = None
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, status: int = -1, repeat: bool = False) -> None:
        shown = f" (status {status:02x} {0x31 if repeat else 0x30:02x})" if status >= 0 else ""
        super().__init__(message + shown)
        self.status, self.repeat = status, repeat


class ExistsError(RequestError):
    """There is something of this name already."""


class TopicExistsError(ExistsError):
    """There is a topic of this name already."""


class UnknownTopicError(RequestError):
    """There is no topic of this name, or this client may not read it."""


class UnknownGroupError(RequestError):
    """The topic has no consumer group of this name: create it, or consume with `create=True`."""


class UnknownPartitionError(RequestError):
    """The topic has no partition of this number."""


class NoRightsError(RequestError):
    """The client has no right to do this; the message names the right and the subject."""


class BadArgumentError(RequestError):
    """The server cannot carry out the request with these arguments."""


class ConflictError(RequestError):
    """Somebody else was faster: what the request expects is no longer so."""


class VersionConflictError(ConflictError):
    """Compare-and-set met another version than it was told: `version` is the one that the key has."""

    def __init__(self, message: str, version: int) -> None:
        super().__init__(message)
        self.version = version


class NoSuchKeyError(RequestError):
    """The key of the state has no value."""


class LockedError(RequestError):
    """Somebody else holds this for himself."""


class LockLostError(ClientError):
    """The connection was lost while a lock was held: somebody else may hold the lock now."""


class NoRespondersError(RequestError):
    """Nobody answers requests to this subject now."""


class RequestFailedError(RequestError):
    """The responder, or the server, could not answer; the message says why."""


class QuotaError(RequestError):
    """A limit of the server, or of this client there, is reached."""


class ServerDiskError(RequestError):
    """The server's disk refused; the same request may succeed later."""

    retriable = True


TEMPORARY_ERRORS = (ServerDiskError, QuotaError)
"""After these a stream may be opened again a little later."""


class GoneError(RequestError):
    """The object of the call has ended: the group or topic was removed, or the requester has left."""


class HistoryGoneError(GoneError):
    """Compaction has removed changes of that time: `offset` and `time_ms` are the earliest that can be asked for.

    `time_ms` is `None` if the server cannot tell.
    """

    def __init__(self, message: str, offset: int, time_ms: int | None) -> None:
        super().__init__(message)
        self.offset, self.time_ms = offset, time_ms


class OffsetOutOfRangeError(RequestError):
    """Retention removed the records at this offset, or the offset is not written yet.

    `first` to `end` (excluded) are the offsets that exist; -1 if the server does not tell.
    """

    def __init__(self, offset: int, status: int, first: int = -1, end: int = -1) -> None:
        there = f": there are {first} to {end}" if first >= 0 else ""
        super().__init__(f"offset {offset} does not exist{there}", status, repeat=False)
        self.offset, self.first, self.end = offset, first, end


class RecordTooLargeError(RequestError):
    """The next record does not fit into `bytes_max`, or the server found it damaged: its log says which."""

    def __init__(self, bytes_max: int, status: int) -> None:
        super().__init__(
            f"the next record does not fit into {bytes_max} bytes, or it is damaged (see the server's log)",
            status,
            repeat=False,
        )
        self.bytes_max = bytes_max


CALL_ERRORS: dict[str, type[RequestError]] = {
    "refused": NoRightsError,
    "unknown_topic": UnknownTopicError,
    "unknown_group": UnknownGroupError,
    "exists": ExistsError,
    "conflict": ConflictError,
    "locked": LockedError,
    "bad_argument": BadArgumentError,
    "too_large": BadArgumentError,
    "no_responders": NoRespondersError,
    "failed": RequestFailedError,
    "disk": ServerDiskError,
    "quota": QuotaError,
    "gone": GoneError,
    "unknown_key": NoSuchKeyError,
}
"""By the code of a call's error; any other code is a plain `RequestError`."""


def call_error(what: str, code: str, message: str, details: object = None) -> ClientError:
    """Return the error of a call that the server ended with this code."""
    text = f"{what}: {message}"
    if code == "timeout":
        return RequestTimeoutError(text)
    if code == "unsupported":
        return UnsupportedByServerError(what, 0x40, message)
    error = CALL_ERRORS.get(code, RequestError)(text, repeat=code == "disk")
    error.code, error.details = code, details
    return error
