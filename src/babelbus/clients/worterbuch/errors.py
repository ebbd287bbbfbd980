"""The errors of a client of Wörterbuch: all that `client.Client` raises because of its server."""

from babelbus.clients.worterbuch.codec import Err, decode_metadata
from babelbus.errors import BabelbusError
from babelbus.protocols.worterbuch.errors import ErrorCode


class ClientError(BabelbusError):
    """The root of the errors that a client raises because of its server or its connection."""


class ConnectionLostError(ClientError):
    """The connection is gone; a request without an answer may have been carried out."""


class RequestTimeoutError(ClientError):
    """The server gave no answer within `request_timeout_seconds`; the request may or may not be carried out."""


class RequestError(ClientError):
    """The server refused a request; `code` is usually one of `ErrorCode`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} (error {code})")
        self.code, self.text = code, text


class NoSuchValueError(RequestError):
    """There is nothing under this key."""


class KeyLockedError(RequestError):
    """Another client holds the lock."""


class VersionedError(RequestError):
    """Compare-and-set met another version than its own, or a plain `set` met any version (codes 17, 18)."""


class UnauthorizedError(RequestError):
    """The token is invalid, or does not allow the request."""


ERRORS: dict[int, type[RequestError]] = {
    ErrorCode.NO_SUCH_VALUE: NoSuchValueError,
    ErrorCode.KEY_IS_LOCKED: KeyLockedError,
    ErrorCode.CAS: VersionedError,
    ErrorCode.CAS_VERSION_MISMATCH: VersionedError,
    ErrorCode.AUTHORIZATION_FAILED: UnauthorizedError,
    ErrorCode.AUTHORIZATION_REQUIRED: UnauthorizedError,
    ErrorCode.UNAUTHORIZED: UnauthorizedError,
}


def error_of(message: Err) -> RequestError:
    """Return the error of a refused request."""
    kind = ERRORS.get(message.error_code, RequestError)
    return kind(message.error_code, decode_metadata(message.metadata))
