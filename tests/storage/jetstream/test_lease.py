"""The lease: one server owns the streams, a second one waits and takes over when the first one is silent."""

import asyncio
import itertools
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="engine jetstream is not tested: the package nats-py is not installed")

from nats.aio.msg import Msg

from babelbus.config import JetstreamSettings
from babelbus.errors import StorageError
from babelbus.storage.errors import StaleWriterError
from babelbus.storage.files import LocalFiles
from babelbus.storage.jetstream import Ownership, Presence
from babelbus.storage.jetstream import lease as lease_module
from babelbus.storage.jetstream.client import REPLY_SECONDS
from babelbus.storage.jetstream.errors import NatsAwayError
from babelbus.storage.jetstream.lease import HEIR_SECONDS, Lease
from babelbus.storage.jetstream.presence import AWAY_SECONDS
from tests.storage.helpers import append, numbered
from tests.storage.jetstream.test_store import Background, Place, numbers, works, write
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.clock import ManualClock
from tests.support.nats import NatsServer, Relay

NOW = 1_700_000_000_000
SECONDS = 1.0
_parties = itertools.count()


@pytest.fixture
def place(nats: NatsServer, tmp_path: Path) -> Iterator[Place]:
    place = Place(nats.url, tmp_path)
    yield place
    place.close()


class Standby:
    """A second server, on a copy of the data folder, with a clock that moves when it is told to."""

    def __init__(self, place: Place, folder: Path) -> None:
        if not folder.exists():
            shutil.copytree(place.folder, folder)
        self.clock = ManualClock(NOW)
        self.waits = threading.Event()
        self._handler = logging.Handler()
        self._handler.emit = self._emit  # type: ignore[method-assign]
        self._logger = logging.getLogger("babelbus.storage.jetstream.lease")
        self._logger.addHandler(self._handler)
        self.opening = Background(lambda: place.open(folder, clock=self.clock, lease_seconds=SECONDS))

    def _emit(self, record: logging.LogRecord) -> None:
        if "standing by" in record.getMessage():
            self.waits.set()

    def done(self) -> None:
        self._logger.removeHandler(self._handler)


def test_a_second_server_waits_and_takes_over_when_the_first_one_stops(place: Place, tmp_path: Path) -> None:
    first = place.open(lease_seconds=SECONDS)
    log = place.log(first)
    write(log, 10)
    standby = Standby(place, tmp_path / "copy")
    assert standby.waits.wait(SAFETY_NET_SECONDS)
    write(log, 10)
    log.close()
    first.close()
    second = standby.opening.wait().value
    assert second.shards[0].epoch == 2
    taken = place.log(second)
    write(taken, 10)
    assert numbers(taken) == list(range(30))
    standby.done()


def test_a_silent_owner_is_replaced_after_its_time_and_acknowledges_nothing_more(
    place: Place, nats: NatsServer, tmp_path: Path
) -> None:
    relay = Relay(nats.port)
    clock = ManualClock(NOW)
    log = place.log(place.open(servers=relay.url, lease_seconds=SECONDS, clock=clock))
    write(log, 10)
    relay.loses_requests = relay.loses_replies = True
    standby = Standby(place, tmp_path / "copy")
    assert standby.waits.wait(SAFETY_NET_SECONDS)
    clock.advance(SECONDS)  # the owner's time is over; it does not know yet that nobody hears it
    append(log, numbered(1, first=10))
    waiting = Background(log.durable)
    standby.clock.advance(SECONDS)
    taken = place.log(standby.opening.wait().value)
    write(taken, 5)
    relay.cut()
    assert isinstance(waiting.wait().error, StorageError)
    while not isinstance(log.shard.failure, StaleWriterError):
        works(log.durable)
    assert numbers(taken) == list(range(15))
    standby.done()
    relay.close()


def test_an_owner_that_could_not_renew_goes_on_if_nobody_took_its_place(place: Place, nats: NatsServer) -> None:
    relay = Relay(nats.port)
    clock = ManualClock(NOW)
    log = place.log(place.open(servers=relay.url, lease_seconds=SECONDS, clock=clock, timeout_seconds=5.0))
    write(log, 10)
    relay.loses_requests = relay.loses_replies = True
    clock.advance(100)
    append(log, numbered(1, first=10))
    while works(log.shard.lease.check):  # type: ignore[union-attr]
        pass
    relay.cut()
    while not works(log.durable):
        pass
    write(log, 1)
    assert numbers(log)[:10] == list(range(10))
    relay.close()


