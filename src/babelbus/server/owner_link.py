"""The link of a member to the owner of the data, which the lease names (docs/cluster.md, "What runs where")."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from babelbus.clock import Clock
from babelbus.limited_log import LimitedLog
from babelbus.link.edge import Edge
from babelbus.link.frames import LinkError, LinkRefusedError
from babelbus.link.security import LinkTls

if TYPE_CHECKING:
    from babelbus.storage.jetstream import Held, Lease

log = logging.getLogger(__name__)

CONNECT_AGAIN_SECONDS = 0.2
LOOK_SECONDS = 1.0
SIGNS_OF_LIFE = 2
"""Renewals of the lease that an owner whose link is lost has to show: one may have been on its way when it died."""


class OwnerLink:
    """Keeps the edge of a member linked to the owner of the data; of the event loop, but for `look`."""

    def __init__(
        self, lease: "Lease", tls: LinkTls | None, clock: Clock, on_linked: Callable[[], Awaitable[None]]
    ) -> None:
        self.owner = ""
        """Name of the owner that the edge is linked to, or of this member while it is the owner."""
        self.trouble = "it has not reached NATS so far"
        """Why no clients are served."""
        self._lease, self._tls, self._on_linked = lease, tls, on_linked
        self._loop = asyncio.get_running_loop()
        self._log = LimitedLog(log, clock)
        self._changed = asyncio.Event()
        self._linked: Held | None = None
        """The lease of the owner that the edge was linked to last."""
        self._renewals_at_loss = 0
        """The count of renewals of the lease that were seen when the link was lost."""

    def look(self) -> None:
        """Check the lease again; called in the thread of NATS."""
        self._loop.call_soon_threadsafe(self._changed.set)

    def take_over(self, name: str) -> None:
        """Record that this member, with that name, becomes the owner."""
        self.owner, self.trouble = name, f"member {name} takes over now"

    def lose(self, reason: str) -> None:
        """Handle that the edge has lost its link."""
        self._renewals_at_loss = self._lease.seen_count
        self.trouble = f"the link to member {self.owner} is lost ({reason})"
        log.warning("%s", self.trouble)
        self.owner = ""
        self._changed.set()

    async def keep(self, edge: Edge) -> None:
        """Keep an edge linked to the owner that the lease names, until cancelled."""
        self._linked = None
        while True:
            self._changed.clear()
            held = self._lease.seen
            linked: Held | None = self._linked
            if edge.is_connected and linked is not None and not _is_same(held, linked):
                edge.disconnect("another member owns the data")
                self.owner = ""
            if not edge.is_connected:
                self._linked = await self._connect(edge, held) or linked
            seconds = LOOK_SECONDS if edge.is_connected else CONNECT_AGAIN_SECONDS
            with contextlib.suppress(TimeoutError):  # not `wait_for`, which may lose a cancellation in Python 3.11
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    async def check_copies(self, edge: Edge) -> None:
        """Close the clients that wait for the next owner, once the last one shows that it lives: it has ended them.

        Runs beside `keep` until cancelled: a new link to that owner may take long to fail.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            linked = self._linked
            if linked is None or edge.is_connected or not _is_same(self._lease.seen, linked):
                continue
            if self._lease.seen_count - self._renewals_at_loss >= SIGNS_OF_LIFE:
                edge.waiting.drop_copies(linked.epoch)

    async def _connect(self, edge: Edge, held: "Held | None") -> "Held | None":
        """Connect the edge to an owner, and return the lease of the owner; `None` without a link."""
        if held is None or held.released:
            self.trouble = "no member owns the data now"
            return None
        if not held.address:
            self.trouble = f"member {held.name} takes over now"
            return None
        host, _, port = held.address.rpartition(":")
        tls = None if self._tls is None else self._tls.client
        try:
            await self._while_owned(held, edge.connect(host.strip("[]"), int(port), tls, held.key))
        except (OSError, LinkError, LinkRefusedError, ValueError) as error:  # TimeoutError is an OSError
            self.trouble = f"member {held.name} at {held.address}: {str(error) or type(error).__name__}"
            self._log.write(logging.WARNING, "link", "%s", self.trouble)
            return None
        self.owner, self.trouble = held.name, ""
        log.info("clients are passed on to member %s at %s", held.name, held.address)
        await self._on_linked()
        return held

    async def _while_owned(self, held: "Held", connecting: Coroutine[Any, Any, Any]) -> None:
        """Wait for a connection, at most until another lease is seen: the machine of a dead owner answers nobody.

        Raises:
            OSError, LinkError, LinkRefusedError: the connection failed, or the lease has changed.
        """
        tasks = [self._loop.create_task(one) for one in (connecting, self._until_other(held))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if tasks[0].cancelled():
            raise ConnectionAbortedError("the lease has changed")
        tasks[0].result()

    async def _until_other(self, held: "Held") -> None:
        """Wait until the lease is that of another owner; one that is renewed is the same."""
        while _is_same(self._lease.seen, held):
            self._changed.clear()
            await self._changed.wait()


def _is_same(held: "Held | None", linked: "Held") -> bool:
    """Return whether the owner of a link still owns the data."""
    return held is not None and not held.released and (held.owner, held.epoch) == (linked.owner, linked.epoch)
