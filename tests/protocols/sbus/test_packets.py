"""Slow receivers: each mode of flood control with a client that does not read, while the others hear on."""

import socket
from pathlib import Path

import pytest

from babelbus.clients.sbus import Client
from babelbus.protocols.sbus.messages import Publish
from babelbus.protocols.sbus.packets.sockets import PacketConnection
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.sbus import (
    configured,
    heard_before_barrier,
    is_cut,
    join,
    payloads,
    publish_until_stopped,
    service_of,
)
from tests.support.server import LiveServer

SIZE = 10_000
KERNEL_PACKETS = 60
"""More packets of `SIZE` than a socket's buffers hold here."""
MANY = 200


def connection_of(live: LiveServer, count: int) -> PacketConnection:
    """The one that connected first, of `count`."""
    connections = service_of(live).server.connections
    live.until(lambda: len(connections) == count)
    return min(connections, key=lambda one: one._session.number)


def packet(number: int, size: int = SIZE) -> bytes:
    return b"%06d" % number + b"x" * (size - 6)


def numbers(received: list[bytes | None]) -> list[int]:
    return [int((one or b"")[:6]) for one in received]


def dropped(live: LiveServer, reason: str) -> float:
    labels = {"protocol": "sbus", "reason": reason}
    return (
        live.call(lambda: live.server.metrics.registry.get_sample_value("babelbus_live_dropped_total", labels)) or 0.0
    )


def flood(publisher: Client, count: int, size: int = SIZE) -> None:
    for number in range(count):
        publisher.publish(b"k", packet(number, size))


