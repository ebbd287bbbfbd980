"""The members of a cluster, each a process that can be killed, paused and started again."""

import http.client
import itertools
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from babelbus.config import (
    AdminSettings,
    ClusterSettings,
    Config,
    JebpSettings,
    JetstreamSettings,
    TopicDefaults,
    WorterbuchSettings,
)
from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.identity import Identity
from babelbus.testing.ports import free_ports
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.child import Child
from tests.support.cluster import until
from tests.support.jebp import Caller, create, fetch, fetched, said, subscribe
from tests.support.nats import NatsServer, Relay
from tests.support.server import configure

_prefixes = itertools.count()


class Party:
    """The members of one cluster, each a process with fixed ports."""

    def __init__(self, nats: NatsServer, folder: Path, lease_seconds: float = 4.0) -> None:
        self.prefix = f"members{next(_prefixes)}"
        self.folder = folder
        self._url, self._lease_seconds = nats.url, lease_seconds
        self._stack = ExitStack()
        self.children: dict[str, Child] = {}
        self._ports: dict[str, list[int]] = {}
        self._certificates: dict[str, dict[str, str]] = {}
        self._advertised: dict[str, str] = {}

    def secure(self, name: str, authority: Authority, trusted: Authority | None = None) -> None:
        """Let a member show a certificate of an authority at its links, and trust that one or another one."""
        cert_file, key_file = authority.issue(name)
        ca_file = (trusted or authority).path
        self._certificates[name] = {"cert_file": str(cert_file), "key_file": str(key_file), "ca_file": str(ca_file)}

    def advertise(self, name: str) -> Relay:
        """Let the other members reach a member over a way of its own."""
        way = Relay(self._ports.setdefault(name, free_ports(3))[2])
        self._advertised[name] = way.address
        return way

    def config(self, name: str, url: str | None = None) -> Config:
        ports = self._ports.setdefault(name, free_ports(3))
        return msgspec.structs.replace(
            configure(
                self.folder / name,
                jebp=JebpSettings(port=ports[0]),
                topics=TopicDefaults(engine="jetstream"),
                worterbuch=WorterbuchSettings(port=0, tcp_port=0, deflate=True),
            ),
            admin=AdminSettings(port=ports[1]),
            jetstream=JetstreamSettings(
                url or self._url, prefix=self.prefix, replicas=1, shards=2, lease_seconds=self._lease_seconds
            ),
            cluster=ClusterSettings(
                enabled=True,
                name=name,
                port=ports[2],
                advertise=self._advertised.get(name),
                **self._certificates.get(name, {}),
            ),
        )

    def start(self, name: str, url: str | None = None) -> Child:
        child = self._stack.enter_context(Child(self.config(name, url)))
        self.children[name] = child
        return child

    def ask(self, name: str, path: str, method: str = "GET", body: Any = None) -> tuple[int, Any]:
        """Ask the administration endpoint of a member; 0 stands for a connection that ended."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[name][1], timeout=SAFETY_NET_SECONDS)
        token = self.token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def token(self) -> str:
        found = [path / "conf" / "admin_token" for path in self.folder.iterdir()]
        return next((path.read_text().strip() for path in found if path.exists()), "")

    def owner(self, name: str, above: int = 0) -> dict[str, Any]:
        """Return the status of the cluster as a member passes it on, once its epoch is above a number."""
        found: dict[str, Any] = {}

        def look() -> bool:
            status, answer = self.ask(name, "/api/cluster")
            if status == 200:
                found.update(answer)
            return status == 200 and bool(answer["epoch"] > above)

        assert until(look), f"member {name} reaches no owner"
        return found

    def until_all_present(self, name: str, *others: str) -> None:
        def look() -> bool:
            members = self.owner(name)["members"]
            return {one["name"] for one in members if one["role"] in ("owner", "member")} == {*others}

        assert until(look), f"not all of {others} are members"

    def move(self, name: str, to: str) -> None:
        """Move the data to a member, asking another one; again if the heir is slower than the time that it has."""

        def is_moved() -> bool:
            found = self.owner(name)
            if found["owner"] != to:
                status, answer = self.ask(name, "/api/cluster/move", "POST", {"to": to})
                if status == 202:
                    found = self.owner(name, above=answer["epoch"])
            return bool(found["owner"] == to)

        assert until(is_moved), f"the data does not move to {to}"

    def until_ready(self, name: str) -> None:
        assert until(lambda: self.ask(name, "/ready")[0] == 200), f"member {name} is not ready"

    def until_not_ready(self, name: str, reason: str) -> str:
        """Return why a member is not ready, once a reason holds some text."""
        reasons: list[str] = []

        def look() -> bool:
            status, answer = self.ask(name, "/ready")
            reasons[:] = answer["reasons"] if status == 503 else []
            return reason in str(reasons)

        assert until(look), f"member {name} does not say {reason!r}"
        return reasons[0]

    def admin(self) -> Identity:
        found = [path / "conf" / "admin_key" for path in self.folder.iterdir()]
        return Identity.load(next(path for path in found if path.exists()))

    def caller(self, name: str) -> Caller:
        """Connect through a member, once it is ready."""
        while True:
            self.until_ready(name)
            caller = Caller(f"127.0.0.1:{self._ports[name][0]}", self.admin())
            try:
                return caller.connect()
            except (OSError, RemoteProtocolError):  # the owner changes just now
                caller.close()

    def publish(self, name: str, *payloads: bytes) -> None:
        """Publish through a member, which may change its role meanwhile, until each payload is acknowledged."""
        for payload in payloads:
            while True:
                with self.caller(name) as caller:
                    try:
                        if said(caller.ask(create("orders", payload))[0]) == "a130":
                            break
                    except OSError:
                        continue

    def read(self, name: str, topic: str = "orders") -> list[bytes | None]:
        with self.caller(name) as caller:
            _, answer = caller.ask(subscribe(topic), fetch(0))
            return fetched(answer)[topic, 0]

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self._ports[name][0]}"

    def save_admin(self, path: Path) -> Path:
        """Save the key of the administrator."""
        self.admin().save(path)
        return path

    def close(self) -> None:
        self._stack.close()


def make_topic(party: Party, name: str, topic: str = "orders") -> None:
    status, answer = party.ask(name, "/api/topics", "POST", {"name": topic, "partitions": 1})
    assert status == 201, answer