def test_a_server_that_was_killed_starts_again_without_waiting(place: Place) -> None:
    write(place.log(place.open(lease_seconds=3600.0)), 10)
    log = place.log(place.open(lease_seconds=3600.0))  # the same folder: the lock says that the first one is gone
    write(log, 10)
    assert numbers(log) == list(range(20))


@pytest.mark.parametrize("other", ["machine", "folder", "system"])
def test_a_server_waits_for_an_owner_whose_folder_has_only_the_same_name(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    folder, boot_id = tmp_path / "data", tmp_path / "boot_id"
    folder.mkdir()
    first = place.open(folder, lease_seconds=SECONDS)
    if other == "folder":  # a copy in the place of the original
        folder.rename(tmp_path / "before")
        shutil.copytree(tmp_path / "before", folder)
    else:
        monkeypatch.setattr(lease_module, "BOOT_ID", str(boot_id))
        if other == "machine":
            boot_id.write_text("another start of a machine\n")
    standby = Standby(place, folder)
    assert standby.waits.wait(SAFETY_NET_SECONDS)
    first.close()
    assert standby.opening.wait().value.shards[0].epoch == 2
    standby.done()


def test_an_owner_whose_time_ended_serves_no_reads(place: Place, nats: NatsServer) -> None:
    relay = Relay(nats.port)
    clock = ManualClock(NOW)
    log = place.log(place.open(servers=relay.url, lease_seconds=SECONDS, clock=clock, timeout_seconds=5.0))
    write(log, 10)
    assert works(log.shard.check_owner)
    relay.loses_requests = relay.loses_replies = True
    clock.advance(100)
    while works(log.shard.check_owner):  # a renewal may have been under way
        clock.advance(100)
    assert not log.is_owned
    with pytest.raises(NatsAwayError, match="lease"):
        log.read(0, 2**20)
    relay.cut()
    while not works(log.shard.check_owner):
        pass
    assert numbers(log) == list(range(10))
    relay.close()


class Party:
    """The ends of some members of one cluster at NATS."""

    def __init__(self, nats: NatsServer, folder: Path) -> None:
        self._url, self._folder = nats.url, folder
        self.prefix = f"party{next(_parties)}"
        self._all: list[Ownership] = []

    def join(self, name: str, clock: ManualClock | None = None, seconds: float = 3600.0) -> tuple[Ownership, Lease]:
        settings = JetstreamSettings(self._url, prefix=self.prefix, replicas=1, shards=1, lease_seconds=seconds)
        member = Ownership(settings, LocalFiles(), str(self._folder / name), clock or ManualClock(NOW), name)
        member.connect(name)
        self._all.append(member)
        assert member.lease is not None
        return member, member.lease

    def leave(self) -> None:
        for member in self._all:
            member.close()


@pytest.fixture
def party(nats: NatsServer, tmp_path: Path) -> Iterator[Party]:
    party = Party(nats, tmp_path)
    yield party
    party.leave()


class SlowStore:
    """A real NATS whose answers to renewals come late, by the clock of the owner."""

    def __init__(self, member: Ownership, clock: ManualClock, seconds: float) -> None:
        self.ask_now, self._clock, self._seconds = member.nats.ask, clock, seconds
        self._due: list[float] = []
        """When the answers come that are not there."""
        self.sent_at = 0.0
        member.nats.ask = self.ask  # type: ignore[method-assign]

    async def ask(
        self, subject: str, content: bytes, headers: dict[str, str] | None = None, seconds: float = REPLY_SECONDS
    ) -> Msg:
        if not subject.endswith(".lease"):
            return await self.ask_now(subject, content, headers, seconds)
        self.sent_at = self._clock.monotonic()
        due, end = self.sent_at + self._seconds, self.sent_at + seconds
        self._due.append(min(due, end))
        reply = await self.ask_now(subject, content, headers, SAFETY_NET_SECONDS)
        while self._clock.monotonic() < min(due, end):  # noqa: ASYNC110 - the clock moves in another thread
            await asyncio.sleep(0.001)
        self._due.remove(min(due, end))
        if end < due:
            raise NatsAwayError("no answer came in time")
        return reply

    async def settle(self) -> None:
        """Return when a renewal was sent at this time, and all answers came that may come at this time."""
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            while self.sent_at < self._clock.monotonic() or min(self._due) <= self._clock.monotonic():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("late", [0.25, 2.5])
def test_a_store_that_answers_late_ends_no_lease(party: Party, monkeypatch: pytest.MonkeyPatch, late: float) -> None:
    monkeypatch.setattr(lease_module, "RENEWALS", 1000)
    clock = ManualClock(NOW)
    first, lease = party.join("a", clock, seconds=10.0)
    first.acquire()
    ended: list[StorageError] = []
    lease.on_ended.append(ended.append)
    store = SlowStore(first, clock, late)
    for _ in range(50):
        clock.advance(0.5)
        first.nats.call(store.settle())
        assert ended == []
        assert lease.rest_seconds >= 0.9 * 10 - 2 * late - 1
    clock.advance(late)  # or the end of the test would wait for an answer
    first.nats.ask = store.ask_now  # type: ignore[method-assign]


def test_a_lease_that_is_given_away_goes_to_its_heir_and_counts_up(party: Party) -> None:
    first, lease = party.join("a")
    second, second_lease = party.join("b")
    third, third_lease = party.join("c")
    first.acquire()
    first.nats.call(lease.advertise("127.0.0.1:1"))
    waiting = [Background(second.acquire), Background(third.acquire)]
    while third_lease.seen is None or not third_lease.seen.address:
        pass
    assert (third_lease.seen.name, third_lease.seen.epoch, third_lease.seen.address) == ("a", 1, "127.0.0.1:1")
    first.nats.call(lease.release("c"))
    waiting[1].wait()
    assert (third_lease.held.name, third_lease.held.epoch, third_lease.is_valid()) == ("c", 2, True)
    assert not lease.is_valid()
    third.nats.call(third_lease.release())
    waiting[0].wait()
    assert (second_lease.held.name, second_lease.held.epoch) == ("b", 3)


def test_a_lease_whose_heir_does_not_come_is_taken_by_another(party: Party) -> None:
    clock = ManualClock(NOW)
    first, lease = party.join("a")
    second, second_lease = party.join("b", clock)
    first.acquire()
    waiting = Background(second.acquire)
    first.nats.call(lease.release("nobody"))
    while second_lease.seen is None or not second_lease.seen.released:
        pass
    assert not second_lease.is_valid()
    clock.advance(HEIR_SECONDS)
    first.nats.call(lease._tell())  # it may wait by the real clock
    waiting.wait()
    assert second_lease.held.epoch == 2


def test_a_server_that_gave_the_lease_away_takes_it_again_behind_its_heir(party: Party) -> None:
    first, lease = party.join("a")
    second, second_lease = party.join("b")
    first.acquire()
    first.nats.call(lease.release("b"))
    waiting = Background(first.acquire)
    second.acquire()
    second.nats.call(second_lease.release("a"))
    waiting.wait()
    assert (lease.held.epoch, lease.is_valid(), lease.lost) == (3, True, None)


def test_a_lease_is_given_away_although_a_renewal_was_cut_off(party: Party) -> None:
    first, lease = party.join("a")
    second, second_lease = party.join("b")
    first.acquire()

    async def renew_without_an_answer() -> None:
        sequence = lease._sequence
        await lease._put()
        lease._sequence = sequence

    first.nats.call(renew_without_an_answer())
    first.nats.call(lease.release())
    _, held = second.nats.call(second_lease._read())
    assert held is not None
    assert held.released
    second.acquire()
    assert second_lease.held.epoch == 2


def test_the_stream_of_an_earlier_version_gets_the_subjects_of_members(party: Party) -> None:
    first, _ = party.join("a")
    name = f"{party.prefix}-lease"
    config = {"name": name, "subjects": [f"{party.prefix}.lease"], "max_msgs_per_subject": 1}
    first.nats.call(first.nats.api(f"STREAM.CREATE.{name}", config))
    first.acquire()
    made = first.nats.call(first.nats.api(f"STREAM.INFO.{name}"))["config"]
    assert made["subjects"] == [f"{party.prefix}.lease", f"{party.prefix}.lease.>"]


def presence(member: Ownership, name: str, role: str = "member") -> Presence:
    return Presence(name, member.owner, "host", "1", 1, role, NOW)


def roles(member: Ownership) -> dict[str, tuple[str, bool]]:
    return {one.name: (one.role, away) for one, _, away in member.members.all()}


def test_members_hear_each_other_and_count_the_silence_by_their_own_clocks(party: Party) -> None:
    clock = ManualClock(NOW)
    first, _ = party.join("a", clock)
    second, _ = party.join("b.c", ManualClock(NOW - 3_600_000))
    first.acquire()
    first.nats.call(first.members.start(lambda: presence(first, "a", "owner")))
    second.nats.call(second.members.start(lambda: presence(second, "b.c")))
    while roles(first) != {"a": ("owner", False), "b.c": ("member", False)}:
        pass
    while roles(second) != {"a": ("owner", False), "b.c": ("member", False)}:
        pass
    second.nats.call(second.members.stop())
    while "b.c" in roles(first):
        pass
    third, _ = party.join("d")
    third.nats.call(third.members.start(lambda: presence(third, "d")))
    assert "b.c" not in roles(third)
    while "d" not in roles(first):
        pass
    third.nats.stop()
    clock.advance(AWAY_SECONDS + 1)
    while not roles(first)["d"][1]:
        clock.advance(AWAY_SECONDS + 1)
    assert roles(first)["d"] == ("member", True)


def test_a_member_that_was_there_before_is_away_until_it_is_heard(party: Party) -> None:
    first, _ = party.join("a")
    first.acquire()
    first.nats.call(first.members.start(lambda: presence(first, "a", "owner")))
    second, _ = party.join("b")
    while not first.nats.call(first.nats.api(f"STREAM.INFO.{party.prefix}-lease"))["state"]["messages"] > 1:
        pass
    first.nats.stop()
    second.nats.call(second.members.start(lambda: presence(second, "b")))
    assert roles(second)["a"] == ("owner", True)


def test_a_server_that_has_just_begun_waits_for_members_that_it_has_not_heard(party: Party) -> None:
    clock = ManualClock(NOW)
    first, _ = party.join("a")
    first.acquire()
    first.nats.call(first.members.start(lambda: presence(first, "a")))
    second, _ = party.join("b", clock)
    while not first.nats.call(first.nats.api(f"STREAM.INFO.{party.prefix}-lease"))["state"]["messages"] > 1:
        pass
    first.nats.stop()
    second.nats.call(second.members.start(lambda: presence(second, "b")))
    assert second.members.others() == {"a"}
    clock.advance(AWAY_SECONDS + 1)
    assert second.members.others() == set()


def test_two_members_with_one_name_are_told(party: Party) -> None:
    clock = ManualClock(NOW)
    first, _ = party.join("a", clock)
    first.acquire()
    second, _ = party.join("a")
    first.nats.call(first.members.start(lambda: presence(first, "a", "owner")))
    second.nats.call(second.members.start(lambda: presence(second, "a")))
    while (twin := first.members.twin) is None or second.members.twin is None:
        pass
    assert twin.process == second.owner
    second.nats.stop()  # which says no word
    clock.advance(AWAY_SECONDS + 1)
    while first.members.twin is not None:  # what it had said before has come meanwhile
        clock.advance(AWAY_SECONDS + 1)


@pytest.mark.parametrize("turns", range(5))
def test_a_wait_for_the_lease_that_is_cancelled_while_news_come_ends(party: Party, turns: int) -> None:
    first, _ = party.join("a")
    first.acquire()
    second, lease = party.join("b")

    async def cancel() -> bool:
        waiting = asyncio.create_task(lease.acquire())
        while lease.seen is None:  # noqa: ASYNC110 - it is seen between two turns
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        lease._wake.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=SAFETY_NET_SECONDS)
        return waiting.cancelled()

    assert second.nats.call(cancel())
