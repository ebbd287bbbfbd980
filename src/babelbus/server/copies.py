"""Copies of sessions, so that those of quiet clients go on when the owner is killed (docs/cluster.md).

The owner sends a copy of the session of each quiet client to the member that the client is connected to. The copy is
true until the next byte to or from the client, which the member sees itself; so nothing has to be merged, and a copy in
doubt is dropped. The members of the next owner send it the copies that they still have, before it serves anybody.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Collection

from babelbus.core.broker import Broker
from babelbus.link.core import CoreEnd, CoreLink
from babelbus.link.frames import COPY_BYTES_MAX, Copy
from babelbus.link.transport import LinkedTransport
from babelbus.metrics import Metrics
from babelbus.protocols.connection import Connection
from babelbus.server.handover import BYTES_MAX, SESSIONS_MAX, encode_session

log = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
"""How often the owner looks for quiet clients: who was silent from one look to the next one is quiet."""
COPIES_MAX = 1000
"""Copies of one sweep: about 40 ms of the owner."""
TURN_SECONDS = 0.005
"""How long clients are looked at in one turn of the event loop: a session of 10,000 subscriptions takes 15 ms."""
FLUSH_TURNS = 3
"""Turns of the event loop after which everything that was told is on its way to the members."""
GATHER_SECONDS = 3.0
"""How long the next owner waits for the copies of members that are alive: longer than they need to see the lease."""
LOOK_SECONDS = 0.2
"""How often it looks whether those members are still there."""


class Copier:
    """Sends copies from the owner to the members, and marks up to which the clients have heard the state."""

    def __init__(self, core_end: CoreEnd, broker: Broker, epoch: int, metrics: Metrics) -> None:
        self._core_end, self._broker, self._epoch = core_end, broker, epoch
        self._seen: dict[LinkedTransport, tuple[int, int]] = {}
        """Bytes of each client, both ways, at the last look."""
        self._copied: dict[LinkedTransport, tuple[int, int]] = {}
        """The same, at the last copy."""
        self._failed: dict[LinkedTransport, tuple[int, int]] = {}
        """The same, of sessions that cannot be copied before the next byte: they are too large, or it failed."""
        self._heard = 0
        self._looked_at = 0.0
        """When the last sweep had looked at all clients: since then the quiet ones were not handed anything."""
        self._task: asyncio.Task[None] | None = None
        metrics.cluster_session_copies.set_function(lambda: self.count)

    @property
    def count(self) -> int:
        """How many sessions would go on if this owner died now."""
        return sum(_moved(transport) == moved for transport, moved in self._copied.items())

    def start(self) -> None:
        """Begin to copy."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End the copying."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except Exception:  # a defect in this must not end the service of the owner
                log.exception("sessions are not copied")

    async def sweep(self) -> None:
        """Send copies of the sessions of quiet clients, then the mark."""
        links = [link for link in self._core_end.links if link.is_of_member and not link.is_local]
        # What was told up to here is sent before the mark, so that a client that it was told to has no copy by then.
        heard = self._broker.state.told_offset
        if heard < self._heard:  # a flush failed, and its offsets are given again: no mark of before is true
            self._withdraw(links)
        self._heard = heard
        seen, self._seen = self._seen, {}
        copied, self._copied = self._copied, {}
        failed, self._failed = self._failed, {}
        left = COPIES_MAX
        clock = asyncio.get_running_loop().time
        began = clock()
        for link in links:
            for transport in list(link.transports.values()):
                moved = self._seen[transport] = _moved(transport)
                if copied.get(transport) == moved:
                    self._check(link, transport, moved)
                elif failed.get(transport) == moved:
                    self._failed[transport] = moved
                elif left and seen.get(transport) == moved:
                    left -= self._copy(link, transport, moved)
                if clock() - began >= TURN_SECONDS:
                    await asyncio.sleep(0)
                    began = clock()
        self._looked_at = clock()
        for _ in range(FLUSH_TURNS):
            await asyncio.sleep(0)
        for link in links:
            link.send_mark(heard)

    def _withdraw(self, links: list[CoreLink]) -> None:
        copied, self._copied = self._copied, {}
        for link in links:
            for transport in link.transports.values():
                if transport in copied:
                    link.withdraw_copy(transport)

    def _check(self, link: CoreLink, transport: LinkedTransport, moved: tuple[int, int]) -> None:
        """Keep a copy as it is, or withdraw it: the session may have lost a topic, or its place to another client."""
        connection, is_true = transport.protocol, False
        if isinstance(connection, Connection):
            try:
                is_true = connection.is_copyable
            except Exception:  # a defect in one session must not keep others from a copy
                log.exception("%s %s: the copy is withdrawn", connection.protocol, connection.peer)
        if is_true:
            self._copied[transport] = moved
        else:
            link.withdraw_copy(transport)

    def _copy(self, link: CoreLink, transport: LinkedTransport, moved: tuple[int, int]) -> bool:
        """Send a copy of a session if there can be one; return whether it was encoded."""
        connection = transport.protocol
        if not isinstance(connection, Connection) or not transport.is_settled or transport.unsent_bytes:
            return False
        try:
            continuation = connection.copy()
            if continuation is None:
                return False
            if continuation.consumes and self._broker.groups.saved_at < self._looked_at:
                return True  # the next owner would hand out again what the client has: the cursors are not saved
            session_id = uuid.uuid4().hex
            session = encode_session(session_id, connection, continuation)
        except Exception:  # a defect in one session must not keep others from a copy
            log.exception("%s %s: the session cannot be copied", connection.protocol, connection.peer)
            self._failed[transport] = moved
            return True
        if len(session) > COPY_BYTES_MAX:
            self._failed[transport] = moved
            return True
        heard = self._broker.state.told_offset
        link.send_copy(transport, Copy(self._epoch, heard, transport.received_bytes, session_id, session))
        self._copied[transport] = moved
        return True


