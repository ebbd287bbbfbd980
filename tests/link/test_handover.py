"""The clients of a member whose sessions one core hands over to the next."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

from babelbus.config import TlsSettings
from babelbus.link import core, peer
from babelbus.link.client import Client
from babelbus.link.edge import Edge
from babelbus.link.frames import PING, Copy, encode
from babelbus.link.security import LinkTls
from babelbus.link.transport import Absence, LinkedTransport
from babelbus.listening.certificates import Certificates
from babelbus.server.handover import Handover
from babelbus.storage.files import LocalFiles
from tests.support.bus import SAFETY_NET_SECONDS, turns
from tests.support.certificates import Authority
from tests.support.hesitant import Hesitant, connect
from tests.support.link import Linked, Session, linked, until

ID = "session"


class Cluster:
    """A member whose clients are served by a first core, and a second one."""

    def __init__(self, authority: Authority | None) -> None:
        tls = None
        if authority is not None:
            cert_file, key_file = authority.issue("server")
            tls = Certificates(TlsSettings(str(cert_file), str(key_file))).make_tls("echo", True)
        self.first, self.second = Linked(tls=tls), Linked(tls=tls)
        self.context = None if authority is None else authority.client_context()
        self.edge: Edge = self.first.make_edge("member", waiting_max=5, waiting_seconds=SAFETY_NET_SECONDS)

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Session]:
        reader, writer = await self.first.dial(self.address, self.context)
        return reader, writer, await self.first.session()

    async def open(self, kind: str = "tcp", tls: LinkTls | None = None) -> None:
        await self.first.core.listen("127.0.0.1", 0, tls)
        await self.second.core.listen("127.0.0.1", 0)
        self.address = await self.first.open(self.edge)
        if kind == "unix":  # as of a member that owns the data itself
            ours, theirs = socket.socketpair()
            linking = self.first.core.adopt(ours, "member", is_of_member=True)
            await asyncio.gather(linking, self.edge.connect_socket(theirs))
        else:
            await self.first.link(self.edge, kind, None if tls is None else tls.client)

    async def pause(self) -> None:
        self.first.core.stop_accepting()
        [link] = await self.first.core.pause_members(SAFETY_NET_SECONDS)
        assert self.edge._link is not None
        self.link, self.edge_link = link, self.edge._link

    async def lose(self) -> None:
        """End the link without a word, as the death of a core does."""
        [link] = self.first.core.links
        link.end("killed")
        await until(lambda: not self.edge.is_connected)

    async def leave(self) -> None:
        await self.first.core.close()
        await until(lambda: not self.edge.is_connected)

    def continue_session(self, session_id: str = ID) -> Session:
        """Let the second core continue the session."""
        session = Session(self.second.door)
        transport = LinkedTransport(Absence(), 0, session, {"peername": ("127.0.0.1", 1), "sockname": None})
        session.connection_made(transport)
        self.second.core.absent[session_id] = transport
        return session


@contextlib.asynccontextmanager
async def cluster(
    authority: Authority | None = None, kind: str = "tcp", link_tls: LinkTls | None = None
) -> AsyncIterator[Cluster]:
    one = Cluster(authority)
    await one.open(kind, link_tls)
    try:
        yield one
    finally:
        await one.edge.stop()
        await one.first.close()
        await one.second.close()


@pytest.mark.parametrize("secure", [False, True])
def test_a_client_goes_on_at_the_next_core_and_nothing_of_either_side_is_lost(tmp_path: Path, secure: bool) -> None:
    async def test() -> None:
        async with cluster(Authority(tmp_path) if secure else None) as both:
            reader, writer, session = await both.dial()
            writer.write(b"one ")
            await until(lambda: session.received == b"one ")
            await both.pause()
            writer.write(b"two")
            session.transport.write(b"last ")
            both.link.hand_over(session.transport, ID)
            following = both.continue_session()
            following.transport.write(b"first ")
            await both.leave()
            assert (bytes(session.received), session.lost.done()) == (b"one ", False)
            assert both.edge.connections == 1
            await both.second.link(both.edge, "tcp")
            assert await reader.readexactly(11) == b"last first "
            await until(lambda: following.received == b"two")
            assert following.transport.get_extra_info("edge") == "member"
            following.transport.write(b"!")
            assert await reader.readexactly(1) == b"!"
            await until(lambda: following.transport.get_write_buffer_size() == 0)
            writer.transport.abort()
            assert await following.lost is None

    asyncio.run(test())


def test_a_client_whose_session_has_ended_meanwhile_is_closed() -> None:
    async def test() -> None:
        async with cluster() as both:
            reader, _, session = await both.dial()
            await both.pause()
            both.link.hand_over(session.transport, ID)
            both.continue_session().transport.abort()
            await both.leave()
            await both.second.link(both.edge, "tcp")
            assert await reader.read() == b""
            assert both.edge.connections == 0

    asyncio.run(test())


def test_a_session_ends_with_its_core_if_nobody_continues_it() -> None:
    async def test() -> None:
        async with cluster() as both:
            reader, _, session = await both.dial()
            await both.pause()
            session.transport.close()
            await both.leave()
            assert await reader.read() == b""
            assert both.edge.connections == 0

    asyncio.run(test())


def test_the_last_requests_of_a_client_that_left_while_it_waited_are_not_carried_out() -> None:
    async def test() -> None:
        async with cluster() as both:
            _, writer, session = await both.dial()
            await both.pause()
            both.link.hand_over(session.transport, ID)
            await both.leave()
            writer.write(b"an older value")
            writer.close()
            await writer.wait_closed()
            following = both.continue_session()
            await both.second.link(both.edge, "tcp")
            assert await following.lost is None
            assert following.received == b""
            assert both.edge.connections == 0

    asyncio.run(test())


def test_a_session_is_called_for_more_when_its_client_has_come() -> None:
    async def test() -> None:
        async with cluster() as both:
            _, _, session = await both.dial()
            await both.pause()
            both.link.hand_over(session.transport, ID)
            following = both.continue_session()
            await both.leave()
            assert following.events == []
            await both.second.link(both.edge, "tcp")
            await until(lambda: following.events == ["resume"])

    asyncio.run(test())


def test_a_client_that_another_edge_adopts_is_counted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with cluster() as both:
            reader, _, session = await both.dial()
            with monkeypatch.context() as patch:
                patch.setattr("babelbus.link.edge.SETTLE_SECONDS", 3600.0)  # what the client has taken is not counted
                session.transport.write(b"last ")
                assert await reader.readexactly(5) == b"last "
                await both.pause()
                both.link.hand_over(session.transport, ID)
                following = both.continue_session()
                await both.leave()
                clients = await both.edge.release()
                await both.edge.stop()
            both.edge = both.second.make_edge("member", waiting_max=5, waiting_seconds=SAFETY_NET_SECONDS)
            both.edge.adopt(clients)
            await both.second.link(both.edge, "tcp")
            following.transport.write(b"first")
            assert await reader.readexactly(5) == b"first"
            await until(lambda: following.transport.get_write_buffer_size() == 0)

    asyncio.run(test())


def test_a_client_whose_request_is_not_done_yet_may_go_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster() as both:
            session = Hesitant()
            connection = connect(session)
            both.first.make_session = lambda _: connection  # type: ignore[assignment,return-value]
            _, writer, _ = await both.dial()
            writer.write(b"request")
            await until(lambda: session.busy)
            both.first.core.stop_accepting()
            await Handover(LocalFiles(), str(tmp_path), 1).begin([], both.first.core, goes_on=False)
            assert connection.stays
            session.may_go_on = True
            connection.room()
            assert connection.continuation() is not None

    asyncio.run(test())


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
def test_a_member_that_still_sends_while_its_core_ends_loses_no_session(
    tmp_path: Path, kind: str, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def test() -> None:
        authority = Authority(tmp_path)
        cert_file, key_file = authority.issue("core")
        tls = LinkTls(str(cert_file), str(key_file), str(authority.path)) if kind == "tls" else None
        async with cluster(kind=kind, link_tls=tls) as both:
            reader, _, session = await both.dial()
            await both.pause()
            link = both.edge_link
            link.transport.pause_reading()  # it has no time
            link.send(PING)
            link._flush()  # on its way when the core ends
            received_bytes = both.link.received_bytes
            session.transport.write(b"last")
            both.link.hand_over(session.transport, ID)
            closing = asyncio.create_task(both.first.core.close())
            for _ in range(3):
                await turns(20)
                link.send(PING)
                link._flush()
            link.transport.resume_reading()
            await closing
            await until(lambda: not both.edge.is_connected)
            assert await reader.readexactly(4) == b"last"
            assert both.edge.connections == 1
            if kind != "tls":  # which ends both ways, and waits for the other end by itself
                assert both.link.received_bytes - received_bytes >= 4 * len(encode(PING))

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(test())


def test_frames_that_were_put_off_are_handled_when_the_link_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with cluster() as both:
            reader, _, session = await both.dial()
            await both.pause()
            deliver = Client.deliver

            def deliver_and_disconnect(client: Client, data: bytes, taken: int) -> None:
                deliver(client, data, taken)
                both.edge.disconnect("another member owns the data")

            monkeypatch.setattr(Client, "deliver", deliver_and_disconnect)
            for _ in range(2 * peer.FRAMES_MAX):
                session.transport.write(b"x")
            both.link.hand_over(session.transport, ID)
            await until(lambda: both.edge_link.done.done())
            assert await reader.readexactly(2 * peer.FRAMES_MAX) == b"x" * 2 * peer.FRAMES_MAX
            assert both.edge.connections == 1

    asyncio.run(test())


def test_a_member_that_hangs_holds_the_end_of_its_core_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "CLOSE_SECONDS", 0.01)

    async def test() -> None:
        async with cluster() as both:
            await both.dial()
            await both.pause()
            both.edge_link.transport.pause_reading()
            await both.first.core.close()
            await both.link.done
            assert both.edge.is_connected

    asyncio.run(test())


def test_the_end_of_a_core_does_not_wait_for_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((peer, "CLOSE_SECONDS"), (peer, "PING_SECONDS"), (core, "HELLO_SECONDS")):
        monkeypatch.setattr(module, name, SAFETY_NET_SECONDS)

    async def test() -> None:
        async with cluster() as both:
            end = both.second.core
            host, _, port = end.address.rpartition(":")
            with socket.create_connection((host, int(port))):
                await until(lambda: end._all)
                await end.close()

    asyncio.run(asyncio.wait_for(test(), SAFETY_NET_SECONDS / 2))


def copy(session: Session, session_id: str = "s" * 32) -> Copy:
    """Return a copy of a session of the first epoch."""
    return Copy(1, 7, session.transport.received_bytes, session_id, b"all of it")


async def copied(both: Cluster, session: Session) -> None:
    """Copy the session of a client that has said something, and return when its member has the copy."""
    [link] = both.first.core.links
    link.send_copy(session.transport, copy(session))
    link.send_mark(9)
    edge_link = both.edge._link
    assert edge_link is not None
    await until(lambda: edge_link.heard == 9)


def test_a_client_waits_with_its_copy_when_its_core_dies_and_the_next_core_has_the_copy_before_it_serves() -> None:
    async def test() -> None:
        async with cluster() as both:
            reader, writer, session = await both.dial()
            writer.write(b"one")
            await until(lambda: session.received == b"one")
            await copied(both, session)
            await both.lose()
            assert both.edge.waiting.copies() == [copy(session)._replace(heard=9)]
            gathered: list[Copy] = []
            both.second.core.serves = False
            both.second.core.on_copy = gathered.append
            await both.second.link(both.edge, "tcp")
            await until(lambda: both.second.core.copied == {"member"})
            assert gathered == both.edge.waiting.copies()
            following = both.continue_session("s" * 32)
            both.second.core.serve()
            following.transport.write(b"!")
            assert await reader.readexactly(1) == b"!"
            writer.write(b"two")
            await until(lambda: following.received == b"two")
            assert both.edge.waiting.copies() == []

    asyncio.run(test())


@pytest.mark.parametrize("change", ["client speaks", "core speaks", "withdrawn", "crossed", "stop"])
def test_a_copy_is_not_true_any_more_after_the_next_byte(change: str) -> None:
    async def test() -> None:
        async with cluster() as both:
            reader, writer, session = await both.dial()
            [link] = both.first.core.links
            if change == "crossed":  # the core made it before these bytes came
                before = copy(session)
                writer.write(b"one")
                await until(lambda: session.received == b"one")
                link.send_copy(session.transport, before)
            else:
                await copied(both, session)
            if change == "client speaks":
                writer.write(b"one")
                await until(lambda: session.received == b"one")
            elif change == "core speaks":
                session.transport.write(b"!")
                assert await reader.readexactly(1) == b"!"
            elif change == "withdrawn":
                link.withdraw_copy(session.transport)
            elif change == "stop":
                await both.pause()
            await turns()
            link._flush()
            await link.close("killed")
            await until(lambda: not both.edge.is_connected)
            assert both.edge.waiting.copies() == []
            assert await reader.read() == b""

    asyncio.run(test())


def test_clients_with_copies_are_closed_when_their_core_turns_out_to_live() -> None:
    async def test() -> None:
        async with cluster() as both:
            reader, _, session = await both.dial()
            await copied(both, session)
            await both.lose()
            both.edge.waiting.drop_copies(2)  # the next owner lives: it may be about to continue the session
            assert both.edge.connections == 1
            both.edge.waiting.drop_copies(1)
            assert await reader.read() == b""
            assert both.edge.connections == 0

    asyncio.run(test())


def test_a_client_whose_copy_no_core_has_is_closed() -> None:
    async def test() -> None:
        async with cluster() as both:
            reader, _, session = await both.dial()
            await copied(both, session)
            await both.lose()
            await both.second.link(both.edge, "tcp")
            assert await reader.read() == b""
            assert both.edge.connections == 0

    asyncio.run(test())


def test_a_member_that_links_while_its_core_begins_to_serve_is_served() -> None:
    async def test() -> None:
        async with cluster() as both:
            both.second.core.serves = False
            both.second.core.on_linked = lambda link: both.second.core.serve()  # in one read with the welcome
            both.edge.disconnect()
            await both.second.link(both.edge, "tcp")
            reader, _ = await both.first.dial(both.address)
            session = await both.second.session()
            session.transport.write(b"!")
            assert await reader.readexactly(1) == b"!"

    asyncio.run(test())


def test_a_client_that_was_handed_over_waits_on_though_its_core_still_holds_the_lease() -> None:
    async def test() -> None:
        async with cluster() as both:
            reader, _, session = await both.dial()
            await copied(both, session)
            await both.pause()
            both.link.hand_over(session.transport, ID)
            await both.leave()
            both.edge.waiting.drop_copies(1)  # the core ends so slowly that it renews its lease twice
            following = both.continue_session()
            await both.second.link(both.edge, "tcp")
            following.transport.write(b"!")
            assert await reader.readexactly(1) == b"!"

    asyncio.run(test())


def test_clients_of_an_edge_process_are_served_before_those_of_members() -> None:
    async def test() -> None:
        async with linked("socketpair") as both:
            both.core.serves = False
            edge = both.make_edge("process")
            address = await both.open(edge)
            await both.link(edge, "socketpair")
            reader, _ = await both.dial(address)
            session = await both.session()
            session.transport.write(b"!")
            assert await reader.readexactly(1) == b"!"
            both.core.serve()
            await both.dial(address)
            await both.session(1)
            await edge.stop()

    asyncio.run(test())


def test_a_member_that_links_while_its_core_begins_to_stop_pauses_and_keeps_its_clients() -> None:
    async def test() -> None:
        async with linked("tcp") as first, linked("tcp") as second:
            edge = first.make_edge("member", waiting_max=5, waiting_seconds=SAFETY_NET_SECONDS)
            address = await first.open(edge)
            await first.dial(address)
            await until(lambda: edge.connections == 1)
            first.core.on_linked = lambda link: first.core.stop_accepting()  # both words come in one read
            await first.link(edge, "tcp")
            [link] = [link for link in first.core.links if link.name == "member"]
            await until(link.paused.done)
            assert not first.sessions
            edge.disconnect()
            await second.link(edge, "tcp")
            await second.session()
            await edge.stop()

    asyncio.run(test())
