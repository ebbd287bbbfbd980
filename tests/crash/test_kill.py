"""SIGKILL, SIGTERM, full disks and flipped bytes, on a real server in a process of its own.

They are rows 1, 4, 6, 20 and 21 of the fault matrix in docs/design/reliability.md. Every record carries its number:
what was acknowledged must be there afterwards, in order, once. The seed of a run is in the name of its test;
BABELBUS_TEST_SEED chooses another first one.
"""

import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.config import StorageSettings, TopicDefaults
from babelbus.protocols.jebp.codec import decode_batches
from babelbus.protocols.jebp.fields import decode_numbers
from babelbus.protocols.jebp.messages import RecordsCreated, Response
from babelbus.records.columns import decode_chunk, iterate
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import Child
from tests.support.jebp import Caller, create, create_many, create_topic, fetch, said, subscribe
from tests.support.server import configure

SEED = int(os.environ.get("BABELBUS_TEST_SEED", "1"))
QUICK = range(SEED, SEED + 3)
SLOW = range(SEED + 3, SEED + 65)
TOPIC = "news"
LOG = Path("topics", TOPIC, "0", "00000000000000000000.log")
PRODUCER = 77


def seeds(quick: range, slow: range) -> list[object]:
    return [*quick, *(pytest.param(seed, marks=pytest.mark.slow) for seed in slow)]


def record(number: int) -> bytes:
    """A record's payload: its number, and as many bytes as the number says."""
    return b"%010d" % number + b"." * (number * 7919 % 300)


def numbers_of(caller: Caller) -> list[int]:
    """Everything that is stored, by offset; each payload is checked to be what was sent."""
    found: list[int] = []
    assert said(caller.ask(subscribe(TOPIC))[0]) == "a030"
    while True:
        (answer,) = caller.ask(fetch(len(found), 2**20))
        assert said(answer)[:4] == "a030"
        if not answer.content:
            return found
        for batch in decode_batches(answer.content):
            for stored in iterate(decode_chunk(bytes(batch.records))):
                assert stored.offset == len(found)
                assert stored.payload is not None
                number = int(stored.payload[:10])
                assert stored.payload == record(number)
                found.append(number)


def settings(
    folder: Path, ack: str = "flushed", segment_bytes: int = 2**20, storage: StorageSettings | None = None
) -> Child:
    topics = TopicDefaults(ack=ack, segment_bytes=segment_bytes)  # type: ignore[arg-type]  # one of the three
    return Child(configure(folder, topics=topics, storage=storage))


class Publisher(threading.Thread):
    """Publishes records one by one but pipelined, until the server is gone; counts what was acknowledged."""

    def __init__(self, caller: Caller, first: int, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._caller, self._first, self._chance = caller, first, chance
        self._reached = threading.Condition()
        self.sent = self.acknowledged = 0
        self.refused: list[str] = []

    def run(self) -> None:
        try:
            while True:
                burst = self._chance.choice([1, 1, 3, 20, 200])
                start = self._first + self.sent
                self.sent += burst
                self._caller.send(*[create(TOPIC, record(number)) for number in range(start, start + burst)])
                for _ in range(burst):
                    (answer,) = self._caller.hear(1)
                    with self._reached:
                        if said(answer) == "a130":
                            self.acknowledged += 1
                        else:
                            self.refused.append(said(answer))
                        self._reached.notify_all()
        except OSError:  # the server was killed
            with self._reached:
                self._reached.notify_all()

    def wait_for(self, acknowledged: int) -> None:
        with self._reached:
            assert self._reached.wait_for(lambda: self.acknowledged >= acknowledged, SAFETY_NET_SECONDS)


# -- SIGKILL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(QUICK[:2], SLOW[:31]))
def test_after_a_kill_every_acknowledged_record_is_there_in_order_and_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ack = ("flushed", "written")[seed % 2]
    first, acknowledged = 0, 0
    for _ in range(2):  # the second run stands on what the first one left
        with settings(tmp_path, ack, chance.choice([4096, 2**20])) as child:
            with child.caller() as caller:
                caller.ask(create_topic(TOPIC))
                publisher = Publisher(caller, first, chance)
                publisher.start()
                publisher.wait_for(chance.choice([1, 10, 100, 500, 1500]))
                child.kill()
                publisher.join(SAFETY_NET_SECONDS)
            assert not publisher.refused
            acknowledged = first + publisher.acknowledged
        with settings(tmp_path, ack) as child, child.caller() as caller:
            found = numbers_of(caller)
            assert found == list(range(len(found)))
            assert acknowledged <= len(found) <= first + publisher.sent
            first = len(found)
            child.kill()


@pytest.mark.parametrize("seed", seeds(QUICK[2:], SLOW[31:]))
def test_batches_of_a_producer_that_are_sent_again_after_a_kill_are_stored_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([1, 2, 50, 300]) for _ in range(120)]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    batches = [
        create_many(TOPIC, map(record, range(start, start + size)), producer=PRODUCER, sequence=start)
        for start, size in zip(starts, sizes, strict=True)
    ]
    places: dict[int, int] = {}
    done = 0
    while done < len(batches):
        with settings(tmp_path, segment_bytes=2**16) as child:
            with child.caller() as caller:
                caller.ask(create_topic(TOPIC))
                stop_at = min(done + chance.randint(10, 70), len(batches))
                try:
                    # Up to ten are on their way; those without an answer are sent again after the start.
                    for at in range(done, len(batches), 10):
                        caller.send(*batches[at : at + 10])
                        for number in range(at, min(at + 10, len(batches))):
                            (answer,) = caller.hear(1)
                            remember(places, number, answer)
                            done = number + 1
                            if done == stop_at:
                                raise ConnectionError("enough")
                except ConnectionError:
                    pass
                # Some that were answered are sent again as well: a lost answer looks like that to the client.
                done = max(0, done - chance.randint(0, 5)) if done < len(batches) else done
            child.kill()
    with settings(tmp_path) as child, child.caller() as caller:
        assert numbers_of(caller) == list(range(sum(sizes)))
        assert places == dict(enumerate(starts))
        for number in range(len(batches) - 10, len(batches)):
            remember(places, number, caller.ask(batches[number])[0])
        assert child.stop() == 0


