"""Engine `jetstream` on bad days: two owners, unknown outcomes, streams that somebody changed, damaged frames."""

import asyncio
import base64
import itertools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("nats", reason="engine jetstream is not tested: the package nats-py is not installed")

import nats as nats_client

from babelbus.clock import Clock, SystemClock
from babelbus.config import JetstreamSettings
from babelbus.errors import ConfigError, StorageError
from babelbus.records.format import CorruptRecordError, encode_batch, mark_producer, rebase
from babelbus.records.record import Record
from babelbus.storage.contract import LogSettings
from babelbus.storage.errors import DiskFullError, StaleWriterError
from babelbus.storage.files import LocalFiles
from babelbus.storage.jetstream import JetstreamStore
from babelbus.storage.jetstream.cleaner import StreamLog
from babelbus.storage.jetstream.errors import (
    NatsRefusedError,
    RecordTooLargeError,
    StreamAlteredError,
)
from babelbus.storage.jetstream.frame import Head, Kind, crc_of, encode
from tests.storage.helpers import append, number_of, numbered, read_all
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.clock import ManualClock
from tests.support.cluster import until
from tests.support.nats import NatsServer, Relay, ask_jetstream, nats_cluster, nats_server, send_to_nats

pytestmark = pytest.mark.usefixtures("nats")

ROOT = Path(__file__).parent.parent.parent.parent
NOW = 1_700_000_000_000
_prefixes = (f"p{number}" for number in itertools.count())


class Place:
    """One prefix of a server, and the stores that were opened on it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.prefix = url, folder, next(_prefixes)
        self._stores: list[JetstreamStore] = []

    def open(self, folder: Path | None = None, *, clock: Clock | None = None, **settings: Any) -> JetstreamStore:
        chosen: dict[str, Any] = {
            "servers": self.url,
            "prefix": self.prefix,
            "replicas": 1,
            "shards": 1,
            "lease_seconds": 0,
        } | settings
        store = JetstreamStore(
            JetstreamSettings(**chosen), LocalFiles(), str(folder or self.folder), clock or SystemClock()
        )
        self._stores.append(store)
        return store

    def log(self, store: JetstreamStore | None = None, **settings: Any) -> StreamLog:
        return (store or self.open()).open_partition("t", 0, LogSettings(**settings))

    def ask(self, call: str, content: Any = None) -> dict[str, Any]:
        return ask_jetstream(self.url, call, content)

    def publish(self, subject: str, content: bytes) -> None:
        send_to_nats(self.url, subject, content)

    def close(self) -> None:
        for store in self._stores:
            store.close()


@pytest.fixture
def place(nats: NatsServer, tmp_path: Path) -> Iterator[Place]:
    place = Place(nats.url, tmp_path)
    yield place
    place.close()


def write(log: StreamLog, count: int) -> None:
    append(log, numbered(count, first=log.next_offset))
    log.durable()


def works(call: Callable[[], Any]) -> bool:
    """Return whether a call raises nothing."""
    try:
        call()
    except StorageError:
        return False
    return True


def numbers(log: StreamLog) -> list[int]:
    return [number_of(record) for record in read_all(log)]


class Background:
    """A call in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.value: Any = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.value = work()
        except BaseException as error:
            self.error = error

    def wait(self) -> "Background":
        self._thread.join(SAFETY_NET_SECONDS)
        assert not self._thread.is_alive()
        return self


# -- owners ------------------------------------------------------------------------------------------------------------


def test_a_second_server_takes_over_and_the_first_one_is_refused(place: Place, tmp_path: Path) -> None:
    first = place.log()
    write(first, 5)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy)
    second = place.log(place.open(copy))
    append(first, numbered(1, first=5))
    with pytest.raises(StaleWriterError, match="has taken it"):
        first.durable()
    with pytest.raises(StaleWriterError):
        append(first, numbered(1, first=5))
    write(second, 3)
    assert numbers(second) == list(range(8))


def test_a_stream_that_was_opened_often_is_opened_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("babelbus.storage.jetstream.shard.EPOCHS_TOGETHER", 2)
    for count in range(5):
        store = place.open()
        write(place.log(store), 2)
        store.close()
        assert store.shards[0].epoch == count + 1
    assert numbers(place.log()) == list(range(10))


