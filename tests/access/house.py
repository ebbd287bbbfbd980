"""A server whose gate is on, with a principal that can prove who it is at every door."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jwt
import msgspec

from babelbus.clock import Clock
from babelbus.config import AccessSettings, Config, EventmeshSettings, WorterbuchSettings, ZbusSettings
from babelbus.core.access import SERVER, Credential, Effect, Principal, Row
from babelbus.core.access.table import edits_for
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.core.request import NoRespondersError, Question, Reply
from babelbus.core.subject import EVERYTHING, exactly
from babelbus.identities.directory import make_certificate, make_process
from babelbus.identities.passwords import make_password
from babelbus.identities.tokens import make_token
from babelbus.identities.vault import Vault, make_api_key
from babelbus.protocols.jebp.identity import Identity as JebpIdentity
from tests.support.bus import SAFETY_NET_SECONDS, read
from tests.support.server import LiveServer, configure

ALICE, BOB = "alice", "bob"
PASSWORD = "correct horse battery staple"
JWT_SECRET = "the secret of tokens, long enough for every HMAC that there is"
TOPICS = ("walk/a", "walk/b", "walk/alice", "walk/bob", "end")
END = "end"
"""The subject that every listener may hear: behind its event nothing is under way any more."""
STANDING = (Row(ALICE, "subscribe", END),)
VALUE = b'{"v":1}'


class Proof(msgspec.Struct, frozen=True):
    """What one principal shows at the doors."""

    name: str
    identity: JebpIdentity
    key_file: str
    token: str
    password: str
    api_key: str
    api_secret: str
    jwt: str

    @property
    def secrets(self) -> dict[str, str]:
        """The texts that must never be seen anywhere, by what they are."""
        seed = Path(self.key_file).read_text(encoding="utf-8").split()[-1]
        return {
            "token": self.token[-43:],  # a `_` may be part of it
            "password": self.password,
            "API secret": self.api_secret,
            "JWT": self.jwt.rpartition(".")[2],
            "JWT secret": JWT_SECRET,
            "jebp key": seed,
        }


def configured(folder: Path) -> Config:
    """A configuration with the gate on, and every door open."""
    key_file = folder / "jwt_key"
    key_file.write_text(JWT_SECRET, encoding="utf-8")
    key_file.chmod(0o600)
    config = configure(
        folder / "data",
        admin=True,
        worterbuch=WorterbuchSettings(
            port=0, tcp_port=0, unix_path=str(folder / "worterbuch.socket"), auth_key_file=str(key_file)
        ),
        zbus=ZbusSettings(port=0, monitor_port=0, rpc_timeout_seconds=SAFETY_NET_SECONDS),
        eventmesh=EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, admin_port=0, webhook_networks="127.0.0.0/8"),
    )
    return msgspec.structs.replace(config, access=AccessSettings(mode="enforce"))


def json_token(name: str, *, key: str = JWT_SECRET, seconds: float = 3600) -> str:
    """A token of Wörterbuch that grants everything: the table is the narrower one."""
    everything = {"read": ["#"], "write": ["#"], "delete": ["#"], "profile": True, "web-login": True}
    claims = {"sub": name, "name": name, "exp": time.time() + seconds, "worterbuchPrivileges": everything}
    return jwt.PyJWS().encode(json.dumps(claims).encode(), key, "HS256", headers={"typ": "JWT"})


def row(text: str) -> Row:
    """The row of a line: `[deny] WHO ACTION PATTERN`."""
    words = text.split()
    effect = Effect.DENY if words[0] == "deny" else Effect.ALLOW
    who, action, pattern = words[-3:]
    return Row(who, action, pattern, effect)


class House(LiveServer):
    """The server; the test looks at what happens from inside, where nobody asks for rights."""

    def __init__(self, folder: Path, config: Config | None = None, *, clock: Clock | None = None) -> None:
        super().__init__(config or configured(folder), clock=clock)
        self.folder = folder
        self.heard: list[tuple[str, bytes | None]] = []
        self._rows: list[Row] = []
        self._number = 0

    def __enter__(self) -> Self:
        super().__enter__()
        self.broker = self.server.broker
        self.alice, self.bob = self.prove(ALICE, uid=os.getuid()), self.prove(BOB)
        self.run(self._make_topics)
        self.call(lambda: self.broker.subscribe(EVERYTHING, self._hear, principal=SERVER))
        self.change(*STANDING)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)

    def _hear(self, events: Sequence[Event]) -> None:
        self.heard += [(event.subject, event.payload) for event in events]

    async def _make_topics(self) -> None:
        for topic in TOPICS:
            await self.broker.create_topic(topic, principal=SERVER)
            await self.broker.publish(Publication(SERVER, "test", [Event(topic, VALUE)], topic)).wait()
            self.broker.state.set(topic, VALUE)
        await self.broker.state.commit("test").wait()

    # -- principals and rows -----------------------------------------------------------------------------------------

    def prove(
        self,
        name: str,
        *,
        uid: int | None = None,
        roles: tuple[str, ...] = ("walkers",),
        root: str | msgspec.UnsetType = msgspec.UNSET,
    ) -> Proof:
        """Make a principal with a proof of each kind."""
        now = int(time.time() * 1000)
        identity, key_file = JebpIdentity.generate(), str(self.folder / f"{name}_key")
        if not os.path.exists(key_file):
            identity.save(key_file)
        identity = JebpIdentity.load(key_file)
        token, password = make_token(now), f"{PASSWORD} of {name}"
        key = make_api_key(Vault(str(self.conf)), now, key=f"key-of-{name}")
        credentials = [
            make_certificate(identity.fingerprint, now),
            token.credential,
            make_password(password, now),
            key.credential,
            *([] if uid is None else [make_process(now, uid=uid)]),
        ]
        # A table that finds certificates by the id of their credential finds this one too.
        credentials[0] = msgspec.structs.replace(credentials[0], id=identity.fingerprint)
        kept = tuple(Credential(**msgspec.structs.asdict(one)) for one in credentials)
        self.change(Principal(name, roles, kept, root=root))
        return Proof(name, identity, key_file, token.secret, password, f"key-of-{name}", key.secret, json_token(name))

    @contextmanager
    def lend_process(self, name: str, root: str | msgspec.UnsetType = msgspec.UNSET) -> Iterator[Proof]:
        """Make a principal whom processes of this user prove; afterwards they prove alice again."""
        alice = self.call(lambda: self.broker.gate.table.principal(ALICE))
        assert alice is not None
        others = tuple(one for one in alice.credentials if one.kind != "peer")
        self.change(msgspec.structs.replace(alice, credentials=others))
        try:
            yield self.prove(name, uid=os.getuid(), root=root)
        finally:
            self.remove(name)
            self.change(alice)

    def forged(self) -> Proof:
        """What somebody shows who knows the name of alice, and no secret of hers."""
        alice = self.alice
        identity, key_file = JebpIdentity.generate(), str(self.folder / f"forger{self.next_number()}")
        identity.save(key_file)
        token = alice.token[:-43] + "A" * 43
        forged_jwt = json_token(ALICE, key="another secret, which is as long as the one of the server is")
        return Proof(ALICE, identity, key_file, token, "a wrong password", alice.api_key, "a wrong secret", forged_jwt)

    def change(self, *entries: Row | Principal) -> None:
        """Add entries to the table."""
        self.run(lambda: self.broker.gate.put(entries, SERVER))

    def remove(self, name: str) -> None:
        """Remove a principal, if it is there."""
        self.run(lambda: self.broker.gate.remove([Principal(name)], SERVER))

    def grant(self, *lines: str) -> None:
        """Replace the rows of the last call by these."""
        rows = [row(line) for line in lines]
        gone = [one for one in self._rows if one not in rows]
        self.run(lambda: self.broker.gate.change(edits_for(rows, gone), SERVER))
        self._rows = rows

    # -- what the test sees and does from inside ---------------------------------------------------------------------

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def emit(self, *subjects: str) -> None:
        """Publish events, each when the one before is recorded and heard: topics have no order among them."""

        async def publish() -> None:
            for one in subjects:
                await self.broker.publish(Publication(SERVER, "test", [Event(one, VALUE)])).wait()

        self.run(publish)

    def happened(self, subject: str, payload: bytes) -> bool:
        """Whether an event has come."""
        return self.call(lambda: any(one == subject and data is not None and payload in data
                                     for one, data in self.heard))  # fmt: skip

    def end_of(self, topic: str) -> int:
        """The offset of the next record of a topic, 0 without such a topic."""

        def end() -> int:
            found = self.broker.find_topic(topic)
            return 0 if found is None else found.partition(0).next_offset

        return self.call(end)

    def value(self, key: str) -> bytes | None:
        return self.call(lambda: self.broker.state.find(key))

    def answer(self, subject: str) -> Any:
        """Answer requests to a subject until the result is called."""

        def take(question: Question) -> None:
            self.broker.respond(question.key, Reply(b'"yes"', ((b"content-type", b"application/json"),)))

        subscription = self.call(lambda: self.broker.responders.add(exactly(subject), take, "test", SERVER))
        return partial(self.call, lambda: self.broker.responders.remove(subscription))

    def ask(self, subject: str) -> bytes | None:
        """Ask, and wait for the reply; `None` if nobody answers."""

        async def ask() -> bytes | None:
            deadline = self.server.clock.monotonic() + SAFETY_NET_SECONDS
            asked = self.broker.request(subject, VALUE, (), deadline, SERVER)
            with suppress(NoRespondersError):
                await asked.wait()
            return None if asked.reply is None else asked.reply.payload

        return self.run(ask)

    def audit(self) -> list[dict[str, Any]]:
        """The records of the audit, those that are folded too."""

        async def flush() -> None:
            done = self.broker.gate.audit.flush()
            if done is not None:
                await done.wait()

        self.run(flush)
        topic = self.broker.find_topic("$audit")
        records = [] if topic is None else self.call(lambda: read(topic.partition(0)))
        return [json.loads(one.payload or b"") for one in records]
