"""A server that is away: when a query begins, between two requests and in the middle of an answer. No Spark here."""

import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from babelbus.client import (
    BlockingClient,
    ConnectionLostError,
    Identity,
    IdentityError,
    NotAuthorisedError,
    UntrustedServerError,
)
from babelbus.core.access import SERVER
from babelbus.records.columns import iterate
from babelbus.records.record import Record
from babelbus.spark.connection import PAUSE_SECONDS_MAX, Patience, connection
from babelbus.spark.options import Place, parse
from babelbus.spark.schema import full_schema
from babelbus.spark.server import FETCH_BYTES, ServerReach
from babelbus.spark.stream import StreamReader
from tests.spark.relay import Relay
from tests.spark.support import NOW, numbered
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.clock import ManualClock
from tests.support.server import LiveServer, configure, configure_to_return

LOGGER = "babelbus.spark.connection"
LONG_SECONDS = 3600.0
"""Who waits for as long as that is not to be seen again: so what raises under it raises at once."""


class Waiting(logging.Handler):
    """Tells when somebody begins to wait, and keeps what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {record.getMessage()}")
        self.begun.set()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    handler = Waiting()
    logging.getLogger(LOGGER).addHandler(handler)
    yield handler
    logging.getLogger(LOGGER).removeHandler(handler)


def place_of(live: LiveServer, seconds: float = 60, **more: str) -> Place:
    given = {"address": live.address, "identity": str(live.conf / "admin_key")} | more
    return Place(timeout_seconds=seconds, **given)


def publish(live: LiveServer, records: list[Record]) -> None:
    with BlockingClient(live.address, identity=live.admin) as client:
        client.publish_many("news", records)


def make(live: LiveServer) -> None:
    live.call(lambda: live.server.broker.create_topic("news", 1, {}, SERVER))


def payloads(reach: ServerReach, end: int) -> list[bytes | None]:
    return [record.payload for columns in reach.read("news", 0, 0, end) for record in iterate(columns)]


def was_away(waiting: Waiting, address: str, times: int = 1) -> bool:
    """Say whether it was told once each time that a wait began, and once that it was over."""
    away = rf"WARNING no connection to {re.escape(address)}, trying again for [\d.]+ s: .+"
    back = rf"WARNING {re.escape(address)} is back after [\d.]+ s"
    wanted = [away, back] * times
    return len(waiting.said) == len(wanted) and all(map(re.fullmatch, wanted, waiting.said))


def test_a_query_that_begins_while_the_server_is_away_waits_for_it(tmp_path: Path, waiting: Waiting) -> None:
    config = configure_to_return(tmp_path / "data")
    with LiveServer(config) as live:
        make(live)
        publish(live, numbered(10))
        address, key = live.address, str(live.conf / "admin_key")
    given = {"url": address, "identity": key, "subscribe": "news", "startingOffsets": "earliest"}
    reader = StreamReader(parse(given, "stream"), full_schema(include_headers=False))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: reader.latestOffset(reader.initialOffset(), ReadAllAvailable()))
        assert waiting.begun.wait(SAFETY_NET_SECONDS)
        assert not asked.done()
        with LiveServer(config):
            end = asked.result(SAFETY_NET_SECONDS)
    assert end["news"] == {"0": 10}
    assert was_away(waiting, address)


def test_a_read_goes_on_when_the_server_was_away_between_two_fetches(tmp_path: Path, waiting: Waiting) -> None:
    records = [Record(b"%06d" % n * 1000, timestamp=NOW) for n in range(5000)]  # 30 MB, four fetches
    config = configure_to_return(tmp_path / "data")
    with LiveServer(config) as live:
        make(live)
        publish(live, records)
        address = live.address
        reach = ServerReach(place_of(live))
        chunks = reach.read("news", 0, 0, 5000)
        found = [record.payload for record in iterate(next(chunks))]
        # The fetch that goes out meanwhile may have been answered: one of those behind it meets nobody.
        found += [record.payload for record in iterate(next(chunks))]
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: [record.payload for columns in chunks for record in iterate(columns)])
        assert waiting.begun.wait(SAFETY_NET_SECONDS)
        with LiveServer(config):
            found += rest.result(SAFETY_NET_SECONDS)
            reach.close()
    assert found == [record.payload for record in records]
    assert was_away(waiting, address)


def test_an_answer_that_breaks_off_in_the_middle_is_asked_for_again(tmp_path: Path, waiting: Waiting) -> None:
    records = [Record(b"%06d" % n * 1000, timestamp=NOW) for n in range(3000)]
    with LiveServer(configure(tmp_path / "data")) as live:
        make(live)
        publish(live, records)
        with Relay(live.address, [10_000, FETCH_BYTES // 2, FETCH_BYTES + FETCH_BYTES // 2]) as relay:
            reach = ServerReach(place_of(live, address=relay.address))
            assert payloads(reach, 3000) == [record.payload for record in records]
            assert relay.connections == 4
            assert was_away(waiting, relay.address, 3)
            reach.close()


def test_a_server_that_ends_every_answer_in_the_middle_is_away(tmp_path: Path, waiting: Waiting) -> None:
    with LiveServer(configure(tmp_path / "data")) as live:
        make(live)
        publish(live, [Record(b"x" * 10_000, timestamp=NOW)])
        with Relay(live.address, [5_000] * 10_000) as relay:
            reach = ServerReach(place_of(live, 0.3, address=relay.address))
            with pytest.raises(ConnectionLostError, match=r"for 0.3 s \(option requestTimeoutMs\): "):
                payloads(reach, 1)
            reach.close()


def test_an_error_that_waiting_does_not_mend_is_raised_at_once(tmp_path: Path, waiting: Waiting) -> None:
    with LiveServer(configure(tmp_path / "data")) as live:
        Identity.generate().save(tmp_path / "stranger")
        (tmp_path / "no key").write_text("no key\n", encoding="ascii")
        (tmp_path / "no key").chmod(0o600)
        for error, more in (
            (UntrustedServerError, {"fingerprint": "0" * 64}),
            (NotAuthorisedError, {"identity": str(tmp_path / "stranger")}),
            (IdentityError, {"identity": str(tmp_path / "no key")}),
        ):
            place = place_of(live, LONG_SECONDS, **more)
            with pytest.raises(error):
                ServerReach(place).topics()
            with pytest.raises(error), connection(place):
                pass


def test_another_server_at_the_same_address_is_not_believed_by_the_query_that_knows_the_first(
    tmp_path: Path,
) -> None:
    config = configure_to_return(tmp_path / "one")
    with LiveServer(config) as live:
        make(live)
        reach = ServerReach(place_of(live, LONG_SECONDS))
        assert reach.topics() == ["$state", "news"]
    with LiveServer(configure(tmp_path / "two", jebp=config.jebp)), pytest.raises(UntrustedServerError):
        reach.topics()
    reach.close()


def test_pauses_grow_and_end_with_the_time_that_a_server_may_be_away() -> None:
    clock, pauses = ManualClock(), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock.advance(seconds)

    patience = Patience(Place(address="bus:1", timeout_seconds=20), clock, sleep)
    clock.advance(1000)  # a request that was answered late: it counts from the first failure on
    wanted = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, PAUSE_SECONDS_MAX, PAUSE_SECONDS_MAX, 3.7]
    for _ in wanted:
        patience.wait(ConnectionLostError("gone"))
    with pytest.raises(ConnectionLostError, match=r"no connection to bus:1 for 20 s \(option requestTimeoutMs\): gone"):
        patience.wait(ConnectionLostError("gone"))
    assert pauses == pytest.approx(wanted)


def test_a_refusal_is_believed_when_it_is_said_twice_for_a_server_that_stops_says_it_too() -> None:
    clock = ManualClock()
    patience = Patience(Place(address="bus:1", timeout_seconds=20), clock, clock.advance)
    refused = NotAuthorisedError("ab")
    for error in (refused, ConnectionLostError("stopped"), refused):
        patience.wait(error)
    with pytest.raises(NotAuthorisedError):
        patience.wait(refused)
