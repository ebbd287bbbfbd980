"""Many names, a page at a time in order: what a level of the tree has, or what a pattern finds.

A level may have 100,000 names: the names of a page are chosen in a thread, and rights are asked for in short slices.
"""

import asyncio
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import TypeVar

import msgspec

T = TypeVar("T")

INLINE_MAX = 2_000
"""Most names that the event loop itself looks at."""
SLICE = 200
"""Names whose rights are asked for in one turn of the event loop."""
SCAN_MAX = 5_000
"""Most names whose rights are asked for by one request; the next page goes on behind them."""


class Page(msgspec.Struct, frozen=True):
    """Names in order. `after` is what the next page begins behind, `None` behind the last page.

    `total` counts the names of all pages; `None` if only some of the names may be seen.
    """

    names: list[str]
    total: int | None
    after: str | None


class PageRequest(msgspec.Struct, frozen=True):
    """The page that is asked for: `count` names behind `after` that contain `search`, whatever the case."""

    count: int
    after: str | None = None
    search: str = ""


async def choose_page(names: Sequence[str], request: PageRequest, may_see: Callable[[str], bool] | None = None) -> Page:
    """Return a page of names in any order; of those, with `may_see`, that may be seen."""
    limit = request.count if may_see is None else max(SCAN_MAX, request.count)
    chosen, more, total = await in_thread(len(names), lambda: _choose(names, request, limit))
    if may_see is None:
        return Page(chosen, total, chosen[-1] if more else None)
    seen: list[str] = []
    for number, name in enumerate(chosen):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        if len(seen) == request.count:
            return Page(seen, None, chosen[number - 1])
        if may_see(name):
            seen.append(name)
    return Page(seen, None, chosen[-1] if more else None)


async def granted_of(names: Sequence[str], may_see: Callable[[str], bool]) -> list[str]:
    """Return the names that may be seen; other tasks run in between."""
    granted: list[str] = []
    for start in range(0, len(names), SLICE):
        granted += filter(may_see, names[start : start + SLICE])
        await asyncio.sleep(0)
    return granted


async def in_thread(size: int, work: Callable[[], T]) -> T:
    """Return what `work` returns, which is done in a thread if it looks at more than `INLINE_MAX` things."""
    return work() if size <= INLINE_MAX else await asyncio.get_running_loop().run_in_executor(None, work)


def _choose(names: Sequence[str], request: PageRequest, limit: int) -> tuple[list[str], bool, int]:
    """Return the first names of a page, whether there are more of them, and how many names match."""
    search, after = request.search.lower(), request.after
    matching = [name for name in names if search in name.lower()] if search else names
    later = matching if after is None else [name for name in matching if name > after]
    return nsmallest(limit, later), len(later) > limit, len(matching)
