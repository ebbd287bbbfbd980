"""A member of a consumer group, and how records are shared among members: round robin over those that take more."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from babelbus.core.access import NOBODY, Identity
from babelbus.core.groups.in_flight import Delivery, Holder, Lease
from babelbus.core.groups.settings import GroupSettings, RecordFilter
from babelbus.core.quotas import Quota
from babelbus.errors import BabelbusError

UNLIMITED = sys.maxsize

Deliver = Callable[[Sequence[Delivery]], None]
"""Takes what one turn brings a member, usually of one partition at a time, in the order of offsets. Called from the
event loop, never from inside a call of ours. It must not block; a member whose `deliver` raises leaves the group. The
sequence is a `delivery_rows.Run` if that spares an object for each record, otherwise a list."""
OnClosed = Callable[[BabelbusError], None]
"""Told once when the membership ends without `leave`: the group or its topic was removed, or `deliver` raised."""


class _Group(Protocol):
    """The group of a member, as far as the member uses it; `group.Group` documents the methods."""

    name: str
    settings: GroupSettings

    def wake(self) -> None: ...
    def take(
        self, count: int, member: "Member | None" = None, principal: Identity = NOBODY
    ) -> list[Sequence[Delivery]]: ...
    def leave(self, member: "Member", *, lost: bool = False) -> None: ...
    def ack(self, member: "Member", deliveries: Iterable[Delivery]) -> int: ...
    def ack_offsets(self, member: "Member", lease: Lease, offsets: list[int]) -> int: ...
    def extend(self, member: "Member", lease: Lease, offsets: list[int]) -> Lease | None: ...
    def nack(
        self,
        member: "Member",
        deliveries: Iterable[Delivery],
        reason: str,
        delay_seconds: float | None,
        *,
        final: bool,
    ) -> int: ...


class Member(Holder):
    """One member. Made by `Group.join`.

    `credit` is how many more records it is handed (`None`: no limit), and goes down with each; `window` is the most
    that it may hold without an ack (`None`: no limit; explicit mode alone). Inside `deliver`, `credit` has gone down
    for the whole sequence already: behind its i-th of n records the member had `credit + n - 1 - i` left.
    """

    def __init__(
        self,
        group: _Group,
        deliver: Deliver,
        on_closed: OnClosed = lambda error: None,
        *,
        credit: int | None,
        window: int | None = None,
        wanted: RecordFilter | None = None,
        owner: object = None,
        exclusive: bool = False,
        held: bool = False,
        principal: Identity = NOBODY,
        expires: bool = True,
        address: str = "",
        joined_at: float = 0.0,
    ) -> None:
        super().__init__()
        self.expires = expires
        self.address = address
        """Where its client is, as people write it; empty if that is not known."""
        self.joined_at = joined_at
        """When it joined, in monotonic seconds."""
        self.group = group
        self.deliver = deliver
        self.on_closed = on_closed
        self.credit = credit
        self.window = window
        self.filter = wanted
        self.owner = owner
        self.exclusive = exclusive
        self.held = held
        self.principal = principal
        self.quota: Quota | None = None
        """The quota that counts the membership."""
        self.closed = False

    @property
    def capacity(self) -> int:
        """How many records it takes now."""
        if self.held or self.closed:
            return 0
        credit = UNLIMITED if self.credit is None else self.credit
        if self.window is None:
            return max(credit, 0)
        return max(min(credit, self.window - self.in_flight), 0)

    def close(self) -> None:
        """End the membership; the group calls it, once."""
        self.closed = True
        if self.quota is not None:
            self.quota.give("subscriptions")

    # -- flow --------------------------------------------------------------------------------------------------------

    def set_credit(self, credit: int | None) -> None:
        """Set the credit: `credit` more records, whatever credit was left."""
        self.credit = credit
        self.group.wake()

    def add_credit(self, count: int) -> None:
        """Add `count` records to the credit; no change if there is no limit."""
        if self.credit is not None:
            self.credit = max(self.credit, 0) + count
            self.group.wake()

    def set_filter(self, wanted: RecordFilter | None) -> None:
        """Deliver only records that `wanted` accepts, from now on."""
        self.filter = wanted
        self.group.wake()

    def hold(self) -> None:
        """Stop deliveries until `resume`: the connection is full, or a reply must go first."""
        self.held = True

    def resume(self) -> None:
        """Resume deliveries."""
        if self.held:
            self.held = False
            self.group.wake()

    # -- acks (explicit mode) ----------------------------------------------------------------------------------------

    def ack(self, deliveries: Iterable[Delivery]) -> int:
        """Acknowledge records; return how many the member held. Other records are counted as stale and not touched.

        Raises:
            GroupClosedError: it has left, or the group is gone.
        """
        return self.group.ack(self, deliveries)

    def ack_offsets(self, lease: Lease, offsets: list[int]) -> int:
        """Acknowledge records that came with one lease, as `ack`.

        Raises:
            GroupClosedError: it has left, or the group is gone.
        """
        return self.group.ack_offsets(self, lease, offsets)

    def extend(self, lease: Lease, offsets: list[int]) -> Lease | None:
        """Start the `ack_seconds` of records anew; return their new lease, `None` if the member holds none of them.

        Raises:
            GroupClosedError: it has left, or the group is gone.
        """
        return self.group.extend(self, lease, offsets)

    def nack(self, deliveries: Iterable[Delivery], *, reason: str = "", delay_seconds: float | None = None) -> int:
        """Return records, to be delivered again after a delay; `None` takes the back-off of their attempt.

        `reason` is what a dead letter says if there was no attempt left. Returns how many were its own.

        Raises:
            GroupClosedError: it has left, or the group is gone.
        """
        return self.group.nack(self, deliveries, reason or "nack", delay_seconds, final=False)

    def reject(self, deliveries: Iterable[Delivery], *, reason: str = "") -> int:
        """Reject records as dead letters: no other attempt would help. Returns how many were its own.

        Raises:
            GroupClosedError: it has left, or the group is gone.
        """
        return self.group.nack(self, deliveries, reason or "rejected", None, final=True)

    def take(self, count: int) -> list[Sequence[Delivery]]:
        """Fetch up to `count` records now, whatever the credit; see `Group.take`."""
        return self.group.take(count, self, self.principal)

    def leave(self, *, lost: bool = False) -> None:
        """End the membership; records that it holds are handed to others at once. A second call does nothing.

        `lost` says that no one asked for the end (a connection broke): the records may be why, so that counts as an
        attempt. Otherwise they return as if they had not been handed out.
        """
        self.group.leave(self, lost=lost)


def share(count: int, capacities: Sequence[int]) -> tuple[list[list[slice]], int, int]:
    """Return which of `count` records each member gets, how many are dealt in all, and whose turn is next.

    Members get records in turn, each until its capacity is used up.
    """
    shares: list[list[slice]] = [[] for _ in capacities]
    left = list(capacities)
    order = [number for number, capacity in enumerate(capacities) if capacity > 0]
    at = 0
    while order and at < count:
        members = len(order)
        rounds = min((count - at) // members, min(left[number] for number in order))
        if rounds == 0:  # fewer records than members
            for place, number in enumerate(order[: count - at]):
                shares[number].append(slice(at + place, at + place + 1))
            return shares, count, order[count - at]
        end = at + rounds * members
        for place, number in enumerate(order):
            shares[number].append(slice(at + place, end, members))
            left[number] -= rounds
        order = [number for number in order if left[number]]
        at = end
    return shares, at, order[0] if order else 0
