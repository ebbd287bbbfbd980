"""Replays of signed messages, and the wait of a client that guesses secrets."""

import pytest

from babelbus.identities.guessing import Guessing
from babelbus.metrics import Metrics
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.errors import AuthenticationError, MalformedMessageError
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.proofs import Prover, ReplayGuard
from tests.support.clock import ManualClock


def message(signature: str = "ab" * 32, **headers: str) -> Message:
    return Message({"apiKey": "key", "signature": signature, **headers})


def test_a_signature_is_admitted_once_within_the_window() -> None:
    guard = ReplayGuard(window_seconds=60, entries_max=10)
    guard.admit(message(id="1"), "a", 100)
    with pytest.raises(AuthenticationError):
        guard.admit(message("AB" * 32, id="1"), "a", 159)
    guard.admit(message(id="1"), "a", 219)


def test_an_id_that_was_not_signed_may_be_struck_or_changed_and_it_is_a_replay_all_the_same() -> None:
    guard = ReplayGuard(window_seconds=60)
    guard.admit(message(id="1"), "a", 100)
    for connection in ("a", "b"):
        for replay in (message(), message(id="2"), message(ID="1")):
            with pytest.raises(AuthenticationError):
                guard.admit(replay, connection, 101)


def test_a_message_without_an_id_is_repeated_by_its_own_connection_alone() -> None:
    guard = ReplayGuard(window_seconds=60)
    for second in (100, 101, 159, 200):
        guard.admit(message(), "a", second)
    for replay in (message(), message(id="1")):
        with pytest.raises(AuthenticationError):
            guard.admit(replay, "b", 201)
    with pytest.raises(AuthenticationError):
        guard.admit(message(id="1"), "a", 202)
    guard.admit(message(), "a", 203)
    guard.admit(message(), "b", 300)


def test_the_guards_memory_is_bounded_and_it_forgets_the_oldest_first() -> None:
    guard = ReplayGuard(window_seconds=60, entries_max=3)
    for number in range(5):
        guard.admit(message(f"{number:064x}", id="1"), "a", 100)
    assert len(guard._seen) == 3
    with pytest.raises(AuthenticationError):
        guard.admit(message(f"{2:064x}", id="1"), "a", 101)
    guard.admit(message(f"{0:064x}", id="1"), "a", 101)
    guard.admit(message(f"{9:064x}", id="1"), "a", 1000)
    assert len(guard._seen) == 1


def test_the_guard_takes_no_signature_that_is_no_hex() -> None:
    with pytest.raises(MalformedMessageError):
        ReplayGuard(60, 3).admit(message("xyz"), "a", 0)


class House:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.door = Guessing(self.clock, self.metrics).door("zbus")
        self.looked_at = 0

    def prover(self, address: str = "10.0.0.1:1") -> Prover:
        return Prover(self.door, None, self.clock.monotonic, address, "a")

    def right(self) -> str:
        self.looked_at += 1
        return "key"

    def wrong(self) -> str:
        self.looked_at += 1
        raise AuthenticationError(m.SIGNATURE_MISMATCHED)


def test_a_client_that_guesses_waits_and_its_signatures_are_not_looked_at() -> None:
    house = House()
    for _ in range(1000):
        with pytest.raises(AuthenticationError):
            house.prover().check(message(), house.wrong)
    assert house.looked_at == 1
    with pytest.raises(AuthenticationError, match="too many wrong signatures"):
        house.prover().check(message(), house.right)
    house.prover("10.0.0.2:1").check(message(), house.right)
    house.prover().check(Message({"apiKey": "other", "signature": "00"}), house.right)
    house.clock.advance(1)
    house.prover().check(message(), house.right)
    sample = house.metrics.registry.get_sample_value
    assert sample("babelbus_proofs_failed_total", {"protocol": "zbus"}) == 1
    assert sample("babelbus_proofs_delayed_total", {"protocol": "zbus"}) == 1000


def test_a_connection_that_proved_its_key_goes_on_while_others_of_its_address_guess() -> None:
    house = House()
    proved = house.prover()
    proved.check(message(), house.right)
    with pytest.raises(AuthenticationError):
        house.prover().check(message(), house.wrong)
    proved.check(message(), house.right)


def test_a_message_without_a_proof_is_no_guess() -> None:
    house = House()
    for headers in ({}, {"apiKey": "key"}, {"signature": "00"}):
        with pytest.raises(AuthenticationError):
            house.prover().check(Message(headers), house.wrong)
    house.prover().check(message(), house.right)
