"""What a client asks of the locks that keys may have (docs/specifications/worterbuch.md, section 5.6)."""

from babelbus.core.state import LockHeldError, NotLockedError
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.access import Access
from babelbus.protocols.worterbuch.answers import Answers
from babelbus.protocols.worterbuch.codec import encode_ack
from babelbus.protocols.worterbuch.errors import ErrorCode, RefusedError
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.translator import Translator


class LockRequests:
    """The requests of one client that take and give back locks: each method does one, and gives its answer.

    Raises:
        RefusedError: it cannot be done, or may not.
    """

    def __init__(self, hub: Hub, client_id: str, translator: Translator, access: Access, answers: Answers) -> None:
        self._hub = hub
        self._locks = hub.state.locks
        self._client_id = client_id
        self._translator = translator
        self._access = access
        self._answers = answers

    def lock(self, message: m.Lock) -> bytes:
        """Lock a key, if nobody has."""
        self._need(message.key)
        try:
            if self._locks.lock(message.key, self._client_id):
                self._show(message.key)
        except LockHeldError as error:
            raise RefusedError(ErrorCode.KEY_IS_LOCKED, str(error)) from None
        return encode_ack(message.transaction_id)

    def acquire(self, message: m.AcquireLock) -> bytes:
        """Lock a key, or wait for it: then the answer comes from `Session.send_granted`."""
        self._need(message.key)
        if not self._locks.acquire(message.key, self._client_id, message.transaction_id):
            return b""
        self._show(message.key)
        return encode_ack(message.transaction_id)

    def release(self, message: m.ReleaseLock) -> bytes:
        """Give a lock back, or give up waiting for it."""
        self._need(message.key)
        try:
            granted = self._locks.release(message.key, self._client_id)
        except NotLockedError as error:
            raise RefusedError(ErrorCode.KEY_IS_NOT_LOCKED, str(error)) from None
        except LockHeldError as error:
            code = ErrorCode.LOCK_ACQUISITION_CANCELLED
            for wait in error.cancelled:
                self._answers.send(self._translator.encode_error(wait, code, "given up"))
            raise RefusedError(ErrorCode.KEY_IS_LOCKED, str(error)) from None
        self._hub.grant(granted)
        self._hub.flush()
        return encode_ack(message.transaction_id)

    def _need(self, key: str) -> None:
        self._translator.check_key(key)
        self._access.need("write", key)

    def _show(self, key: str) -> None:
        if self._hub.settings.extended_monitoring:
            self._hub.show(f"locks/{key}", self._client_id)
