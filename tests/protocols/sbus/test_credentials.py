"""Secret keys: who may subscribe to which, and whom they are for (docs/specifications/sbus.md, 8.3 and 8.4)."""

import pytest

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.sbus.credentials import Credentials, patterns_of, secret_fields

ROOT, USER = Credentials(0, 0, 77), Credentials(1000, 1000, 77)
KEPT = [
    (b"!/cred////x", ROOT),
    (b"!/cred////", ROOT),
    (b"!/cred", ROOT),
    (b"!/cred/0/0/77/x", ROOT),
    (b"!/cred/1000/1000/77/x", USER),
    (b"!/cred//1000/77/x", USER),
    (b"!/cred///77/x", ROOT),
    (b"!/cred/1000/1000/77/!/cred/1/2/3/x", USER),
    (b"!/foo", USER),
    (b"!a", USER),
    (b"a!/b", USER),
    (b"!", USER),
    (b"", USER),
    (b"*/cred/", USER),
]
CUT = [
    (b"!/cred///", ROOT),
    (b"!/cred//", ROOT),
    (b"!/cred/", ROOT),
    (b"!/cred/whoami", ROOT),
    (b"!/cred/*", ROOT),
    (b"!/cred/*///x", ROOT),
    (b"!/cred///*/x", ROOT),
    (b"!/cred/*/*/*/x", ROOT),
    (b"!/cred/2000/1000/77/x", USER),
    (b"!/cred/00//x", ROOT),
    (b"!/cred///977/x", ROOT),
    (b"!/cred///*77/x", ROOT),
    (b"!/cred/11000/977/77/x", USER),
    (b"!/cred/!/cred/////x", ROOT),
    (b"!/cred/01000/1000/77/x", USER),
    (b"!/cred/00/0/77/x", ROOT),
    (b"!/cred/+0/0/77/x", ROOT),
    (b"!/cred/0/0/77", ROOT),
]


@pytest.mark.parametrize(("pattern", "who"), KEPT)
def test_own_secrets_and_other_keys_may_be_subscribed_to(pattern: bytes, who: Credentials) -> None:
    assert patterns_of(pattern, who)[0] == pattern


@pytest.mark.parametrize(("pattern", "who"), CUT)
def test_secrets_of_others_and_shortened_forms_may_not(pattern: bytes, who: Credentials) -> None:
    with pytest.raises(RemoteProtocolError):
        patterns_of(pattern, who)


def test_empty_fields_stand_for_themselves_and_for_the_own_numbers() -> None:
    assert patterns_of(b"!/cred////a/*", USER) == (b"!/cred////a/*", b"!/cred/1000/1000/77/a/*")
    assert patterns_of(b"!/cred//1000//", USER) == (b"!/cred//1000//", b"!/cred/1000/1000/77/")
    assert patterns_of(b"!/cred/1000/1000/77/a", USER) == (b"!/cred/1000/1000/77/a",)


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        (b"!/cred/1/2/3/x", (b"1", b"2", b"3")),
        (b"!/cred////", (b"", b"", b"")),
        (b"!/cred/1/2/3", None),
        (b"!/cred/a/2/3/x", None),
        (b"!/cred/01/2/3/x", None),
        (b"a/!/cred/1/2/3/x", None),
    ],
)
def test_a_key_is_secret_in_its_full_form_only(key: bytes, fields: tuple[bytes, ...] | None) -> None:
    assert secret_fields(key) == fields
