"""What a seek would do, told before it is done."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.core.access import NOBODY, SERVER, AccessRefusedError
from babelbus.core.groups.partition_cursor import SeekPreview
from babelbus.core.groups.settings import BEGINNING, END, GroupSettings, Place, at_offset
from tests.core.groups.support import Crew, Taker
from tests.support.bus import in_loop, turns


def figures(preview: SeekPreview) -> tuple[int, int, int]:
    return preview.again, preview.skipped, preview.in_flight


@in_loop
async def test_a_preview_counts_what_comes_again_and_what_is_skipped_and_changes_nothing() -> None:
    crew = Crew(partitions=2)
    group = crew.group(GroupSettings(ack="explicit", order="none"))
    crew.publish(*range(8), key=b"k")  # all of them in one partition
    taker = Taker(group, window=4)
    await turns()
    taker.member.ack([one for one in taker.got if one.offset == 1])
    await turns()
    before = group.info()
    (number,) = {one.partition for one in taker.got}
    preview = group.preview_seek(at_offset(3, number), SERVER)
    assert [one.partition for one in preview] == [number]
    # Delivered: 0 to 4, of which 1 is done; 0 and 2 are skipped, 3 and 4 come again.
    assert figures(preview[0]) == (2, 2, 4)
    assert (preview[0].committed, preview[0].position, preview[0].target, preview[0].end) == (0, 5, 3, 8)
    assert [figures(one) for one in group.preview_seek(END, SERVER)] == [
        (0, 7, 4) if at == number else (0, 0, 0) for at in range(2)
    ]
    assert figures(group.preview_seek(BEGINNING, SERVER)[number]) == (5, 0, 4)
    assert figures(group.preview_seek(at_offset(99), SERVER)[number]) == (0, 7, 4)
    assert group.info() == before
    with pytest.raises(AccessRefusedError):
        group.preview_seek(END, NOBODY)
    await crew.close()


@in_loop
async def test_a_preview_knows_what_was_acked_out_of_order_before_a_restart() -> None:
    crew = Crew()
    taker = Taker(crew.group())
    crew.publish(*range(6))
    await turns()
    taker.member.ack([one for one in taker.got if one.offset in (2, 3)])
    again = await crew.restart()
    group = again.group()
    assert group.info().cursors[0].position == 0
    (preview,) = group.preview_seek(at_offset(3), SERVER)
    assert figures(preview) == (1, 2, 0)  # 3 was done and comes again; 0 and 1 are not done
    (preview,) = group.preview_seek(BEGINNING, SERVER)
    assert figures(preview) == (2, 0, 0)
    await again.close()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.sets(st.integers(0, 11)),
    st.sampled_from([BEGINNING, END, *map(at_offset, range(14))]),
)
def test_a_preview_is_what_the_seek_does(published: int, window: int, acked: set[int], place: Place) -> None:
    @in_loop
    async def test() -> None:
        crew = Crew()
        group = crew.group(GroupSettings(ack="explicit"))
        crew.publish(*range(published))
        taker = Taker(group, window=window)
        await turns()
        delivered = set(taker.numbers)
        done = acked & delivered
        taker.member.ack([one for one in taker.got if one.offset in done])
        await turns()
        delivered = set(taker.numbers)
        (preview,) = group.preview_seek(place, SERVER)
        taker.member.hold()
        group.seek(place, SERVER)
        taker.clear()
        taker.member.window = None
        taker.member.resume()
        await turns()
        came = set(taker.numbers) if preview.target <= published else set(range(preview.target, published))
        assert preview.again == len(came & delivered)
        assert preview.skipped == len(set(range(published)) - done - came)
        assert preview.in_flight == len(delivered - done)
        await crew.close()

    test()
