"""Four protocols on one bus: part of `make demo`.

Airlines and aircraft of the data package become state through Wörterbuch; sbus, Wörterbuch and EventMesh subscribers
hear the flights that jebp publishes. Everything that arrives is compared with the source.
"""

import json
import socket
import threading
from collections.abc import Iterator

import msgspec

from babelbus.client import BlockingClient, Record
from babelbus.clients.sbus import Client as SbusClient
from babelbus.protocols.sbus.messages import Publish
from examples.flights import airlines, planes
from examples.mesh import Listener

TOPIC = "departures"
JSON_HEADER = ((b"content-type", b"application/json"),)
SECONDS = 60.0
READ_BYTES = 2**20


class Lines:
    """A Wörterbuch connection in its simplest form: JSON lines over TCP, as any shell script could speak it."""

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=SECONDS)
        self._rest = b""
        self._found: list[bytes] = []
        assert "welcome" in self.receive()
        self.send({"authorizationRequest": {"authToken": token}})
        assert "authorized" in self.receive()

    def send(self, *messages: object) -> None:
        """Send messages, each a line."""
        self._socket.sendall(b"".join([msgspec.json.encode(message) + b"\n" for message in messages]))

    def receive(self) -> dict[str, dict[str, object]]:
        """Return the next message of the server."""
        while not self._found:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise SystemExit("demo: the server closed the connection")
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._found = lines[::-1]
        found: dict[str, dict[str, object]] = json.loads(self._found.pop())
        return found

    def close(self) -> None:
        """End it."""
        self._socket.close()


def reference_data() -> Iterator[tuple[str, object]]:
    """Yield key and value of all airlines and aircraft."""
    for airline in airlines():
        yield f"airlines/{airline.carrier}", {"name": airline.name}
    for plane in planes():
        yield f"aircraft/{plane.tailnum}", msgspec.to_builtins(plane)


def set_state(address: str, token: str) -> int:
    """Set all airlines and aircraft, each acknowledged; return how many."""
    lines = Lines(address, token)
    pairs = list(reference_data())
    lines.send(
        *(
            {"set": {"transactionId": number, "key": key, "value": value}}
            for number, (key, value) in enumerate(pairs, 1)
        )
    )
    for number in range(1, len(pairs) + 1):
        answer = lines.receive()
        if answer != {"ack": {"transactionId": number}}:
            raise SystemExit(f"demo: a set was not acknowledged: {answer}")
    lines.close()
    return len(pairs)


def compare_state(address: str, token: str) -> int:
    """Read the whole tree and compare it with the source; return how many keys were right."""
    wanted = dict(reference_data())
    lines = Lines(address, token)
    found: dict[str, object] = {}
    for number, pattern in enumerate(("airlines/#", "aircraft/#"), 1):
        lines.send({"pGet": {"transactionId": number, "requestPattern": pattern}})
        pairs: list[dict[str, object]] = lines.receive()["pState"]["keyValuePairs"]  # type: ignore[assignment]
        found.update({str(pair["key"]): pair["value"] for pair in pairs})
    lines.close()
    if found != wanted:
        raise SystemExit(f"demo: {len(found):,} keys came back and are not the {len(wanted):,} that were set")
    return len(found)


def hear(
    jebp: BlockingClient, addresses: dict[str, str], token: str, password: str, records: list[Record]
) -> tuple[int, int, int]:
    """Publish flights through jebp; return how many sbus, Wörterbuch and EventMesh subscribers heard, all equal."""
    jebp.create_topic(TOPIC)
    mesh = Listener(addresses["eventmesh-tcp"], password, TOPIC, len(records))
    subscriber = Lines(addresses["worterbuch-tcp"], token)
    subscriber.send({"pSubscribe": {"transactionId": 1, "requestPattern": "#", "unique": False, "liveOnly": True}})
    assert "ack" in subscriber.receive()
    with SbusClient(addresses["sbus"], timeout_seconds=SECONDS) as listener:
        listener.subscribe(TOPIC.encode())
        listener.control(b"!/cred/whoami")  # its answer says that the subscription stands
        listener.receive()
        heard: dict[str, list[object]] = {"sbus": [], "worterbuch": []}

        def listen() -> None:
            while len(heard["sbus"]) < len(records):
                message = listener.receive()
                assert isinstance(message, Publish)
                heard["sbus"].append(message.payload)

        def watch() -> None:
            while len(heard["worterbuch"]) < len(records):
                pairs: list[dict[str, object]] = subscriber.receive()["pState"]["keyValuePairs"]  # type: ignore[assignment]
                heard["worterbuch"] += [pair["value"] for pair in pairs if pair["key"] == TOPIC]

        threads = [*(threading.Thread(target=one, daemon=True) for one in (listen, watch)), mesh]
        for thread in threads:
            thread.start()
        tagged = [Record(record.payload, record.key, JSON_HEADER, record.timestamp) for record in records]
        jebp.publish_many(TOPIC, tagged)
        for thread in threads:
            thread.join(SECONDS)
    subscriber.close()
    payloads = [record.payload or b"" for record in records]
    if heard["sbus"] != payloads:
        raise SystemExit(f"demo: the sbus listener heard {len(heard['sbus']):,} events that are not those published")
    if heard["worterbuch"] != [json.loads(payload) for payload in payloads]:
        raise SystemExit(f"demo: the subscriber heard {len(heard['worterbuch']):,} events, not those published")
    if mesh.heard != payloads:
        raise SystemExit(f"demo: EventMesh heard {len(mesh.heard):,} events that are not those published")
    return len(heard["sbus"]), len(heard["worterbuch"]), len(mesh.heard)
