"""Passwords: argon2id in threads of their own, with bounded waits, and a cache of what was verified.

A check takes 64 MiB and tens of milliseconds, so it never runs in the event loop or in the loop's own threads, and only
a few may wait. EventMesh sends the password with each request: a password that was verified stays so for five minutes.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

import msgspec
import nacl.exceptions
import nacl.pwhash

from babelbus.clock import Clock
from babelbus.identities.credential import Credential, Issued, new_id
from babelbus.identities.errors import CredentialError, InvalidProofError, TooManyProofsError
from babelbus.metrics import Metrics

log = logging.getLogger(__name__)

Strength = Literal["interactive", "moderate"]

PASSWORD_BYTES_MAX: Final = 1_024
PASSWORD_BYTES_MIN: Final = 8
MEMORY_KIB_MAX: Final = 262_144
TIME_MAX: Final = 4
CACHE_SECONDS: Final = 300.0
CACHE_ENTRIES_MAX: Final = 10_000
WAITING_MAX: Final = 64
ADDRESS_WAITING_MAX: Final = 8
"""Checks of one address that may wait: one client must not fill the queue for all."""
NICENESS: Final = 10
"""The priority of a hash is below that of the event loop, which serves everybody else."""

_COSTS: Final[dict[Strength, tuple[int, int]]] = {
    "interactive": (nacl.pwhash.argon2id.OPSLIMIT_INTERACTIVE, nacl.pwhash.argon2id.MEMLIMIT_INTERACTIVE),
    "moderate": (nacl.pwhash.argon2id.OPSLIMIT_MODERATE, nacl.pwhash.argon2id.MEMLIMIT_MODERATE),
}
_HASH = re.compile(r"\$argon2id\$v=19\$m=(\d{1,9}),t=(\d{1,9}),p=(\d{1,9})\$[A-Za-z0-9+/]{22}\$[A-Za-z0-9+/]{43}")


def make_password(password: str, now_ms: int, *, strength: Strength = "interactive") -> Credential:
    """Build the credential of a password. Takes tens of milliseconds: never call it in the event loop.

    Raises:
        InvalidProofError: the password is shorter or longer than the limits.
    """
    data = password.encode("utf-8", "surrogateescape")
    if not PASSWORD_BYTES_MIN <= len(data) <= PASSWORD_BYTES_MAX:
        raise InvalidProofError(f"a password has {PASSWORD_BYTES_MIN} to {PASSWORD_BYTES_MAX} bytes, not {len(data)}")
    return Credential("password", new_id(), {"hash": _hash(data, strength)}, now_ms)


def issue_password(now_ms: int, *, strength: Strength = "interactive") -> Issued:
    """Build a random password of 144 bits. Takes tens of milliseconds: never call it in the event loop."""
    password = secrets.token_urlsafe(18)
    return Issued(make_password(password, now_ms, strength=strength), password)


def check_hash(credential: Credential) -> bytes:
    """Return the hash of a credential, whose parameters are within the limits.

    Raises:
        CredentialError: the hash is malformed, or asks for more memory or time than this server gives.
    """
    text = str(credential.data.get("hash", ""))
    match = _HASH.fullmatch(text)
    if credential.kind != "password" or match is None:
        raise CredentialError(f"credential {credential.id} has no hash of argon2id; set a new password")
    memory, time, lanes = map(int, match.groups())
    if not (8 <= memory <= MEMORY_KIB_MAX and 1 <= time <= TIME_MAX and lanes == 1):
        raise CredentialError(
            f"the hash of credential {credential.id} asks for {memory} KiB, {time} passes and {lanes} lanes, more than "
            f"{MEMORY_KIB_MAX} KiB, {TIME_MAX} passes and 1 lane; set a new password"
        )
    return text.encode()


class _Verified(msgspec.Struct, frozen=True):
    """A password that was verified. `credential` proves it as long as the principal has this credential."""

    user: str
    credential: Credential
    until: float


class Passwords:
    """Checks passwords against the credentials of the table, which `lookup` returns for a principal's name.

    A principal without a password, and an unknown one, costs the same time as a wrong password.

    Args:
        lookup: returns the credentials of kind `password` of a principal as they are now; called in the event loop.
        threads: hashes at the same time, each with 64 MiB (interactive) or 256 MiB (moderate).
        waiting_max: checks that may wait or run; further ones are refused.
    """

    def __init__(
        self,
        lookup: Callable[[str], Sequence[Credential]],
        clock: Clock,
        metrics: Metrics,
        *,
        strength: Strength = "interactive",
        threads: int = 1,
        waiting_max: int = WAITING_MAX,
        cache_entries_max: int = CACHE_ENTRIES_MAX,
    ) -> None:
        self._lookup = lookup
        self._clock = clock
        self._strength = strength
        self._waiting_max = waiting_max
        self._cache_entries_max = cache_entries_max
        self._key = secrets.token_bytes(32)
        self._cache: dict[bytes, _Verified] = {}
        self._running: dict[bytes, asyncio.Future[Credential | None]] = {}
        self._waiting: dict[str, int] = {}
        self._issuing = 0
        self._threads = ThreadPoolExecutor(threads, "passwords", initializer=_lower_priority)
        self._dummy: bytes | None = None
        self._dummy_lock = threading.Lock()
        self._refused = metrics.passwords_refused_total
        metrics.passwords_waiting.set_function(lambda: len(self._running))
        metrics.passwords_waiting_max.set(waiting_max)

    def proved(self, user: str, password: str) -> Credential | None:
        """Return the credential by which a password was verified in the last five minutes, if it still holds."""
        key = self._entry_key(user, password)
        return self._cache[key].credential if self._is_cached(key) else None

    async def verify(self, user: str, password: str, address: str = "") -> Credential | None:
        """Return the credential of a principal that a password proves, `None` for a wrong password.

        Raises:
            TooManyProofsError: too many checks wait, of all clients or of this address; nothing was checked.
        """
        key = self._entry_key(user, password)
        if self._is_cached(key):
            return self._cache[key].credential
        running = self._running.get(key)
        if running is None:
            running = self._begin(key, user, password, address)
        # A client that leaves cancels its own wait, not the hash that others may wait for.
        credential = await asyncio.shield(running)
        return credential if credential is not None and self._holds(user, credential) else None

    async def issue(self, password: str | None) -> Issued:
        """Build a password, or the credential of one that was chosen; then the secret is empty.

        Raises:
            InvalidProofError: the password is shorter or longer than the limits.
            TooManyProofsError: too many passwords wait.
        """
        if len(self._running) + self._issuing >= self._waiting_max:
            self._refused.inc()
            raise TooManyProofsError("too many passwords wait to be checked; try again in some seconds")
        self._issuing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._make, password)
        finally:
            self._issuing -= 1

    def _make(self, password: str | None) -> Issued:
        now_ms = self._clock.now_ms()
        if password is None:
            return issue_password(now_ms, strength=self._strength)
        return Issued(make_password(password, now_ms, strength=self._strength), "")

    def forget(self, principal: str) -> None:
        """Drop what was verified of a principal: its credentials or its rights changed."""
        for key in [key for key, entry in self._cache.items() if entry.user == principal]:
            del self._cache[key]

    def close(self) -> None:
        """Stop the threads; checks that wait are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._cache.clear()

    def _entry_key(self, user: str, password: str) -> bytes:
        name = user.encode("utf-8", "surrogateescape")
        data = b"%d:%b%b" % (len(name), name, password.encode("utf-8", "surrogateescape"))
        return hmac.digest(self._key, data, hashlib.sha256)

    def _is_cached(self, key: bytes) -> bool:
        entry = self._cache.get(key)
        if entry is None:
            return False
        if entry.until > self._clock.monotonic() and self._holds(entry.user, entry.credential):
            return True
        del self._cache[key]
        return False

    def _holds(self, user: str, credential: Credential) -> bool:
        """Return whether the principal has the credential now: it may have changed while the hash was made."""
        return credential in self._lookup(user) and credential.is_valid(self._clock.now_ms())

    def _begin(self, key: bytes, user: str, password: str, address: str) -> "asyncio.Future[Credential | None]":
        waiting = self._waiting.get(address, 0)
        if len(self._running) >= self._waiting_max or (address and waiting >= ADDRESS_WAITING_MAX):
            self._refused.inc()
            raise TooManyProofsError("too many passwords wait to be checked; try again in some seconds")
        now_ms = self._clock.now_ms()
        credentials = [one for one in self._lookup(user) if one.kind == "password" and one.is_valid(now_ms)]
        running = asyncio.wrap_future(
            self._threads.submit(self._find, password.encode("utf-8", "surrogateescape"), credentials)
        )
        self._running[key] = running
        self._waiting[address] = waiting + 1

        def end(done: "asyncio.Future[Credential | None]") -> None:
            del self._running[key]
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address]
            if done.cancelled() or done.exception() is not None:
                return
            credential = done.result()
            if credential is not None and self._holds(user, credential):
                self._keep(key, _Verified(user, credential, self._clock.monotonic() + CACHE_SECONDS))

        running.add_done_callback(end)
        return running

    def _keep(self, key: bytes, entry: _Verified) -> None:
        while len(self._cache) >= self._cache_entries_max:
            del self._cache[next(iter(self._cache))]
        self._cache[key] = entry

    # -- in a thread of the pool -------------------------------------------------------------------------------------

    def _find(self, password: bytes, credentials: Sequence[Credential]) -> Credential | None:
        """Return the credential that a password proves; at least one hash is made."""
        dummy = self._dummy_hash()  # made before the first check, so that no check shows by its time that it made it
        if len(password) > PASSWORD_BYTES_MAX:
            password, credentials = b"", ()
        hashed = False
        for credential in credentials:
            try:
                stored = check_hash(credential)
            except CredentialError as error:
                log.error("a password was refused: %s", error)
                continue
            hashed = True
            if _is_password(stored, password):
                return credential
        if not hashed:
            _is_password(dummy, password)
        return None

    def _dummy_hash(self) -> bytes:
        with self._dummy_lock:
            if self._dummy is None:
                self._dummy = _hash(secrets.token_bytes(16), self._strength).encode()
            return self._dummy


def _is_password(stored: bytes, password: bytes) -> bool:
    try:
        return nacl.pwhash.argon2id.verify(stored, password)
    except nacl.exceptions.InvalidkeyError:
        return False


def _hash(password: bytes, strength: Strength) -> str:
    passes, memory_bytes = _COSTS[strength]
    return nacl.pwhash.argon2id.str(password, opslimit=passes, memlimit=memory_bytes).decode("ascii")


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
