"""The checker finds each kind of broken promise, and nothing where all is as promised."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.checker import ON_THEIR_WAY, check
from tests.cluster.history import Event, History, Kind, read_history, write_history


class Script:
    """A history whose events are one second apart."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._clock = itertools.count(1)

    def add(self, who: str, kind: Kind, **more: Any) -> None:
        self.events.append(Event(float(next(self._clock)), who, kind, **{"topic": "t", **more}))

    def publish(self, value: str, offset: int, who: str = "p", partition: int = 0) -> None:
        self.add(who, "sent", value=value)
        self.add(who, "acked", value=value, partition=partition, offset=offset)

    def read(self, *values: str, who: str = "audit", first: int = 0) -> None:
        for number, value in enumerate(values):
            self.add(who, "read", value=value, partition=0, offset=first + number)

    def join(self, who: str = "c", style: str = "follow", session: int = 1) -> None:
        self.add(who, "joined", session=session, style=style)

    def get(self, value: str, offset: int = -1, style: str = "follow", session: int = 1, who: str = "c") -> None:
        partition = 0 if offset >= 0 else -1
        self.add(who, "got", value=value, partition=partition, offset=offset, session=session, style=style)

    def find(self, number: int, begun: float, who: str = "r") -> None:
        self.add(who, "found", topic="k", number=number, begun=begun)

    @property
    def now(self) -> float:
        """A time behind all events so far."""
        return self.events[-1].at + 0.5

    def broken(self) -> list[str]:
        return [violation.promise for violation in check(self.events)]


@pytest.fixture
def script() -> Script:
    """Two records that were published, and a third whose outcome is unknown and that is there."""
    made = Script()
    made.publish("a", 0)
    made.publish("b", 1)
    made.add("p", "sent", value="c")
    made.add("p", "unknown", value="c")
    return made


def test_a_history_as_promised_is_good(script: Script) -> None:
    script.join()
    script.get("a", 0)
    script.join(session=2)
    script.get("b", 1, session=2)
    script.add("e", "end", partition=0, offset=2, begun=script.now)
    script.join("g", "group")
    for session in (1, 2):  # a group may bring again what was not acked in time
        script.get("a", 0, "group", session, "g")
    script.get("b", 1, "group", 2, "g")
    script.get("c", 2, "group", 2, "g")
    script.read("a", "b", "c")
    script.read("a", "b", "c", who="another audit")
    script.add("round", "due", value="will")
    script.add("round", "done", value="will")
    assert check(script.events) == []


def test_a_record_whose_outcome_is_unknown_may_be_missing(script: Script) -> None:
    script.read("a", "b")
    assert script.broken() == []


def test_an_acknowledged_record_that_is_not_there_is_lost(script: Script) -> None:
    script.read("a", "c")
    assert "lost" in script.broken()


def test_a_record_that_only_one_member_has_lost_is_lost(script: Script) -> None:
    script.read("a", "b", "c")
    script.read("a", who="another audit")
    assert script.broken() == ["lost"]


def test_a_record_that_a_consumer_saw_and_nobody_finds_later_is_lost(script: Script) -> None:
    script.join()
    for offset, value in enumerate("abc"):
        script.get(value, offset)
    script.read("a", "b")
    assert script.broken() == ["lost"]


def test_an_offset_with_two_contents_is_found(script: Script) -> None:
    script.join()
    script.get("a", 0)
    script.get("c", 1)  # an owner that was not the owner any more has served it
    script.read("a", "b", "c")
    assert script.broken() == ["two contents"]


def test_two_acknowledgements_of_one_offset_are_found(script: Script) -> None:
    script.publish("d", 1)
    script.read("a", "b", "d")
    assert "two contents" in script.broken()


def test_offsets_with_a_gap_are_found(script: Script) -> None:
    script.read("a", "b")
    script.read("c", first=3)
    assert script.broken() == ["two contents"]


def test_a_record_that_is_there_twice_is_found(script: Script) -> None:
    script.read("a", "b", "c", "c")
    assert script.broken() == ["copied"]


def test_records_of_one_publisher_in_another_order_are_found() -> None:
    script = Script()
    for value in "ab":
        script.add("p", "sent", value=value)  # both on the way at once
    for value in "ba":
        script.add("p", "acked", value=value)
    script.read("b", "a")
    assert script.broken() == ["disorder"]


def test_a_record_before_another_that_was_acknowledged_when_it_was_sent_is_found() -> None:
    script = Script()
    script.add("p", "sent", value="a")
    script.add("p", "acked", value="a")
    script.add("q", "sent", value="b")
    script.add("q", "acked", value="b")
    script.read("b", "a")
    assert script.broken() == ["disorder"]


