"""Pages of many names, with and without rights."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.core.state import paging
from babelbus.core.state.paging import PageRequest, choose_page


@settings(deadline=None)
@given(
    st.lists(st.text("aBc/", max_size=4), unique=True),
    st.integers(1, 5),
    st.text("abc", max_size=1),
    st.booleans(),
    st.integers(1, 6),
)
def test_all_pages_together_have_each_name_once_in_order(
    names: list[str], count: int, search: str, guarded: bool, scan_max: int
) -> None:
    async def run() -> None:
        may_see = (lambda name: "c" not in name) if guarded else None
        wanted = sorted(name for name in names if search in name.lower() and (may_see is None or may_see(name)))
        seen: list[str] = []
        after = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paging, "SCAN_MAX", scan_max)
            while True:
                page = await choose_page(names, PageRequest(count, after, search), may_see)
                assert len(page.names) <= count
                assert page.total == (None if guarded else len(wanted))
                seen += page.names
                after = page.after
                if after is None:
                    break
        assert seen == wanted

    asyncio.run(run())


def test_a_hundred_thousand_names_are_paged_off_the_loop() -> None:
    names = [f"{number:06}" for number in reversed(range(100_000))]
    page = asyncio.run(choose_page(names, PageRequest(3, "000500", "5")))
    assert page.names == ["000501", "000502", "000503"]
    assert page.after == "000503"
