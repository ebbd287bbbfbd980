"""What the messages of a connection mean: a scripted peer for each rule of sections 3 to 5."""

from typing import Any

import pytest

from babelbus.core.access import SERVER
from babelbus.core.record import Event
from babelbus.core.subject import exactly
from tests.protocols.zbus.peer import Client, House, command
from tests.storage.faults import FaultyFiles
from tests.support.bus import Gate, in_loop, publish, turns


def bodies(messages: list[dict[str, Any]]) -> list[Any]:
    return [message["body"] for message in messages]


def offsets(messages: list[dict[str, Any]]) -> list[int]:
    return [int(message["headers"]["offset"]) for message in messages]


@in_loop
async def test_create_pub_and_take_answer_as_the_specification_has_it() -> None:
    client = Client(House())
    assert client.do("create", mq="Q", channel="C", mqType="disk", id="1") == {
        "headers": {"content-type": "text/plain; charset=utf8", "id": "1"},
        "body": "OK, CREATE (mq=Q,channel=C)",
        "status": 200,
    }
    assert client.do("create", mq="Q", id="2")["body"] == "OK, CREATE (mq=Q)"
    assert client.do("pub", {"a": 1}, mq="Q", id="3") == {
        "headers": {"content-type": "text/plain; charset=utf8", "id": "3"},
        "body": "OK, PUB (mq=Q)",
        "status": 200,
    }
    taken = client.do("take", mq="Q", channel="C", window=5, id="4")
    assert taken["status"] == 200
    assert taken["headers"] == {
        "mq": "Q", "channel": "C", "content-type": "application/json; charset=utf8", "id": "4",
    }  # fmt: skip
    assert taken["body"] == [
        {
            "headers": {"id": "3", "source": client.id, "mq": "Q", "offset": "0", "remote-addr": "/10.0.0.1:5"},
            "body": {"a": 1},
        }
    ]
    nothing = client.do("take", mq="Q", channel="C", id="5")
    assert (nothing["status"], nothing["body"]) == (604, [])


@in_loop
async def test_a_delivery_has_the_headers_of_section_4_3_and_every_value_is_a_string() -> None:
    house = House()
    client, publisher = Client(house), Client(house)
    client.say(command("create", mq="Q", channel="C", id=1), command("sub", mq="Q", channel="C", window=2, id=2))
    assert bodies(client.messages()) == ["OK, CREATE (mq=Q,channel=C)", "OK, SUB (mq=Q,channel=C)"]
    publisher.do("pub", "hello", mq="Q", id="p0", tag="t", extra=7)
    [delivery] = await client.pushed()
    assert delivery == {
        "headers": {
            "mq": "Q",
            "channel": "C",
            "id": "p0",
            "source": publisher.id,
            "offset": "0",
            "window": "1",
            "tag": "t",
            "extra": "7",
            "remote-addr": "/10.0.0.1:5",
        },
        "body": "hello",
    }


@in_loop
async def test_the_answer_to_a_pub_goes_out_before_its_own_delivery() -> None:
    client = Client(House())
    client.do("create", mq="Q", channel="C")
    client.do("sub", mq="Q", channel="C")
    client.say(command("pub", "x", mq="Q", id="same"))
    await turns()
    first, second = client.messages()
    assert first["status"] == 200
    assert "status" not in second
    assert second["headers"]["id"] == "same"
    assert "window" not in second["headers"]


@in_loop
async def test_the_answer_to_a_pub_waits_for_the_disk_and_so_do_its_delivery_and_what_is_asked_behind_it() -> None:
    files = FaultyFiles()
    gate = Gate(files)
    client = Client(House(files, ack="flushed"))
    client.do("create", mq="D", channel="C", mqType="disk")
    gate.shut()
    client.say(command("pub", 1, mq="D", id="p"), command("take", mq="D", channel="C", id="t"))
    await gate.reached()
    assert client.messages() == []
    gate.open()
    answers: list[dict[str, Any]] = []
    while len(answers) < 2:
        answers += await client.pushed()
    assert [answer["headers"]["id"] for answer in answers] == ["p", "t"]
    assert bodies(answers[1]["body"]) == [1]


