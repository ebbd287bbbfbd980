"""The copies of sessions that an owner makes, and the owner that continues them, both in this process."""

import asyncio
import logging
import shutil
from pathlib import Path

import msgspec
import pytest

from babelbus.core.groups import Groups
from babelbus.link.frames import Copy
from babelbus.protocols.connection import Connection
from babelbus.protocols.contract import Continuation
from babelbus.server import copies
from babelbus.server.app import Server
from babelbus.server.copies import Copier, Gathering
from babelbus.server.handover import Handover, _Session
from babelbus.storage.files import LocalFiles
from tests.support.handover import Owners, owners
from tests.support.link import until
from tests.support.server import configure
from tests.support.worterbuch import ack, named, put, state, subscribe

LOCK, NEWS = "job", "news"


class Deaths:
    """An owner that is about to die, and its copier."""

    def __init__(self, one: Owners, folder: Path) -> None:
        self.one, self._folder = one, folder
        server = one.server
        self.copier = Copier(server.core_end, server.broker, 1, server.metrics)

    async def sweep(self) -> None:
        """Let everybody be quiet for two looks of the owner, and the member receive the copies."""
        one = self.one
        for link in one.server.core_end.links:
            await until(lambda link=link: all(not each.unsent_bytes for each in link.transports.values()))
        await self.copier.sweep()
        await self.copier.sweep()
        edge_link = one.edge._link
        assert edge_link is not None
        end = one.server.broker.state.told_offset
        await until(lambda: edge_link.heard == end)

    async def kill(self) -> None:
        """Keep the folder as a kill leaves it, and end the link without a word."""
        shutil.copytree(self._folder / "first", self._folder / "second", ignore=shutil.ignore_patterns("run"))
        for link in list(self.one.server.core_end.links):
            link.end("killed")
        await until(lambda: not self.one.edge.is_connected)

    async def follow(self, extra: tuple[Copy, ...] = ()) -> Server:
        """Return the next owner, which gathers the copies of the member, once it serves the member."""
        server = Server(configure(self._folder / "second"))
        handover = server._handover = Handover(LocalFiles(), str(self._folder / "second"), 2)
        gathering = Gathering(server.core_end, 2, extra)
        await server.core_end.listen("127.0.0.1", 0)

        async def gather() -> list[Copy]:
            host, _, port = server.core_end.address.rpartition(":")
            await self.one.edge.connect(host, int(port))
            return await gathering.wait(lambda: {"member"})

        handover.gather = gather
        await server.start()
        server.core_end.serve()
        return server


def run(folder: Path, test: object) -> None:
    async def whole() -> None:
        (folder / "first").mkdir()
        async with owners(folder / "first") as one:
            assert one.server._copier is not None
            await one.server._copier.stop()  # the test looks at the clients itself
            await test(Deaths(one, folder))  # type: ignore[operator]

    asyncio.run(whole())


def test_a_copy_is_true_until_somebody_speaks_and_is_made_again_when_all_are_quiet(tmp_path: Path) -> None:
    async def test(deaths: Deaths) -> None:
        one = deaths.one
        device, other = await one.dial(), await one.dial()
        assert await device.ask(subscribe(1, NEWS, liveOnly=True)) == ack(1)
        await deaths.copier.sweep()
        assert deaths.copier.count == 0
        await deaths.sweep()
        assert deaths.copier.count == 2
        assert await other.ask(put(1, NEWS, 1)) == ack(1)
        assert await device.hear() == state(1, 1)
        assert deaths.copier.count == 0
        await deaths.sweep()
        assert deaths.copier.count == 2
        await deaths.kill()
        assert len(one.edge.waiting.copies()) == 2
        server = await deaths.follow()
        assert await device.ask(named("lock", 2, LOCK)) == ack(2)  # nothing was told twice before that
        assert await other.ask(put(2, NEWS, 2)) == ack(2)
        assert await device.hear() == state(1, 2)
        await server.stop()

    run(tmp_path, test)


def test_a_quiet_client_hears_what_the_dead_owner_has_not_told_it(tmp_path: Path) -> None:
    async def test(deaths: Deaths) -> None:
        one = deaths.one
        device = await one.dial()
        near = await one.dial("owner")
        will = f"$SYS/clients/{near.client_id}/lastWill"
        assert await near.ask(put(1, will, [{"key": NEWS, "value": "gone"}])) == ack(1)
        assert await device.ask(subscribe(1, NEWS, liveOnly=True)) == ack(1)
        await deaths.sweep()
        for link in list(one.server.core_end.links):
            link.end("killed")
        await until(lambda: not one.edge.is_connected)
        assert await near.ask(put(2, NEWS, "last")) == ack(2)  # the log has it, and the device has not
        await deaths.kill()
        server = await deaths.follow()
        assert await device.hear() == state(1, "last")
        assert await device.hear() == state(1, "gone")
        await server.stop()

    run(tmp_path, test)


