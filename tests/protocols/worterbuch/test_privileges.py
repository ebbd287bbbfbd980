"""Tokens: what proves something, every way to prove nothing, and what is granted (section 10)."""

import base64
import hashlib
import hmac
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import ConfigError
from babelbus.identities.jwts import TOKEN_BYTES_MAX
from babelbus.protocols.worterbuch.errors import UnauthorizedError
from babelbus.protocols.worterbuch.privileges import (
    Privilege,
    Privileges,
    Verifier,
    hashed_token,
    proves_secret,
)

SECRET = "a secret of a test, long enough for every HMAC that the library knows"
CLAIMS: dict[str, Any] = {
    "sub": "me",
    "name": "My Name",
    "exp": 1000,
    "worterbuchPrivileges": {"read": ["a/#", "b"], "write": ["?"], "profile": True, "web-login": True},
    "extra": [1],
}
PROVED = Privileges(
    "me", "My Name", ("a/#", "b"), ("?",), (), profile=True, web_login=True, ends_seconds=1060, principal="me"
)


def public_pem(key: Any) -> str:
    return str(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode())


EC_KEY, ED_KEY = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()


def signed(claims: object = CLAIMS, key: Any = SECRET, algorithm: str = "HS256", **header: Any) -> str:
    return jwt.PyJWS().encode(json.dumps(claims).encode(), key, algorithm, headers={"typ": "JWT", **header})


def without(claim: str) -> dict[str, Any]:
    return {name: value for name, value in CLAIMS.items() if name != claim}


@pytest.mark.parametrize(
    ("configured", "key", "algorithm"),
    [(SECRET, SECRET, "HS256"), (public_pem(EC_KEY), EC_KEY, "ES256"), (public_pem(ED_KEY), ED_KEY, "EdDSA")],
)
def test_the_configured_key_decides_which_tokens_prove_something(configured: str, key: Any, algorithm: str) -> None:
    verifier = Verifier(configured)
    assert verifier.verify(signed(CLAIMS, key, algorithm), 0.0) == PROVED
    for other, other_algorithm in ((SECRET, "HS256"), (SECRET, "HS512"), (EC_KEY, "ES256"), (ED_KEY, "EdDSA")):
        if other_algorithm != algorithm:
            with pytest.raises(UnauthorizedError):
                verifier.verify(signed(CLAIMS, other, other_algorithm), 0.0)


def test_a_public_key_is_no_secret_to_sign_with() -> None:
    pem = public_pem(EC_KEY)
    head, body = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in ({"alg": "HS256"}, CLAIMS)
    )
    signature = base64.urlsafe_b64encode(hmac.new(pem.encode(), head + b"." + body, hashlib.sha256).digest())
    forged = b".".join((head, body, signature.rstrip(b"="))).decode()
    with pytest.raises(UnauthorizedError):
        Verifier(pem).verify(forged, 0.0)


def test_a_short_secret_works_as_it_does_upstream() -> None:
    head, body = (
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in ({"alg": "HS256"}, CLAIMS)
    )
    signature = hmac.new(b"x", head + b"." + body, hashlib.sha256).digest()
    token = b".".join((head, body, base64.urlsafe_b64encode(signature).rstrip(b"="))).decode()
    assert Verifier("x").verify(token, 0.0) == PROVED


WRONG_CLAIMS: list[object] = [
    *(without(claim) for claim in ("sub", "name", "exp", "worterbuchPrivileges")),
    *({**CLAIMS, "sub": None}, {**CLAIMS, "sub": 1}, {**CLAIMS, "name": None}, {**CLAIMS, "name": 1}),
    *({**CLAIMS, "exp": None}, {**CLAIMS, "exp": "1000"}, {**CLAIMS, "exp": True}, {**CLAIMS, "exp": -1}),
    *({**CLAIMS, "exp": 939}, {**CLAIMS, "exp": 939.9}),
    *({**CLAIMS, "aud": None}, {**CLAIMS, "aud": "us"}, {**CLAIMS, "aud": ["us"]}),
    *({**CLAIMS, "worterbuchPrivileges": None}, {**CLAIMS, "worterbuchPrivileges": "read"}),
    *({**CLAIMS, "worterbuchPrivileges": {"read": "a"}}, {**CLAIMS, "worterbuchPrivileges": {"write": [1]}}),
    {**CLAIMS, "worterbuchPrivileges": {"web-login": 1}},
    *([], None, "x"),
]