@in_loop
async def test_a_pub_that_the_disk_refuses_is_answered_with_500_also_without_ack() -> None:
    files = FaultyFiles()
    client = Client(House(files))
    client.do("create", mq="D", mqType="disk")
    files.fail("pwrite", suffix=".log", times=5)
    client.say(command("pub", 1, mq="D", id="a"), command("pub", 1, mq="D", id="b", ack="false"))
    await turns()
    assert [(one["status"], one["headers"]["id"]) for one in client.messages()] == [(500, "a"), (500, "b")]


@in_loop
async def test_a_pub_under_a_secret_key_of_sbus_is_refused_alone() -> None:
    house = House()
    client = Client(house)
    client.do("create", mq="!", mqType="disk")
    secret = "!/cred/1/2/3/x"
    client.say(
        command("pub", 1, mq="!", id="a"),
        command("pub", 2, mq="!", id="b", ce_subject=secret),
        command("pub", 3, mq="!", id="c"),
    )
    await turns()
    assert [(one["status"], one["headers"]["id"]) for one in client.messages()] == [(200, "a"), (403, "b"), (200, "c")]


@in_loop
async def test_without_ack_there_is_no_answer_unless_it_fails() -> None:
    client = Client(House())
    client.do("create", mq="Q", channel="C")
    client.say(
        command("sub", mq="Q", channel="C", ack="False"),
        command("pub", 1, mq="Q", ack=False, id="quiet"),
        command("pub", 1, mq="missing", ack=False, id="loud"),
    )
    await turns()
    error, delivery = client.messages()
    assert (error["status"], error["headers"]["id"], error["body"]) == (404, "loud", "MQ(missing) Not Found")
    assert delivery["headers"]["id"] == "quiet"
    assert delivery["headers"]["ack"] == "false"


@in_loop
async def test_a_window_is_what_may_still_come_and_a_refill_sets_it_and_keeps_the_filter() -> None:
    client = Client(House())
    client.do("create", mq="Q", channel="C")
    client.do("sub", mq="Q", channel="C", window=2, filter="a")
    client.say(*(command("pub", number, mq="Q", ack=False, tag="ab"[number % 2]) for number in range(8)))
    got = await client.pushed()
    assert bodies(got) == [0, 2]
    assert [one["headers"]["window"] for one in got] == ["1", "0"]
    client.say(command("sub", mq="Q", channel="C", window=1, ack=False))
    got = await client.pushed()
    assert bodies(got) == [4]
    client.say(command("sub", mq="Q", channel="C", ack=False))
    got = await client.pushed()
    assert bodies(got) == [6]
    assert "window" not in got[0]["headers"]


@in_loop
async def test_two_unlimited_consumers_of_a_channel_get_messages_in_turn_and_every_channel_gets_all() -> None:
    house = House()
    first, second, other = Client(house), Client(house), Client(house)
    other.do("create", mq="Q", channel="mine")
    first.do("create", mq="Q", channel="C")
    for client, channel in ((first, "C"), (second, "C"), (other, "mine")):
        client.do("sub", mq="Q", channel=channel)
    first.say(*(command("pub", number, mq="Q", ack=False) for number in range(6)))
    await turns()
    shares = sorted([offsets(first.messages()), offsets(second.messages())])
    assert shares == [[0, 2, 4], [1, 3, 5]]
    got = other.messages()
    assert offsets(got) == [0, 1, 2, 3, 4, 5]
    assert {one["headers"]["channel"] for one in got} == {"mine"}


@in_loop
async def test_one_connection_has_several_subscriptions() -> None:
    client = Client(House())
    for mq in "AB":
        client.do("create", mq=mq, channel="C")
        client.do("sub", mq=mq, channel="C")
    client.say(command("pub", 1, mq="A", ack=False), command("pub", 2, mq="B", ack=False))
    await turns()
    assert {(one["headers"]["mq"], one["body"]) for one in client.messages()} == {("A", 1), ("B", 2)}


