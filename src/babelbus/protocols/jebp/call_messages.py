"""Parameters, messages and results of the methods of jebp/1.2; both sides use them."""

import struct
from typing import Any, Final, Literal

import msgspec

Headers = tuple[tuple[bytes, bytes | None], ...]


class ListMethods(msgspec.Struct, frozen=True, array_like=True):
    """`methods`: the names of the methods that the server knows, sorted."""


# -- consume: a member of a consumer group ---------------------------------------------------------------------------

DELIVERY: Final = struct.Struct(">IiI")
"""In front of the stored records of a delivery: its number, partition, attempt."""


class Consume(msgspec.Struct, frozen=True, array_like=True):
    """`consume`: be a member of a group for as long as the stream is open.

    `window` is the most records that the member holds without an answer. With `create` a group that does not exist is
    made with `settings`, at the end, at the beginning, at an offset or at a time (ms).
    """

    topic: str
    group: str
    window: int = 1_000
    create: bool = True
    start: Literal["end", "beginning", "offset", "time"] = "end"
    value: int = 0
    settings: dict[str, Any] = {}
    exclusive: bool = False


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """The first item of `consume`: how the group works."""

    ack: str
    ack_seconds: float
    order: str
    paused: bool


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Records are done: `ranges` is delivery, first record in it, count, and so on."""

    ranges: list[int]


class Nack(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Records failed; `delay_seconds` is nil for the group's back-off. `final` makes dead letters of them at once."""

    ranges: list[int]
    reason: str = ""
    delay_seconds: float | None = None
    final: bool = False


class Extend(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Records are still worked on: their `ack_seconds` begin again."""

    ranges: list[int]


class Window(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Take at most so many records without an answer from now on; 0 pauses the member."""

    window: int


ConsumeMessage = Ack | Nack | Extend | Window


# -- live events -----------------------------------------------------------------------------------------------------


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """`subscribe`: live events whose subjects match one of these patterns, from now on.

    `+` (or `?`) stands for one element of a subject, `#` at the end for one or more. The client sends how many
    events it has handled, as a number; the server sends at most `window` beyond that.
    """

    patterns: list[str]
    window: int = 4_096


class Watching(msgspec.Struct, frozen=True, array_like=True):
    """The first item of `subscribe`: for each pattern, whether the client is granted a part of it only."""

    narrowed: list[bool]


class LiveEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event; the subject is the bytes of UTF-8, or any bytes that came over sbus."""

    raw_subject: bytes
    payload: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp: int = 0


class Events(msgspec.Struct, frozen=True, array_like=True):
    """Further items of `subscribe`; `dropped` events are missing in front of these: the client was too slow."""

    dropped: int
    events: list[LiveEvent]


class Emit(msgspec.Struct, frozen=True, array_like=True):
    """`emit`: publish an event under a subject, to the topic that records the subject, if there is one."""

    subject: str
    payload: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp: int = 0


class Emitted(msgspec.Struct, frozen=True, array_like=True):
    """The result of `emit`: where the event was recorded, nil if no topic records it; and to how many it went live."""

    topic: str | None
    partition: int | None
    offset: int | None
    receivers: int


# -- requests and replies --------------------------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """`request`: ask who answers this subject."""

    subject: str
    payload: bytes | None
    headers: Headers = ()
    timeout_seconds: float = 30.0


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of `request`: payload and headers of the reply."""

    payload: bytes | None
    headers: Headers = ()


class Respond(msgspec.Struct, frozen=True, array_like=True):
    """`respond`: answer the requests to subjects of a pattern; responders of one group share them."""

    pattern: str
    group: str = "respond"
    window: int = 100


class Asked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An item of `respond`, behind a first one that is nil: after `timeout_seconds` nobody waits for the reply."""

    number: int
    subject: str
    payload: bytes | None
    headers: Headers
    timeout_seconds: float


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message of a responder: the reply to a question, or with `failed` why it has no reply."""

    number: int
    payload: bytes | None = None
    headers: Headers = ()
    failed: str = ""


class Administer(msgspec.Struct, frozen=True, array_like=True):
    """`admin`: a request of the administration API; `path` is that of HTTP, with the query."""

    method: str
    path: str
    body: bytes = b""
