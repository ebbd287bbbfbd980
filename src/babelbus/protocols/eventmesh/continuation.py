"""The form in which a session over TCP goes from one server to the next (docs/cluster.md, "Sessions that go on")."""

import msgspec

from babelbus.core.access import Identity, Rights
from babelbus.core.access.root import Root
from babelbus.identities.credential import Credential
from babelbus.protocols.eventmesh.callers import Caller
from babelbus.protocols.eventmesh.messages import SubscriptionItem, UserAgent

INT_MIN, INT_MAX = -(2**63), 2**64 - 1
"""The integers of MessagePack."""


class KeptCaller(msgspec.Struct, frozen=True):
    """A `Caller` without its rights, which the next server reads from its own table."""

    source: str
    name: str
    root: Root | None
    credentials: tuple[Credential, ...]
    until_ms: float
    asked: bool
    tried: bool

    @classmethod
    def of(cls, caller: Caller) -> "KeptCaller":
        """Return the kept form of a caller."""
        who = caller.principal
        return cls(who.source, who.name, who.root, caller.credentials, caller.until_ms, caller.asked, caller.tried)

    def caller(self) -> Caller:
        """Return the caller, without rights until they are renewed."""
        principal = Identity(self.source, self.name, Rights(""), self.root)
        return Caller(principal, self.credentials, self.until_ms, self.asked, self.tried)


def kept_agent(agent: UserAgent) -> UserAgent:
    """Return an agent as it is kept: a `pid` that no integer of MessagePack can hold is text from then on."""
    pid = agent.pid
    if isinstance(pid, int) and not INT_MIN <= pid <= INT_MAX:
        return msgspec.structs.replace(agent, pid=str(pid))
    return agent


class KeptSession(msgspec.Struct, frozen=True):
    """Everything that a client has told its session, or proved.

    Pushes that the client has not acknowledged are not part of it: their groups push them again.
    """

    owner: str
    """A name that no other session has."""
    surplus: int
    """The framing of the client (`frames`)."""
    agent: UserAgent
    caller: KeptCaller
    subscriptions: list[SubscriptionItem]
    listens: bool


encode_session = msgspec.msgpack.Encoder().encode
decode_session = msgspec.msgpack.Decoder(KeptSession).decode