@pytest.mark.parametrize(
    "token",
    [
        *("", ".", "..", "a.b.c", "é", "\ud800", "a" * (TOKEN_BYTES_MAX + 1)),
        signed(key="another secret of many characters"),
        signed(algorithm="HS384"),
        signed(algorithm="HS512"),
        signed(key=None, algorithm="none"),
        signed()[:-2] + "AA",
        signed().rpartition(".")[0] + ".",
        base64.urlsafe_b64encode(b'{"alg":' + b"[" * 20_000).decode() + ".e30.AA",
        signed(crit=["exp"]),
        *map(signed, WRONG_CLAIMS),
    ],
)
def test_what_is_no_valid_token_proves_nothing(token: str) -> None:
    with pytest.raises(UnauthorizedError) as caught:
        Verifier(SECRET).verify(token, 1000.0)
    assert caught.value.code == 14
    assert len(token) < 8 or token not in str(caught.value)


@given(
    st.text(max_size=60) | st.binary(max_size=60).map(lambda part: base64.urlsafe_b64encode(part).decode() + ".e30.")
)
def test_garbage_proves_nothing_and_raises_our_error_only(token: str) -> None:
    with pytest.raises(UnauthorizedError):
        Verifier(SECRET).verify(token, 0.0)


@pytest.mark.parametrize(("now_seconds", "valid"), [(0.0, True), (1000.0, True), (1060.0, True), (1060.1, False)])
def test_a_token_is_good_until_a_minute_after_its_end(now_seconds: float, valid: bool) -> None:
    token = signed({**CLAIMS, "iat": 10**10})  # nobody looks at it
    if valid:
        assert Verifier(SECRET).verify(token, now_seconds) == PROVED
    else:
        with pytest.raises(UnauthorizedError):
            Verifier(SECRET).verify(token, now_seconds)


def test_a_token_is_good_from_a_minute_before_its_beginning() -> None:
    token = signed({**CLAIMS, "nbf": 500})
    assert Verifier(SECRET).verify(token, 440.0) == PROVED
    with pytest.raises(UnauthorizedError, match="not valid yet"):
        Verifier(SECRET).verify(token, 439.9)


def test_a_secret_that_could_be_guessed_is_known_as_such() -> None:
    assert Verifier("x" * 31).guessable
    assert not Verifier("x" * 32).guessable
    assert not Verifier(public_pem(ED_KEY)).guessable


def test_privileges_that_are_absent_or_null_grant_nothing() -> None:
    granted = {"read": None, "profile": None}
    proved = Verifier(SECRET).verify(signed({**CLAIMS, "exp": 9.5, "worterbuchPrivileges": granted}), 0.0)
    assert proved == Privileges("me", "My Name", ends_seconds=69.5, principal="me")
    assert not any(proved.may(privilege, "a") for privilege in ALL)


ALL: tuple[Privilege, ...] = ("read", "write", "delete")


def test_a_privilege_is_had_for_what_one_of_its_patterns_covers() -> None:
    privileges = Privileges("me", "me", read=("a/#", "b"), write=("c/?",), delete=("#",))
    assert privileges.may("read", "a/x")
    assert privileges.may("read", "a/#")
    assert privileges.may("read", "b")
    assert not privileges.may("read", "a")
    assert not privileges.may("read", "#")
    assert privileges.may("write", "c/?")
    assert not privileges.may("write", "a/x")
    assert privileges.may("delete", "#")
    everything = Privileges("", "", ("#",), ("#",), ("#",))
    assert all(everything.may(privilege, pattern) for privilege in ALL for pattern in ("#", "?", "", "a/b"))


@pytest.mark.parametrize(
    "configured",
    [
        *("", " \n", "-----BEGIN PUBLIC KEY-----\nx\n-----END PUBLIC KEY-----\n"),
        public_pem(rsa.generate_private_key(65537, 1024)),
        public_pem(ec.generate_private_key(ec.SECP256K1())),
        EC_KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
    ],
)
def test_a_key_that_verifies_nothing_is_a_mistake_of_the_configuration(configured: str) -> None:
    with pytest.raises(ConfigError):
        Verifier(configured)


def test_clients_of_0_42_prove_the_secret_by_its_hash_with_their_id() -> None:
    assert hashed_token("id", "secret") == hashlib.sha256(b"idsecret").hexdigest()
    assert proves_secret(hashed_token("id", "secret"), "id", "secret")
    for wrong in ("", "x", "\ud800", hashed_token("id", "secret").upper(), hashed_token("id2", "secret")):
        assert not proves_secret(wrong, "id", "secret")
