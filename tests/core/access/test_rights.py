"""Rights: any row that denies wins, else any that allows; held against a plain reading of the rows."""

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.access import (
    ADMIN_RIGHTS,
    CLIENT,
    CLIENT_RIGHTS,
    NOBODY,
    SERVER,
    AccessRefusedError,
    Action,
    Effect,
    Identity,
    InvalidAccessError,
    Narrowing,
    Rights,
    Row,
    check_may,
    check_topic,
    may,
    may_topic,
)
from babelbus.core.access.model import read_pattern
from babelbus.core.access.rights import RowSet
from babelbus.core.access.root import root_of
from babelbus.core.subject import EVERYTHING, PathPattern, Pattern, below, exactly
from babelbus.protocols.sbus.patterns import SbusPattern

ELEMENTS = ["a", "b", ""]
SUBJECTS = ["/".join(parts) for length in (1, 2, 3) for parts in product([*ELEMENTS, "x"], repeat=length)]


def rights(*rows: tuple[str, str] | tuple[str, str, str], name: str = "alice") -> Rights:
    return Rights(name, [RowSet(row(*one) for one in rows)])


def row(action: str, pattern: str, effect: str = "allow") -> Row:
    made = Row("alice", action, pattern, Effect(effect))
    made.check()
    return made


def concerns(one: Row, action: Action, subject: str) -> bool:
    """Return whether a row is about a subject, by the words of the documentation alone."""
    if one.action not in ("*", action.value):
        return False
    wanted, given = one.pattern.split("/"), subject.split("/")
    if wanted[-1] == "#":
        wanted = wanted[:-1]
        if len(given) < len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(a in ("?", b) for a, b in zip(wanted, given, strict=True))


def plainly(rows: list[Row], action: Action, subject: str) -> bool:
    effects = {one.effect for one in rows if concerns(one, action, subject)}
    return Effect.DENY not in effects and Effect.ALLOW in effects


patterns = st.builds(
    lambda parts, rest: "/".join([*parts, *(["#"] if rest or not parts else [])]),
    st.lists(st.sampled_from([*ELEMENTS, "?"]), max_size=3),
    st.booleans(),
).filter(bool)
rows_of_many = st.lists(
    st.builds(row, st.sampled_from(["publish", "read", "*"]), patterns, st.sampled_from(["allow", "allow", "deny"])),
    max_size=25,
)
wanted_patterns = st.one_of(
    st.builds(
        PathPattern,
        st.lists(st.sampled_from([*ELEMENTS, None]), max_size=3).map(tuple),
        st.booleans(),
    ),
    st.sampled_from([b"a*", b"*", b"a/*", b"a*/b", b"a/", b"*/", b"a/b", b""]).map(SbusPattern),
)


@given(rows_of_many, st.randoms())
def test_an_answer_is_that_of_a_plain_reading_and_rows_have_no_order(rows: list[Row], random: Random) -> None:
    mixed = list(rows)
    random.shuffle(mixed)
    made, again = Rights("alice", [RowSet(rows)]), Rights("alice", [RowSet(mixed[:5]), RowSet(mixed[5:])])
    for subject in SUBJECTS:
        expected = plainly(rows, Action.READ, subject)
        assert made.may(Action.READ, subject) is expected
        assert again.may(Action.READ, subject) is expected
        assert made.may(Action.READ, subject) is expected  # from what is remembered


@given(rows_of_many, wanted_patterns)
def test_what_a_pattern_is_said_to_be_granted_is_never_more_than_its_subjects(
    rows: list[Row], pattern: Pattern
) -> None:
    made = Rights("alice", [RowSet(rows)])
    matching = [subject for subject in SUBJECTS if pattern.matches(subject)]
    granted = [subject for subject in matching if plainly(rows, Action.READ, subject)]
    match made.overlaps(Action.READ, pattern):
        case Narrowing.WHOLE:
            assert granted == matching
        case Narrowing.NONE:
            assert granted == []
    assert made.covers(Action.READ, pattern) is (made.overlaps(Action.READ, pattern) is Narrowing.WHOLE)


@given(rows_of_many, st.lists(st.integers(0, 24), max_size=12))
def test_a_set_of_rows_forgets_what_is_taken_out(rows: list[Row], indexes: list[int]) -> None:
    rows = list(dict.fromkeys(rows))
    rows_set = RowSet(rows)
    gone = [rows[index] for index in indexes if index < len(rows)]
    for one in gone:
        rows_set.discard(one)
    left = [one for one in rows if one not in gone]
    made = Rights("alice", [rows_set])
    for subject in SUBJECTS:
        assert made.may(Action.PUBLISH, subject) is plainly(left, Action.PUBLISH, subject)


