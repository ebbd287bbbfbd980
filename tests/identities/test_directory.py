"""Whose proof is it: each kind is found, nothing else is, and a change of the table counts at once."""

import datetime
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from babelbus.identities.credential import Credential, Kind
from babelbus.identities.directory import (
    Directory,
    DuplicateProofError,
    make_certificate,
    make_client_name,
    make_process,
    names_of,
)
from babelbus.identities.errors import CredentialError
from babelbus.identities.tokens import make_token
from babelbus.identities.vault import Vault, make_api_key
from tests.support.clock import ManualClock


class House:
    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.vault = Vault(str(folder))
        self.directory = Directory(self.vault, self.clock)
        self.now = self.clock.now_ms()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def certificate(*, uris: tuple[str, ...] = (), hosts: tuple[str, ...] = (), common: tuple[str, ...] = ()) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one) for one in common])
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, at, at + datetime.timedelta(1))
    names = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, hosts)]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def test_tokens_and_api_keys_are_found_until_they_expire_or_are_removed(house: House) -> None:
    directory, now = house.directory, house.now
    token, key = make_token(now, lifetime_ms=5000), make_api_key(house.vault, now, lifetime_ms=5000)
    directory.replace("alice", [token.credential, key.credential])
    name = str(key.credential.data["key"])
    proof = directory.find_token(token.secret)
    assert proof is not None
    assert proof[0] == "alice"
    found = directory.api_key(name)
    assert found is not None
    assert (found.principal, found.secret) == ("alice", key.secret)
    assert key.secret not in repr(found)
    assert directory.find_token(make_token(now).secret) is None
    assert directory.find_token(token.secret[:-1] + "A") is None or token.secret.endswith("A")
    assert directory.api_key("unknown") is None
    house.clock.jump_to(now + 5000)
    assert directory.find_token(token.secret) is None
    assert directory.api_key(name) is None
    house.clock.jump_to(now)
    directory.replace("alice", [key.credential])
    assert directory.find_token(token.secret) is None
    directory.remove("alice")
    directory.remove("alice")
    assert directory.api_key(name) is None


def test_a_client_certificate_is_asked_for_its_uri_then_its_dns_name_then_its_common_name(house: House) -> None:
    rows = {
        "by uri": make_client_name("uri", "spiffe://acme/device/1", 0),
        "by dns": make_client_name("dns", "Device1.acme.example.", 0),
        "by cn": make_client_name("cn", "device 1", 0),
    }
    for principal, row in rows.items():
        house.directory.replace(principal, [row])
    uris, hosts, common = ("spiffe://acme/device/1",), ("DEVICE1.acme.example",), ("device 1",)
    other = ("other",)

    def ask(shown: bytes) -> str | None:
        return house.directory.by_names(names_of(shown))

    assert ask(certificate(uris=uris, hosts=hosts, common=common)) == "by uri"
    assert ask(certificate(uris=("spiffe://acme/device/2", *uris), hosts=hosts)) == "by uri"
    assert ask(certificate(uris=other, hosts=hosts, common=common)) == "by dns"
    assert ask(certificate(uris=other, hosts=other, common=common)) == "by cn"
    assert ask(certificate(common=common)) == "by cn"
    assert ask(certificate(uris=other, hosts=other, common=other)) is None
    assert ask(certificate(uris=("device 1".replace(" ", ""),))) is None
    assert ask(certificate(common=("Device 1",))) is None
    assert ask(certificate(common=("spiffe://acme/device/1",))) is None  # a name of another kind
    assert names_of(certificate()) == []
    for bad in (b"", b"\x30", certificate()[:-1]):
        with pytest.raises(CredentialError):
            ask(bad)


def test_a_process_is_its_user_and_else_one_of_its_groups(house: House) -> None:
    house.directory.replace("root", [make_process(0, uid=0)])
    house.directory.replace("operators", [make_process(0, gid=27)])
    ask = house.directory.by_process
    assert ask(0, [27]) == "root"
    assert ask(1000, [5, 27]) == "operators"
    assert ask(27, [0]) is None
    for wrong in ({}, {"uid": 1, "gid": 1}):
        with pytest.raises(CredentialError):
            make_process(0, **wrong)


def test_a_certificate_of_jebp_is_found_by_its_fingerprint(house: House) -> None:
    house.directory.replace("console", [make_certificate("AB" * 32, 0)])
    assert house.directory.by_fingerprint("ab" * 32) == "console"
    assert house.directory.by_fingerprint("ac" * 32) is None
    for wrong in ("", "ab" * 31, "xy" * 32, "ab" * 33):
        with pytest.raises(CredentialError):
            make_certificate(wrong, 0)


def test_two_principals_never_share_a_proof(house: House) -> None:
    mine = make_process(0, uid=5)
    house.directory.replace("alice", [mine])
    token = make_token(0)
    with pytest.raises(DuplicateProofError, match="is one of 'alice' too"):
        house.directory.replace("bob", [token.credential, make_process(0, uid=5)])
    assert house.directory.find_token(token.secret) is None
    house.directory.replace("alice", [mine, token.credential])
    assert house.directory.by_process(5, []) == "alice"
    house.directory.replace("alice", [token.credential])
    house.directory.replace("bob", [mine])
    assert house.directory.by_process(5, []) == "bob"


def test_damaged_credentials_prove_nothing(house: House) -> None:
    kinds: tuple[Kind, ...] = ("password", "token", "api-key", "jebp", "tls", "peer")
    house.directory.replace("alice", [Credential(kind, f"{kind} 1", {}, 0) for kind in kinds])
    assert house.directory.find_token(make_token(0).secret) is None
    with pytest.raises(CredentialError):
        make_client_name("dns", " ", 0)


def test_a_credential_survives_being_written_and_read() -> None:
    for credential in (make_token(5, lifetime_ms=1).credential, make_process(5, gid=1), make_certificate("00" * 32, 5)):
        assert msgspec.json.decode(msgspec.json.encode(credential), type=Credential) == credential