def test_an_unknown_record_may_come_late_but_not_early(script: Script) -> None:
    script.publish("d", 2)
    script.read("a", "b", "d", "c")
    assert script.broken() == []
    early = Script()
    early.publish("a", 1)
    early.add("p", "sent", value="b")
    early.add("p", "unknown", value="b")
    early.read("b", "a")
    assert early.broken() == ["disorder"]


def test_a_record_that_nobody_has_sent_is_found(script: Script) -> None:
    script.read("a", "b", "x")
    assert script.broken() == ["disorder"]


@pytest.mark.parametrize("style", ["follow", "group", "queue", "live"])
def test_a_session_that_is_handed_a_record_twice_is_found(script: Script, style: str) -> None:
    script.join(style=style)
    for value in "abcb":
        script.get(value, style=style)
    script.read("a", "b", "c")
    assert "repeated" in script.broken()


def test_a_reader_by_offset_may_not_read_again_after_it_connected_again(script: Script) -> None:
    script.join()
    for session, offset in ((1, 0), (1, 1), (2, 1), (2, 2)):
        script.get("abc"[offset], offset, session=session)
    script.read("a", "b", "c")
    assert "repeated" in script.broken()


def test_a_reader_by_offset_that_skips_is_found(script: Script) -> None:
    script.join()
    script.get("a", 0)
    script.get("c", 2)
    script.read("a", "b", "c")
    assert script.broken() == ["skipped"]


def test_a_group_that_misses_a_record_is_found(script: Script) -> None:
    script.join(style="group")
    script.get("a", 0, "group")
    script.get("c", 2, "group")
    script.read("a", "b", "c")
    assert script.broken() == ["skipped"]


@pytest.mark.parametrize("style", ["queue", "stream"])
@pytest.mark.parametrize("ended", ["joined", "left"])
@pytest.mark.parametrize(("more", "broken"), [(0, []), (1, ["skipped"])])
def test_a_queue_misses_at_most_what_was_on_its_way_to_sessions_that_ended(
    style: str, ended: Kind, more: int, broken: list[str]
) -> None:
    missing = ON_THEIR_WAY[style] + more
    script = Script()
    for number in range(missing + 1):
        script.publish(f"v{number}", number)
    script.add("c", ended, session=1, style=style)
    script.join(style=style, session=2)
    script.get(f"v{missing}", style=style, session=2)
    script.read(*[f"v{number}" for number in range(missing + 1)])
    assert script.broken() == broken


def test_a_stream_that_has_not_ended_misses_nothing(script: Script) -> None:
    script.join(style="stream")
    script.get("b", style="stream")
    script.read("a", "b")
    assert script.broken() == ["skipped"]


def test_a_listener_may_miss_what_it_likes(script: Script) -> None:
    script.join(style="live")
    script.get("b", style="live")
    script.read("a", "b", "c")
    assert script.broken() == []


def test_an_end_before_an_acknowledged_record_is_stale(script: Script) -> None:
    asked = script.now
    script.add("e", "end", partition=0, offset=1, begun=asked)
    assert script.broken() == ["stale"]


def test_an_end_that_was_asked_for_before_the_acknowledgement_is_not_stale() -> None:
    script = Script()
    script.publish("a", 0)
    script.add("e", "end", partition=0, offset=0, begun=1.5)
    assert script.broken() == []


def test_an_end_before_one_that_was_told_already_is_stale(script: Script) -> None:
    script.add("e", "end", partition=0, offset=9, begun=script.now)
    script.add("f", "end", partition=0, offset=8, begun=script.now)
    assert script.broken() == ["stale"]


def _set(script: Script, number: int, *, acked: bool = True) -> None:
    script.add("w", "set", topic="k", number=number)
    script.add("w", "set_acked" if acked else "set_unknown", topic="k", number=number)


def test_a_value_older_than_the_acknowledged_one_is_stale() -> None:
    script = Script()
    _set(script, 1)
    _set(script, 2)
    script.find(1, script.now)
    assert script.broken() == ["stale"]


def test_a_read_that_began_before_the_acknowledgement_may_bring_either_value() -> None:
    script = Script()
    _set(script, 1)
    begun = script.now
    _set(script, 2)
    script.find(1, begun)
    assert script.broken() == []


def test_a_value_older_than_one_that_was_read_is_stale() -> None:
    script = Script()
    _set(script, 1)
    _set(script, 2, acked=False)
    script.find(2, script.now)
    script.find(1, script.now, who="another")
    assert script.broken() == ["stale"]


def test_a_value_that_nobody_has_set_is_found() -> None:
    script = Script()
    _set(script, 1)
    script.find(2, script.now)
    assert script.broken() == ["two contents"]


@pytest.mark.parametrize(("second", "session", "broken"), [(2, 1, []), (1, 1, ["repeated"]), (1, 2, [])])
def test_a_session_is_told_of_a_value_once(second: int, session: int, broken: list[str]) -> None:
    script = Script()
    for number in (1, 2):
        _set(script, number, acked=False)
    script.add("w", "found", topic="k", number=1, session=1, begun=0.5)
    script.add("w", "found", topic="k", number=second, session=session, begun=0.5)
    assert script.broken() == broken