@pytest.mark.parametrize(
    ("cmd", "headers", "status", "text"),
    [
        ("create", {}, 400, "create command, missing mq field"),
        ("pub", {}, 400, "pub command, missing mq field"),
        ("remove", {}, 400, "remove command, missing mq field"),
        ("bind", {}, 400, "bind command, missing mq field"),
        ("bind", {"mq": "Q"}, 400, "bind command, missing url entry list data in body"),
        ("sub", {}, 400, "Missing mq field"),
        ("take", {"mq": "Q"}, 400, "Missing channel field"),
        ("pub", {"mq": "M"}, 404, "MQ(M) Not Found"),
        ("sub", {"mq": "M", "channel": "C"}, 404, "MQ(M) Not Found"),
        ("take", {"mq": "Q", "channel": "C"}, 404, "Channel(C) Not Found"),
        ("query", {"mq": "Q", "channel": "C"}, 404, "Channel(C) Not Found"),
        ("query", {"mq": "$state"}, 404, "MQ($state) Not Found"),
        ("route", {}, 400, "route command, missing target field"),
        ("route", {"target": "S", "ack": True}, 404, "Target=S Not Found"),
        ("UNSUB", {}, 404, "Command(unsub) Not Found"),
        ("onNotify", {"mq": "Q"}, 404, "Command(onnotify) Not Found"),
        ("create", {"mq": "N", "mqType": "tape"}, 500, "mqType(tape) Not Support"),
        ("create", {"mq": "N", "mqMask": "x"}, 400, "mqMask is no integer: x"),
        ("take", {"mq": "Q", "channel": "C", "window": "1e3"}, 400, "window is no integer: 1e3"),
    ],
)
def test_a_refused_command_has_the_status_and_text_of_the_specification(
    cmd: str, headers: dict[str, Any], status: int, text: str
) -> None:
    @in_loop
    async def run() -> None:
        client = Client(House())
        client.do("create", mq="Q")
        answer = client.do(cmd, id="i", **headers)
        assert (answer["status"], answer["body"], answer["headers"]["id"]) == (status, text, "i")

    run()


@pytest.mark.parametrize("mq", ["", "a,b", "x" * 250, "$state"])
def test_a_name_that_no_topic_can_have_is_refused(mq: str) -> None:
    @in_loop
    async def run() -> None:
        assert Client(House()).do("create", mq=mq)["status"] in (400, 404)

    run()


@pytest.mark.parametrize("headers", [{"channel": ""}, {"channel": "x" * 250}, {"channel": "C", "filter": "x" * 5000}])
def test_a_channel_that_cannot_be_made_does_not_leave_a_new_queue_behind(headers: dict[str, str]) -> None:
    @in_loop
    async def run() -> None:
        client = Client(House())
        assert client.do("create", mq="Q", **headers)["status"] == 400
        assert client.do("query", mq="Q")["status"] == 404

    run()


@in_loop
async def test_what_is_no_message_is_answered_with_400_and_the_connection_stays() -> None:
    client = Client(House())
    client.say([1], "text")
    assert [one["status"] for one in client.messages()] == [400, 400]
    client.say({"headers": {"id": "1"}})
    assert client.messages()[0]["body"] == "cmd key required"


@in_loop
async def test_a_message_for_a_url_that_has_a_status_is_a_call_like_any_other() -> None:
    client = Client(House())
    client.do("create", mq="Q", channel="C")
    client.say(
        {"url": "/Q/x", "status": 200, "body": 1, "headers": {"apiKey": "k"}}, {"url": "/?cmd=query", "status": 200}
    )
    [answer] = client.messages()
    assert [queue["name"] for queue in answer["body"]] == ["Q"]
    [message] = client.do("take", mq="Q", channel="C")["body"]
    assert (message["url"], message["body"]) == ("/Q/x", 1)