def _moved(transport: LinkedTransport) -> tuple[int, int]:
    return transport.received_bytes, transport.written_bytes


class Gathering:
    """Copies that the members send to the next owner before it serves anybody."""

    def __init__(self, core_end: CoreEnd, epoch: int, own: Collection[Copy]) -> None:
        self._core_end, self._epoch = core_end, epoch
        self._copies: dict[str, Copy] = {}
        self._size_bytes = 0
        self._refused = 0
        self._changed = asyncio.Event()
        for copy in own:
            self._add(copy)
        core_end.serves = False
        core_end.on_copy = self._add
        core_end.on_copied = self._changed.set

    def _add(self, copy: Copy) -> None:
        size_bytes = self._size_bytes + len(copy.session)
        is_right = copy.epoch == self._epoch - 1 and copy.id not in self._copies
        if is_right and size_bytes <= BYTES_MAX and len(self._copies) < SESSIONS_MAX:
            self._copies[copy.id] = copy
            self._size_bytes = size_bytes
        else:
            self._refused += 1

    async def wait(self, expected: Callable[[], Collection[str]]) -> list[Copy]:
        """Return the copies when all members that are `expected` have sent theirs, or after `GATHER_SECONDS`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_SECONDS):
                while not self._core_end.copied.issuperset(expected()):
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):  # members may go away, too
                        async with asyncio.timeout(LOOK_SECONDS):
                            await self._changed.wait()
        missing = sorted(set(expected()) - self._core_end.copied)
        if missing:
            log.warning("members %s sent no copies of sessions: their clients connect again", ", ".join(missing))
        if self._refused:
            log.info("%d copies of sessions are not of the last owner, or too many", self._refused)
        self._core_end.on_copy = lambda copy: None  # it comes too late
        copies, self._copies = self._copies, {}  # this server may own for long
        return list(copies.values())
