"""The verdict on a history: every promise that the cluster makes, checked against what its clients did and saw.

A function of the history alone: a history that was kept can be judged again. `check` knows these promises:

- lost: a record that was acknowledged is in the log at the end, and so is one that a consumer was handed
- two contents: whoever looks at an offset, whenever, sees the same record there; offsets have no gap
- copied: a record that was sent once is in the log once
- disorder: a record that was acknowledged before another one was sent stands before it in its partition; the records
  that a publisher had acknowledged stand in the order in which it sent them
- repeated: a session is handed a record once, and told of a value of the state once; a reader by offset reads it once
  however often it connects again
- skipped: a reader by offset, a consumer group and a session of a subscription of the state miss nothing; a queue and a
  stream over gRPC miss at most what was on its way to sessions that ended
- stale: who asks after an acknowledgement sees what was acknowledged, through every member; who has seen a value sees
  no older one later
- shared: a lock is held by one connection
- early: a last will is executed once, and not while the connection that left it is answered
- stuck: what is due happens: traffic goes on after each fault, wills are executed, locks become free,
  connections live that should
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from tests.cluster.history import Event

Promise = Literal[
    "lost", "two contents", "copied", "disorder", "repeated", "skipped", "stale", "shared", "early", "stuck"
]
ON_THEIR_WAY = {"queue": 20, "stream": 400}
"""How many records may be on their way to one session: the window of a channel of zbus; 64 KiB of a stream of gRPC."""
EXAMPLES = 5

Place = tuple[str, int, int]


class Violation(msgspec.Struct, frozen=True):
    """A promise that was broken, and how, with the first events that show it."""

    promise: Promise
    words: str
    events: tuple[Event, ...] = ()


def check(events: Sequence[Event]) -> list[Violation]:
    """Return what a history shows to be broken; an empty list is the good verdict."""
    return [
        *_check_places(events),
        *_check_audits(events),
        *_check_order(events),
        *_check_sessions(events),
        *_check_ends(events),
        *_check_state(events),
        *_check_connections(events),
        *_check_due(events),
    ]


def _some(words: str, promise: Promise, broken: Sequence[tuple[Event, ...]]) -> Iterable[Violation]:
    """Yield one violation for many of a kind, with the first of them as examples."""
    if broken:
        shown = tuple(event for events in broken[:EXAMPLES] for event in events)
        yield Violation(promise, f"{len(broken)} x {words}", shown)


def _check_places(events: Sequence[Event]) -> Iterable[Violation]:
    first: dict[Place, Event] = {}
    broken = []
    for event in events:
        if event.kind in ("acked", "got", "read") and event.offset >= 0:
            place = event.topic, event.partition, event.offset
            seen = first.setdefault(place, event)
            if seen.value != event.value:
                broken.append((seen, event))
    yield from _some("an offset had two contents", "two contents", broken)


def _check_audits(events: Sequence[Event]) -> Iterable[Violation]:
    """Check each audit of each topic by itself: all of them read the whole log."""
    audits: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == "read":
            audits[event.who, event.topic].append(event)
    for (who, topic), reads in audits.items():
        copied, gaps = [], []
        values: dict[str, Event] = {}
        expected: dict[int, int] = defaultdict(int)
        for event in reads:
            before = values.setdefault(event.value, event)
            if before is not event:
                copied.append((before, event))
            if event.offset != expected[event.partition]:
                gaps.append((event,))
            expected[event.partition] = event.offset + 1
        lost = [(event,) for event in events if event.topic == topic and event.value not in values and _promises(event)]
        yield from _some(f"a record of {topic} is not there although it was acknowledged or seen ({who})", "lost", lost)
        yield from _some(f"a record of {topic} is there twice ({who})", "copied", copied)
        yield from _some(f"offsets of {topic} have a gap or no order ({who})", "two contents", gaps)


def _promises(event: Event) -> bool:
    """Return whether an event says that a record is in the log."""
    return event.kind == "acked" or (event.kind == "got" and event.style != "live")


def _check_order(events: Sequence[Event]) -> Iterable[Violation]:
    sent: dict[tuple[str, str], Event] = {}
    acked: dict[tuple[str, str], Event] = {}
    numbers: dict[tuple[str, str], int] = {}
    for number, event in enumerate(events):
        if event.kind == "sent":
            sent[event.topic, event.value] = event
            numbers[event.topic, event.value] = number
        elif event.kind == "acked":
            acked[event.topic, event.value] = event
    for (who, topic, partition), reads in _first_audit(events).items():
        broken: list[tuple[Event, ...]] = []
        latest: Event | None = None  # the record sent last of those that stand before
        lasts: dict[str, Event] = {}  # by publisher: the acknowledged record sent last of those that stand before
        for read in reads:
            own, ack = sent.get((topic, read.value)), acked.get((topic, read.value))
            if own is None:
                broken.append((read,))  # nobody has sent it
                continue
            if ack is not None and latest is not None and ack.at < latest.at:
                broken.append((ack, latest))
            if ack is not None:
                last = lasts.get(own.who)
                if last is not None and numbers[topic, last.value] > numbers[topic, own.value]:
                    broken.append((own, last))
                else:
                    lasts[own.who] = own
            if latest is None or own.at > latest.at:
                latest = own
        yield from _some(f"records of {topic}/{partition} stand in the wrong order ({who})", "disorder", broken)


def _first_audit(events: Sequence[Event]) -> dict[tuple[str, str, int], list[Event]]:
    """Return the reads of one auditor for each partition: two contents are another promise."""
    auditors: dict[str, str] = {}
    reads: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == "read" and auditors.setdefault(event.topic, event.who) == event.who:
            reads[event.who, event.topic, event.partition].append(event)
    return reads


def _check_sessions(events: Sequence[Event]) -> Iterable[Violation]:
    consumers: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in ("joined", "got", "left"):
            consumers[event.who, event.topic].append(event)
    there: dict[str, dict[str, Event]] = defaultdict(dict)
    for (_, topic, _), reads in _first_audit(events).items():
        there[topic] |= {read.value: read for read in reads}
    for (who, topic), seen in consumers.items():
        style = seen[0].style
        got = [event for event in seen if event.kind == "got"]
        repeated = []
        known: dict[object, Event] = {}
        for event in got:
            key = event.value if style == "follow" else (event.session, event.value)
            before = known.setdefault(key, event)
            if before is not event:
                repeated.append((before, event))
        yield from _some(f"{who} was handed a record of {topic} twice", "repeated", repeated)
        if style == "follow":
            yield from _some(f"{who} skipped offsets of {topic}", "skipped", _jumps(got))
        if style == "live":
            continue
        values = {event.value for event in got}
        missed = [(read,) for value, read in there[topic].items() if value not in values]
        ended = len({event.session for event in seen}) - 1
        if len(missed) <= ON_THEIR_WAY.get(style, 0) * ended:
            continue
        if style == "follow":  # it reads one partition, and may not have come to the end
            continue
        yield from _some(f"{who} was not handed a record of {topic}", "skipped", missed)


def _jumps(got: Sequence[Event]) -> list[tuple[Event, ...]]:
    jumps: list[tuple[Event, ...]] = []
    before: Event | None = None
    for event in got:
        if event.offset != (0 if before is None else before.offset + 1):
            jumps.append((event,) if before is None else (before, event))
        before = event
    return jumps


def _check_ends(events: Sequence[Event]) -> Iterable[Violation]:
    """Check that who asks for the end of a partition is told at least what was acknowledged, or told, before."""
    broken = []
    known: dict[tuple[str, int], list[Event]] = defaultdict(list)  # the greatest offsets, in the order of `at`
    for event in events:
        if event.partition < 0 or event.offset < 0:
            continue
        news = known[event.topic, event.partition]
        if event.kind == "end":
            before = _latest(news, event.begun)
            if before is not None and event.offset < _end(before):
                broken.append((before, event))
        if event.kind in ("acked", "end", "got") and (not news or _end(event) > _end(news[-1])):
            news.append(event)
    yield from _some("a reader was told an end before what was acknowledged or told already", "stale", broken)


def _end(event: Event) -> int:
    return event.offset if event.kind == "end" else event.offset + 1


def _check_state(events: Sequence[Event]) -> Iterable[Violation]:
    """Check each key as a register with one writer, whose values count upwards."""
    broken, invented, again, skipped = [], [], [], []
    due = {(event.topic, event.number) for event in events if event.kind in ("set_acked", "stored")}
    told: dict[tuple[str, int, str], Event] = {}
    known: dict[str, list[Event]] = defaultdict(list)
    highest: dict[str, int] = defaultdict(int)
    for event in events:
        news = known[event.topic]
        if event.kind == "set":
            highest[event.topic] = max(highest[event.topic], event.number)
        elif event.kind == "found":
            before = _latest(news, event.begun)
            if before is not None and event.number < before.number:
                broken.append((before, event))
            if event.number > highest[event.topic]:
                invented.append((event,))
            if event.session:  # of a subscription
                last = told.get((event.who, event.session, event.topic))
                told[event.who, event.session, event.topic] = event
                if last is not None and event.number <= last.number:
                    again.append((last, event))
                if last is not None and any(
                    (event.topic, number) in due for number in range(last.number + 1, event.number)
                ):
                    skipped.append((last, event))
        elif event.kind == "alive":
            before = _latest(news, event.begun)
            last = told.get((event.who, event.session, event.topic))
            if before is not None and (last is None or last.number < before.number):
                skipped.append((before, event))
        if event.kind in ("set_acked", "found") and (not news or event.number > news[-1].number):
            news.append(event)
    yield from _some("a read brought a value older than was acknowledged or read before it began", "stale", broken)
    yield from _some("a read brought a value that nobody had set", "two contents", invented)
    yield from _some("a subscription brought a value again, or an older one", "repeated", again)
    yield from _some("a subscription skipped a value that was acknowledged or stored", "skipped", skipped)


def _check_connections(events: Sequence[Event]) -> Iterable[Violation]:
    """Check that locks and wills belong to connections that are answered.

    When a connection ends, its client may notice that late. So it counts as alive only up to its last question that
    was answered.
    """
    asked: dict[tuple[str, int], float] = {}
    freed: dict[tuple[str, int, str], float] = {}
    for event in events:
        if event.kind == "alive":
            asked[event.who, event.session] = event.begun
        elif event.kind == "freed":
            freed[event.who, event.session, event.topic] = event.at

    def has_until(event: Event) -> float:
        connection = event.who, event.session
        return min(asked.get(connection, event.at), freed.get((*connection, event.topic), math.inf))

    shared, early, again = [], [], []
    holders: dict[str, Event] = {}  # by lock: who has it for longest
    wills: dict[str, Event] = {}
    for event in events:
        if event.kind == "holds":
            holder = holders.setdefault(event.topic, event)
            if holder is not event and has_until(holder) > event.at:
                shared.append((holder, event))
            if has_until(event) > has_until(holder):
                holders[event.topic] = event
        elif event.kind == "will":
            wills[event.topic] = event
        elif event.kind == "executed":
            will = wills.get(event.topic)
            if will is not None and asked.get((will.who, will.session), 0.0) > event.at:
                early.append((will, event))
            if event.number > 1:
                again.append((event,))
    yield from _some("a lock was given to somebody while another connection held it", "shared", shared)
    yield from _some("a will was executed while its client was still answered", "early", early)
    yield from _some("a will was executed again", "early", again)


def _check_due(events: Sequence[Event]) -> Iterable[Violation]:
    done = {(event.who, event.value) for event in events if event.kind == "done"}
    stuck = [(event,) for event in events if event.kind == "due" and (event.who, event.value) not in done]
    yield from _some("something that was due has not happened", "stuck", stuck)


def _latest(news: Sequence[Event], before: float) -> Event | None:
    """Return the last of some events, in the order of their times, that happened before a time."""
    low, high = 0, len(news)
    while low < high:
        middle = (low + high) // 2
        if news[middle].at < before:
            low = middle + 1
        else:
            high = middle
    return news[low - 1] if low else None
