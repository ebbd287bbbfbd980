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
