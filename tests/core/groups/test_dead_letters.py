"""Dead letters as records: what they carry, what they were, and what their topic is called."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from babelbus.core.access import Identity, Principal
from babelbus.core.groups import GroupSettings
from babelbus.core.groups.dead_letters import OURS, DeadLetter, NoDeadLetterError, make, origin, read, topic_name
from babelbus.core.groups.registry import _rooted
from babelbus.core.record import Record
from babelbus.core.subject import check_topic_name
from babelbus.storage.disk.store import folder_name
from tests.storage.helpers import NOW, headers

LETTER = DeadLetter("plant", 2, 77, "g", 16, "nack", NOW)


def without_ours(pairs: list[tuple[bytes, bytes | None]]) -> list[tuple[bytes, bytes | None]]:
    return [pair for pair in pairs if pair[0] not in OURS]


def as_record(record: Record) -> Record:
    event = make("dead-letters/g", record, LETTER)
    return Record(event.payload, event.key, event.headers, event.timestamp)


@given(st.none() | st.binary(max_size=20), st.none() | st.binary(max_size=9), headers.map(without_ours))
def test_a_dead_letter_tells_what_it_was(
    payload: bytes | None, key: bytes | None, some: list[tuple[bytes, bytes | None]]
) -> None:
    stored = as_record(Record(payload, key, tuple(some), NOW))
    assert read(stored) == LETTER
    event = origin(stored)
    assert (event.subject, event.payload, event.key, list(event.headers)) == ("plant", payload, key, some)


def test_a_dead_letter_of_a_dead_letter_says_the_last_origin() -> None:
    first = as_record(Record(b"x", timestamp=NOW))
    second = make("dead-letters/h", first, DeadLetter("dead-letters/g", 0, 5, "h", 1, "again", NOW))
    stored = Record(second.payload, second.key, second.headers, second.timestamp)
    assert read(stored).reason == "again"
    assert len(stored.headers) == 7


def test_a_record_with_as_many_headers_as_there_can_be_still_becomes_one() -> None:
    full = tuple((b"h%d" % number, b"") for number in range(127))
    stored = as_record(Record(b"x", None, full, NOW))
    assert len(stored.headers) <= 127
    assert read(stored) == LETTER


def test_the_subject_of_the_origin_comes_back() -> None:
    stored = as_record(Record(b"x", None, ((b"ce_subject", b"plant/line1"),), NOW))
    assert origin(stored).subject == "plant/line1"


def test_somebody_elses_record_is_no_dead_letter() -> None:
    with pytest.raises(NoDeadLetterError):
        read(Record(b"x", timestamp=NOW))


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=249))
def test_every_group_has_a_topic_for_its_dead_letters(group: str) -> None:
    name = topic_name(group)
    check_topic_name(name)
    folder_name(name)
    assert topic_name(group + "x") != name


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=62))
@example("é" * 40)
def test_every_group_of_a_tenant_has_a_topic_for_its_dead_letters(group: str) -> None:
    acme = Identity("test", "acme", None, Principal("acme", root="tenants/acme").below)
    name = _rooted(acme, group, GroupSettings()).dead_letter_topic
    assert name is not None
    assert name.startswith("tenants/acme/dead-letters/")
    check_topic_name(name)
    folder_name(name)
