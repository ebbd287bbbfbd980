"""Passwords: what is verified, how often a hash is made, what may wait, and what a change of the table does."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from babelbus.identities import passwords
from babelbus.identities.credential import Credential
from babelbus.identities.errors import CredentialError, InvalidProofError, TooManyProofsError
from babelbus.identities.passwords import Passwords, check_hash, issue_password, make_password
from babelbus.metrics import Metrics
from tests.support.bus import in_loop
from tests.support.clock import ManualClock
from tests.support.passwords import CHEAP, REAL_COST

RIGHT = "correct horse battery staple"


class House:
    """A table of one principal, and a pool whose hashes are counted and can be held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.table: dict[str, list[Credential]] = {"alice": [make_password(RIGHT, self.clock.now_ms())]}
        self.hashes = 0
        self.may_hash = threading.Event()
        self.may_hash.set()
        self.entered = threading.Semaphore(0)
        check = passwords._is_password

        def counted(stored: bytes, password: bytes) -> bool:
            self.hashes += 1
            self.entered.release()
            self.may_hash.wait()
            return check(stored, password)

        monkeypatch.setattr(passwords, "_is_password", counted)
        self.passwords = Passwords(self.lookup, self.clock, self.metrics, **options)

    def lookup(self, user: str) -> Sequence[Credential]:
        return self.table.get(user, [])


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    made = House(monkeypatch, waiting_max=10)
    yield made
    made.may_hash.set()
    made.passwords.close()


@in_loop
async def test_a_password_proves_its_principal_and_nothing_else_does(house: House) -> None:
    verify = house.passwords.verify
    assert await verify("alice", RIGHT)
    for user, password in (("alice", "wrong"), ("alice", ""), ("bob", RIGHT), ("", ""), ("alice", RIGHT + "\0")):
        assert not await verify(user, password)
    assert not await verify("alice", "\udcff" * 9)
    assert not await verify("alice", "x" * 100_000)


@in_loop
async def test_one_hash_is_made_for_every_wrong_proof_whatever_is_wrong(house: House) -> None:
    for user, password in (("alice", "wrong"), ("nobody", "wrong"), ("nobody", "x" * 100_000)):
        before = house.hashes
        assert not await house.passwords.verify(user, password)
        assert house.hashes == before + 1


@in_loop
async def test_a_verified_password_costs_no_hash_for_five_minutes(house: House) -> None:
    assert await house.passwords.verify("alice", RIGHT)
    house.clock.advance(299)
    assert await house.passwords.verify("alice", RIGHT)
    assert house.hashes == 1
    house.clock.advance(1)
    assert house.passwords.proved("alice", RIGHT) is None
    assert await house.passwords.verify("alice", RIGHT)
    assert house.hashes == 2


@in_loop
async def test_a_clock_that_jumps_does_not_lengthen_what_is_cached(house: House) -> None:
    assert await house.passwords.verify("alice", RIGHT)
    house.clock.advance(301)
    house.clock.jump_to(0)
    assert house.passwords.proved("alice", RIGHT) is None


@in_loop
async def test_a_credential_that_is_replaced_ends_what_was_cached_at_once(house: House) -> None:
    assert await house.passwords.verify("alice", RIGHT)
    house.table["alice"] = [make_password("another password", 0)]
    assert house.passwords.proved("alice", RIGHT) is None
    assert not await house.passwords.verify("alice", RIGHT)
    assert await house.passwords.verify("alice", "another password")
    house.passwords.forget("alice")
    assert house.passwords.proved("alice", "another password") is None


@in_loop
async def test_an_expired_credential_proves_nothing_even_if_it_is_cached(house: House) -> None:
    now = house.clock.now_ms()
    house.table["alice"] = [msgspec.structs.replace(make_password(RIGHT, now), expires=now + 10_000)]
    assert await house.passwords.verify("alice", RIGHT)
    house.clock.advance(10)
    assert not await house.passwords.verify("alice", RIGHT)


@in_loop
async def test_a_password_whose_entry_is_dropped_before_the_answer_still_names_its_credential(house: House) -> None:
    """The credential says when the proof ends: without its name a proof would never end."""
    house.may_hash.clear()
    checking = asyncio.ensure_future(house.passwords.verify("alice", RIGHT))
    await asyncio.to_thread(house.entered.acquire)
    (running,) = house.passwords._running.values()
    running.add_done_callback(lambda _: house.passwords.forget("alice"))  # behind the callback that keeps the entry
    house.may_hash.set()
    assert await checking == house.table["alice"][0]
    assert house.passwords.proved("alice", RIGHT) is None


