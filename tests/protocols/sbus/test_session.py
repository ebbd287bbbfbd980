"""What a bus does for its clients: real clients on real sockets of a whole server."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.clients.sbus import AsyncClient, Client, connect
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX, Control, Publish
from tests.support.bus import SAFETY_NET_SECONDS, in_loop
from tests.support.sbus import (
    configured,
    heard_before_barrier,
    is_cut,
    join,
    payloads,
    publish_until_stopped,
    service_of,
)
from tests.support.sbus_cases import CASES
from tests.support.server import LiveServer


@pytest.fixture(scope="module", params=[True, False], ids=["uvloop", "asyncio"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    config = configured(tmp_path_factory.mktemp("bus"), patterns_max=1000, patterns_bytes_max=100_000)
    with LiveServer(config, use_uvloop=request.param) as server:
        yield server


def test_whoami_tells_group_user_and_process(live: LiveServer) -> None:
    with join(live) as client:
        assert client.whoami() == f"!/cred/{os.getgid()}/{os.getuid()}/{os.getpid()}".encode()


def test_every_case_of_the_patterns_end_to_end(live: LiveServer) -> None:
    with join(live) as publisher:
        for pattern, key, expected in CASES:
            if pattern.startswith("!/cred/") and pattern != "!/cred////x":
                continue  # a shortened form is refused before anything is matched
            secret = key.startswith("!/cred/0/0/1/")
            with join(live, pattern.encode()) as client:
                publisher.publish(key.encode(), b"x")
                publisher.whoami()
                heard = heard_before_barrier(client)
            assert heard == ([Publish(key.encode(), b"x")] if expected and not secret else []), (pattern, key)


def test_a_packet_is_passed_on_byte_for_byte(live: LiveServer) -> None:
    packets = [
        b"MSG a/b\0hi",
        b"MSG a/\0",
        b"MSG a/no-nul",
        b"MSG a/\xff\xfe\0\0\xff\0",
        b"MSG a/*\0star",
        b"MSG a/  \0",
    ]
    with join(live, b"a/") as client, join(live) as publisher:
        for packet in packets:
            publisher.socket.send(packet)
        assert [client.receive_packet() for _ in packets] == packets


def test_a_message_comes_once_however_many_patterns_match(live: LiveServer) -> None:
    with join(live, b"a", b"a", b"*", b"") as client:
        client.publish(b"a", b"1")
        assert heard_before_barrier(client) == [Publish(b"a", b"1")]


def test_unsubscribing_takes_one_of_several_away_and_nothing_else(live: LiveServer) -> None:
    with join(live, b"a", b"a", b"b/*", b"c") as client:
        client.unsubscribe(b"a")
        client.unsubscribe(b"b/x")  # matches, but is not the pattern
        client.unsubscribe(b"nothing")
        for key in (b"a", b"b/x", b"c"):
            client.publish(key)
        assert [one.key for one in heard_before_barrier(client)] == [b"a", b"b/x", b"c"]
        client.unsubscribe(b"a")
        client.socket.send(b"UNSUB c\0junk")
        for key in (b"a", b"b/x", b"c"):
            client.publish(key)
        assert [one.key for one in heard_before_barrier(client)] == [b"b/x"]


def test_what_stands_between_two_messages_takes_effect_between_them(live: LiveServer) -> None:
    with join(live) as client:
        for step in (b"MSG k\x001", b"SUB k", b"MSG k\x002", b"CMSG echo/off", b"MSG k\x003", b"CMSG echo/on\0"):
            client.socket.send(step)
        for step in (b"MSG k\x004", b"UNSUB k", b"MSG k\x005", b"SUB *", b"MSG k\x006"):
            client.socket.send(step)
        assert [one.payload for one in heard_before_barrier(client)] == [b"2", b"4", b"6"]


def test_echo_off_concerns_the_own_copy_alone(live: LiveServer) -> None:
    with join(live, b"k", controls=(b"echo/off",)) as client, join(live, b"k") as other:
        client.publish(b"k", b"1")
        client.whoami()
        other.publish(b"k", b"2")
        assert payloads(client, 1) == [b"2"]
        assert payloads(other, 2) == [b"1", b"2"]


@pytest.mark.parametrize("key", [b"", b"order/queue2", b"blocking/soft/none", b"nonsense"])
def test_an_unknown_control_message_is_ignored(live: LiveServer, key: bytes) -> None:
    with join(live) as client:
        client.control(key)
        assert heard_before_barrier(client) == []


def test_control_messages_are_never_passed_on(live: LiveServer) -> None:
    with join(live, b"") as client, join(live) as other:
        other.control(b"k")
        other.whoami()
        assert heard_before_barrier(client) == []


@pytest.mark.parametrize("packet", [b"", b"SUB", b"msg a", b" MSG a\0", b"MSG\0a", b"PING", b"SUB !/cred/1/2/3/x"])
def test_who_breaks_the_protocol_is_disconnected_and_what_came_before_was_done(live: LiveServer, packet: bytes) -> None:
    with join(live, b"before") as client, join(live) as other:
        other.publish(b"before")
        other.socket.send(packet)
        with contextlib.suppress(OSError):  # it may be closed already
            other.publish(b"before", b"too late")
        assert is_cut(other)
        assert heard_before_barrier(client) == [Publish(b"before", b"")]


def test_too_many_subscriptions_disconnect(live: LiveServer) -> None:
    with join(live) as client:
        for number in range(1000):
            client.subscribe(b"%d" % (number // 2))
        client.whoami()
        client.subscribe(b"one more")
        assert is_cut(client)


def test_too_long_subscriptions_disconnect(live: LiveServer) -> None:
    with join(live) as client:
        for number in range(10):
            client.subscribe(b"%d" % number + b"x" * 10_000)
            client.unsubscribe(b"%d" % number + b"x" * 10_000)
        client.whoami()
        for number in range(10):
            client.subscribe(b"%d" % number + b"x" * 9_990)
        client.whoami()
        client.subscribe(b"x" * 100)
        assert is_cut(client)


def test_receivers_that_come_and_go_leave_nothing_behind(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("babelbus.core.fanout.SETS_MAX", 5)
    hub = service_of(live).hub
    with join(live, b"k") as client:
        for number in range(20):
            with join(live, b"k"):
                client.publish(b"k", b"%d" % number)
                assert payloads(client, 1) == [b"%d" % number]
            assert len(hub.fanout._sets) <= 5


def test_the_longest_packet_passes_and_a_longer_one_is_dropped_with_both_sides_alive(live: LiveServer) -> None:
    with join(live, b"k") as client, join(live) as publisher:
        publisher.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 212_992)
        longest = b"MSG k\0" + b"x" * (PACKET_BYTES_MAX - 6)
        publisher.publish(b"k", b"first")
        publisher.socket.send(longest + b"x")
        publisher.publish(b"k", b"between")
        publisher.socket.send(longest)
        publisher.publish(b"k", b"last")
        assert payloads(client, 2) == [b"first", b"between"]
        assert client.receive_packet() == longest
        assert payloads(client, 1) == [b"last"]


def test_connect_publish_and_close_always_delivers(live: LiveServer) -> None:
    with join(live, b"k") as client:
        for number in range(300):
            with connect(live.server.addresses["sbus"]) as one:
                one.send(b"MSG k\0%d" % number)
        assert sorted(int(one or b"-1") for one in payloads(client, 300)) == list(range(300))


def test_half_a_close_is_the_end_after_what_was_sent(live: LiveServer) -> None:
    with join(live, b"k") as client, join(live) as other:
        other.publish(b"k", b"1")
        other.socket.shutdown(socket.SHUT_WR)
        assert is_cut(other)
        assert payloads(client, 1) == [b"1"]


def test_who_stops_listening_is_removed_and_the_others_hear_on(live: LiveServer) -> None:
    with join(live, b"k") as client, join(live, b"k") as other:
        other.socket.shutdown(socket.SHUT_RD)
        for number in range(10):
            client.publish(b"k", b"%d" % number)
        assert payloads(client, 10) == [b"%d" % number for number in range(10)]
        live.until(lambda: len(service_of(live).server.connections) == 1)


def test_all_receivers_see_the_messages_of_several_publishers_in_one_order(live: LiveServer) -> None:
    receivers = [join(live, b"k/") for _ in range(3)]
    publishers = [join(live) for _ in range(4)]
    for number in range(200):
        for one, publisher in enumerate(publishers):
            publisher.publish(b"k/%d" % (number % 5), b"%d:%d" % (one, number))
    seen = [payloads(receiver, 800) for receiver in receivers]
    assert seen[0] == seen[1] == seen[2]
    for one in range(4):
        assert [each for each in seen[0] if each and each.startswith(b"%d:" % one)] == [
            b"%d:%d" % (one, number) for number in range(200)
        ]
    for client in (*receivers, *publishers):
        client.close()


def test_a_secret_message_reaches_its_process_alone(live: LiveServer) -> None:
    own = f"!/cred/{os.getgid()}/{os.getuid()}/{os.getpid()}/x".encode()
    with join(live, b"!/cred////x") as client, join(live, b"") as monitor, join(live) as publisher:
        for key in (own, b"!/cred////x", b"!/cred/9/9/9/x", b"!/cred/whoami"):
            publisher.publish(key)
        publisher.whoami()
        assert [one.key for one in heard_before_barrier(client)] == [own, b"!/cred////x"]
        # The monitor is the same process; what is for another one it does not hear, and a shortened form is no secret.
        assert [one.key for one in heard_before_barrier(monitor)] == [own, b"!/cred////x", b"!/cred/whoami"]
        client.unsubscribe(b"!/cred////x")
        client.whoami()
        publisher.publish(own)
        publisher.whoami()
        assert heard_before_barrier(client) == []


def test_with_open_cred_everybody_hears_secrets_as_with_the_reference(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path, open_cred=True)) as live, join(live, b"") as monitor:
        monitor.publish(b"!/cred/9/9/9/x")
        assert [one.key for one in heard_before_barrier(monitor)] == [b"!/cred/9/9/9/x"]


def test_the_client_of_an_event_loop_does_the_same(live: LiveServer) -> None:
    @in_loop
    async def talk() -> None:
        async with AsyncClient(live.server.addresses["sbus"]) as client:
            await client.subscribe(b"k/*")
            assert (await client.whoami()).startswith(b"!/cred/")
            await client.publish(b"k/1", b"x")
            assert await client.receive() == Publish(b"k/1", b"x")
            await client.unsubscribe(b"k/*")
            await client.publish(b"k/1", b"x")
            await client.control(b"!/cred/whoami")
            assert isinstance(await client.receive(), Control)

    talk()


def test_a_client_that_hears_its_own_flood_stops_only_itself(live: LiveServer) -> None:
    with join(live, b"flood") as flooder, join(live, b"k") as other:
        sent = publish_until_stopped(live, flooder, b"flood", lambda number: b"%d" % number + b"x" * 50_000)
        for number in range(100):
            other.publish(b"k", b"%d" % number)
        assert payloads(other, 100) == [b"%d" % number for number in range(100)]
        assert [int((one or b"").rstrip(b"x")) for one in payloads(flooder, sent)] == list(range(sent))


def test_a_client_of_its_own_sockets_is_taken_too(live: LiveServer) -> None:
    with Client(connect(live.server.addresses["sbus"]), timeout_seconds=SAFETY_NET_SECONDS) as client:
        assert client.whoami()