@in_loop
async def test_a_mistake_of_our_own_costs_one_message_its_answer_and_not_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(mq: str, principal: object) -> None:
        raise KeyError(mq)

    house = House()
    client = Client(house)
    house.hub.remove_mq = fail  # type: ignore[assignment]
    answer = client.do("remove", mq="Q", id="i")
    assert (answer["status"], answer["headers"]["id"]) == (500, "i")
    assert answer["body"] == "the server failed; its log says more"
    assert client.do("query")["status"] == 200
    assert "KeyError: 'Q'" in caplog.text


@in_loop
async def test_ping_is_never_answered() -> None:
    client = Client(House(), keys={"k": "s"})
    client.say(command("ping"), command("pub", 1))
    [answer] = client.messages()
    assert (answer["status"], answer["body"]) == (403, "missing apiKey in request")


@in_loop
async def test_a_disk_channel_begins_at_the_oldest_message_and_a_memory_channel_behind_the_newest() -> None:
    client = Client(House())
    for mq_type in ("disk", "memory"):
        client.do("create", mq=mq_type, mqType=mq_type)
        client.do("pub", 0, mq=mq_type)
        client.do("create", mq=mq_type, channel="C")
    assert client.do("take", mq="disk", channel="C")["status"] == 200
    assert client.do("take", mq="memory", channel="C")["status"] == 604


@in_loop
async def test_offset_moves_a_channel_and_checksum_only_if_that_message_has_this_id() -> None:
    client = Client(House())
    client.do("create", mq="Q", channel="C")
    client.say(*(command("pub", number, mq="Q", id=f"id{number}") for number in range(3)))
    client.messages()
    assert client.do("create", mq="Q", channel="C", offset=1, checksum="id1")["status"] == 200
    for offset, checksum in ((1, "id2"), (3, "id3"), (-1, "id0")):
        assert client.do("create", mq="Q", channel="C", offset=offset, checksum=checksum)["status"] == 400
    assert client.do("take", mq="Q", channel="C")["body"][0]["body"] == 1
    assert client.do("create", mq="Q", channel="C", offset=0)["status"] == 200
    assert bodies(client.do("take", mq="Q", channel="C", window=9)["body"]) == [0, 1, 2]
    client.do("create", mq="Q", channel="later", offset=4)
    client.do("pub", 3, mq="Q")
    client.do("pub", 4, mq="Q")
    assert bodies(client.do("take", mq="Q", channel="later", window=9)["body"]) == [4]


@in_loop
async def test_a_channel_filter_holds_for_sub_and_take() -> None:
    client = Client(House())
    client.do("create", mq="Q", channel="C", filter="a.*;x")
    client.say(*(command("pub", tag, mq="Q", tag=tag, ack=False) for tag in ("a.b", "a", "x", "a.b.c", "a.c")))
    client.do("pub", "untagged", mq="Q")
    assert bodies(client.do("take", mq="Q", channel="C", window=2)["body"]) == ["a.b", "x"]
    client.say(command("sub", mq="Q", channel="C", ack=False))
    assert bodies(await client.pushed()) == ["a.c"]
    assert client.do("query", mq="Q", channel="C")["body"]["filter"] == "a.*;x"


@in_loop
async def test_a_memory_mq_keeps_the_newest_1000_messages_and_a_channel_behind_jumps_to_the_oldest() -> None:
    client = Client(House())
    client.do("create", mq="Q", channel="C")
    filler = "x" * 4096
    for begin in range(0, 2500, 100):
        client.say(*(command("pub", filler, mq="Q", ack=False) for _ in range(begin, begin + 100)))
    told = client.do("query", mq="Q")["body"]
    assert (told["size"], told["messageDepth"], told["channels"][0]["offset"]) == (1000, 1000, 1500)
    assert offsets(client.do("take", mq="Q", channel="C")["body"]) == [1500]
    client.say(command("sub", mq="Q", channel="C", window=1, ack=False))
    assert offsets(await client.pushed()) == [1501]