def test_a_fence_wakes_everyone_who_waits(place: Place, tmp_path: Path, nats: NatsServer) -> None:
    relay = Relay(nats.port)
    store = place.open(servers=relay.url)
    logs = [store.open_partition("t", number, LogSettings()) for number in range(3)]
    shutil.copytree(tmp_path, tmp_path / "copy")
    relay.loses_replies = True
    for log in logs:
        append(log, numbered(1))
    waiting = [Background(log.durable) for log in logs]
    place.log(place.open(tmp_path / "copy"))
    relay.cut()
    assert {type(one.wait().error) for one in waiting} <= {StaleWriterError}
    relay.close()


def test_a_paused_owner_finds_out_at_its_next_write(place: Place, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.jetstream.writer", place.url, place.prefix, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        child.stdin.write("write 0\n")
        child.stdin.flush()
        assert child.stdout.readline() == "stored 0\n"
        child.send_signal(signal.SIGSTOP)
        shutil.copytree(tmp_path, tmp_path / "copy")
        owner = place.log(place.open(tmp_path / "copy"))
        append(owner, [Record(b"1", timestamp=NOW)])
        owner.durable()
        child.stdin.write("write 2\n")
        child.stdin.flush()
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline().startswith("StaleWriterError")
        assert [record.payload for record in read_all(owner)] == [b"0", b"1"]
    finally:
        child.kill()
        child.communicate()


def test_two_installations_cannot_have_one_prefix(place: Place, tmp_path: Path) -> None:
    write(place.log(), 1)
    (tmp_path / "other").mkdir()
    with pytest.raises(StreamAlteredError, match="belongs to another installation"):
        place.open(tmp_path / "other")
    assert place.ask(f"STREAM.INFO.{place.prefix}-0")["state"]["num_subjects"] >= 2


def test_a_data_folder_keeps_its_prefix(place: Place) -> None:
    place.open()
    with pytest.raises(NatsRefusedError, match="set that"):
        place.open(prefix="another")


@pytest.mark.parametrize("replicas", [1, 3])
def test_of_many_messages_that_expect_one_sequence_one_is_taken(request: pytest.FixtureRequest, replicas: int) -> None:
    # nats-server 4320: they could all be taken. It is why old versions are refused.
    url = request.getfixturevalue("nats").url if replicas == 1 else request.getfixturevalue("cluster")[0].url

    async def race() -> list[int]:
        client = await nats_client.connect(url)
        stream = client.jetstream()
        name = next(_prefixes)
        await stream.add_stream(name=name, subjects=[f"{name}.>"], num_replicas=replicas)
        taken = []
        for round_number in range(20):
            for header in ("Nats-Expected-Last-Sequence", "Nats-Expected-Last-Subject-Sequence"):
                last = 2 * round_number + (header != "Nats-Expected-Last-Sequence")
                headers = {header: str(last)}
                replies = await asyncio.gather(
                    *[client.request(f"{name}.a", b"x", headers=headers, timeout=20) for _ in range(30)]
                )
                taken.append(sum("error" not in msgspec.json.decode(reply.data) for reply in replies))
        await client.close()
        return taken

    assert asyncio.run(race()) == [1] * 40


# -- unknown outcomes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["loses_replies", "loses_requests"])
def test_an_unknown_outcome_is_looked_up_before_anything_is_sent_again(
    place: Place, nats: NatsServer, lost: str
) -> None:
    relay = Relay(nats.port)
    log = place.log(place.open(servers=relay.url))
    write(log, 10)
    setattr(relay, lost, True)
    for first in range(10, 50, 10):
        append(log, numbered(10, first=first))
    waiting = Background(log.durable)
    if lost == "loses_replies":  # until all is stored
        while place.ask(f"STREAM.INFO.{place.prefix}-0")["state"]["messages"] < 4:
            pass
    relay.cut()
    assert waiting.wait().value == 50
    assert log.shard.doubts >= 1
    assert numbers(log) == list(range(50))
    write(log, 10)
    assert numbers(log) == list(range(60))
    relay.close()


def test_a_publisher_is_answered_when_nats_stays_away_and_nothing_comes_twice(tmp_path: Path) -> None:
    with nats_server() as server:
        place, clock = Place(server.url, tmp_path), ManualClock(NOW)
        log = place.log(place.open(clock=clock))
        write(log, 10)
        server.pause()
        append(log, numbered(10, first=10))
        waiting = Background(log.durable)
        clock.advance(100)
        assert isinstance(waiting.wait().error, StorageError)
        with pytest.raises(StorageError):
            append(log, numbered(1, first=10))
        server.resume()
        while not works(log.durable):
            pass
        stored = log.next_offset
        assert stored in (10, 20)  # the paused server may have had it
        write(log, 5)
        assert numbers(log) == list(range(stored + 5))
        place.close()


def test_a_message_behind_one_whose_sequence_was_taken_is_stored_in_its_turn(tmp_path: Path) -> None:
    with nats_server() as server:
        place = Place(server.url, tmp_path)
        log = place.log()
        write(log, 3)
        place.publish(f"{place.prefix}.0.t.0", b"taken")  # the next message is refused, and the one behind it is not
        server.pause()
        for number in (3, 4):
            append(log, numbered(1, first=number))
            assert until(lambda sent=number - 2: len(log.shard._in_flight) == sent)  # type: ignore[misc]
        server.resume()
        log.durable()
        assert numbers(log) == list(range(5))
        again = place.log(place.open())
        assert numbers(again) == list(range(5))
        assert again.recovery.bad == []
        place.close()


def test_a_message_that_was_stored_out_of_turn_and_again_is_read_once(place: Place) -> None:
    log = place.log()
    write(log, 5)
    for _ in range(2):
        write(log, 1)
    subject, stream = f"{place.prefix}.0.t.0", f"{place.prefix}-0"
    last = place.ask(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})["message"]
    before = place.ask(f"STREAM.MSG.GET.{stream}", {"seq": last["seq"] - 1})["message"]
    for message in (before, last):
        assert place.ask(f"STREAM.MSG.DELETE.{stream}", {"seq": message["seq"]})["success"]
    for message in (last, before, last):  # a crash came before the first one was removed
        place.publish(subject, base64.b64decode(message["data"]))
    again = place.log(place.open())
    assert numbers(again) == list(range(7))
    assert again.recovery.bad == []
    write(again, 1)
    assert numbers(place.log(place.open())) == list(range(8))


