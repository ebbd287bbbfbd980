"""The lease: one server owns the streams, a second one waits and takes over when the first one is silent."""

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="engine jetstream is not tested: the package nats-py is not installed")

from babelbus.clock import ManualClock
from babelbus.errors import StorageError
from babelbus.storage.errors import StaleWriterError
from tests.storage.helpers import append, numbered
from tests.storage.jetstream.test_store import Background, Place, numbers, works, write
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.nats import NatsServer, Relay

NOW = 1_700_000_000_000
SECONDS = 1.0


@pytest.fixture
def place(nats: NatsServer, tmp_path: Path) -> Iterator[Place]:
    place = Place(nats.url, tmp_path)
    yield place
    place.close()


class Standby:
    """A second server, on a copy of the data folder, with a clock that moves when it is told to."""

    def __init__(self, place: Place, folder: Path) -> None:
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