def test_all_that_go_on_hear_the_testament_of_a_client_whose_session_is_refused(tmp_path: Path) -> None:
    async def test(deaths: Deaths) -> None:
        one = deaths.one
        holder, device, watcher = await one.dial(), await one.dial(), await one.dial()
        assert await holder.ask(named("lock", 1, "job1")) == ack(1)
        assert await device.ask(named("lock", 1, "job2")) == ack(1)
        will = f"$SYS/clients/{device.client_id}/lastWill"
        assert await device.ask(put(2, will, [{"key": NEWS, "value": "gone"}])) == ack(2)
        assert await watcher.ask(subscribe(1, NEWS, liveOnly=True)) == ack(1)
        await deaths.sweep()
        await deaths.kill()
        for client in one.edge.waiting:  # a copy of before another client got the lock
            assert client.copy is not None
            client.copy = client.copy._replace(session=client.copy.session.replace(b"job2", b"job1"))
        server = await deaths.follow()
        watcher.say(named("lock", 2, "job2"))
        assert await watcher.hear() == state(1, "gone")
        assert await watcher.hear() == ack(2)
        assert await device.is_closed()
        await server.stop()

    run(tmp_path, test)


def test_a_session_does_not_go_on_whose_testament_the_dead_owner_has_executed(tmp_path: Path) -> None:
    async def test(deaths: Deaths) -> None:
        one = deaths.one
        device, watcher = await one.dial(), await one.dial("owner")
        will = f"$SYS/clients/{device.client_id}/lastWill"
        assert await device.ask(put(1, will, [{"key": NEWS, "value": "gone"}])) == ack(1)
        assert await watcher.ask(subscribe(1, NEWS, liveOnly=True)) == ack(1)
        await deaths.sweep()
        for link in list(one.server.core_end.links):  # the owner lives a little longer than the link
            link.end("cut")
        assert await watcher.hear() == state(1, "gone")
        await deaths.kill()
        server = await deaths.follow()
        assert await device.is_closed()
        await server.stop()

    run(tmp_path, test)


def test_copies_of_others_and_damaged_ones_cost_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(deaths: Deaths) -> None:
        one = deaths.one
        device, rival = await one.dial(), await one.dial()
        assert await device.ask(named("lock", 1, LOCK)) == ack(1)
        await deaths.sweep()
        await deaths.kill()
        old = Copy(7, 0, 0, "0" * 32, one.edge.waiting.copies()[0].session)
        damaged = Copy(1, 0, 0, "1" * 32, b"\xc1")
        stranger = _Session("2" * 32, "worterbuch", "stranger", None, None, None, b"\x01")
        unknown = Copy(1, 0, 0, "2" * 32, msgspec.msgpack.encode(stranger))
        server = await deaths.follow((old, damaged, unknown))
        assert "errorCode" in str(await rival.ask(named("lock", 2, LOCK)))
        assert await device.ask(named("releaseLock", 2, LOCK)) == ack(2)
        assert "a session of the last owner does not go on" in caplog.text
        await server.stop()

    caplog.set_level(logging.INFO)
    run(tmp_path, test)


def test_sessions_end_if_the_log_does_not_tell_what_their_clients_have_not_heard(tmp_path: Path) -> None:
    async def test(deaths: Deaths) -> None:
        one = deaths.one
        device = await one.dial()
        assert await device.ask(subscribe(1, NEWS, liveOnly=True)) == ack(1)
        await deaths.sweep()
        await deaths.kill()
        [client] = one.edge.waiting
        assert client.copy is not None
        client.copy = client.copy._replace(heard=10**6)
        server = await deaths.follow()
        assert await device.is_closed()
        assert await (await one.dial()).ask(put(1, NEWS, 1)) == ack(1)
        await server.stop()

    run(tmp_path, test)


