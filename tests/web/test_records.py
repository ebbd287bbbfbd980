"""Records over the administration endpoint: browse, one whole, follow, export, publish, copy; over real sockets."""

import asyncio
import base64
import json
import socket
from typing import Any

import pytest
from aiohttp import ClientPayloadError
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.access import SERVER
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.records.format import encode_batch
from babelbus.records.record import Record
from babelbus.web import reading, records
from babelbus.web.records import csv_rows
from tests.support.bus import SAFETY_NET_SECONDS
from tests.web.test_admin import TOKEN, Caller, FakeServer, serve

HOSTILE = "<img src=x onerror=alert(1)>"


async def put(bus: FakeServer, topic: str, *events: Event) -> None:
    await bus.broker.publish(Publication(SERVER, "test", list(events), topic)).wait()


async def filled(bus: FakeServer, count: int = 10, topic: str = "orders") -> None:
    bus.bus.topic(topic)
    for number in range(count):
        await put(bus, topic, Event(topic, b'{"n":%d}' % number, b"k%d" % number, timestamp=1000 + number))


def offsets(body: dict[str, Any]) -> list[int]:
    return [record["offset"] for record in body["records"]]


async def raw(call: Caller, path: str) -> tuple[int, Any, bytes]:
    async with call.session.get(call.base + path, headers={"Authorization": f"Bearer {TOKEN}"}) as reply:
        return reply.status, reply.headers, await reply.read()