@in_loop
async def test_a_memory_mq_gives_the_memory_of_old_messages_back() -> None:
    house = House()
    client = Client(house)
    client.do("create", mq="Q", channel="C")
    filler = "x" * 4096
    for _ in range(60):
        client.say(*(command("pub", filler, mq="Q", ack=False) for _ in range(100)))
    assert house.bus.broker.topic("Q").partitions[0].log.size_bytes < 7 * 2**20


@in_loop
async def test_query_gives_the_union_of_what_all_releases_tell() -> None:
    client = Client(House())
    client.do("create", mq="Q", channel="C", mqMask=4, channelMask=8)
    client.do("sub", mq="Q", channel="C", window=3, filter="a")
    now = 1_700_000_000_000
    channel = {
        "name": "C",
        "mask": 8,
        "filter": None,
        "offset": 0,
        "lastSubTime": now,
        "subscriptions": [
            {
                "clientId": client.id,
                "clientAddress": "/10.0.0.1:5",
                "mq": "Q",
                "channel": "C",
                "filters": ["a"],
                "window": 3,
            }
        ],
    }
    queue = {
        "name": "Q",
        "type": "memory",
        "mask": 4,
        "size": 0,
        "messageDepth": 0,
        "channelCount": 1,
        "consumerCount": 1,
        "creator": "/10.0.0.1:5",
        "createdAt": now,
        "lastPubTime": 0,
        "lastSubTime": now,
        "channels": [channel],
        "channelList": [channel],
    }
    assert client.do("query", mq="Q")["body"] == queue
    assert client.do("query", mq="Q", channel="C")["body"] == channel
    assert client.do("query")["body"] == [queue]


@in_loop
async def test_removing_answers_200_in_any_case_and_a_channel_made_again_serves_its_old_subscribers() -> None:
    client = Client(House())
    assert client.do("remove", mq="Q", channel="C")["body"] == "OK, REMOVE (mq=Q,channel=C)"
    client.do("create", mq="Q", channel="C")
    client.do("sub", mq="Q", channel="C", window=5)
    for headers in ({"channel": "C"}, {}):
        assert client.do("remove", mq="Q", **headers)["status"] == 200
        client.do("create", mq="Q", channel="C")
        client.say(command("pub", 1, mq="Q", ack=False))
        assert bodies(await client.pushed()) == [1]
    assert client.do("sub", mq="Q", channel="C")["status"] == 200


@in_loop
async def test_an_exclusive_channel_refuses_a_second_connection_with_403() -> None:
    house = House()
    first, second = Client(house), Client(house)
    first.do("create", mq="Q", channel="C", channelMask=2)
    assert first.do("sub", mq="Q", channel="C")["status"] == 200
    assert first.do("sub", mq="Q", channel="C", window=4)["status"] == 200
    assert second.do("sub", mq="Q", channel="C")["status"] == 403
    first.leave()
    assert second.do("sub", mq="Q", channel="C")["status"] == 200


@in_loop
async def test_an_exclusive_queue_has_exclusive_channels() -> None:
    house = House()
    first, second = Client(house), Client(house)
    first.do("create", mq="Q", channel="C", mqMask=2)
    assert first.do("sub", mq="Q", channel="C")["status"] == 200
    assert second.do("sub", mq="Q", channel="C")["status"] == 403
    second.do("create", mq="Q", channel="D")
    assert second.do("sub", mq="Q", channel="D")["status"] == 200


@in_loop
async def test_what_was_said_of_a_queue_does_not_hold_for_another_topic_of_its_name() -> None:
    files = FaultyFiles()
    house = House(files)
    client, broker = Client(house), house.bus.broker
    client.do("create", mq="Q", mqMask=2, channel="C")  # a ring
    broker.remove_topic("Q", principal=SERVER).result()  # not by zbus
    broker.create_topic("Q", 1, {"engine": "disk"}, principal=SERVER).result()
    publish(broker, [Event("Q", b"%d" % number) for number in range(1500)])
    told = client.do("query", mq="Q")["body"]
    assert (told["type"], told["mask"], told["creator"], told["size"]) == ("disk", 0, "", 1500)
    client.do("create", mq="Q", channel="C", mqMask=4)
    assert offsets(client.do("take", mq="Q", channel="C")["body"]) == [0]
    client = Client(await house.restart())
    assert client.do("query", mq="Q")["body"]["mask"] == 4
    assert offsets(client.do("take", mq="Q", channel="C")["body"]) == [1]