def test_a_message_with_offsets_that_are_there_already_is_refused_and_nothing_is_removed(place: Place) -> None:
    log = place.log()
    for _ in range(3):
        write(log, 1)
    subject, stream = f"{place.prefix}.0.t.0", f"{place.prefix}-0"
    last = place.ask(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})["message"]
    before = place.ask(f"STREAM.MSG.GET.{stream}", {"seq": last["seq"] - 1})["message"]
    place.publish(subject, base64.b64decode(before["data"]))
    with pytest.raises(StreamAlteredError, match="records from offset 1 on, which are there already"):
        place.log(place.open())
    for message in (before, last):
        assert place.ask(f"STREAM.MSG.GET.{stream}", {"seq": message["seq"]})["message"] == message


def test_a_message_of_an_owner_of_before_that_comes_late_is_never_served(place: Place) -> None:
    log = place.log()
    write(log, 10)
    records = encode_batch(numbered(5, first=100), 10)
    head = Head(Kind.RECORDS, "t", 0, 0, 10, 15, log.size_bytes, NOW)
    place.publish(f"{place.prefix}.0.t.0", encode(head, bytes(records.data), crc_of(bytes(records.data))))
    write(log, 10)
    assert numbers(log) == list(range(20))
    log.close()
    again = place.log()
    assert numbers(again) == list(range(20))
    place.publish(f"{place.prefix}.0.t.0", encode(head, bytes(records.data), crc_of(bytes(records.data))))
    assert numbers(place.log()) == list(range(20))


# -- streams that somebody changed -------------------------------------------------------------------------------------


