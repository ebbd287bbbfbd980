"""Places for answers that take long: one principal never has all of them."""

import pytest
from aiohttp import web

from babelbus.core.access import Identity
from babelbus.web.places import Places

ALICE, BOB, CAROL = (Identity("admin", name, None) for name in ("alice", "bob", "carol"))


def test_a_principal_holds_half_of_the_places_at_the_most() -> None:
    places = Places("searches", 4)
    with places.take(ALICE), places.take(ALICE):
        with pytest.raises(web.HTTPServiceUnavailable) as refused, places.take(ALICE):
            pass
        assert refused.value.text == "2 searches of 'alice' run already, its limit"
        with places.take(BOB), places.take(BOB):
            assert places.taken == 4
            with pytest.raises(web.HTTPServiceUnavailable) as refused, places.take(CAROL):
                pass
            assert refused.value.text == "4 searches run already, which is the limit"
    assert places.taken == 0
