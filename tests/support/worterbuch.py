"""Scripted Wörterbuch clients: the real sessions on a real broker, with a transport that only remembers."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

from babelbus.config import WorterbuchSettings
from babelbus.core.settings import TopicSettings
from babelbus.core.state import KEY_BYTES_MAX
from babelbus.errors import PeerLeavesError, RemoteProtocolError
from babelbus.identities.guessing import Guessing
from babelbus.listening.certificates import PeerCertificate
from babelbus.protocols.contract import Outbox
from babelbus.protocols.worterbuch.continuation import KeptSession
from babelbus.protocols.worterbuch.gatekeeper import Gatekeeper, Names
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.lines import LineSession
from babelbus.protocols.worterbuch.names import USUAL, Symbols
from babelbus.protocols.worterbuch.privileges import Verifier
from babelbus.protocols.worterbuch.profiles import MAIN, Endpoint, Profile
from babelbus.storage.files import FileSystem
from tests.support.bus import LOOK_SECONDS, Bus

BYTES_MAX = 2**20


class Transport:
    """Takes everything at once, or while `stuck` nothing."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.stuck = False
        self._held = 0

    def write(self, data: bytes | bytearray) -> None:
        self.written += data
        if self.stuck:
            self._held += len(data)

    def get_write_buffer_size(self) -> int:
        return self._held

    def let_go(self) -> None:
        """Take what was held."""
        self.stuck, self._held = False, 0


