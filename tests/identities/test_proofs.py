"""The proofs of a server follow the table of principals."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.config import AccessSettings
from babelbus.identities.directory import make_process
from babelbus.identities.passwords import make_password
from babelbus.identities.proofs import Proofs
from babelbus.identities.tokens import make_token
from babelbus.metrics import Metrics
from tests.support.clock import ManualClock

PASSWORD = "correct horse"


@pytest.fixture
def proofs(tmp_path: Path) -> Iterator[Proofs]:
    made = Proofs(str(tmp_path), ManualClock(), Metrics(), AccessSettings())
    yield made
    made.close()


def test_a_proof_goes_from_one_principal_to_another_in_one_change(proofs: Proofs) -> None:
    process = make_process(0, uid=7)
    proofs.update({"bob": (process,), "alice": ()})
    assert proofs.directory.by_process(7, ()) == "bob"
    proofs.update({"alice": (process,), "bob": ()})
    assert proofs.directory.by_process(7, ()) == "alice"
    proofs.update({})
    assert proofs.directory.by_process(7, ()) is None


def test_of_two_principals_with_one_proof_the_first_has_it_until_it_goes(proofs: Proofs) -> None:
    process = make_process(0, uid=7)
    proofs.update({"alice": (process,), "bob": (process,)})
    assert proofs.directory.by_process(7, ()) == "alice"
    proofs.update({"bob": (process,)})
    assert proofs.directory.by_process(7, ()) == "bob"


def test_a_password_that_was_verified_is_forgotten_when_its_principal_changes(proofs: Proofs) -> None:
    kept, token = make_password(PASSWORD, 0), make_token(0)
    proofs.update({"alice": (kept,), "bob": (token.credential,)})
    assert asyncio.run(proofs.passwords.verify("alice", PASSWORD))
    assert proofs.passwords.proved("alice", PASSWORD) is not None
    proofs.update({"alice": (kept,)})
    assert proofs.passwords.proved("alice", PASSWORD) is not None
    assert proofs.directory.find_token(token.secret) is None
    proofs.update({"alice": (kept, token.credential)})
    assert proofs.passwords.proved("alice", PASSWORD) is None
    proof = proofs.directory.find_token(token.secret)
    assert proof is not None
    assert proof[0] == "alice"
