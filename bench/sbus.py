"""sbus end to end: a `babelbus serve` process, one publisher process, receivers that read all. 100-byte payloads.

The peer is bench/peers/relay.c: a C program with the system calls of the reference daemon, which is in no package.
The targets are what it reached on a quiet machine with 2 cores at 2.5 GHz.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from babelbus.clients.sbus import Client
from babelbus.protocols.sbus.codec import encode
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX, Publish
from babelbus.protocols.sbus.packets.mmsg import Exchange
from babelbus.wire.packets import Packets
from bench.frame import Peer, PeerMissingError, Reading, figure
from bench.workload import PAYLOAD, SECONDS, scratch_folder

BATCH = 32
WARM_UP_SECONDS = 0.3
TURNS_PER_LOOK = 64
KEYS = 16

Serve = Callable[[], AbstractContextManager[tuple[str, int]]]
"""Runs a bus; gives its address and process."""


@contextmanager
def ours() -> Iterator[tuple[str, int]]:
    """Run `babelbus serve`: topics, jebp and administration are there too."""
    with scratch_folder() as folder:
        command = [str(Path(sys.executable).parent / "babelbus"), "serve", "--json", "--data-folder", f"{folder}/data"]
        options = ["--server-any-port", "--log-level", "error"]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["addresses"]["sbus"], process.pid
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def relay() -> Iterator[tuple[str, int]]:
    """Compile and run the C program."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise PeerMissingError("no C compiler (Debian and Ubuntu: apt-get install gcc)")
    with scratch_folder() as folder:
        source, binary, path = Path(__file__).parent / "peers" / "relay.c", f"{folder}/relay", f"{folder}/bus"
        subprocess.run([compiler, "-O2", "-o", binary, str(source)], check=True)
        process = subprocess.Popen([binary, path])
        try:
            while not os.path.exists(path):
                time.sleep(0.001)
            yield path, process.pid
        finally:
            process.kill()
            process.wait()


def _publisher(address: str) -> int:
    """Start a process that publishes as fast as the bus takes it; give its number."""
    child = os.fork()
    if child:
        return child
    try:
        exchange = Exchange(PACKET_BYTES_MAX)
        client = Client(address)
        client.socket.setblocking(False)
        packets = Packets.of([encode(Publish(b"bench/%d/x" % (one % KEYS), PAYLOAD)) for one in range(BATCH)])
        writable = select.poll()
        writable.register(client.socket, select.POLLOUT)
        while True:
            sent, error = 0, 0
            while sent < BATCH:
                done, error = exchange.send(client.socket, packets, sent, BATCH)
                sent += done
                if error:
                    writable.poll()
    finally:
        os._exit(0)


def _processor_seconds(pid: int) -> tuple[float, float]:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def _measure(address: str, pid: int, patterns: list[list[bytes]]) -> Reading:
    """Messages a second that all receivers got, each with its patterns; one publisher."""
    exchange = Exchange(PACKET_BYTES_MAX)
    receivers = []
    for wanted in patterns:
        client = Client(address, timeout_seconds=10)
        for pattern in wanted:
            client.subscribe(pattern)
        client.control(b"!/cred/whoami")
        client.receive_packet()
        receivers.append(client)
    poller = select.epoll()
    for client in receivers:
        client.socket.setblocking(False)
        poller.register(client.socket, select.EPOLLIN)
    publisher = _publisher(address)
    try:
        count, begun, before = 0, 0.0, (0.0, 0.0)
        started = time.perf_counter()
        while True:
            for _ in range(TURNS_PER_LOOK):
                for descriptor, _event in poller.poll():
                    count += exchange.receive(descriptor)
            now = time.perf_counter()
            if not begun:
                if now - started > WARM_UP_SECONDS:
                    count, begun, before = 0, now, _processor_seconds(pid)
            elif now - begun > SECONDS:
                break
        user, system = (after - one for after, one in zip(_processor_seconds(pid), before, strict=True))
        share = system / (user + system) if user + system else 0.0
        note = f"{share:.0%} of the bus's processor time in the kernel"
        return Reading(count / len(receivers) / (now - begun), note)
    finally:
        os.kill(publisher, signal.SIGKILL)
        os.waitpid(publisher, 0)
        poller.close()
        for client in receivers:
            client.close()


def fanning(serve: Serve, patterns: list[list[bytes]]) -> Iterator[Reading]:
    with serve() as (address, pid):
        while True:
            yield _measure(address, pid, patterns)


ONE = [[b"bench/"]]
TEN = [[b"bench/"]] * 10
# One receiver; the pattern that fits is the last of a thousand.
THOUSAND = [[*(b"other/%d/*" % number for number in range(999)), b"bench/*/x"]]


def peer(patterns: list[list[bytes]]) -> Peer:
    return Peer("C relay", lambda: fanning(relay, patterns))


@figure("sbus.fanout_1", unit="messages/s", target=126_000, peers=[peer(ONE)])
def fanout_1() -> Iterator[Reading]:
    """One publisher, one receiver."""
    return fanning(ours, ONE)


@figure("sbus.fanout_10", unit="messages/s", target=38_000, peers=[peer(TEN)])
def fanout_10() -> Iterator[Reading]:
    """One publisher, ten receivers of everything."""
    return fanning(ours, TEN)


@figure("sbus.patterns_1000", unit="messages/s", target=85_000, peers=[peer(THOUSAND)])
def patterns_1000() -> Iterator[Reading]:
    """One publisher, one receiver with a thousand patterns of which one fits."""
    return fanning(ours, THOUSAND)
