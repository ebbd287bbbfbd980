"""The table: entries from several origins, one live object of rights for each principal, faults and explanations."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.config import QuotaSettings
from babelbus.core.access import (
    ANONYMOUS,
    Action,
    Credential,
    Effect,
    InvalidAccessError,
    Principal,
    Row,
    Table,
)
from babelbus.core.access.table import Entry, Mode, edits_for


def table(*entries: Entry) -> Table:
    made = Table()
    change(made, put=entries)
    return made


def change(made: Table, put: Sequence[Entry] = (), remove: Sequence[Entry] = ()) -> None:
    edits = edits_for(put, remove)
    made.check(edits)
    made.apply(edits)


ALICE = Principal("alice", ("sensors",))
PUBLISH = Row("role:sensors", "publish", "plant/{name}/#")


def test_a_principal_has_its_rows_those_of_its_roles_and_those_of_everybody() -> None:
    made = table(ALICE, PUBLISH, Row("alice", "read", "a"), Row("*", "read", "b"), Row("bob", "read", "c"))
    rights = made.rights("alice")
    assert rights.may(Action.PUBLISH, "plant/alice/x")
    assert [subject for subject in "abc" if rights.may(Action.READ, subject)] == ["a", "b"]
    assert [subject for subject in "abc" if made.rights(ANONYMOUS).may(Action.READ, subject)] == ["b"]
    assert not any(made.rights("unknown").may(Action.READ, subject) for subject in "abc")


def test_rights_that_a_session_holds_follow_the_table() -> None:
    made = table(ALICE, PUBLISH)
    rights = made.rights("alice")
    assert made.rights("alice") is rights
    assert rights.may(Action.PUBLISH, "plant/alice/x")
    change(made, remove=[PUBLISH])
    assert not rights.may(Action.PUBLISH, "plant/alice/x")
    change(made, put=[Row("*", "publish", "#")])
    assert rights.may(Action.PUBLISH, "plant/alice/x")
    change(made, put=[Row("alice", "publish", "plant/alice/#", Effect.DENY)])
    assert not rights.may(Action.PUBLISH, "plant/alice/x")
    change(made, remove=[ALICE])
    assert not rights.may(Action.PUBLISH, "y")


SUBSCRIBE, DENIED = Row("role:sensors", "subscribe", "a/#"), Row("*", "read", "b", Effect.DENY)


@pytest.mark.parametrize(
    ("put", "remove", "is_lost"),
    [
        ([Row("alice", "*", "#")], [], False),
        ([DENIED], [], True),
        ([Row("alice", "publish", "#", Effect.DENY)], [], False),
        ([Row("bob", "subscribe", "#", Effect.DENY)], [], False),
        ([], [SUBSCRIBE], True),
        ([], [PUBLISH], False),
        ([], [ALICE], True),
        ([msgspec.structs.replace(ALICE, roles=())], [], True),
        ([msgspec.structs.replace(ALICE, root="tenants/alice")], [], True),
        ([msgspec.structs.replace(ALICE, quotas=QuotaSettings(connections=1))], [], False),
    ],
)
def test_rights_say_whether_a_change_took_something_that_a_client_is_sent(
    put: list[Entry], remove: list[Entry], is_lost: bool
) -> None:
    made = table(ALICE, PUBLISH, SUBSCRIBE)
    rights = made.rights("alice")

    def has_lost() -> bool:
        """Return whether the last step took something, and forget it."""
        is_lost = rights.lost
        made.forget_losses()
        return is_lost

    assert not has_lost()
    change(made, put, remove)
    assert has_lost() is is_lost
    listed = Row("*", "subscribe", "c", Effect.DENY)
    made.import_entries("file", [listed])
    assert has_lost()
    made.import_entries("file", [listed])
    assert not has_lost()


def test_rows_that_do_not_concern_a_principal_leave_its_answers_alone() -> None:
    made = table(ALICE)
    version = made.rights("alice").version
    rights = made.rights("alice")
    change(made, put=[Row("bob", "read", "a"), Row("role:other", "read", "a")])
    assert rights.version == version
    change(made, put=[Row("role:sensors", "read", "a")])
    assert rights.version > version


def test_a_row_of_two_origins_stays_until_the_last_takes_it_away() -> None:
    row = Row("alice", "read", "a")
    made = table(ALICE, row)
    made.import_entries("file", [row])
    change(made, remove=[row])
    assert made.rights("alice").may(Action.READ, "a")
    made.import_entries("file", [])
    assert not made.rights("alice").may(Action.READ, "a")


def test_the_principal_of_the_table_wins_over_an_imported_one() -> None:
    made = table(ALICE)
    made.import_entries("lists", [Principal("alice", ("admin",)), Principal("bob", ("client",))])
    assert not made.rights("alice").may(Action.ADMIN, "a")
    assert made.rights("bob").may(Action.PUBLISH, "a")
    assert [(one.name, origin) for one, origin in made.principals()] == [("alice", "table"), ("bob", "lists")]


@pytest.mark.parametrize("name", ["role:admin", "role:sensors"])
def test_a_client_of_a_list_that_is_called_like_a_role_has_no_rows_of_the_role(name: str) -> None:
    made = table(Row("role:sensors", "manage", "#"))
    made.import_entries("lists", [Principal(name, ("client",))])
    rights = made.rights(name)
    assert rights.may(Action.PUBLISH, "a")
    change(made, put=[Row("role:sensors", "admin", "#")])
    for each in (rights, made.rights_after((), name)):
        assert not each.may(Action.MANAGE, "a")
        assert not each.may(Action.ADMIN, "$access")
    assert made.whos(name) == ("role:client", "*")


def test_a_proof_belongs_to_one_principal_whatever_the_id_of_its_credential() -> None:
    key, same = (Credential("jebp", id_, {"fingerprint": "ab" * 32}) for id_ in ("one", "two"))
    made = table(Principal("alice", (), (key,)))
    with pytest.raises(InvalidAccessError, match="principal alice has the jebp credential"):
        change(made, put=[Principal("bob", (), (same,))])
    change(made, put=[Principal("alice"), Principal("bob", (), (same,))])  # it may go from one to the other
    made.import_entries("lists", [Principal("carol", ("client",), (Credential("peer", "p", {"uid": 7}),))])
    with pytest.raises(InvalidAccessError, match="principal carol has the peer credential"):
        change(made, put=[Principal("bob", (), (Credential("peer", "q", {"uid": 7}),))])


def test_the_name_of_those_who_prove_nothing_is_taken() -> None:
    with pytest.raises(InvalidAccessError):
        change(Table(), put=[Principal(ANONYMOUS)])


def test_an_explanation_has_the_row_that_decides() -> None:
    deny = Row("*", "*", "$sys/#", Effect.DENY)
    made = table(ALICE, PUBLISH, deny, Row("alice", "*", "#"))
    assert made.explain("alice", Action.READ, "$sys/x").row == deny
    assert not made.explain("alice", Action.READ, "$sys/x").allowed
    assert made.explain("alice", Action.PUBLISH, "plant/alice/x").allowed
    nothing = made.explain("carol", Action.READ, "x")
    assert (nothing.allowed, nothing.row, nothing.exists) == (False, None, False)


def test_a_root_comes_goes_and_moves_with_the_principal() -> None:
    made = table(Principal("acme", root="tenants/acme"), Row("acme", "*", "#"))
    rights = made.rights("acme")
    found = made.explain("acme", Action.READ, "orders")
    assert (found.allowed, found.subject) == (True, "tenants/acme/orders")
    assert not made.explain("acme", Action.READ, "$audit").allowed
    assert not rights.may(Action.READ, "orders")
    change(made, put=[Principal("acme", root="tenants/other")])
    assert (rights.may(Action.READ, "tenants/acme/a"), rights.may(Action.READ, "tenants/other/a")) == (False, True)
    change(made, put=[Principal("acme")])
    assert made.root("acme") is None
    assert rights.may(Action.READ, "orders")


def test_a_row_outside_the_root_is_a_fault() -> None:
    made = table(Principal("acme", root="tenants/acme"), Row("acme", "read", "orders/#"), Row("acme", "read", "#"))
    assert made.faults() == [
        "allow acme read orders/#: the subjects of acme are below tenants/acme; patterns are absolute"
    ]


def test_the_row_that_allows_all_of_another_row_is_found() -> None:
    made = table(ALICE, PUBLISH, Row("*", "*", "open/#"), Row("bob", "publish", "#"))
    for row, allowing in (
        (Row("alice", "publish", "plant/alice/x"), PUBLISH),
        (Row("role:sensors", "publish", "plant/{name}/x"), PUBLISH),
        (Row("alice", "publish", "plant/bob/x"), None),
        (Row("alice", "publish", "plant/#"), None),
        (Row("alice", "read", "plant/alice/x"), None),
        (Row("alice", "read", "open/x"), Row("*", "*", "open/#")),
        (Row("bob", "publish", "x/#"), Row("bob", "publish", "#")),
    ):
        assert made.allowing(row) == (None if allowing is None else (allowing, "table"))
    change(made, put=[Row("*", "publish", "plant/alice/#", Effect.DENY)])
    assert made.allowing(Row("alice", "publish", "plant/alice/x")) is None


def test_faults_are_named() -> None:
    made = table(
        ALICE,
        PUBLISH,
        Principal("lonely"),
        Row("role:nobody", "read", "a"),
        Row("gone", "read", "a"),
        Row("alice", "read", "a/b"),
        Row("*", "*", "a/#", Effect.DENY),
    )
    assert made.faults() == [
        "allow alice read a/b: a row that denies covers it, and wins",
        "allow gone read a: there is no principal gone",
        "allow gone read a: a row that denies covers it, and wins",
        "allow role:nobody read a: no principal has the role nobody",
        "allow role:nobody read a: a row that denies covers it, and wins",
        "principal lonely has no rows, also not by a role",
    ]
    assert table(ALICE, PUBLISH).faults() == []


def test_a_misspelt_place_of_an_earlier_version_is_a_fault_and_can_be_removed() -> None:
    old = Row("alice", "read", "plant/{user}/#", Effect.DENY)
    made = table(ALICE, PUBLISH)
    made.apply(edits_for([old]))  # as an earlier version has stored it
    (fault,) = made.faults()
    assert fault.startswith("deny alice read plant/{user}/#: pattern 'plant/{user}/#': {user} stands for nothing")
    change(made, remove=[old])
    assert made.faults() == []


def test_the_mode_is_an_entry() -> None:
    made = table()
    assert not made.enforced
    change(made, put=[Mode(enforce=True)])
    assert made.enforced


names = st.sampled_from(["alice", "bob", "role:r", "role:s", "*"])
some_rows = st.builds(
    Row,
    names,
    st.sampled_from(["read", "*"]),
    st.sampled_from(["a", "a/#", "?", "#", "{name}"]),
    st.sampled_from(Effect),
)
people = st.builds(Principal, st.sampled_from(["alice", "bob"]), st.sampled_from([(), ("r",), ("r", "s")]))


@given(st.lists(st.tuples(st.lists(st.one_of(some_rows, people), max_size=4), st.booleans()), max_size=12))
def test_changes_one_after_the_other_give_what_the_last_table_gives(
    changes: list[tuple[list[Row | Principal], bool]],
) -> None:
    made = Table()
    held = {name: made.rights(name) for name in ("alice", "bob", "anonymous")}
    for entries, remove in changes:
        if remove:
            change(made, remove=entries)
        else:
            change(made, put=entries)
        for subject in ("a", "a/b", "alice"):  # what is remembered must be forgotten in time
            for rights in held.values():
                rights.may(Action.READ, subject)
    fresh = table(*made.entries.values())
    for name, rights in held.items():
        for subject in ("a", "a/b", "b", "alice", "bob"):
            assert rights.may(Action.READ, subject) is fresh.rights(name).may(Action.READ, subject)
