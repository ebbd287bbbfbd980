"""The form in which clients of zbus go from one server to the next (docs/cluster.md, "Sessions that go on")."""

import msgspec


class KeptCaller(msgspec.Struct, frozen=True, array_like=True):
    """The proofs of a connection: the arguments of a `Caller`."""

    certified: str | None
    """The principal of its certificate."""
    proved: list[tuple[str, str | None]]
    """The apiKeys, and whose each was."""
    name: str | None


class KeptSubscription(msgspec.Struct, frozen=True, array_like=True):
    """A subscription to a channel: the arguments of a `Subscription`."""

    mq: str
    channel: str
    window: int | None
    filter: str | None
    proof: str | None
    is_member: bool
    """Whether the channel was there, and not taken over."""


class KeptSession(msgspec.Struct, frozen=True):
    """A connection with nothing under way."""

    id: str
    is_socket: bool
    """Whether it has become a WebSocket."""
    is_monitor: bool
    caller: KeptCaller
    called: list[str]
    taken: list[str]
    subscriptions: list[KeptSubscription]
    binds: bool = False
    """Whether it has bound urls."""


class KeptBinding(msgspec.Struct, frozen=True, array_like=True):
    """A bound url."""

    url: str
    mq: str
    principal: str


encode_session = msgspec.msgpack.Encoder().encode
decode_session = msgspec.msgpack.Decoder(KeptSession).decode
encode_bindings = msgspec.msgpack.Encoder().encode
decode_bindings = msgspec.msgpack.Decoder(list[KeptBinding]).decode