@in_loop
async def test_a_queue_that_cannot_be_noted_is_not_made_and_one_that_is_not_made_is_not_noted() -> None:
    files = FaultyFiles()
    client = Client(House(files))
    for name in ("zbus.json", "settings.json"):
        files.fail("pwrite", suffix=f"{name}.new")
        assert client.do("create", mq="Q", mqMask=1)["status"] == 500
        assert client.do("query", mq="Q")["status"] == 404
    assert b"Q" not in files.content("data/zbus.json")
    assert client.do("create", mq="Q", mqMask=1)["status"] == 200
    assert client.do("query", mq="Q")["body"]["mask"] == 1


@in_loop
async def test_a_queue_with_damaged_settings_is_refused_and_keeps_its_mask() -> None:
    files = FaultyFiles()
    house = House(files)
    for name in ("Q", "R"):
        Client(house).do("create", mq=name, mqMask=1, mqType="disk")
    await house.stop()
    settings = files.content("data/topics/Q/settings.json")
    settings[20] ^= 0x80
    house = House(files)
    client = Client(house)
    for asked in ("create", "remove"):
        answer = client.do(asked, mq="Q", mqMask=2, mqType="disk")
        assert (answer["status"], "settings.json" in answer["body"]) == (500, True)
    client.do("create", mq="R", mqMask=2)
    house.hub.tick()
    await house.stop()
    settings[20] ^= 0x80
    client = Client(House(files))
    assert [client.do("query", mq=name)["body"]["mask"] for name in ("Q", "R")] == [1, 2]


@in_loop
async def test_a_channel_with_takeover_goes_to_who_subscribes_last() -> None:
    house = House()
    first, second = Client(house), Client(house)
    first.do("create", mq="Q", channel="C", channelMask=4)
    first.do("sub", mq="Q", channel="C")
    second.do("sub", mq="Q", channel="C")
    second.say(command("pub", 1, mq="Q", ack=False), command("pub", 2, mq="Q", ack=False))
    assert bodies(await second.pushed()) == [1, 2]
    assert first.messages() == []


@in_loop
async def test_an_mq_to_be_deleted_on_exit_goes_with_its_last_subscriber() -> None:
    house = House()
    first, second, third = Client(house), Client(house), Client(house)
    first.do("create", mq="Q", channel="C", mqMask=1)
    second.do("create", mq="Q", channel="D")
    first.do("sub", mq="Q", channel="C")
    second.do("sub", mq="Q", channel="D")
    first.leave()
    assert third.do("query", mq="Q")["status"] == 200
    second.leave()
    assert third.do("query", mq="Q")["status"] == 404


@in_loop
async def test_masks_positions_and_disk_messages_survive_a_restart_and_memory_messages_do_not() -> None:
    house = House()
    client = Client(house)
    client.do("create", mq="D", channel="C", mqType="disk", mqMask=2, channelMask=4, filter="a")
    client.do("create", mq="M", channel="C", mqMask=1)
    client.do("sub", mq="M", channel="C", window=0)
    client.say(*(command("pub", number, mq=mq, tag="a", ack=False) for number in range(3) for mq in "DM"))
    client.messages()
    assert bodies(client.do("take", mq="D", channel="C")["body"]) == [0]
    house = await house.restart()
    client = Client(house)
    told = client.do("query", mq="D")["body"]
    assert (told["mask"], told["size"], told["createdAt"]) == (2, 3, 1_700_000_000_000)
    assert [(one["mask"], one["filter"], one["offset"]) for one in told["channels"]] == [(4, "a", 1)]
    assert bodies(client.do("take", mq="D", channel="C", window=9)["body"]) == [1, 2]
    told = client.do("query", mq="M")["body"]
    assert (told["mask"], told["size"]) == (1, 0)