class Talker:
    """One client on lines. `ended` is why its connection was ended; `aborted` says that the hub lost patience."""

    def __init__(
        self,
        hub: Hub,
        *,
        profile: Profile = MAIN,
        symbols: Symbols = USUAL,
        transport_name: str = "TCP",
        address: str | None = "10.0.0.1:5",
        greeted: bool = True,
        bytes_max: int = BYTES_MAX,
        certificate: PeerCertificate | None = None,
        kept: KeptSession | None = None,
    ) -> None:
        self.transport = Transport()
        self.outbox = Outbox(self.transport, bytes_max)
        self.outbox.peer_certificate = certificate
        self.ended: RemoteProtocolError | PeerLeavesError | None = None
        self.aborted = False
        self._read = 0
        self.lines = LineSession(
            hub,
            self.outbox,
            self._abort,
            endpoint=Endpoint(profile, symbols),
            transport_name=transport_name,
            address=address,
            kept=kept,
        )
        self.session = self.lines.session
        self.id = self.session.client_id
        if greeted:
            self.heard()

    def _abort(self) -> None:
        self.aborted = True

    def say_bytes(self, data: bytes) -> None:
        """Let a chunk arrive, as a connection does."""
        self.outbox.holding = True
        try:
            self.lines.receive_data(data)
        except (RemoteProtocolError, PeerLeavesError) as error:
            self.ended = error
        self.outbox.release()

    def say(self, *messages: object) -> None:
        """Send messages in one chunk."""
        self.say_bytes(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def heard(self) -> list[Any]:
        """Everything that came since the last look."""
        new = bytes(self.transport.written[self._read :])
        self._read += len(new)
        assert new.isascii()
        assert new == b"" or new.endswith(b"\n")
        return [json.loads(line) for line in new.splitlines()]

    def ask(self, *messages: object) -> list[Any]:
        """Send messages and give everything that comes."""
        self.say(*messages)
        return self.heard()

    def one(self, message: object) -> Any:
        """Send a message and give the one that comes."""
        [answer] = self.ask(message)
        return answer

    def code(self, message: object) -> int | None:
        """Send a message and give the error that it gets, `None` for another answer."""
        answer = self.ask(message)[0]
        return answer["err"]["errorCode"] if "err" in answer else None

    def leave(self) -> None:
        """Let the connection end."""
        self.outbox.close()
        self.lines.close()


def make_hub(
    files: FileSystem | None = None,
    *,
    ack: str = "written",
    topics: TopicSettings | None = None,
    key_bytes_max: int = KEY_BYTES_MAX,
    key: str | None = None,
    access: Literal["off", "enforce"] = "off",
    wildcards: Literal["narrow", "refuse"] = "narrow",
    by_names: Callable[[Names], str | None] = lambda names: None,
    since: int | None = None,
    **settings: Any,
) -> tuple[Bus, Hub]:
    """A hub on a bus of its own."""
    bus = Bus(files, defaults=topics)
    bus.open_gate(access, wildcards)
    bus.open_state(ack=ack, key_bytes_max=key_bytes_max, since=since)
    keeper = Gatekeeper(
        bus.broker,
        bus.clock,
        Guessing(bus.clock, bus.metrics),
        key=key,
        verifier=None if key is None else Verifier(key),
        by_names=by_names,
    )
    hub = Hub(bus.broker, bus.metrics, bus.clock, WorterbuchSettings(**settings), keeper)
    bus.broker.gate.on_changed.append(hub.access_changed)  # as the server's service does
    return bus, hub


def get(tid: int, key: str) -> dict[str, Any]:
    return {"get": {"transactionId": tid, "key": key}}


def put(tid: int, key: str, value: object) -> dict[str, Any]:
    return {"set": {"transactionId": tid, "key": key, "value": value}}


def publish(tid: int, key: str, value: object) -> dict[str, Any]:
    return {"publish": {"transactionId": tid, "key": key, "value": value}}


def delete(tid: int, key: str) -> dict[str, Any]:
    return {"delete": {"transactionId": tid, "key": key}}


def pdelete(tid: int, pattern: str, *, quiet: bool | None = None) -> dict[str, Any]:
    return {"pDelete": {"transactionId": tid, "requestPattern": pattern, "quiet": quiet}}


def pget(tid: int, pattern: str) -> dict[str, Any]:
    return {"pGet": {"transactionId": tid, "requestPattern": pattern}}


def subscribe(tid: int, key: str, **options: object) -> dict[str, Any]:
    return {"subscribe": {"transactionId": tid, "key": key, "unique": False, **options}}


def psubscribe(tid: int, pattern: str, **options: object) -> dict[str, Any]:
    return {"pSubscribe": {"transactionId": tid, "requestPattern": pattern, "unique": False, **options}}


def named(name: str, tid: int, key: str) -> dict[str, Any]:
    """A request that has a key and nothing else."""
    return {name: {"transactionId": tid, "key": key}}


def ack(tid: int) -> dict[str, Any]:
    return {"ack": {"transactionId": tid}}


def state(tid: int, value: object) -> dict[str, Any]:
    return {"state": {"transactionId": tid, "value": value}}


def state_deleted(tid: int, value: object) -> dict[str, Any]:
    return {"state": {"transactionId": tid, "deleted": value}}


def pairs(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def pstate(tid: int, pattern: str, values: dict[str, Any]) -> dict[str, Any]:
    return {"pState": {"transactionId": tid, "requestPattern": pattern, "keyValuePairs": pairs(values)}}


def pstate_deleted(tid: int, pattern: str, values: dict[str, Any]) -> dict[str, Any]:
    return {"pState": {"transactionId": tid, "requestPattern": pattern, "deleted": pairs(values)}}


def names(tid: int, *children: str) -> dict[str, Any]:
    return {"lsState": {"transactionId": tid, "children": list(children)}}


SWITCH = {"protocolSwitchRequest": {"version": 1}}


def ls(tid: int, parent: str | None = None) -> dict[str, Any]:
    return {"ls": {"transactionId": tid, "parent": parent}}


def pls(tid: int, pattern: str | None = None) -> dict[str, Any]:
    return {"pLs": {"transactionId": tid, "parentPattern": pattern}}


def cget(tid: int, key: str) -> dict[str, Any]:
    return named("cGet", tid, key)


def cset(tid: int, key: str, value: object, version: int) -> dict[str, Any]:
    return {"cSet": {"transactionId": tid, "key": key, "value": value, "version": version}}


def unsubscribe(tid: int) -> dict[str, Any]:
    return {"unsubscribe": {"transactionId": tid}}


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop go round until a condition holds."""
    while not condition():  # noqa: ASYNC110  # what it asks for has no event of its own
        await asyncio.sleep(LOOK_SECONDS)