def test_a_deleted_stream_is_not_made_anew(place: Place) -> None:
    log = place.log()
    write(log, 10)
    place.ask(f"STREAM.DELETE.{place.prefix}-0")
    append(log, numbered(1, first=10))
    with pytest.raises(StreamAlteredError, match="is gone"):
        log.durable()
    with pytest.raises(StreamAlteredError, match="is gone"):
        place.open()
    assert "error" in place.ask(f"STREAM.INFO.{place.prefix}-0")


def test_a_stream_in_the_place_of_the_deleted_one_is_refused(place: Place) -> None:
    log = place.log()
    write(log, 10)
    config = place.ask(f"STREAM.INFO.{place.prefix}-0")["config"]
    place.ask(f"STREAM.DELETE.{place.prefix}-0")
    place.ask(f"STREAM.CREATE.{place.prefix}-0", config | {"metadata": {}})
    append(log, numbered(1, first=10))
    with pytest.raises(StorageError):
        log.durable()
    with pytest.raises(StreamAlteredError, match="belongs to somebody else"):
        place.open()


@pytest.mark.parametrize(
    "change", [{"max_age": 10**15}, {"discard": "old", "max_msgs": 10**6}, {"allow_direct": False}]
)
def test_an_altered_stream_is_refused(place: Place, change: dict[str, Any]) -> None:
    log = place.log()
    write(log, 10)
    config = place.ask(f"STREAM.INFO.{place.prefix}-0")["config"]
    assert "error" not in place.ask(f"STREAM.UPDATE.{place.prefix}-0", config | change)
    with pytest.raises(StreamAlteredError, match="was altered"):
        log.clean(NOW)
    with pytest.raises(StreamAlteredError, match="was altered"):
        place.open()