@pytest.mark.parametrize(
    ("granted", "asked", "answer"),
    [
        ("a/1", PathPattern(("a", None)), Narrowing.PART),
        ("a/?", PathPattern(("a", None)), Narrowing.WHOLE),
        ("a/#", PathPattern(("a", None)), Narrowing.WHOLE),
        ("a/#", below("a"), Narrowing.WHOLE),
        ("a/#", exactly("a"), Narrowing.WHOLE),
        ("a/b/#", below("a"), Narrowing.PART),
        ("a", below("a"), Narrowing.NONE),
        ("b/#", below("a"), Narrowing.NONE),
        ("#", EVERYTHING, Narrowing.WHOLE),
        ("a/#", EVERYTHING, Narrowing.PART),
        ("bb/#", SbusPattern(b"a*"), Narrowing.NONE),
        ("ab", SbusPattern(b"a*"), Narrowing.PART),
        ("?", SbusPattern(b"a*"), Narrowing.WHOLE),
    ],
)
def test_a_pattern_is_granted_whole_in_part_or_not(granted: str, asked: Pattern, answer: Narrowing) -> None:
    assert rights(("subscribe", granted)).overlaps(Action.SUBSCRIBE, asked) is answer


def test_a_deny_inside_makes_a_part_of_a_whole_and_a_deny_around_makes_nothing() -> None:
    made = rights(("*", "#"), ("subscribe", "a/secret/#", "deny"))
    assert made.overlaps(Action.SUBSCRIBE, below("a")) is Narrowing.PART
    assert made.overlaps(Action.SUBSCRIBE, below("a/secret")) is Narrowing.NONE
    assert made.overlaps(Action.READ, below("a")) is Narrowing.WHOLE


def test_a_topic_is_its_name_and_all_below() -> None:
    made = rights(("read", "orders/#"), ("consume", "orders"))
    assert made.may_topic(Action.READ, "orders")
    assert not made.may_topic(Action.CONSUME, "orders")
    assert made.may_topic(Action.READ, "orders/new")
    assert not made.may_topic(Action.READ, "$state")
    assert rights(("read", "#")).may_topic(Action.READ, "$state")


def test_the_topics_of_the_gate_are_for_who_administers() -> None:
    reader = Identity("jebp:a", "a", rights(("read", "#")))
    assert not may_topic(reader, Action.READ, "$access")
    assert not may_topic(reader, Action.READ, "$audit")
    assert may_topic(Identity("jebp:a", "a", ADMIN_RIGHTS), Action.READ, "$audit")


def test_the_name_of_a_principal_stands_for_one_whole_element() -> None:
    rows = RowSet([row("publish", "plant/{name}/#")])
    assert Rights("s1", [rows]).may(Action.PUBLISH, "plant/s1/heat")
    assert not Rights("s1", [rows]).may(Action.PUBLISH, "plant/s2/heat")
    for name in ("s1/heat", "?", "#", "", "a,b", "{name}", "x y"):
        made = Rights(name, [rows])
        assert not any(made.may(Action.PUBLISH, f"plant/{part}/heat") for part in ("s1", name, "heat"))


def test_a_brace_of_a_subject_is_written_twice() -> None:
    made = Rights("s1", [RowSet([row("publish", "json/{{id}}/{{/}}}}/{{name}}/{name}")])])
    assert made.may(Action.PUBLISH, "json/{id}/{/}}/{name}/s1")
    assert not made.may(Action.PUBLISH, "json/{{id}}/{{/}}}}/{{name}}/s1")


def test_a_place_of_an_earlier_version_that_stands_for_nothing_allows_its_text_and_denies_every_element() -> None:
    allowed = Row("alice", "publish", "plant/{principal}/x")
    denied = Row("alice", "publish", "plant/{principal}/#", Effect.DENY)
    subjects = ("plant", "plant/{principal}/x", "plant/s1/x", "plant/s2")
    for rows, answers in (
        ([allowed], [False, True, False, False]),
        ([row("publish", "#"), denied], [True, False, False, False]),
    ):
        for each in rows:
            if "{" in each.pattern:
                with pytest.raises(InvalidAccessError, match=r"\{principal\} stands for nothing"):
                    each.check()
        made = Rights("s1", [RowSet(rows)])
        assert [made.may(Action.PUBLISH, subject) for subject in subjects] == answers


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "a/#/b",
        "a/*",
        "*",
        "a/x{name}",
        "x" * 5000,
        "a/{user}/#",
        "{Name}",
        "{{{name}",
        "a{",
        "}",
        "{{x}",
        "{name}}",
    ],
)
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidAccessError):
        Row("alice", "read", pattern).check()


