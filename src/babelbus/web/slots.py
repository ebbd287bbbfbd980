"""Slots for answers that take long, and room for bodies: bounded in all, and for each principal."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from aiohttp import web

from babelbus.core.access import Identity


def check_share(principal: Identity, holders: Iterable[Identity], most: int, what: str) -> None:
    """Check that a principal has less than its share of what `holders` have; the administrator may have all.

    Raises:
        web.HTTPServiceUnavailable: it has its share.
    """
    if principal.rights is not None:
        count = sum(holder.name == principal.name for holder in holders)
        if count >= most:
            text = f"{count} {what} of {principal.name!r} are open already, which is the limit"
            raise web.HTTPServiceUnavailable(text=text)


class Slots:
    """Answers under way, such as searches; one principal may hold half of the slots, so that others find room."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._own = max(most // 2, 1)
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """The slots that are taken."""
        return self._taken.total()

    @contextmanager
    def take(self, principal: Identity) -> Iterator[None]:
        """Keep a slot for a principal.

        Raises:
            web.HTTPServiceUnavailable: all slots are taken, or the principal holds its half.
        """
        name = principal.name
        if self.taken >= self._most:
            raise web.HTTPServiceUnavailable(text=f"{self._most} {self._what} run already, which is the limit")
        if self._taken[name] >= self._own:
            raise web.HTTPServiceUnavailable(text=f"{self._own} {self._what} of {name!r} run already, its limit")
        self._taken[name] += 1
        try:
            yield
        finally:
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]


class Room:
    """Bytes of bodies whose requests are under way; one principal may hold half, the administrator what it likes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._own = most // 2
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """The bytes that are taken."""
        return self._taken.total()

    def take(self, principal: Identity, size: int) -> None:
        """Keep room for some more bytes of a principal, until they are given back.

        Raises:
            web.HTTPServiceUnavailable: there is no room, or the principal holds its half.
        """
        name = principal.name
        if principal.rights is not None:
            if self.taken + size > self._most:
                raise web.HTTPServiceUnavailable(text=f"requests of {self._most} bytes are under way, the limit")
            if self._taken[name] + size > self._own:
                text = f"requests of {name!r} with {self._own} bytes are under way, its limit"
                raise web.HTTPServiceUnavailable(text=text)
        self._taken[name] += size

    def give_back(self, principal: Identity, size: int) -> None:
        """Release the room of some bytes: their request is answered."""
        name = principal.name
        self._taken[name] -= size
        if not self._taken[name]:
            del self._taken[name]
