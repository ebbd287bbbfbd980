"""What an identity may do."""

import pytest

from babelbus.core.access import ADMIN_GRANTS, CLIENT_GRANTS, Action, Grant, Identity, may
from babelbus.core.subject import below


def test_nobody_may_anything_without_a_grant() -> None:
    assert not any(may(Identity("jebp:a", "a"), action, "news") for action in Action)


@pytest.mark.parametrize(
    ("grants", "allowed"),
    [(CLIENT_GRANTS, {Action.PUBLISH, Action.SUBSCRIBE}), (ADMIN_GRANTS, set(Action))],
)
def test_the_usual_grants_are_for_every_subject(grants: tuple[Grant, ...], allowed: set[Action]) -> None:
    client = Identity("jebp:a", "a", grants)
    for subject in ("news", "a/b/c", ""):
        assert {action for action in Action if may(client, action, subject)} == allowed


def test_a_grant_holds_for_its_action_and_its_subjects_only() -> None:
    client = Identity("jebp:a", "a", (Grant(Action.PUBLISH, below("plant")),))
    assert may(client, Action.PUBLISH, "plant/line1")
    assert not may(client, Action.PUBLISH, "plant")
    assert not may(client, Action.PUBLISH, "planted/line1")
    assert not may(client, Action.SUBSCRIBE, "plant/line1")
