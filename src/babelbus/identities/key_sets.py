"""Key sets (JWKS) of a url or a file: fetched in the background, kept when a fetch fails.

A provider that hangs, fails or answers nonsense changes nothing: the keys of the last good answer stay. A token that
names an unknown key asks for a fetch, at most one in 30 s, so tokens with made-up ids cause no more fetches than that.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from babelbus.clock import Clock
from babelbus.config import is_loopback
from babelbus.errors import ConfigError
from babelbus.identities.errors import UnknownKeyError
from babelbus.identities.jwts import Key, key_of
from babelbus.metrics import Metrics

log = logging.getLogger(__name__)

SET_BYTES_MAX: Final = 1_048_576
KEYS_MAX: Final = 32
REFRESH_SECONDS: Final = 300.0
FETCH_SECONDS_MIN: Final = 30.0
FETCH_SECONDS_MAX: Final = 10.0


class _Set(msgspec.Struct, frozen=True):
    keys: list[dict[str, Any]]


class KeySetError(Exception):
    """A fetch failed; the text says why."""


class KeySet:
    """The keys of one provider. `start` it in the event loop; until the first fetch is done it has no key.

    Args:
        place: an https url, an http url of this machine, or the path of a file.

    Raises:
        ConfigError: the url is neither.
    """

    def __init__(
        self, place: str, clock: Clock, metrics: Metrics, *, fetch_seconds_max: float = FETCH_SECONDS_MAX
    ) -> None:
        self.place = place
        self._is_url = "://" in place
        if self._is_url:
            _check_url(place)
        self._clock = clock
        self._fetches = metrics.key_set_fetches_total
        self._fetch_seconds_max = fetch_seconds_max
        self._keys: dict[str | None, list[Key]] = {}
        self._fingerprints: set[str] = set()
        self._fetched_at: float | None = None
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to fetch."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop; a fetch that is under way is given up."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def find(self, key_id: str | None) -> Sequence[Key]:
        """Return the keys with an id; every key for a token without an id, whose issuer has one key most of the time.

        Raises:
            UnknownKeyError: there is no such key; it is asked for in the background.
        """
        keys = [key for some in self._keys.values() for key in some] if key_id is None else self._keys.get(key_id, [])
        if not keys:
            self._ask()
            raise UnknownKeyError("the key of this token is not known; try again in half a minute")
        return keys

    def has_lost(self, fingerprint: str) -> bool:
        """Return whether the set, once it was fetched, lacks a key."""
        return bool(fingerprint and self._keys) and fingerprint not in self._fingerprints

    def _ask(self) -> None:
        """Fetch soon, unless the last fetch was less than half a minute ago.

        That a fetched set lacks a key is not remembered: the provider may add the key a second later.
        """
        if self._fetched_at is None or self._clock.monotonic() - self._fetched_at >= FETCH_SECONDS_MIN:
            self._asked.set()

    async def _run(self) -> None:
        while True:
            self._asked.clear()
            try:
                await self.refresh()
            except Exception:  # a defect of ours: without the task, no new key would ever come
                log.exception("cannot fetch the keys of %s", self.place)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_SECONDS if self._keys else FETCH_SECONDS_MIN):
                    await self._asked.wait()

    async def refresh(self) -> bool:
        """Fetch once; return whether the keys are new. A failure is logged, and the keys stay."""
        self._fetched_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._fetch_seconds_max):
                content = await (self._read_url() if self._is_url else asyncio.to_thread(self._read_file))
            keys = _read_set(content)
        except (OSError, aiohttp.ClientError, KeySetError, ValueError) as error:  # TimeoutError is an OSError
            self._fetches.labels("failed").inc()
            reason = str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                reason = f"no answer within {self._fetch_seconds_max:g} s"
            kept = sum(map(len, self._keys.values()))
            log.warning("cannot fetch the keys of %s: %s; %d keys of before stay valid", self.place, reason, kept)
            return False
        self._fetches.labels("ok").inc()
        self._keys = keys
        self._fingerprints = {key.fingerprint for some in keys.values() for key in some}
        return True

    async def _read_url(self) -> bytes:
        # No redirect: it could lead to plain HTTP, or into the operator's network. No compression: a small answer
        # could unpack to gigabytes.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with (
            aiohttp.ClientSession(
                auto_decompress=False, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
            ) as client,
            client.get(self.place, headers=headers, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise KeySetError(f"the answer has status {response.status}")
            content = bytearray()
            async for chunk in response.content.iter_chunked(65_536):
                content += chunk
                if len(content) > SET_BYTES_MAX:
                    raise KeySetError(f"the answer has over {SET_BYTES_MAX} bytes")
            return bytes(content)

    def _read_file(self) -> bytes:
        try:
            with open(self.place, "rb", opener=_open_at_once) as file:
                content = file.read(SET_BYTES_MAX + 1) or b""  # `None` of a pipe into which nothing is written yet
        except OSError as error:
            raise KeySetError(error.strerror or str(error)) from error
        if len(content) > SET_BYTES_MAX:
            raise KeySetError(f"the file has over {SET_BYTES_MAX} bytes")
        return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer waits


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ConfigError(f"the url of the key set is malformed: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError("the url of the key set has a user or a password in it, which would be logged")
    if not host or not port_is_valid or parts.scheme not in ("http", "https"):
        raise ConfigError("the key set is an https url or the path of a file")
    if parts.scheme == "http" and not is_loopback(host):
        raise ConfigError("the url of the key set is to begin with https: keys that somebody replaces prove everything")


def _read_set(content: bytes) -> dict[str | None, list[Key]]:
    """Return the keys of a set by their ids.

    Raises:
        KeySetError: the content is no set, or has no key that can be used.
    """
    try:
        entries = msgspec.json.decode(content, type=_Set).keys
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise KeySetError(f"the answer is no key set: {error}") from error
    if len(entries) > KEYS_MAX:
        raise KeySetError(f"the set has {len(entries)} keys, limit {KEYS_MAX}")
    keys: dict[str | None, list[Key]] = {}
    for entry in entries:
        key, key_id = key_of(entry), entry.get("kid")
        if key is not None:
            keys.setdefault(key_id if isinstance(key_id, str) else None, []).append(key)
    if not keys:
        raise KeySetError("no key of the set can be used")
    return keys
