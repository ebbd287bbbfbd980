"""Tokens: what proves one, and that the server keeps nothing to show."""

import re

import msgspec
import pytest

from babelbus.identities.tokens import id_of_token, make_token, proves_token


def test_a_token_proves_its_credential_until_it_expires() -> None:
    issued = make_token(1000, lifetime_ms=500)
    assert re.fullmatch(r"bb_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", issued.secret)
    assert id_of_token(issued.secret) == issued.credential.id
    assert proves_token(issued.credential, issued.secret, 1499)
    assert not proves_token(issued.credential, issued.secret, 1500)
    forever = make_token(1000)
    assert proves_token(forever.credential, forever.secret, 2**60)


def test_no_other_text_proves_it() -> None:
    issued, other = make_token(0), make_token(0)
    secret = issued.secret
    swapped = f"bb_{issued.credential.id}_{other.secret[-43:]}"
    for text in ("", "bb_", secret[:-1], secret + "x", secret.upper(), f" {secret}", other.secret, swapped, "é" * 59):
        assert not proves_token(issued.credential, text, 0)
    password = msgspec.structs.replace(issued.credential, kind="password")
    assert not proves_token(password, secret, 0)


@pytest.mark.parametrize("text", ["", "bb_", "bb_0123456789ab_", "Bearer x", "\udcff"])
def test_other_texts_have_no_id(text: str) -> None:
    assert id_of_token(text) is None


def test_the_secret_is_neither_stored_nor_shown() -> None:
    issued = make_token(0)
    assert issued.secret[-43:] not in repr(issued)
    assert issued.secret[-43:].encode() not in msgspec.json.encode(issued.credential)
    damaged = msgspec.structs.replace(issued.credential, data={})
    assert not proves_token(damaged, issued.secret, 0)
    assert not proves_token(damaged, "", 0)
