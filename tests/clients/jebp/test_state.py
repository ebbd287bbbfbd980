"""The state of the client against a whole server, beside clients of Wörterbuch, and over lost connections."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.client import (
    BadArgumentError,
    BlockingClient,
    Change,
    Client,
    ConflictError,
    ConnectionLostError,
    Entry,
    HistoryGoneError,
    Identity,
    LocalProtocolError,
    LockedError,
    LockLostError,
    NoRightsError,
    NoSuchKeyError,
    OutcomeUnknownError,
    Revision,
    VersionConflictError,
)
from babelbus.clients.jebp import state as client_state
from babelbus.clients.jebp.errors import call_error
from babelbus.clients.jebp.state import Past
from babelbus.clients.jebp.values import encode_value
from babelbus.clients.worterbuch import client as tree_client
from babelbus.clients.worterbuch.blocking import BlockingClient as TreeClient
from babelbus.config import JebpSettings, WorterbuchSettings
from babelbus.protocols.jebp.service import JebpService
from babelbus.server.app import Server
from babelbus.testing.ports import free_ports
from tests.access.house import House as Gated
from tests.support.bus import SAFETY_NET_SECONDS, in_loop, turns
from tests.support.child import Child
from tests.support.server import LiveServer, configure, configure_to_return, connections_of

PATIENT: dict[str, Any] = {"request_timeout_seconds": SAFETY_NET_SECONDS}


class Recipe(msgspec.Struct):
    speed: int
    name: str = ""


class House:
    """A server that can be started again on its port, in the event loop of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._jebp = JebpSettings(port=free_ports(1)[0], handshake_seconds=SAFETY_NET_SECONDS)

    async def start(self) -> None:
        self.server = Server(configure(self.folder / "data", jebp=self._jebp))
        await self.server.start()
        self.address = self.server.addresses["jebp"]

    def client(self, **options: Any) -> Client:
        return Client(self.address, identity=self.admin, **PATIENT, **options)

    @property
    def admin(self) -> Identity:
        return Identity.load(self.folder / "data" / "conf" / "admin_key")

    @property
    def jebp(self) -> JebpService:
        service = self.server.services["jebp"]
        assert isinstance(service, JebpService)
        return service

    @property
    def tree_url(self) -> str:
        return f"tcp://{self.server.addresses['worterbuch-tcp']}"

    def cut(self) -> None:
        """End all connections of jebp as a broken network does."""
        for connection in list(self.jebp.listeners.connections):
            connection.abort()


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[House]:
    house = House(folder)
    await house.start()
    try:
        yield house
    finally:
        await house.server.stop()


async def until(condition: Callable[[], object]) -> None:
    """Return when a condition holds; the safety net of the test ends what never does."""
    while not condition():  # noqa: ASYNC110  # what it asks for has no event of its own
        await asyncio.sleep(0)


async def wait_behind(client: Client, took: list[str]) -> None:
    """Take the lock `k` once another one holds it."""
    await until(lambda: took)
    await client.state.lock("k").acquire()


class Watcher:
    """Follows a pattern in a task and keeps what it tells."""

    def __init__(self, client: Client, pattern: str, **options: Any) -> None:
        self.changes: list[Change] = []
        self._task = asyncio.create_task(self._run(client, pattern, options))

    async def _run(self, client: Client, pattern: str, options: dict[str, Any]) -> None:
        async for change in client.state.watch(pattern, **options):
            self.changes.append(change)

    async def reach(self, count: int) -> list[Change]:
        await until(lambda: len(self.changes) >= count or self._task.done())
        if self._task.done():
            self._task.result()
        return self.changes

    async def __aenter__(self) -> "Watcher":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


def told(changes: list[Change]) -> list[tuple[str, Any]]:
    return [(change.key, change.value) for change in changes]


# -- values ------------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e300, 1e300) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(json_values)
def test_what_json_can_carry_comes_back_as_it_was(value: Any) -> None:
    entry = Entry("k", encode_value(value))
    assert entry.value == json.loads(entry.raw) == value
    assert entry.decode(Any) == value


@given(st.binary())
def test_bytes_come_back_as_they_were(value: bytes) -> None:
    for form in (value, bytearray(value), memoryview(value)):
        assert Entry("k", encode_value(form)).data == value