@in_loop
async def test_a_consumer_that_does_not_read_is_handed_no_more_until_it_does() -> None:
    house = House()
    slow, publisher = Client(house), Client(house)
    slow.do("create", mq="D", channel="C")
    slow.do("sub", mq="D", channel="C")
    slow.wire.stuck = 2**21
    body = "x" * 2**16
    for _ in range(8):
        publisher.say(*(command("pub", body, mq="D", ack=False) for _ in range(16)))
        await turns()
    held = len(slow.messages())
    assert held < 128
    slow.wire.stuck = 0
    slow.room()
    got: list[dict[str, Any]] = []
    while len(got) < 128 - held:
        got += await slow.pushed()
    assert offsets(got) == list(range(held, 128))


@in_loop
async def test_when_the_server_stops_nothing_more_is_handed_out_and_what_waits_comes_after_the_start() -> None:
    house = House()
    client, publisher = Client(house), Client(house)
    client.do("create", mq="D", channel="C", mqType="disk")
    client.do("sub", mq="D", channel="C")
    publisher.do("pub", 0, mq="D")
    assert bodies(await client.pushed()) == [0]
    house.hub.stop()
    assert publisher.do("pub", 1, mq="D")["status"] == 200
    client.say(command("sub", mq="D", channel="C", window=9, ack=False))
    assert await client.pushed() == []
    client = Client(await house.restart())
    assert bodies(client.do("take", mq="D", channel="C", window=9)["body"]) == [1]


@in_loop
async def test_a_message_keeps_what_its_publisher_sent_but_not_his_proof() -> None:
    client = Client(House())
    client.do("create", mq="Q", channel="C")
    client.say(
        {
            "headers": {"cmd": "pub", "mq": "Q", "signature": "s", "apiKey": "k", "x-mine": "1", "source": "forged"},
            "url": "/u",
            "method": "GET",
            "body": [None, 1.50],
        }
    )
    client.messages()
    [message] = client.do("take", mq="Q", channel="C")["body"]
    assert message["headers"].keys() == {"mq", "id", "source", "offset", "x-mine", "remote-addr"}
    assert message["headers"]["source"] == client.id
    assert (message["url"], message["method"], message["body"]) == ("/u", "GET", [None, 1.5])


@in_loop
async def test_a_connection_without_traffic_for_180_seconds_is_closed() -> None:
    house = House()
    client, other = Client(house), Client(house)
    house.hub.tick()
    for seconds in (100, 79):
        house.clock.advance(seconds)
        client.say(command("ping"))
        house.hub.tick()
    assert (client.closed, other.closed) == (False, False)
    house.clock.advance(1)
    house.hub.tick()
    assert (client.closed, other.closed) == (False, True)


@in_loop
async def test_what_another_protocol_published_is_a_message_and_what_zbus_published_an_event() -> None:
    house = House()
    client, broker = Client(house), house.bus.broker
    client.do("create", mq="Q", channel="C")
    heard: list[Event] = []
    broker.subscribe(exactly("Q"), heard.extend, principal=SERVER)
    json_type = (b"content-type", b"application/json")
    publish(broker, [Event("Q", b'{"a":1}', b"k", (json_type, (b"ce_id", b"i"))), Event("Q/below", b"\xff")])
    client.do("pub", "text", mq="Q", tag="t", id="z")
    first, second, third = client.do("take", mq="Q", channel="C", window=9)["body"]
    assert (first["body"], first["headers"]["id"], first["headers"]["key"]) == ({"a": 1}, "i", "k")
    assert (second["body"], second["headers"]["content-encoding"]) == ("/w==", "base64")
    assert third["body"] == "text"
    assert [(event.payload, event.key) for event in heard] == [(b'{"a":1}', b"k"), (b"text", b"t")]
    assert (b"ce_id", b"z") in heard[1].headers


