"""JWTs: which key proves with which algorithm, every way to prove nothing, and until when a proof holds."""

import base64
import hashlib
import hmac
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import ConfigError
from babelbus.identities.errors import InvalidProofError
from babelbus.identities.jwts import Key, OneKey, Verifier, key_of, public_key, secret_key
from tests.support.clock import ManualClock

SECRET = "a secret of a test, long enough for every HMAC that the library knows, and longer"
RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEYS = {name: ec.generate_private_key(curve) for name, curve in
           (("ES256", ec.SECP256R1()), ("ES384", ec.SECP384R1()), ("ES512", ec.SECP521R1()))}  # fmt: skip
ED_KEY = ed25519.Ed25519PrivateKey.generate()
CLAIMS: dict[str, Any] = {"sub": "alice", "exp": 1000}
SIGNERS: list[tuple[str, Any]] = [
    ("HS256", SECRET),
    *((name, RSA_KEY) for name in ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")),
    *EC_KEYS.items(),
    ("EdDSA", ED_KEY),
]


def pem(key: Any) -> str:
    return str(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode())


def signed(claims: object = CLAIMS, key: Any = SECRET, algorithm: str = "HS256", **header: Any) -> str:
    return jwt.PyJWS().encode(json.dumps(claims).encode(), key, algorithm, headers={"typ": "JWT", **header})


def configured(key: Any) -> Key:
    return secret_key(key) if isinstance(key, str) else public_key(pem(key))


def verifier(key: Any = SECRET, **options: Any) -> Verifier:
    return Verifier(OneKey(configured(key)), **options)


@pytest.mark.parametrize(("algorithm", "key"), SIGNERS)
def test_each_family_of_keys_allows_its_own_algorithms_and_no_other(algorithm: str, key: Any) -> None:
    checker = verifier(key)
    assert checker.verify(signed(CLAIMS, key, algorithm), 0).principal == "alice"
    for other, other_key in SIGNERS:
        if other_key is not key:
            with pytest.raises(InvalidProofError):
                checker.verify(signed(CLAIMS, other_key, other), 0)
    with pytest.raises(InvalidProofError):
        checker.verify(signed(CLAIMS, SECRET, "HS512"), 0)


def raw(header: object, claims: object, secret: bytes | None) -> str:
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    signature = b"" if secret is None else hmac.new(secret, b".".join(parts), hashlib.sha256).digest()
    return b".".join((*parts, base64.urlsafe_b64encode(signature).rstrip(b"="))).decode()


@pytest.mark.parametrize("key", [RSA_KEY, EC_KEYS["ES256"], ED_KEY])
def test_a_public_key_is_no_secret_to_sign_with(key: Any) -> None:
    for claimed in ("HS256", "HS384", "none", "None", ""):
        with pytest.raises(InvalidProofError):
            verifier(key).verify(raw({"alg": claimed}, CLAIMS, pem(key).encode()), 0)


def test_a_token_without_a_signature_proves_nothing() -> None:
    for key in (SECRET, RSA_KEY):
        headers: list[Any] = [{"alg": "none"}, {}, {"alg": None}, {"alg": ["HS256"]}, []]
        for header in headers:
            with pytest.raises(InvalidProofError):
                verifier(key).verify(raw(header, CLAIMS, None), 0)


def test_headers_that_name_a_key_of_the_clients_own_are_not_followed() -> None:
    own = rsa.generate_private_key(65537, 2048)
    jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(own.public_key()))
    for header in ({"jwk": jwk}, {"jku": "http://127.0.0.1:1/keys"}, {"x5u": "http://127.0.0.1:1/"}, {"kid": "../x"}):
        with pytest.raises(InvalidProofError):
            verifier(RSA_KEY).verify(signed(CLAIMS, own, "RS256", **header), 0)


def test_the_end_is_required_and_tells_the_session_how_long_it_may_live() -> None:
    clock = ManualClock(1_000_000)
    checker = verifier()
    proof = checker.verify(signed(), clock.now_ms() / 1000)
    assert proof.ends_seconds == 1060
    clock.jump_to(1_060_000)
    checker.verify(signed(), clock.now_ms() / 1000)
    clock.jump_to(1_060_001)
    with pytest.raises(InvalidProofError, match="expired"):
        checker.verify(signed(), clock.now_ms() / 1000)
    clock.jump_to(0)  # a clock that was set back: the token is good again, as it says
    checker.verify(signed(), clock.now_ms() / 1000)
    ends: list[Any] = [None, "1000", [1000], {}, True]
    for exp in ends:
        with pytest.raises(InvalidProofError):
            checker.verify(signed({"sub": "a", "exp": exp}), 0)
    with pytest.raises(InvalidProofError):
        checker.verify(signed({"sub": "a"}), 0)
    with pytest.raises(InvalidProofError):
        checker.verify(signed({"sub": "a", "exp": float("inf")}), 0)


def test_a_token_that_is_not_valid_yet_is_refused() -> None:
    token = signed(CLAIMS | {"nbf": 500})
    with pytest.raises(InvalidProofError, match="not valid yet"):
        verifier().verify(token, 439)
    assert verifier().verify(token, 440).principal == "alice"
    with pytest.raises(InvalidProofError):
        verifier().verify(signed(CLAIMS | {"nbf": "soon"}), 600)


