"""Key sets of real servers: that hang, answer without an end, fail, lie, and change their keys."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from babelbus.errors import ConfigError
from babelbus.identities.errors import UnknownKeyError
from babelbus.identities.jwts import Verifier
from babelbus.identities.key_sets import KeySet
from babelbus.metrics import Metrics
from tests.identities.test_jwts import CLAIMS, SECRET, jwk_of, signed
from tests.support.bus import in_loop
from tests.support.clock import ManualClock

KEYS = [ed25519.Ed25519PrivateKey.generate() for _ in range(3)]
MIB = 2**20

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def document(*numbers: int) -> bytes:
    return json.dumps({"keys": [jwk_of(KEYS[number], kid=str(number)) for number in numbers]}).encode()


def token(number: int) -> str:
    return signed(CLAIMS, KEYS[number], "EdDSA", kid=str(number))


def content(data: bytes, status: int = 200, *headers: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        head = [f"HTTP/1.1 {status} x", f"Content-Length: {len(data)}", *headers]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + data)

    return answer


class Provider:
    """A server whose answer the test chooses."""

    def __init__(self) -> None:
        self.answer: Answer = content(document(0))
        self.requests = 0
        self.sent = 0
        self.hanging = asyncio.Event()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            await self.answer(writer)
            await writer.drain()
        writer.close()

    async def hang(self, _writer: asyncio.StreamWriter) -> None:
        await self.hanging.wait()

    async def trickle(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 x\r\nContent-Length: 1000\r\n\r\n{")
        await self.hanging.wait()

    async def five_gigabytes(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 x\r\nContent-Length: 5368709120\r\n\r\n")
        for _ in range(5 * 1024):
            writer.write(b" " * MIB)
            await writer.drain()
            self.sent += MIB


@contextlib.asynccontextmanager
async def provider() -> AsyncIterator[Provider]:
    made = Provider()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        made.hanging.set()
        server.close()


def key_set(source: Provider, clock: ManualClock | None = None, **options: Any) -> KeySet:
    return KeySet(f"http://127.0.0.1:{source.port}/keys", clock or ManualClock(), Metrics(), **options)


@in_loop
async def test_tokens_are_checked_with_the_keys_of_the_url() -> None:
    async with provider() as source:
        keys = key_set(source)
        verifier = Verifier(keys)
        with pytest.raises(UnknownKeyError):
            verifier.verify(token(0), 0)
        assert await keys.refresh()
        assert verifier.verify(token(0), 0).principal == "alice"
        with pytest.raises(UnknownKeyError):
            verifier.verify(token(1), 0)
        without_id = signed(CLAIMS, KEYS[0], "EdDSA")
        assert verifier.verify(without_id, 0).principal == "alice"


@in_loop
async def test_a_provider_that_hangs_keeps_nobody_waiting_and_the_keys_stay() -> None:
    async with provider() as source:
        keys = key_set(source, fetch_seconds_max=0.05)
        await keys.refresh()
        for answer in (source.hang, source.trickle):
            source.answer = answer
            assert not await keys.refresh()
            assert Verifier(keys).verify(token(0), 0).principal == "alice"


@in_loop
async def test_an_answer_of_five_gigabytes_is_cut_off_and_the_keys_stay() -> None:
    async with provider() as source:
        keys = key_set(source)
        await keys.refresh()
        source.answer = source.five_gigabytes
        assert not await keys.refresh()
        assert source.sent < 64 * MIB  # what the socket's buffers take
        assert Verifier(keys).verify(token(0), 0).principal == "alice"


@in_loop
async def test_an_answer_that_is_no_set_of_usable_keys_leaves_the_keys_of_before() -> None:
    async with provider() as source:
        keys = key_set(source)
        await keys.refresh()
        secret = b'{"keys":[{"kty":"oct","k":"%b"}]}' % SECRET.encode()
        many = json.dumps({"keys": [jwk_of(KEYS[1])] * 33}).encode()
        for bad in (
            content(b""),
            content(b"<html>"),
            content(b"[]"),
            content(b'{"keys":[]}'),
            content(b'{"keys":5}'),
            content(b'{"keys":[{}]}'),
            content(b'{"keys":' + b"[" * 100_000),
            content(b"\xff\xfe"),
            content(secret),
            content(many),
            content(document(1), 500),
            content(document(1), 302, "Location: /other"),
            content(b"", 304),
            content(document(1)[:-9], 200, "Content-Encoding: gzip"),
        ):
            source.answer = bad
            assert not await keys.refresh()
            assert Verifier(keys).verify(token(0), 0).principal == "alice"
            with pytest.raises(UnknownKeyError):
                Verifier(keys).verify(token(1), 0)


@in_loop
async def test_a_provider_that_is_gone_leaves_the_keys_of_before() -> None:
    async with provider() as source:
        keys = key_set(source)
        await keys.refresh()
    assert not await keys.refresh()
    assert Verifier(keys).verify(token(0), 0).principal == "alice"


@in_loop
async def test_a_key_that_the_provider_removed_proves_nothing_after_the_next_fetch() -> None:
    async with provider() as source:
        keys = key_set(source)
        await keys.refresh()
        removed = Verifier(keys).verify(token(0), 0).key
        assert not keys.has_lost(removed)
        source.answer = content(document(1))
        await keys.refresh()
        assert Verifier(keys).verify(token(1), 0).principal == "alice"
        assert keys.has_lost(removed)  # what the token has opened ends
        assert not keys.has_lost(Verifier(keys).verify(token(1), 0).key)
        assert not key_set(source).has_lost(removed)  # nothing was fetched yet
        with pytest.raises(UnknownKeyError):
            Verifier(keys).verify(token(0), 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for is in the code under test
            await asyncio.sleep(0)


@in_loop
async def test_unknown_keys_cause_one_fetch_in_thirty_seconds() -> None:
    async with provider() as source:
        clock = ManualClock()
        keys = key_set(source, clock)
        keys.start()
        await until(lambda: bool(keys._keys))

        def ask(key_id: str) -> None:
            with pytest.raises(UnknownKeyError):
                keys.find(key_id)

        for number in range(5000):
            ask(f"made up {number}")
        assert not keys._asked.is_set()
        clock.advance(30)
        for number in range(5000):
            ask(f"made up {number}")
        ask("1")
        await until(lambda: source.requests == 2)
        source.answer = content(document(0, 1))  # the provider is later than the tokens by its new key
        ask("1")
        assert not keys._asked.is_set()
        clock.advance(30)
        ask("1")
        assert keys._asked.is_set()
        await until(lambda: "1" in keys._keys)
        assert Verifier(keys).verify(token(1), 0).principal == "alice"
        assert source.requests == 3
        clock.jump_to(2**50)  # the wall clock decides nothing here
        ask("another")
        assert not keys._asked.is_set()
        await keys.close()


@in_loop
async def test_a_key_that_was_asked_for_too_soon_is_fetched_half_a_minute_later() -> None:
    async with provider() as source:
        clock = ManualClock()
        keys = key_set(source, clock)
        keys.start()
        await until(lambda: bool(keys._keys))
        source.answer = content(document(0, 1))
        clock.advance(29)
        with pytest.raises(UnknownKeyError):
            keys.find("1")
        clock.advance(1)
        with pytest.raises(UnknownKeyError):
            keys.find("1")
        await until(lambda: "1" in keys._keys)
        await keys.close()


@in_loop
async def test_a_key_is_asked_for_again_after_a_fetch_that_failed() -> None:
    async with provider() as source:
        clock = ManualClock()
        keys = key_set(source, clock)
        keys.start()
        await until(lambda: bool(keys._keys))
        source.answer = content(document(1), 500)
        clock.advance(30)
        with pytest.raises(UnknownKeyError):
            keys.find("1")
        await until(lambda: source.requests == 2)
        source.answer = content(document(0, 1))
        clock.advance(30)
        with pytest.raises(UnknownKeyError):
            keys.find("1")
        await until(lambda: "1" in keys._keys)
        await keys.close()


@in_loop
async def test_a_file_is_a_key_set_too(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = KeySet(str(path), ManualClock(), Metrics(), fetch_seconds_max=60)
    assert not await keys.refresh()
    path.write_bytes(document(0))
    assert await keys.refresh()
    path.write_bytes(b" " * (MIB + 1))
    assert not await keys.refresh()
    path.unlink()
    os.mkfifo(path)  # nobody writes into it
    assert not await keys.refresh()
    assert Verifier(keys).verify(token(0), 0).principal == "alice"


@in_loop
async def test_a_place_that_cannot_be_read_leaves_no_descriptor_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeySet(str(tmp_path), ManualClock(), Metrics(), fetch_seconds_max=60)
    assert not await keys.refresh()
    before = len(os.listdir("/proc/self/fd"))
    assert not await keys.refresh()
    assert len(os.listdir("/proc/self/fd")) == before
    assert f"cannot fetch the keys of {tmp_path}: Is a directory; 0 keys" in caplog.text


@in_loop
async def test_a_pipe_whose_writer_is_silent_is_no_key_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    try:
        assert not await KeySet(str(path), ManualClock(), Metrics(), fetch_seconds_max=60).refresh()
    finally:
        os.close(writer)
    assert "is no key set" in caplog.text


@in_loop
async def test_results_of_fetches_are_counted() -> None:
    async with provider() as source:
        metrics = Metrics()
        keys = KeySet(f"http://127.0.0.1:{source.port}/", ManualClock(), metrics)
        await keys.refresh()
        source.answer = content(b"")
        await keys.refresh()
        for result in ("ok", "failed"):
            assert metrics.registry.get_sample_value("babelbus_key_set_fetches_total", {"result": result}) == 1


@pytest.mark.parametrize(
    "place",
    ["http://id.example/keys", "ftp://localhost/keys", "https://", "https://u:p@id.example/", "http://[::1", "://x"],
)
@in_loop
async def test_a_url_that_others_could_answer_for_is_refused(place: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KeySet(place, ManualClock(), Metrics())
    assert "u:p" not in str(refused.value)


@in_loop
async def test_urls_of_this_machine_need_no_tls() -> None:
    for place in ("http://127.0.0.1:1/", "http://[::1]/", "http://localhost/", "https://id.example/keys"):
        KeySet(place, ManualClock(), Metrics())
