"""The blocking twin of an asynchronous client: results, errors, iteration, and how it ends."""

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from babelbus.clients.portal import Portal, Twin, blocking, streaming
from babelbus.errors import BabelbusError


class ClosedError(BabelbusError):
    """The portal is not open."""


class Counter:
    """An asynchronous client."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.cancelled = False
        self.finished = False

    async def add(self, one: int, *, other: int = 1) -> int:
        """Add."""
        await asyncio.sleep(0)
        if other < 0:
            raise ValueError(other)
        return one + other

    async def wait(self) -> None:
        try:
            self.waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def count(self, end: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(end):
                await asyncio.sleep(0)
                yield number
            raise ValueError(end)
        finally:
            self.finished = True


class BlockingCounter(Twin[Counter]):
    add = blocking(Counter.add)
    wait = blocking(Counter.wait)
    count = streaming(Counter.count)

    @property
    def portal(self) -> Portal:
        return self._portal

    @property
    def twin(self) -> Counter:
        return self._twin


@pytest.fixture
def counter() -> Iterator[BlockingCounter]:
    made = BlockingCounter(Portal("counter", ClosedError), Counter())
    made.portal.open()
    yield made
    made.portal.close()


def test_results_and_errors_come_back_and_the_signature_stays(counter: BlockingCounter) -> None:
    assert counter.add(1) == 2
    assert counter.add(1, other=5) == 6
    with pytest.raises(ValueError, match="-1"):
        counter.add(1, other=-1)
    assert (inspect.signature(BlockingCounter.add), BlockingCounter.add.__doc__) == (
        inspect.signature(Counter.add),
        "Add.",
    )


def test_an_iteration_yields_all_and_then_its_error(counter: BlockingCounter) -> None:
    seen: list[int] = []
    with pytest.raises(ValueError, match="3"):
        seen.extend(counter.count(3))
    assert (seen, counter.twin.finished) == ([0, 1, 2], True)
    assert [number for number, _ in zip(counter.count(9), range(3), strict=False)] == [0, 1, 2]


def test_a_caller_that_stops_ends_the_asynchronous_generator(counter: BlockingCounter) -> None:
    numbers = counter.count(9)
    assert next(numbers) == 0
    assert not counter.twin.finished
    numbers.close()
    assert counter.twin.finished


def test_threads_share_a_portal(counter: BlockingCounter) -> None:
    sums: list[int] = []

    def add() -> None:
        sums.extend(counter.add(number) for number in range(100))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sums) == sorted([*range(1, 101)] * 4)


def test_closing_refuses_what_waits_and_all_that_follows(counter: BlockingCounter) -> None:
    refused: list[Exception] = []

    def wait() -> None:
        try:
            counter.wait()
        except ClosedError as error:
            refused.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    counter.twin.waiting.wait()
    counter.portal.close()
    waiting.join()
    assert len(refused) == 1
    assert counter.twin.cancelled
    counter.portal.close()
    for call in (lambda: counter.add(1), lambda: counter.portal.post(list), counter.portal.open):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        next(counter.count(1))


def test_a_call_from_the_loop_itself_is_an_error_and_no_deadlock(counter: BlockingCounter) -> None:
    async def call() -> None:
        counter.add(1)

    with pytest.raises(RuntimeError, match="own callback"):
        counter.portal.call(call())