def test_issuer_and_audience_are_checked_when_they_are_set() -> None:
    checker = verifier(issuer="https://id", audience="bus")
    good = CLAIMS | {"iss": "https://id", "aud": "bus"}
    assert checker.verify(signed(good), 0).principal == "alice"
    assert checker.verify(signed(good | {"aud": ["x", "bus"]}), 0).principal == "alice"
    bads: list[Any] = [
        {"iss": "https://id/"},
        {"iss": None},
        {"aud": "other"},
        {"aud": []},
        {"aud": None},
        {"aud": ["Bus"]},
    ]
    for bad in bads:
        with pytest.raises(InvalidProofError):
            checker.verify(signed(good | bad), 0)
    with pytest.raises(InvalidProofError, match="another audience"):
        verifier().verify(signed(CLAIMS | {"aud": "bus"}), 0)
    assert verifier().verify(signed(CLAIMS | {"iss": "anybody"}), 0).principal == "alice"


def test_the_name_of_the_principal_is_the_text_of_the_chosen_claim() -> None:
    checker = verifier(claim="preferred_username")
    assert checker.verify(signed(CLAIMS | {"preferred_username": "Zoë"}), 0).principal == "Zoë"
    for name in (None, "", 5, ["a"], "a\nb", "x" * 256, "\x00"):
        with pytest.raises(InvalidProofError):
            checker.verify(signed(CLAIMS | {"preferred_username": name}), 0)
    with pytest.raises(InvalidProofError, match="preferred_username"):
        checker.verify(signed(), 0)


@pytest.mark.parametrize("secret", ["x" * 31, "123456789"])
def test_a_short_secret_is_a_key_and_an_empty_one_is_none(secret: str) -> None:
    assert Verifier(OneKey(secret_key(secret))).verify(raw({"alg": "HS256"}, CLAIMS, secret.encode()), 0)
    for empty in ("", " ", "\n"):
        with pytest.raises(ConfigError, match="empty"):
            secret_key(empty)


def test_keys_of_other_kinds_are_refused() -> None:
    private = ED_KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    for bad in (
        private,
        pem(rsa.generate_private_key(65537, 1024)),
        pem(ec.generate_private_key(ec.SECP256K1())),
        pem(ed448.Ed448PrivateKey.generate()),
        pem(dsa.generate_private_key(1024)),
        "-----BEGIN PUBLIC KEY-----\nnothing\n-----END PUBLIC KEY-----\n",
        "",
    ):
        with pytest.raises(ConfigError):
            public_key(bad)


def jwk_of(key: Any, **more: Any) -> dict[str, Any]:
    kind = {rsa.RSAPrivateKey: "RSA", ec.EllipticCurvePrivateKey: "EC"}
    name = next((name for base, name in kind.items() if isinstance(key, base)), "OKP")
    algorithm: Any = {"RSA": jwt.algorithms.RSAAlgorithm, "EC": jwt.algorithms.ECAlgorithm}.get(
        name, jwt.algorithms.OKPAlgorithm
    )
    made: dict[str, Any] = json.loads(algorithm.to_jwk(key.public_key()))
    return made | more


def test_a_key_of_a_set_allows_what_its_family_and_itself_say() -> None:
    for algorithm, key in SIGNERS[1:]:
        whole, one = key_of(jwk_of(key)), key_of(jwk_of(key, alg=algorithm, use="sig", kid="1"))
        assert whole is not None
        assert one is not None
        assert algorithm in whole.algorithms
        assert one.algorithms == (algorithm,)
        others: list[Any] = ["HS256", "none", "ES256K", 5, []]
        for other in others:
            assert key_of(jwk_of(key, alg=other)) is None
        assert key_of(jwk_of(key, use="enc")) is None
        assert key_of(jwk_of(key, key_ops=["encrypt"])) is None
    secret = base64.urlsafe_b64encode(SECRET.encode()).decode()
    assert key_of({"kty": "oct", "k": secret, "alg": "HS256"}) is None
    private = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(RSA_KEY))
    assert "d" in private
    assert key_of(private) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=2)
)


@given(
    st.dictionaries(st.sampled_from(["kty", "crv", "n", "e", "x", "y", "use", "key_ops", "alg", "kid"]), json_values),
    st.sampled_from(["RSA", "EC", "OKP", "oct"]),
)
def test_no_content_of_a_key_makes_more_than_no_key(content: dict[str, Any], kind: str) -> None:
    key_of(content)
    key_of(content | {"kty": kind, "crv": {"EC": "P-256"}.get(kind, "Ed25519")})


@given(st.text(max_size=200) | st.tuples(st.text(max_size=30), st.text(max_size=30), st.text()).map(".".join))
def test_no_text_makes_more_than_a_refusal(token: str) -> None:
    for key in (SECRET, ED_KEY):
        with pytest.raises(InvalidProofError):
            verifier(key).verify(token, 0)


def test_a_long_token_is_refused_unread() -> None:
    with pytest.raises(InvalidProofError, match="limit 65536"):
        verifier().verify("x" * 65_537, 0)
