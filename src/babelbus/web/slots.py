"""Slots for answers that take long: bounded in all, and for each principal."""

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
