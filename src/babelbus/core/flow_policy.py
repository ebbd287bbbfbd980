"""The policy for events that a receiver does not take in time."""

from typing import Literal

import msgspec

from babelbus.units import MIB

Soft = Literal["queue", "discard", "block", "error"]
Hard = Literal["discard", "block", "error"]
Order = Literal["queue", "stack", "random"]


class Flow(msgspec.Struct, frozen=True):
    """The flow policy of one receiver.

    `soft` holds while it does not take what is sent: queue it, discard it, block who sent it, or disconnect the
    receiver. `hard` holds when its queue is full. `order` is that of the queue: first in first out, newest first or
    largest first.
    """

    soft: Soft = "queue"
    hard: Hard = "block"
    order: Order = "queue"


class Bound(msgspec.Struct, frozen=True):
    """The most that waits for one receiver; over either of the two, its queue is full."""

    size_bytes: int = 8 * MIB
    count: int = 65_536


NOTHING = Bound(0, 0)