def test_by_default_what_a_slow_reader_does_not_take_waits_for_it(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, join(live, b"k") as slow, join(live) as publisher:
        flood(publisher, MANY)
        publisher.whoami()
        with join(live, b"other") as fine:
            fine.publish(b"other", b"x")
            assert payloads(fine, 1) == [b"x"]
        assert numbers(payloads(slow, MANY)) == list(range(MANY))


@pytest.mark.parametrize("bound", [{"queue_bytes_max": 100_000}, {"queue_packets_max": 10}])
def test_when_its_queue_is_full_its_publisher_waits_and_nobody_else(tmp_path: Path, bound: dict[str, int]) -> None:
    with (
        LiveServer(configured(tmp_path, **bound)) as live,
        join(live, b"k") as slow,
        join(live, b"k") as quick,
        join(live) as publisher,
    ):
        sent = publish_until_stopped(live, publisher, b"k", packet)
        with join(live, b"other") as fine:
            fine.publish(b"other", b"x")
            assert payloads(fine, 1) == [b"x"]
        for number in range(sent):  # nothing is lost, and both see the same order
            assert numbers(payloads(slow, 1)) == numbers(payloads(quick, 1)) == [number]
        publisher.publish(b"k", packet(sent))
        assert numbers(payloads(slow, 1)) == [sent]
        assert dropped(live, "hard") == 0


def test_soft_block_waits_without_a_queue(tmp_path: Path) -> None:
    with (
        LiveServer(configured(tmp_path)) as live,
        join(live, b"k", controls=(b"blocking/soft/block",)) as slow,
        join(live) as publisher,
    ):
        sent = publish_until_stopped(live, publisher, b"k", packet)
        assert connection_of(live, 2).backlog.count < 2 * KERNEL_PACKETS
        assert numbers(payloads(slow, sent)) == list(range(sent))


def test_soft_discard_drops_what_does_not_go_at_once(tmp_path: Path) -> None:
    with (
        LiveServer(configured(tmp_path)) as live,
        join(live, b"k", controls=(b"blocking/soft/discard",)) as slow,
        join(live) as publisher,
    ):
        flood(publisher, MANY)
        publisher.whoami()
        heard = numbers([one.payload for one in heard_before_barrier(slow)])
        assert 0 < len(heard) < MANY
        assert heard == list(range(len(heard)))
        assert dropped(live, "soft") == MANY - len(heard)
        publisher.publish(b"k", packet(MANY))
        assert numbers(payloads(slow, 1)) == [MANY]


@pytest.mark.parametrize("controls", [(b"blocking/soft/error",), (b"blocking/hard/error",)])
def test_error_modes_disconnect_the_slow_one_and_not_the_publisher(tmp_path: Path, controls: tuple[bytes, ...]) -> None:
    with (
        LiveServer(configured(tmp_path, queue_packets_max=20)) as live,
        join(live, b"k", controls=controls) as slow,
        join(live, b"k") as quick,
    ):
        for number in range(MANY):
            quick.publish(b"k", packet(number))
            assert numbers(payloads(quick, 1)) == [number]
        assert is_cut(slow)


def test_hard_discard_keeps_what_fits_and_drops_what_comes_later(tmp_path: Path) -> None:
    with (
        LiveServer(configured(tmp_path, queue_packets_max=20)) as live,
        join(live, b"k", controls=(b"blocking/hard/discard",)) as slow,
        join(live) as publisher,
    ):
        flood(publisher, MANY)
        publisher.whoami()
        assert connection_of(live, 2).backlog.count == 20
        lost = dropped(live, "hard")
        assert 0 < lost < MANY
        heard = numbers([one.payload for one in heard_before_barrier(slow)])
        assert heard == list(range(MANY - int(lost)))


@pytest.mark.parametrize(("order", "sign"), [(b"order/queue", 1), (b"order/stack", -1)])
def test_the_queue_has_the_order_that_its_reader_wants(tmp_path: Path, order: bytes, sign: int) -> None:
    with LiveServer(configured(tmp_path)) as live, join(live, b"k", controls=(order,)) as slow, join(live) as publisher:
        flood(publisher, MANY)
        publisher.whoami()
        waiting = connection_of(live, 2).backlog.count
        heard = numbers(payloads(slow, MANY))
        assert sorted(heard) == list(range(MANY))
        assert heard[: MANY - waiting] == list(range(MANY - waiting))  # what the kernel had is not touched
        assert heard[MANY - waiting :] == sorted(heard[MANY - waiting :], key=lambda number: sign * number)


def test_order_random_sends_the_largest_first(tmp_path: Path) -> None:
    with (
        LiveServer(configured(tmp_path, order="random")) as live,
        join(live, b"k") as slow,
        join(live) as publisher,
    ):
        sizes = [SIZE] * KERNEL_PACKETS + [100 + 37 * number % 1000 for number in range(MANY)]
        for number, size in enumerate(sizes):
            publisher.publish(b"k", packet(number, size))
        publisher.whoami()
        waiting = connection_of(live, 2).backlog.count
        heard = [len(one or b"") for one in payloads(slow, len(sizes))][len(sizes) - waiting :]
        assert waiting >= MANY
        assert heard == sorted(heard, reverse=True)


def test_an_answer_of_the_server_is_never_dropped_and_keeps_its_place(tmp_path: Path) -> None:
    wishes = (b"order/stack", b"blocking/soft/queue")
    with LiveServer(configured(tmp_path)) as live, join(live, b"k", controls=wishes) as slow, join(live) as publisher:
        flood(publisher, MANY)
        publisher.whoami()
        slow.control(b"!/cred/whoami")
        live.until(lambda: connection_of_now(live).backlog.count > 0)
        publisher.publish(b"k", packet(MANY))
        publisher.whoami()
        before = numbers([one.payload for one in drained(slow)])
        assert len(before) == MANY
        assert numbers(payloads(slow, 1)) == [MANY]


def connection_of_now(live: LiveServer) -> PacketConnection:
    return min(service_of(live).server.connections, key=lambda one: one._session.number)


def drained(client: Client) -> list[Publish]:
    heard: list[Publish] = []
    while isinstance(message := client.receive(), Publish):
        heard.append(message)
    return heard


def test_a_publisher_goes_on_when_the_one_it_waits_for_leaves_or_changes_its_mind(tmp_path: Path) -> None:
    for end in ("close", "discard"):
        with (
            LiveServer(configured(tmp_path, queue_packets_max=5)) as live,
            join(live, b"k") as slow,
            join(live) as publisher,
        ):
            publish_until_stopped(live, publisher, b"k", packet)
            if end == "close":
                slow.close()
            else:
                slow.control(b"blocking/hard/discard")
            publisher.whoami()


def test_many_receivers_that_leave_at_once_harm_nobody(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, join(live, b"k") as client:
        others = [join(live, b"k") for _ in range(100)]
        for number in range(20):
            client.publish(b"k", packet(number, 100))
            for other in others[number * 5 : number * 5 + 5]:
                other.close()
        assert numbers(payloads(client, 20)) == list(range(20))


def test_too_many_connections_are_closed_at_once(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path, connections_max=1)) as live, join(live) as client:
        with Client(live.server.addresses["sbus"], timeout_seconds=SAFETY_NET_SECONDS) as other:
            assert is_cut(other)
        client.whoami()


def test_a_packet_that_the_receivers_buffer_cannot_take_is_dropped_for_it_alone(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, join(live, b"k") as client, join(live) as publisher:

        def shrink() -> None:
            connection_of_now(live)._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 5_000)

        live.call(shrink)
        publisher.publish(b"k", packet(1, 20_000))
        publisher.publish(b"k", packet(2, 20))
        assert numbers(payloads(client, 1)) == [2]
        assert dropped(live, "too_long_for_receiver") == 1


def test_a_stop_sends_what_waits_to_a_receiver_that_reads_on(tmp_path: Path) -> None:
    live = LiveServer(configured(tmp_path))
    with live, join(live, b"k") as slow, join(live) as publisher:
        flood(publisher, MANY)
        publisher.whoami()
        live.ask_to_stop()
        assert numbers(payloads(slow, MANY)) == list(range(MANY))
        assert is_cut(slow)