@in_loop
async def test_a_message_that_came_without_an_id_has_the_same_one_for_every_channel_and_in_every_replay() -> None:
    house = House()
    client, broker = Client(house), house.bus.broker
    house.bus.topic("wide", 3)
    for mq in ("Q", "wide"):
        for channel in ("C", "pushed"):
            client.do("create", mq=mq, channel=channel, mqType="disk")
    publish(broker, [Event("Q", b"0"), Event("Q", b"1"), *(Event("wide", b"", b"%d" % key) for key in range(9))])
    taken = client.do("take", mq="Q", channel="C", window=9)["body"]
    ids = [one["headers"]["id"] for one in taken]
    assert len(set(ids)) == 2
    client.say(command("sub", mq="Q", channel="pushed", ack=False))
    assert [one["headers"]["id"] for one in await client.pushed()] == ids
    for checksum, status in ((ids[0], 400), (ids[1], 200)):
        assert client.do("create", mq="Q", channel="C", offset=1, checksum=checksum)["status"] == status
    [again] = client.do("take", mq="Q", channel="C", window=9)["body"]
    assert (again["headers"]["id"], again["body"]) == (ids[1], "1")
    wide = client.do("take", mq="wide", channel="C", window=99)["body"]
    assert len({one["headers"]["id"] for one in wide} | set(ids)) == 11
    broker.remove_topic("Q", principal=SERVER).result()  # not by zbus
    client.do("create", mq="Q", channel="C", mqType="disk")
    publish(broker, [Event("Q", b"0")])
    [other] = client.do("take", mq="Q", channel="C")["body"]
    assert other["headers"]["offset"] == "0"
    assert other["headers"]["id"] not in ids


@in_loop
async def test_the_id_of_a_message_is_what_its_consumers_see_whatever_header_it_came_in() -> None:
    house = House()
    client = Client(house)
    client.do("create", mq="Q", channel="C")
    publish(
        house.bus.broker, [Event("Q", b"0", None, ((b"id", b"own"),)), Event("Q", b"1", None, ((b"ce_id", b"\xff"),))]
    )
    ids = [one["headers"]["id"] for one in client.do("take", mq="Q", channel="C", window=2)["body"]]
    assert ids == ["own", "\\xff"]
    for offset, checksum in enumerate(ids):
        assert client.do("create", mq="Q", channel="C", offset=offset, checksum=checksum)["status"] == 200


@in_loop
async def test_channels_that_come_and_go_leave_nothing_behind() -> None:
    house = House()
    client = Client(house)
    for number in range(3):
        channel = f"C{number}"
        client.do("create", mq="Q", channel=channel, channelMask=1)
        with_exit = Client(house)
        with_exit.do("sub", mq="Q", channel=channel)
        with_exit.leave()
        client.do("remove", mq=f"never-{number}", channel=channel)
    told = client.do("query", mq="Q")["body"]
    assert (told["channels"], told["lastSubTime"]) == ([], 0)
    assert house.hub.subscribers == {}
    assert house.hub.subscribed_ms == {"Q": {}}


@in_loop
async def test_two_exclusive_subscribers_of_a_removed_channel_do_not_keep_it_from_being_made_again() -> None:
    house = House()
    first, second = Client(house), Client(house)
    first.do("create", mq="Q", channel="C")
    for client in (first, second):
        client.do("sub", mq="Q", channel="C")
    first.do("remove", mq="Q", channel="C")
    assert first.do("create", mq="Q", channel="C", channelMask=2)["status"] == 200
    first.say(command("pub", 1, mq="Q", ack=False))
    assert len(await first.pushed() + await second.pushed()) == 1


@in_loop
async def test_messages_to_a_topic_of_several_partitions_go_where_their_keys_lead() -> None:
    house = House()
    client = Client(house)
    house.bus.topic("wide", 3)
    client.do("create", mq="wide", channel="C")
    client.say(*(command("pub", number, mq="wide", tag=str(number % 5)) for number in range(30)))
    assert {answer["status"] for answer in client.messages()} == {200}
    taken = client.do("take", mq="wide", channel="C", window=99)["body"]
    assert sorted(bodies(taken)) == list(range(30))
