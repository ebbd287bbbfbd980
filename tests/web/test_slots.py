"""Slots for answers that take long, and room for bodies: one principal never has all of them."""

import pytest
from aiohttp import web

from babelbus.core.access import NOBODY, Identity
from babelbus.web.slots import Room, Slots

ALICE, BOB, CAROL = (Identity("admin", name, None) for name in ("alice", "bob", "carol"))


def test_a_principal_holds_half_of_the_slots_at_the_most() -> None:
    slots = Slots("searches", 4)
    with slots.take(ALICE), slots.take(ALICE):
        with pytest.raises(web.HTTPServiceUnavailable) as refused, slots.take(ALICE):
            pass
        assert refused.value.text == "2 searches of 'alice' run already, its limit"
        with slots.take(BOB), slots.take(BOB):
            assert slots.taken == 4
            with pytest.raises(web.HTTPServiceUnavailable) as refused, slots.take(CAROL):
                pass
            assert refused.value.text == "4 searches run already, which is the limit"
    assert slots.taken == 0


def test_a_principal_holds_half_of_the_room_at_the_most_and_the_administrator_any() -> None:
    room = Room(100)
    alice, bob, carol = (Identity("admin", name, NOBODY.rights) for name in ("alice", "bob", "carol"))
    room.take(alice, 30)
    room.take(alice, 20)
    with pytest.raises(web.HTTPServiceUnavailable) as refused:
        room.take(alice, 1)
    assert refused.value.text == "requests of 'alice' with 50 bytes are under way, its limit"
    room.take(bob, 50)
    with pytest.raises(web.HTTPServiceUnavailable) as refused:
        room.take(carol, 1)
    assert refused.value.text == "requests of 100 bytes are under way, the limit"
    room.take(ALICE, 1_000)
    room.give_back(ALICE, 1_000)
    room.give_back(bob, 50)
    room.take(carol, 50)
    room.give_back(carol, 50)
    room.give_back(alice, 50)
    assert room.taken == 0