def test_records_that_somebody_purged_are_named(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    log = place.log()
    for _ in range(3):
        write(log, 10)
    log.close()
    place.ask(f"STREAM.PURGE.{place.prefix}-0", {"filter": f"{place.prefix}.0.t.0", "keep": 1})
    again = place.log()
    assert [(bad.offset, bad.next_offset) for _, bad in again.recovery.bad] == [(0, 20)]
    assert "somebody purged them" in caplog.text
    with pytest.raises(CorruptRecordError, match="missing"):
        again.read(5, 1000)
    assert again.read(20, 10**6).next_offset == 30


def test_a_purge_of_the_bounds_is_refused(place: Place) -> None:
    write(place.log(), 10)
    place.ask(f"STREAM.PURGE.{place.prefix}-0", {"filter": f"{place.prefix}.0.t.0.bounds"})
    with pytest.raises(StreamAlteredError, match="bounds is gone"):
        place.log()


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_frame_with_a_wrong_crc_is_named_and_never_served(place: Place) -> None:
    log = place.log()
    write(log, 10)
    append_damaged(log, 10)
    write(log, 10)
    sequence = log.bounds.scanned - 1
    for offset in (10, 15, 19):
        with pytest.raises(CorruptRecordError, match=f"stream {place.prefix}-0, sequence {sequence}: .*CRC") as caught:
            log.read(offset, 1000)
        assert caught.value.offset == offset
    assert log.read(0, 10**6).next_offset == 10
    assert log.read(20, 10**6).next_offset == 30
    again = place.log()  # the bounds are older: the opening reads it
    assert [(bad.offset, bad.next_offset) for _, bad in again.recovery.bad] == [(10, 20)]
    assert again.next_offset == 30


def append_damaged(log: StreamLog, count: int) -> None:
    """Store a frame whose data do not match their CRC."""
    take = log.take_message

    def damaged() -> Any:
        message = take()
        if message is not None:
            message.data_crc ^= 1
        return message

    log.take_message = damaged  # type: ignore[method-assign]
    write(log, count)
    log.take_message = take  # type: ignore[method-assign]


def test_a_message_of_somebody_else_among_the_frames_is_passed_over(place: Place) -> None:
    log = place.log()
    write(log, 10)
    place.publish(f"{place.prefix}.0.t.0", b"hello")
    write(log, 10)
    assert numbers(log) == list(range(20))


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_full_stream_refuses_and_goes_on_when_there_is_room(place: Place) -> None:
    log = place.log()
    write(log, 10)
    config = place.ask(f"STREAM.INFO.{place.prefix}-0")["config"]
    place.ask(f"STREAM.UPDATE.{place.prefix}-0", config | {"max_bytes": 20_000})
    append(log, [Record(b"x" * 50_000, timestamp=NOW)])
    with pytest.raises(DiskFullError, match="refused a message"):
        log.durable()
    place.ask(f"STREAM.UPDATE.{place.prefix}-0", config)
    while not works(log.durable):
        pass
    assert log.next_offset == 10
    write(log, 10)
    assert numbers(log) == list(range(20))


def test_a_record_larger_than_a_message_of_nats_is_refused_alone(place: Place) -> None:
    log = place.log()
    with pytest.raises(RecordTooLargeError, match="max_payload"):
        append(log, [Record(b"x" * 2**20, timestamp=NOW)])
    write(log, 3)
    assert numbers(log) == [0, 1, 2]


def test_a_large_batch_goes_in_several_frames(place: Place) -> None:
    log = place.log()
    sent = [Record(b"%d" % number + b"x" * 900, timestamp=NOW) for number in range(3000)]
    append(log, sent)
    log.durable()
    assert [record.payload for record in read_all(log)] == [record.payload for record in sent]
    assert place.ask(f"STREAM.INFO.{place.prefix}-0")["state"]["messages"] > 10


def test_half_a_batch_of_a_producer_is_taken_back_at_the_next_start(place: Place) -> None:
    log = place.log()
    write(log, 5)
    sent = [Record(b"%d" % number + b"x" * 900, timestamp=NOW) for number in range(1000)]
    batch = mark_producer(encode_batch(sent), 7, 0)
    log.append(rebase(batch, 5))
    log.durable()
    state = place.ask(f"STREAM.INFO.{place.prefix}-0")["state"]
    place.ask(f"STREAM.MSG.DELETE.{place.prefix}-0", {"seq": state["last_seq"]})  # as if it had not come
    again = place.log()
    assert again.next_offset == 5
    assert again.producers.next_sequence(7) == -1
    write(again, 5)
    assert numbers(again) == list(range(10))


def test_the_end_is_remembered_when_all_records_are_gone(place: Place) -> None:
    log = place.log()
    write(log, 20)
    assert log.trim(20) > 0
    again = place.log()
    assert (again.first_offset, again.next_offset, again.size_bytes) == (20, 20, 0)


def test_an_offset_in_a_long_log_is_found_without_reading_it(place: Place) -> None:
    log = place.log()
    for _ in range(300):
        write(log, 10)
    log.close()
    again = place.log()
    calls = count_calls(again)
    assert number_of(read_all(again, 1234)[0]) == 1234
    assert len(calls) < 40


def count_calls(log: StreamLog) -> list[int]:
    calls: list[int] = []
    messages = log.messages

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return messages(*arguments)

    log.messages = counted  # type: ignore[assignment,method-assign]
    return calls


# -- the start ---------------------------------------------------------------------------------------------------------


@contextmanager
def waiting_for_nats(reason: str = "") -> Iterator[threading.Event]:
    """Give an event that is set when a start says that it waits for NATS, and why."""
    said = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for NATS" in record.getMessage() and reason in record.getMessage():
                said.set()

    handler, logger = Handler(), logging.getLogger("babelbus.storage.jetstream")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def test_a_start_waits_for_nats_and_says_so(tmp_path: Path) -> None:
    with nats_server() as server, waiting_for_nats() as said:
        server.kill()
        place = Place(server.url, tmp_path)
        opening = Background(place.open)
        assert said.wait(SAFETY_NET_SECONDS)
        server.start()
        assert opening.wait().error is None
        place.close()


def test_wrong_credentials_are_refused_at_once(tmp_path: Path) -> None:
    with nats_server("authorization { user: bus, password: right }") as server:
        place = Place(server.url, tmp_path)
        (tmp_path / "password").write_text("wrong\n")
        with pytest.raises(NatsRefusedError, match="credentials"):
            place.open(user="bus", password_file=str(tmp_path / "password"))
        (tmp_path / "password").write_text("right\n")
        place.open(user="bus", password_file=str(tmp_path / "password"))
        place.close()


def test_an_old_nats_is_refused(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as near:
            talk(near)

    def talk(near: socket.socket) -> None:
        near.sendall(b'INFO {"server_id":"x","version":"2.11.9","max_payload":1048576,"headers":true}\r\n')
        while data := near.recv(4096):
            if b"PING" in data:
                near.sendall(b"PONG\r\n")

    serving = threading.Thread(target=serve, daemon=True)
    port = listener.getsockname()[1]
    serving.start()
    place = Place(f"nats://127.0.0.1:{port}", tmp_path)
    with pytest.raises(NatsRefusedError, match=r"2\.11\.9 is too old"):
        place.open()
    serving.join(SAFETY_NET_SECONDS)


def test_a_start_waits_for_jetstream_too(tmp_path: Path) -> None:
    with nats_server() as server, waiting_for_nats("no JetStream answers") as said:
        path = Path(server.folder) / "n0.conf"
        with_jetstream = path.read_text()
        path.write_text(f'listen: "127.0.0.1:{server.port}"\n')
        server.kill()
        server.start()
        place = Place(server.url, tmp_path)
        opening = Background(place.open)
        assert said.wait(SAFETY_NET_SECONDS)
        path.write_text(with_jetstream)
        server.kill()
        server.start()
        assert opening.wait().error is None
        place.close()


def test_more_replicas_than_servers_are_refused_with_the_setting(place: Place) -> None:
    with pytest.raises(NatsRefusedError, match=r"jetstream\.replicas"):
        place.open(replicas=3)


@pytest.mark.parametrize(
    ("settings", "said"), [({"servers": None}, r"jetstream\.servers"), ({"prefix": "a.b"}, r"jetstream\.prefix")]
)
def test_a_setting_that_cannot_be_used_is_named(place: Place, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place.open(**settings)


# -- a cluster ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[NatsServer]]:
    with nats_cluster() as servers:
        yield servers


def test_nothing_acknowledged_is_lost_when_the_leader_is_killed(cluster: list[NatsServer], tmp_path: Path) -> None:
    place = Place(",".join(server.url for server in cluster), tmp_path)
    log = place.log(place.open(replicas=3, timeout_seconds=60))
    stop, acked = threading.Event(), [0]
    begun = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            append(log, numbered(20, first=log.next_offset))
            acked[0] = log.durable()
            if acked[0] >= 400:
                begun.set()

    publishing = Background(publish)
    assert begun.wait(SAFETY_NET_SECONDS)
    leader = log.nats.call(log.nats.api(f"STREAM.INFO.{place.prefix}-0"))["cluster"]["leader"]
    victim = next(server for server in cluster if server.name == leader)
    victim.kill()
    before = acked[0]
    while acked[0] < before + 400 and publishing.error is None:
        assert not stop.wait(0.01)
    stop.set()
    assert publishing.wait().error is None
    assert numbers(log) == list(range(log.next_offset))
    assert log.next_offset >= acked[0]
    victim.start()
    place.close()
    again = place.log(place.open(replicas=3, timeout_seconds=60))
    assert numbers(again) == list(range(again.next_offset))
    assert again.next_offset >= acked[0]
    place.close()


def test_reads_go_on_when_the_leader_hangs(tmp_path: Path) -> None:
    with nats_cluster() as servers:
        place = Place(servers[0].url, tmp_path)
        write(place.log(place.open(replicas=3, timeout_seconds=60)), 20)
        leader = place.ask(f"STREAM.INFO.{place.prefix}-0")["cluster"]["leader"]
        place.close()
        hanging = next(server for server in servers if server.name == leader)
        place.url = next(server.url for server in servers if server is not hanging)
        log = place.log(place.open(replicas=3, timeout_seconds=60))
        hanging.pause()  # NATS goes on to give it a share of the reads
        for _ in range(20):
            found = log.nats.call(log.nats.get_batch(f"{place.prefix}-0", f"{place.prefix}.0.>", 1, 2**20, 1))
            assert len(found) == 1
        hanging.resume()
        place.close()