async def lines_of(call: Caller, path: str, body: object) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with call.session.post(call.base + path, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return [json.loads(line) for line in (await reply.read()).splitlines()]


def test_records_are_read_by_offset_by_time_and_from_the_end_in_both_directions() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        await filled(bus)
        _, body = await call("GET", "/api/topics/orders/records?offset=3&count=4")
        assert offsets(body) == [3, 4, 5, 6]
        assert (body["first_offset"], body["end_offset"]) == (0, 10)
        assert (body["next_offset"], body["previous_offset"]) == (7, 3)
        first = body["records"][0]
        assert first["payload"] == '{"n":3}'
        assert (first["key"], first["subject"], first["time_ms"], first["clipped"]) == ("k3", "orders", 1003, False)
        _, body = await call("GET", "/api/topics/orders/records?before=3&count=4")
        assert (offsets(body), body["previous_offset"]) == ([0, 1, 2], None)
        _, body = await call("GET", "/api/topics/orders/records?last=1&count=2")
        assert (offsets(body), body["next_offset"]) == ([8, 9], 10)
        _, body = await call("GET", "/api/topics/orders/records?time_ms=1006&count=2")
        assert offsets(body) == [6, 7]

    serve(test)


def test_an_offset_that_is_not_there_is_answered_with_the_nearest_records_and_a_sentence() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        topic = bus.bus.topic("orders", segment_bytes=2**16, retention_records=1)
        for number in range(40):
            await put(bus, "orders", Event("orders", b"%05d" % number * 1000, timestamp=1000 + number))
        await topic.partitions[0].clean(bus.clock.now_ms())
        first = topic.partitions[0].log.first_offset
        assert first > 0
        _, body = await call("GET", "/api/topics/orders/records?offset=0&count=2")
        assert offsets(body)[0] == first
        assert "Retention has removed" in body["notes"][0]
        _, body = await call("GET", "/api/topics/orders/records?offset=900&count=2")
        assert (offsets(body), body["notes"]) == (
            [38, 39],
            ["The partition ends at offset 40: these are the last records."],
        )
        _, body = await call("GET", "/api/topics/orders/records?time_ms=99999&count=2")
        assert offsets(body) == [38, 39]
        assert "No record is as late" in body["notes"][0]
        for offset, word in ((0, "retention has removed"), (40, "ends at offset 40")):
            status, body = await call("GET", f"/api/topics/orders/records/0/{offset}")
            assert (status, body["code"]) == (404, "no_record")
            assert word in body["error"]

    serve(test)


def test_reading_backwards_passes_what_compaction_has_removed() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        topic = bus.bus.topic("keys", cleanup="compact", segment_bytes=2**16)
        await put(bus, "keys", Event("keys", b"kept", b"first", timestamp=1))
        for number in range(300):
            await put(bus, "keys", Event("keys", b"%05d" % number * 100, b"same", timestamp=number + 2))
        await topic.partitions[0].clean(bus.clock.now_ms())
        topic.partitions[0].forget_tail()
        _, body = await call("GET", "/api/topics/keys/records?offset=0&count=2")
        following = offsets(body)[1]
        assert following > 100, "compaction has left a hole"
        _, body = await call("GET", f"/api/topics/keys/records?before={following}&count=5")
        assert offsets(body) == [0]
        status, body = await call("GET", "/api/topics/keys/records/0/1")
        assert (status, body["code"]) == (404, "no_record")
        assert "compaction" in body["error"]

    serve(test)


def test_large_and_strange_records_are_shortened_and_say_so() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("odd")
        many = tuple((b"h%d" % number, b"v" * 8000) for number in range(127))
        await put(bus, "odd", Event("odd", "ä".encode() * 2**20, b"k" * 5000, many))
        await put(bus, "odd", Event("odd/\udcff", b"\xff\xfe", b"\x80", ((b"\xff", b"\xff"), (b"none", None))))
        await put(bus, "odd", Event("odd", None, b"gone"))
        await put(
            bus,
            "odd",
            Event(f"odd/{HOSTILE}", HOSTILE.encode(), HOSTILE.encode(), ((HOSTILE.encode(), HOSTILE.encode()),)),
        )
        _, body = await call("GET", "/api/topics/odd/records?offset=0&bytes_max=101")
        large, strange, removed, hostile = body["records"]
        assert (large["payload"], large["payload_bytes"], large["clipped"]) == ("ä" * 50, 2**21, True)
        assert (len(large["key"]), large["key_bytes"]) == (101, 5000)
        assert len(large["headers"]) == 127
        assert large["headers"][0] == ["h0", "v" * 101, {"bytes": 8000}]
        assert large["headers"][126] == ["h126", "", {"bytes": 8000}]
        assert large["headers_bytes"] > 127 * 8000
        assert base64.b64decode(strange["payload_b64"]) == b"\xff\xfe"
        assert base64.b64decode(strange["key_b64"]) == b"\x80"
        assert strange["headers"][0] == ["�", "/w==", {"base64": True}]
        assert strange["headers"][1] == ["none", None]
        assert strange["subject"] == "odd/�"
        assert (removed["payload"], removed["deleted"]) == (None, True)
        assert (hostile["payload"], hostile["key"], hostile["subject"]) == (HOSTILE, HOSTILE, f"odd/{HOSTILE}")

    serve(test)


def test_a_record_is_shown_as_each_protocol_would_see_it() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders")
        await put(
            bus,
            "orders",
            Event(
                "orders/eu",
                b'{"n":1}',
                b"k",
                ((b"content-type", b"application/json"), (b"ce_source", b"zbus:alice#app")),
            ),
        )
        _, body = await call("GET", "/api/topics/orders/records/0/0")
        assert body["record"]["origin"] == {"protocol": "zbus", "principal": "alice", "source": "zbus:alice#app"}
        views = body["views"]
        assert set(views) == {"jebp", "zbus", "worterbuch", "sbus", "eventmesh"}
        zbus = json.loads(views["zbus"]["text"])
        assert (zbus["body"], zbus["headers"]["offset"]) == ({"n": 1}, "0")
        pairs = json.loads(views["worterbuch"]["text"])["pState"]["keyValuePairs"]
        assert pairs == [{"key": "orders/eu", "value": {"n": 1}}]
        assert base64.b64decode(views["sbus"]["b64"]) == b'MSG orders/eu\0{"n":1}'
        assert json.loads(views["eventmesh"]["text"])["topic"] == "orders"
        assert b'{"n":1}' in base64.b64decode(views["jebp"]["b64"])
        await put(bus, "orders", Event("orders", b"x" * 300_000))
        _, body = await call("GET", "/api/topics/orders/records/0/1")
        assert all("views are made" in view["note"] for view in body["views"].values())
        assert body["record"]["clipped"]

    serve(test)


def test_a_payload_is_downloaded_as_a_file() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("a/b")
        await put(bus, "a/b", Event("a/b", HOSTILE.encode()))
        status, headers, content = await raw(call, "/api/topics/a%2Fb/records/0/0/payload")
        assert (status, content) == (200, HOSTILE.encode())
        assert headers["Content-Type"] == "application/octet-stream"
        assert headers["Content-Disposition"] == 'attachment; filename="a-b-0-0.bin"'
        assert headers["X-Content-Type-Options"] == "nosniff"

    serve(test)


def test_the_newest_records_of_all_partitions_come_by_time() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("wide", 3)
        for number in range(9):
            await put(bus, "wide", Event("wide", b"%d" % number, timestamp=1000 + number))
        _, body = await call("GET", "/api/topics/wide/records?last=1&count=4")
        assert [record["payload"] for record in body["records"]] == ["5", "6", "7", "8"]
        assert (body["partition"], body["partitions"], body["next_offset"]) == (None, 3, None)
        status, body = await call("GET", "/api/topics/wide/records?partition=3")
        assert (status, body["code"]) == (404, "unknown_partition")

    serve(test)


def test_a_follower_gets_new_records_and_the_number_of_those_left_out() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        await filled(bus, 2)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with call.session.get(f"{call.base}/api/topics/orders/follow", headers=headers) as reply:
            assert await reply.content.readline() == b"\n"
            await put(bus, "orders", *[Event("orders", b"new %d" % number) for number in range(200)])
            told = 0
            while told < 200:
                line = json.loads(await reply.content.readline())
                told += line.get("skipped", 1)
            assert line["payload"] == "new 199"
            await bus.broker.remove_topic("orders", SERVER)
            assert "removed" in json.loads(await reply.content.readline())["end"]

    serve(test)


def test_a_server_that_stops_ends_the_answers_to_followers() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        await filled(bus, 2)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with call.session.get(f"{call.base}/api/topics/orders/follow", headers=headers) as reply:
            assert await reply.content.readline() == b"\n"
            await bus.broker.close()
            assert await reply.content.readline() == b""

    serve(test)


def test_records_are_exported_as_json_lines_and_as_csv_without_formulas() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        await filled(bus, 450)
        await put(bus, "orders", Event("orders", b'=cmd|" /C calc"!A0', b"@k", ((b"h", b"v"),), timestamp=5))
        await put(bus, "orders", Event("orders", b"\xff", timestamp=6))
        status, headers, content = await raw(call, "/api/topics/orders/export?format=jsonl&offset=10")
        assert (status, headers["Content-Disposition"]) == (200, 'attachment; filename="orders.jsonl"')
        assert [json.loads(line)["offset"] for line in content.splitlines()] == list(range(10, 452))
        _, headers, content = await raw(call, "/api/topics/orders/export?format=csv&offset=450")
        assert headers["Content-Type"].startswith("text/csv")
        rows = content.decode().splitlines()
        assert rows[0].startswith("partition,offset,time_ms")
        assert rows[1] == '0,450,5,orders,\'@k,"\'=cmd|"" /C calc""!A0","[[""h"",""v""]]",'
        assert rows[2] == "0,451,6,orders,,/w==,,payload:base64"
        _, _, content = await raw(call, "/api/topics/orders/export?count=3&end=100&time_ms=1090")
        assert [json.loads(line)["offset"] for line in content.splitlines()] == [90, 91, 92]
        status, _, _ = await raw(call, "/api/topics/orders/export?format=xml")
        assert status == 400

    serve(test)


def test_an_export_of_a_topic_that_is_removed_meanwhile_does_not_end_like_a_whole_one() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders")
        await put(bus, "orders", *[Event("orders", bytes(2**20)) for _ in range(40)])  # more than sockets hold
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with call.session.get(f"{call.base}/api/topics/orders/export", headers=headers) as reply:
            assert reply.status == 200
            await reply.content.readany()
            await bus.broker.remove_topic("orders", principal=SERVER).wait()
            with pytest.raises(ClientPayloadError):
                await reply.read()

    serve(test)


@given(st.text())
def test_no_cell_of_csv_begins_like_a_formula(text: str) -> None:
    import csv
    import io

    if any("\ud800" <= letter <= "\udfff" for letter in text) or "\0" in text:
        return
    (row,) = csv.reader(io.StringIO(csv_rows([[text]]).decode(), newline=""))
    cell = row[0] if row else ""
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert cell.removeprefix("'") == text.removeprefix("'")


def test_records_are_published_by_hand_also_to_a_chosen_partition() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders", 3)
        body = {"payload": '{"a":1}', "key": "k", "headers": [["h", "v"]], "subject": "orders/eu", "partition": 2}
        status, place = await call("POST", "/api/topics/orders/records", body)
        assert (status, place) == (200, {"topic": "orders", "partition": 2, "offset": 0})
        _, shown = await call("GET", "/api/topics/orders/records/2/0")
        record = shown["record"]
        assert (record["subject"], record["payload"], record["key"]) == ("orders/eu", '{"a":1}', "k")
        assert record["headers"] == [["h", "v"], ["ce_source", "admin"]]
        status, _ = await call("POST", "/api/topics/orders/records", {"payload_b64": "/w=="})
        assert status == 200
        for wrong, code in (
            ({"subject": "elsewhere"}, "invalid_event"),
            ({"headers": [["ce_source", "me"]]}, "invalid_event"),
            ({"payload": None}, "invalid_event"),
            ({"partition": 9}, "unknown_partition"),
            ({"payload": 5}, "bad_request"),
        ):
            _, answered = await call("POST", "/api/topics/orders/records", wrong)
            assert answered["code"] == code, wrong
        assert (await call("POST", "/api/topics/none/records", {}))[1]["code"] == "unknown_topic"
        assert (await call("POST", "/api/topics/%24state/records", {}))[1]["code"] == "refused"

    serve(test)


def test_records_are_copied_to_another_topic_and_published_again() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("orders")
        bus.bus.topic("copies")
        for number in range(500):
            await put(
                bus, "orders", Event("orders/eu", b"%d" % number, b"k", ((b"h", b"v"), (b"ce_source", b"zbus:bob")))
            )
        told = await lines_of(call, "/api/topics/orders/copy", {"to": "copies", "from": 100})
        assert told[-1] == {"copied": 400, "next_offset": 500, "end_offset": 500, "done": True}
        assert told[0]["copied"] == 200
        _, body = await call("GET", "/api/topics/copies/records?offset=0&count=1")
        record = body["records"][0]
        assert (record["subject"], record["payload"], record["key"]) == ("copies/eu", "100", "k")
        assert record["headers"] == [["h", "v"], ["ce_source", "admin"]]
        told = await lines_of(call, "/api/topics/orders/copy", {"to": "orders", "offsets": [7, 3]})
        assert told == [{"copied": 2, "next_offset": 4, "end_offset": 8, "done": True}]
        _, body = await call("GET", "/api/topics/orders/records?last=1&count=2")
        assert [one["payload"] for one in body["records"]] == ["7", "3"]
        for wrong, code in (
            ({"to": "none", "from": 0}, "unknown_topic"),
            ({"to": "$state", "from": 0}, "refused"),
            ({"to": "copies"}, "invalid_copy"),
            ({"to": "copies", "offsets": [1], "from": 0}, "invalid_copy"),
            ({"to": "copies", "offsets": [10_000]}, "no_record"),
        ):
            assert (await call("POST", "/api/topics/orders/copy", wrong))[1]["code"] == code, wrong

    serve(test)


def test_wrong_places_and_numbers_are_refused() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        await filled(bus, 1)
        for path, status in (
            ("/api/topics/none/records", 404),
            ("/api/topics/orders/records?offset=-1", 400),
            ("/api/topics/orders/records?count=0", 400),
            ("/api/topics/orders/records/x/0", 404),
            ("/api/topics/orders/records/0/-1", 404),
            ("/api/topics/orders/records/1/0", 404),
            ("/api/topics/none/follow", 404),
            ("/api/topics/none/export", 404),
        ):
            assert (await call("GET", path))[0] == status, path

    serve(test)


def test_a_page_of_large_records_is_shorter_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ANSWER_BYTES_MAX", 100_000)

    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("big")
        for number in range(9):
            await put(bus, "big", Event("big", b"%d" % number * 40_000))
        monkeypatch.setattr(reading, "COUNT_AT_ONCE", 1)
        _, body = await call("GET", "/api/topics/big/records?offset=0&count=9")
        assert offsets(body) == [0, 1, 2]
        assert (body["next_offset"], "large" in body["notes"][0]) == (3, True)
        _, body = await call("GET", "/api/topics/big/records?last=1&count=9")
        assert offsets(body)[-1] == 8
        assert body["previous_offset"] == offsets(body)[0] > 0

    serve(test)


def test_the_newest_large_records_of_many_partitions_cost_no_more_than_those_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "ANSWER_BYTES_MAX", 100_000)
    monkeypatch.setattr(reading, "COUNT_AT_ONCE", 1)

    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("wide", partitions=4)
        for _ in range(5):
            for partition in range(4):
                batch = encode_batch([Record(b"x" * 40_000, None, (), 1000)])
                await bus.broker.publish(Publication(SERVER, "test", batch, "wide", partition)).wait()
        _, body = await call("GET", "/api/topics/wide/records?last=1&count=20")
        assert sorted((record["partition"], record["offset"]) for record in body["records"]) == [
            (partition, 4) for partition in range(4)
        ]
        assert body["notes"] == ["The records are large, so that fewer of them are shown at once."]

    serve(test)


def test_a_follower_that_takes_nothing_does_not_keep_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "READER_SECONDS", 0.2)
    monkeypatch.setattr(records, "FOLLOWERS_MAX", 1)

    async def test(call: Caller, bus: FakeServer) -> None:
        bus.bus.topic("big")
        await put(bus, "big", *[Event("big", b"x" + b"\x01" * 80_000)] * 50)  # 24 MB as JSON
        host, _, port = call.base.removeprefix("http://").partition(":")
        url, headers = f"{call.base}/api/topics/big/follow", {"Authorization": f"Bearer {TOKEN}"}

        async def status() -> int:
            async with call.session.get(url, headers=headers) as reply:
                return reply.status

        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            reader.setblocking(False)
            reader.sendall(
                f"GET /api/topics/big/follow?offset=0&bytes_max=65536 HTTP/1.1\r\nHost: {host}:{port}\r\n"
                f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
            )
            async with asyncio.timeout(SAFETY_NET_SECONDS):
                assert (await asyncio.get_running_loop().sock_recv(reader, 12)) == b"HTTP/1.1 200"
                while await status() == 503:
                    pass

    serve(test)
