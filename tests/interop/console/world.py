"""A server with something on every page of the console: the demo's flights, and clients of all protocols."""

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from itertools import islice
from typing import Any, TypeVar

from babelbus.client import Record
from babelbus.clients.sbus import Client as SbusClient
from babelbus.clients.worterbuch.blocking import BlockingClient as TreeClient
from babelbus.testing import Server
from examples.flights import flights
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import MeshClient
from tests.support.zbus import HttpClient

FLIGHTS = 2_000
PASSWORD = "correct horse battery staple"

T = TypeVar("T")
Cookie = tuple[str, str]
"""Name and value of the cookie of a log-in."""


class World:
    """A server, its address for browsers, and the clients that stay connected to it."""

    def __init__(self, server: Server, stack: contextlib.ExitStack) -> None:
        self.server = server
        self.stack = stack
        self.token = (server.folder / "conf" / "admin_token").read_text(encoding="ascii").strip()
        self.client = stack.enter_context(server.blocking_client(request_timeout_seconds=SAFETY_NET_SECONDS))
        self._cookie: Cookie | None = None

    @property
    def url(self) -> str:
        return f"http://{self.server.addresses['admin']}"

    def request(self, method: str, path: str, body: object = None, *, cookie: str | None = None) -> HTTPResponse:
        """Send a request of administration with the token, or with the cookie of a window; its answer may go on."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        proof = {"Authorization": f"Bearer {self.token}"}
        if cookie is not None:
            proof = {"Cookie": cookie, "X-Babelbus-Console": "1"}
        request = urllib.request.Request(self.url + path, data, proof, method=method)
        try:
            response: HTTPResponse = urllib.request.urlopen(request, timeout=SAFETY_NET_SECONDS)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()}") from error
        return response

    def ask(self, method: str, path: str, body: object = None, *, cookie: str | None = None) -> Any:
        """Return what the answer to a request says."""
        with self.request(method, path, body, cookie=cookie) as response:
            return json.load(response)

    def log_in(self, **proof: str) -> Cookie:
        """Log in, by default as the administrator."""
        headers = {"X-Babelbus-Console": "1", "Content-Type": "application/json"}
        body = json.dumps(proof or {"token": self.token}).encode()
        request = urllib.request.Request(f"{self.url}/api/console/login", body, headers)
        with urllib.request.urlopen(request, timeout=SAFETY_NET_SECONDS) as response:
            name, _, rest = response.headers["Set-Cookie"].partition("=")
        return name, rest.partition(";")[0]

    @property
    def cookie(self) -> Cookie:
        """The log-in that windows of the administrator share."""
        if self._cookie is None:
            self._cookie = self.log_in()
        return self._cookie

    def wait(self, path: str, condition: Callable[[Any], T]) -> T:
        """Ask for a path again and again until its answer meets a condition; return what the condition found."""
        deadline = time.monotonic() + SAFETY_NET_SECONDS
        while not (found := condition(self.ask("GET", path))):
            assert time.monotonic() < deadline, f"{path} does not change"
        return found

    def set(self, values: dict[str, Any]) -> None:
        """Set values of the state."""
        entries = [{"key": key, "value": value} for key, value in values.items()]
        self.ask("POST", "/api/state/values", {"values": entries})

    def create(self, topic: str, **body: object) -> None:
        """Create a topic."""
        self.ask("POST", "/api/topics", {"name": topic, **body})


@contextlib.contextmanager
def running(settings: dict[str, Any] | None = None) -> Iterator[World]:
    """Run a server without data."""
    with Server(settings) as server, contextlib.ExitStack() as stack:
        yield World(server, stack)


@contextlib.contextmanager
def filled(settings: dict[str, Any] | None = None) -> Iterator[World]:
    """Run a server on which each page of the console has something to show."""
    with running(settings) as world:
        publish(world)
        speak(world)
        keep_state(world)
        consume(world)
        tell(world)
        yield world


def publish(world: World) -> None:
    """Publish flights, and orders over jebp."""
    world.create("flights", partitions=4)
    world.client.publish_many(
        "flights", [Record(one.payload, one.key, timestamp=one.timestamp_ms) for one in islice(flights(), FLIGHTS)]
    )
    world.create("orders")
    for number in range(40):
        order = {"id": number, "customer": {"name": f"customer {number % 7}", "country": "AT"}, "total": number * 9.5}
        headers = ((b"content-type", b"application/json"), (b"trace", b"%032x" % number))
        world.client.publish("orders", json.dumps(order).encode(), key=b"customer-%d" % (number % 7), headers=headers)


def speak(world: World) -> None:
    """Publish over each protocol, and stay connected."""
    addresses, enter = world.server.addresses, world.stack.enter_context
    world.create("bus")
    world.client.publish("bus", b"from jebp")
    zbus = enter(HttpClient(addresses["zbus"]))
    zbus.do("create", mq="bus", channel="workers")
    assert zbus.do("pub", b"from zbus", mq="bus").status == 200
    tree = enter(TreeClient(f"tcp://{addresses['worterbuch-tcp']}"))
    tree.publish("bus", {"from": "worterbuch"})
    tree.subscribe("bus")
    sbus = enter(contextlib.closing(SbusClient(addresses["sbus"])))
    sbus.subscribe(b"plant/+/temp")
    sbus.publish(b"bus", b"from sbus")
    mesh = enter(MeshClient(addresses["eventmesh-tcp"])).hello("pub", group="p")
    assert (
        mesh.ask("ASYNC_MESSAGE_TO_SERVER", {"topic": "bus", "body": "from eventmesh", "properties": {}})["code"] == 0
    )


def keep_state(world: World) -> None:
    """Set values, some of them more than once; hold a lock, and keep a will."""
    state = world.client.state
    for step in range(5):
        state.set_many({f"plant/line{line}/temp": 20 + line + step / 2 for line in range(1, 4)})
    state.set("plant/line1/config", {"limits": {"low": 5, "high": 90}, "unit": "°C"})
    state.compare_and_set("plant/line1/owner", "anna", 0)
    state.set("plant/line2/old", "gone soon")
    state.delete("plant/line2/old")
    state.will(delete=["plant/line3/temp"], set={"plant/line3/status": "offline"})
    world.stack.enter_context(state.lock("plant/line1/lock"))


def consume(world: World) -> None:
    """Consume orders: some are done, some in flight, two are dead letters, the rest wait for others of their key."""
    settings = {"ack": "explicit", "attempts_max": 1, "ack_seconds": 3600}
    group = {"name": "billing", "topic": "orders", "settings": settings, "start": {"at": "beginning"}}
    world.ask("POST", "/api/groups", group)
    consumer = world.client.consume("orders", "billing", window=20)
    world.stack.callback(consumer.leave)
    messages = [next(consumer) for _ in range(12)]
    for number, message in enumerate(messages):
        if number < 6:
            message.ack()
        elif number < 8:
            message.reject()
    # The first member holds a record of each key for good: all that is left waits behind them, whatever has been read.
    second = world.client.consume("orders", "billing", window=20)
    world.stack.callback(second.leave)
    second.join()
    world.wait("/api/topics/orders/groups/billing", lambda group: group["lag"] == group["in_flight"] == 32)


def tell(world: World) -> None:
    """Report a pipeline, and name principals."""
    graph = [
        {"name": "flights", "kind": "source", "about": "topic flights"},
        {"name": "delays", "kind": "sql", "about": "SELECT origin, avg(dep_delay)", "inputs": ["flights"]},
        {"name": "parquet", "kind": "sink", "about": "parquet /data/delays", "inputs": ["delays"]},
    ]
    sink = {"rows_in": 2_000, "rows_out": 1_950, "rows_late": 50, "batches": 7, "batch_seconds": 3.5, "running": True}
    failed = {"rows_in": 90, "batches": 1, "failures": 2, "error": "the table delays has no column origin", "graph": []}
    world.ask("PUT", "/api/pipelines/delays", {"sinks": {"parquet": sink | {"lag_records": 12, "graph": graph}}})
    world.ask("PUT", "/api/pipelines/alerts", {"sinks": {"orders": failed}})
    issue = [{"kind": "password", "password": PASSWORD}]
    world.ask("POST", "/api/principals", {"name": "anna", "roles": ["operators"], "issue": issue})
    world.ask("POST", "/api/principals", {"name": "acme", "root": "tenants/acme", "issue": issue})
    rows = [("role:operators", "read", "orders/#", "allow"), ("role:operators", "subscribe", "plant/#", "allow")]
    rows += [
        ("acme", action, "tenants/acme/#", "allow") for action in ("read", "publish", "subscribe", "consume", "manage")
    ]
    rows += [("anna", "publish", "orders/secret/#", "deny")]
    fields = ("who", "action", "pattern", "effect")
    world.ask("POST", "/api/access/rows", {"rows": [dict(zip(fields, row, strict=True)) for row in rows]})