@pytest.mark.parametrize("who", ["", "a/b", "role:", "role:a/b", "a b", "a?", "role:role:x", "x" * 200])
def test_a_name_that_is_none_is_refused(who: str) -> None:
    with pytest.raises(InvalidAccessError):
        Row(who, "read", "a").check()


def test_an_action_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidAccessError, match="publish, subscribe, read, consume, write-state, manage, admin"):
        Row("alice", "write", "a").check()


def test_rights_change_under_the_feet_of_who_holds_them() -> None:
    made = rights(("publish", "a"))
    client = Identity("jebp:alice", "alice", made)
    assert may(client, Action.PUBLISH, "a")
    made.replace([])
    assert not may(client, Action.PUBLISH, "a")


def test_nobody_may_anything_and_the_server_everything() -> None:
    for action in Action:
        assert not may(NOBODY, action, "a")
        assert may(SERVER, action, "a")
        assert may(CLIENT, action, "a")
    assert CLIENT_RIGHTS.may(Action.PUBLISH, "a")
    assert not CLIENT_RIGHTS.may(Action.MANAGE, "a")
    assert not CLIENT_RIGHTS.may(Action.ADMIN, "a")


def test_a_refusal_names_action_and_subject() -> None:
    with pytest.raises(AccessRefusedError, match="no right to publish 'a'"):
        check_may(NOBODY, Action.PUBLISH, "a")
    with pytest.raises(AccessRefusedError, match="no right to read 'a'"):
        check_topic(NOBODY, Action.READ, "a")


def test_what_is_remembered_of_subjects_has_a_bound() -> None:
    made = rights(("publish", "#"))
    for number in range(10_000):
        assert made.may(Action.PUBLISH, f"a/{number}")
    assert made.may(Action.PUBLISH, "a" * 100_000)


def test_the_first_subject_that_is_refused_is_named() -> None:
    made = rights(("publish", "a/#"))
    for _ in range(2):  # asked anew, and remembered
        assert made.find_refused(Action.PUBLISH, ["a/1", "a/2"]) is None
        assert made.find_refused(Action.PUBLISH, ["a/1", "b", "c"]) == "b"
    assert made.find_refused(Action.PUBLISH, []) is None


def test_a_row_of_everything_is_one_pattern() -> None:
    assert read_pattern("#") == (EVERYTHING,)


@pytest.mark.parametrize("shape", ["plant/{}/#", "{}", "a/?/{}", "a/b/c/{}/?", "?/{}/#"])
def test_a_decision_looks_at_few_of_ten_thousand_rows(shape: str) -> None:
    rows = RowSet([row("publish", shape.format(number)) for number in range(10_000)])
    made = Rights("alice", [rows])
    subject = shape.format(7).replace("#", "x").replace("?", "y")
    looked = 0
    match = type(next(iter(rows._allowing.candidates(subject)))).match

    def counted(self: object, parts: list[str]) -> bool:
        nonlocal looked
        looked += 1
        return match(self, parts)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("babelbus.core.access.rights._Subjects.match", counted)
        assert made.may(Action.PUBLISH, subject)
        assert not made.may(Action.PUBLISH, subject + "/not/there/z" if "#" not in shape else "other/z/w")
    assert looked < 50


ROOTS = st.sampled_from(["a", "a/b", "b"])


@given(rows_of_many, ROOTS)
def test_the_rights_of_a_rooted_principal_end_at_its_root(rows: list[Row], root: str) -> None:
    made = Rights("alice", [RowSet(rows)], root=root_of(root))
    for subject in SUBJECTS:
        expected = subject.startswith(f"{root}/") and plainly(rows, Action.READ, subject)
        assert made.may(Action.READ, subject) is expected


@given(rows_of_many, wanted_patterns, ROOTS)
def test_a_pattern_over_the_end_of_a_root_is_never_granted_whole(rows: list[Row], pattern: Pattern, root: str) -> None:
    made = Rights("alice", [RowSet(rows)], root=root_of(root))
    matching = [subject for subject in SUBJECTS if pattern.matches(subject)]
    granted = [subject for subject in matching if made.may(Action.READ, subject)]
    match made.overlaps(Action.READ, pattern):
        case Narrowing.WHOLE:
            assert granted == matching
        case Narrowing.NONE:
            assert granted == []


def test_a_rooted_principal_with_every_right_reads_its_own_topics_alone() -> None:
    made = Rights("acme", [RowSet([row("*", "#")])], root=root_of("tenants/acme"))
    allowed = {"tenants/acme/orders", "tenants/acme/orders/new"}
    for name in (*allowed, "orders", "tenants", "tenants/acme", "tenants/acmeX/orders", "$state", "$access"):
        assert made.may_topic(Action.READ, name) is (name in allowed)