def test_a_text_has_bytes_and_other_values_have_none() -> None:
    assert Entry("k", encode_value("ü")).data == b"\xc3\xbc"
    for value in (1, None, [1], {"base64": 1}, {"base64": "AA==", "x": 1}, {"base64": "no base64"}):
        with pytest.raises(ValueError):
            _ = Entry("k", encode_value(value)).data


def test_what_json_cannot_carry_is_refused_before_it_is_sent() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), {1: object()}, loop):
        with pytest.raises(LocalProtocolError):
            encode_value(value)


def test_values_are_read_and_changed(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client:
            state = client.state
            await state.set("line1/recipe", Recipe(3, "a"))
            entry = await state.get("line1/recipe")
            assert entry == Entry("line1/recipe", b'{"speed":3,"name":"a"}', 0)
            assert (entry.value, entry.decode(Recipe)) == ({"speed": 3, "name": "a"}, Recipe(3, "a"))
            await state.set_many({"line1/raw": msgspec.Raw(b"[1, 2]"), "line1/bytes": b"\xff", "line2": None})
            assert (await state.get("line1/raw")).raw == b"[1, 2]"
            assert (await state.get("line1/bytes")).data == b"\xff"
            assert (await state.get("line2")).value is None
            assert await state.find("nothing") is None
            with pytest.raises(NoSuchKeyError):
                await state.get("nothing")
            assert list(await state.get_many(["line2", "nothing", "line1/raw"])) == ["line2", "line1/raw"]
            assert sorted(await state.match("line1/?")) == ["line1/bytes", "line1/raw", "line1/recipe"]
            assert sorted(await state.list("line1")) == ["bytes", "raw", "recipe"]
            assert "line2" in await state.list()
            with pytest.raises(NoSuchKeyError):
                await state.list("nothing")
            assert await state.delete("line2") == Entry("line2", b"null", 0)
            assert await state.delete("line2") is None
            assert await state.delete_match("line1/#") == 3
            with pytest.raises(BadArgumentError):
                await state.set("a/#", 1)
            with pytest.raises(NoRightsError):
                await state.set("$SYS/x", 1)

    check()


def test_compare_and_set_lets_one_of_many_win(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client:
            state = client.state
            assert await state.compare_and_set("n", 1, 0) == 1

            refused: list[int] = []

            async def add() -> None:
                while True:
                    entry = await state.get("n")
                    try:
                        await state.compare_and_set("n", entry.value + 1, entry.version)
                    except VersionConflictError as error:
                        refused.append(error.version - entry.version)
                    else:
                        return

            await asyncio.gather(*[add() for _ in range(20)])
            assert all(missed > 0 for missed in refused)
            assert (await state.get("n")) == Entry("n", b"21", 21)
            for change in (state.set("n", 0), state.set_many({"m": 1, "n": 0})):
                with pytest.raises(ConflictError):
                    await change
            assert await state.find("m") is None

    check()


def test_many_calls_at_once_keep_their_order(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client:
            state = client.state
            pairs: list[tuple[Any, Any]] = [(state.set("k", number), state.get("k")) for number in range(1500)]
            answers = await asyncio.gather(*chain.from_iterable(pairs))
            assert [answer.value for answer in answers[1::2]] == list(range(1500))

    check()


def test_the_past_and_the_changes_of_a_key_can_be_read(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client:
            state = client.state
            await state.set("a", 1)
            await state.set("b", b"x" * 100_000)  # more than a page
            await state.delete("a")
            history = await state.history("a")
            first, last = history.revisions
            assert (first.offset, first.value, first.deleted, first.source) == (0, 1, False, "jebp:admin")
            assert (last.offset, last.value, last.deleted, history.complete_from) == (2, None, True, 0)
            assert isinstance(last, Revision)
            assert (await state.history("a", before=2, limit=5)).revisions == [first]
            assert (await state.as_of(offset=0).get("a")).value == 1
            assert sorted(await state.as_of(offset=1).match("#")) == ["a", "b"]
            assert sorted(await state.as_of(time=last.timestamp).match("#")) == ["b"]
            later = datetime.fromtimestamp(last.timestamp / 1000, UTC) + timedelta(seconds=1)
            assert await state.as_of(time=later).find("a") is None
            with pytest.raises(NoSuchKeyError):
                await state.as_of(time=later).get("a")
            with pytest.raises(BadArgumentError):
                await state.as_of(offset=99).match("#")
            for wrong in ({}, {"time": 1, "offset": 1}):
                with pytest.raises(LocalProtocolError):
                    state.as_of(**wrong)

    check()


def test_what_compaction_removed_is_refused_with_the_earliest_moment() -> None:
    @in_loop
    async def check() -> None:
        async def read(method: str, parameters: object) -> Any:
            raise call_error(method, "gone", "compaction has removed it", [17, None])

        with pytest.raises(HistoryGoneError) as caught:
            await Past(read, 3, None).match("#")
        assert (caught.value.offset, caught.value.time_ms) == (17, None)

    check()


# -- watches -----------------------------------------------------------------------------------------------------------


def test_a_watch_tells_what_there_is_and_each_change(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client, house.client() as other:
            await client.state.set("a/b", 1)
            async with Watcher(client, "a/#") as watcher, Watcher(client, "a/c", present=False) as single:
                assert await watcher.reach(1) == [Change("a/b", b"1", present=True)]
                await until(lambda: len(house.server.broker.state.watches) == 2)
                await asyncio.gather(*[other.state.set("a/c", number) for number in range(100)])
                await other.state.delete("a/b")
                changes = (await watcher.reach(102))[1:]
                assert told(changes) == [("a/c", number) for number in range(100)] + [("a/b", None)]
                assert changes[-1].deleted
                assert {change.source for change in changes} == {"jebp:admin"}
                assert all(change.timestamp and not change.present and not change.resync for change in changes)
                assert told(await single.reach(100)) == [("a/c", number) for number in range(100)]
            await until(lambda: not len(house.server.broker.state.watches))

    check()


def test_a_watch_that_is_left_ends_on_the_server(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client:
            await client.state.set("a", 1)
            async for change in client.state.watch("a"):
                assert change.value == 1
                break
            await until(lambda: not len(house.server.broker.state.watches))

    check()


def test_a_lost_connection_costs_a_watch_no_value(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client:
            await client.state.set_many({"a/same": 1, "a/other": 1, "a/gone": 1})
            async with Watcher(client, "a/#") as watcher:
                await watcher.reach(3)
                await house.server.stop()
                house.server = Server(configure(tmp_path / "data", jebp=JebpSettings(port=0)))
                await house.server.start()  # elsewhere: the client does not find it
                async with Client(house.server.addresses["jebp"], identity=house.admin) as other:
                    await other.state.set_many({"a/other": 2, "a/new": 1, "b": 1})
                    await other.state.delete("a/gone")
                await house.server.stop()
                await house.start()
                found = sorted((await watcher.reach(6))[3:], key=lambda change: change.key)
                assert found == [
                    Change("a/gone", None, resync=True),
                    Change("a/new", b"1", resync=True),
                    Change("a/other", b"2", resync=True),
                ]
                await client.state.set("a/same", 2)
                last = (await watcher.reach(7))[6]
                assert (last.key, last.value, last.resync) == ("a/same", 2, False)

    check()


@pytest.mark.parametrize("reconnect", [True, False])
def test_a_reader_that_does_not_read_holds_little_and_loses_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reconnect: bool
) -> None:
    monkeypatch.setattr(client_state, "WATCH_BYTES_MAX", 1_000)

    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client(reconnect=reconnect) as client:
            batches = client.state.watch_batches("a/#")
            assert await anext(batches) == []
            for number in range(200):
                await client.state.set(f"a/{number % 50}", number)
            await client.state.delete("a/0")
            await until(lambda: not len(house.server.broker.state.watches))
            values: dict[str, Any] = {}
            resync = False
            while values != {f"a/{number % 50}": number for number in range(151, 200)}:
                for change in await anext(batches):
                    resync |= change.resync
                    values[change.key] = change.value
                    if change.deleted:
                        del values[change.key]
            assert resync
            await batches.aclose()

    check()


def test_a_watch_of_a_client_that_does_not_reconnect_raises(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house:
            client = house.client(reconnect=False)
            await client.__aenter__()
            async with Watcher(client, "#") as watcher:
                await watcher.reach(1)
                house.cut()
                with pytest.raises(ConnectionLostError):
                    await watcher.reach(2**31)
            await client.close()

    check()


# -- locks -------------------------------------------------------------------------------------------------------------


def test_one_holds_a_lock_and_the_others_wait_in_their_order(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client, house.client() as other:
            order: list[int] = []
            inside = 0

            async def work(number: int) -> None:
                nonlocal inside
                async with (client if number % 2 else other).state.lock("k") as lock:
                    inside += 1
                    assert (lock.held, inside) == (True, 1)
                    await turns()
                    order.append(number)
                    inside -= 1
                assert not lock.held

            await asyncio.gather(*[work(number) for number in range(10)])
            assert order[0::2] == sorted(order[0::2], key=order.index)
            assert sorted(order) == list(range(10))
            async with client.state.lock("k"):
                for timeout in (0, 0.01):
                    with pytest.raises(LockedError):
                        await other.state.lock("k", timeout=timeout).acquire()
            async with other.state.lock("k", timeout=0):
                pass
            with pytest.raises(BadArgumentError):
                await client.state.lock("a/#").acquire()

    check()


def test_an_error_or_a_cancellation_inside_a_block_releases_the_lock(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client:
            with pytest.raises(ZeroDivisionError):
                async with client.state.lock("k"):
                    raise ZeroDivisionError
            holds = asyncio.Event()

            async def hold() -> None:
                async with client.state.lock("k"):
                    holds.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hold())
            await holds.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            waiting = asyncio.create_task(client.state.lock("k").acquire())
            await waiting
            given_up = asyncio.create_task(client.state.lock("k").acquire())
            await turns()
            given_up.cancel()
            await asyncio.wait([given_up])

    check()


def test_the_holder_is_told_when_the_connection_is_lost(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client, house.client() as other:
            took: list[str] = []
            lock = client.state.lock("k")

            async def hold() -> None:
                async with lock:
                    took.append("held")
                    await until(lambda: len(house.jebp.state.locks) == 1)
                    house.cut()
                    await asyncio.Event().wait()  # the block is cancelled here
                    took.append("never")

            holding = hold()
            waiting = asyncio.create_task(wait_behind(other, took))
            with pytest.raises(LockLostError):
                await holding
            assert took == ["held"]
            assert not lock.held
            current = asyncio.current_task()
            assert current is not None
            assert current.cancelling() == 0
            await waiting  # on a new connection
            await client.state.set("k", 1)  # and so is this client

    check()


def test_a_wait_for_a_lock_goes_on_over_a_lost_connection(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as client:
            locks = house.server.broker.state.locks
            locks.lock("k", "another")
            waiting = asyncio.create_task(client.state.lock("k").acquire())
            shared = house.jebp.state
            await until(lambda: shared.locks)
            first = next(iter(shared.locks))
            house.cut()
            await until(lambda: shared.locks and next(iter(shared.locks)) != first)
            locks.release("k", "another")
            await waiting

    check()


# -- wills -------------------------------------------------------------------------------------------------------------


def test_a_will_happens_when_the_client_is_gone_and_again_after_a_reconnect(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house, house.client() as other:
            client = house.client()
            await client.__aenter__()
            async with Watcher(other, "worker/#", present=False) as watcher:
                await until(lambda: len(house.server.broker.state.watches) == 1)
                await client.state.set("worker/7", "here")
                await client.state.will(delete=["worker/7"], set={"worker/gone": 7})
                assert client._keeper.link is not None
                client._keeper.link._transport.abort()
                assert told(await watcher.reach(3)) == [("worker/7", "here"), ("worker/7", None), ("worker/gone", 7)]
                await client.state.set("worker/7", "here again")
                await client.close()
                assert told(await watcher.reach(6))[3:] == [
                    ("worker/7", "here again"),
                    ("worker/7", None),
                    ("worker/gone", 7),
                ]

    check()


def test_a_will_that_is_taken_back_does_not_happen(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with running(tmp_path) as house:
            async with house.client() as client:
                await client.state.will(set={"gone": True})
                await client.state.will()
            await until(lambda: not connections_of(house.server))
            assert house.server.broker.state.find("gone") is None

    check()


# -- beside Wörterbuch -------------------------------------------------------------------------------------------------


def test_both_protocols_see_values_changes_versions_and_locks_of_each_other(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        async with (
            running(tmp_path) as house,
            house.client() as client,
            await tree_client.connect(house.tree_url) as tree,
        ):
            heard: list[Any] = []
            subscription = await tree.psubscribe("a/#", heard.append)
            async with Watcher(client, "a/#") as watcher:
                await until(lambda: len(house.server.broker.state.watches) == 1)
                await client.state.set("a/ours", {"x": 1})
                await tree.set("a/theirs", [1, "ü"])
                assert await tree.get("a/ours") == {"x": 1}
                assert (await client.state.get("a/theirs")).value == [1, "ü"]
                assert told(await watcher.reach(2)) == [("a/ours", {"x": 1}), ("a/theirs", [1, "ü"])]
                assert watcher.changes[1].source.startswith("worterbuch:")
                assert await client.state.compare_and_set("v", 1, 0) == 1
                assert (await tree.cget("v")).version == 1
                await tree.cset("v", 2, 1)
                with pytest.raises(VersionConflictError):
                    await client.state.compare_and_set("v", 3, 1)
                await tree.delete("a/ours")
                assert (await watcher.reach(3))[2].deleted
            await until(lambda: len(heard) >= 3)
            assert heard[-3].values == {"a/ours": {"x": 1}}
            assert heard[-1].deleted == {"a/ours": {"x": 1}}
            await subscription.close()
            async with client.state.lock("k"):
                waiting = asyncio.create_task(tree.acquire_lock("k"))
                await until(lambda: "k" in house.server.broker.state.locks._queues)
            await waiting
            with pytest.raises(LockedError):
                await client.state.lock("k", timeout=0).acquire()
            ours = asyncio.create_task(client.state.lock("k").acquire())
            await until(lambda: "k" in house.server.broker.state.locks._queues)
            await tree.release_lock("k")
            await ours

    check()


# -- threads, and a server that is killed ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(configure(tmp_path_factory.mktemp("state"))) as live:
        yield live


def test_the_blocking_client_has_the_same(live: LiveServer) -> None:
    with BlockingClient(live.address, identity=live.admin, **PATIENT) as client:
        state = client.state
        state.set("b/a", 1)
        state.set_many({"b/b": 2})
        assert state.get("b/a").value == 1
        assert state.find("b/x") is None
        assert sorted(state.match("b/#")) == sorted(state.get_many(["b/a", "b/b"])) == ["b/a", "b/b"]
        assert sorted(state.list("b")) == ["a", "b"]
        assert state.compare_and_set("b/v", 1, 0) == 1
        revision = state.history("b/a").revisions[-1]
        assert state.as_of(offset=revision.offset).get("b/a").value == 1
        assert state.as_of(time=revision.timestamp).find("b/x") is None
        changes = state.watch("b/a")
        assert next(changes).present
        state.set("b/a", 3)
        assert next(changes).value == 3
        changes.close()
        with state.lock("b/l") as lock:
            assert (lock.held, lock.key) == (True, "b/l")
            with pytest.raises(LockedError), state.lock("b/l", timeout=0):
                pass
        state.will(set={"b/gone": True})
        assert state.delete("b/a") is not None
        assert state.delete_match("b/#") == 2
    live.until(lambda: live.server.broker.state.find("b/gone") is not None)


def test_a_thread_that_held_a_lock_is_told_at_the_end_of_its_block(live: LiveServer) -> None:
    with BlockingClient(live.address, identity=live.admin, **PATIENT) as client:
        lock = client.state.lock("thread")
        lock.__enter__()
        live.call(live.connections[0].abort)
        client.state.get_many([])  # answered on the new connection
        assert not lock.held
        with pytest.raises(LockLostError):
            lock.__exit__(None, None, None)
        with client.state.lock("thread", timeout=SAFETY_NET_SECONDS):
            pass


def test_rights_narrow_a_watch_and_refuse_the_rest(tmp_path: Path) -> None:
    with Gated(tmp_path) as house:
        house.grant("alice subscribe walk/b/#", "alice write-state walk/b/#")
        with BlockingClient(house.address, identity=house.alice.identity, **PATIENT) as client:
            assert list(client.state.match("walk/#")) == ["walk/b"]
            changes = client.state.watch("walk/#")
            assert next(changes).key == "walk/b"

            def change() -> None:
                house.broker.state.set("walk/a", b"1")
                house.broker.state.set("walk/b", b"1")
                house.broker.state.commit("test")

            house.call(change)
            assert (found := next(changes)).key == "walk/b", found
            changes.close()
            for call in (
                lambda: client.state.set("walk/a", 1),
                lambda: client.state.get("walk/a"),
                lambda: client.state.history("walk/b"),
                lambda: next(client.state.watch("walk/a")),
                lambda: client.state.lock("walk/a").__enter__(),
                lambda: client.state.will(delete=["walk/a"]),
            ):
                with pytest.raises(NoRightsError):
                    call()


def test_a_killed_server_keeps_what_it_answered_runs_wills_once_and_knows_no_locks(tmp_path: Path) -> None:
    config = configure(tmp_path / "data", worterbuch=WorterbuchSettings(port=0, tcp_port=0))
    with Child(config) as child, BlockingClient(child.address, identity=child.admin, **PATIENT) as client:
        client.state.set_many({f"k/{number}": number for number in range(100)})
        assert client.state.compare_and_set("v", 1, 0) == 1
        client.state.will(delete=["k/0"], set={"gone": 1})
        client.state.lock("l").__enter__()
        child.kill()
        client.state._twin._calls.timeout_seconds = 0
        with pytest.raises((OutcomeUnknownError, ConnectionLostError)):
            client.state.set("late", 1)
    for _ in range(2):
        with Child(config) as child, BlockingClient(child.address, identity=child.admin, **PATIENT) as client:
            assert len(client.state.match("k/#")) == 99
            assert client.state.get("v").version == 1
            if client.state.find("gone") is None:
                return  # it was executed at the first start, and not again
            assert client.state.get("gone").value == 1
            client.state.delete("gone")
            with client.state.lock("l", timeout=0):
                pass
            assert child.stop() == 0
    raise AssertionError("the will was executed twice")


def test_a_kill_in_between_loses_no_answered_set_and_no_value_of_a_watch(tmp_path: Path) -> None:
    @in_loop
    async def check() -> None:
        loop = asyncio.get_running_loop()
        answered: dict[str, int] = {}
        unknown: list[str] = []

        async def write(client: Client, key: str) -> None:
            for number in range(200):
                try:
                    await client.state.set(key, number)
                except OutcomeUnknownError:
                    unknown.append(key)
                else:
                    answered[key] = number

        config = configure_to_return(tmp_path / "data")
        with ExitStack() as stack:
            child = stack.enter_context(await loop.run_in_executor(None, Child, config))
            client = Client(child.address, identity=child.admin, **PATIENT)
            async with client, Watcher(client, "k/#") as watcher:
                writing = [asyncio.create_task(write(client, f"k/{number}")) for number in range(20)]
                await watcher.reach(500)
                await loop.run_in_executor(None, child.kill)
                before = dict(answered)
                stack.enter_context(await loop.run_in_executor(None, Child, config))
                await asyncio.gather(*writing)
                assert unknown
                assert {key: entry.value for key, entry in (await client.state.match("k/#")).items()} == answered
                await until(lambda: {one.key: one.value for one in watcher.changes} == answered)
                for key, number in before.items():
                    revisions = (await client.state.history(key)).revisions
                    assert number in [one.value for one in revisions]

    check()


def test_a_value_of_a_client_of_worterbuch_is_there_after_a_kill(tmp_path: Path) -> None:
    config = configure(tmp_path / "data")
    with Child(config) as child:
        with TreeClient(f"tcp://{child.addresses['worterbuch-tcp']}") as tree:
            tree.set("a", [1])
        child.kill()
    with Child(config) as child, BlockingClient(child.address, identity=child.admin, **PATIENT) as client:
        assert client.state.get("a").value == [1]