def remember(places: dict[int, int], number: int, answer: Response) -> None:
    """Note where a batch is; it is always the same place."""
    assert said(answer)[:4] == "a130"
    created = decode_numbers(RecordsCreated, answer.content)
    assert places.setdefault(number, created.base_offset) == created.base_offset


def test_a_kill_in_the_middle_of_a_write_costs_the_tail_alone(tmp_path: Path) -> None:
    with settings(tmp_path) as child, child.caller() as caller:
        caller.ask(create_topic(TOPIC), *[create(TOPIC, record(number)) for number in range(10)])
        child.kill()
    log = tmp_path / LOG
    whole = log.read_bytes()
    with log.open("ab") as file:
        file.write(whole[: len(whole) // 20])  # begins like a record of an offset that is not the next one
    with settings(tmp_path) as child, child.caller() as caller:
        assert child.has_said("torn tail")
        assert numbers_of(caller) == list(range(10))
        assert said(caller.ask(create(TOPIC, record(10)))[0]) == "a130"
        assert numbers_of(caller) == list(range(11))
    assert log.stat().st_size > len(whole)


# -- SIGTERM and SIGHUP ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(range(SEED, SEED + 2), range(SEED + 2, SEED + 50)))
def test_a_stop_under_load_answers_and_keeps_what_it_took(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with settings(tmp_path) as child:
        with child.caller() as caller:
            caller.ask(create_topic(TOPIC))
            publisher = Publisher(caller, 0, chance)
            publisher.start()
            publisher.wait_for(chance.choice([1, 50, 500]))
            assert child.stop() == 0
            publisher.join(SAFETY_NET_SECONDS)
        assert not publisher.refused
        assert "stopped" in child.said
    with settings(tmp_path) as child, child.caller() as caller:
        assert "torn tail" not in child.said
        found = numbers_of(caller)
        assert found == list(range(len(found)))
        assert publisher.acknowledged <= len(found) <= publisher.sent


def test_sighup_closes_the_connections_of_clients_that_were_removed(tmp_path: Path) -> None:
    with settings(tmp_path) as child, child.caller() as caller:
        assert said(caller.ask(create_topic(TOPIC))[0]) == "a130"
        (tmp_path / "conf" / "client_fingerprints").write_text("# nobody\n")
        child.signal(signal.SIGHUP)
        assert caller.is_closed()
        assert child.stop() == 0


# -- a full disk -----------------------------------------------------------------------------------------------------


def refused_then_taken(child: Child, fill: "Filler") -> None:
    """Publish into a disk that fills up, read meanwhile, make room, publish on: nothing acknowledged is lost."""
    with child.caller() as writer, child.caller() as reader:
        assert said(writer.ask(create_topic(TOPIC))[0]) == "a130"
        acknowledged: list[int] = []
        number, refusals = 0, 0
        fill.fill()
        while refusals < 5:
            (answer,) = writer.ask(create(TOPIC, record(number)))
            if said(answer) == "a130":
                acknowledged.append(number)
            else:
                assert said(answer) == "b331"
                refusals += 1
            number += 1
            assert number < 100_000
        assert numbers_of(reader) == acknowledged  # readers go on
        assert said(writer.ask(create_many(TOPIC, [record(number)] * 50))[0]) == "b331"
        fill.free()
        for later in range(number, number + 50):
            assert said(writer.ask(create(TOPIC, record(later)))[0]) == "a130"
            acknowledged.append(later)
        assert numbers_of(reader) == acknowledged
        assert child.stop() == 0
    with settings(child.folder) as again, again.caller() as reader:
        assert numbers_of(reader) == acknowledged


class Filler:
    """How a disk becomes full and has room again."""

    def fill(self) -> None:
        """Leave little room."""

    def free(self) -> None:
        """Make room."""


class SizeLimit(Filler):
    def __init__(self, child: Child) -> None:
        self._child = child

    def fill(self) -> None:
        self._child.limit_files(20_000)

    def free(self) -> None:
        self._child.limit_files(-1)


class Ballast(Filler):
    """A file that takes all but some room of a small file system."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ballast"
        self._folder = folder

    def fill(self) -> None:
        room = os.statvfs(self._folder)
        self._path.write_bytes(bytes(room.f_bavail * room.f_frsize - 2**16))

    def free(self) -> None:
        self._path.unlink()


def test_a_full_disk_by_a_limit_of_file_size(tmp_path: Path) -> None:
    with settings(tmp_path) as child:
        refused_then_taken(child, SizeLimit(child))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "babelbus-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here (that takes root)")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_by_a_small_file_system(small_disk: Path) -> None:
    with settings(small_disk / "data") as child:
        refused_then_taken(child, Ballast(small_disk))


# -- a flipped byte --------------------------------------------------------------------------------------------------


def damaged(folder: Path, number: int) -> Path:
    """Flip a bit in the payload of a record and give the file that it stands in."""
    for path in sorted((folder / LOG).parent.glob("*.log")):
        content = bytearray(path.read_bytes())
        at = content.find(b"%010d" % number)
        if at >= 0:
            content[at + 3] ^= 4
            with path.open("r+b") as file:  # in place, as a disk does it
                file.write(content)
            return path
    raise AssertionError(f"record {number} is not there")


def assert_all_but_one_are_served(child: Child, caller: Caller, number: int, count: int, path: Path) -> None:
    """The damaged record is refused and reported with its file and offset, the others come."""
    assert said(caller.ask(subscribe(TOPIC))[0]) == "a030"
    assert said(caller.ask(fetch(number, 2**20))[0]) == "b030"
    assert child.has_said(path.name)
    found: list[int] = []
    offset = 0
    while offset < count:
        (answer,) = caller.ask(fetch(offset, 4096))
        if said(answer)[:4] == "b030":
            assert offset == number
            offset += 1
            continue
        for batch in decode_batches(answer.content):
            for stored in iterate(decode_chunk(bytes(batch.records))):
                found.append(stored.offset)
                offset = stored.offset + 1
    assert found == [other for other in range(count) if other != number]
    reports = [line for line in child.said.splitlines() if path.name in line and str(number) in line]
    assert reports


def store(child: Child, count: int) -> Caller:
    caller = child.caller()
    caller.ask(create_topic(TOPIC))
    answers = caller.ask(*[create(TOPIC, record(number)) for number in range(count)])
    assert {said(answer) for answer in answers} == {"a130"}
    return caller


@pytest.mark.parametrize(("number", "killed"), [(0, True), (777, False), (1500, True)])
def test_a_byte_that_flipped_while_the_server_was_down(tmp_path: Path, number: int, killed: bool) -> None:
    count = 3000
    with settings(tmp_path, segment_bytes=2**16) as child, store(child, count):
        if killed:
            child.kill()
        else:
            assert child.stop() == 0
    path = damaged(tmp_path, number)
    with settings(tmp_path, segment_bytes=2**16) as child, child.caller() as caller:
        assert_all_but_one_are_served(child, caller, number, count, path)
        assert said(caller.ask(create(TOPIC, record(count)))[0]) == "a130"


@pytest.mark.parametrize("number", [0, 777])
def test_a_byte_that_flips_while_the_server_is_up(tmp_path: Path, number: int) -> None:
    count = 3000
    on_disk = StorageSettings(tail_cache_bytes=0)  # so that what is served comes from the file
    with settings(tmp_path, segment_bytes=2**16, storage=on_disk) as child, store(child, count) as caller:
        path = damaged(tmp_path, number)
        assert_all_but_one_are_served(child, caller, number, count, path)
        assert said(caller.ask(create(TOPIC, record(count)))[0]) == "a130"
        assert child.stop() == 0
