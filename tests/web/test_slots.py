"""Slots for answers that take long: one principal never has all of them."""

import pytest
from aiohttp import web

from babelbus.core.access import Identity
from babelbus.web.slots import Slots

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
