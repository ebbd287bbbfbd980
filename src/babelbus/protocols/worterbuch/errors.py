"""Error codes of Wörterbuch (docs/specifications/worterbuch.md, section 11), and the errors that its modules raise."""

import math
from enum import IntEnum

from babelbus.errors import BabelbusError, RemoteProtocolError


class ErrorCode(IntEnum):
    """The code of an `err` message; a client's age decides which codes it knows: `Profile.error_code`."""

    ILLEGAL_WILDCARD = 0
    ILLEGAL_MULTI_WILDCARD = 1
    MULTI_WILDCARD_AT_ILLEGAL_POSITION = 2
    IO_ERROR = 3
    SERDE_ERROR = 4
    NO_SUCH_VALUE = 5
    NOT_SUBSCRIBED = 6
    PROTOCOL_NEGOTIATION_FAILED = 7
    INVALID_SERVER_RESPONSE = 8
    READ_ONLY_KEY = 9
    AUTHORIZATION_FAILED = 10
    AUTHORIZATION_REQUIRED = 11
    ALREADY_AUTHORIZED = 12
    MISSING_VALUE = 13
    UNAUTHORIZED = 14
    NO_PUB_STREAM = 15
    NOT_LEADER = 16
    CAS = 17
    CAS_VERSION_MISMATCH = 18
    NOT_IMPLEMENTED = 19
    KEY_IS_LOCKED = 20
    KEY_IS_NOT_LOCKED = 21
    LOCK_ACQUISITION_CANCELLED = 22
    FEATURE_DISABLED = 23
    CLIENT_ID_COLLISION = 24
    EMPTY_KEY = 25
    OTHER = 255


class MalformedMessageError(RemoteProtocolError):
    """A text is no message; it is answered with `code` if it has a transaction id, then the connection is closed."""

    def __init__(self, transaction_id: int | None, code: int, reason: str) -> None:
        super().__init__(f"malformed message: {reason}")
        self.transaction_id, self.code = transaction_id, code


class UnauthorizedError(BabelbusError):
    """A token does not prove what its client claims; the message says why, and never the token."""

    code = ErrorCode.UNAUTHORIZED


class MisfitTokenError(UnauthorizedError):
    """A genuine token that has expired, is for others or lacks a claim, or whose key is not known yet: no guess."""


class TooManyTokensError(UnauthorizedError):
    """The client has to wait for some seconds after wrong tokens."""

    def __init__(self, seconds: float) -> None:
        self.seconds = math.ceil(seconds)
        super().__init__(f"too many wrong tokens; try again in {self.seconds} s")


class RefusedError(BabelbusError):
    """A request that is answered with an error; the connection goes on."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class FinalRefusalError(BabelbusError):
    """A request that is answered with an error, and ends the connection."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text
