"""Errors of the core -> the short codes that a client of jebp/1.2 maps to its own errors."""

from typing import Final

import msgspec

from babelbus.core.access import AccessRefusedError, InvalidAccessError
from babelbus.core.access.gate import AccessConflictError
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
from babelbus.core.topic import ReservedTopicError, UnknownPartitionError
from babelbus.errors import BabelbusError, InvalidTopicNameError, LocalProtocolError, StorageError
from babelbus.records.format import InvalidRecordError

FAILED: Final = "failed"

CODES: Final[dict[type[BabelbusError], str]] = {
    AccessRefusedError: "refused",
    ReservedTopicError: "refused",
    UnknownTopicError: "unknown_topic",
    NoDeadLetterTopicError: "unknown_topic",
    UnknownPartitionError: "bad_argument",
    UnknownGroupError: "unknown_group",
    TopicExistsError: "exists",
    GroupExistsError: "exists",
    GroupOwnedError: "locked",
    AccessConflictError: "conflict",
    LettersWaitingError: "conflict",
    AmbiguousGroupError: "bad_argument",
    InvalidAccessError: "bad_argument",
    InvalidGroupNameError: "bad_argument",
    InvalidSettingError: "bad_argument",
    InvalidTopicNameError: "bad_argument",
    InvalidRecordError: "bad_argument",
    LocalProtocolError: "bad_argument",
    UnknownFilterError: "bad_argument",
    GroupClosedError: "gone",
    RequestAbandonedError: "gone",
    RequestTimeoutError: "timeout",
    NoRespondersError: "no_responders",
    RequestFailedError: FAILED,
    QuotaExceededError: "quota",
    TooManyRequestsError: "quota",
    StorageError: "disk",
}
"""By class; an error has the code of its nearest class that is here. Families add theirs."""


class CallRefusedError(BabelbusError):
    """A method refuses a call with a code of its own; `details` is what the method's page says."""

    def __init__(self, code: str, message: str, details: object = None) -> None:
        super().__init__(message)
        self.code, self.details = code, details


def encode_error(error: BabelbusError, text: str) -> bytes:
    """Return the body of the item that says an error, with the text that the client gets."""
    if isinstance(error, CallRefusedError):
        return msgspec.msgpack.encode((error.code, text, error.details))
    code = next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), FAILED)
    return msgspec.msgpack.encode((code, text, None))
