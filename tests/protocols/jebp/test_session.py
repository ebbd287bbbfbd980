"""What each request of a jebp connection does and how it is answered: a real session, a real broker, no socket."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from babelbus.config import JebpSettings
from babelbus.core.access import Identity as Client
from babelbus.core.access import Rights, Row
from babelbus.core.access.rights import RowSet
from babelbus.core.settings import TopicSettings
from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.frames import encode_frame
from babelbus.protocols.jebp.handshake import ClientHandshake, ServerHandshake, UntrustedPeerError
from babelbus.protocols.jebp.messages import CreateRecord, RemoveTopic, Response, TellPositions
from babelbus.protocols.jebp.status import Reading
from babelbus.records.format import encode_payloads
from babelbus.storage.producers import BATCHES_MAX
from tests.storage.faults import FaultyFiles
from tests.support.bus import NOW, Bus, Gate, events, in_loop, payloads, publish, turns
from tests.support.jebp import (
    ADMIN,
    GUEST,
    SERVER,
    Conversation,
    create,
    create_many,
    create_topic,
    everyone,
    fetch,
    fetch_time,
    fetched,
    remove_topic,
    said,
    subscribe,
)

GOLDEN = Path(__file__).parent
NAME = b"\x01\x04news"
LOG = "data/topics/news/0/00000000000000000000.log"


def golden(file: str) -> list[tuple[bytes, bytes]]:
    """The frames of a conversation in the specification: request and response."""
    frames = [line.split()[-1] for line in (GOLDEN / file).read_text().splitlines() if line.split()[:1] == ["frame"]]
    assert len(frames) % 2 == 0
    return [(bytes.fromhex(a), bytes.fromhex(b)) for a, b in zip(frames[::2], frames[1::2], strict=True)]


# -- the worked examples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "exchanges", "together"),
    [
        ("golden_requests.txt", 10, False),
        ("golden_create_records.txt", 6, False),
        ("golden_create_records.txt", 6, True),
    ],
)
@in_loop
async def test_the_conversation_of_the_specification_byte_for_byte(file: str, exchanges: int, together: bool) -> None:
    bus = Bus()
    conversation = Conversation(
        bus,
        server_handshake=ServerHandshake(
            SERVER, version=b"jebp/1.0", secret_key=bytes(range(0x21, 0x41)), nonce=bytes(range(0x80, 0x98))
        ),
        client_handshake=ClientHandshake(
            ADMIN,
            bool,
            secret_key=bytes(range(1, 0x21)),
            nonce=bytes(range(0x40, 0x58)),
            random_bytes=bytes(range(0xA0, 0xC0)),
        ),
    ).connect()
    spoken = golden(file)
    assert len(spoken) >= exchanges
    if together:
        spoken = [(b"".join(request for request, _ in spoken), b"".join(response for _, response in spoken))]
    for request, response in spoken:
        conversation.receive(request)
        while len(conversation.pipe.written) < len(response):
            conversation.pipe.grown.clear()
            await conversation.pipe.grown.wait()
        assert conversation.pipe.take().hex() == response.hex()
    await bus.broker.close()


# -- every outcome of section 4.1 ------------------------------------------------------------------------------------

Prepare = Callable[[Bus], None]


def news(bus: Bus) -> None:
    bus.topic("news")


def nothing(_: Bus) -> None:
    pass


def state(bus: Bus) -> None:
    bus.broker.open_reserved("$state", TopicSettings())


def full_disk(bus: Bus) -> None:
    news(bus)
    assert isinstance(bus.files, FaultyFiles)
    bus.files.bytes_max = bus.files.bytes_used


def fails(operation: str, suffix: str = "", number: int = errno.EIO) -> Prepare:
    def prepare(bus: Bus) -> None:
        news(bus)
        assert isinstance(bus.files, FaultyFiles)
        bus.files.fail(operation, number, suffix=suffix)

    return prepare


def no_room_for_a_topic(bus: Bus) -> None:
    assert isinstance(bus.files, FaultyFiles)
    bus.files.bytes_max = bus.files.bytes_used


PRODUCER_ALONE = b"\x13" + NAME + b"\xff" * 4 + b"\x00" * 8 + b"\xff" * 8 + b"x"
FIRST, AHEAD = (create_many("news", [b"x"], producer=1, sequence=number) for number in (0, 2))

OUTCOMES: list[tuple[str, Prepare, list[bytes], str, str]] = [
    ("topic created", nothing, [create_topic("news")], "a130", "a130"),
    ("topic exists", news, [create_topic("news")], "b630", "b430"),
    ("topic name with a comma", nothing, [b"\x11a,b"], "b430", "b330"),
    ("topic without a name", nothing, [b"\x11"], "b430", "b330"),
    ("topic name of 250 bytes", nothing, [b"\x11" + b"x" * 250], "b430", "b330"),
    ("topic name not UTF-8", nothing, [b"\x11\xff\xfe"], "b430", "b330"),
    ("topic name too long for a folder", nothing, [create_topic("ä" * 124)], "b430", "b330"),
    ("no disk for a topic", no_room_for_a_topic, [create_topic("news")], "b431", "b331"),
    ("record created", news, [create("news", b"x")], "a130", "a130"),
    ("empty record created", news, [create("news", b"")], "a130", "a130"),
    ("checksum wrong", news, [create("news", b"x", valid=False)], "b331", "b331"),
    ("checksum wrong, no topic", nothing, [create("news", b"x", valid=False)], "b330", "b330"),
    ("no topic for a record", nothing, [create("news", b"x")], "b330", "b330"),
    ("record malformed", news, [b"\x12" + NAME + b"\x00" * 11], "b330", "b330"),
    ("record without anything", news, [b"\x12"], "b330", "b330"),
    ("negative timestamp", news, [b"\x12" + NAME + b"\x00" * 4 + b"\xff" * 8], "b330", "b330"),
    ("disk full for a record", full_disk, [create("news", b"x")], "b331", "b331"),
    ("disk error at a record", fails("pwrite", ".log"), [create("news", b"x")], "b331", "b331"),
    ("disk error at a flush", fails("flush", ".log"), [create("news", b"x")], "b331", "b331"),
    ("subscribed", news, [subscribe("news")], "a030", "a030"),
    ("subscribed twice to one", news, [subscribe("news", "news")], "a030", "a030"),
    ("subscription cleared", news, [subscribe()], "a030", "a030"),
    ("topic to subscribe missing", news, [subscribe("no", "news", "nope")], "b130" + b"no,nope".hex(), ""),
    ("empty name in the list", news, [b"\x21news,,news"], "b030", "b030"),
    ("bad name in the list", news, [b"\x21ne\x00ws"], "b030", "b030"),
    ("fetched nothing", news, [subscribe("news"), fetch(0)], "a030", "a030"),
    ("offset missing", news, [subscribe("news"), fetch(1)], "b130" + "00" * 7 + "01", ""),
    ("fetch without subscription", news, [fetch(0)], "b030", "b030"),
    ("fetch malformed", news, [subscribe("news"), b"\x22\xc1"], "b030", "b030"),
    ("fetch of 15 bytes", news, [subscribe("news"), fetch(0) + b"\x00"], "b030", "b030"),
    ("fetch of unknown start", news, [subscribe("news"), b"\x22\xc2" + b"\x00" * 12], "b030", "b030"),
    ("fetch from below zero", news, [subscribe("news"), b"\x22\xc1" + b"\xff" * 8 + b"\x00" * 4], "b030", "b030"),
    ("fetch of less than nothing", news, [subscribe("news"), b"\x22\xc1" + b"\x00" * 8 + b"\xff" * 4], "b030", "b030"),
    ("topic removed", news, [remove_topic("news")], "a230", "a230"),
    ("topic to remove missing", nothing, [remove_topic("news")], "b730", "b730"),
    ("bad name to remove", nothing, [b"\x31a,b"], "b830", "b630"),
    ("disk error at removal", fails("rename", "/news"), [remove_topic("news")], "b931", "b631"),
    ("records created", news, [create_many("news", [b"x"])], "a130" + "00" * 12, ""),
    ("no topic for records", nothing, [create_many("news", [b"x"])], "b330", "b330"),
    ("records with a producer without a sequence", news, [PRODUCER_ALONE], "b330", "b330"),
    ("no records in the batch", news, [b"\x13" + NAME + b"\xff" * 20], "b330", "b330"),
    ("records in half", news, [create_many("news", [b"x"])[:-1]], "b330", "b330"),
    ("records of an unknown partition", news, [create_many("news", [b"x"], partition=1)], "b330", "b330"),
    ("partition below -1", news, [create_many("news", [b"x"], partition=-2)], "b330", "b330"),
    ("sequence ahead", news, [FIRST, AHEAD], "b331", "b331"),
    ("disk full for records", full_disk, [create_many("news", [b"x"])], "b331", "b331"),
    ("disk error at the flush of records", fails("flush", ".log"), [create_many("news", [b"x"])], "b331", "b331"),
    ("the server's own topic to make", state, [create_topic("$state")], "b430", "b330"),
    ("the server's own topic to remove", state, [remove_topic("$state")], "b830", "b630"),
    ("record for the server's own topic", state, [create("$state", b"x")], "b330", "b330"),
    ("records for the server's own topic", state, [create_many("$state", [b"x"])], "b330", "b330"),
    ("unknown command", nothing, [b"\x99abc"], "b030", "b030"),
    ("empty request", nothing, [b""], "b030", "b030"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("prepare", "requests", "command", "table"), [row[1:] for row in OUTCOMES], ids=[row[0] for row in OUTCOMES]
)
@pytest.mark.parametrize("reading", ["command", "table"])
@in_loop
async def test_each_outcome_is_answered_as_section_4_1_says(
    prepare: Prepare, requests: list[bytes], command: str, table: str, reading: Reading
) -> None:
    bus = Bus(FaultyFiles())
    conversation = Conversation(bus, settings=JebpSettings(status=reading)).connect()
    prepare(bus)
    answered = await conversation.say(*requests)
    assert answered[-1] == (command if reading == "command" else table or command)
    # The connection stays in any case.
    assert await conversation.say(b"\x00") == ["b030"]
    assert not conversation.closed
    assert isinstance(bus.files, FaultyFiles)
    bus.files.bytes_max = 2**62
    await bus.broker.close()


@pytest.mark.parametrize(("reading", "created", "removed"), [("command", "b730", "b830"), ("table", "b530", "b830")])
@in_loop
async def test_who_has_no_administrative_rights_is_told_so_first(reading: Reading, created: str, removed: str) -> None:
    bus = Bus()
    bus.topic("news")
    conversation = Conversation(bus, identity=GUEST, settings=JebpSettings(status=reading)).connect()
    for request in (create_topic("new"), create_topic("news"), b"\x11a,b", b"\x11"):
        assert await conversation.say(request) == [created]
    for request in (remove_topic("news"), remove_topic("nope"), b"\x31a,b"):
        assert await conversation.say(request) == [removed]
    assert bus.broker.topic_names() == ["news"]
    assert await conversation.say(create("news", b"x"), subscribe("news")) == ["a130", "a030"]
    await bus.broker.close()


@in_loop
async def test_a_batch_with_a_wrong_crc_may_be_sent_again_and_stores_nothing() -> None:
    bus = Bus()
    topic = bus.topic("news")
    conversation = Conversation(bus).connect()
    good = create_many("news", [b"one", b"two"])
    flipped = bytearray(good)
    flipped[-2] ^= 1
    assert await conversation.say(bytes(flipped), good) == ["b331", "a130" + "00" * 12]
    assert payloads(topic.partitions[0]) == [b"one", b"two"]
    await bus.broker.close()


@in_loop
async def test_a_batch_that_is_not_remembered_any_more_is_refused_for_good() -> None:
    bus = Bus()
    bus.topic("news", ack="written")
    conversation = Conversation(bus).connect()
    batches = [create_many("news", [b"x"], producer=5, sequence=number) for number in range(BATCHES_MAX + 1)]
    answered = await conversation.say(*batches, batches[0], batches[-1])
    assert answered[-2] == "b330"
    assert answered[-1] == answered[-3] == f"a13000000000{BATCHES_MAX:016x}"
    await bus.broker.close()


@in_loop
async def test_a_resent_batch_gets_the_first_answer_while_that_one_is_flushed_too() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic, gate = bus.topic("news", 2), Gate(files)
    first, second = Conversation(bus).connect(), Conversation(bus).connect()
    gate.shut()
    batch = create_many("news", [b"a", b"b"], producer=9, sequence=0)
    first.send(batch)
    await gate.reached()
    second.send(batch)
    await turns()
    assert first.answers() == second.answers() == []
    gate.open()
    (answer,) = await first.hear(1)
    assert said(answer) == "a130" + "00" * 12
    assert [said(one) for one in await second.hear(1)] == [said(answer)]
    assert [payloads(one) for one in topic.partitions] == [[b"a", b"b"], []]
    await bus.broker.close()


# -- records ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_records_are_stored_as_they_came() -> None:
    bus = Bus()
    topic = bus.topic("news")
    conversation = Conversation(bus).connect()
    await conversation.say(create("news", b"timed", 5), create("news", b"\x00\xff" * 1000), create("news", b"now", 0))
    chunk = await topic.partitions[0].read(0, 2**20)
    assert payloads(topic.partitions[0]) == [b"timed", b"\x00\xff" * 1000, b"now"]
    assert await topic.partitions[0].find_time(NOW) == 1
    assert chunk.next_offset == 3
    await bus.broker.close()


@in_loop
async def test_good_and_bad_records_of_one_chunk_are_answered_in_order() -> None:
    bus = Bus()
    one, many = bus.topic("one"), bus.topic("many", 3)
    conversation = Conversation(bus).connect()
    requests, expected = [], []
    for number in range(200):
        kind = number % 5
        topic = "one" if kind < 2 else "many"
        if kind == 3:
            requests.append(create(topic, b"%d" % number, valid=False))
            expected.append("b331")
        elif kind == 4:
            requests.append(create("nope", b"%d" % number))
            expected.append("b330")
        else:
            requests.append(create(topic, b"%d" % number))
            expected.append("a130")
    assert await conversation.say(*requests) == expected
    assert payloads(one.partitions[0]) == [b"%d" % number for number in range(200) if number % 5 < 2]
    stored = [payload for partition in many.partitions for payload in payloads(partition)]
    assert sorted(stored, key=str) == sorted([b"%d" % n for n in range(200) if n % 5 == 2], key=str)
    await bus.broker.close()


@in_loop
async def test_a_refused_partition_is_answered_for_its_own_records_alone() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic = bus.topic("news", 2)
    conversation = Conversation(bus).connect()
    files.fail("pwrite", suffix="news/1/00000000000000000000.log")
    answered = await conversation.say(*[create("news", b"%d" % number) for number in range(6)])
    assert answered == ["a130", "b331"] * 3
    assert [payloads(one) for one in topic.partitions] == [[b"0", b"2", b"4"], []]
    await bus.broker.close()


@in_loop
async def test_answers_keep_the_order_of_the_requests_while_a_flush_is_under_way() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    bus.topic("news")
    gate = Gate(files)
    conversation = Conversation(bus).connect()
    gate.shut()
    conversation.send(subscribe("news"), create("news", b"slow"), b"\x99", create_topic("news"), fetch(0))
    conversation.send(create("news", b"slow too"), create("news", b"bad", valid=False))
    await gate.reached()
    await turns()
    assert [said(one) for one in conversation.answers()] == ["a030"]  # what stands in front does not wait
    gate.open()
    answered = await conversation.hear(6)
    assert [said(one) for one in answered] == ["a130", "b030", "b630", "a030", "a130", "b331"]
    await bus.broker.close()


@in_loop
async def test_the_acks_of_a_chunk_go_out_with_one_write() -> None:
    bus = Bus()
    bus.topic("news")
    conversation = Conversation(bus).connect()
    writes = conversation.pipe.writes
    await conversation.ask(*[create("news", b"%d" % number) for number in range(1000)])
    assert conversation.pipe.writes == writes + 1
    await bus.broker.close()


@in_loop
async def test_chunks_may_be_cut_anywhere() -> None:
    bus = Bus()
    topic = bus.topic("news")
    conversation = Conversation(bus).connect()
    data = conversation.wire.seal([create("news", b"a"), create_many("news", [b"b" * 5000]), create("news", b"c")])
    for at in range(len(data)):
        conversation.receive(data[at : at + 1])
    assert [said(one)[:4] for one in await conversation.hear(3)] == ["a130"] * 3
    assert payloads(topic.partitions[0]) == [b"a", b"b" * 5000, b"c"]
    await bus.broker.close()


@in_loop
async def test_bare_records_are_found_by_their_checksum() -> None:
    bus = Bus()
    short, long = bus.topic("news"), bus.topic("news1")
    conversation = Conversation(bus, settings=JebpSettings(bare_records=True)).connect()

    def bare(topic: str, payload: bytes) -> bytes:
        return encode_request(CreateRecord(topic, NOW, payload), bare_records=True)

    # The example of the specification, and a topic that is made while the connection is there.
    example = bytes.fromhex("126e6577733610a6860000018bcfe5680068656c6c6f")
    await conversation.say(create_topic("late"))
    answered = await conversation.say(
        example, bare("news1", b"x"), bare("late", b"y"), bare("nope", b"z"), create("news", b"with length")
    )
    assert answered == ["a130", "a130", "a130", "b331", "a130"]
    assert payloads(short.partitions[0]) == [b"hello", b"with length"]
    assert payloads(long.partitions[0]) == [b"x"]
    assert payloads(bus.broker.topic("late").partitions[0]) == [b"y"]
    await bus.broker.close()


@pytest.mark.parametrize("bare", [False, True])
@in_loop
async def test_topics_of_others_are_refused_like_topics_that_are_not_there(bare: bool) -> None:
    bus = Bus()
    for topic in ("mine", "others"):
        bus.topic(topic)
    rights = Rights("guest", [RowSet([Row("guest", "publish", "mine")])])
    conversation = Conversation(
        bus,
        settings=JebpSettings(bare_records=bare),
        authorise=lambda fingerprint: Client("jebp:guest", "guest", rights),
    ).connect()
    told = {}
    for topic in ("mine", "others", "none"):
        record = CreateRecord(topic, NOW, b"x", checksum_valid=bare)
        told[topic] = await conversation.say(
            encode_request(record, bare_records=bare),
            create(topic, b"x"),
            create(topic, b"x", valid=False),
            create_many(topic, [b"x"]),
            create_many(topic, [b"x"])[:-1],
            remove_topic(topic),
            create_topic(topic),
        )
    assert told["others"] == told["none"]
    assert told["others"] != told["mine"]
    await bus.broker.close()


@in_loop
async def test_without_the_option_a_bare_record_is_malformed() -> None:
    bus = Bus()
    bus.topic("news")
    conversation = Conversation(bus).connect()
    assert await conversation.say(bytes.fromhex("126e6577733610a6860000018bcfe5680068656c6c6f")) == ["b330"]
    await bus.broker.close()


# -- fetch, DECISION 23 to 29 ----------------------------------------------------------------------------------------


async def with_records(*counts: tuple[str, list[int]]) -> tuple[Bus, Conversation]:
    """Topics whose partitions hold so many records each; record i of partition p is `p:i`, at the time NOW + i."""
    bus = Bus()
    for name, sizes in counts:
        topic = bus.topic(name, len(sizes), ack="written")
        for number, size in enumerate(sizes):
            for at in range(size):
                topic.partitions[number].append(encode_payloads([b"%d:%d" % (number, at)], [NOW + at], at))
    return bus, Conversation(bus).connect()


@in_loop
async def test_a_fetch_reads_all_topics_in_the_order_of_the_list_and_partitions_ascending() -> None:
    bus, conversation = await with_records(("b", [2, 1]), ("a", [1]))
    (_, answer) = await conversation.ask(subscribe("b", "a"), fetch(0))
    found = fetched(answer)
    assert list(found) == [("b", 0), ("b", 1), ("a", 0)]
    assert list(found.values()) == [[b"0:0", b"0:1"], [b"1:0"], [b"0:0"]]
    await bus.broker.close()


@in_loop
async def test_the_start_applies_to_each_partition_and_those_without_it_are_left_out() -> None:
    bus, conversation = await with_records(("a", [5, 2, 1, 0]))
    await conversation.ask(subscribe("a"))
    for start, expected in (
        (1, {("a", 0): [b"0:1", b"0:2", b"0:3", b"0:4"], ("a", 1): [b"1:1"]}),
        (2, {("a", 0): [b"0:2", b"0:3", b"0:4"]}),  # the next offset of partition 1: nothing yet, no error
        (5, {}),
    ):
        (answer,) = await conversation.ask(fetch(start))
        assert fetched(answer) == expected
    assert await conversation.say(fetch(6)) == ["b130" + (6).to_bytes(8, "big").hex()]
    await bus.broker.close()


@in_loop
async def test_a_fetch_from_a_time_begins_at_the_first_record_that_is_not_older() -> None:
    bus, conversation = await with_records(("a", [3, 1]))
    await conversation.ask(subscribe("a"))
    for time, expected in (
        (0, {("a", 0): [b"0:0", b"0:1", b"0:2"], ("a", 1): [b"1:0"]}),
        (NOW + 1, {("a", 0): [b"0:1", b"0:2"]}),
        (NOW + 3, {}),
        (2**63 - 1, {}),
    ):
        (answer,) = await conversation.ask(fetch_time(time))
        assert fetched(answer) == expected
    await bus.broker.close()


@in_loop
async def test_the_bound_of_a_fetch_is_never_passed_and_only_whole_records_are_sent() -> None:
    bus, conversation = await with_records(("a", [3, 2]))
    await conversation.ask(subscribe("a"))
    (answer,) = await conversation.ask(fetch(0))
    whole = len(answer.content)
    assert sum(map(len, fetched(answer).values())) == 5
    record = 34 + len(b"0:0")
    head = len(b"\x01\x01a") + 8
    for bytes_max in range(whole + 2):
        (answer,) = await conversation.ask(fetch(0, bytes_max))
        if bytes_max < head + record:
            assert said(answer) == "b030"  # there is something, but the first record does not fit
            continue
        assert len(answer.content) <= bytes_max
        first = min(3, (bytes_max - head) // record)
        left = bytes_max - head - first * record
        second = min(2, max(left - head, 0) // record)
        assert [len(found) for found in fetched(answer).values()] == [size for size in (first, second) if size]
    await bus.broker.close()


@in_loop
async def test_nothing_to_give_is_no_error_however_small_the_bound() -> None:
    bus, conversation = await with_records(("a", [1]))
    assert await conversation.say(subscribe("a"), fetch(1, 0), fetch_time(NOW + 1, 0)) == ["a030"] * 3
    await bus.broker.close()


@in_loop
async def test_the_frame_limit_bounds_a_fetch_too() -> None:
    bus = Bus()
    bus.topic("news")
    conversation = Conversation(bus, settings=JebpSettings(frame_bytes_max=4096)).connect()
    await conversation.ask(*[create("news", b"x" * 1000) for _ in range(8)])
    (_, answer) = await conversation.ask(subscribe("news"), fetch(0, 2**31 - 1))
    assert [len(found) for found in fetched(answer).values()] == [3]
    await bus.broker.close()


@in_loop
async def test_a_fetch_shows_no_record_before_its_flush() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    bus.topic("news")
    gate = Gate(files)
    writer, reader = Conversation(bus).connect(), Conversation(bus).connect()
    gate.shut()
    writer.send(create("news", b"x"))
    await gate.reached()
    assert await reader.say(subscribe("news"), fetch(0), fetch_time(0), fetch(1)) == [
        "a030", "a030", "a030", "b130" + "00" * 7 + "01",
    ]  # fmt: skip
    gate.open()
    await writer.hear(1)
    (answer,) = await reader.ask(fetch(0))
    assert fetched(answer) == {("news", 0): [b"x"]}
    await bus.broker.close()


@in_loop
async def test_a_fetch_behind_a_record_on_the_same_connection_does_not_see_it_early_but_keeps_its_place() -> None:
    bus = Bus()
    bus.topic("news", ack="written")
    conversation = Conversation(bus).connect()
    answers = await conversation.ask(subscribe("news"), create("news", b"x"), fetch(0))
    assert [said(one)[:4] for one in answers] == ["a030", "a130", "a030"]
    assert fetched(answers[2]) == {("news", 0): [b"x"]}  # written before it was read, as the level promises
    await bus.broker.close()


@in_loop
async def test_each_subscribe_replaces_the_one_before_and_a_failed_one_does_not() -> None:
    bus, conversation = await with_records(("a", [1]), ("b", [1]))
    (_, first) = await conversation.ask(subscribe("a"), fetch(0))
    assert list(fetched(first)) == [("a", 0)]
    (_, second) = await conversation.ask(subscribe("b"), fetch(0))
    assert list(fetched(second)) == [("b", 0)]
    (_, third) = await conversation.ask(subscribe("a", "nope"), fetch(0))
    assert list(fetched(third)) == [("b", 0)]
    assert await conversation.say(subscribe(), fetch(0)) == ["a030", "b030"]
    await bus.broker.close()


@in_loop
async def test_a_removed_topic_is_subscribed_no_more_also_when_it_is_made_again() -> None:
    bus, conversation = await with_records(("a", [1]), ("b", [1]))
    other = Conversation(bus).connect()
    await conversation.ask(subscribe("a", "b"))
    await other.say(remove_topic("a"), create_topic("a"), create("a", b"new"))
    (answer,) = await conversation.ask(fetch(0))
    assert list(fetched(answer)) == [("b", 0)]
    await other.say(remove_topic("b"))
    assert await conversation.say(fetch(0)) == ["b030"]
    (_, answer) = await conversation.ask(subscribe("a"), fetch(0))
    assert fetched(answer) == {("a", 0): [b"new"]}
    await bus.broker.close()


@in_loop
async def test_a_damaged_record_is_refused_by_name_and_the_others_are_served(caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    bus = Bus(files, tail_cache_bytes=0)
    topic = bus.topic("news", ack="written")
    conversation = Conversation(bus).connect()
    await conversation.ask(*[create("news", b"%03d" % number) for number in range(5)])
    start = files.content(LOG).index(b"002")
    files.content(LOG)[start] ^= 1
    (_, answer) = await conversation.ask(subscribe("news"), fetch(0))
    assert fetched(answer) == {("news", 0): [b"000", b"001"]}
    assert await conversation.say(fetch(2)) == ["b030"]
    (answer,) = await conversation.ask(fetch(3))
    assert fetched(answer) == {("news", 0): [b"003", b"004"]}
    assert LOG in caplog.text
    assert "offset 2" in caplog.text
    assert topic.partitions[0].high_watermark == 5
    await bus.broker.close()


@in_loop
async def test_a_disk_that_does_not_read_may_be_asked_again() -> None:
    files = FaultyFiles()
    bus = Bus(files, tail_cache_bytes=0)
    bus.topic("news", ack="written")
    conversation = Conversation(bus).connect()
    await conversation.ask(create("news", b"x"), subscribe("news"))
    files.fail("pread", suffix=".log")
    assert await conversation.say(fetch(0)) == ["b031"]
    (answer,) = await conversation.ask(fetch(0))
    assert fetched(answer) == {("news", 0): [b"x"]}
    await bus.broker.close()


# -- connection ------------------------------------------------------------------------------------------------------


@in_loop
async def test_requests_behind_the_last_message_of_the_handshake_are_carried_out() -> None:
    bus = Bus()
    topic = bus.topic("news")
    conversation = Conversation(bus)
    shake = conversation._shake
    for _ in range(3):
        conversation.receive(shake.receive_data(conversation.pipe.take()))
    last = shake.receive_data(conversation.pipe.take())
    assert shake.established is not None
    conversation.receive(last + shake.established.sealer.seal_many([create("news", b"at once")]))
    while not conversation.pipe.written:
        await conversation.pipe.grown.wait()
    assert payloads(topic.partitions[0]) == [b"at once"]
    await bus.broker.close()


@in_loop
async def test_an_unknown_client_is_told_nothing() -> None:
    bus = Bus()

    def nobody(_: str) -> Client | None:
        return None

    conversation = Conversation(bus, authorise=nobody)
    shake = conversation._shake
    for _ in range(2):
        conversation.receive(shake.receive_data(conversation.pipe.take()))
    last = shake.receive_data(conversation.pipe.take())
    conversation.receive(last)
    last = shake.receive_data(conversation.pipe.take())
    with pytest.raises(UntrustedPeerError):
        conversation.receive(last)
    assert shake.established is not None  # the client has said everything, message 9 too
    assert conversation.pipe.written == b""
    assert not conversation.session.established
    await bus.broker.close()


@in_loop
async def test_a_client_that_is_taken_off_the_list_has_to_go_and_one_that_stays_keeps_its_new_rights() -> None:
    bus = Bus()
    known = {ADMIN.fingerprint: everyone(ADMIN.fingerprint), GUEST.fingerprint: everyone(GUEST.fingerprint)}
    admin = Conversation(bus, authorise=known.get).connect()
    guest = Conversation(bus, identity=GUEST, authorise=known.get).connect()
    assert await guest.say(create_topic("a")) == ["b730"]
    known[GUEST.fingerprint] = known.pop(ADMIN.fingerprint)
    for conversation in (admin, guest):
        conversation.session.access_changed()
    assert admin.closed
    assert not guest.closed
    assert await guest.say(create_topic("a")) == ["a130"]
    assert await admin.say(create_topic("b")) == ["b730"]  # what still arrives is refused
    await bus.broker.close()


@pytest.mark.parametrize("damage", ["flip", "replay", "skip", "garbage"])
@in_loop
async def test_what_does_not_decrypt_ends_the_connection_after_what_was_whole_before_it(damage: str) -> None:
    bus = Bus()
    topic = bus.topic("news", ack="written")
    conversation = Conversation(bus).connect()
    good, other = conversation.wire.seal([create("news", b"good")]), conversation.wire.seal([create("news", b"other")])
    third = conversation.wire.seal([create("news", b"third")])
    bad = {
        "flip": other[:-1] + bytes((other[-1] ^ 1,)),
        "replay": good,
        "skip": third,
        "garbage": encode_frame(b"x" * 40),
    }[damage]
    with pytest.raises(RemoteProtocolError):
        conversation.receive(good + bad + third)
    await turns()
    assert payloads(topic.partitions[0]) == [b"good"]
    await bus.broker.close()


@in_loop
async def test_work_is_put_off_while_the_outbox_is_full_and_goes_on_in_order() -> None:
    bus, conversation = await with_records(("a", [3]))
    conversation.outbox.bytes_max = 300
    await conversation.ask(subscribe("a"))
    conversation.send(*[fetch(0)] * 10, create_topic("new"), *[fetch(1)] * 10)
    assert conversation.session.busy
    assert not bus.broker.has_topic("new")
    answers: list[Response] = []
    rounds = 0
    while len(answers) < 21:
        taken = conversation.answers()
        assert taken
        answers += taken
        assert not conversation.outbox.full
        conversation.outbox.holding = True
        conversation.session.resume()
        conversation.outbox.release()
        rounds += 1
    assert rounds > 5
    assert [len(answer.content) for answer in answers[:10]] == [len(answers[0].content)] * 10
    assert said(answers[10]) == "a130"
    assert fetched(answers[11]) == {("a", 0): [b"0:1", b"0:2"]}
    assert len(conversation.session._backlog) == 0
    await bus.broker.close()


@in_loop
async def test_what_comes_while_work_is_put_off_waits_behind_it() -> None:
    bus, conversation = await with_records(("a", [3]))
    await conversation.ask(subscribe("a"))
    conversation.outbox.bytes_max = 100
    conversation.send(fetch(0), fetch(1))
    conversation.send(fetch(2))
    conversation.outbox.bytes_max = 2**20
    conversation.session.resume()
    answers = await conversation.hear(3)
    assert [len(fetched(one)["a", 0]) for one in answers] == [3, 2, 1]
    await bus.broker.close()


@in_loop
async def test_answers_that_wait_for_a_slow_disk_count_although_they_are_small() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    bus.topic("news")
    gate = Gate(files)
    conversation = Conversation(bus, bytes_max=2**16).connect()
    gate.shut()
    conversation.send(create("news", b"x"))
    await gate.reached()
    conversation.send(*[b"\x99"] * 1000)
    assert conversation.session.busy  # 1,000 answers of two bytes are more than 64 KiB of memory
    gate.open()
    answers = await conversation.hear(1000 + 1 - len(conversation.session._backlog))
    conversation.session.resume()
    answers += await conversation.hear(1001 - len(answers))
    assert len(answers) == 1001
    await bus.broker.close()


@in_loop
async def test_records_that_were_put_off_are_stored_although_the_client_is_gone() -> None:
    bus = Bus()
    topic = bus.topic("news", ack="written")
    conversation = Conversation(bus).connect()
    conversation.outbox.bytes_max = 1
    conversation.send(create("news", b"a"), subscribe("news"), fetch(0), create("news", b"b"))
    assert conversation.session.busy
    conversation.outbox.close()
    conversation.session.close()
    await turns()
    assert payloads(topic.partitions[0]) == [b"a", b"b"]
    assert conversation.pipe.take() == b""
    await bus.broker.close()


@in_loop
async def test_an_answer_that_becomes_ready_after_the_client_is_gone_is_dropped() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic, gate = bus.topic("news"), Gate(files)
    conversation = Conversation(bus).connect()
    gate.shut()
    conversation.send(create("news", b"x"))
    await gate.reached()
    conversation.outbox.close()
    conversation.session.close()
    gate.open()
    await topic.partitions[0].wait(0)
    assert conversation.pipe.take() == b""
    await bus.broker.close()


@in_loop
async def test_publishers_of_a_topic_that_is_removed_meanwhile_are_answered() -> None:
    bus = Bus()
    bus.topic("news")
    conversation = Conversation(bus).connect()
    request = encode_request(RemoveTopic("news"))
    answered = await conversation.say(create("news", b"x"), request, create("news", b"y"))
    assert answered == ["b331", "a230", "b330"]
    await bus.broker.close()


@in_loop
async def test_events_of_other_protocols_are_fetched_with_everything_they_carry() -> None:
    bus = Bus()
    bus.topic("plant", ack="written")
    publish(bus.broker, events(b"hot", subject="plant/line1", key=b"k"))
    conversation = Conversation(bus).connect()
    (_, answer) = await conversation.ask(subscribe("plant"), fetch(0))
    assert fetched(answer) == {("plant", 0): [b"hot"]}
    assert b"ce_subject" in bytes(answer.content)
    await bus.broker.close()


@in_loop
async def test_what_was_put_off_is_refused_when_the_client_is_gone() -> None:
    bus = Bus()
    bus.topic("news")
    conversation = Conversation(bus).connect()
    conversation.outbox.send(b"x" * conversation.outbox.bytes_max)
    conversation.send(encode_request(TellPositions(("news",))))
    assert conversation.session.busy
    conversation.session._authorise = lambda fingerprint: None
    conversation.session.access_changed()
    conversation.outbox.close()
    conversation.session.close()
    assert not conversation.session._backlog
    await bus.broker.close()


@in_loop
async def test_records_put_off_by_a_quota_are_stored_when_the_peer_is_gone() -> None:
    bus = Bus()
    topic = bus.topic("news", ack="written")
    conversation = Conversation(bus).connect()
    conversation.outbox.resting = True
    conversation.send(create("news", b"1"))
    assert conversation.session.busy
    conversation.outbox.close()
    conversation.session.close()
    await turns()
    assert payloads(topic.partitions[0]) == [b"1"]
    await bus.broker.close()
