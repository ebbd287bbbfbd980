"""What waits for one reader of a live answer."""

import asyncio
from collections.abc import Callable
from functools import partial

from babelbus.core.flow_policy import Bound
from babelbus.web.feed import TAKEN_MAX, Feed

LONG_SECONDS = 60.0


def lines(*texts: bytes) -> list[tuple[str, Callable[[], bytes]]]:
    """Lines of the subjects that they name."""
    return [(text.decode(), partial(bytes, text)) for text in texts]


def test_a_reader_gets_what_came_in_order_and_all_at_once() -> None:
    async def run() -> None:
        feed = Feed(Bound(), lambda count: None)
        feed.put(lines(b"a", b"b"))
        feed.put(lines(b"c"))
        assert await feed.take(LONG_SECONDS) == ([b"a", b"b", b"c"], 0)

    asyncio.run(run())


def test_a_reader_that_waits_is_woken() -> None:
    async def run() -> None:
        feed = Feed(Bound(), lambda count: None)
        reader = asyncio.create_task(feed.take(LONG_SECONDS))
        await asyncio.sleep(0)
        feed.put(lines(b"a"))
        assert await reader == ([b"a"], 0)

    asyncio.run(run())


def test_over_its_count_what_comes_is_dropped_counted_and_not_even_made() -> None:
    made: list[bytes] = []
    drops: list[int] = []

    def make(text: bytes) -> bytes:
        made.append(text)
        return text

    async def run() -> None:
        feed = Feed(Bound(count=2), drops.append)
        feed.put([("s", partial(make, text)) for text in (b"a", b"b", b"c", b"d")])
        feed.put([("s", partial(make, b"e"))])
        assert await feed.take(LONG_SECONDS) == ([b"a", b"b"], 3)
        feed.put([("s", partial(make, b"f"))])
        assert await feed.take(LONG_SECONDS) == ([b"f"], 0)

    asyncio.run(run())
    assert made == [b"a", b"b", b"f"]
    assert drops == [2, 1]


def test_over_its_bytes_what_comes_is_dropped() -> None:
    async def run() -> None:
        feed = Feed(Bound(size_bytes=4), lambda count: None)
        feed.put(lines(b"abc", b"def", b"g"))
        assert await feed.take(LONG_SECONDS) == ([b"abc", b"def"], 1)

    asyncio.run(run())


def test_a_quiet_time_gives_nothing_and_a_close_what_still_waits() -> None:
    async def run() -> None:
        feed = Feed(Bound(), lambda count: None)
        assert await feed.take(0.0) == ([], 0)
        feed.put(lines(b"a"))
        feed.close()
        assert await feed.take(LONG_SECONDS) == ([b"a"], 0)
        assert await feed.take(LONG_SECONDS) == ([], 0)

    asyncio.run(run())


def test_a_reader_takes_a_part_at_a_time_and_hears_of_drops_behind_the_last() -> None:
    async def run() -> None:
        feed = Feed(Bound(count=TAKEN_MAX + 1), lambda count: None)
        feed.put(lines(*[b"a"] * (TAKEN_MAX + 2)))
        assert await feed.take(LONG_SECONDS) == ([b"a"] * TAKEN_MAX, 0)
        assert await feed.take(LONG_SECONDS) == ([b"a"], 1)

    asyncio.run(run())


def test_lines_that_wait_can_be_taken_back_by_their_subject() -> None:
    async def run() -> None:
        feed = Feed(Bound(size_bytes=4), lambda count: None)
        feed.put(lines(b"ab", b"cd"))
        feed.keep(lambda subject: subject != "ab")
        feed.put(lines(b"ef"))
        assert await feed.take(LONG_SECONDS) == ([b"cd", b"ef"], 0)

    asyncio.run(run())
