"""Signatures of messages and replays of them, and the wait of a client that guesses secrets."""

from collections.abc import Callable
from typing import Final

from babelbus.identities.guessing import Door
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.errors import AuthenticationError, MalformedMessageError
from babelbus.protocols.zbus.messages import Message

REPLAYS_MAX: Final = 100_000


class ReplayGuard:
    """Refuses a signature that was seen in the last `window_seconds`; remembers `entries_max` of them at the most.

    The protocol signs neither a time nor a nonce (7.1): a replay after the window passes. Two messages without an id
    that are the same in every byte have one signature, as a client's refill of a window (`sub`): the connection that
    sent it first may repeat it, and no other connection. An id that was not signed could be struck or changed, so it
    makes no message another one.
    """

    def __init__(self, window_seconds: float, entries_max: int = REPLAYS_MAX) -> None:
        self._window_seconds = window_seconds
        self._entries_max = entries_max
        self._seen: dict[bytes, tuple[float, str | None]] = {}
        """Signature -> when it came, and the connection that may repeat it; the oldest first."""

    def admit(self, message: Message, connection: str, now_seconds: float) -> None:
        """Record the signature of a message that was verified, at a time of the monotonic clock.

        Raises:
            AuthenticationError: the signature was recorded already.
        """
        seen = self._seen
        while seen:
            oldest = next(iter(seen))
            if now_seconds - seen[oldest][0] < self._window_seconds:
                break
            del seen[oldest]
        try:
            key = bytes.fromhex(message.headers["signature"])
        except ValueError as error:
            raise MalformedMessageError("signature is no hex") from error
        owner = None if "id" in message.headers else connection
        before = seen.pop(key, None)
        if before is not None and (before[1] is None or before[1] != owner):
            seen[key] = now_seconds, before[1]
            raise AuthenticationError(m.SIGNATURE_MISMATCHED)
        if len(seen) >= self._entries_max:
            del seen[next(iter(seen))]
        seen[key] = now_seconds, owner


class Prover:
    """The proofs of one connection.

    A connection that has proved a key is not delayed for this key: else a client that shares its address with a
    guesser could not go on.
    """

    def __init__(
        self, door: Door, guard: ReplayGuard | None, clock: Callable[[], float], address: str | None, connection: str
    ) -> None:
        self._door = door
        self._guard = guard
        self._clock = clock
        self._address = (address or "local").rpartition(":")[0] or "local"
        self._connection = connection
        self._proved: str | None = None

    def check(self, message: Message, verify: Callable[[], str]) -> None:
        """Check who sent a message; `verify` checks its signature and returns the apiKey.

        Raises:
            AuthenticationError: the proof fails, is a replay, or comes too soon after wrong proofs.
        """
        api_key = message.headers.get("apiKey")
        if api_key is None or "signature" not in message.headers or api_key == self._proved:
            verify()
        else:
            if self._door.check(self._address, api_key):
                raise AuthenticationError(m.TOO_MANY_PROOFS)
            try:
                verify()
            except AuthenticationError:
                self._door.failed(self._address, api_key)
                raise
            self._door.succeeded(self._address, api_key)
            self._proved = api_key
        if self._guard is not None:
            self._guard.admit(message, self._connection, self._clock())