@in_loop
async def test_a_password_that_is_changed_while_its_hash_is_made_is_not_accepted(house: House) -> None:
    house.may_hash.clear()
    checking = asyncio.ensure_future(house.passwords.verify("alice", RIGHT))
    await asyncio.to_thread(house.entered.acquire)
    house.table["alice"] = []
    house.may_hash.set()
    assert not await checking
    assert house.passwords.proved("alice", RIGHT) is None


@in_loop
async def test_the_same_pair_is_hashed_once_for_all_who_ask_meanwhile(house: House) -> None:
    house.may_hash.clear()
    checks = [asyncio.ensure_future(house.passwords.verify("alice", RIGHT, "10.0.0.1")) for _ in range(50)]
    await asyncio.to_thread(house.entered.acquire)
    checks[0].cancel()  # who leaves takes nothing from the others
    house.may_hash.set()
    assert all(await asyncio.gather(*checks[1:]))
    assert house.hashes == 1


@in_loop
async def test_the_queue_is_bounded_for_all_and_for_one_address(house: House) -> None:
    house.may_hash.clear()
    waiting = [asyncio.ensure_future(house.passwords.verify("alice", f"wrong {n}", "10.0.0.1")) for n in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyProofsError, match="too many passwords"):
        await house.passwords.verify("alice", "wrong", "10.0.0.1")
    waiting += [asyncio.ensure_future(house.passwords.verify("alice", "wrong", f"10.0.0.{n}")) for n in (2,)]
    waiting += [asyncio.ensure_future(house.passwords.verify("alice", RIGHT, "10.0.0.3"))]
    await asyncio.sleep(0)
    with pytest.raises(TooManyProofsError):
        await house.passwords.verify("bob", "wrong", "10.0.0.4")
    assert house.metrics.registry.get_sample_value("babelbus_passwords_waiting") == 10
    assert house.metrics.registry.get_sample_value("babelbus_passwords_refused_total") == 2
    house.may_hash.set()
    assert [proof is not None for proof in await asyncio.gather(*waiting)] == [False] * 9 + [True]
    await asyncio.sleep(0)
    assert house.metrics.registry.get_sample_value("babelbus_passwords_waiting") == 0
    assert await house.passwords.verify("alice", RIGHT, "10.0.0.1")


@in_loop
async def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch, cache_entries_max=2)
    for user in ("a", "b", "c"):
        house.table[user] = house.table["alice"]
        assert await house.passwords.verify(user, RIGHT)
    assert [house.passwords.proved(user, RIGHT) is not None for user in "abc"] == [False, True, True]
    house.passwords.close()


@pytest.mark.parametrize(
    "parameters", ["m=1048576,t=2,p=1", "m=65536,t=5,p=1", "m=65536,t=2,p=2", "m=0,t=1,p=1", "m=65536,t=0,p=1"]
)
@in_loop
async def test_a_stored_hash_may_not_ask_for_more_than_the_limits(house: House, parameters: str) -> None:
    (good,) = house.table["alice"]
    hashed = str(good.data["hash"]).replace(CHEAP, parameters)
    assert parameters in hashed
    bad = msgspec.structs.replace(good, data={"hash": hashed})
    with pytest.raises(CredentialError):
        check_hash(bad)
    house.table["alice"] = [bad, good]
    assert await house.passwords.verify("alice", RIGHT)
    house.table["alice"] = [bad]
    before = house.hashes
    assert not await house.passwords.verify("alice", RIGHT)
    assert house.hashes == before + 1


def test_passwords_are_neither_short_nor_endless_and_issued_ones_are_shown_once() -> None:
    for password in ("", "1234567", "x" * 1025):
        with pytest.raises(InvalidProofError):
            make_password(password, 0)
    issued = issue_password(0)
    assert len(issued.secret) == 24
    assert issued.secret not in repr(issued)
    assert issued.secret.encode() not in msgspec.json.encode(issued.credential)


def test_a_hash_costs_as_much_as_libsodium_asks_of_interactive_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(passwords._COSTS, "interactive", REAL_COST)
    assert b"m=65536,t=2,p=1" in check_hash(make_password(RIGHT, 0))


def test_a_moderate_hash_is_within_the_limits() -> None:
    hashed = check_hash(make_password(RIGHT, 0, strength="moderate"))
    assert b"m=262144,t=3,p=1" in hashed