@pytest.mark.parametrize(("acked", "session", "broken"), [(False, 1, []), (True, 1, ["skipped"]), (True, 2, [])])
def test_a_session_is_told_of_each_acknowledged_value(acked: bool, session: int, broken: list[str]) -> None:
    script = Script()
    for number in (1, 2, 3):
        _set(script, number, acked=acked)
    script.add("w", "found", topic="k", number=1, session=1, begun=0.5)
    script.add("w", "found", topic="k", number=3, session=session, begun=0.5)
    assert script.broken() == broken


@pytest.mark.parametrize(("stored", "broken"), [(2, ["skipped"]), (9, [])])
def test_a_session_is_told_of_each_stored_value(stored: int, broken: list[str]) -> None:
    script = Script()
    for number in (1, 2, 3):
        _set(script, number, acked=False)
    for number in (1, 3):
        script.add("w", "found", topic="k", number=number, session=1, begun=0.5)
    script.add("log", "stored", topic="k", number=stored)
    assert script.broken() == broken


def _live(script: Script, who: str, *, begun: float = 0.0, session: int = 1, topic: str = "") -> None:
    script.add(who, "alive", topic=topic, session=session, begun=begun or script.now)


@pytest.mark.parametrize(
    ("found", "asked", "broken"),
    [([2], "late", []), ([], "late", ["skipped"]), ([], "early", []), ([1], "late", ["skipped"])],
)  # fmt: skip
def test_a_connection_that_is_answered_has_heard_all_that_was_acknowledged_before_it_asked(
    found: list[int], asked: str, broken: list[str]
) -> None:
    script = Script()
    _set(script, 1)
    early = script.now
    _set(script, 2)
    late = script.now
    for number in found:
        script.add("q", "found", topic="k", number=number, session=1, begun=0.5)
    if asked == "early":
        script.add("q", "found", topic="k", number=1, session=1, begun=0.5)
    _live(script, "q", topic="k", begun=late if asked == "late" else early)
    assert script.broken() == broken


@pytest.mark.parametrize(
    ("freed", "lives", "broken"), [(False, True, ["shared"]), (True, True, []), (False, False, [])]
)
def test_a_lock_that_is_given_away_while_its_holder_is_still_answered_is_shared(
    freed: bool, lives: bool, broken: list[str]
) -> None:
    script = Script()
    script.add("q", "holds", session=1)
    _live(script, "q")
    if freed:
        script.add("q", "freed", session=1)
    script.add("rival", "holds", session=1)
    script.add("rival", "freed", session=1)
    if lives:
        _live(script, "q")
    assert script.broken() == broken


def test_a_question_from_before_the_rival_had_the_lock_shows_nothing() -> None:
    script = Script()
    script.add("q", "holds", session=1)
    asked = script.now
    script.add("rival", "holds", session=1)
    _live(script, "q", begun=asked)
    assert script.broken() == []


def test_a_lock_may_go_from_an_ended_session_of_a_client_to_its_next_one() -> None:
    script = Script()
    for session in (1, 2):
        script.add("q", "holds", session=session)
        _live(script, "q", session=session)
    assert script.broken() == []


@pytest.mark.parametrize(("session", "broken"), [(1, ["early"]), (2, [])])
def test_a_will_that_is_executed_while_its_client_is_still_answered_is_early(session: int, broken: list[str]) -> None:
    script = Script()
    script.add("q", "will", topic="w", session=1)
    _live(script, "q")
    script.add("looker", "executed", topic="w")
    _live(script, "q", session=session)
    assert script.broken() == broken


@pytest.mark.parametrize(("times", "broken"), [(1, []), (2, ["early"])])
def test_a_will_is_executed_once(times: int, broken: list[str]) -> None:
    script = Script()
    script.add("q", "will", topic="w", session=1)
    script.add("log", "executed", topic="w", number=times)
    assert script.broken() == broken


def test_what_was_due_and_did_not_happen_is_stuck(script: Script) -> None:
    script.add("round", "due", value="will")
    assert script.broken() == ["stuck"]


def test_a_history_that_was_kept_is_judged_as_before(script: Script, tmp_path: Path) -> None:
    script.read("a")
    write_history(tmp_path / "h.gz", script.events)
    assert check(read_history(tmp_path / "h.gz")) == check(script.events) != []


def test_a_history_counts_and_wakes(tmp_path: Path) -> None:
    history = History()
    history.add("p", "sent", value="a")
    assert history.wait_for("p", "sent", 1, 0)
    assert not history.wait_for("p", "acked", 1, 0)
    assert [event.value for event in history.events()] == ["a"]
