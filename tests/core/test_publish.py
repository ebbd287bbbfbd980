"""The one door: what asks for the right, where it is counted, what a turn gathers, and who sees which end."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from babelbus.core.access import CLIENT, SERVER, AccessRefusedError, Identity, Rights, Row
from babelbus.core.access.rights import RowSet
from babelbus.core.catalog import UnknownTopicError
from babelbus.core.publish import GATHER_RECORDS_MAX, Bodies, Content, Gathered, Payloads, Publication
from babelbus.core.record import Event
from babelbus.core.settings import TopicSettings
from babelbus.core.subject import EVERYTHING
from babelbus.core.topic import ReservedTopicError, SequenceGapError
from babelbus.records.format import encode_batch
from babelbus.records.ingest import parse_records
from babelbus.records.record import Record
from babelbus.storage.errors import DiskError, DiskFullError
from tests.storage.faults import FaultyFiles
from tests.support.bus import NOW, Bus, batch, done, events, in_loop, payloads

ONLY_PLANT = Identity("jebp:a", "a", Rights("a", [RowSet([Row("a", "publish", "plant/#")])]))


def plain(*values: bytes, topic: str = "news", protocol: str = "test") -> Publication:
    return Publication(CLIENT, protocol, Payloads(values, [NOW] * len(values)), topic)


def body(value: bytes) -> bytes:
    """What the CRC of a record with this payload covers."""
    return bytes(encode_batch([Record(value, timestamp=NOW)]).data)[16:]


def counted(bus: Bus, protocol: str, topic: str) -> tuple[float, float]:
    labels = {"protocol": protocol, "topic": topic}
    of = bus.metrics.registry.get_sample_value
    return (
        of("babelbus_records_published_total", labels) or 0,
        of("babelbus_bytes_published_total", labels) or 0,
    )


CONTENTS: dict[str, Content] = {
    "payloads": Payloads([b"x"], [NOW]),
    "bodies": Bodies([body(b"x")], [NOW], 1),
    "batch": batch(b"x"),
    "events": [Event("news", b"x")],
}


# -- access ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONTENTS)
@in_loop
async def test_every_kind_of_content_needs_the_right_the_topic_and_an_open_one(kind: str) -> None:
    bus = Bus()
    bus.topic()
    bus.broker.open_reserved("$own", TopicSettings())
    content = CONTENTS[kind]
    for principal, topic, error in (
        (ONLY_PLANT, "news", AccessRefusedError),
        (CLIENT, "olds", UnknownTopicError),
        (CLIENT, "$own", ReservedTopicError),
    ):
        receipt = bus.broker.publish(Publication(principal, "test", content, topic))
        assert receipt.done
        assert isinstance(receipt.error, error)
        assert counted(bus, "test", topic) == (0, 0)
    for principal, topic in ((CLIENT, "news"), (SERVER, "$own")):
        receipt = await bus.broker.publish(Publication(principal, "test", content, topic)).wait()
        assert (receipt.partition, receipt.base_offset, receipt.count) == (0, 0, 1)
        assert payloads(bus.broker.topic(topic).partitions[0]) == [b"x"]
    await bus.broker.close()


@in_loop
async def test_rights_are_asked_of_the_topic_that_records_and_of_each_subject_that_is_live_only() -> None:
    bus = Bus()
    bus.topic("plant/line1")
    heard: list[str] = []
    bus.broker.subscribe(EVERYTHING, lambda found: heard.extend(event.subject for event in found), principal=SERVER)
    for subject, allowed in (("plant/line1/a", True), ("plant/line2/a", True), ("office", False)):
        receipt = bus.broker.publish(Publication(ONLY_PLANT, "test", events(b"x", subject=subject)))
        await done([receipt])
        assert isinstance(receipt.error, AccessRefusedError) is not allowed
    assert heard == ["plant/line1/a", "plant/line2/a"]
    await bus.broker.close()


# -- metrics ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_each_record_is_counted_once_under_the_protocol_that_it_came_through() -> None:
    bus = Bus()
    bus.topic()
    for content in CONTENTS.values():
        await bus.broker.publish(Publication(CLIENT, "one", content, "news")).wait()
    stored = len(batch(b"x").data)
    assert counted(bus, "one", "news") == (4, 3 + stored)
    first, other = bus.broker.publish(plain(b"abc", protocol="two")), bus.broker.publish(plain(b"d", protocol="three"))
    await done([first, other])
    assert (counted(bus, "two", "news"), counted(bus, "three", "news")) == ((1, 3), (1, 1))
    await bus.broker.publish(Publication(CLIENT, "four", [*events(b"1", b"22"), Event("nowhere", b"x")])).wait()
    assert counted(bus, "four", "news") == (2, 3)
    await bus.broker.close()


@in_loop
async def test_what_the_disk_refuses_is_not_counted_and_not_shown() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    bus.topic()
    heard: list[Event] = []
    bus.broker.subscribe(EVERYTHING, heard.extend, principal=SERVER)
    files.bytes_max = files.bytes_used
    for content in CONTENTS.values():
        receipt = bus.broker.publish(Publication(CLIENT, "test", content, "news"))
        await done([receipt])
        assert isinstance(receipt.error, DiskFullError)
    assert counted(bus, "test", "news") == (0, 0)
    assert heard == []
    files.bytes_max = 2**62
    await bus.broker.close()


# -- gathering -------------------------------------------------------------------------------------------------------


@in_loop
async def test_what_a_turn_brings_is_one_write_and_each_receipt_says_where_its_records_are() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic = bus.topic(ack="written")
    writes: Counter[str] = Counter()
    files.before_call = lambda operation, path: writes.update([operation] if path.endswith(".log") else [])
    sent = [plain(b"%d" % number) for number in range(50)]
    sent[20] = Publication(CLIENT, "test", batch(b"20", b"and"), "news", producer_id=7)
    sent[40] = Publication(CLIENT, "test", batch(b"40", key=b"k"), "news", producer_id=7, first_sequence=2)
    receipts = [bus.broker.publish(one) for one in sent]
    assert not any(receipt.done for receipt in receipts)
    await done(receipts)
    assert writes["pwrite"] == 1
    assert [receipt.base_offset for receipt in receipts] == [*range(21), *range(22, 51)]
    assert {receipt.partition for receipt in receipts} == {0}
    stored = payloads(topic.partitions[0])
    assert [stored[receipt.base_offset] for receipt in receipts] == [b"%d" % number for number in range(50)]
    again = await done([bus.broker.publish(sent[20]), bus.broker.publish(sent[40])])
    assert [receipt.base_offset for receipt in again] == [20, 41]
    bus = await bus.restart()
    assert (await bus.broker.publish(sent[40]).wait()).base_offset == 41
    await bus.broker.close()


def test_times_of_gathered_batches_are_whole_numbers_for_every_engine() -> None:
    gathered = Gathered()
    content = parse_records(encode_batch([Record(b"x", timestamp=NOW)] * 40).data)
    publication = Publication(SERVER, "test", content, "work")
    for _ in range(2):
        gathered.add(publication, [b"x"] * 40, content.timestamps)
    assert {type(time) for time in gathered.timestamps} == {int}


@in_loop
async def test_a_batch_that_comes_twice_in_a_turn_or_before_its_turn_is_not_stored_by_that() -> None:
    bus = Bus()
    topic = bus.topic(ack="written")
    numbers = [(b"1", 0), (b"2", 1), (b"1", 0), (b"5", 5), (b"2", 1)]
    sent = [
        Publication(CLIENT, "test", batch(value), "news", producer_id=7, first_sequence=at) for value, at in numbers
    ]
    receipts = await done([bus.broker.publish(publication) for publication in sent])
    assert [receipt.base_offset for receipt in receipts] == [0, 1, 0, -1, 1]
    assert isinstance(receipts[3].error, SequenceGapError)
    assert payloads(topic.partitions[0]) == [b"1", b"2"]
    await bus.broker.close()


@in_loop
async def test_a_refused_write_refuses_all_that_was_gathered_and_nothing_of_it_counts_as_stored() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic = bus.topic(ack="written")
    sent = [Publication(CLIENT, "test", batch(b"%d" % at), "news", producer_id=7, first_sequence=at) for at in range(3)]
    files.fail("pwrite", suffix=".log")
    refused = await done([bus.broker.publish(publication) for publication in [*sent, plain(b"x")]])
    assert all(isinstance(receipt.error, DiskError) for receipt in refused)
    stored = await done([bus.broker.publish(publication) for publication in sent])
    assert [receipt.base_offset for receipt in stored] == [0, 1, 2]
    assert payloads(topic.partitions[0]) == [b"0", b"1", b"2"]
    await bus.broker.close()


@in_loop
async def test_live_subscribers_hear_gathered_publications_each_with_its_own_source() -> None:
    bus = Bus()
    bus.topic(ack="written")
    heard: list[Event] = []
    bus.broker.subscribe(EVERYTHING, heard.extend, principal=SERVER)
    sources = [((b"ce_source", b"%d" % number),) for number in range(3)]
    sent = [msgspec.structs.replace(plain(b"%d" % number), source=sources[number]) for number in range(3)]
    sent[1] = msgspec.structs.replace(sent[1], content=batch(b"1"), producer_id=7)
    await done([bus.broker.publish(publication) for publication in sent])
    assert [(event.payload, event.headers) for event in heard] == [(b"%d" % at, sources[at]) for at in range(3)]
    await bus.broker.close()


@pytest.mark.parametrize("ack", ["written", "flushed", "accepted"])
@pytest.mark.parametrize("count", [1, 2])
def test_live_subscribers_hear_a_publication_before_its_publisher_is_answered(ack: str, count: int) -> None:
    @in_loop
    async def publish_and_hear() -> None:
        bus = Bus()
        bus.topic(ack=ack)
        order: list[str] = []
        bus.broker.subscribe(EVERYTHING, lambda events: order.extend(["heard"] * len(events)), principal=SERVER)
        receipts = [bus.broker.publish(plain(b"x")) for _ in range(count)]
        for receipt in receipts:
            receipt.when_done(lambda _: order.append("answered"))
        await done(receipts)
        assert order == ["heard"] * count + ["answered"] * count
        assert [(receipt.partition, receipt.base_offset, receipt.count) for receipt in receipts] == [
            (0, offset, 1) for offset in range(count)
        ]
        await bus.broker.close()

    publish_and_hear()


@in_loop
async def test_publications_that_fail_are_counted_by_protocol_and_reason_each_once() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    bus.topic(ack="flushed")
    bus.broker.ensure_reserved("$own", TopicSettings()).result()
    publish = bus.broker.publish

    def failures() -> dict[tuple[str, str], float]:
        (metric,) = bus.metrics.publish_errors_total.collect()
        samples = [sample for sample in metric.samples if sample.name.endswith("_total")]
        return {(sample.labels["protocol"], sample.labels["reason"]): sample.value for sample in samples}

    await done([publish(Publication(CLIENT, "test", content, "news")) for content in CONTENTS.values()])
    publish(plain(b"x", topic="nowhere"))
    publish(Publication(ONLY_PLANT, "test", CONTENTS["payloads"], "news"))
    assert failures() == {}  # an unknown topic, or no right, is the client's
    publish(plain(b"x", topic="$own", protocol="jebp"))
    late = Publication(CLIENT, "jebp", batch(b"x"), "news", producer_id=7, first_sequence=1)
    await done([publish(msgspec.structs.replace(late, first_sequence=0))])
    publish(msgspec.structs.replace(late, first_sequence=5))
    assert failures() == {("jebp", "refused"): 2}
    for protocol, content in zip(("zbus", "sbus", "jebp", "eventmesh"), CONTENTS.values(), strict=True):
        files.fail("flush", suffix=".log")
        receipts = [publish(Publication(CLIENT, protocol, content, "news")) for _ in range(2)]
        await done(receipts)
        assert all(isinstance(receipt.error, DiskError) for receipt in receipts)
    by_disk = {(protocol, "disk"): 2 for protocol in ("zbus", "sbus", "jebp", "eventmesh")}
    assert failures() == {("jebp", "refused"): 2, **by_disk}
    await bus.broker.close()


@in_loop
async def test_live_subscribers_hear_no_publication_that_was_refused() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    bus.topic(ack="written")
    heard: list[Event] = []
    bus.broker.subscribe(EVERYTHING, heard.extend, principal=SERVER)
    files.fail("pwrite", suffix=".log")
    (refused,) = await done([bus.broker.publish(plain(b"lone"))])
    assert isinstance(refused.error, DiskError)
    assert (refused.base_offset, heard) == (-1, [])
    await bus.broker.close()


@in_loop
async def test_no_publication_overtakes_another_whatever_is_gathered() -> None:
    bus = Bus()
    topic = bus.topic(ack="written")
    many = [b"m"] * GATHER_RECORDS_MAX
    sent: list[Publication] = [
        plain(b"1"),
        Publication(CLIENT, "test", Bodies([body(b"2")], [NOW], 1), "news"),
        plain(b"3"),
        plain(b"4", protocol="other"),
        plain(*many),
        plain(b"5"),
        Publication(CLIENT, "test", batch(b"6"), "news"),
        plain(b"7"),
        Publication(CLIENT, "test", events(b"8"), "news"),
        plain(b"9"),
    ]
    await done([bus.broker.publish(one) for one in sent])
    assert payloads(topic.partitions[0]) == [b"1", b"2", b"3", b"4", *many, b"5", b"6", b"7", b"8", b"9"]
    await bus.broker.close()


@in_loop
async def test_whoever_looks_at_a_partition_sees_what_was_published_before() -> None:
    bus = Bus()
    topic = bus.topic(ack="written")
    partition = topic.partitions[0]
    woken: list[int] = []
    bus.broker.publish(plain(b"0"))
    assert partition.high_watermark == 1
    bus.broker.publish(plain(b"1"))
    assert partition.next_offset == 2
    bus.broker.publish(plain(b"2"))
    assert (await partition.read(2, 2**20)).next_offset == 3
    bus.broker.publish(plain(b"3"))
    assert await partition.find_time(NOW) == 0
    bus.broker.publish(plain(b"4"))
    partition.watch(4, lambda: woken.append(4))
    assert woken == [4]
    receipt = bus.broker.publish(plain(b"5"))
    bus.broker.alter_topic("news", {"ack": "flushed", "partitions": 2}, principal=SERVER).result()
    assert receipt.done  # at the level of when it was published
    await bus.broker.close()


@in_loop
async def test_what_was_gathered_shares_the_fate_of_its_topic_alone() -> None:
    bus = Bus()
    for name in ("news", "olds"):
        bus.topic(name, ack="written")
    lost, kept = bus.broker.publish(plain(b"x")), bus.broker.publish(plain(b"x", topic="olds"))
    bus.broker.remove_topic("news", principal=SERVER).result()
    await done([kept])
    assert lost.done
    assert (kept.done, kept.error) == (True, None)
    await bus.broker.close()


@in_loop
async def test_a_fault_of_the_server_leaves_nobody_of_the_turn_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = Bus()
    partition = bus.topic().partitions[0]

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(partition, "append", fail)
        contents = (CONTENTS["bodies"], CONTENTS["bodies"])
        receipts = [bus.broker.publish(Publication(CLIENT, "test", content, "news")) for content in contents]
        await done(receipts)
    assert all("its log says why" in str(receipt.error) for receipt in receipts)
    await bus.broker.publish(plain(b"fine")).wait()
    await bus.broker.close()


# -- receipts and live receivers -------------------------------------------------------------------------------------


@in_loop
async def test_what_goes_to_several_partitions_or_topics_has_a_receipt_of_parts() -> None:
    bus = Bus()
    bus.topic("news", 3)
    bus.topic("olds")
    receipt = await bus.broker.publish(plain(b"0", b"1", b"2", b"3")).wait()
    assert [(part.partition, part.count) for part in receipt.parts] == [(0, 2), (1, 1), (2, 1)]
    assert (receipt.partition, receipt.count) == (-1, 4)
    both = [*events(b"a"), *events(b"b", subject="olds/x"), *events(b"c", subject="nowhere")]
    assert len((await bus.broker.publish(Publication(CLIENT, "test", both)).wait()).parts) == 2
    alone = bus.broker.publish(Publication(CLIENT, "test", events(b"x", subject="nowhere")))
    assert (alone.done, alone.error, [*alone.parts]) == (True, None, [])
    await bus.broker.close()


@in_loop
async def test_live_receivers_see_all_kinds_in_order_with_the_publisher_s_name() -> None:
    bus = Bus()
    bus.topic()
    heard: list[tuple[bytes | None, Sequence[tuple[bytes, bytes | None]]]] = []
    bus.broker.subscribe(
        EVERYTHING, lambda found: heard.extend((event.payload, event.headers) for event in found), principal=SERVER
    )
    source = ((b"ce_source", b"jebp:a"),)
    contents: list[Content] = [Payloads([b"1"], [NOW]), batch(b"2"), events(b"3")]
    await done([bus.broker.publish(Publication(CLIENT, "test", one, "news", source=source)) for one in contents])
    assert heard == [(b"1", source), (b"2", source), (b"3", ())]
    await bus.broker.close()


@in_loop
async def test_the_server_s_own_topics_are_not_shown_to_live_receivers() -> None:
    bus = Bus()
    heard: list[Event] = []
    state = bus.open_state()
    bus.broker.subscribe(EVERYTHING, heard.extend, principal=SERVER)
    state.set("a", b"1")
    await state.commit("test").wait()
    assert [event.subject for event in heard] == ["a"]
    assert counted(bus, "test", "$state")[0] == 1
    await bus.broker.close()