def test_more_copies_than_an_owner_may_keep_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def test() -> None:
        monkeypatch.setattr(copies, "SESSIONS_MAX", 2)
        monkeypatch.setattr(copies, "BYTES_MAX", 10)
        server = Server(configure(tmp_path))
        kept = [Copy(1, 0, 0, name * 32, bytes(size)) for name, size in (("a", 4), ("b", 7), ("c", 6), ("d", 0))]
        gathering = Gathering(server.core_end, 2, kept)
        assert await gathering.wait(list) == [kept[0], kept[2]]

    asyncio.run(test())


def test_one_session_goes_on_of_two_copies_of_one_owner(tmp_path: Path) -> None:
    async def test() -> None:
        kept = [
            Copy(1, 0, 0, name * 32, msgspec.msgpack.encode(_Session(name * 32, "zbus", owner, None, None, None, b"")))
            for name, owner in (("a", "one"), ("b", "two"), ("c", "one"))
        ]

        async def gather() -> list[Copy]:
            return kept

        handover = Handover(LocalFiles(), str(tmp_path), 2)
        handover.gather = gather
        assert sorted(await handover.read()) == ["one", "two"]
        assert [one.id for one in handover._sessions] == ["a" * 32, "b" * 32]

    asyncio.run(test())


def test_copies_that_were_gathered_are_not_kept_while_the_owner_owns(tmp_path: Path) -> None:
    async def test() -> None:
        server = Server(configure(tmp_path))
        gathering = Gathering(server.core_end, 2, [Copy(1, 0, 0, "a" * 32, b"")])
        assert len(await gathering.wait(list)) == 1
        server.core_end.on_copy(Copy(1, 0, 0, "b" * 32, b""))  # of a member that links late
        assert await gathering.wait(list) == []

    asyncio.run(test())


def test_a_consumer_is_not_copied_before_the_cursors_behind_what_it_was_handed_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, saved_at = Connection.copy, [0.0]

    def copy_consumer(connection: Connection) -> Continuation | None:
        made = copy(connection)
        return None if made is None else made._replace(consumes=True)

    monkeypatch.setattr(Connection, "copy", copy_consumer)
    monkeypatch.setattr(Groups, "saved_at", property(lambda _: saved_at[0]))

    async def test(deaths: Deaths) -> None:
        await deaths.one.dial()
        await deaths.sweep()
        await deaths.sweep()
        assert deaths.copier.count == 0
        saved_at[0] = asyncio.get_running_loop().time()
        await deaths.copier.sweep()
        assert deaths.copier.count == 1
        saved_at[0] = 0.0  # others go on; this one has not been handed anything
        await deaths.sweep()
        assert deaths.copier.count == 1

    run(tmp_path, test)


def test_an_owner_waits_for_no_member_that_goes_away(tmp_path: Path) -> None:
    async def test() -> None:
        members = [{"a"}, {"a"}, set[str]()]
        gathering = Gathering(Server(configure(tmp_path)).core_end, 2, ())
        assert await gathering.wait(lambda: members.pop(0) if len(members) > 1 else members[0]) == []

    asyncio.run(test())


def test_large_sessions_are_not_copied_in_one_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def test(deaths: Deaths) -> None:
        for _ in range(3):
            await deaths.one.dial()
        [link] = deaths.one.server.core_end.links
        await until(lambda: not any(one.unsent_bytes for one in link.transports.values()))
        await deaths.copier.sweep()
        monkeypatch.setattr(copies, "TURN_SECONDS", 0.0)
        sweep = asyncio.ensure_future(deaths.copier.sweep())
        await asyncio.sleep(0)
        assert deaths.copier.count == 1
        await sweep
        assert deaths.copier.count == 3

    run(tmp_path, test)


def test_sessions_that_are_too_large_or_fail_cost_nobody_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(deaths: Deaths) -> None:
        one = deaths.one
        large, broken, fine = [await one.dial() for _ in range(3)]
        for number in range(600):
            key = f"{number}/{'x' * 100}"
            assert await large.ask(subscribe(number, key, liveOnly=True)) == ack(number)
        copy = Connection.copy

        def fail(connection: Connection) -> Continuation | None:
            continuation = copy(connection)
            if continuation is not None and continuation.owner == broken.client_id:
                raise RuntimeError("a defect")
            return continuation

        monkeypatch.setattr(Connection, "copy", fail)
        await deaths.sweep()
        await deaths.sweep()
        assert deaths.copier.count == 1
        assert caplog.text.count("the session cannot be copied") == 1
        await deaths.kill()
        assert [fine.client_id.encode() in each.session for each in one.edge.waiting.copies()] == [True]

    run(tmp_path, test)
