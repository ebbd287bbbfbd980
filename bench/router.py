"""The router in the core, with 100,000 patterns of others: what a new subject costs, and a pattern that comes and goes.

In-process; a reading is the mean over `SAMPLE` subjects or patterns.
"""

import random
import time
from collections.abc import Iterator, Sequence

from babelbus.core.access import SERVER
from babelbus.core.record import Event
from babelbus.core.router import Router, Subscription
from babelbus.core.state import subscription_pattern
from babelbus.core.subject import Pattern
from babelbus.protocols.sbus.patterns import SbusPattern
from bench.frame import Reading, figure

PATTERNS = 100_000
SAMPLE = 5_000
AREAS = 500


def _pattern(number: int) -> Pattern:
    """Return one of the shapes that clients of Wörterbuch and sbus use."""
    area = number % AREAS
    shapes = (
        f"plant/area{area}/device{number}/#",
        f"plant/?/device{number}/temperature",
        f"?/area{area}/?/value{number}",
        f"client{number}/?",
        f"?/?/?/?/alarm{number}/#",
    )
    if number % 7 < len(shapes):
        return subscription_pattern(shapes[number % 7])
    if number % 7 == len(shapes):
        return SbusPattern(b"plant/area%d/device%d*" % (area, number))
    return SbusPattern(b"plant/area%d*/*/value%d/" % (area, number))


def _receive(_events: Sequence[Event]) -> None:
    pass


def _filled() -> tuple[Router, list[Subscription]]:
    router = Router()
    return router, [router.add(_pattern(number), _receive, shared=True, principal=SERVER) for number in range(PATTERNS)]


@figure("router.new_subject_us", unit="us", target=100, lower_is_better=True)
def new_subject() -> Iterator[Reading]:
    """Route an event whose subject was never seen before."""
    router, _ = _filled()
    first = 0
    while True:
        numbers = range(first, first + SAMPLE)
        events = [Event(f"plant/area{one % AREAS}/device{one}/new", b"") for one in numbers]
        begun = time.perf_counter()
        for event in events:
            router.route([event])
        yield Reading((time.perf_counter() - begun) / SAMPLE * 1e6)
        first += SAMPLE


@figure("router.add_remove_us", unit="us", target=100, lower_is_better=True)
def add_remove() -> Iterator[Reading]:
    """Remove a pattern and add it again while 50,000 subjects are remembered."""
    router, subscriptions = _filled()
    chosen = random.Random(1)
    while True:
        for number in range(50_000):
            router.route_of(f"plant/area{number % AREAS}/device{number}/temperature")
        sample = chosen.sample(range(PATTERNS), SAMPLE)
        begun = time.perf_counter()
        for number in sample:
            subscription = subscriptions[number]
            router.remove(subscription)
            subscriptions[number] = router.add(subscription.pattern, _receive, shared=True, principal=SERVER)
        yield Reading((time.perf_counter() - begun) / SAMPLE * 1e6)
